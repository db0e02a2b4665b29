"""Resize: nearest and (bi-, tri-)linear interpolation, cut along samples and space."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from halograd.dtensor import Box
from halograd.layers.costs import Passes
from halograd.layers.layer import Layer, Shape
from halograd.layers.resample import Resampling

if TYPE_CHECKING:
    from halograd.program.context import Context
    from halograd.program.views import View

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

    # Axis after axis: an array in between, and sums into it backward.
    passes = Passes((1.5, 2), (2, 2))

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

    def of_outputs(self, shape: Shape, outputs: tuple[int, ...]) -> tuple[Layer, Shape]:
        return self.changed(scale=None, size=outputs), shape

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

    def lower(self, context: Context) -> Callable[[], None]:
        """Gathers the inputs, then resamples axis after axis; backward the transpose of each, in reverse."""
        resamplings = self.resamplings(context.shapes[0])
        # Inputs that no output reads may stay behind the end: then the owned block needs no copy.
        boxes = context.clipped(0, [0, *(math.ceil(r.ratio) for r in resamplings), 0])
        x = context.gather(0, boxes)
        make = partial(_Resampling, resamplings, context.box, x.box.start)
        kernel = context.kernel(make, x=x.view, y=context.y, **_between(context, resamplings, x.box))
        x.start()
        x.finish()
        context.run(kernel, "forward", uses=tuple(kernel.views), timing=context.timing("forward"))

        def backward() -> None:
            returned = context.return_gradient(0, boxes)
            back = context.kernel(make, x=x.view, y=context.y, dy=context.dy, dx=returned.view)
            back.add(**_between(context, resamplings, x.box))
            uses = [name for name in back.views if name not in "xy"]
            context.run(back, "backward", uses=uses, timing=context.timing("backward_data"))
            returned.start()
            returned.finish()

        return backward


def _between(context: Context, resamplings: Sequence[Resampling], box: Box) -> dict[str, View]:
    """Arrays between the axes, and for one tap of each."""
    if context.fused or not context.box.size:
        return {}
    found, shape = {}, list(box.shape)
    for axis, r in enumerate(resamplings, start=1):
        longest = max((run.count for run in r.runs(*context.box.ranges[axis]) if len(run.taps) > 1), default=0)
        work = (*shape[:axis], longest, *shape[axis + 1 :])
        found[f"work{axis}"] = context.scratch(work)
        shape[axis] = context.box.shape[axis]
        if axis < len(resamplings):
            found[f"between{axis}"] = context.scratch(shape)
    return found


class _Resampling:
    """The backend's kernels of all axes at once, or one step per axis."""

    def __init__(
        self,
        resamplings: Sequence[Resampling],
        box: Box,
        start: Sequence[int],
        environment: Any,
        x: Any,
        y: Any,
        dy: Any = None,
        dx: Any = None,
        **between: Any,
    ) -> None:
        self._axes: list[_Axis] = []
        self._fused: tuple[Any, Any] | None = None
        self._dx = dx
        cuda = environment.kernels.cuda
        if cuda is not None:
            none = (np.zeros(0), np.zeros((0, 2)))
            axes = [(r, box.ranges[d], start[d]) for d, r in enumerate(resamplings, start=1)]
            self._fused = cuda.resize(x, y, dy, dx, [table(*axis) if box.size else none for axis in axes])
        elif box.size:
            source, last = (x, y) if dx is None else (dx, dy)
            for axis, r in enumerate(resamplings, start=1):
                target = between.get(f"between{axis}", last)
                self._axes.append(_Axis(r, axis, box.ranges[axis], source, start[axis], target, between[f"work{axis}"]))
                source = target

    def forward(self) -> None:
        if self._fused is not None:
            self._fused[0]()
        for axis in self._axes:
            axis.apply()

    def backward(self) -> None:
        if self._fused is not None:
            self._fused[1]()
        elif not self._axes and self._dx.size:
            self._dx.fill(0)
        for axis in reversed(self._axes):
            axis.apply_adjoint()

    def close(self) -> None:
        """Free the backend's kernels."""
        for kernel in self._fused or ():
            if kernel is not None:
                kernel.close()


def table(r: Resampling, outputs: tuple[int, int], origin: int) -> tuple[Any, Any]:
    """Per output the first of two inputs, counted from `origin`, and their weights ``(outputs, 2)``. Local."""
    taps = [r.taps(o) for o in range(*outputs)]
    weights = [[w for _, w in some] + [0.0] * (2 - len(some)) for some in taps]
    return np.array([some[0][0] - origin for some in taps]), np.array(weights).reshape(-1, 2)


class _Axis:
    """Resampling of one axis between two arrays that stay, as views made once."""

    def __init__(
        self, r: Resampling, axis: int, outputs: tuple[int, int], source: Any, origin: int, target: Any, work: Any
    ) -> None:
        start, stop = outputs
        before = (slice(None),) * axis
        self.source = source
        self.views: list[tuple[Any, list[tuple[Any, float]], Any]] = []
        for run in r.runs(start, stop):
            out = target[(*before, run.outputs(start))]
            taps = [(source[(*before, run.inputs(k, origin))], weight) for k, (_, weight) in enumerate(run.taps)]
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
