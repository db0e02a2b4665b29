"""Rounding of float32 to bfloat16, half the bytes, and what it takes away. Pure arithmetic on host arrays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

__all__ = ["PIECE", "Rounding"]

#: Elements that are worked on in one go: three arrays of so many stay in the cache.
PIECE = 1 << 14
# Multiplied by this, a float32 splits into its 8 leading bits and the rest (Veltkamp, see `Rounding`).
_SPLIT = np.float32((1 << 16) + 1)


class Rounding:
    """Rounds to the nearest bfloat16 and back. Local; allocates when made only.

    A bfloat16 is the upper half of a float32: 8 significant bits. `encode` splits a number ``v`` after Veltkamp:
    ``c = (2**16 + 1) * v; high = c - (c - v)`` holds its 8 leading bits, rounded to nearest. NaN stays NaN; numbers
    from 2**111 on overflow to NaN, infinity too: a training that has them has diverged.

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
        """``wire = rounded(values + error)``, and `error` becomes what was rounded away.

        Parameters
        ----------
        values
            ``(n,)`` float32; read.
        wire
            ``(n,)`` uint16; overwritten.
        error
            ``(n,)`` float32, added and overwritten; None: nothing is added, and what is lost is lost.
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
        """``out = wire``: ``(n,)`` uint16 to ``(n,)`` float32, exact."""
        for part in _pieces(out.size):
            _widen(wire[part], out[part])

    def add(self, wire: np.ndarray, out: np.ndarray) -> None:
        """``out += wire``: ``(n,)`` uint16 to ``(n,)`` float32."""
        with np.errstate(all="ignore"):
            for part in _pieces(out.size):
                a = self._a[: part.stop - part.start]
                _widen(wire[part], a)
                np.add(out[part], a, out=out[part])


def _widen(wire: np.ndarray, out: np.ndarray) -> None:
    bits = out.view(np.uint32)
    np.copyto(bits, wire)
    np.left_shift(bits, 16, out=bits)


def _pieces(size: int) -> Iterator[slice]:
    return (slice(i, min(i + PIECE, size)) for i in range(0, size, PIECE))
