"""The operator of any layer that is written as `forward` and `backward` on plain local arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halograd.layers.binding import Binding
from halograd.layers.operator import Operator

__all__ = ["LocalOperator"]


class LocalOperator(Operator):
    """Gathers the boxes a layer needs, calls it, and returns gradients to their owners.

    Forward: exchange (assign), `layer.forward`. Backward: `layer.backward`, exchange (sum), the
    adjoint. Right for every layer and every cut; layers with kernels of their own overlap more.
    Communication per process: the needed box less the owned box, forward and backward.
    """

    def __init__(self, binding: Binding) -> None:
        self.binding = binding
        self.layer = binding.layer
        self._needed = [binding.needed(i) for i in range(len(binding.inputs))]
        fill = self.layer.pad_value
        self._inputs = [binding.gather(i, boxes, fill) for i, boxes in enumerate(self._needed)]
        self._arrays = [g.array for g in self._inputs]

    def forward(self) -> None:
        for gathered in self._inputs:
            gathered.start()
        for gathered in self._inputs:
            gathered.finish()
        b = self.binding
        if not b.box.size:
            return
        y = self.layer.forward(self._arrays, b.params, b.box)
        self._check("forward()", y, b.box.shape)
        np.copyto(b.output.array, y)

    def bind_backward(self) -> None:
        b = self.binding
        wanted = [i for i in range(len(b.inputs)) if b.needs_gradient(i)]
        self._returns = {i: b.return_gradient(i, self._needed[i]) for i in wanted}

    def backward(self) -> None:
        b = self.binding
        if b.box.size:
            dxs, grads = self.layer.backward(b.output.dy, self._arrays, b.params, b.box)
            for i, returned in self._returns.items():
                self._check(f"gradient {i} of backward()", dxs[i], self._arrays[i].shape)
                np.copyto(returned.array, dxs[i])
            for key, array in b.grads.items():
                self._check(f"gradient of {key!r}", grads[key], array.shape)
                np.copyto(array, grads[key])
        else:
            for array in b.grads.values():
                array.fill(0)
        for returned in self._returns.values():
            returned.start()
        for returned in self._returns.values():
            returned.finish()

    def close(self) -> None:
        for item in (*self._inputs, *getattr(self, "_returns", {}).values()):
            item.close()

    def _check(self, what: str, array: Any, shape: Sequence[int]) -> None:
        """Refuse what is of another shape, or on the host where the arrays of the layer are not."""
        name, device = self.binding.name, self.binding.kernels.device
        if np.shape(array) != tuple(shape):
            raise ValueError(f"{name}: {what}: expected an array of shape {tuple(shape)}, got {np.shape(array)}")
        if not device.is_host and not device.owns(array):
            raise ValueError(
                f"{name}: {what}: expected an array on {device.name} as those of the layer are, got "
                f"{type(array).__module__}.{type(array).__name__}; make arrays by np.zeros_like(x) and the like"
            )
