"""The base of all losses: a scalar, and the gradient of its first input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halograd.device import is_low
from halograd.dtensor import Box, Layout
from halograd.layers.binding import Binding
from halograd.layers.chunks import Work
from halograd.layers.layer import Layer, Shape
from halograd.layers.operator import Operator

__all__ = ["Loss", "LossOperator"]


class Loss(Layer):
    """A scalar computed of a prediction and a target that are cut alike.

    A subclass whose loss is a sum over elements (or samples) overrides :meth:`local`; one that needs
    sums over all ranks in between overrides :meth:`bind`.

    The mean is over the samples that count (`mode.valid`) and all positions, of the whole batch, so that
    the loss is that of one process.
    """

    def output_shape(self, *shapes: Shape) -> Shape:
        self.check(*shapes)
        return (1,)

    def check(self, *shapes: Shape) -> None:
        """Refuse shapes of prediction and target that do not go together."""

    def needed_boxes(self, i: int, inputs: Sequence[Layout], output: Layout) -> tuple[Box, ...]:
        """A loss is computed where its prediction is."""
        return inputs[i].boxes

    def local(self, prediction: Any, target: Any, dx: Any | None, scale: float, work: dict) -> Any:
        """Local. `scale` times the sum of the loss over the block; its gradient into `dx` unless that is None.

        A number; on a device an array of no axes there, so that the host need not wait.
        `work` is this layer's own, kept from step to step, for buffers.
        """
        raise TypeError(f"{self.kind} must override local()")

    def fused(
        self, cuda: Any, prediction: Any, target: Any, dx: Any | None, loss: Any, wrong: Any, factor: Any = None
    ) -> Any | None:
        """The backend's kernel of this loss (a `LossKernel`), None where it has none.

        It writes `loss`, float64 ``(1,)``, and counts targets that make no sense in `wrong`, int64 ``(1,)``: with any
        the loss is NaN. `factor`, float64 ``(1,)`` on the device or None, is multiplied into `dx` only.
        """
        return None

    def bind(self, binding: Binding) -> Operator:
        return LossOperator(binding)


class LossOperator(Operator):
    """Loss of one rank's block; the executor sums `value`, a number or an array of no axes, over the ranks.

    The gradient is written with the loss. Its memory may have served the layers before, as scratch, but nothing
    uses it from here to `backward`: the network computes its loss last, and backward begins with it.

    Of a prediction of 16 bits the loss is computed in float32: by a fused kernel, else of a copy. With a loss scale
    (`mode.loss_scale`) the gradient is multiplied by it before it is rounded.
    """

    def __init__(self, b: Binding) -> None:
        self.b = b
        prediction, target = b.inputs
        self.value: Any = 0.0
        self._work = Work(b.kernels.device)
        self._dx: Any = None
        self._prediction = prediction.array
        self._copied: Any = None
        self._rounded: Any = None
        self._target = target.array
        shape = prediction.layout.shape
        if prediction.box.shape[:-1] != target.box.shape[:-1]:
            raise ValueError(f"{b.name}: prediction and target are cut differently: {prediction.box}, {target.box}")
        self._per_sample = int(np.prod(shape[1:-1], dtype=np.int64))

        self._kernel: Any = None
        if b.kernels.cuda is not None:
            self._loss = b.kernels.zeros((1,), np.dtype("float64"))
            self._wrong = b.kernels.zeros((1,), np.dtype("int64"))
            self._kernel = self._fuse()
        if self._kernel is None and is_low(prediction.dtype):
            self._copied = prediction.array
            self._prediction = b.memory.keep(prediction.box.shape, b.wide, "loss")

    def _fuse(self) -> Any | None:
        """The kernel that writes the loss, and its gradient where it is wanted; of packed arrays."""
        arrays, layer = (self._prediction, self._target), self.b.layer
        assert isinstance(layer, Loss)
        if not all(a.size and a.flags.c_contiguous for a in arrays):
            return None
        factor = self.b.mode.loss_scale
        return layer.fused(self.b.kernels.cuda, *arrays, self._dx, self._loss, self._wrong, factor)

    def scale(self, count: int) -> Any:
        """What the sum over positions is multiplied by; `count` samples of this rank's block count. Collective."""
        return 1.0 / max(1, self.b.mode.valid * self._per_sample)

    def forward(self) -> None:
        if self._copied is not None:
            np.copyto(self._prediction, self._copied)
        self.compute()
        if self._rounded is not None:
            if self.b.mode.loss_scale is not None:
                np.multiply(self._dx, self.b.mode.loss_scale.reshape(()), out=self._dx, casting="same_kind")
            np.copyto(self._rounded, self._dx)

    def compute(self) -> None:
        """Write `value` and the gradient. Collective."""
        b = self.b
        box = b.inputs[0].box
        count = max(0, min(box.stop[0], b.mode.valid) - box.start[0])
        scale = self.scale(count)
        if self._dx is not None and count < box.shape[0]:
            self._dx[count:] = 0
        if not count or not box.size:
            self.value = 0.0
            return
        if self._kernel is not None:
            self._kernel.set(count, scale)
            self._kernel()
            self.value = self._loss[0]
            return
        dx = None if self._dx is None else self._dx[:count]
        layer = b.layer
        assert isinstance(layer, Loss)
        self.value = layer.local(self._prediction[:count], self._target[:count], dx, scale, self._work)

    def bind_backward(self) -> None:
        self._dx = self.b.gradient(0)
        if self._copied is not None:
            self._rounded = self._dx
            self._dx = self.b.memory.keep(self._dx.shape, self.b.wide, "loss")
        if self._kernel is not None:
            self._kernel.close()
            self._kernel = self._fuse()

    def backward(self) -> None:
        """Nothing: the gradient was computed with the loss."""

    def close(self) -> None:
        self._work.clear()
        if self._kernel is not None:
            self._kernel.close()
