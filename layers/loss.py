"""Base classes of all losses, which compute a scalar and its gradient with respect to the prediction."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from halograd.errors import UserError
from halograd.signatures import check_methods, is_ours

from ..device import is_low
from ..dtensor import Blocks, Groups, Layout, Window
from ..kernels import LossArrays
from ..kernels.access import reads, writes
from ..kernels.memory import Workspace, buffer
from ..lowering.context import Context, Lowered
from ..lowering.operations import KernelSpec, Operation, Run, Timing
from ..lowering.views import Value, View
from .layer import Layer, Node, Passes, Shape
from .needs import is_broadcast, operand_blocks, sliding, with_axes
from .targets import MetricSpec

__all__ = [
    "BALANCED",
    "HOW_TO_COUNT",
    "LocalLoss",
    "Loss",
    "LossArithmetic",
    "LossBlock",
    "LossNode",
    "LossOfKernel",
    "LossPosition",
    "LossTerm",
    "check_counts",
    "check_equal_shapes",
    "check_normalization",
    "is_weighing",
    "loss_timing",
    "rows_along",
]

NORMALIZATIONS = ("count", "weights")
#: Name of weights that follow from the class counts of the training samples.
BALANCED = "balanced"
HOW_TO_COUNT = "train by the command line or halograd.fit, which count them, or give them to Network.balance()"


class LossArithmetic(ABC):
    """Interface of the arithmetic on losses (``+``, ``*``); :mod:`halograd.layers.arithmetic` implements it."""

    @abstractmethod
    def total(self, first: LossNode, second: Any) -> LossNode:
        """Return the sum of two losses."""

    @abstractmethod
    def weighted(self, loss: LossNode, factor: Any) -> LossNode:
        """Return `factor` times a loss."""


class LossNode(Node):
    """Loss in the graph. Losses can be added, and multiplied by numbers: ``ce + 0.5 * dice``."""

    #: Set when the package is imported.
    of_losses: ClassVar[LossArithmetic]

    def __add__(self, other: Any) -> LossNode:
        return self.of_losses.total(self, other)

    def __radd__(self, other: object) -> LossNode:
        if other != 0:  # sum() starts with 0
            return NotImplemented
        return self

    def __mul__(self, other: Any) -> LossNode:
        return self.of_losses.weighted(self, other)

    __rmul__ = __mul__

    def _affine(self, factor: float, shift: float) -> LossNode:
        if shift:
            raise TypeError(f"loss: expected losses to be added to it, got the number {shift}; it has no gradient")
        return self * factor


@dataclass(frozen=True)
class LossTerm:
    """Prediction and target of a loss while it is lowered.

    Attributes
    ----------
    number
        Index of the prediction among the inputs of the context.
    prediction, target
        Values with the same cut.
    boxes
        Boxes of the prediction that the ranks read.
    x, t
        Views of this rank's boxes of prediction and target.
    value
        View of the loss of this rank's block, float64 ``(1,)``.
    weight
        Factor of the term in the trained loss.
    timing
        Timing of its kernel; None if another kernel includes it.
    weights
        Weights of the positions of this rank's box ``(n, *spatial, 1)``, or of its elements; packed. None: no weights.
    """

    number: int
    prediction: Value
    target: Value
    boxes: Blocks
    x: View
    t: View
    value: View
    weight: float = 1.0
    timing: Timing | None = None
    weights: View | None = None


class Loss(Layer):
    """Scalar function of a prediction and a target with the same cut, optionally with weights: ``loss(x, t, w)``.

    Weights are an input of the shape of the prediction with one channel, ``(*spatial, 1)``, or with 1 for any other
    extent too (``(1, W, 1)``, ``(1, 1, 1)``), or a number per sample, ``(1,)``. Losses that compare element by element
    (:attr:`weighs_channels`) also accept one weight per channel. Weights are numbers >= 0, and have no gradient. Where
    a weight is 0, loss and gradient are 0, even if prediction or target are NaN.

    A subclass whose loss is a sum over elements (or samples) overrides :meth:`local`. A subclass with a kernel of the
    backend overrides :meth:`kernel`. A subclass that needs sums over all ranks between its kernels has its own
    :class:`LocalLoss`. The mean is over the valid samples (`mode.valid`) and all positions of the whole batch, so that
    the loss is that of one process: ``sum(w * l) / count``, or ``sum(w * l) / sum(w)`` (:attr:`normalization`).

    A loss of neighboring elements has a :attr:`stencil` (stride 1, no padding). It is the mean over all windows that
    lie inside the sample. Each rank computes the windows whose middle (element ``(extent - 1) // 2``) it owns. Its
    arrays have a halo, which ends at the border of the sample: the windows inside these arrays are those of the rank.
    :meth:`local` then gets one weight per window: that of its middle, and 0 if any element of the window has weight 0.
    Elements of weight 0 are 0 in prediction and target. The method is called only if a window fits into the arrays.
    """

    #: Whether it accepts weights; :meth:`local` gets them as `weights`, ``(n, *spatial, 1)`` or with all channels.
    takes_weights = False
    #: Whether channels may have different weights.
    weighs_channels = False
    #: Divisor of a weighted sum: the "count" of positions, or the sum of the "weights".
    normalization = "count"

    # Forward reads prediction and target and writes the gradient; backward does nothing.
    passes = Passes((3, 0), (0, 0))
    keeps_inputs = True

    def __call__(self, *inputs: Node) -> LossNode:
        self._refuse_others(inputs)
        # check() gets prediction and target only, and local() gets `weights` only if the call has them.
        check_methods(self, len(inputs), {"check": 2}, ["weights"] if self.takes_weights and len(inputs) > 2 else ())
        # Blocks of other types compute by kernels, and never call local().
        kernels = self.block_type() not in (LocalLoss, WindowLoss) and is_ours(type(self).block_type)
        if kernels and not is_ours(type(self).local):
            raise UserError(
                f"{self.kind}: expected no local() in a class derived from a loss that has kernels, got one; derive it "
                "from Loss"
            )
        return LossNode(self, inputs)

    def output_shape(self, *shapes: Shape) -> Shape:
        self._check_weights(shapes)
        self.check(*shapes[:2])
        if self.stencil is not None:
            self._check_windows(*shapes[:2])
        return (1,)

    def check(self, *shapes: Shape) -> None:
        """Check the shapes of prediction and target. Raises ValueError."""

    def _check_weights(self, shapes: Sequence[Shape]) -> None:
        if len(shapes) == 2:
            return
        if len(shapes) != 3 or not self.takes_weights:
            inputs = "a prediction, a target and perhaps weights" if self.takes_weights else "a prediction and a target"
            raise ValueError(f"{self.kind}: expected {inputs}, got {len(shapes)} inputs")
        prediction, _, weights = shapes
        channels = (1, prediction[-1]) if self.weighs_channels else (1,)
        if weights[-1] not in channels or not (len(weights) == 1 or is_broadcast(weights, prediction)):
            raise ValueError(
                f"{self.kind}: expected weights of shape {(*prediction[:-1], channels[-1])}, with 1 for any of its "
                f"extents, or (1,), got {weights}"
            )

    def _check_windows(self, prediction: Shape, target: Shape) -> None:
        assert self.stencil is not None
        self.stencil.output_spatial(prediction[:-1], self.kind)
        if any((w.stride, w.pad_lo, w.pad_hi) != (1, 0, 0) for w in self.windows(prediction)):
            raise ValueError(f"{self.kind}: expected a stencil of stride 1 without padding, got {self.stencil}")
        if target[:-1] != prediction[:-1]:
            raise ValueError(f"{self.kind}: expected a target of extent {prediction[:-1]}, got {target[:-1]}")

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """Return, per rank, the box of input `i` that it reads: its block of prediction or target, with the halo of the
        stencil, or the weights of the prediction's box.
        """
        return operand_blocks(inputs[i].shape, self._read(inputs[0])) if i == 2 else self._read(inputs[i])

    def _read(self, layout: Layout) -> Blocks:
        """Return, per rank, the box of a prediction or target that the windows with their middle in its block read."""
        if self.stencil is None:
            return layout.boxes
        windows = [
            # With this padding, the window of output i is the one with its middle at i.
            replace(w, pad_lo=_before(w), pad_hi=w.extent - 1 - _before(w)) for w in self.windows(layout.shape[1:])
        ]
        return sliding(windows, layout.boxes, layout.boxes.axes[-1]).clipped(layout.shape)

    def work_size(self, *shape: int) -> int:
        """Return the number of elements of work space that :meth:`local` finds as ``work["space"]``, for a box of this
        shape ``(n, *spatial, C)``; it counts in the memory of a plan.
        """
        return 0

    def local(self, prediction: Any, target: Any, dx: Any | None, scale: float, work: dict, weights: Any = None) -> Any:
        """Return `scale` times the sum of the loss over the block; write its gradient to `dx` if given. Local.

        The result is a number; on a device it is an array without axes, so that the host does not wait. `work` holds
        buffers of this layer from step to step. `weights` are the weights, or None.
        """
        raise TypeError(f"{self.kind} must override local()")

    def kernel(self, kernels: Any, arrays: LossArrays) -> Any:
        """Return the backend's kernel of this loss, a :class:`halograd.kernels.LossKernel`."""
        raise TypeError(f"{self.kind} must override kernel()")

    def compares(self, i: int) -> bool:
        return i >= 1

    def weighs(self, i: int) -> bool:
        return i == 2

    def weights_of(self, i: int, count: int) -> Sequence[int]:
        return (2,) if i == 1 and count == 3 else ()

    def target_range(self, i: int, *shapes: Shape) -> tuple[float, float] | None:
        return (0.0, math.inf) if self.weighs(i) else None

    def comparisons(self, *shapes: Shape) -> Sequence[MetricSpec]:
        weights = 2 if len(shapes) == 3 else None
        return [replace(spec, weights=weights) for spec in self.metric_specs(*shapes[:2])]

    def metric_specs(self, prediction: Shape, target: Shape) -> Sequence[MetricSpec]:
        """Return the comparisons of a prediction and a target of these sample shapes."""
        return (MetricSpec(),)

    def divides(self, weighted: bool) -> bool:
        """Return whether the sum is divided by the sum of weights; `weighted` is whether positions have weights."""
        return weighted and self.normalization == "weights"

    def lower(self, context: Context) -> Lowered:
        value = context.keep((1,), "float64", "loss")
        term = self.gathered(context, range(len(context.inputs)), value, timing=loss_timing(context))
        lowered = self.lower_term(context, term)
        terms = ((value, lowered.divisor),)

        def backward() -> None:
            lowered.backward()

        return Lowered(backward, loss=value, terms=terms)

    def gathered(self, context: Context, numbers: Sequence[int], value: View, **more: Any) -> LossTerm:
        """Gather what the loss reads of the inputs `numbers` (prediction, target, perhaps weights); return the term.

        Passes of all kinds gather it, because other losses may read it too. `more` are further fields of the term.
        """
        prediction, target = (context.inputs[i] for i in numbers[:2])
        boxes, x, t = self._read(prediction.layout), prediction.view, target.view
        if self.stencil is not None:
            x, t = (context.gather(i, self._read(context.inputs[i].layout)).run().view for i in numbers[:2])
        weights = weights_view(context, prediction, boxes, numbers[2]) if len(numbers) > 2 else None
        return LossTerm(numbers[0], prediction, target, boxes, x, t, value, weights=weights, **more)

    def lower_term(self, context: Context, term: LossTerm) -> LoweredTerm:
        """Add the loss of one prediction and its gradient; the forward pass computes both."""
        prediction, target = term.prediction, term.target
        if prediction.box.shape[:-1] != target.box.shape[:-1]:
            raise ValueError(
                f"{context.name}: prediction and target are cut differently: {prediction.box}, {target.box}"
            )
        views: dict[str, View | None] = {"prediction": term.x, "target": term.t, "value": term.value}
        block, low = self.block_type(), is_low(prediction.dtype)
        low = low and block.widens
        if low:
            views["copy"] = context.scratch(term.x.shape, context.wide)
        if term.weights is not None:
            views["weights"] = term.weights
        if self.stencil is not None:
            views |= self._window_views(context, term, low)
        size = self.work_size(*term.x.shape)
        if size:
            views["space"] = context.scratch((size,), context.wide)
        shape = prediction.layout.shape
        positions = math.prod(shape[1:-1])
        if self.stencil is not None:
            # The mean is over windows.
            positions = math.prod(w.output_size(n) for w, n in zip(self.windows(shape[1:]), shape[1:]))
        first = prediction.box.start[0]
        position = LossPosition(self, first, shape[0], positions, shape[-1], context.rank, term.weight)
        kernel = context.kernel(partial(block, position), **views)
        divisor = self.lower_passes(context, kernel, term)

        def backward() -> View:
            returned = context.return_gradient(term.number, term.boxes)
            # The forward pass of this kernel writes the gradient; it is bound here, where its memory is known.
            kernel.add(dx=returned.view)
            if low:
                kernel.add(dx_copy=context.scratch(term.x.shape, context.wide))
            returned.run()
            return returned.view

        return LoweredTerm(backward, divisor)

    def _window_views(self, context: Context, term: LossTerm, low: bool) -> dict[str, View]:
        """Return work space for arrays without the elements of weight 0, and for the weights of windows."""
        if term.weights is None:
            return {}
        shape = term.weights.shape
        views = {"there t": context.scratch(term.t.shape, term.t.dtype), "none": context.scratch(shape, "bool")}
        views |= {name: context.scratch(shape, context.wide) for name in ("windows", "least")}
        # With 16 bits the loss works on a copy of the prediction anyway, which may be modified.
        return views if low else views | {"there x": context.scratch(term.x.shape, context.wide)}

    def block_type(self) -> type[LossBlock]:
        """Return the class that computes the loss of a block, by default :class:`LocalLoss`, and with a stencil
        :class:`WindowLoss`.
        """
        return LocalLoss if self.stencil is None else WindowLoss

    def lower_passes(self, context: Context, kernel: KernelSpec, term: LossTerm) -> View | None:
        """Add the kernels of the loss, and the sums over all ranks between them.

        Returns
        -------
        View of the sum of weights over all ranks that divides the loss, float64 ``(1,)``; None without one.
        """
        weight: View | None = None
        if self.divides(term.weights is not None):
            weight = context.keep((1,), "float64", "loss")
            kernel.add(divisor=weight)
            context.run(kernel, "weigh")
            context.add_up(context.sum(Groups.whole(context.size), weight, "loss", [8], f"{context.name} (weights)"))
        context.run(kernel, "forward", timing=term.timing)
        return weight


@dataclass(frozen=True)
class LoweredTerm:
    """Loss of one prediction, lowered.

    Attributes
    ----------
    backward
        Function that adds the backward pass, and returns the view of the gradient that the kernel writes.
    divisor
        View of the sum of weights over all ranks that divides the loss, float64 ``(1,)``; None without one.
    """

    backward: Callable[[], View]
    divisor: View | None


def _before(window: Window) -> int:
    """Return the number of elements of a window before its middle."""
    return (window.extent - 1) // 2


def check_counts(option: str, counts: Sequence[int], ignored: int | None = None) -> tuple[int, ...]:
    """Return the class counts, with 0 for the ignored class. Raises ValueError, naming `option`, if another count is 0.
    """
    counts = [0 if c == ignored else int(n) for c, n in enumerate(counts)]
    missing = [c for c, n in enumerate(counts) if n == 0 and c != ignored]
    if missing:
        raise ValueError(
            f'{option}: expected all of {len(counts)} classes in the training samples for "{BALANCED}", got none of '
            f"class {', '.join(map(str, missing))}; give numbers, or leave these classes out"
        )
    return tuple(counts)


def check_equal_shapes(kind: str, prediction: Shape, target: Shape) -> None:
    """Raise ValueError, naming the kind of loss, unless a target has the shape of its prediction."""
    if prediction != target:
        raise ValueError(f"{kind}: expected a target of the prediction's shape {prediction}, got {target}")


def check_normalization(name: str) -> str:
    """Return the name of a normalization. Raises ValueError for an unknown name."""
    if name not in NORMALIZATIONS:
        raise ValueError(f"normalization: expected one of {NORMALIZATIONS}, got {name!r}")
    return name


def loss_timing(context: Context) -> Timing:
    """Return the timing of a loss by the boxes that it needs: of weights, or with a stencil, these are not those that a
    rank owns.
    """
    return context.timing("forward", inputs=tuple(context.needed(i).longest for i in range(len(context.inputs))))


def weights_view(context: Context, prediction: Value, boxes: Blocks, i: int) -> View:
    """Gather the weights, input `i`, for these boxes of a prediction, and for its owned box, which metrics read.

    Returns
    -------
    Packed view with the shape of the prediction's box except for the channels, in the wide dtype. Gathered weights stay
    until the next step.
    """
    value = context.inputs[i]
    # The last one is returned; the first is gathered for the metrics of evaluation.
    for part in dict.fromkeys((prediction.layout.boxes, boxes)):
        gathered = context.gather(i, operand_blocks(value.layout.shape, part)).run()
        gathered.view.buffer.kept = True
    shape = (*boxes[context.rank].shape[:-1], value.layout.shape[-1])
    if gathered.view.shape == shape and gathered.view.dtype == context.wide:
        return gathered.view
    spread = context.scratch(shape, context.wide)
    context.run(context.kernel(_spreading, source=with_axes(gathered.view, len(shape)), target=spread))
    return spread


@reads("source")
@writes("target")
def _spreading(environment: Any, source: Any, target: Any) -> Callable[[], None]:
    """Return the kernel ``target = source`` for a source that broadcasts, possibly of another dtype."""

    def run() -> None:
        if target.size:
            np.copyto(target, source, casting="unsafe")

    return run


@dataclass(frozen=True)
class LossPosition:
    """Position of one rank's block in a loss.

    Attributes
    ----------
    first
        Index in the batch of the block's first sample.
    batch, positions, channels
        Samples, positions per sample (with a stencil, windows) and channels of the whole prediction.
    weight
        Factor of loss and gradient.
    """

    layer: Loss
    first: int
    batch: int
    positions: int
    channels: int
    rank: int
    weight: float = 1.0


class LossBlock(ABC):
    """Loss of one rank's block, written to `value`, float64 ``(1,)``; the executor sums it over the ranks.

    The gradient is written with the loss. If there is a loss scale (`mode.loss_scale`), the gradient is multiplied by
    it before it is rounded.
    """

    #: Whether a 16-bit prediction and its gradient are computed in float32 copies.
    widens = False

    def __init__(
        self,
        position: LossPosition,
        environment: Any,
        prediction: Any,
        target: Any,
        value: Any,
        *,
        weights: Any = None,
        divisor: Any = None,
    ) -> None:
        self.position, self.name, self.mode = position, environment.name, environment.mode
        self.layer: Any = position.layer
        self.prediction, self.target, self.value = prediction, target, value
        self.weights, self.divisor = weights, divisor
        #: Sum of this rank's weights over the parts of a batch.
        self.counted: Any = None if divisor is None else environment.kernels.device.zeros((1,), np.float64)

    @property
    def count(self) -> int:
        """Number of valid samples in this block."""
        # A block without elements may have samples, but must not call a loss with empty arrays.
        size = self.prediction.shape[0] if self.prediction.size else 0
        return max(0, min(self.position.first + size, self.mode.valid) - self.position.first)

    def scale(self) -> float:
        """Return the factor of the sum over positions; the division by `divisor` is separate."""
        if self.divisor is not None:
            return self.position.weight
        # At least 1: a part of a short batch may have no valid sample.
        return self.position.weight / max(1, self.mode.valid * self.position.positions)

    @reads("weights")
    @writes("divisor")
    def weigh(self) -> None:
        """Write this rank's part of the divisor, which is summed over the ranks.

        If a batch is trained in parts, the divisor of each is the mean of their sums of weights, which are counted
        before the first part is trained: the mean loss of the parts is then that of the whole batch.
        """
        mode = self.mode
        if not mode.training or mode.parts == 1:
            self.sum_weights()
        elif not mode.counting:
            np.divide(self.counted, mode.parts, out=self.divisor)
        else:
            self.sum_weights()
            # The first part of a batch starts a new count.
            np.add(self.divisor, self.counted if mode.part else 0.0, out=self.counted)

    def sum_weights(self) -> None:
        """Write the sum of the weights of this block, averaged over the channels, to `divisor`."""
        counted = self.weights[: self.count]
        # A sum over all axes needs an `out` without axes.
        np.sum(counted, dtype=np.float64, out=self.divisor.reshape(()))
        self.divisor /= counted.shape[-1]

    @abstractmethod
    def forward(self) -> None:
        """Compute `value` and the gradient."""


def is_weighing(operation: Operation) -> bool:
    """Return whether an operation sums the weights that divide a loss (:meth:`LossBlock.weigh`)."""
    return isinstance(operation, Run) and operation.method == LossBlock.weigh.__name__


class LossOfKernel(LossBlock):
    """Loss that the backend's kernel computes."""

    def __init__(
        self,
        position: LossPosition,
        environment: Any,
        prediction: Any,
        target: Any,
        value: Any,
        dx: Any = None,
        **more: Any,
    ) -> None:
        super().__init__(position, environment, prediction, target, value, **more)
        arrays = LossArrays(prediction, target, dx, value, self.mode.loss_scale, **more)
        self.kernel = self.layer.kernel(environment.kernels, arrays)

    @reads("prediction", "target", "weights", "divisor")
    @writes("value", "dx")
    def forward(self) -> None:
        # In every pass, because both depend on the number of valid samples.
        self.kernel.set(self.count, self.scale())
        self.kernel()

    def close(self) -> None:
        """Free the backend's kernel."""
        self.kernel.close()


class LocalLoss(LossBlock):
    """Loss that `Loss.local` computes with NumPy functions, which device arrays implement too."""

    widens = True

    def __init__(
        self, position: LossPosition, environment: Any, prediction: Any, target: Any, value: Any, **more: Any
    ) -> None:
        own = {name: more[name] for name in ("weights", "divisor") if name in more}
        super().__init__(position, environment, prediction, target, value, **own)
        self.work = Workspace(environment.kernels.device)
        if "space" in more:
            self.work["space"] = more["space"]
        self.dx: Any = more.get("dx")
        self.copied: Any = None
        self.rounded: Any = None
        if "copy" in more:
            self.copied, self.rounded = prediction, self.dx
            # The loss computes on float32 copies; `copied` and `rounded` are the 16-bit arrays.
            self.prediction, self.dx = more["copy"], more.get("dx_copy")

    @reads("prediction", "target", "weights", "divisor")
    @writes("value", "dx", "copy", "dx_copy", work=("space",))
    def forward(self) -> None:
        if self.copied is not None:
            np.copyto(self.prediction, self.copied)
        self.compute()
        if self.rounded is not None:
            # Scaled before it is rounded, so that small gradients do not become zero in 16 bits.
            if self.mode.loss_scale is not None:
                np.multiply(self.dx, self.mode.loss_scale.reshape(()), out=self.dx, casting="same_kind")
            np.copyto(self.rounded, self.dx)

    def compute(self) -> None:
        count = self.count
        # Samples beyond a short batch have no gradient, also if arrays hold that of the step before.
        if self.dx is not None and count < self.dx.shape[0]:
            self.dx[count:] = 0
        if not count:
            self.value.fill(0)
            return
        dx = None if self.dx is None else self.dx[:count]
        prediction, target, weights = self.arrays(count)
        more = {} if weights is None else {"weights": weights}
        np.copyto(self.value, self.layer.local(prediction, target, dx, self.scale(), self.work, **more))
        if self.divisor is not None:
            self._divide(dx)

    def arrays(self, count: int) -> tuple[Any, Any, Any]:
        """Return the first `count` samples of prediction, target and weights (None without weights)."""
        return self.prediction[:count], self.target[:count], None if self.weights is None else self.weights[:count]

    def _divide(self, dx: Any | None) -> None:
        """Divide loss and gradient by the divisor; without weights above 0, set both to 0. The host does not wait."""
        share = buffer(self.work, "share", (1,), np.float64)
        # Without a branch: 0 / tiny if all weights are 0.
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


class WindowLoss(LocalLoss):
    """Loss of windows (:attr:`Loss.stencil`) that `Loss.local` computes from a block with its halo.

    With weights, prediction and target are copied, with zeros where the weight is 0, and the weights of windows follow
    from those of the elements.
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        windows = self.layer.windows(self.prediction.shape[1:])
        #: Elements of a window per spatial axis, relative to its first one.
        self.taps = [[w.dilation * k for k in range(w.kernel)] for w in windows]
        self.before = [_before(w) for w in windows]
        #: Number of windows in the block per spatial axis.
        self.fits = [max(0, n - w.extent + 1) for w, n in zip(windows, self.prediction.shape[1:])]
        #: Copies of prediction and target, with 0 where the weight is 0.
        self.there: Any = more.get("there x", self.prediction), more.get("there t")
        self.none: Any = more.get("none")
        self.work_arrays: Any = more.get("windows"), more.get("least")

    @property
    def count(self) -> int:
        # At the end of a sample, a block may be too short for a window of its own.
        return super().count if all(self.fits) else 0

    @reads("weights")
    @writes("divisor", work=("windows", "least"))
    def weigh(self) -> None:
        super().weigh()

    @reads("prediction", "target", "weights", "divisor")
    @writes("value", "dx", "copy", "dx_copy", work=("space", "there x", "there t", "none", "windows", "least"))
    def forward(self) -> None:
        super().forward()

    def sum_weights(self) -> None:
        if not self.count:
            self.divisor.fill(0)
            return
        weights = self._weigh_windows(self.count)
        np.sum(weights, dtype=np.float64, out=self.divisor.reshape(()))
        self.divisor /= weights.shape[-1]

    def arrays(self, count: int) -> tuple[Any, Any, Any]:
        whole = super().arrays(count)
        if self.weights is None:
            return whole
        none = np.equal(self.weights[:count], 0, out=self.none[:count])
        packed = [array[:count] for array in self.there]
        for array, copy in zip(whole, packed):
            if copy is not array:
                np.copyto(copy, array)
            # With weights per channel and an array of other channels, one weight of 0 leaves out the position.
            np.copyto(copy, 0, where=none if none.shape[-1] in (1, array.shape[-1]) else none.any(-1, keepdims=True))
        return (*packed, self._weigh_windows(count))

    def _weigh_windows(self, count: int) -> Any:
        """Return the weights of the windows of `count` samples: that of the middle, 0 if any element has weight 0."""
        weights = self.weights[:count]
        for axis, (taps, n) in enumerate(zip(self.taps, self.fits), 1):
            shape = (*weights.shape[:axis], n, *weights.shape[axis + 1 :])
            # Two buffers in alternation: each axis reads the result of the axis before.
            least = self.work_arrays[axis % 2].reshape(-1)[: math.prod(shape)].reshape(shape)
            np.copyto(least, rows_along(weights, axis, 0, n))
            for tap in taps[1:]:
                np.minimum(least, rows_along(weights, axis, tap, n), out=least)
            weights = least
        # The product, not the minimum: a window has the weight of its middle, or 0.
        np.sign(weights, out=weights)
        middle = self.weights[:count]
        for axis, (first, n) in enumerate(zip(self.before, self.fits), 1):
            middle = rows_along(middle, axis, first, n)
        return np.multiply(weights, middle, out=weights)


def rows_along(array: Any, axis: int, first: int, count: int) -> Any:
    """Return `count` rows of an axis from `first` on."""
    return array[(slice(None),) * axis + (slice(first, first + count),)]
