"""Filter gradients as transposed matrix products, one per tap of the kernel, over blocks of outputs.

::

    y, dy   o0 o1 o2             dw[tap 0] = dy^T x[rows from 0 on]
    x       i0 i1 i2 i3 i4       dw[tap 1] = dy^T x[rows from 1 on]   ...

With more than one axis, the rows of `dy` are extended to the row length of `x`, with zeros where there is no output, so
that every tap is again a shift. With a stride, the positions of `x` are split by their remainder (*phase*), and taps
are shifts within a phase. Along the last axis the phases are neighbors in memory, so they are columns of one matrix,
and taps of one shift are one product::

    stride 2     x (2 columns per row)     i0 i1 | i2 i3 | i4 i5        dw[taps 0, 1] = dy^T x[rows from 0 on]
                                                                       dw[tap 2]     = dy^T x[rows from 1 on, column 0]

Blocks of outputs that fit into the caches are multiplied by all taps before the next block is copied, so a large image
is read from memory once, and the copies take little scratch memory. Products are added in the order of the blocks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..geometry import Geometry
from ..memory import packed_strides
from ..numpy.convolution import edges
from ..numpy.norms import column_sums
from . import abi as c
from .program import OnednnEngine, OnednnMemory, PrimitiveList, ReferenceOnly

__all__ = ["BLOCK_BYTES", "backward_filter_by_taps", "preferred"]

#: Limit of the copies of one block [B], without the rows that the windows of its last outputs add; a block of one row
#: of outputs may exceed it.
BLOCK_BYTES = 1 << 22

#: Instruction sets with vectors of at most 8 float32 numbers.
_NARROW = ("SSE4.1", "AVX", "AVX2", "AVX2-VNNI", "AVX2-VNNI-2")
#: Bytes of `x` and `dy` together that the caches do not hold.
_LARGE = 24 << 20


@dataclass(frozen=True)
class _Limits:
    """Limits within which products by taps are faster than oneDNN's primitive, measured with oneDNN 3.2.

    Attributes
    ----------
    vector
        Number of float32 elements of a vector register.
    point, window
        Least numbers of weights per tap of 1 x 1 and of larger kernels.
    extension
        Upper limit of the ratio of the positions that are multiplied to the outputs.
    """

    vector: int
    point: int
    window: int
    extension: float


_LIMITS_NARROW = _Limits(vector=8, point=1 << 19, window=0, extension=1.4)
_LIMITS_WIDE = _Limits(vector=16, point=1 << 18, window=1 << 16, extension=1.7)


@dataclass(frozen=True)
class _TapAxis:
    """Sliding window along one axis, for `outputs` outputs from the first one on; `lo` is the padding before them."""

    extent: int
    outputs: int
    kernel: int
    stride: int
    dilation: int
    lo: int

    def shift(self, tap: int) -> tuple[int, int]:
        """Return the shift of a tap within its phase, and the phase."""
        return divmod(tap * self.dilation, self.stride)

    @property
    def positions(self) -> int:
        """Number of positions per phase, up to the last one that the last output reads."""
        return self.outputs + self.shift(self.kernel - 1)[0]

    @property
    def phases(self) -> list[int]:
        """The phases that taps read."""
        return sorted({self.shift(tap)[1] for tap in range(self.kernel)})

    @property
    def direct(self) -> bool:
        """Whether the outputs read all inputs once, in order."""
        return self.kernel == self.stride == 1 and self.lo == 0 and self.extent == self.outputs

    def part(self, start: int, stop: int) -> _TapAxis:
        """Return the same window for the outputs ``[start, stop)`` only."""
        # Negative if the window of the first of these outputs begins inside the input.
        return replace(self, outputs=stop - start, lo=self.lo - start * self.stride)

    def inputs(self, phase: int | None) -> tuple[slice, slice]:
        """Return the positions of a phase that exist in the input, and the inputs at them; with None, those of all
        phases together.
        """
        # Position i is the input i * step + offset; positions outside of the input are padding.
        step, offset = (1, -self.lo) if phase is None else (self.stride, phase - self.lo)
        count = self.positions * (self.stride if phase is None else 1)
        first = max(0, -(offset // step))
        stop = max(first, min(count, (self.extent - 1 - offset) // step + 1))
        begin = first * step + offset
        return slice(first, stop), slice(begin, begin + (stop - first - 1) * step + 1 if stop > first else begin, step)

    def runs(self) -> Iterator[tuple[int, int, range]]:
        """Yield groups of taps whose phases are neighbors at one shift: the shift, the first phase, and the taps."""
        tap = 0
        while tap < self.kernel:
            (shift, phase), stop = self.shift(tap), tap + 1
            while stop < self.kernel and self.shift(stop) == (shift, phase + stop - tap):
                stop += 1
            yield shift, phase, range(tap, stop)
            tap = stop


def preferred(x: Any, dy: Any, geometry: Geometry, instruction_set: str) -> bool:
    """Return whether products by taps are faster than oneDNN's primitive for packed images.

    This is a rule from measurements (``docs/measurements.md``) and measures nothing itself: the result depends on
    shapes and instruction set alone, so all ranks and a resumed run compute the same bits.

    - Narrow vectors: oneDNN's gradient of packed images has a third to three quarters of the speed of the forward
      convolution, and a sixth on large images. Products by taps reach the speed of the forward convolution.
    - Wide vectors: with stride 1 oneDNN's gradient is as fast while the caches hold images and weights.
    - 1 x 1 kernels are one product in both algorithms. oneDNN's is slower with many weights, and with fewer filters
      than a vector has elements.
    - Layers of few channels would be products of few columns.
    """
    limits = _LIMITS_NARROW if instruction_set in _NARROW else _LIMITS_WIDE
    channels, filters, strided = x.shape[-1], dy.shape[-1], set(geometry.stride) != {1}
    many = channels * filters
    few_filters = filters < limits.vector <= channels and not strided
    if geometry.groups > 1:
        return False
    if geometry.taps == 1:
        return many >= limits.point or few_filters
    if channels < limits.vector * (2 if strided else 1):
        return False
    axes = _axes(x, dy, geometry)
    if math.prod(axis.positions / axis.outputs for axis in axes) >= limits.extension:
        return False
    # In 3-D oneDNN reads an image often enough for the caches.
    large = len(axes) < 3 and x.nbytes + dy.nbytes >= _LARGE
    return strided or many >= limits.window or large or few_filters


def backward_filter_by_taps(
    engine: OnednnEngine, x: Any, dy: Any, dw: Any, db: Any, geometry: Geometry
) -> PrimitiveList:
    """Return the list of steps that computes ``dw`` and, if not None, ``db`` of a convolution with one group.

    Raises
    ------
    ReferenceOnly
        For a convolution with several groups.
    """
    if geometry.groups > 1:
        raise ReferenceOnly("filter gradients by taps: expected one group; use another algorithm")
    p = PrimitiveList(engine)
    _TapProducts(p, x, dy, dw, _axes(x, dy, geometry)).add()
    if db is not None:
        p.call(column_sums(dy, db))
    return p


def _axes(x: Any, dy: Any, geometry: Geometry) -> list[_TapAxis]:
    extents = zip(x.shape[1:-1], dy.shape[1:-1])
    windows = zip(geometry.kernel, geometry.stride, geometry.dilation, (lo for lo, _ in geometry.padding))
    return [_TapAxis(*extent, *window) for extent, window in zip(extents, windows)]


class _TapProducts:
    """Products of the blocks of one filter gradient, and the scratch memory that all blocks share."""

    def __init__(self, p: PrimitiveList, x: Any, dy: Any, dw: Any, axes: Sequence[_TapAxis]) -> None:
        self.p, self.x, self.dy, self.dw, self.axes = p, x, dy, dw, axes
        self.channels, self.filters, self.item = x.shape[-1], dy.shape[-1], x.dtype.itemsize
        self.direct = all(axis.direct for axis in axes)
        self.blocks = [(slice(0, x.shape[0]), list(axes))] if self.direct else list(self._split())
        self.source, self.gradient = (
            p.array(a, self._matrix(a.size // a.shape[-1], a.shape[-1])) if self.direct else self._scratch(width)
            for a, width in ((x, self._source_elements), (dy, self._gradient_elements))
        )
        self._products: dict[tuple[int, int, bool], int] = {}

    # ------------------------------------------------------------------ blocks
    def _split(self) -> Iterator[tuple[slice, list[_TapAxis]]]:
        """Yield blocks: whole samples where they are small, else equal numbers of rows of one sample."""
        samples, (first, *rest) = self.x.shape[0], self.axes
        sample = (self._source_elements(1, self.axes) + self._gradient_elements(1, self.axes)) * self.item
        # Number of positions of the first axis whose copies fit the limit.
        fit = max(1, BLOCK_BYTES * first.positions // sample)
        if fit >= first.outputs:
            step = max(1, fit // first.positions)
            for n in range(0, samples, step):
                yield slice(n, min(samples, n + step)), list(self.axes)
            return
        count = -(-first.outputs // fit)
        bounds = [first.outputs * i // count for i in range(count + 1)]
        for n in range(samples):
            for start, stop in itertools.pairwise(bounds):
                yield slice(n, n + 1), [first.part(start, stop), *rest]

    def _positions(self, samples: int, axes: Sequence[_TapAxis]) -> int:
        return samples * math.prod(axis.positions for axis in axes)

    def _source_elements(self, samples: int, axes: Sequence[_TapAxis]) -> int:
        # Along the last axis all phases are copied, as columns of one matrix, also those that no tap reads.
        phases = math.prod(len(axis.phases) for axis in axes[:-1]) * axes[-1].stride
        return self._positions(samples, axes) * phases * self.channels

    def _gradient_elements(self, samples: int, axes: Sequence[_TapAxis]) -> int:
        return self._positions(samples, axes) * self.filters

    def _scratch(self, elements: Callable[[int, Sequence[_TapAxis]], int]) -> OnednnMemory:
        """Return scratch memory that is large enough for the `elements` of each block."""
        most = max(elements(samples.stop - samples.start, axes) for samples, axes in self.blocks)
        return self.p.temporary(self.p.desc((most,), self.x.dtype, (1,)))

    def _matrix(self, rows: int, columns: int, stride: int | None = None) -> int:
        return self.p.desc((rows, columns), self.x.dtype, (stride or columns, 1))

    # ------------------------------------------------------------------ steps
    def add(self) -> None:
        """Add the steps of all blocks to the list."""
        for i, (samples, axes) in enumerate(self.blocks):
            if not self.direct:
                self._copy(self.gradient, self._fill_gradient(samples, axes))
                self._copy(self.source, self._fill_source(samples, axes))
            self._multiply(samples.stop - samples.start, axes, i > 0)

    def _copy(self, target: OnednnMemory, bind: Callable[[Any], tuple[list[Any], list[tuple[Any, Any]]]]) -> None:
        """Add a step that fills some views of the scratch memory `target` with zeros, and copies arrays to others.
        `bind` returns the views to fill, and the pairs (view, array).
        """

        def bound(view: Any) -> Callable[[], None]:
            zeros, pairs = bind(view)

            def run() -> None:
                for edge in zeros:
                    edge.fill(0)
                for into, array in pairs:
                    np.copyto(into, array)

            return run

        self.p.call_on(target, self.x.dtype, bound)

    def _fill_gradient(self, samples: slice, axes: Sequence[_TapAxis]) -> Callable[[Any], Any]:
        # `part` has moved `lo` by the stride for every output before the block.
        starts = [(whole.lo - axis.lo) // axis.stride for axis, whole in zip(axes, self.axes)]
        outputs = [slice(start, start + axis.outputs) for start, axis in zip(starts, axes)]
        shape = (samples.stop - samples.start, *(axis.positions for axis in axes), self.filters)

        def bind(view: Any) -> Any:
            whole = view[: math.prod(shape)].reshape(shape)
            inside = [slice(0, axis.outputs) for axis in axes]
            return edges(whole, inside), [(whole[(slice(None), *inside)], self.dy[(samples, *outputs)])]

        return bind

    def _fill_source(self, samples: slice, axes: Sequence[_TapAxis]) -> Callable[[Any], Any]:
        *outer, last = axes
        count = samples.stop - samples.start
        shape = (count, *(axis.positions for axis in outer), last.positions * last.stride, self.channels)
        size = math.prod(shape)

        def bind(view: Any) -> Any:
            zeros, pairs = [], []
            # One part of the scratch memory per combination of phases of the outer axes.
            for i, phase in enumerate(itertools.product(*(axis.phases for axis in outer))):
                whole = view[i * size : (i + 1) * size].reshape(shape)
                spans = [axis.inputs(p) for axis, p in zip(axes, (*phase, None))]
                inside = [into for into, _ in spans]
                zeros += edges(whole, inside)
                pairs.append((whole[(slice(None), *inside)], self.x[(samples, *(inputs for _, inputs in spans))]))
            return zeros, pairs

        return bind

    def _multiply(self, samples: int, axes: Sequence[_TapAxis], more: bool) -> None:
        """Add the products of a block; with `more`, they are added to what `dw` holds."""
        *outer, last = axes
        steps = packed_strides((samples, *(axis.positions for axis in axes)))
        # From the first to the last output, both included: the last tap of the last output is inside.
        rows = (samples - 1) * steps[0] + sum((axis.outputs - 1) * s for axis, s in zip(axes, steps[1:])) + 1
        width, phases = last.stride * self.channels, list(itertools.product(*(axis.phases for axis in outer)))
        # dy^T by its strides, without a copy.
        left = self.p.part(self.gradient, self.p.desc((self.filters, rows), self.x.dtype, (1, self.filters)), 0)
        taps = math.prod(axis.kernel for axis in axes)
        for tap in itertools.product(*(range(axis.kernel) for axis in outer)):
            shifts = [axis.shift(t) for axis, t in zip(outer, tap)]
            # In rows of the source: those of the phases before, and the shift of the tap along each outer axis.
            start = phases.index(tuple(p for _, p in shifts)) * self._positions(samples, axes)
            start += sum(shift * s for (shift, _), s in zip(shifts, steps[1:]))
            number = 0  # of the first tap of this row of the kernel, in row-major order
            for axis, t in zip(axes, (*tap, 0)):
                number = number * axis.kernel + t
            for shift, phase, run in last.runs():
                columns = len(run) * self.channels
                first = (start + shift) * width + phase * self.channels
                right = self.p.part(self.source, self._matrix(rows, columns, width), first * self.item)
                into = (number + run.start) * self.channels
                flat = self.p.array(self.dw, self._matrix(self.filters, columns, taps * self.channels))
                memory = self.p.part(flat, flat.desc, into * self.item)
                self.p.step(
                    self._product(left.desc, right.desc, memory.desc, (rows, columns, more)),
                    {c.SRC: left, c.WEIGHTS: right, c.DST: memory},
                )

    def _product(self, left: int, right: int, out: int, key: tuple[int, int, bool]) -> int:
        if key not in self._products:
            # Later blocks add to `dw`. Products of one key differ in their addresses only.
            attributes = self.p.attributes(("sum", 1.0, 0, 0)) if key[-1] else None
            self._products[key] = self.p.descriptor("matmul", left, right, None, out, attributes=attributes)
        return self._products[key]
