"""Sums over the ranks of one node through shared memory, without MPI."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from halograd.comm.counters import Meter
from halograd.comm.reduction import Reduction
from halograd.comm.transports.arena import rounded
from halograd.comm.transports.base import ALIGNMENT
from halograd.comm.transports.flags import Flags
from halograd.comm.transports.places import Places

__all__ = ["LARGEST_AT_ONCE", "SharedSum", "Stage", "StagedSum", "blocks"]

# Up to here [B] a sum is deposited when it starts; larger ones go through a common stage, piece by piece.
LARGEST_AT_ONCE = 64 * 1024


class SharedSum(Reduction):
    """A small sum: every rank deposits its summand in its own segment, everyone adds them all up.

    Parameters
    ----------
    places
        Of `bytes_for` this buffer, and of this sum alone.

    Notes
    -----
    Sum n uses slot n mod 2 and raises the flag to n + 1. *What is read is what was deposited*: `finish` waits for
    n + 1 of all. *Nothing is overwritten while it is read*: a rank deposits sum n + 2 after its finish n + 1, so all
    others have started n + 1, and they did that after their finish n: they have read everything of sum n.
    """

    def __init__(self, buffer: np.ndarray, meter: Meter, places: Places) -> None:
        super().__init__(buffer, meter)
        self._places, self._flags, self._mine = places, places.flags, places.mine
        self._flat = buffer.reshape(-1)
        parts = self.deposited(buffer, places.ranks)
        self._own = self._flat[parts[places.mine]]
        half = (self.bytes_for(buffer, places.ranks) - 2 * ALIGNMENT) // 2
        #: Per slot what all ranks have deposited, in order.
        self._slots = [
            [
                places.view(rank, first, (part.stop - part.start) * buffer.itemsize).view(buffer.dtype)
                for rank, part in enumerate(parts)
            ]
            for first in (2 * ALIGNMENT, 2 * ALIGNMENT + half)
        ]
        self._count = 0

    @staticmethod
    def deposited(buffer: np.ndarray, ranks: int) -> list[slice]:
        """What each rank deposits of its flat buffer: all of it."""
        return [slice(0, buffer.size)] * ranks

    @classmethod
    def bytes_for(cls, buffer: np.ndarray, ranks: int) -> int:
        """Two stamps, and two slots for the largest deposit [B]."""
        largest = max(part.stop - part.start for part in cls.deposited(buffer, ranks))
        return 2 * ALIGNMENT + 2 * rounded(largest * buffer.itemsize)

    @property
    def stamps(self) -> list[list[np.ndarray]]:
        """Per slot a float64 of every rank, of no use here."""
        return [[view.view(np.float64) for view in self._places.views(i * ALIGNMENT, 8)] for i in range(2)]

    @property
    def buffer_bytes(self) -> int:
        return 2 * self._own.nbytes

    def _start(self) -> None:
        np.copyto(self._slots[self._count % 2][self._mine], self._own)
        self._count += 1
        self._flags.raise_to(self._count)

    def _finish(self) -> float:
        self._flags.wait_for(self._count)
        return self._add_up()

    def _add_up(self) -> float:
        add_up(self._slots[(self._count - 1) % 2], self._flat)
        return 0.0

    def _close(self) -> None:
        self._slots.clear()
        self._places.give_back()


class Stage:
    """Shared memory through which large sums pass one after the other, one piece at a time.

    Attributes
    ----------
    summands
        Per rank of the node one piece of its buffer, uint8.
    total
        Per rank the part of the piece's sum that it computes, uint8.
    mine, flags, count
        This rank, the flags of the stage, and how often they were raised.
    waiting
        Sums that were started and not made yet, in the order of their starts: the same on all ranks.
    """

    def __init__(self, summands: Sequence[np.ndarray], total: Sequence[np.ndarray], mine: int, flags: Flags) -> None:
        self.summands, self.total = list(summands), list(total)
        self.mine, self.flags, self.count = mine, flags, 0
        self.waiting: deque[StagedSum] = deque()

    @property
    def nbytes(self) -> int:
        """Memory of this rank's part [B]."""
        return self.summands[self.mine].nbytes + self.total[self.mine].nbytes

    @property
    def nbytes_per_rank(self) -> int:
        """Room for summands of one rank [B]."""
        return int(self.summands[self.mine].nbytes)

    def meet(self) -> None:
        """What this rank wrote is there for all when this returns, and what they wrote for this one."""
        self.count += 1
        self.flags.raise_to(self.count)
        self.flags.wait_for(self.count)


class StagedSum(Reduction):
    """A large sum, made in `finish` by the ranks together: piece by piece, each adds up its share of a piece.

    ``start`` only notes that the buffer is ready. The ranks of a node have no network to wait for: the sum is work
    of the cores, wherever it is done, and done here it does not interrupt the kernels of backward. A piece is
    copied to the stage (in the cache), every rank adds up its share of all summands, and copies the shares of the
    others back: reduce-scatter and all-gather, with two meetings.

    *Nothing is overwritten while it is read*: summands are read between the first and the second meeting of a
    piece, and written before the first; sums are written between them, and read after the second and before the
    first of the next piece. So every write is parted by a meeting from all reads before it and after it.

    Sums pass the stage in the order in which they were started, which is that of all ranks: to finish one is to
    finish those before it too, so ranks may call `finish` in different orders.
    """

    def __init__(self, buffer: np.ndarray, meter: Meter, stage: Stage) -> None:
        super().__init__(buffer, meter)
        self._stage = stage
        self._made = True
        self._pieces = self._cut(buffer)

    @property
    def buffer_bytes(self) -> int:
        return 0  # the stage is the transport's

    def _cut(self, buffer: np.ndarray) -> Sequence[tuple]:
        """The views that `_make` needs, piece by piece."""
        flat = buffer.reshape(-1)
        step = self._stage.nbytes_per_rank // buffer.itemsize
        return [self._piece(flat[i : i + step]) for i in range(0, flat.size, step)]

    def _piece(self, part: np.ndarray) -> tuple:
        """Views for one piece: own part, staged copy, share of each summand, own sum, copies back."""
        stage = self._stage
        staged = [s[: part.nbytes].view(part.dtype) for s in stage.summands]
        shares = [slice(*b) for b in blocks(part.size, len(staged))]
        sums = [t[: (s.stop - s.start) * part.itemsize].view(part.dtype) for t, s in zip(stage.total, shares)]
        share = shares[stage.mine]
        backs = [(part[s], total) for s, total in zip(shares, sums)]
        return part, staged[stage.mine], [s[share] for s in staged], sums[stage.mine], backs

    def _start(self) -> None:
        self._made = False
        self._stage.waiting.append(self)

    def _finish(self) -> float:
        while not self._made:
            self._stage.waiting.popleft()._make()
        return 0.0

    def _make(self) -> None:
        self._made = True
        meet = self._stage.meet
        for part, staged, summands, total, backs in self._pieces:
            np.copyto(staged, part)
            meet()
            add_up(summands, total)
            meet()
            for target, source in backs:
                np.copyto(target, source)


def add_up(summands: Sequence[np.ndarray], out: np.ndarray) -> None:
    """``out = summands[0] + summands[1] + ...``, in this order; at least two. Overflow gives inf, as in MPI."""
    with np.errstate(all="ignore"):
        np.add(summands[0], summands[1], out=out)
        for other in summands[2:]:
            np.add(out, other, out=out)


def blocks(size: int, parts: int) -> list[tuple[int, int]]:
    """``(start, stop)`` of `parts` blocks of about equal size.

    >>> blocks(5, 2)
    [(0, 2), (2, 5)]
    """
    return [(size * i // parts, size * (i + 1) // parts) for i in range(parts)]
