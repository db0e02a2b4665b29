"""Encoded sums: the stages that encode, add and decode by a codec, and the encoding errors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from .codec import PIECE, Codec
from .progress import Stage, Work
from .reduction import Pairs, cut

__all__ = ["Encoding"]


class Encoding:
    """Stages of one sum whose messages are encoded; the values are decoded before they are added.

    Encoded data may lie at the start of the array that they encode: pieces are encoded from the first to the last, and
    decoded from the last to the first.

    The owner of a summand encodes it, and the rank that adds up a part of the sum encodes that part. All ranks get the
    same bits.

    Parameters
    ----------
    codec
        Format of the messages.
    dtype
        Dtype of the buffer.
    owned
        Slices of the buffer that this rank adds up, in the order of the calls of `add`. The sources of the calls of
        `deposit` are adjacent, in this order, too.

    Attributes
    ----------
    error
        ``(n,)`` of `dtype`: accumulated encoding error of this rank's summands, added to the next ones. None: the error
        is discarded, until :meth:`compensate` is called.
    share_error
        The accumulated encoding error of the parts of the sum that this rank encodes, concatenated; None as `error`.

    References
    ----------
    Tang et al. 2019, *DoubleSqueeze*, Algorithm 1: both sides compensate for their own errors.
    """

    def __init__(self, codec: Codec, dtype: np.dtype, owned: Sequence[slice]) -> None:
        self.codec, self.dtype, self.owned = codec, dtype, list(owned)
        self.error: np.ndarray | None = None
        self.share_error: np.ndarray | None = None
        # The stages of a sum follow each other, so they share these arrays.
        self._spare, *self._work = (np.zeros(PIECE, self.dtype) for _ in range(codec.arrays))
        self._deposited = self._added = 0

    @property
    def nbytes(self) -> int:
        """Scratch memory, and that of `share_error` [B]; `error` belongs to the caller."""
        kept = 0 if self.share_error is None else self.share_error.nbytes
        return kept + sum(array.nbytes for array in (self._spare, *self._work))

    def compensate(self, error: np.ndarray) -> None:
        """From now on, add the encoding error of each summand to the next one; `error`, ``(n,)``, keeps it. Local."""
        self.error = error.reshape(-1)
        self.share_error = np.zeros(sum(part.stop - part.start for part in self.owned), self.dtype)

    def collect(self) -> None:
        """Move the encoding errors of the parts of the sum that this rank encodes to `error`. Local."""
        offset = 0
        assert self.error is not None and self.share_error is not None
        for part in self.owned:
            length = part.stop - part.start
            self.error[part] += self.share_error[offset : offset + length]
            offset += length
        self.share_error.fill(0)

    def forget_faults(self) -> None:
        """Set non-finite encoding errors to zero: errors of infinity or NaN would spoil all later sums. Local."""
        for kept in (self.error, self.share_error):
            if kept is not None:
                kept[~np.isfinite(kept)] = 0

    def deposit(self, pairs: Pairs) -> Stage:
        calls = []
        for encoded, values in pairs:
            # Sources follow each other in the buffer, and so do their errors in `error`.
            where = slice(self._deposited, self._deposited + values.size)
            calls.append(partial(self._deposit, values, encoded, where))
            self._deposited = where.stop
        return Work(calls)

    def _deposit(self, values: np.ndarray, encoded: np.ndarray, where: slice) -> None:
        error = None if self.error is None else self.error[where]
        # As in sums of MPI, overflow gives infinity without a warning.
        with np.errstate(all="ignore"):
            for part in _pieces(values.size):
                source, target = values[part], encoded[part]
                # Encoded elements may lie over those that they encode.
                if np.may_share_memory(source, target):
                    source = self._copied(source)
                self._encode(source, target, None if error is None else error[part])

    def _copied(self, array: np.ndarray) -> np.ndarray:
        """Return a copy of a piece in scratch memory, which the next call overwrites."""
        copy = self._spare.view(np.uint8)[: array.nbytes].view(array.dtype)
        np.copyto(copy, array)
        return copy

    def add(self, summands: Sequence[np.ndarray], total: np.ndarray) -> Stage:
        first, self._added = self._added, self._added + total.size
        calls = []
        for part in cut(total):
            where = slice(first + part.start, first + part.stop)
            calls.append(partial(self._add, [summand[part] for summand in summands], total[part], where))
        return Work(calls)

    def _add(self, summands: Sequence[np.ndarray], encoded: np.ndarray, where: slice) -> None:
        error = None if self.share_error is None else self.share_error[where]
        with np.errstate(all="ignore"):
            for part in _pieces(encoded.size):
                total, decoded = (array[: part.stop - part.start] for array in (self._spare, self._work[0]))
                total.fill(0)
                for summand in summands:
                    self.codec.decode(summand[part], decoded)
                    np.add(total, decoded, out=total)
                # From here on the work arrays belong to the codec, `decoded` among them.
                self._encode(total, encoded[part], None if error is None else error[part])

    def _encode(self, values: np.ndarray, encoded: np.ndarray, error: np.ndarray | None) -> None:
        """Encode a piece; with `error`, add it to the values first, and set it to the new encoding error."""
        work = [array[: values.size] for array in self._work]
        if error is None:
            self.codec.encode(values, encoded, work)
        else:
            self.codec.encode_with(error, values, encoded, work)

    def copy_back(self, pairs: Pairs) -> Stage:
        return Work([partial(self._decode, encoded, out) for out, encoded in pairs])

    def _decode(self, encoded: np.ndarray, out: np.ndarray) -> None:
        # Encoded data at the start of `out` are shorter: what a piece overwrites belongs to pieces that are decoded.
        for part in reversed(_pieces(out.size)):
            source, target = encoded[part], out[part]
            if np.may_share_memory(source, target):
                source = self._copied(source)
            self.codec.decode(source, target)


def _pieces(size: int) -> list[slice]:
    return [slice(i, min(i + PIECE, size)) for i in range(0, size, PIECE)]
