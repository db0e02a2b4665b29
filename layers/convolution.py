"""Convolution and transposed convolution, cut along samples and space; halo exchanges can overlap with computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..dtensor import Blocks, Box, Layout, Window, input_box, output_box
from ..kernels import Geometry
from ..kernels.access import reads, writes
from ..kernels.kernel import BatchNormArrays, BatchNormTraining, FusedActivation
from ..lowering.context import Context, Gathered, Lowered
from ..lowering.operations import Summing
from ..lowering.views import Region
from .activation import activated, fused
from .layer import Layer, Passes, Shape
from .lowering import cuts_channels, gradient_of, lower_contraction
from .needs import Stencil, all_of, check_spatial, reaching, spread
from .padding import Mode, WindowPadding
from .parameter import Parameter, lower_weight_norm, with_lengths

__all__ = ["Conv", "ConvTranspose", "LocalGeometry", "boundary_boxes", "local_geometry"]

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
        from its output (relu, leaky_relu, elu, sigmoid, tanh, hard_sigmoid); any other is a layer after this one.
    weight_norm
        Whether the weights are ``g[k] * w[k] / |w[k]|`` with directions `w` and lengths `g` ``(K,)``, as in torch's
        ``weight_norm`` (Salimans and Kingma 2016). The channels of such a layer cannot be cut.
    padding_mode
        As in torch: ``"zeros"``, ``"reflect"``, ``"replicate"``, ``"circular"``; also ``"sphere"`` or a
        :class:`Sphere`. Or a sequence with one of them per spatial axis. Modes other than zeros create a :class:`Pad`
        before the layer.

    Notes
    -----
    Weights ``(K, *kernel, C / groups)``, whole on every rank; input and output are cut in samples and space. If
    channels are cut too (see :mod:`halograd.layers.lowering`), a rank holds the block of its filters and input
    channels.
    Forward: halo of `x`, one kernel (with ``halo = "overlap"`` one more for each strip at the edges of the block); `x`
    and its halo are kept for the filter gradient. Backward: the filter gradient runs while the halo of `dy` travels;
    then the data gradient (Dryden et al. 2019, Sections III-A and IV-A).
    Communication per process: the halos of `x` and `dy`; the sum of the filter gradients over all ranks.
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
        # A block of input channels would hold parts of groups, or of the filters whose lengths weight_norm needs.
        self.cuts_channels = "contracts" if groups == 1 and not weight_norm else "no"
        if weight_norm:
            self.weight_norm = True
        # With groups, padding would move channels to other groups.
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
        parameters = {"w": w, "b": Parameter((self.filters,), decay=False, channel_axis=0)} if self.bias else {"w": w}
        return with_lengths(parameters) if self.weight_norm else parameters

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
    # A stride may skip elements at the end of the held box; with them it is used as it is, without a copy.
    slack = [0, *(w.stride - 1 for w in windows), 0]
    x = context.gather(0, context.clipped(0, slack), padded=layer.takes_padded_channels)
    geometry = local_geometry(windows, x.box, context.box, layer.groups)
    w, b = context.params["w"], context.params.get("b")
    kernel = context.kernel(partial(conv_forward, geometry, f), x=x.view, w=w, b=b, y=context.y)
    # Passes of the program may give this kernel an activation, or the sums of the norm after it.
    if f is None:
        # Called with an activation, it returns the factory of the kernel: partial(conv_forward, geometry, f).
        kernel.fuse = partial(partial, conv_forward, geometry)
        make = partial(_ignoring_norm, partial(ConvStatistics, geometry))
        methods = {"training": "train", "evaluation": "evaluate"}
        kernel.summing = Summing("y", ("x", "w", "y"), geometry, make, methods)
    # Ranks may differ in this: the exchange starts and finishes once in either order.
    overlaps = context.overlaps_halo and x.communicates
    x.start()
    if not overlaps:  # else the halo holds old numbers while the kernel runs: strips that read it are computed again
        x.finish()
    context.run(kernel, timing=context.timing("forward"))
    if overlaps:
        x.finish()
        _lower_strips(context, windows, x, layer.groups, f)

    def backward() -> None:
        dy, masked = context.dy, None
        if f is not None:
            # Before the halo of dy is sent, so that no rank needs the outputs of another rank.
            dy = masked = context.scratch(dy.shape)
            context.run(context.kernel(partial(gradient_of, f), y=context.y_of_gradient(), dy=context.dy, dx=masked))
        grads = {"dw": context.grads["w"], "db": context.grads.get("b")}
        if context.output.wide:  # the filters' gradient is a sum, in which each element of dy counts once
            read = context.clipped(0, slack, own=True)[context.rank]
            held = Region(dy, context.output.held_gradient[context.rank])
            views = {"x": Region(x.view, x.box).part(read), "dy": held.part(context.own)}
            views = {name: context.packed(view) for name, view in views.items()}
            filter_geometry = local_geometry(windows, read, context.own, layer.groups)
        else:
            views, filter_geometry = {"x": x.view, "dy": dy}, geometry
        weights = context.kernel(partial(conv_filter, filter_geometry), **views, **grads)
        weights.forks = grads["db"] is None  # sums of a bias use work space
        if not context.needs_gradient(0):
            context.run(weights, timing=context.timing("backward_filter"))
            return
        dx, owned = context.gradient(0), context.inputs[0].held_gradient[context.rank]
        halo = context.gather_gradient(context.gradient_blocks, masked)
        # Without an exchange to hide, the filter gradient may hide a sum that needs the data gradient (`hide_sums`).
        hides = halo.exchange is not None or not context.inputs[0].wide
        halo.start()
        if hides:
            context.run(weights, timing=context.timing("backward_filter"))
        halo.finish()
        # With a stride beyond the kernel, or padding removed, no output may read a block: its gradient is zero.
        if owned.size and not halo.box.size:
            data = context.kernel(zeroing, array=dx)
        else:
            back = local_geometry(windows, owned, halo.box, layer.groups)
            data = context.kernel(partial(conv_data, back), dy=halo.view, w=w, dx=dx)
            data.summing = Summing("dx", ("dx", "w", "dy"), back, partial(partial, conv_data_sums, back))
        context.run(data, timing=context.timing("backward_data"))
        if not hides:
            context.run(weights, timing=context.timing("backward_filter"))

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


class ConvStatistics:
    """Convolution that, in training, also computes the sums of a batch norm over its output."""

    def __init__(self, geometry: LocalGeometry, environment: Any, x: Any, w: Any, b: Any, y: Any, sums: Any) -> None:
        kernels = environment.kernels
        self._alone = kernels.conv_forward(x, w, b, y, geometry())
        self._summed = kernels.conv_forward_sums(x, w, b, y, sums, geometry())

    @reads("x", "w", "b")
    @writes("y")
    def evaluate(self) -> None:
        self._alone()

    @reads("x", "w", "b")
    @writes("y", "sums")
    def train(self) -> None:
        self._summed()

    def close(self) -> None:
        """Free the kernels."""
        self._alone.close()
        self._summed.close()


def _ignoring_norm(make: Callable[..., Any], eps: float, f: FusedActivation | None) -> Callable[..., Any]:
    # The sums of a convolution's output depend neither on the norm's epsilon nor on its activation.
    return make


@reads("dy", "w", "x", "gamma", "beta", "mean", "var")
@writes("dx", "sums", "dgamma", "dbeta")
def conv_data_sums(
    geometry: LocalGeometry,
    eps: float,
    f: FusedActivation | None,
    environment: Any,
    dy: Any,
    w: Any,
    dx: Any,
    x: Any,
    sums: Any,
    dgamma: Any = None,
    dbeta: Any = None,
    **vectors: Any,
) -> Any:
    """Return the kernel that computes a data gradient and, from it, the backward sums of the batch norm that precedes
    the convolution; `x` is the input of the norm.
    """
    # This kernel computes sums only, for which the count of elements (here 1) is not needed.
    training = BatchNormTraining(1, dgamma=dgamma, dbeta=dbeta)
    # The norm's `dy` is this dx; its `y`, which backward does not read here, only needs an array of the same shape.
    norm = BatchNormArrays(x, dx, dx, None, **vectors, sums=sums, means=sums, eps=eps, activation=f, training=training)
    return environment.kernels.conv_backward_data_sums(dy, w, geometry(), norm)


@writes("array")
def zeroing(environment: Any, array: Any) -> Callable[[], None]:
    """Return the kernel that sets an array to zero."""
    return lambda: array.fill(0)


def local_geometry(windows: Sequence[Window], x: Box, y: Box, groups: int = 1) -> LocalGeometry:
    """Return a function that returns the kernel's geometry for the output box `y` and the input box `x`.

    The padding of a side is the part of the window of `y` outside `x`: the real padding at the ends of the array, none
    where `x` has its halo. At the end of an axis it may be negative (`x` is larger than needed).
    """
    return partial(_local_geometry, windows, x, y, groups)


def _local_geometry(windows: Sequence[Window], x: Box, y: Box, groups: int) -> Geometry:
    needed = input_box(windows, y, 1)
    padding = []
    for w, (a, b), (c, d) in zip(windows, needed.ranges[1:-1], x.ranges[1:-1]):
        if y.size and c < a:
            raise AssertionError(f"the input box {x} begins before what {y} needs: {needed}")
        # A box may end with elements that no window reads (a stride skips them): these are not negative padding.
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
    rest = out  # what the strips of the axes before leave: strips share no corner
    for axis, w in enumerate(windows, start=1):
        start, stop = rest.ranges[axis]
        first, last = start, stop
        size, (a, b) = shape[axis], owned.ranges[axis]
        # From both ends inwards, past the outputs whose windows read rows that other ranks own.
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
    """Add the kernels of the boundary strips of a convolution: the outputs that need a halo. Local.

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
    before, kernels, after = [], [], []
    whole, w, b = Box.of_shape(shape), context.params["w"], context.params.get("b")
    for box in boundary_boxes(windows, context.box, value.box, shape):
        need = input_box(windows, box, shape[-1]) & whole
        source = x.view.part([a - o for a, o in zip(need.start, x.box.start)], need.shape)
        target = y.part([a - o for a, o in zip(box.start, origin)], box.shape)
        xs = source if source.packed else context.scratch(need.shape, value.dtype)
        ys = target if target.packed else context.scratch(box.shape)
        before += [] if xs is source else [(source, xs)]
        after += [] if ys is target else [(ys, target)]
        geometry = local_geometry(windows, need, box, groups)
        timing = context.timing("boundary", inputs=(need.shape,), outputs=box.shape[1:-1])
        kernels.append((context.kernel(partial(conv_forward, geometry, f), x=xs, w=w, b=b, y=ys), timing))
    # One operation copies all strips: each strip has its own arrays.
    context.copy(*before)
    for kernel, timing in kernels:
        context.run(kernel, timing=timing)
    context.copy(*after)


class ConvTranspose(Layer):
    """Transposed convolution over 1, 2 or 3 spatial axes: the adjoint of a convolution from `y` to `x`.

    ``y[n, i * stride - pad_lo + dilation * j, k] += x[n, i, c] * w[c, j, k]``, plus ``b[k]``

    Output size per axis (as torch):
    ``(n - 1) * stride - pad_lo - pad_hi + dilation * (kernel - 1) + output_padding + 1``.

    Parameters
    ----------
    filters
        Number of output channels K.
    kernel, stride, dilation
        One number for all spatial axes or one per axis.
    padding
        Rows that are removed from the full result: a number, one per axis, one ``(lo, hi)`` pair per axis, or
        ``"same"``: the output is ``n * stride`` long.
    output_padding
        Positions added at the end; less than the stride or the dilation. Not with ``"same"``.
    bias
        Whether to add a bias per filter.
    groups
        Number of groups: input and output channels are divided into groups that do not mix.
    activation
        None; a name (``"relu"``, ``"silu"``, ...) or a layer: the activation is a layer after this one.

    Notes
    -----
    Weights ``(C, *kernel, K / groups)``, whole on every rank: those of the convolution from `y` to `x`. Input and
    output are cut in samples and space. Forward: halo of `x`, data gradient of that convolution. Backward: halo of
    `dy`, forward kernel of that convolution for `dx`, its filter gradient for `dw`. Communication per process: the two
    halos; the sum of the filter gradients over all ranks.
    """

    recomputation = "block"
    passes = Passes()
    inputs_taken = 1

    def __init__(
        self,
        filters: int,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence = 0,
        output_padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        bias: bool = True,
        groups: int = 1,
        activation: str | Layer | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if filters < 1 or groups < 1 or filters % groups:
            raise ValueError(f"filters ({filters}) must be a positive multiple of groups ({groups})")
        if isinstance(padding, str) and padding != "same":
            raise ValueError(f"padding: expected 'same', numbers or (lo, hi) pairs, got {padding!r}")
        self.filters, self.groups, self.bias = filters, groups, bias
        self.kernel, self.stride = kernel, stride
        #: None for "same".
        self.padding: int | Sequence[Any] | None = None if isinstance(padding, str) else padding
        self.output_padding, self.dilation = output_padding, dilation
        activated(self, activation, by_input=None)

    def windows(self, shape: Shape) -> tuple[Window, ...]:
        """Return, per spatial axis, the window of the convolution whose adjoint this layer is: it slides over `y`.

        Output padding is the part at the end of `y` that this convolution does not read: it reduces the padding at the
        end.
        """
        axes = len(shape) - 1
        per_axis = [
            spread(what, value, axes)
            for what, value in (
                ("kernel", self.kernel),
                ("stride", self.stride),
                ("dilation", self.dilation),
                ("output_padding", self.output_padding),
            )
        ]
        return tuple(self._window(k, s, d, more, axis) for axis, (k, s, d, more) in enumerate(zip(*per_axis)))

    def _window(self, kernel: int, stride: int, dilation: int, more: int, axis: int) -> Window:
        if not 0 <= more < max(stride, dilation):
            raise ValueError(
                f"output_padding: expected less than the stride ({stride}) or the dilation ({dilation}), got {more}"
            )
        if self.padding is None:
            if more:
                raise ValueError("output_padding: padding 'same' determines the output size; leave it at 0")
            total = dilation * (kernel - 1) + 1 - stride
            lo = max(0, total) // 2
            # A stride beyond the kernel gives a negative total: the output is extended at the end, to n * stride.
            return Window(kernel, stride, lo, total - lo, dilation)
        entry = self.padding if isinstance(self.padding, int) else self.padding[axis]
        lo, hi = (entry, entry) if isinstance(entry, int) else entry
        if min(lo, hi) < 0:
            raise ValueError(f"padding: expected numbers >= 0, got {(lo, hi)}")
        return Window(kernel, stride, lo, hi - more, dilation)

    def of_outputs(self, shape: Shape, outputs: tuple[int, ...]) -> tuple[Layer, Shape]:
        windows = self.windows(shape)
        fits = [(n - 1) * w.stride + w.extent - w.pad_lo - w.pad_hi == m for w, n, m in zip(windows, shape, outputs)]
        if all(fits):
            return self, shape
        spatial, pads, more = [], [], []
        for w, n, count, fit in zip(windows, shape, outputs, fits):
            lo, hi = w.pad_lo, w.pad_hi
            if not fit:  # all inputs that reach a block in the middle; outputs around it are removed
                n = max((count + w.extent - 2) // w.stride + 1, -(-(count - w.extent) // w.stride) + 1)
                around = (n - 1) * w.stride + w.extent - count
                lo, hi = around // 2, around - around // 2
            spatial.append(n)
            # `_window` subtracts output padding from the padding at the end: that of a negative `hi`.
            pads.append((lo, max(0, hi)))
            more.append(max(0, -hi))
        return self.changed(padding=tuple(pads), output_padding=tuple(more)), (*spatial, shape[-1])

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        check_spatial(shape[:-1], "ConvTranspose")
        if shape[-1] % self.groups:
            raise ValueError(f"ConvTranspose: {shape[-1]} input channels are not a multiple of groups ({self.groups})")
        if isinstance(self.padding, Sequence) and len(self.padding) != len(shape) - 1:
            raise ValueError(
                f"padding: expected one entry for each of {len(shape) - 1} spatial axes, got {self.padding}"
            )
        windows = self.windows(shape)
        sizes = tuple((n - 1) * w.stride + w.extent - w.pad_lo - w.pad_hi for n, w in zip(shape, windows))
        if min(sizes) < 1:
            raise ValueError(
                f"ConvTranspose: padding {[(w.pad_lo, w.pad_hi) for w in windows]} leaves nothing of the output of "
                f"{shape[:-1]}: {sizes}; reduce the padding"
            )
        return (*sizes, self.filters)

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        (shape,) = shapes
        windows = self.windows(shape)
        kernel = tuple(w.kernel for w in windows)
        # On average, an output element sums this number of the kernel's taps.
        taps = max(1, math.prod(kernel) // math.prod(w.stride for w in windows))
        shape_w, fan_in = (shape[-1], *kernel, self.filters // self.groups), taps * shape[-1] // self.groups
        w = Parameter(shape_w, "he", fan_in, rounded=True)
        return {"w": w, "b": Parameter((self.filters,), decay=False)} if self.bias else {"w": w}

    def flops(self, *shapes: Shape) -> int:
        # Each position of the input is multiplied by all weights once.
        return 2 * self.parameters(*shapes)["w"].size * math.prod(shapes[0][:-1])

    def input_boxes(self, box: Box, *shapes: Shape) -> tuple[Box, ...]:
        """Return the box of the inputs on which the output `box` depends; it never reaches outside the array."""
        (shape,) = shapes
        return (output_box(self.windows(shape), box, (0, *shape)),)

    def gradient_box(self, box: Box, shape: Shape, out_shape: Shape) -> Box:
        needed = input_box(self.windows(shape), box, out_shape[-1]) & Box((0,) * box.ndim, (box.stop[0], *out_shape))
        return needed if needed.size else Box((0,) * box.ndim, (0,) * box.ndim)

    def lower(self, context: Context) -> Lowered:
        value, windows, groups = context.inputs[0], self.windows(context.shapes[0]), self.groups
        x, w, bias = context.gather(0, context.needed(0)), context.params["w"], context.params.get("b")
        x.start()
        x.finish()
        # Unless an input reaches this block, its output is the bias alone.
        kernel = context.kernel(zeroing, array=context.y)
        if x.box.size:
            # The arguments are exchanged: the convolution whose adjoint this is reads y and writes x.
            geometry = local_geometry(windows, context.box, x.box, groups)
            kernel = context.kernel(partial(conv_data, geometry), dy=x.view, w=w, dx=context.y)
        context.run(kernel, timing=context.timing("forward"))
        if bias is not None:  # a kernel of its own: data gradients have no bias
            context.run(context.kernel(_bias, y=context.y, b=bias))

        def backward() -> None:
            dy = context.gather_gradient(context.gradient_blocks)
            dy.start()
            # Without a pair of an input and an output, the gradients of this rank are zero.
            paired = value.box.size and dy.box.size
            geometry = local_geometry(windows, dy.box, value.box, groups) if paired else None
            if context.frozen:
                dy.finish()
            else:
                # It finishes the exchange of `dy` after the bias gradient, which needs no halo.
                _gradients(context, dy, geometry)
            if not context.needs_gradient(0):
                return
            data = context.kernel(zeroing, array=context.gradient(0))
            if geometry is not None:
                views = {"x": dy.view, "w": w, "b": None, "y": data.views["array"]}
                data = context.kernel(partial(conv_forward, geometry, None), **views)
            context.run(data, timing=context.timing("backward_data"))

        return Lowered(backward)


def _gradients(context: Context, dy: Gathered, geometry: LocalGeometry | None) -> None:
    """Add the kernels of the gradients of the parameters.

    The gradient of `w` pairs each owned input with all outputs that it reaches, so every pair is counted once.
    """
    if "b" in context.grads:
        context.run(context.kernel(_bias_gradient, dy=context.dy, db=context.grads["b"]))
    # Inputs with a halo, as forward read them, would count the pairs of the halo on two ranks.
    owned = context.gather(0, context.inputs[0].layout.boxes)
    owned.start()
    owned.finish()
    dy.finish()
    weights = context.kernel(zeroing, array=context.grads["w"])
    if geometry is not None:
        views = {"x": dy.view, "dy": owned.view, "dw": context.grads["w"], "db": None}
        weights = context.kernel(partial(conv_filter, geometry), **views)
    context.run(weights, timing=context.timing("backward_filter"))


@reads("y", "b")
@writes("y")
def _bias(environment: Any, y: Any, b: Any) -> Any:
    return environment.kernels.bias(y, b)


@reads("dy")
@writes("db")
def _bias_gradient(environment: Any, dy: Any, db: Any) -> Any:
    return environment.kernels.bias_gradient(dy, db)
