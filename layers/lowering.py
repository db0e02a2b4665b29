"""Lowering methods that several layers use.

- :func:`lower_contraction`: convolutions and dense layers whose channels are cut;
- :func:`lower_local`: layers that are written as `forward` and `backward` on plain local arrays;
- :class:`Pair`, :func:`gradient_of`: kernels of two passes, and the gradient of a fused activation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from ..device import is_low
from ..dtensor import Blocks, Box, Layout, intervals
from ..kernels.access import ANY, Access, access_of, makes, reads, writes
from ..kernels.kernel import FusedActivation
from ..lowering.context import Context, Lowered
from .parameter import block_channels

__all__ = [
    "Pair",
    "cuts_channels",
    "exchange_all",
    "gradient_of",
    "lower_contraction",
    "lower_local",
    "partial_boxes",
    "read_boxes",
]


class Pair:
    """Forward and backward kernels that are created together, because backward uses what forward stores."""

    def __init__(self, forward: Any, backward: Any) -> None:
        self.forward, self.backward = forward, backward

    def close(self) -> None:
        """Free both kernels."""
        for kernel in (self.forward, self.backward):
            if kernel is not None:
                kernel.close()


class Exchanging(Protocol):
    """Protocol of an exchange that other operations may overlap."""

    def start(self) -> None: ...
    def finish(self) -> None: ...


def exchange_all(exchanges: Sequence[Exchanging]) -> None:
    """Add the starts of all exchanges, then their finishes, so that their messages travel at the same time."""
    for exchange in exchanges:
        exchange.start()
    for exchange in exchanges:
        exchange.finish()


def cuts_channels(parts: Mapping[str, int]) -> bool:
    """Return whether output channels or input channels are cut."""
    return parts["channel"] * parts["input_channel"] > 1


def partial_boxes(output: Layout, parts: Mapping[str, int]) -> Blocks:
    """Return, per rank, the box of the output of which it computes a partial sum, with all filters of its block.

    Pure arithmetic.
    """
    # Ranks along the channel axis: blocks of filters, each with all blocks of input channels one after the other.
    filters, inner = block_channels(output.shape[-1], parts), parts["input_channel"]
    return output.boxes.replace(-1, tuple(own for own in filters for _ in range(inner)))


def read_boxes(needed: Blocks, channels: int, parts: Mapping[str, int]) -> Blocks:
    """Return, per rank, the `needed` box with only its block of the input channels. Pure arithmetic."""
    # Input channels vary fastest over the ranks, so their blocks repeat for each block of filters.
    return needed.replace(-1, intervals(channels, parts["input_channel"]) * parts["channel"])


class ContractionKernels(Protocol):
    """Factories of a layer's kernels on blocks: `x` is the input box, `y` the output box of which a rank has a summand.

    The kernels take the arrays ``x, w, b, y`` (forward), ``x, dy, dw, db`` (filter) and ``dy, w, dx`` (data).
    """

    def forward(self, x: Box, y: Box, f: FusedActivation | None) -> Callable[..., Any]: ...
    def filter(self, x: Box, y: Box) -> Callable[..., Any]: ...
    def data(self, x: Box, y: Box) -> Callable[..., Any]: ...


def lower_contraction(context: Context, kernels: ContractionKernels, f: FusedActivation | None = None) -> Lowered:
    """Lower a layer that contracts channels, on blocks of filters and input channels. Its halos are not overlapped.

    A rank has a block of filters and a block of input channels. It gathers its block of input channels from the ranks
    that own parts of it. With its block of the weights it computes a partial sum for all its filters. The owners, each
    of which has a part of the filters, add up the partial sums. ::

        forward    x    gather over the ranks with other filters        (only the halo if only the sum is cut)
                   y    sum over the ranks with other input channels    (nothing to do if only the filters are cut)
        backward   dy   gather, adjoint of the sum of y
                   dw   local; summed over the ranks with the same block of weights only
                   dx   sum at the owners, adjoint of the gather of x, halo included

    References
    ----------
    Dryden et al. 2019, Section III-D; Jia et al. 2018, Section 4 (channel cuts).
    """
    layout, parts = context.output.layout, context.parts
    channels = context.inputs[0].layout.shape[-1]
    boxes, read = partial_boxes(layout, parts), read_boxes(context.clipped(0), channels, parts)
    box, x = boxes[context.rank], context.gather(0, read)
    summed = parts["input_channel"] > 1
    # Only the ranks that hold biases add them, so that each is added once.
    bias = context.params.get("b")
    bias = None if bias is None or not bias.size else bias
    # A partial sum is over all filters of a part; this rank owns the output of only some of them.
    y = context.scratch(box.shape) if summed else context.y
    # Times are those of the largest block of any rank, for which the others wait.
    inputs = ((*context.timing("forward").inputs[0][:-1], int(read.extents[-1].max())),)
    timed = partial(context.timing, inputs=inputs, filters=int(boxes.extents[-1].max()))
    # An activation is not additive: it follows the sum.
    forward = kernels.forward(x.box, box, None if summed else f)
    x.start()
    x.finish()
    context.run(context.kernel(forward, x=x.view, w=context.params["w"], b=bias, y=y), timing=timed("forward"))
    if summed:
        total = context.exchange(boxes, layout.boxes, y, context.y, combine="sum", kind="channel")
        context.start(total)
        context.finish(total)
        if f is not None:
            context.run(context.kernel(partial(_applying, f), y=context.y))

    def backward() -> None:
        masked = None
        if f is not None:
            # Before the gather: only the owners have y.
            masked = context.scratch(context.box.shape)
            context.run(context.kernel(partial(gradient_of, f), y=context.y_again(), dy=context.dy, dx=masked))
        dy = context.gather_gradient(boxes, masked, kind="channel")
        dy.start()
        dy.finish()
        returned = None
        if context.needs_gradient(0):
            returned = context.return_gradient(0, read)
            data = context.kernel(kernels.data(x.box, box), dy=dy.view, w=context.params["w"], dx=returned.view)
            context.run(data, timing=timed("backward_data"))
            returned.start()
        grads = {"dw": context.grads["w"], "db": None if bias is None else context.grads["b"]}
        # While the gradient of x travels.
        weights = context.kernel(kernels.filter(x.box, box), x=x.view, dy=dy.view, **grads)
        context.run(weights, timing=timed("backward_filter"))
        if returned is not None:
            returned.finish()

    return Lowered(backward)


@reads("y")
@writes("y")
def _applying(f: FusedActivation, environment: Any, y: Any) -> Any:
    return environment.kernels.activation(f.kind, y, y, None, None, f.alpha)[0]


@reads("y", "dy")
@writes("dx")
def gradient_of(f: FusedActivation, environment: Any, y: Any, dy: Any, dx: Any) -> Any:
    """Return the kernel ``dx = f' * dy``, which computes ``f'`` from the output `y`."""
    return environment.kernels.activation(f.kind, y, y, dy, dx, f.alpha)[1]


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
    exchange_all(inputs)
    views = {"y": context.y} | {f"x{i}": gathered.view for i, gathered in enumerate(inputs)}
    views |= {f"param {key}": view for key, view in context.params.items()}
    forward, back = (_local_access(layer, method) for method in ("forward", "backward"))

    @makes(forward=Access((*forward, "param *"), ("y",)), backward=Access(("dy", *back, "param *"), ("dx*", "grad *")))
    def local_kernel(environment: Any, **arrays: Any) -> _LocalKernel:
        return _LocalKernel(layer, context.box, environment, **arrays)

    # One kernel object for both passes: `backward` gets the arrays that `forward` read.
    kernel = context.kernel(local_kernel, **views)
    kernel.recordable = False  # it allocates its arrays in every step
    context.run(kernel, "forward", timing=context.timing("forward"))

    def backward() -> None:
        needed = [i for i in range(len(boxes)) if context.needs_gradient(i)]
        returned = {i: context.return_gradient(i, boxes[i]) for i in needed}
        kernel.add(dy=context.dy, **{f"dx{i}": gradient.view for i, gradient in returned.items()})
        kernel.add(**{f"grad {key}": view for key, view in context.grads.items()})
        context.run(kernel, "backward", timing=context.timing("backward_data"))
        for gradient in returned.values():
            gradient.start()
        for gradient in returned.values():
            gradient.finish()

    return Lowered(backward)


def _local_access(layer: LocalLayer, method: str) -> tuple[str, ...]:
    """Return the names of the inputs that a method of a layer reads: all, if it declares nothing."""
    access = access_of(type(layer), method)
    return ("x*",) if access is ANY else access.reads


class _LocalKernel:
    """Kernel that calls a layer on its arrays, and copies the results to their targets.

    Arrays of 16 bits are widened to float32 before a call, because sums in 16 bits lose their summands: NumPy adds 4096
    ones in bfloat16 to 256.
    """

    def __init__(self, layer: LocalLayer, box: Box, environment: Any, y: Any, dy: Any = None, **arrays: Any) -> None:
        self.layer, self.box, self.name, self.y, self.dy = layer, box, environment.name, y, dy
        self.device = environment.kernels.device
        # By name: inputs "x0", "x1", ..., their gradients "dx0", ..., parameters "param w", their gradients "grad w".
        self.inputs = [arrays[f"x{i}"] for i in range(sum(key[0] == "x" for key in arrays))]
        self.dxs = {int(key[2:]): array for key, array in arrays.items() if key.startswith("dx")}
        self.params = {key[6:]: array for key, array in arrays.items() if key.startswith("param ")}
        self.grads = {key[5:]: array for key, array in arrays.items() if key.startswith("grad ")}

    def forward(self) -> None:
        if not self.box.size:
            return
        # Only for a block with elements: layers of the user need not handle empty arrays.
        y = self.layer.forward([_widened(x) for x in self.inputs], self._wide_params(), self.box)
        self._check("forward()", y, self.box.shape)
        np.copyto(self.y, y)

    def backward(self) -> None:
        if not self.box.size:  # its gradients are added to those of other ranks
            for array in (*self.grads.values(), *self.dxs.values()):
                array.fill(0)
            return
        inputs = [_widened(x) for x in self.inputs]
        dxs, grads = self.layer.backward(_widened(self.dy), inputs, self._wide_params(), self.box)
        for i, target in self.dxs.items():
            self._check(f"gradient {i} of backward()", dxs[i], target.shape)
            np.copyto(target, dxs[i])
        for key, array in self.grads.items():
            self._check(f"gradient of {key!r}", grads[key], array.shape)
            np.copyto(array, grads[key])

    def _wide_params(self) -> dict[str, Any]:
        return {key: _widened(array) for key, array in self.params.items()}

    def _check(self, what: str, array: Any, shape: Sequence[int]) -> None:
        """Raise ValueError if an array has another shape, or is not on the device of the layer's arrays."""
        if np.shape(array) != tuple(shape):
            raise ValueError(f"{self.name}: {what}: expected an array of shape {tuple(shape)}, got {np.shape(array)}")
        if not self.device.owns(array):
            raise ValueError(
                f"{self.name}: {what}: expected an array on {self.device.name} like those of the layer, got "
                f"{type(array).__module__}.{type(array).__name__}; create arrays by np.zeros_like(x) or similar"
            )


def _widened(array: Any) -> Any:
    """Return an array of 16 bits as a float32 copy; any other as it is."""
    return array.astype(np.float32) if is_low(array.dtype) else array
