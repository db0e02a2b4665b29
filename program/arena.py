"""Arena: one block of memory for all arrays of a step, with offsets from the order of operations. Pure arithmetic.

A buffer occupies memory of the arena from the first operation that uses it to the last, but not between its release and
the operation that writes it again. Buffers that are kept from step to step occupy it all the time. ::

    offset ^  |   kept                         |
           |  |  a   |  c         |  e  |
           |  |   b         |   d    |   f     |
           +-----------------------------------> operations
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from ..lowering.operations import Operation, Release
from ..lowering.views import Buffer

__all__ = ["ALIGNMENT", "Placement", "lifetimes", "placement_of"]

#: Offsets and lengths are multiples of this [B].
ALIGNMENT = 64


#: No other placement is tried for an arena of at most `NEAR` times the least possible size; with at most `FEW` buffers,
#: only for one of the least possible size.
NEAR, FEW = 1.005, 100
#: If buffers are released and written again, further orders are tried until `TRIES` in succession give no smaller
#: arena; with at most `FEW` buffers, until `TRIES_OF_FEW` do.
TRIES, TRIES_OF_FEW = 4, 30


@dataclass(frozen=True)
class Placement:
    """Offsets of buffers in the arena.

    Attributes
    ----------
    offsets
        Offset of each buffer in the arena [B].
    size
        Size of the arena [B].
    kept
        Size of the buffers that are kept from step to step, by use [B].
    """

    offsets: dict[Buffer, int]
    size: int
    kept: dict[str, int]

    @property
    def uses(self) -> dict[str, int]:
        """Sizes by use [B]: of kept buffers, and of the memory that other buffers share."""
        return {**self.kept, "transient": self.size - sum(self.kept.values())}


def placement_of(operations: Sequence[Operation], kept: Sequence[Buffer]) -> Placement:
    """Return a placement in the arena of all buffers that operations use, and of those that are kept.

    Parameters
    ----------
    operations
        Operations of a whole step, in order.
    kept
        Buffers that always occupy the arena, used or not, in addition to those with `Buffer.kept`.
    """
    always = dict.fromkeys(kept)
    for operation in operations:
        always.update(dict.fromkeys(b for b in operation.held() if b.kept and b.location is None))
    offsets, uses, end = {}, dict[str, int](), 0
    for buffer in always:
        offsets[buffer] = end
        end += aligned(buffer.nbytes)
        uses[buffer.use] = uses.get(buffer.use, 0) + aligned(buffer.nbytes)
    spans = lifetimes(operations, kept)
    own, size = _placed(spans, end)
    return Placement({**offsets, **own}, size, uses)


Spans = list[tuple[int, int]]


def lifetimes(operations: Sequence[Operation], kept: Sequence[Buffer]) -> dict[Buffer, Spans]:
    """Return the spans of each buffer of the arena that is not kept: numbers of the first and last operation that use
    it.

    A buffer that is released (:class:`Release`) and written again later has several spans. The parameters are those of
    :func:`placement_of`.
    """
    result: dict[Buffer, Spans] = {}
    released: set[Buffer] = set()
    always = frozenset(kept)

    def is_placed(buffer: Buffer) -> bool:
        return buffer.location is None and not buffer.kept and buffer not in always

    for at, operation in enumerate(operations):
        if isinstance(operation, Release):
            released.update(operation.released)
        for buffer in operation.buffers():
            spans = result.get(buffer)
            if spans is None:
                if not is_placed(buffer):
                    continue
                spans = result[buffer] = []
            # The first use, or the first one after a release, begins a new span.
            if not spans or buffer in released:
                released.discard(buffer)
                spans.append((at, at))
            else:
                spans[-1] = spans[-1][0], at
    # A kernel is made with arrays that no operation uses, such as work space of a backward pass that is left out.
    for at, operation in enumerate(operations):
        for buffer in operation.held():
            if buffer not in result and is_placed(buffer):
                result[buffer] = [(at, at)]
    return result


def _in_time(spans: Mapping[Buffer, Spans], begin: int) -> tuple[dict[Buffer, int], int]:
    """Return the offsets of buffers with one span each, placed in order of first use, and the end of the memory."""
    offsets, free = dict[Buffer, int](), _Free(begin)
    begins, ends = (dict[int, list[Buffer]]() for _ in range(2))
    for buffer, ((first, last),) in spans.items():
        begins.setdefault(first, []).append(buffer)
        ends.setdefault(last, []).append(buffer)
    for at in sorted({*begins, *ends}):
        # Take before give: an operation may not write its results over arrays that it still reads.
        # Large buffers first, because fewer gaps hold them.
        for buffer in sorted(begins.get(at, ()), key=lambda b: -b.nbytes):
            offsets[buffer] = free.take(aligned(buffer.nbytes))
        for buffer in ends.get(at, ()):
            free.give(offsets[buffer], aligned(buffer.nbytes))
    return offsets, free.end


def _placed(spans: Mapping[Buffer, Spans], begin: int) -> tuple[dict[Buffer, int], int]:
    """Return the offsets of buffers, and the end of the memory.

    They are those of the best of several placements, tried until the end is close to its lower bound, the most memory
    in use at one time.
    """
    changes = Counter[int]()
    nbytes = {buffer: buffer.nbytes for buffer in spans}
    for buffer, intervals in spans.items():
        size = aligned(nbytes[buffer])
        for first, last in intervals:
            changes[first] += size
            # The last operation still uses the buffer, so that its memory is free from the next one on.
            changes[last + 1] -= size
    # No placement is smaller than the sum of the buffers that one operation finds in use.
    least = begin + max(accumulate(changes[at] for at in sorted(changes)), default=0)
    few = len(spans) <= FEW
    near = least if few else NEAR * least
    length = {buffer: sum(last - first for first, last in intervals) for buffer, intervals in spans.items()}
    orders: list[Callable[[Buffer], Any]] = [
        lambda buffer: (-nbytes[buffer], spans[buffer]),
        lambda buffer: (-nbytes[buffer], -length[buffer]),
        lambda buffer: (-length[buffer], -nbytes[buffer]),
    ]
    best: tuple[dict[Buffer, int], int] | None = None
    if all(len(intervals) == 1 for intervals in spans.values()):
        best = _in_time(spans, begin)
    for order in orders:
        if best is None or best[1] > near:
            best = _in_order(sorted(spans, key=order), spans, begin, math.inf if best is None else best[1]) or best
    assert best is not None
    if any(len(intervals) > 1 for intervals in spans.values()):
        trial = sorted(spans, key=lambda buffer: (spans[buffer][0][0], -buffer.nbytes))
        left = tries = TRIES_OF_FEW if few else TRIES
        while left and best[1] > near:
            # What lies at the end is placed first.
            placement = _in_order(trial, spans, begin)
            assert placement is not None
            offsets, end = placement
            best, left = (placement, tries) if end < best[1] else (best, left - 1)
            trial.sort(key=lambda buffer: offsets[buffer] + aligned(buffer.nbytes) < end)
    return best


def _in_order(
    order: Iterable[Buffer], spans: Mapping[Buffer, Spans], begin: int, below: float = math.inf
) -> tuple[dict[Buffer, int], int] | None:
    """Return the offsets of buffers that are placed in this order, each where it fits best, and the end of the memory.

    A buffer has one offset in all its spans. The result is None if the memory does not end before `below`.
    """
    offsets, end, count = dict[Buffer, int](), begin, sum(map(len, spans.values()))
    # First and last operation, start and stop in memory, of the spans that are placed, in the order of their starts.
    placed, number = np.zeros((4, count), np.int64), 0
    first, last, starts, stops = placed
    used = np.full(count + 1, begin, np.int64)  # end of the memory in use before each span that exists at the same time
    for buffer in order:
        at_once = np.zeros(number, bool)
        for begins, ends in spans[buffer]:
            at_once |= (first[:number] <= ends) & (last[:number] >= begins)
        others, size = at_once.nonzero()[0], aligned(buffer.nbytes)
        np.maximum.accumulate(stops[others], out=used[1 : len(others) + 1])
        gaps = starts[others] - used[: len(others)]
        fitting = (gaps >= size).nonzero()[0]
        # The smallest gap that is long enough; without one, after all buffers that exist at the same time.
        offset = int(used[fitting[gaps[fitting].argmin()] if len(fitting) else len(others)])
        offsets[buffer], end = offset, max(end, offset + size)
        if end >= below:
            return None
        # Columns stay sorted by their starts: the running maximum of the stops above relies on it.
        at = int(starts[:number].searchsorted(offset))
        for begins, ends in spans[buffer]:
            # NumPy copies overlapping slices as if through a temporary array.
            placed[:, at + 1 : number + 1] = placed[:, at:number]
            placed[:, at] = begins, ends, offset, offset + size
            number += 1
    return offsets, end


def aligned(nbytes: int) -> int:
    """Return `nbytes`, rounded up to a positive multiple of the alignment [B]."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT


class _Free:
    """Free ranges of a growing arena: best fit; adjacent ranges are joined."""

    def __init__(self, begin: int) -> None:
        self.end = begin
        self._holes: list[tuple[int, int]] = []  # (start, stop), in order

    def take(self, size: int) -> int:
        fitting = [(stop - start, start) for start, stop in self._holes if stop - start >= size]
        if fitting:
            length, start = min(fitting)
            at = bisect.bisect_left(self._holes, (start, start + length))
            self._holes[at : at + 1] = [(start + size, start + length)] if length > size else []
            return start
        start = self.end
        # A free range at the end is too short, but is used: the arena grows only by what it lacks.
        if self._holes and self._holes[-1][1] == self.end:
            start = self._holes.pop()[0]
        self.end = start + size
        return start

    def give(self, start: int, size: int) -> None:
        at = bisect.bisect_left(self._holes, (start, start))
        stop = start + size
        if at < len(self._holes) and self._holes[at][0] == stop:
            stop = self._holes.pop(at)[1]
        if at and self._holes[at - 1][1] == start:
            at -= 1
            start = self._holes.pop(at)[0]
        self._holes.insert(at, (start, stop))
