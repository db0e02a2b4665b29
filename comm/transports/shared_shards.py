"""Reduce-scatters and all-gathers over the ranks of one node through shared memory, without MPI."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halograd.comm.counters import Meter
from halograd.comm.shard import shards
from halograd.comm.transports.base import ALIGNMENT
from halograd.comm.transports.places import Places
from halograd.comm.transports.shared_sum import SharedSum, Stage, StagedSum, add_up

__all__ = ["SharedGather", "SharedScatter", "StagedGather", "StagedScatter"]

_Copies = list[tuple[np.ndarray, np.ndarray]]  # target, source


class SharedScatter(SharedSum):
    """A small sum of which every rank adds up its shard. Everything else is that of :class:`SharedSum`."""

    def __init__(self, buffer: np.ndarray, meter: Meter, places: Places) -> None:
        super().__init__(buffer, meter, places)
        own = shards(buffer.size, len(self._slots[0]), buffer.itemsize)[self._mine]
        self._shard = buffer.reshape(-1)[own]
        self._summands = [[summand.reshape(-1)[own] for summand in slot] for slot in self._slots]

    def _add_up(self) -> float:
        add_up(self._summands[(self._count - 1) % 2], self._shard)
        return 0.0

    def _close(self) -> None:
        self._summands.clear()
        super()._close()


class SharedGather(SharedSum):
    """A small all-gather: every rank deposits its shard and copies those of the others."""

    def __init__(self, buffer: np.ndarray, meter: Meter, places: Places) -> None:
        super().__init__(buffer, meter, places)
        flat, mine = buffer.reshape(-1), self._mine
        parts = shards(buffer.size, len(self._slots[0]), buffer.itemsize)
        #: Per slot own shard and its place, and the places of the others' shards and these.
        self._deposits = [(slot[mine].reshape(-1)[parts[mine]], flat[parts[mine]]) for slot in self._slots]
        self._copies: list[_Copies] = [
            [(flat[p], slot[rank].reshape(-1)[p]) for rank, p in enumerate(parts) if rank != mine]
            for slot in self._slots
        ]

    def _start(self) -> None:
        target, source = self._deposits[self._count % 2]
        np.copyto(target, source)
        self._count += 1
        self._flags.raise_to(self._count)

    def _add_up(self) -> float:
        for target, source in self._copies[(self._count - 1) % 2]:
            np.copyto(target, source)
        return 0.0

    def _close(self) -> None:
        self._deposits.clear()
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


class StagedGather(StagedSum):
    """A large all-gather, made in `finish` like a :class:`StagedSum`: all ranks stage a part of their shards and copy
    those of the others."""

    def _cut(self, buffer: np.ndarray) -> Sequence[tuple]:
        flat, stage = buffer.reshape(-1), self._stage
        pieces = []
        for parts in _parts(buffer, stage):
            staged = [
                memory[: (part.stop - part.start) * buffer.itemsize].view(buffer.dtype)
                for memory, part in zip(stage.summands, parts)
            ]
            copies = [(flat[p], staged[rank]) for rank, p in enumerate(parts) if rank != stage.mine]
            pieces.append((staged[stage.mine], flat[parts[stage.mine]], copies))
        return pieces

    def _make(self) -> None:
        self._made = True
        meet = self._stage.meet
        for staged, shard, copies in self._pieces:
            np.copyto(staged, shard)
            meet()
            for target, source in copies:
                np.copyto(target, source)
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
