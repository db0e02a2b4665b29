"""Rounding of float32 to bfloat16, which halves the bytes, and the rounding errors. Pure arithmetic on host arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from .progress import Stage, Work
from .reduction import Pairs, cut

__all__ = ["PIECE", "Rounded", "Rounding"]

#: Elements per piece of work: three arrays of this size stay in the cache.
PIECE = 1 << 14
# Multiplied by this, a float32 splits into its 8 leading bits and the rest (Veltkamp, see `Rounding`).
_SPLIT = np.float32((1 << 16) + 1)


class Rounding:
    """Conversion to the nearest bfloat16 and back. Local; it allocates only when it is created.

    A bfloat16 is the upper half of a float32: 8 significant bits. `encode` splits a number ``v`` after Veltkamp:
    ``c = (2**16 + 1) * v; high = c - (c - v)`` holds its 8 leading bits, rounded to nearest. NaN stays NaN; numbers
    from 2**111 on overflow to NaN, and so does infinity: a training with such numbers has diverged.

    References
    ----------
    Dekker 1971, *A floating-point technique for extending the available precision*, Section 5.
    """

    def __init__(self) -> None:
        self._a, self._b = np.zeros(PIECE, np.float32), np.zeros(PIECE, np.float32)

    @property
    def nbytes(self) -> int:
        """Scratch memory [B]."""
        return self._a.nbytes + self._b.nbytes

    def encode(self, values: np.ndarray, wire: np.ndarray, error: np.ndarray | None = None) -> None:
        """Compute ``wire = rounded(values + error)``, and set `error` to the rounding error.

        Parameters
        ----------
        values
            ``(n,)`` float32; read.
        wire
            ``(n,)`` uint16; overwritten.
        error
            ``(n,)`` float32, added and overwritten; None: nothing is added, and the rounding error is discarded.
        """
        with np.errstate(all="ignore"):
            for part in _pieces(values.size):
                a, b = self._a[: part.stop - part.start], self._b[: part.stop - part.start]
                v = values[part]
                if error is not None:
                    v = np.add(v, error[part], out=error[part])
                np.multiply(v, _SPLIT, out=a)
                np.subtract(a, v, out=b)
                np.subtract(a, b, out=a)
                if error is not None:
                    np.subtract(v, a, out=v)
                bits = a.view(np.uint32)
                np.right_shift(bits, 16, out=bits)
                np.copyto(wire[part], bits, casting="unsafe")

    def decode(self, wire: np.ndarray, out: np.ndarray) -> None:
        """Convert ``wire`` ``(n,)`` uint16 to ``out`` ``(n,)`` float32; exact."""
        for part in _pieces(out.size):
            _widen(wire[part], out[part])

    def add(self, wire: np.ndarray, out: np.ndarray) -> None:
        """Compute ``out += wire``: ``(n,)`` uint16 added to ``(n,)`` float32."""
        with np.errstate(all="ignore"):
            for part in _pieces(out.size):
                a = self._a[: part.stop - part.start]
                _widen(wire[part], a)
                np.add(out[part], a, out=out[part])


class Rounded:
    """Codec of float32 sums whose messages are bfloat16; additions are in float32.

    The owner of a summand rounds it, and the rank that adds up a part of the sum rounds that part. All ranks get the
    same bits.

    Parameters
    ----------
    owned
        Slices of the buffer that this rank adds up. They follow each other, and so do the sources of `deposit`.

    Attributes
    ----------
    error
        ``(n,)`` float32: accumulated rounding error of this rank's summands, added to the next ones. None: the error is
        discarded, until :meth:`compensate` is called.
    share_error
        The accumulated rounding error of the parts of the sum that this rank rounds, concatenated.

    References
    ----------
    Tang et al. 2019, *DoubleSqueeze*, Algorithm 1: both sides compensate for their own errors.
    """

    def __init__(self, owned: Sequence[slice]) -> None:
        self.owned = list(owned)
        self.error: np.ndarray | None = None
        self.share_error: np.ndarray | None = None
        # Two objects: the main thread rounds one sum while the progress thread adds up another.
        self._rounding, self._adding = Rounding(), Rounding()
        self._total = np.zeros(max((part.stop - part.start for part in self.owned), default=0), np.float32)
        self._deposited = self._added = 0

    @property
    def nbytes(self) -> int:
        """Scratch memory [B]."""
        kept = 0 if self.share_error is None else self.share_error.nbytes
        return kept + self._total.nbytes + self._rounding.nbytes + self._adding.nbytes

    def compensate(self, error: np.ndarray) -> None:
        """Add the rounding error of earlier summands to the next ones from now on; `error` is ``(n,)`` float32. Local.
        """
        self.error = error.reshape(-1)
        self.share_error = np.zeros(sum(part.stop - part.start for part in self.owned), np.float32)

    def collect(self) -> None:
        """Add the rounding errors of this rank's parts of sums to `error`. Local."""
        taken = 0
        assert self.error is not None and self.share_error is not None
        for part in self.owned:
            length = part.stop - part.start
            self.error[part] += self.share_error[taken : taken + length]
            taken += length
        self.share_error.fill(0)

    def forget_faults(self) -> None:
        """Set non-finite rounding errors to zero: errors of infinity or NaN would spoil all later sums. Local."""
        for kept in (self.error, self.share_error):
            if kept is not None:
                kept[~np.isfinite(kept)] = 0

    def deposit(self, pairs: Pairs) -> Stage:
        calls = []
        for wire, values in pairs:
            where = slice(self._deposited, self._deposited + values.size)
            calls.append(partial(self._encode, values, wire, where))
            self._deposited = where.stop
        return Work(calls)

    def _encode(self, values: np.ndarray, wire: np.ndarray, where: slice) -> None:
        self._rounding.encode(values, wire, None if self.error is None else self.error[where])

    def add(self, summands: Sequence[np.ndarray], total: np.ndarray) -> Stage:
        first, self._added = self._added, self._added + total.size
        return Work(
            [
                partial(self._add, [one[p] for one in summands], total[p], slice(first + p.start, first + p.stop))
                for p in cut(total)
            ]
        )

    def _add(self, summands: Sequence[np.ndarray], rounded: np.ndarray, where: slice) -> None:
        total = self._total[: rounded.size]
        total.fill(0)
        for one in summands:
            self._adding.add(one, total)
        self._adding.encode(total, rounded, None if self.share_error is None else self.share_error[where])

    def give_back(self, pairs: Pairs) -> Stage:
        return Work([partial(self._rounding.decode, wire, out) for out, wire in pairs])


def _widen(wire: np.ndarray, out: np.ndarray) -> None:
    bits = out.view(np.uint32)
    np.copyto(bits, wire)
    np.left_shift(bits, 16, out=bits)


def _pieces(size: int) -> Iterator[slice]:
    return (slice(i, min(i + PIECE, size)) for i in range(0, size, PIECE))
