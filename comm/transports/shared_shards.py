"""Reduce-scatters and all-gathers over the ranks of one node through shared memory, without MPI."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halograd.comm.counters import Meter
from halograd.comm.shard import shards
from halograd.comm.transports.base import ALIGNMENT
from halograd.comm.transports.places import Places
from halograd.comm.transports.shared_sum import SharedSum, Stage, StagedSum, add_up

__all__ = ["SharedGather", "SharedScatter", "StagedScatter"]


class SharedScatter(SharedSum):
    """A small sum of which every rank adds up its shard. Everything else is that of :class:`SharedSum`."""

    def __init__(self, buffer: np.ndarray, meter: Meter, places: Places) -> None:
        super().__init__(buffer, meter, places)
        own = shards(buffer.size, places.ranks, buffer.itemsize)[self._mine]
        self._shard = self._flat[own]
        self._summands = [[summand[own] for summand in slot] for slot in self._slots]

    def _add_up(self) -> float:
        add_up(self._summands[(self._count - 1) % 2], self._shard)
        return 0.0

    def _close(self) -> None:
        self._summands.clear()
        super()._close()


class SharedGather(SharedSum):
    """An all-gather: every rank deposits its shard when it starts, and copies those of the others when it finishes.

    Of any size: shards of all ranks together are no more than one buffer, and nobody has to meet anybody.
    """

    def __init__(self, buffer: np.ndarray, meter: Meter, places: Places) -> None:
        super().__init__(buffer, meter, places)
        parts = self.deposited(buffer, places.ranks)
        self._copies = [
            [(self._flat[parts[rank]], shard) for rank, shard in enumerate(slot) if rank != self._mine]
            for slot in self._slots
        ]

    @staticmethod
    def deposited(buffer: np.ndarray, ranks: int) -> list[slice]:
        """Its shard."""
        return shards(buffer.size, ranks, buffer.itemsize)

    def _add_up(self) -> float:
        for target, source in self._copies[(self._count - 1) % 2]:
            np.copyto(target, source)
        return 0.0

    def _close(self) -> None:
        self._copies.clear()
        super()._close()


class StagedScatter(StagedSum):
    """A large sum of which every rank adds up its shard, made in `finish` like a :class:`StagedSum`.

    A piece consists of a part of every shard: all ranks copy theirs to the stage, meet, and each adds up the part of
    its own shard. They meet again before the stage is written anew.
    """

    def _cut(self, buffer: np.ndarray) -> Sequence[tuple]:
        return [self._scatter_piece(buffer, parts) for parts in _parts(buffer, self._stage)]

    def _scatter_piece(self, buffer: np.ndarray, parts: list[slice]) -> tuple:
        flat, stage = buffer.reshape(-1), self._stage
        places, first = [], 0
        for part in parts:
            places.append(slice(first, first + (part.stop - part.start) * buffer.itemsize))
            first = places[-1].stop
        deposits = [
            (stage.summands[stage.mine][place].view(buffer.dtype), flat[part]) for place, part in zip(places, parts)
        ]
        own = places[stage.mine]
        return deposits, [s[own].view(buffer.dtype) for s in stage.summands], flat[parts[stage.mine]]

    def _make(self) -> None:
        self._made = True
        meet = self._stage.meet
        for deposits, summands, shard in self._pieces:
            for target, source in deposits:
                np.copyto(target, source)
            meet()
            add_up(summands, shard)
            meet()


def _parts(buffer: np.ndarray, stage: Stage) -> list[list[slice]]:
    """Per piece the part of every rank's shard that belongs to it, as long as all of them fit on one rank's stage."""
    ranks = len(stage.summands)
    whole = shards(buffer.size, ranks, buffer.itemsize)
    longest = max(part.stop - part.start for part in whole)
    step = stage.nbytes_per_rank // ranks // ALIGNMENT * ALIGNMENT // buffer.itemsize
    return [
        [slice(min(p.start + i, p.stop), min(p.start + i + step, p.stop)) for p in whole]
        for i in range(0, longest, step)
    ]
