"""Traces of operations that ranks enqueue on a device's streams, and of the events between them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

__all__ = ["Entry", "Range", "Trace", "bounds"]

#: Memory of a rank (its number), first byte and the one behind the last.
Range = tuple[Any, int, int]
COMPUTE = 1


@dataclass(frozen=True)
class Entry:
    """Entry of a trace.

    Attributes
    ----------
    kind
        ``"op"``: an operation on `stream`; ``"record"``, ``"wait"``: of `event` on `stream`; ``"host wait"``: the host
        waited for `event`; ``"host record"``: the host signaled its progress to others; ``"mark"``: a named position.
    event
        The event and the number of its record.
    nccl
        Communicator, number and calls of an NCCL operation.
    """

    kind: str
    name: str
    stream: int = 0
    reads: tuple[Range, ...] = ()
    writes: tuple[Range, ...] = ()
    event: tuple[Any, Any] | None = None
    nccl: tuple[str, int, tuple[tuple[Any, ...], ...]] | None = None


@dataclass
class Trace:
    """Trace of one rank: its entries, in the order in which its host added them."""

    rank: int
    entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    def add(self, kind: str, name: str, **more: Any) -> None:
        """Add an entry; any thread may do so."""
        with self._lock:
            self.entries.append(Entry(kind, name, **more))

    def op(self, name: str, stream: int, reads: Sequence[Any] = (), writes: Sequence[Any] = (), **more: Any) -> None:
        """Add an operation with the arrays, or ``(address, bytes)``, that it reads and writes."""
        self.add("op", name, stream=stream, reads=self.ranges(reads), writes=self.ranges(writes), **more)

    def ranges(self, arrays: Sequence[Any]) -> tuple[Range, ...]:
        """Return the address ranges of these arrays; an empty array has none."""
        found = (bounds(a) if isinstance(a, np.ndarray) else (a[0], a[0] + a[1]) for a in arrays)
        return tuple((self.rank, lo, hi) for lo, hi in found if hi > lo)

    def mark(self, name: str) -> None:
        """Add a mark with this name."""
        self.add("mark", name)

    def between(self, first: str, second: str) -> list[Entry]:
        """Return the entries between two marks."""
        marks = [e.name if e.kind == "mark" else None for e in self.entries]
        return self.entries[marks.index(first) + 1 : marks.index(second)]


def bounds(array: np.ndarray) -> tuple[int, int]:
    """Return the addresses of an array's first byte and after its last one; equal for an empty array."""
    if not array.size:
        return 0, 0
    lo = hi = array.__array_interface__["data"][0]
    for length, stride in zip(array.shape, array.strides):
        lo, hi = lo + min(0, (length - 1) * stride), hi + max(0, (length - 1) * stride)
    return lo, hi + array.itemsize
