"""Resize: nearest and (bi-, tri-)linear interpolation, cut along samples and space."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from halograd.dtensor import Box
from halograd.layers.binding import Binding
from halograd.layers.layer import Layer, Shape
from halograd.layers.operator import Operator
from halograd.layers.resample import Resampling

__all__ = ["Resize"]

_MODES = {"nearest": None, "nearest-exact": None, "linear": None, "bilinear": 2, "trilinear": 3}
#: A scale is taken for the fraction with at most this denominator next to it (1 / 3 cannot be written as a float).
_DENOMINATOR = 10_000


class Resize(Layer):
    """Interpolate to another number of positions, axis by axis.

    Output size per axis: `size`, or ``floor(n * scale)``.

    Parameters
    ----------
    scale
        Outputs per input: one number for all spatial axes or one per axis.
    size
        Spatial output size instead: one number for all axes or one per axis.
    mode
        ``"nearest"``, ``"nearest-exact"`` or ``"linear"`` (``"bilinear"`` and ``"trilinear"`` say the same for 2 and
        3 axes): as torch's ``interpolate`` with ``align_corners=False``; formulas in :class:`Resampling`.

    Notes
    -----
    Input and output are cut in samples and space. Communication per process: the inputs that its outputs read and
    another rank owns, forward; as much backward, added to the gradients of its owners.
    """

    def __init__(
        self,
        scale: float | Sequence[float] | None = None,
        size: int | Sequence[int] | None = None,
        mode: str = "nearest",
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if (scale is None) == (size is None):
            raise ValueError(f"Resize: expected either a scale or a size, got scale={scale} and size={size}")
        if mode not in _MODES:
            raise ValueError(f"Resize: mode: expected one of {', '.join(_MODES)}, got {mode!r}")
        self.scale, self.size, self.mode = scale, size, mode

    def resamplings(self, shape: Shape) -> tuple[Resampling, ...]:
        """One per spatial axis, for an input sample of this shape."""
        axes = len(shape) - 1
        mode = "linear" if self.mode.endswith("linear") else self.mode
        given: Any = self.scale if self.size is None else self.size
        values: list[Any] = [given] * axes if isinstance(given, int | float) else list(given)
        if len(values) != axes:
            raise ValueError(f"Resize: expected one number or {axes}, got {given}")
        if self.size is not None:
            return tuple(Resampling(n, m, Fraction(n, max(1, m)), mode) for n, m in zip(shape, values))
        scales = [Fraction(v).limit_denominator(_DENOMINATOR) for v in values]
        if min(scales) <= 0:
            raise ValueError(f"Resize: a scale must be positive, got {given}")
        return tuple(Resampling(n, math.floor(n * s), 1 / s, mode) for n, s in zip(shape, scales))

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        axes = _MODES[self.mode] or len(shape) - 1
        if not shape[:-1] or axes != len(shape) - 1:
            raise ValueError(f"Resize: mode {self.mode!r} does not fit {len(shape) - 1} spatial axes, use 'linear'")
        sizes = tuple(r.outputs for r in self.resamplings(shape))
        if min(sizes) < 1:
            raise ValueError(f"Resize: nothing would be left of {shape[:-1]}: {sizes}; enlarge the scale or size")
        return (*sizes, shape[-1])

    def flops(self, *shapes: Shape) -> int:
        if not self.mode.endswith("linear"):
            return 0
        out, total = list(shapes[0]), 0
        for axis, n in enumerate(self.output_shape(*shapes)[:-1]):
            out[axis] = n
            total += 3 * math.prod(out)
        return total

    def input_boxes(self, box: Box, *shapes: Shape) -> tuple[Box, ...]:
        """The inputs that the output `box` reads; never outside the array."""
        if not box.size:
            return (Box((0,) * box.ndim, (0,) * box.ndim),)
        spatial = [r.input_range(a, b) for r, (a, b) in zip(self.resamplings(shapes[0]), box.ranges[1:-1])]
        return (Box.of_ranges([box.ranges[0], *spatial, box.ranges[-1]]),)

    def bind(self, binding: Binding) -> Operator:
        return _ResizeOperator(binding)


class _ResizeOperator(Operator):
    """Gathers the inputs, then resamples axis after axis; backward the transpose of each, in reverse."""

    def __init__(self, b: Binding) -> None:
        assert isinstance(b.layer, Resize)
        self.b = b
        self.resamplings = b.layer.resamplings(b.shapes[0])
        # Inputs that no output reads may stay behind the end: then the owned block needs no copy.
        slack = [0, *(math.ceil(r.ratio) for r in self.resamplings), 0]
        self.boxes = b.clipped(0, slack)
        self.x = b.gather(0, self.boxes)
        self.kernel: Any = None
        self.adjoint: Any = None
        self.axes: list[_Axis] = []
        self.adjoint_axes: list[_Axis] = []
        if b.kernels.cuda is not None:
            self.kernel, _ = self._fuse(None, None)
        else:
            self.axes = self._axes(self.x.array, b.output.array)

    def _fuse(self, dy: Any, dx: Any) -> tuple[Any, Any]:
        """The backend's kernels, all axes at once."""
        b = self.b
        tables = [
            table(r, b.box.ranges[axis], self.x.box.start[axis]) if b.box.size else (np.zeros(0), np.zeros((0, 2)))
            for axis, r in enumerate(self.resamplings, start=1)
        ]
        return b.kernels.cuda.resize(self.x.array, b.output.array, dy, dx, tables)

    def _axes(self, first: Any, last: Any) -> list[_Axis]:
        """One step per axis between the arrays of the gathered box and of the output box."""
        b = self.b
        if not b.box.size:
            return []
        steps, source, shape = [], first, list(self.x.box.shape)
        for axis, r in enumerate(self.resamplings, start=1):
            shape[axis] = b.box.shape[axis]
            target = last if axis == len(self.resamplings) else b.scratch(shape)
            steps.append(_Axis(b, r, axis, source, self.x.box.start[axis], target))
            source = target
        return steps

    def forward(self) -> None:
        self.x.start()
        self.x.finish()
        if self.kernel is not None:
            self.kernel()
            return
        for axis in self.axes:
            axis.apply()

    def bind_backward(self) -> None:
        b = self.b
        self.dx = b.return_gradient(0, self.boxes)
        if self.kernel is not None:
            self.kernel.close()
            self.kernel, self.adjoint = self._fuse(b.output.dy, self.dx.array)
            return
        self.adjoint_axes = self._axes(self.dx.array, b.output.dy)[::-1]

    def backward(self) -> None:
        if self.adjoint is not None:
            self.adjoint()
        elif not self.adjoint_axes and self.dx.array.size:
            self.dx.array.fill(0)
        for axis in self.adjoint_axes:
            axis.apply_adjoint()
        self.dx.start()
        self.dx.finish()


def table(r: Resampling, outputs: tuple[int, int], origin: int) -> tuple[Any, Any]:
    """Per output the first of two inputs, counted from `origin`, and their weights ``(outputs, 2)``. Local."""
    taps = [r.taps(o) for o in range(*outputs)]
    weights = [[w for _, w in some] + [0.0] * (2 - len(some)) for some in taps]
    return np.array([some[0][0] - origin for some in taps]), np.array(weights).reshape(-1, 2)


class _Axis:
    """Resampling of one axis between two arrays that stay, as views made once."""

    def __init__(self, b: Binding, r: Resampling, axis: int, source: Any, source_start: int, target: Any) -> None:
        start, stop = b.box.ranges[axis]
        before = (slice(None),) * axis
        self.source = source
        self.views: list[tuple[Any, list[tuple[Any, float]], Any]] = []
        runs = r.runs(start, stop)
        longest = max((run.count for run in runs if len(run.taps) > 1), default=0)
        work = b.scratch((*source.shape[:axis], longest, *source.shape[axis + 1 :]))
        for run in runs:
            out = target[(*before, run.outputs(start))]
            taps = [(source[(*before, run.inputs(k, source_start))], weight) for k, (_, weight) in enumerate(run.taps)]
            self.views.append((out, taps, work[(*before, slice(0, run.count))]))

    def apply(self) -> None:
        """target <- resampled source."""
        for out, taps, work in self.views:
            (first, weight), *more = taps
            if not more:
                np.copyto(out, first)
                continue
            np.multiply(first, weight, out=out)
            for view, factor in more:
                np.multiply(view, factor, out=work)
                np.add(out, work, out=out)

    def apply_adjoint(self) -> None:
        """source <- transposed resampling of target."""
        self.source.fill(0)
        for out, taps, work in self.views:
            for view, weight in taps:
                if weight == 1.0:
                    np.add(view, out, out=view)
                    continue
                np.multiply(out, weight, out=work)
                np.add(view, work, out=view)
