"""Predictions of samples from sliding windows, for samples that do not fit as a whole even when they are cut.

::

    window -> forward -> blocks of its outputs -> to the ranks of the sample's slabs
                                               -> sum of weight * output, in the order of the windows
    after the last window: sum / sum of the weights = output of the sample

Every rank holds a slab of the sums of one sample, cut along its longest axis. The sums have the dtype of the outputs
(float32 for 16 bits), and every element is summed in the order of the windows. So the sums depend neither on the cut
nor on the batch; only the outputs of a window may depend on them, by rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data import Batch
from ..data.windows import SlidingWindows, weights_along
from ..device import is_low
from ..dtensor import Blocks, Box, End, Exchange
from ..dtensor.layout import Intervals, intervals
from ..lowering.views import Value
from .session import Session

__all__ = ["at_once", "dtype_of", "placed", "predicted"]

_KEPT = 4  # exchanges of one output that are kept


def placed(session: Session, value: Value) -> tuple[tuple[int, ...], Blocks]:
    """Return the shape ``(*spatial, C)`` and the boxes of output `value` for what is computed at a time: a batch, or
    with sliding windows one sample. Local. With sliding windows, samples have one size.
    """
    windows = session.samples.windows
    if not isinstance(windows, SlidingWindows):
        return value.layout.shape[1:], value.layout.boxes
    *own, channels = value.layout.shape[1:]
    extents = windows.extents_of(0)
    # A window of `w` elements has `m` outputs.
    shape = [n * m // w for n, m, w in zip(extents, own, windows.window)]
    axes: list[Intervals] = [((0, 1),), *(((0, n),) for n in shape), ((0, channels),)]
    cut = windows.longest(0)
    # Axis 0 is that of the sample.
    axes[cut + 1] = intervals(shape[cut], session.comm.size)
    return (*shape, channels), Blocks(axes, session.comm.size)


def at_once(session: Session) -> int:
    """Return the number of samples that are computed at a time. Local."""
    return 1 if isinstance(session.samples.windows, SlidingWindows) else session.config.training.at_once


def predicted(
    session: Session, values: Sequence[Value], batches: Sequence[Batch]
) -> Iterator[tuple[Batch, list[NDArray]]]:
    """Yield each batch with this rank's blocks of the outputs (:func:`placed`), in new arrays on the host. Collective.

    With sliding windows, `batches` have one sample each.
    """
    if isinstance(session.samples.windows, SlidingWindows):
        yield from _Sums(session, values, session.samples.windows).predicted(batches)
        return
    for batch in session.feed(batches):
        session.executor.forward(training=False)
        yield batch, [np.array(_block(session, value), dtype_of(value)) for value in values]


def dtype_of(value: Value) -> np.dtype:
    """Return the dtype of an output on the host."""
    # NumPy and HDF5 have no bfloat16, and sums of windows in 16 bits would lose digits.
    return np.dtype(np.float32) if is_low(value.dtype) else np.dtype(value.dtype)


def _block(session: Session, value: Value) -> NDArray:
    """Return this rank's block on the host, which the next batch overwrites."""
    return session.executor.device.to_host(session.executor.array(value))


class _Sums:
    """Weighted sums of the windows of one sample after another. Collective."""

    def __init__(self, session: Session, values: Sequence[Value], windows: SlidingWindows) -> None:
        self._session, self._values, self._windows = session, list(values), windows
        self._rank = session.comm.rank
        self._boxes = [placed(session, value)[1][self._rank] for value in values]
        # Samples have one size with sliding windows: here and below, sample 0 stands for all.
        self._cut = windows.longest(0)
        self._starts = [  # per output and axis: in elements of the output
            # a window of w elements has m outputs
            [[s * m // w for s in starts] for starts, m, w in zip(windows.all_starts(0), shape, windows.window)]
            for shape in (value.layout.shape[1:-1] for value in values)
        ]
        self._weights = [[weights_along(n) for n in value.layout.shape[1:-1]] for value in values]
        # Exchanges are made for fixed arrays on the host, into which the outputs are copied and converted.
        self._sent = [np.empty(value.layout.boxes[self._rank].shape, dtype_of(value)) for value in values]
        self._exchanges: list[dict[Blocks, tuple[Exchange, NDArray]]] = [{} for _ in values]

    def predicted(self, batches: Sequence[Batch]) -> Iterator[tuple[Batch, list[NDArray]]]:
        samples = iter(batches)
        count = self._windows.count(0)
        sums: list[NDArray] = []
        try:
            for batch in self._session.feed(self._batches(batches, count)):
                self._session.executor.forward(training=False)
                for value, sent in zip(self._values, self._sent):
                    sent[...] = _block(self._session, value)
                # One exchange moves all windows of a batch that lie in the same slabs.
                for _, rows in groupby(range(batch.valid), partial(self._row, batch)):
                    slab_rows = [*rows]
                    # The first window of a sample; its last one completes the sums.
                    if batch.patches[slab_rows[0]] == 0:
                        sums = [np.zeros(box.shape, sent.dtype) for box, sent in zip(self._boxes, self._sent)]
                    self._add(batch, slab_rows, sums)
                    if batch.patches[slab_rows[-1]] == count - 1:
                        done, sums = sums, []
                        for v, sample_sums in enumerate(done):
                            self._divide(v, sample_sums)
                        yield next(samples), done
        finally:
            for kept in self._exchanges:
                self._close(kept)

    def _batches(self, batches: Sequence[Batch], count: int) -> Iterator[Batch]:
        """Yield batches of the windows of all samples, in order; copies of the last window fill up the last batch.

        `count` is the number of windows of a sample.
        """
        size = self._session.config.training.at_once
        total = len(batches) * count
        for position, first in enumerate(range(0, total, size)):
            numbers = [min(k, total - 1) for k in range(first, first + size)]
            indices = tuple(batches[k // count].indices[0] for k in numbers)
            patches = tuple(k % count for k in numbers)
            yield Batch(indices, min(size, total - first), 0, position, patches=patches)

    def _row(self, batch: Batch, k: int) -> tuple[int, int]:
        """Return the common key of windows in the same slabs: the sample, and the position along the cut axis."""
        return batch.indices[k], self._windows.position_of(0, batch.patches[k])[self._cut]

    def _add(self, batch: Batch, rows: Sequence[int], sums: Sequence[NDArray]) -> None:
        """Add the windows `rows` of a batch, which lie in the same slabs, to the sums. Collective."""
        positions = [self._windows.position_of(0, batch.patches[k]) for k in rows]
        for v, (value, window) in enumerate(zip(self._values, sums)):
            starts, extents = self._starts[v], value.layout.shape[1:-1]
            along = starts[self._cut][positions[0][self._cut]]
            exchange, received = self._exchange(v, rows, along)
            exchange.run()
            for block, position in zip(received, positions):
                lows = [along_axis[at] for along_axis, at in zip(starts, position)]
                own = Box.of_ranges([(low, low + n) for low, n in zip(lows, extents)])
                own &= Box.of_ranges(self._boxes[v].ranges[1:-1])
                if not own.size:  # this window does not touch the slab of this rank
                    continue
                inside = list(own.slices(lows))
                weights = _product([w[part] for w, part in zip(self._weights[v], inside)])
                low = max(0, self._boxes[v].start[self._cut + 1] - along)  # where the received part begins
                at = inside[self._cut]
                inside[self._cut] = slice(at.start - low, at.stop - low)
                at_own: Any = (0, *own.slices(self._boxes[v].start[1:-1]))
                target = window[at_own]
                target += block[tuple(inside)] * weights.astype(window.dtype)[..., None]

    def _exchange(self, v: int, rows: Sequence[int], along: int) -> tuple[Exchange, NDArray]:
        """Return the exchange from the blocks of the windows `rows`, which begin at `along` on the cut axis, to the
        slabs, and the array that the exchange fills. Collective.
        """
        value, comm = self._values[v], self._session.comm
        axes: list[Intervals] = [((0, n),) for n in value.layout.shape]
        axes[0] = ((rows[0], rows[-1] + 1),)
        extent = value.layout.shape[self._cut + 1]
        slabs = placed(self._session, value)[1].axes[self._cut + 1]
        # Slabs in coordinates of the window: each rank receives the part of the window in its slab.
        moved = [(low - along, high - along) for low, high in slabs]
        axes[self._cut + 1] = tuple((_within(low, extent), _within(high, extent)) for low, high in moved)
        target, kept = Blocks(axes, comm.size), self._exchanges[v]
        if target not in kept:
            if len(kept) >= _KEPT:
                # All ranks have the same keys, so they close the same exchanges.
                self._close(kept)
            received = np.empty(target[self._rank].shape, self._sent[v].dtype)
            ends = {"source": End(value.layout.boxes, self._sent[v]), "target": End(target, received)}
            kept[target] = Exchange.together(comm, [{**ends, "kind": "gather"}])[0], received
        return kept[target]

    @staticmethod
    def _close(kept: dict[Blocks, tuple[Exchange, NDArray]]) -> None:
        for exchange, _ in kept.values():
            exchange.close()
        kept.clear()

    def _divide(self, v: int, sums: NDArray) -> None:
        """Divide sums, in place, by the sums of the weights: the outer product of the sums along each axis."""
        totals = []
        for starts, weights, (low, high) in zip(self._starts[v], self._weights[v], self._boxes[v].ranges[1:-1]):
            total = np.zeros(high - low)
            for start in starts:
                first, last = max(low, start), min(high, start + len(weights))
                if first < last:
                    total[first - low : last - low] += weights[first - start : last - start]
            totals.append(total)
        sums /= _product(totals).astype(sums.dtype)[None, ..., None]


def _within(n: int, extent: int) -> int:
    return min(max(0, n), extent)


def _product(factors: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the outer product of arrays of one axis each."""
    product = np.ones(())
    for factor in factors:
        product = product[..., None] * factor
    return product
