"""The base of all losses: a scalar, and the gradient of its prediction."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..device import is_low
from ..dtensor import Blocks, Layout
from ..kernels import LossArrays
from ..kernels.memory import Workspace
from .costs import Judgement, Passes
from .layer import Layer, Node, Shape

if TYPE_CHECKING:
    from ..program.context import Context
    from ..program.operations import KernelSpec, Timing
    from ..program.values import Value
    from ..program.views import View

__all__ = ["LocalLoss", "Loss", "LossBlock", "LossNode", "LossOfKernel", "LossPlace", "LossTerm"]


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
    """

    prediction: Value
    target: Value
    value: View
    weight: float = 1.0
    timing: Timing | None = None


class Loss(Layer):
    """A scalar computed of a prediction and a target that are cut alike.

    A subclass whose loss is a sum over elements (or samples) overrides :meth:`local`; one that the backend has a kernel
    of, :meth:`kernel`; one that needs sums over all ranks in between has a :class:`LocalLoss` of its own.

    The mean is over the samples that count (`mode.valid`) and all positions, of the whole batch, so that
    the loss is that of one process.
    """

    # Reads prediction and target, some times, and writes the gradient with it; backward does nothing.
    passes = Passes((3, 0), (0, 0))
    keeps_inputs = True

    def __call__(self, *inputs: Node) -> LossNode:
        self._refuse_others(inputs)
        return LossNode(self, inputs)

    def output_shape(self, *shapes: Shape) -> Shape:
        self.check(*shapes)
        return (1,)

    def check(self, *shapes: Shape) -> None:
        """Refuse shapes of prediction and target that do not go together."""

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """A loss is computed where its prediction is."""
        return inputs[i].boxes

    def local(self, prediction: Any, target: Any, dx: Any | None, scale: float, work: dict) -> Any:
        """Local. `scale` times the sum of the loss over the block; its gradient into `dx` unless that is None.

        A number; on a device an array of no axes there, so that the host need not wait.
        `work` is this layer's own, kept from step to step, for buffers.
        """
        raise TypeError(f"{self.kind} must override local()")

    def kernel(self, kernels: Any, arrays: LossArrays) -> Any:
        """The backend's kernel of this loss, a :class:`halograd.kernels.LossKernel`."""
        raise TypeError(f"{self.kind} must override kernel()")

    def compares(self, i: int) -> bool:
        return i == 1

    def judgements(self, *shapes: Shape) -> Sequence[Judgement]:
        return (Judgement(),)

    def lower(self, context: Context) -> Callable[[], None]:
        context.loss = context.keep((1,), "float64", "loss")
        prediction, target = context.inputs
        backward = self.lower_term(
            context, LossTerm(prediction, target, context.loss, timing=context.timing("forward"))
        )
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
        context.run(kernel, "forward", timing=term.timing)


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

    def __init__(self, place: LossPlace, environment: Any, prediction: Any, target: Any, value: Any) -> None:
        self.place, self.name, self.mode = place, environment.name, environment.mode
        self.layer: Any = place.layer
        self.prediction, self.target, self.value = prediction, target, value

    @property
    def count(self) -> int:
        """Samples of this block that count."""
        size = self.prediction.shape[0] if self.prediction.size else 0
        return max(0, min(self.place.first + size, self.mode.valid) - self.place.first)

    def scale(self) -> float:
        """What the sum over positions is multiplied by."""
        return self.place.weight / max(1, self.mode.valid * self.place.positions)

    @abstractmethod
    def forward(self) -> None:
        """Write `value` and the gradient."""


class LossOfKernel(LossBlock):
    """By the backend's kernel."""

    def __init__(
        self, place: LossPlace, environment: Any, prediction: Any, target: Any, value: Any, dx: Any = None, **more: Any
    ) -> None:
        super().__init__(place, environment, prediction, target, value)
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
        super().__init__(place, environment, prediction, target, value)
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
        found = self.layer.local(self.prediction[:count], self.target[:count], dx, self.scale(), self.work)
        np.copyto(self.value, found)

    def close(self) -> None:
        """Free the buffers."""
        self.work.clear()
