"""Counters in shared memory by which the ranks of a node tell each other how far they are."""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np

from halograd.comm.transports.arena import Chunk
from halograd.comm.transports.base import ALIGNMENT

__all__ = ["FLAG_BYTES", "Flags"]

FLAG_BYTES = ALIGNMENT  # a cache line each: a rank that polls does not disturb the writer of another flag

# Polls before the core is offered to others: with a core per rank a peer is seldom later than that (some 10 us).
SPINS = 200
# After so many offers (some 0.1 ms on an idle core) the waiter sleeps between two polls: the peer may want this very
# core, and other threads of this process too. Woken some 60 us later, it loses a fraction of what it has waited.
OFFERS = 200
NAP = 1e-5  # [s]
# After so many naps (some ms) they become longer: hardly any CPU is used then.
NAPS = 50
LONG_NAP = 2e-4  # [s]


class Flags:
    """One counter per rank of the node; a rank raises its own and waits for those of others.

    What a rank wrote to shared memory before :meth:`raise_to` is seen by whoever waited for that count.

    Parameters
    ----------
    chunk
        Window that the counters lie in.
    offset
        Offset [B] of this rank's counter in its segment.
    offsets
        Offset [B] of the counter of every peer, by rank on the node.
    mine
        This rank on the node.
    """

    def __init__(self, chunk: Chunk, offset: int, offsets: dict[int, int], mine: int) -> None:
        self._sync = chunk.sync
        self._own = _counter(chunk, mine, offset)
        self._others = [_counter(chunk, rank, first) for rank, first in sorted(offsets.items()) if rank != mine]

    def raise_to(self, count: int) -> None:
        """Tell the others that this rank has come to `count`."""
        self._sync()
        self._own[0] = count

    def reached(self, count: int) -> bool:
        """Whether all others have come to `count`. Does not wait."""
        if any(flag[0] < count for flag in self._others):
            return False
        self._sync()
        return True

    def wait_for(self, count: int) -> None:
        """Return when all others have come to `count`."""
        for flag in self._others:
            if flag[0] < count:
                _wait(flag, count)
        self._sync()


def _counter(chunk: Chunk, rank: int, offset: int) -> memoryview:
    """The counter as a memoryview of one integer: read and written in one instruction, without making an array."""
    counter: Any = chunk.segment(rank)[offset : offset + 8].view(np.int64)
    return memoryview(counter)


def _wait(flag: memoryview, count: int) -> None:
    for _ in range(SPINS):
        if flag[0] >= count:
            return
    for _ in range(OFFERS):
        os.sched_yield()
        if flag[0] >= count:
            return
    for _ in range(NAPS):
        time.sleep(NAP)
        if flag[0] >= count:
            return
    while flag[0] < count:
        time.sleep(LONG_NAP)
