"""Transposed convolution, cut along samples and space."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from halograd.dtensor import Box, Window, input_box, output_box
from halograd.layers.binding import Binding
from halograd.layers.convolution import Zero, local_geometry
from halograd.layers.layer import Layer, Shape
from halograd.layers.operator import Operator
from halograd.layers.parameter import Parameter
from halograd.layers.stencil import spread

__all__ = ["ConvTranspose"]


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
        What is cut off the full result: a number, one per axis, one ``(lo, hi)`` pair per axis, or ``"same"``:
        the output is ``n * stride`` long.
    output_padding
        Positions added behind the last; less than the stride or the dilation. Not with ``"same"``.
    bias
        Whether to add a bias per filter.
    groups
        Input and output channels are cut into this many groups that do not mix.

    Notes
    -----
    Weights ``(C, *kernel, K / groups)``, whole on every rank: those of the convolution from `y` to `x`. Input and
    output are cut in samples and space. Forward: halo of `x`, data gradient of that convolution. Backward: halo of
    `dy`, its forward for `dx`, its filter gradient for `dw`. Communication per process: the two halos; the sum of
    the filter gradients over all ranks.
    """

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

    def windows(self, shape: Shape) -> tuple[Window, ...]:
        """Per spatial axis, the window of the convolution that this is the adjoint of: it slides over `y`.

        Output padding is what that convolution leaves at the end of `y`: it lessens the padding behind.
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
            return Window(kernel, stride, lo, total - lo, dilation)
        entry = self.padding if isinstance(self.padding, int) else self.padding[axis]
        lo, hi = (entry, entry) if isinstance(entry, int) else entry
        if min(lo, hi) < 0:
            raise ValueError(f"padding: expected numbers >= 0, got {(lo, hi)}")
        return Window(kernel, stride, lo, hi - more, dilation)

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
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
                f"{shape[:-1]}: {sizes}; lessen the padding"
            )
        return (*sizes, self.filters)

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        (shape,) = shapes
        windows = self.windows(shape)
        kernel = tuple(w.kernel for w in windows)
        # An output element sums, on average, this many of the kernel's taps.
        taps = max(1, math.prod(kernel) // math.prod(w.stride for w in windows))
        shape_w, fan_in = (shape[-1], *kernel, self.filters // self.groups), taps * shape[-1] // self.groups
        w = Parameter(shape_w, "he", fan_in, rounded=True)
        return {"w": w, "b": Parameter((self.filters,), decay=False)} if self.bias else {"w": w}

    def flops(self, *shapes: Shape) -> int:
        return 2 * self.parameters(*shapes)["w"].size * math.prod(shapes[0][:-1])

    def input_boxes(self, box: Box, *shapes: Shape) -> tuple[Box, ...]:
        """The inputs that reach the output `box`; never outside the array."""
        (shape,) = shapes
        return (output_box(self.windows(shape), box, (0, *shape)),)

    def gradient_boxes(self, boxes: Sequence[Box], shape: Shape, out_shape: Shape) -> tuple[Box, ...]:
        """Per input box, the box of the output's gradient from which its gradient follows."""
        windows = self.windows(shape)
        return tuple(_gradient_box(windows, box, out_shape) for box in boxes)

    def bind(self, binding: Binding) -> Operator:
        return _ConvTransposeOperator(binding)


class _ConvTransposeOperator(Operator):
    def __init__(self, b: Binding) -> None:
        assert isinstance(b.layer, ConvTranspose)
        self.b = b
        self.layer = b.layer
        self.windows = b.layer.windows(b.shapes[0])
        self.x = b.gather(0, b.needed_boxes(0))
        self.kernel: Any = Zero(b.output.array)
        if self.x.box.size:
            geometry = local_geometry(self.windows, b.box, self.x.box, b.layer.groups)
            self.kernel = b.kernels.conv_backward_data(self.x.array, b.params["w"], b.output.array, geometry)
        self.bias = b.kernels.bias(b.output.array, b.params["b"]) if b.layer.bias else None

    def forward(self) -> None:
        self.x.start()
        self.x.finish()
        self.kernel()
        if self.bias is not None:
            self.bias()

    def bind_backward(self) -> None:
        b = self.b
        value = b.inputs[0]
        self.db = None if self.bias is None else b.kernels.bias_gradient(b.output.dy, b.grads["b"])
        boxes = self.layer.gradient_boxes(value.layout.boxes, b.shapes[0], b.output.layout.shape[1:])
        self.dy = b.gather_gradient(boxes)
        # The filter gradient pairs each owned input with all outputs it reaches: no rank counts one twice.
        self.owned = b.gather(0, value.layout.boxes)
        self.filter: Any = Zero(b.grads["w"])
        self.data: Any = None
        wanted = b.needs_gradient(0)
        if value.box.size and self.dy.box.size:
            geometry = local_geometry(self.windows, self.dy.box, value.box, self.layer.groups)
            w, dw = b.params["w"], b.grads["w"]
            self.filter = b.kernels.conv_backward_filter(self.dy.array, self.owned.array, dw, None, geometry)
            if wanted:
                self.data = b.kernels.conv_forward(self.dy.array, w, None, b.gradient(0), geometry)
        elif wanted:
            self.data = Zero(b.gradient(0))

    def backward(self) -> None:
        self.dy.start()
        if self.db is not None:
            self.db()
        self.owned.start()
        self.owned.finish()
        self.dy.finish()
        self.filter()
        if self.data is not None:
            self.data()


def _gradient_box(windows: Sequence[Window], box: Box, out_shape: Shape) -> Box:
    needed = input_box(windows, box, out_shape[-1]) & Box((0,) * box.ndim, (box.stop[0], *out_shape))
    return needed if needed.size else Box((0,) * box.ndim, (0,) * box.ndim)
