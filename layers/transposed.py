"""Transposed convolution, cut along samples and space."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ..dtensor import Box, Window, input_box, output_box
from ..kernels.access import reads, writes
from ..lowering.context import Context, Gathered, Lowered
from .activation import activated
from .convolution import LocalGeometry, conv_data, conv_filter, conv_forward, local_geometry, zeroing
from .layer import Layer, Passes, Shape
from .needs import check_spatial, spread
from .parameter import Parameter

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
        Rows that are removed from the full result: a number, one per axis, one ``(lo, hi)`` pair per axis, or
        ``"same"``: the output is ``n * stride`` long.
    output_padding
        Positions added at the end; less than the stride or the dilation. Not with ``"same"``.
    bias
        Whether to add a bias per filter.
    groups
        Number of groups: input and output channels are divided into groups that do not mix.
    activation
        None; a name (``"relu"``, ``"silu"``, ...) or a layer, which is put after it.

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
        for w, n, wanted, fit in zip(windows, shape, outputs, fits):
            lo, hi = w.pad_lo, w.pad_hi
            if not fit:  # all inputs that reach a block in the middle; outputs around it are removed
                n = max((wanted + w.extent - 2) // w.stride + 1, -(-(wanted - w.extent) // w.stride) + 1)
                around = (n - 1) * w.stride + w.extent - wanted
                lo, hi = around // 2, around - around // 2
            spatial.append(n)
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
        return 2 * self.parameters(*shapes)["w"].size * math.prod(shapes[0][:-1])

    def input_boxes(self, box: Box, *shapes: Shape) -> tuple[Box, ...]:
        """Return the inputs that reach the output `box`; the box never reaches outside the array."""
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
        kernel = context.kernel(zeroing, array=context.y)
        if x.box.size:
            geometry = local_geometry(windows, context.box, x.box, groups)
            kernel = context.kernel(partial(conv_data, geometry), dy=x.view, w=w, dx=context.y)
        context.run(kernel, timing=context.timing("forward"))
        if bias is not None:
            context.run(context.kernel(_bias, y=context.y, b=bias))

        def backward() -> None:
            dy = context.gather_gradient(context.gradient_blocks)
            dy.start()
            paired = value.box.size and dy.box.size
            geometry = local_geometry(windows, dy.box, value.box, groups) if paired else None
            if context.frozen:
                dy.finish()
            else:
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
    """Compute the gradients of the parameters.

    The gradient of `w` pairs each owned input with all outputs that it reaches, so every pair is counted once.
    """
    if "b" in context.grads:
        context.run(context.kernel(_bias_gradient, dy=context.dy, db=context.grads["b"]))
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
