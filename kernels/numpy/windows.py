"""Pooling in NumPy, as one pass per window position, and resizing as a few passes per axis."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..geometry import Geometry, Resampled
from ..kernel import Kernel, ScratchKernel, run_all
from ..memory import Scratch, nbytes_of, round_up
from ..pointwise import Pointwise
from .convolution import Margins, tap_views

__all__ = ["NumpyWindows", "tap_counts"]


class NumpyWindows(Pointwise):
    """Pooling and resizing in NumPy."""

    scratch: Scratch

    def _max_pool(self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry) -> tuple[Kernel, Kernel | None]:
        """Build the maximum over windows, and its gradient by the stored positions of the maxima."""
        margins, outputs, scratch = Margins(x.shape, geometry.padding, x.dtype), y.shape[1:-1], self.scratch
        # Training holds the positions from forward to backward, so they take one byte each where that is enough.
        small = geometry.taps <= np.iinfo(np.uint8).max
        position = None if dx is None else np.empty(y.shape, np.uint8 if small else np.int32)
        # Among elements that are all -inf, the maximum is the first, and no padding before it.
        before = position is not None and any(lo > 0 for lo, _ in geometry.padding)
        start: Any = first_taps(outputs, geometry, np.uint8 if small else np.int32) if before else 0
        kept = self.own.add(*(array for array in (position, start) if isinstance(array, np.ndarray)))
        first, mask_bytes = round_up(margins.nbytes), round_up(y.size)
        scratch_bytes = first + 2 * mask_bytes

        def bind_forward() -> Callable[[], None]:
            padded = margins.padded(x, scratch)
            fill, views = margins.fill(padded, x, -np.inf), tap_views(padded, outputs, geometry)
            better = scratch.view(y.shape, np.bool_, first)
            undefined = scratch.view(y.shape, np.bool_, first + mask_bytes)

            def run() -> None:
                fill()
                np.copyto(y, views[0])
                if position is not None:
                    np.copyto(position, start)
                for i, view in enumerate(views[1:], 1):
                    # Strictly greater: the first of equal elements stays the maximum, and gets the gradient.
                    np.greater(view, y, out=better)
                    np.isnan(view, out=undefined)  # NaN takes precedence, as in torch, so that it does not vanish
                    np.logical_or(better, undefined, out=better)
                    np.copyto(y, view, where=better)
                    if position is not None:
                        np.copyto(position, i, where=better, casting="unsafe")

            return run

        forward = ScratchKernel(bind_forward, scratch, scratch_bytes, "numpy:max_pool", kept)
        if position is None:
            return forward, None

        def bind_backward() -> Callable[[], None]:
            padded = margins.padded(dx, scratch)
            views, crop = tap_views(padded, outputs, geometry), margins.crop(padded, dx)
            here = scratch.view(y.shape, np.bool_, first)

            def run() -> None:
                padded.fill(0)
                for i, view in enumerate(views):
                    # Tap by tap, because windows overlap: within one tap, no two outputs read the same input.
                    np.equal(position, i, out=here)
                    np.add(view, dy, out=view, where=here)
                crop()

            return run

        return forward, ScratchKernel(bind_backward, scratch, scratch_bytes, "numpy:max_pool")

    def _average_pool(
        self, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry, count_include_pad: bool
    ) -> tuple[Kernel, Kernel | None]:
        """Build the mean over windows, and its gradient."""
        margins, outputs, scratch = Margins(x.shape, geometry.padding, x.dtype), y.shape[1:-1], self.scratch
        if count_include_pad:
            # One number, broadcast; otherwise one per output position, as windows at the edges have fewer taps.
            factor = np.full((1,) * y.ndim, 1 / geometry.taps, x.dtype)
        else:
            factor = (1 / tap_counts(x.shape[1:-1], y.shape[1:-1], geometry)).astype(x.dtype)

        def bind_forward() -> Callable[[], None]:
            padded = margins.padded(x, scratch)
            fill, views = margins.fill(padded, x, 0), tap_views(padded, outputs, geometry)

            def run() -> None:
                fill()
                np.copyto(y, views[0])
                for view in views[1:]:
                    np.add(y, view, out=y)
                np.multiply(y, factor, out=y)

            return run

        impl, first = "numpy:average_pool", round_up(margins.nbytes)
        forward = ScratchKernel(bind_forward, scratch, first, impl, self.own.add(factor))
        if dx is None:
            return forward, None
        scratch_bytes = first + dy.nbytes

        def bind_backward() -> Callable[[], None]:
            padded = margins.padded(dx, scratch)
            share = scratch.view(dy.shape, dy.dtype, first)
            views, crop = tap_views(padded, outputs, geometry), margins.crop(padded, dx)

            def run() -> None:
                padded.fill(0)
                np.multiply(dy, factor, out=share)
                for view in views:
                    np.add(view, share, out=view)
                crop()

            return run

        return forward, ScratchKernel(bind_backward, scratch, scratch_bytes, impl)

    def _resize(self, x: Any, y: Any, dy: Any, dx: Any, axes: Sequence[Resampled]) -> tuple[Kernel, Kernel | None]:
        """Build a resize, axis by axis. Intermediate arrays, and a work array for all axes, are in scratch memory."""
        shapes, works, shape = [], [], list(x.shape)
        for i, axis in enumerate(axes, start=1):
            # The axes before this one have their output extents already, those after it their input extents.
            works.append((*shape[:i], axis.longest, *shape[i + 1 :]))
            shape[i] = y.shape[i]
            shapes.append(tuple(shape))
        # Arrays between axes lie one after the other, followed by the work array.
        offsets = [0, *itertools.accumulate(round_up(nbytes_of(s, x.dtype)) for s in shapes[:-1])]
        nbytes = offsets[-1] + max(nbytes_of(work, x.dtype) for work in works)

        def steps(source: Any, last: Any) -> list[_Axis]:
            axes_of_resize = []
            for i, axis in enumerate(axes):
                between = self.scratch.view(shapes[i], x.dtype, offsets[i]) if i + 1 < len(axes) else last
                work = self.scratch.view(works[i], x.dtype, offsets[-1])
                axes_of_resize.append(_Axis(axis, i + 1, source, between, work))
                source = between
            return axes_of_resize

        def bind_forward() -> Callable[[], None]:
            return run_all([part.apply for part in steps(x, y)])

        def bind_backward() -> Callable[[], None]:
            # With `dx` in the role of `x`, and `dy` in that of `y`, the same views serve the adjoint.
            return run_all([part.apply_adjoint for part in reversed(steps(dx, dy))])

        forward = ScratchKernel(bind_forward, self.scratch, nbytes, "numpy:resize")
        return forward, None if dx is None else ScratchKernel(bind_backward, self.scratch, nbytes, "numpy:resize")


class _Axis:
    """Resampling of one axis from one fixed array to another, by views that are created once."""

    def __init__(self, resampled: Resampled, axis: int, source: Any, target: Any, work: Any) -> None:
        before = (slice(None),) * axis
        self.source = source
        self.views: list[tuple[Any, list[tuple[Any, float]], Any]] = []
        for run in resampled.runs:
            out = target[(*before, run.outputs(resampled.start))]
            taps = [
                (source[(*before, run.inputs(k, resampled.origin))], weight) for k, (_, weight) in enumerate(run.taps)
            ]
            self.views.append((out, taps, work[(*before, slice(0, run.count))]))

    def apply(self) -> None:
        """Write the resampled source to the target."""
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
        """Write the transposed resampling of the target to the source."""
        self.source.fill(0)
        for out, taps, work in self.views:
            for view, weight in taps:
                # Most often the only tap of its run, for which `work` may be too short.
                if weight == 1.0:
                    np.add(view, out, out=view)
                    continue
                np.multiply(out, weight, out=work)
                np.add(view, work, out=view)


def tap_counts(spatial: tuple[int, ...], outputs: tuple[int, ...], geometry: Geometry) -> Any:
    """Return the number of taps inside an array of extents `spatial`, float64 ``(*outputs, 1)``; 1 where there is none.
    """
    counts = np.ones((1,))
    g = geometry
    for n, o, k, s, d, (lo, _) in zip(spatial, outputs, g.kernel, g.stride, g.dilation, g.padding):
        # Input position of each tap of each output along this axis, (o, k).
        row = np.arange(o)[:, None] * s - lo + d * np.arange(k)
        # The taps of a window are a product over axes, and so is the number of those inside.
        counts = counts[..., None] * ((row >= 0) & (row < n)).sum(axis=1)
    return np.maximum(counts, 1.0).reshape(*outputs, 1)


def first_taps(outputs: Sequence[int], geometry: Geometry, dtype: Any) -> Any:
    """Return the index of each window's first tap after the padding, as an array ``(1, *outputs, 1)``."""
    first, g = np.zeros((1,), dtype), geometry
    for n, k, s, d, (lo, _) in zip(outputs, g.kernel, g.stride, g.dilation, g.padding):
        # For output o the ceiling of (lo - o * s) / d; negative for windows that begin inside.
        before = -((np.arange(n) * s - lo) // d)  # taps in the padding
        # The last axis of the window varies fastest, as in `tap_views`.
        first = first[..., None] * k + np.clip(before, 0, k - 1).astype(dtype)
    return first[..., None]
