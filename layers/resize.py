"""Resizing: nearest, linear and cubic interpolation, and means over windows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

from ..dtensor import Box
from ..kernels import Resampled, Resampling
from ..kernels.access import Access, makes
from ..kernels.geometry import MODES
from ..lowering.context import Context, Lowered
from .layer import Layer, Passes, Shape
from .lowering import Pair

__all__ = ["Resize"]

#: Name of a mode -> the mode, and the number of spatial axes if the name implies one.
_MODES: dict[str, tuple[str, int | None]] = {mode: (mode, None) for mode in MODES}
_MODES |= {"bilinear": ("linear", 2), "trilinear": ("linear", 3), "bicubic": ("cubic", 2)}
#: A scale becomes the nearest fraction with at most this denominator (no float is equal to 1 / 3).
_DENOMINATOR = 10_000


class Resize(Layer):
    """Interpolation to another number of positions, axis by axis.

    Output size per axis: `size`, or ``floor(n * scale)``.

    Parameters
    ----------
    scale
        Outputs per input: one number for all spatial axes or one per axis.
    size
        Spatial output size, instead of `scale`: one number for all axes or one per axis.
    mode
        ``"nearest"``, ``"nearest-exact"``, ``"linear"`` (also ``"bilinear"`` and ``"trilinear"`` for 2 and 3 axes),
        ``"cubic"`` (also ``"bicubic"`` for 2 axes) or ``"area"`` (means over windows that cover the input): as in
        torch's ``interpolate``, for any number of axes; formulas in :class:`Resampling`.
    align_corners
        For linear and cubic: whether the first and the last output lie on the first and the last input. If so, the
        ratio follows from the sizes, even if a scale is given.

    Notes
    -----
    Input and output may be cut in samples, space and channels. Communication per process: the inputs that its outputs
    read and other ranks own; backward as much, added to the gradients of the owners.
    """

    recomputation = "pointwise"
    # One axis after another, with an intermediate array; backward sums into it.
    passes = Passes((1.5, 2), (2, 2))
    cuts_channels = "channelwise"
    inputs_taken = 1

    def __init__(
        self,
        scale: float | Sequence[float] | None = None,
        size: int | Sequence[int] | None = None,
        mode: str = "nearest",
        align_corners: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if (scale is None) == (size is None):
            raise ValueError(f"Resize: expected either a scale or a size, got scale={scale} and size={size}")
        if mode not in _MODES:
            raise ValueError(f"Resize: mode: expected one of {', '.join(_MODES)}, got {mode!r}")
        if align_corners and _MODES[mode][0] not in ("linear", "cubic"):
            raise ValueError(f"Resize: align_corners: expected the mode linear or cubic, got {mode!r}; leave it out")
        self.scale, self.size, self.mode, self.align_corners = scale, size, mode, align_corners

    def resamplings(self, shape: Shape) -> tuple[Resampling, ...]:
        """Return one resampling per spatial axis, for an input sample of this shape."""
        axes = len(shape) - 1
        sizes: Any = self.scale if self.size is None else self.size
        values: list[Any] = [sizes] * axes if isinstance(sizes, int | float) else list(sizes)
        if len(values) != axes:
            raise ValueError(f"{self.kind}: expected one number or {axes}, got {sizes}")
        if self.size is not None:
            return tuple(self._resampling(n, m, Fraction(n, max(1, m))) for n, m in zip(shape, values))
        scales = [Fraction(v).limit_denominator(_DENOMINATOR) for v in values]
        if min(scales) <= 0:
            raise ValueError(f"Resize: a scale must be positive, got {sizes}")
        return tuple(self._resampling(n, math.floor(n * s), 1 / s) for n, s in zip(shape, scales))

    def _resampling(self, size: int, outputs: int, ratio: Fraction) -> Resampling:
        mode = _MODES[self.mode][0]
        if self.align_corners:
            # Fractions, not floats: every rank must find the same inputs for an output, whatever its block.
            ratio = Fraction(size - 1, max(1, outputs - 1)) if outputs > 1 else Fraction(0)
        elif mode == "area":  # windows that cover the input
            ratio = Fraction(size, max(1, outputs))
        return Resampling(size, outputs, ratio, mode, self.align_corners)

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        axes = _MODES[self.mode][1] or len(shape) - 1
        if not shape[:-1] or axes != len(shape) - 1:
            raise ValueError(
                f"{self.kind}: mode {self.mode!r} does not fit {len(shape) - 1} spatial axes, use 'linear'"
            )
        sizes = tuple(r.outputs for r in self.resamplings(shape))
        if min(sizes) < 1:
            raise ValueError(f"{self.kind}: nothing would be left of {shape[:-1]}: {sizes}; enlarge the scale or size")
        return (*sizes, shape[-1])

    def of_outputs(self, shape: Shape, outputs: tuple[int, ...]) -> tuple[Layer, Shape]:
        return self.changed(scale=None, size=outputs), shape

    def flops(self, *shapes: Shape) -> int:
        mode, out, total = _MODES[self.mode][0], list(shapes[0]), 0
        for axis, r in enumerate(self.resamplings(shapes[0])):
            taps = {"linear": 2, "cubic": 4, "area": math.ceil(r.ratio)}.get(mode, 0)
            out[axis] = r.outputs
            # Products of `taps` inputs and their sum; nearest only copies.
            total += max(0, 2 * taps - 1) * math.prod(out)
        return total

    def input_boxes(self, box: Box, *shapes: Shape) -> tuple[Box, ...]:
        """Return the inputs that the output `box` reads; the box never reaches outside the array."""
        if not box.size:
            return (Box((0,) * box.ndim, (0,) * box.ndim),)
        spatial = [r.input_range(a, b) for r, (a, b) in zip(self.resamplings(shapes[0]), box.ranges[1:-1])]
        return (Box.of_ranges([box.ranges[0], *spatial, box.ranges[-1]]),)

    def lower(self, context: Context) -> Lowered:
        """Lower to the gather of the inputs and a resampling; backward, the transposed resampling and the adjoint of
        the exchange.
        """
        resamplings = self.resamplings(context.shapes[0])
        # The box may end with inputs that no output reads, so that the owned block needs no copy.
        boxes = context.clipped(0, [0, *(math.ceil(r.ratio) for r in resamplings), 0])
        x = context.gather(0, boxes).run()
        make = partial(_resize, resamplings, context.box, x.box.start)
        kernel = context.kernel(make, x=x.view, y=context.y)
        context.run(kernel, "forward", timing=context.timing("forward"))

        def backward() -> None:
            returned = context.return_gradient(0, boxes)
            back = context.kernel(make, x=x.view, y=context.y, dy=context.dy, dx=returned.view)
            context.run(back, "backward", timing=context.timing("backward_data"))
            returned.run()

        return Lowered(backward)


@makes(forward=Access(("x",), ("y",)), backward=Access(("dy",), ("dx",)))
def _resize(
    resamplings: Sequence[Resampling],
    box: Box,
    start: Sequence[int],
    environment: Any,
    x: Any,
    y: Any,
    dy: Any = None,
    dx: Any = None,
) -> Pair:
    # Each rank resamples from global positions: its block of outputs, and the first input of its gathered box.
    axes = [Resampled(r, *box.ranges[axis], start[axis]) for axis, r in enumerate(resamplings, start=1)]
    return Pair(*environment.kernels.resize(x, y, dy, dx, axes))
