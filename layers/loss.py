"""The base of all losses: a scalar, and the gradient of its prediction."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..device import is_low
from ..dtensor import Blocks, Groups, Layout
from ..kernels import LossArrays
from ..kernels.memory import Workspace, buffer
from .layer import Layer, Node, Passes, Shape
from .needs import is_broadcast, operand_blocks, with_axes
from .targets import Judgement

if TYPE_CHECKING:
    from ..program.context import Context
    from ..program.operations import KernelSpec, Timing
    from ..program.views import Value, View

__all__ = [
    "BALANCED",
    "HOW_TO_COUNT",
    "LocalLoss",
    "Loss",
    "LossBlock",
    "LossNode",
    "LossOfKernel",
    "LossPlace",
    "LossTerm",
    "check_counts",
    "check_normalization",
    "loss_timing",
    "weights_view",
]

NORMALIZATIONS = ("count", "weights")
#: A weight that follows from how often classes occur in the training samples.
BALANCED = "balanced"
HOW_TO_COUNT = "train by the command line or halograd.fit, which count them, or give them to Network.balance()"


class LossNode(Node):
    """A loss in the graph. Losses are added, and multiplied by numbers: ``ce + 0.5 * dice``."""

    def __add__(self, other: Any) -> LossNode:
        from .total_loss import total_of

        return total_of(self, other)

    def __radd__(self, other: object) -> LossNode:
        if other != 0:  # sum() begins with it
            return NotImplemented
        return self

    def __mul__(self, other: Any) -> LossNode:
        from .total_loss import weighted

        return weighted(self, other)

    __rmul__ = __mul__

    def _affine(self, factor: float, shift: float) -> LossNode:
        if shift:
            raise TypeError(f"loss: expected losses to be added to it, got the number {shift}; it has no gradient")
        return self * factor


@dataclass(frozen=True)
class LossTerm:
    """One prediction beside its target, being lowered.

    Attributes
    ----------
    prediction, target
        Values that are cut alike.
    value
        Where the loss of this rank's block goes, float64 ``(1,)``.
    weight
        Of the term in the loss that is trained.
    timing
        What its kernel is priced by; None where something else is.
    weights
        Of the positions of this rank's block ``(n, *spatial, 1)``, or of its elements; packed. None: all count alike.
    """

    prediction: Value
    target: Value
    value: View
    weight: float = 1.0
    timing: Timing | None = None
    weights: View | None = None


class Loss(Layer):
    """A scalar computed of a prediction and a target that are cut alike, and perhaps of weights: ``loss(x, t, w)``.

    Weights are an input of the shape of the prediction with one channel, ``(*spatial, 1)``, or with 1 for any other
    extent too (``(1, W, 1)``, ``(1, 1, 1)``), or a number per sample, ``(1,)``; of losses that compare element by
    element (:attr:`weighs_channels`) also one per channel. They are numbers >= 0, and have no gradient. Where a weight
    is 0 there is neither loss nor gradient, whatever prediction and target hold there, NaN too.

    A subclass whose loss is a sum over elements (or samples) overrides :meth:`local`; one that the backend has a kernel
    of, :meth:`kernel`; one that needs sums over all ranks in between has a :class:`LocalLoss` of its own.

    The mean is over the samples that count (`mode.valid`) and all positions, of the whole batch, so that
    the loss is that of one process: ``sum(w * l) / count``, or ``sum(w * l) / sum(w)`` (:attr:`normalization`).
    """

    #: Whether it has weights; then :meth:`local` takes them as `weights`, ``(n, *spatial, 1)`` or of all channels.
    takes_weights = False
    #: Whether a weight may be one of every channel.
    weighs_channels = False
    #: By what a weighted sum is divided: the "count" of positions, or the sum of the "weights".
    normalization = "count"

    # Reads prediction and target, some times, and writes the gradient with it; backward does nothing.
    passes = Passes((3, 0), (0, 0))
    keeps_inputs = True

    def __call__(self, *inputs: Node) -> LossNode:
        self._refuse_others(inputs)
        return LossNode(self, inputs)

    def output_shape(self, *shapes: Shape) -> Shape:
        self._check_weights(shapes)
        self.check(*shapes[:2])
        return (1,)

    def check(self, *shapes: Shape) -> None:
        """Refuse shapes of prediction and target that do not go together."""

    def _check_weights(self, shapes: Sequence[Shape]) -> None:
        if len(shapes) == 2:
            return
        if len(shapes) != 3 or not self.takes_weights:
            some = "a prediction, a target and perhaps weights" if self.takes_weights else "a prediction and a target"
            raise ValueError(f"{self.kind}: expected {some}, got {len(shapes)} inputs")
        prediction, _, weights = shapes
        channels = (1, prediction[-1]) if self.weighs_channels else (1,)
        if weights[-1] not in channels or not (len(weights) == 1 or is_broadcast(weights, prediction)):
            raise ValueError(
                f"{self.kind}: expected weights of shape {(*prediction[:-1], channels[-1])}, with 1 for any of its "
                f"extents, or (1,), got {weights}"
            )

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """A loss is computed where its prediction is."""
        return inputs[i].boxes if i < 2 else operand_blocks(inputs[i].shape, inputs[0].boxes)

    def local(self, prediction: Any, target: Any, dx: Any | None, scale: float, work: dict, weights: Any = None) -> Any:
        """Local. `scale` times the sum of the loss over the block; its gradient into `dx` unless that is None.

        A number; on a device an array of no axes there, so that the host need not wait.
        `work` is this layer's own, kept from step to step, for buffers. Weights, if there are some, come as `weights`.
        """
        raise TypeError(f"{self.kind} must override local()")

    def kernel(self, kernels: Any, arrays: LossArrays) -> Any:
        """The backend's kernel of this loss, a :class:`halograd.kernels.LossKernel`."""
        raise TypeError(f"{self.kind} must override kernel()")

    def compares(self, i: int) -> bool:
        return i >= 1

    def weighs(self, i: int) -> bool:
        return i == 2

    def target_range(self, i: int, *shapes: Shape) -> tuple[float, float] | None:
        return (0.0, math.inf) if self.weighs(i) else None

    def judgements(self, *shapes: Shape) -> Sequence[Judgement]:
        weights = 2 if len(shapes) == 3 else None
        return [replace(one, weights=weights) for one in self.judged(*shapes[:2])]

    def judged(self, prediction: Shape, target: Shape) -> Sequence[Judgement]:
        """How a prediction and a target of these sample shapes are judged."""
        return (Judgement(),)

    @property
    def of_batch(self) -> str:
        return "its sum of weights" if self.normalization == "weights" else ""

    def divides(self, weighted: bool) -> bool:
        """Whether the sum is divided by the sum of weights, where there are some for the positions or not."""
        return weighted and self.normalization == "weights"

    def lower(self, context: Context) -> Callable[[], None]:
        context.loss = context.keep((1,), "float64", "loss")
        prediction, target, *others = context.inputs
        weights = weights_view(context, prediction, 2) if others else None
        term = LossTerm(prediction, target, context.loss, timing=loss_timing(context), weights=weights)
        backward = self.lower_term(context, term)
        return lambda: backward(context.gradient(0))

    def lower_term(self, context: Context, term: LossTerm) -> Callable[[View], None]:
        """The loss of one prediction and its gradient, which are computed together in the forward pass.

        Returns
        -------
        A function that takes the view for the gradient of the prediction, and adds the backward pass.
        """
        prediction, target = term.prediction, term.target
        if prediction.box.shape[:-1] != target.box.shape[:-1]:
            raise ValueError(
                f"{context.name}: prediction and target are cut differently: {prediction.box}, {target.box}"
            )
        views: dict[str, View | None] = {"prediction": prediction.view, "target": target.view, "value": term.value}
        if term.weights is not None:
            views["weights"] = term.weights
        block = self.block_type()
        low = block.widens and is_low(prediction.dtype)
        if low:
            views["copy"] = context.scratch(prediction.box.shape, context.wide)
        shape = prediction.layout.shape
        positions = math.prod(shape[1:-1])
        place = LossPlace(self, prediction.box.start[0], shape[0], positions, shape[-1], context.rank, term.weight)
        kernel = context.kernel(partial(block, place), **views)
        self.lower_passes(context, kernel, term)

        def backward(gradient: View) -> None:
            kernel.add(dx=gradient)
            if low:
                kernel.add(dx_copy=context.scratch(prediction.box.shape, context.wide))

        return backward

    def block_type(self) -> type[LossBlock]:
        """What computes the loss of a block: :class:`LossOfKernel` where there is a :meth:`kernel`."""
        return LocalLoss

    def lower_passes(self, context: Context, kernel: KernelSpec, term: LossTerm) -> None:
        """Add what computes the loss; sums over all ranks in between."""
        if self.divides(term.weights is not None):
            weight = context.keep((1,), "float64", "loss")
            kernel.add(divisor=weight)
            context.divided.append((term.value, weight))
            context.run(kernel, "weigh")
            context.add_up(context.sum(Groups.whole(context.size), weight, "loss", [8], f"{context.name} (weights)"))
        context.run(kernel, "forward", timing=term.timing)


def check_counts(option: str, counts: Sequence[int], ignored: int | None = None) -> tuple[int, ...]:
    """How often classes occur, each at least once but for the ignored one: 0. Raises ValueError for `option`."""
    counts = [0 if c == ignored else int(n) for c, n in enumerate(counts)]
    missing = [c for c, n in enumerate(counts) if n == 0 and c != ignored]
    if missing:
        raise ValueError(
            f'{option}: expected all of {len(counts)} classes in the training samples for "{BALANCED}", got none of '
            f"class {', '.join(map(str, missing))}; give numbers, or leave these classes out"
        )
    return tuple(counts)


def check_normalization(given: str) -> str:
    """The name of a way to normalize. Raises ValueError for another."""
    if given not in NORMALIZATIONS:
        raise ValueError(f"normalization: expected one of {NORMALIZATIONS}, got {given!r}")
    return given


def loss_timing(context: Context) -> Timing:
    """What a loss is priced by: of its weights, what a rank needs and not what it owns."""
    return context.timing("forward", inputs=tuple(context.needed(i).longest for i in range(len(context.inputs))))


def weights_view(context: Context, prediction: Value, i: int) -> View:
    """Add what brings the weights, input `i`, to the positions of a prediction.

    Returns
    -------
    Packed, of the prediction's block but for the channels, in the wide dtype. What was gathered stays until the next
    step: metrics look at it.
    """
    value = context.inputs[i]
    gathered = context.gather(i, operand_blocks(value.layout.shape, prediction.layout.boxes))
    gathered.view.buffer.kept = True
    gathered.start()
    gathered.finish()
    shape = (*prediction.box.shape[:-1], value.layout.shape[-1])
    if gathered.view.shape == shape and gathered.view.dtype == context.wide:
        return gathered.view
    spread = context.scratch(shape, context.wide)
    context.run(context.kernel(_spreading, source=with_axes(gathered.view, len(shape)), target=spread))
    return spread


def _spreading(environment: Any, source: Any, target: Any) -> Callable[[], None]:
    """``target = source``, of fewer extents and perhaps another dtype."""

    def run() -> None:
        if target.size:
            np.copyto(target, source, casting="unsafe")

    return run


@dataclass(frozen=True)
class LossPlace:
    """A loss on one rank.

    Attributes
    ----------
    first
        Number in the batch of the block's first sample.
    batch, positions, channels
        Of the whole prediction.
    weight
        Multiplies loss and gradient.
    """

    layer: Loss
    first: int
    batch: int
    positions: int
    channels: int
    rank: int
    weight: float = 1.0


class LossBlock(ABC):
    """Loss of one rank's block, written into `value`, float64 ``(1,)``: the executor sums it over the ranks.

    The gradient is written with the loss. With a loss scale (`mode.loss_scale`) it is multiplied by it before it is
    rounded.
    """

    #: Whether a prediction of 16 bits, and its gradient, are copied to float32 to compute with.
    widens = False

    def __init__(
        self,
        place: LossPlace,
        environment: Any,
        prediction: Any,
        target: Any,
        value: Any,
        *,
        weights: Any = None,
        divisor: Any = None,
    ) -> None:
        self.place, self.name, self.mode = place, environment.name, environment.mode
        self.layer: Any = place.layer
        self.prediction, self.target, self.value = prediction, target, value
        self.weights, self.divisor = weights, divisor

    @property
    def count(self) -> int:
        """Samples of this block that count."""
        size = self.prediction.shape[0] if self.prediction.size else 0
        return max(0, min(self.place.first + size, self.mode.valid) - self.place.first)

    def scale(self) -> float:
        """What the sum over positions is multiplied by, beside one over the `divisor`."""
        if self.divisor is not None:
            return self.place.weight
        return self.place.weight / max(1, self.mode.valid * self.place.positions)

    def weigh(self) -> None:
        """Write the sum of this block's weights, those of channels as their mean, to be summed over the ranks."""
        counted = self.weights[: self.count]
        np.sum(counted, dtype=np.float64, out=self.divisor.reshape(()))
        self.divisor /= counted.shape[-1]

    @abstractmethod
    def forward(self) -> None:
        """Write `value` and the gradient."""


class LossOfKernel(LossBlock):
    """By the backend's kernel."""

    def __init__(
        self, place: LossPlace, environment: Any, prediction: Any, target: Any, value: Any, dx: Any = None, **more: Any
    ) -> None:
        super().__init__(place, environment, prediction, target, value, **more)
        arrays = LossArrays(prediction, target, dx, value, self.mode.loss_scale, **more)
        self.kernel = self.layer.kernel(environment.kernels, arrays)

    def forward(self) -> None:
        self.kernel.set(self.count, self.scale())
        self.kernel()

    def close(self) -> None:
        """Free the backend's kernel."""
        self.kernel.close()


class LocalLoss(LossBlock):
    """By `Loss.local`, in NumPy's functions, which an array of a device answers itself."""

    widens = True

    def __init__(
        self, place: LossPlace, environment: Any, prediction: Any, target: Any, value: Any, **more: Any
    ) -> None:
        own = {name: more[name] for name in ("weights", "divisor") if name in more}
        super().__init__(place, environment, prediction, target, value, **own)
        self.work = Workspace(environment.kernels.device)
        self.dx: Any = more.get("dx")
        self.copied: Any = None
        self.rounded: Any = None
        if "copy" in more:
            self.copied, self.rounded = prediction, self.dx
            self.prediction, self.dx = more["copy"], more.get("dx_copy")

    def forward(self) -> None:
        if self.copied is not None:
            np.copyto(self.prediction, self.copied)
        self.compute()
        if self.rounded is not None:
            if self.mode.loss_scale is not None:
                np.multiply(self.dx, self.mode.loss_scale.reshape(()), out=self.dx, casting="same_kind")
            np.copyto(self.rounded, self.dx)

    def compute(self) -> None:
        count = self.count
        if self.dx is not None and count < self.dx.shape[0]:
            self.dx[count:] = 0
        if not count:
            self.value.fill(0)
            return
        dx = None if self.dx is None else self.dx[:count]
        arguments = self.prediction[:count], self.target[:count], dx, self.scale(), self.work
        weights = {} if self.weights is None else {"weights": self.weights[:count]}
        np.copyto(self.value, self.layer.local(*arguments, **weights))
        if self.divisor is not None:
            self._divide(dx)

    def _divide(self, dx: Any | None) -> None:
        """Loss and gradient by the divisor, where it is above 0; on a device the host need not look at it."""
        share = buffer(self.work, "share", (1,), np.float64)
        np.maximum(self.divisor, np.finfo(np.float64).tiny, out=share)
        np.divide(np.greater(self.divisor, 0), share, out=share)
        np.multiply(self.value, share, out=self.value)
        if dx is not None:
            typed = buffer(self.work, "typed share", (1,), dx.dtype)
            np.copyto(typed, share, casting="same_kind")
            np.multiply(dx, typed, out=dx)

    def close(self) -> None:
        """Free the buffers."""
        self.work.clear()
