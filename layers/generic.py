"""Any layer that is written as `forward` and `backward` on plain local arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from ..dtensor import Box
    from ..program.context import Context
    from .layer import Layer

__all__ = ["lower_local"]


def lower_local(layer: Layer, context: Context) -> Callable[[], None]:
    """Gather the boxes that a layer needs, call it, and return gradients to their owners.

    Forward: exchange (assign), `layer.forward`. Backward: `layer.backward`, exchange (sum), the adjoint. Right for
    every layer and every cut; layers with kernels of their own overlap more.
    Communication per process: the needed box less the owned box, forward and backward.
    """
    boxes = [context.needed(i) for i in range(len(context.inputs))]
    inputs = [context.gather(i, blocks, layer.pad_value) for i, blocks in enumerate(boxes)]
    for gathered in inputs:
        gathered.start()
    for gathered in inputs:
        gathered.finish()
    views = {"y": context.y} | {f"x{i}": gathered.view for i, gathered in enumerate(inputs)}
    views |= {f"param {key}": view for key, view in context.params.items()}
    kernel = context.kernel(partial(_LocalKernel, layer, context.box), **views)
    kernel.recordable = False  # it makes its arrays anew in every step
    context.run(kernel, "forward", uses=tuple(views), timing=context.timing("forward"))

    def backward() -> None:
        wanted = [i for i in range(len(boxes)) if context.needs_gradient(i)]
        returned = {i: context.return_gradient(i, boxes[i]) for i in wanted}
        kernel.add(dy=context.dy, **{f"dx{i}": some.view for i, some in returned.items()})
        kernel.add(**{f"grad {key}": view for key, view in context.grads.items()})
        used = tuple(name for name in kernel.views if name != "y")
        context.run(kernel, "backward", uses=used, timing=context.timing("backward_data"))
        for some in returned.values():
            some.start()
        for some in returned.values():
            some.finish()

    return backward


class _LocalKernel:
    """Calls a layer on its arrays, and copies what it returns into place."""

    def __init__(self, layer: Layer, box: Box, environment: Any, y: Any, dy: Any = None, **arrays: Any) -> None:
        self.layer, self.box, self.name, self.y, self.dy = layer, box, environment.name, y, dy
        self.device = environment.kernels.device
        self.inputs = [arrays[f"x{i}"] for i in range(sum(key[0] == "x" for key in arrays))]
        self.dxs = {int(key[2:]): array for key, array in arrays.items() if key.startswith("dx")}
        self.params = {key[6:]: array for key, array in arrays.items() if key.startswith("param ")}
        self.grads = {key[5:]: array for key, array in arrays.items() if key.startswith("grad ")}

    def forward(self) -> None:
        if not self.box.size:
            return
        y = self.layer.forward(self.inputs, self.params, self.box)
        self._check("forward()", y, self.box.shape)
        np.copyto(self.y, y)

    def backward(self) -> None:
        if not self.box.size:
            for array in (*self.grads.values(), *self.dxs.values()):
                array.fill(0)
            return
        dxs, grads = self.layer.backward(self.dy, self.inputs, self.params, self.box)
        for i, target in self.dxs.items():
            self._check(f"gradient {i} of backward()", dxs[i], target.shape)
            np.copyto(target, dxs[i])
        for key, array in self.grads.items():
            self._check(f"gradient of {key!r}", grads[key], array.shape)
            np.copyto(array, grads[key])

    def _check(self, what: str, array: Any, shape: Sequence[int]) -> None:
        """Refuse what is of another shape, or on the host where the arrays of the layer are not."""
        if np.shape(array) != tuple(shape):
            raise ValueError(f"{self.name}: {what}: expected an array of shape {tuple(shape)}, got {np.shape(array)}")
        if not self.device.owns(array):
            raise ValueError(
                f"{self.name}: {what}: expected an array on {self.device.name} as those of the layer are, got "
                f"{type(array).__module__}.{type(array).__name__}; make arrays by np.zeros_like(x) and the like"
            )
