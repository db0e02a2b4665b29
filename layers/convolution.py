"""Convolution, cut along samples and space, with halo exchanges that overlap with computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..dtensor import Blocks, Box, Layout, Window, input_box, output_box
from ..kernels import Geometry
from ..kernels.access import reads, writes
from ..kernels.fused import FusedActivation
from ..lowering.context import Context, Gathered, Lowered
from ..lowering.views import Region
from .activation import activated, fused
from .layer import Layer, Passes, Shape
from .lowering import cuts_channels, gradient_of, lower_contraction
from .needs import Stencil, all_of, reaching
from .padding import Mode, WindowPadding
from .parameter import Parameter, lower_weight_norm, with_lengths

__all__ = ["Conv", "LocalGeometry", "boundary_boxes", "local_geometry"]

#: Function that returns a geometry when a kernel is created. (A plan lowers layers many times, without kernels.)
LocalGeometry = Callable[[], Geometry]


class Conv(Layer):
    """Convolution over 1, 2 or 3 spatial axes (a correlation, as usual in deep learning).

    ``y[n, o, k] = b[k] + sum_{j, c} x[n, o * stride - pad_lo + dilation * j, c] * w[k, j, c]``

    Output size per axis: ``floor((n + pad_lo + pad_hi - dilation * (kernel - 1) - 1) / stride) + 1``.

    Parameters
    ----------
    filters
        Number of output channels K.
    kernel, stride, padding, dilation
        See :class:`Stencil`.
    bias
        Whether to add a bias per filter.
    groups
        Number of groups: input and output channels are divided into groups that do not mix.
    activation
        None; a name (``"relu"``, ``"silu"``, ...) or a layer. The kernel computes an activation whose gradient follows
        from its output (relu, leaky_relu, elu, sigmoid, tanh, hard_sigmoid); any other is a layer after it.
    weight_norm
        Whether the weights are ``g[k] * w[k] / |w[k]|`` with directions `w` and lengths `g` ``(K,)``, as in torch's
        ``weight_norm`` (Salimans and Kingma 2016). The channels of such a layer cannot be cut.
    padding_mode
        As in torch: ``"zeros"``, ``"reflect"``, ``"replicate"``, ``"circular"``; also ``"sphere"`` or a
        :class:`Sphere`. Or a sequence with one of them per spatial axis. Others than zeros create a :class:`Pad` before
        the layer.

    Notes
    -----
    Weights ``(K, *kernel, C / groups)``, whole on every rank; input and output are cut in samples and space. If
    channels are cut too (see :mod:`halograd.layers.lowering`), a rank holds the block of its filters and input
    channels.
    Forward: halo of `x`, one kernel; `x` and its halo are kept for the filter gradient. Backward: the filter gradient
    runs while the halo of `dy` travels; then the data gradient (Dryden et al. 2019, Sections III-A and IV-A).
    Communication per process: the halo, twice; the sum of the filter gradients over all ranks.
    """

    recomputation = "block"

    # x -> y; dy -> dx; the gradient of the filter reads x and dy.
    passes = Passes()
    weight_norm = False
    inputs_taken = 1
    widens = True

    def __init__(
        self,
        filters: int,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence = 0,
        dilation: int | Sequence[int] = 1,
        bias: bool = True,
        groups: int = 1,
        activation: str | Layer | None = None,
        weight_norm: bool = False,
        padding_mode: Mode | Sequence[Mode] = "zeros",
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if filters < 1 or groups < 1 or filters % groups:
            raise ValueError(f"filters ({filters}) must be a positive multiple of groups ({groups})")
        self.filters, self.groups, self.bias = filters, groups, bias
        self.activation = activated(self, activation, by_input=False)
        self.stencil: Stencil = Stencil(kernel, stride, padding, dilation)
        if padding_mode != "zeros":
            self.before = WindowPadding(self.stencil, padding_mode, name and f"{name}_pad")
            self.stencil = self.before.stencil
        self.cuts_channels = "contracts" if groups == 1 and not weight_norm else "no"
        if weight_norm:
            self.weight_norm = True
        self.takes_padded_channels = groups == 1

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        if shape[-1] % self.groups:
            raise ValueError(f"Conv: {shape[-1]} input channels are not a multiple of groups ({self.groups})")
        return (*self.stencil.output_spatial(shape[:-1], "Conv"), self.filters)

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        (shape,) = shapes
        kernel = tuple(w.kernel for w in self.windows(shape))
        fan_in = math.prod(kernel) * shape[-1] // self.groups
        shape_w = (self.filters, *kernel, shape[-1] // self.groups)
        w = Parameter(shape_w, "he", fan_in, channel_axis=0, input_axis=len(kernel) + 1, rounded=True)
        found = {"w": w, "b": Parameter((self.filters,), decay=False, channel_axis=0)} if self.bias else {"w": w}
        return with_lengths(found) if self.weight_norm else found

    def flops(self, *shapes: Shape) -> int:
        kernel, channels = math.prod(w.kernel for w in self.windows(shapes[0])), shapes[0][-1] // self.groups
        return 2 * kernel * channels * math.prod(self.output_shape(*shapes))

    def gradient_box(self, box: Box, shape: Shape, out_shape: Shape) -> Box:
        return output_box(self.windows(shape), box, (0, *out_shape))

    def gradient_blocks(self, x: Layout, output: Layout) -> Blocks:
        channels = all_of(x.boxes.axes[-1], output.shape[-1])
        return reaching(self.windows(x.shape[1:]), x.boxes, output.shape[1:-1], channels)

    def of_filters(self, filters: int) -> Layer:
        return self.changed(filters=filters)

    def lower(self, context: Context) -> Lowered:
        return lower_weight_norm(context, self._lower) if self.weight_norm else self._lower(context)

    def _lower(self, context: Context) -> Lowered:
        windows = self.windows(context.shapes[0])
        if cuts_channels(context.parts):
            return lower_contraction(context, _ConvKernels(windows), fused(self))
        return _lower(self, context, windows)


def _lower(layer: Conv, context: Context, windows: Sequence[Window]) -> Lowered:
    """Lower with the halo algorithm "pad" or "overlap".

    "pad" waits for the halos and runs one kernel. "overlap" runs one kernel over the whole block while the halos
    travel, then computes the boundary strips again.
    """
    f = fused(layer)
    slack = [0, *(w.stride - 1 for w in windows), 0]
    x = context.gather(0, context.clipped(0, slack), padded=layer.takes_padded_channels)
    geometry = local_geometry(windows, x.box, context.box, layer.groups)
    w, b = context.params["w"], context.params.get("b")
    kernel = context.kernel(partial(conv_forward, geometry, f), x=x.view, w=w, b=b, y=context.y)
    kernel.fuse = partial(partial, conv_forward, geometry) if f is None else None
    overlaps = context.overlaps_halo and x.communicates
    x.start()
    if not overlaps:
        x.finish()
    context.run(kernel, timing=context.timing("forward"))
    if overlaps:
        x.finish()
        _lower_strips(context, windows, x, layer.groups, f)

    def backward() -> None:
        dy, masked = context.dy, None
        if f is not None:
            dy = masked = context.scratch(dy.shape)
            context.run(context.kernel(partial(gradient_of, f), y=context.y_of_gradient(), dy=context.dy, dx=masked))
        grads = {"dw": context.grads["w"], "db": context.grads.get("b")}
        if context.output.wide:  # the filters' gradient is a sum, in which each element of dy counts once
            read = context.clipped(0, slack, own=True)[context.rank]
            held = Region(dy, context.output.held_gradient[context.rank])
            views = {"x": Region(x.view, x.box).part(read), "dy": held.part(context.own)}
            views = {name: context.packed(view) for name, view in views.items()}
            made = local_geometry(windows, read, context.own, layer.groups)
        else:
            views, made = {"x": x.view, "dy": dy}, geometry
        weights = context.kernel(partial(conv_filter, made), **views, **grads)
        if not context.needs_gradient(0):
            context.run(weights, timing=context.timing("backward_filter"))
            return
        dx, owned = context.gradient(0), context.inputs[0].held_gradient[context.rank]
        halo = context.gather_gradient(context.gradient_blocks, masked)
        halo.start()
        context.run(weights, timing=context.timing("backward_filter"))
        halo.finish()
        if owned.size and not halo.box.size:
            data = context.kernel(zeroing, array=dx)
        else:
            back = local_geometry(windows, owned, halo.box, layer.groups)
            data = context.kernel(partial(conv_data, back), dy=halo.view, w=w, dx=dx)
        context.run(data, timing=context.timing("backward_data"))

    return Lowered(backward)


class _ConvKernels:
    """Kernels of a convolution on blocks of filters and input channels."""

    def __init__(self, windows: Sequence[Window]) -> None:
        self.windows = windows

    def forward(self, x: Box, y: Box, f: FusedActivation | None) -> Callable[..., Any]:
        return partial(conv_forward, local_geometry(self.windows, x, y), f)

    def filter(self, x: Box, y: Box) -> Callable[..., Any]:
        return partial(conv_filter, local_geometry(self.windows, x, y))

    def data(self, x: Box, y: Box) -> Callable[..., Any]:
        return partial(conv_data, local_geometry(self.windows, x, y))


@reads("x", "w", "b")
@writes("y")
def conv_forward(
    geometry: LocalGeometry, f: FusedActivation | None, environment: Any, x: Any, w: Any, b: Any, y: Any
) -> Any:
    return environment.kernels.conv_forward(x, w, b, y, geometry(), f)


@reads("x", "dy")
@writes("dw", "db")
def conv_filter(geometry: LocalGeometry, environment: Any, x: Any, dy: Any, dw: Any, db: Any) -> Any:
    return environment.kernels.conv_backward_filter(x, dy, dw, db, geometry())


@reads("dy", "w")
@writes("dx")
def conv_data(geometry: LocalGeometry, environment: Any, dy: Any, w: Any, dx: Any) -> Any:
    return environment.kernels.conv_backward_data(dy, w, dx, geometry())


@writes("array")
def zeroing(environment: Any, array: Any) -> Callable[[], None]:
    """Return the kernel that sets a gradient to zero, because no output depends on its array."""
    return lambda: array.fill(0)


def local_geometry(windows: Sequence[Window], x: Box, y: Box, groups: int = 1) -> LocalGeometry:
    """Return a function that returns the kernel's geometry for the output box `y` and the input box `x`.

    The padding of a side is the part of the window of `y` outside `x`: the real padding at the ends of the array, none
    where `x` has its halo. At the far side it may be negative (`x` is larger than needed).
    """
    return partial(_local_geometry, windows, x, y, groups)


def _local_geometry(windows: Sequence[Window], x: Box, y: Box, groups: int) -> Geometry:
    needed = input_box(windows, y, 1)
    padding = []
    for w, (a, b), (c, d) in zip(windows, needed.ranges[1:-1], x.ranges[1:-1]):
        if y.size and c < a:
            raise AssertionError(f"the input box {x} begins before what {y} needs: {needed}")
        hi = b - d
        padding.append((max(c - a, 0), 0 if -w.stride < hi < 0 else hi))
    return Geometry(
        kernel=tuple(w.kernel for w in windows),
        stride=tuple(w.stride for w in windows),
        dilation=tuple(w.dilation for w in windows),
        padding=tuple(padding),
        groups=groups,
    )


def boundary_boxes(windows: Sequence[Window], out: Box, owned: Box, shape: Sequence[int]) -> list[Box]:
    """Return disjoint boxes that cover the outputs in `out` that need inputs outside `owned`. Pure arithmetic.

    `shape` is the input's global shape: elements outside it are padding, and belong to no halo.
    """
    boxes = []
    rest = out
    for axis, w in enumerate(windows, start=1):
        start, stop = rest.ranges[axis]
        first, last = start, stop
        size, (a, b) = shape[axis], owned.ranges[axis]
        while first < stop and max(0, w.input_range(first, first + 1)[0]) < a:
            first += 1
        while last > first and min(size, w.input_range(last - 1, last)[1]) > b:
            last -= 1
        boxes += [rest.replace(axis, start, first), rest.replace(axis, last, stop)]
        rest = rest.replace(axis, first, last)
    return [box for box in boxes if box.size]


def _lower_strips(
    context: Context, windows: Sequence[Window], x: Gathered, groups: int, f: FusedActivation | None
) -> None:
    """Compute the boundary strips of a convolution: the outputs that need a halo. Local.

    An earlier kernel ran before the halos arrived, so its results for these outputs are wrong. ::

        +---------------+
        |     top       |      interior: outputs whose inputs this rank owns
        +---+-------+---+      strips: the others, computed again when the halo has arrived
        |lef|interio|rig|
        +---+-------+---+
        |    bottom     |
        +---------------+
    """
    value = context.inputs[0]
    shape, y, origin = value.layout.shape, context.y, context.box.start
    before, kernels, behind = [], [], []
    for box in boundary_boxes(windows, context.box, value.box, shape):
        need = input_box(windows, box, shape[-1]) & Box.of_shape(shape)
        source = x.view.part([a - o for a, o in zip(need.start, x.box.start)], need.shape)
        target = y.part([a - o for a, o in zip(box.start, origin)], box.shape)
        xs = source if source.packed else context.scratch(need.shape, value.dtype)
        ys = target if target.packed else context.scratch(box.shape)
        before += [] if xs is source else [(source, xs)]
        behind += [] if ys is target else [(ys, target)]
        geometry = local_geometry(windows, need, box, groups)
        w, b = context.params["w"], context.params.get("b")
        timing = context.timing("boundary", inputs=(need.shape,), outputs=box.shape[1:-1])
        kernels.append((context.kernel(partial(conv_forward, geometry, f), x=xs, w=w, b=b, y=ys), timing))
    # One operation copies all strips: each strip has its own arrays.
    context.copy(*before)
    for kernel, timing in kernels:
        context.run(kernel, timing=timing)
    context.copy(*behind)
