"""Lowering of layers that are written as `forward` and `backward` on plain local arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..dtensor import Box
from ..kernels.access import ANY, Access, access_of, makes
from ..lowering.context import Context, Lowered

__all__ = ["LocalLayer", "lower_local"]


class LocalLayer(Protocol):
    """Protocol of a layer with `forward` and `backward`; see :class:`halograd.layers.Layer`."""

    pad_value: float

    def forward(self, inputs: list[Any], params: Mapping[str, Any], box: Box) -> Any: ...

    def backward(
        self, dy: Any, inputs: list[Any], params: Mapping[str, Any], box: Box
    ) -> tuple[Sequence[Any], Mapping[str, Any]]: ...


def lower_local(layer: LocalLayer, context: Context) -> Lowered:
    """Lower a layer with `forward` and `backward`: gather its boxes, call it, and return gradients to their owners.

    Forward: exchange (assign), `layer.forward`. Backward: `layer.backward`, exchange (sum), the adjoint. The result is
    exact for every layer and every cut; layers with kernels of their own overlap more.

    Communication per process: the needed box minus the owned box, forward and backward.
    """
    boxes = [context.needed(i) for i in range(len(context.inputs))]
    inputs = [context.gather(i, blocks, layer.pad_value) for i, blocks in enumerate(boxes)]
    for gathered in inputs:
        gathered.start()
    for gathered in inputs:
        gathered.finish()
    views = {"y": context.y} | {f"x{i}": gathered.view for i, gathered in enumerate(inputs)}
    views |= {f"param {key}": view for key, view in context.params.items()}
    forward, back = (_local_access(layer, method) for method in ("forward", "backward"))

    @makes(forward=Access((*forward, "param *"), ("y",)), backward=Access(("dy", *back, "param *"), ("dx*", "grad *")))
    def local_kernel(environment: Any, **arrays: Any) -> _LocalKernel:
        return _LocalKernel(layer, context.box, environment, **arrays)

    kernel = context.kernel(local_kernel, **views)
    kernel.recordable = False  # it allocates its arrays in every step
    context.run(kernel, "forward", timing=context.timing("forward"))

    def backward() -> None:
        wanted = [i for i in range(len(boxes)) if context.needs_gradient(i)]
        returned = {i: context.return_gradient(i, boxes[i]) for i in wanted}
        kernel.add(dy=context.dy, **{f"dx{i}": some.view for i, some in returned.items()})
        kernel.add(**{f"grad {key}": view for key, view in context.grads.items()})
        context.run(kernel, "backward", timing=context.timing("backward_data"))
        for some in returned.values():
            some.start()
        for some in returned.values():
            some.finish()

    return Lowered(backward)


def _local_access(layer: LocalLayer, method: str) -> tuple[str, ...]:
    """Return the names of the inputs that a method of a layer reads: all, if it declares nothing."""
    found = access_of(type(layer), method)
    return ("x*",) if found is ANY else found.reads


class _LocalKernel:
    """Kernel that calls a layer on its arrays, and copies the results to their targets."""

    def __init__(self, layer: LocalLayer, box: Box, environment: Any, y: Any, dy: Any = None, **arrays: Any) -> None:
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
        """Raise ValueError if an array has another shape, or is not on the device of the layer's arrays."""
        if np.shape(array) != tuple(shape):
            raise ValueError(f"{self.name}: {what}: expected an array of shape {tuple(shape)}, got {np.shape(array)}")
        if not self.device.owns(array):
            raise ValueError(
                f"{self.name}: {what}: expected an array on {self.device.name} like those of the layer, got "
                f"{type(array).__module__}.{type(array).__name__}; create arrays by np.zeros_like(x) or similar"
            )
