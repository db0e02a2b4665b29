"""Sums over the ranks of one node through shared memory that round as a network would carry them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from halograd.comm.counters import Meter
from halograd.comm.rounding import Rounding
from halograd.comm.transports.shared_sum import Stage, StagedSum, blocks

__all__ = ["StagedRoundedSum"]


class StagedRoundedSum(StagedSum):
    """A sum of float32 that goes over the stage as bfloat16, of any size: the bits are those of `MpiRoundedSum`.

    Attributes
    ----------
    error, share_error, owned
        As of `halograd.comm.ordered.MpiRoundedSum`; a rank owns a share of every piece.
    """

    def __init__(self, buffer: np.ndarray, meter: Meter, stage: Stage) -> None:
        super().__init__(buffer, meter, stage)
        self._rounding = Rounding()
        self.error: np.ndarray | None = None
        self.share_error: np.ndarray | None = None
        self._errors: list[tuple[np.ndarray | None, np.ndarray | None]] = [(None, None)] * len(self._pieces)

    def compensate(self, error: np.ndarray) -> None:
        """From now on add to the summands what was rounded away from those before: `error`, ``(n,)`` float32. Local."""
        self.error = error
        self.share_error = np.zeros(sum(part.stop - part.start for part in self.owned), np.float32)
        flat, done, shared = error.reshape(-1), 0, 0
        for i, (part, *_) in enumerate(self._pieces):
            length = self.owned[i].stop - self.owned[i].start
            self._errors[i] = flat[done : done + part.size], self.share_error[shared : shared + length]
            done, shared = done + part.size, shared + length

    @property
    def buffer_bytes(self) -> int:
        own = 0 if self.share_error is None else self.share_error.nbytes
        return own + self._total.nbytes + self._rounding.nbytes

    def _cut(self, buffer: np.ndarray) -> Sequence[tuple]:
        flat, step = buffer.reshape(-1), self._stage.nbytes_per_rank // 2
        self.owned: list[slice] = []
        self._total = np.zeros(-(-min(step, flat.size) // len(self._stage.summands)), np.float32)
        return [self._rounded_piece(flat[i : i + step], i) for i in range(0, flat.size, step)]

    def _rounded_piece(self, part: np.ndarray, first: int) -> tuple:
        """Views: own part, staged copy, share of each summand, its total, own sum, copies back."""
        stage = self._stage
        staged = [memory[: 2 * part.size].view(np.uint16) for memory in stage.summands]
        shares = [slice(*b) for b in blocks(part.size, len(staged))]
        sums = [memory[: 2 * (s.stop - s.start)].view(np.uint16) for memory, s in zip(stage.total, shares)]
        share = shares[stage.mine]
        self.owned.append(slice(first + share.start, first + share.stop))
        total = self._total[: share.stop - share.start]
        backs = [(part[s], source) for s, source in zip(shares, sums)]
        return part, staged[stage.mine], [s[share] for s in staged], total, sums[stage.mine], backs

    def _make(self) -> None:
        self._made = True
        meet, rounding = self._stage.meet, self._rounding
        for (part, staged, summands, total, rounded, backs), (error, share_error) in zip(self._pieces, self._errors):
            rounding.encode(part, staged, error)
            meet()
            total.fill(0)
            for summand in summands:
                rounding.add(summand, total)
            rounding.encode(total, rounded, share_error)
            meet()
            for target, source in backs:
                rounding.decode(source, target)
