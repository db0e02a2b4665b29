"""Convolution, cut along samples and space, with its halo exchanges hidden behind computation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from halograd.dtensor import Box, Window, input_box, output_box
from halograd.kernels import Geometry
from halograd.layers.binding import Binding
from halograd.layers.contraction import ContractionOperator, cuts_channels
from halograd.layers.layer import Layer, Shape
from halograd.layers.operator import Operator
from halograd.layers.parameter import Parameter
from halograd.layers.stencil import Stencil
from halograd.layers.strips import Strips
from halograd.layers.value import Gathered, Region

__all__ = ["Conv", "local_geometry"]


class Conv(Layer):
    """Convolution over 1, 2 or 3 spatial axes (correlation, as everywhere in deep learning).

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
        Input and output channels are cut into this many groups that do not mix.
    activation
        None or ``"relu"``, fused into the kernel.

    Notes
    -----
    Weights ``(K, *kernel, C / groups)``, whole on every rank; input and output are cut in samples and space. With
    channels cut too (see :mod:`halograd.layers.contraction`) a rank holds the block of its filters and input channels.
    Forward: halo of `x`, one kernel; it is kept for the filter gradient. Backward: while the halo of `dy`
    travels, the filter gradient runs; then the data gradient (Dryden et al. 2019, Sections III-A and IV-A).
    Communication per process: the halo, twice; the sum of the filter gradients over all ranks.
    """

    def __init__(
        self,
        filters: int,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: str | int | Sequence = 0,
        dilation: int | Sequence[int] = 1,
        bias: bool = True,
        groups: int = 1,
        activation: str | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if activation not in (None, "relu"):
            raise ValueError(f"activation: expected None or 'relu', got {activation!r}; others are layers of their own")
        if filters < 1 or groups < 1 or filters % groups:
            raise ValueError(f"filters ({filters}) must be a positive multiple of groups ({groups})")
        self.filters, self.groups, self.bias, self.activation = filters, groups, bias, activation
        self.stencil: Stencil = Stencil(kernel, stride, padding, dilation)
        self.cuts_channels = "contracts" if groups == 1 else "no"
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
        return {"w": w, "b": Parameter((self.filters,), decay=False, channel_axis=0)} if self.bias else {"w": w}

    def flops(self, *shapes: Shape) -> int:
        weights = self.parameters(*shapes)["w"].size
        return 2 * weights * math.prod(self.output_shape(*shapes)[:-1])

    def gradient_boxes(self, boxes: Sequence[Box], shape: Shape, out_shape: Shape) -> tuple[Box, ...]:
        """Per input box, the box of the output's gradient from which its gradient follows."""
        windows = self.windows(shape)
        return tuple(output_box(windows, box, (0, *out_shape)) for box in boxes)

    def bind(self, binding: Binding) -> Operator:
        return CutConvOperator(binding) if cuts_channels(binding.parts) else ConvOperator(binding)


class ConvOperator(Operator):
    """Convolution on one rank; halo algorithm "pad" (wait, one kernel) or "overlap" (one kernel over the
    whole block while the halos travel, then the boundary strips again)."""

    def __init__(self, b: Binding) -> None:
        layer = b.layer
        assert isinstance(layer, Conv)
        self.b, self.layer = b, layer
        self.windows = layer.windows(b.shapes[0])
        self.groups = layer.groups
        slack = [0, *(w.stride - 1 for w in self.windows), 0]
        self.x = b.gather(0, b.clipped_boxes(0, slack), padded=layer.takes_padded_channels)
        self.geometry = local_geometry(self.windows, self.x.box, b.box, layer.groups)
        relu = layer.activation == "relu"
        w, bias = b.params["w"], b.params.get("b")
        self.kernel = b.kernels.conv_forward(self.x.array, w, bias, b.output.array, self.geometry, relu=relu)
        self.strips: Strips | None = None
        if b.overlaps_halo and self.x.communicates:
            self.strips = Strips(b, self.windows, self.x, relu)
        b.end_scratch()
        self.relu = relu

    def forward(self) -> None:
        self.x.start()
        if self.strips is None:
            self.x.finish()
            self.kernel()
        else:
            self.kernel()
            self.x.finish()
            self.strips()

    def bind_backward(self) -> None:
        b = self.b
        region = b.output.gradient
        assert region is not None
        self.mask: Any = None
        self.dy: Gathered | None = None
        self.data: Any = None
        if self.relu:
            masked = b.scratch(b.box.shape)
            _, self.mask = b.kernels.activation("relu", b.output.array, b.output.array, b.output.dy, masked)
            region = Region(masked, b.box)
        self.filter = b.kernels.conv_backward_filter(
            self.x.array, region.view(b.box), b.grads["w"], b.grads.get("b"), self.geometry
        )
        if b.needs_gradient(0):
            self._bind_data(region)
        b.end_scratch()

    def _bind_data(self, region: Region) -> None:
        b = self.b
        value = b.inputs[0]
        dx = b.gradient(0)
        boxes = self.layer.gradient_boxes(value.layout.boxes, b.shapes[0], b.output.layout.shape[1:])
        self.dy = dy = b.gather_gradient(boxes, region)
        if value.box.size and not dy.box.size:
            self.data = Zero(dx)
        else:
            geometry = local_geometry(self.windows, value.box, dy.box, self.groups)
            self.data = b.kernels.conv_backward_data(dy.array, b.params["w"], dx, geometry)

    def backward(self) -> None:
        if self.mask is not None:
            self.mask()
        if self.dy is None:
            self.filter()
            return
        self.dy.start()
        self.filter()
        self.dy.finish()
        self.data()


class CutConvOperator(ContractionOperator):
    """Convolution on a block of filters, of input channels, or of both."""

    def __init__(self, b: Binding) -> None:
        layer = b.layer
        assert isinstance(layer, Conv)
        self.windows = layer.windows(b.shapes[0])
        super().__init__(b, relu=layer.activation == "relu")

    @property
    def geometry(self) -> Geometry:
        return local_geometry(self.windows, self.x.box, self.box)

    def forward_kernel(self, x: Any, bias: Any, y: Any, relu: bool) -> Any:
        return self.b.kernels.conv_forward(x, self.b.params["w"], bias, y, self.geometry, relu=relu)

    def filter_kernel(self, x: Any, dy: Any, dw: Any, db: Any) -> Any:
        return self.b.kernels.conv_backward_filter(x, dy, dw, db, self.geometry)

    def data_kernel(self, dy: Any, dx: Any) -> Any:
        return self.b.kernels.conv_backward_data(dy, self.b.params["w"], dx, self.geometry)


class Zero:
    """Kernel of a gradient that no output depends on."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __call__(self) -> None:
        self._array.fill(0)

    def close(self) -> None:
        pass


def local_geometry(windows: Sequence[Window], x: Box, y: Box, groups: int = 1) -> Geometry:
    """Geometry of the kernel that makes the output box `y` of the input box `x`.

    The padding of a side is what the window of `y` reaches beyond `x`: the real padding at the ends of
    the array, none where `x` has its halo. At the far side it may be negative (`x` holds more than needed).
    """
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
