"""Samples of an array, which the ranks own, brought together whole on every one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["RowGather", "padded_rows"]

_LINE = 64  # [B]: parts of an all-gather are whole cache lines


class RowGather:
    """All-gather of the rows ``(n, features)`` of all ranks of a group. Collective over the group to run.

    ::

        gather.put()       # copy the own rows; where they came from may be overwritten afterwards
        gather.start()     # send them; does not wait
        ...                # compute
        gather.finish()    # `array` holds the rows of all ranks

    Parameters
    ----------
    array
        ``(ranks * rows, features)``: rank r's rows from ``r * rows`` on, zeros behind them. Written by `put`, `finish`.
    gather
        The all-gather of the flat array.
    own
        This rank's rows, ``(n, features)`` with ``n <= rows``, packed; read by :meth:`put` only.
    first
        Its first row in the array.

    Notes
    -----
    Communication per process: one message of ``rows * features * itemsize`` bytes, booked under
    ``"replicated_dense"``; it receives ``size - 1`` times as much.
    """

    def __init__(self, array: Any, gather: Any, own: Any, first: int) -> None:
        self.array, self._gather, self._own = array, gather, own
        self._place = array[first : first + own.shape[0]]

    def put(self) -> None:
        """Copy this rank's rows into the array. Local."""
        self._place[...] = self._own

    def start(self) -> None:
        """Send this rank's rows. Does not wait."""
        self._gather.start()

    @property
    def under_way(self) -> bool:
        """Whether rows have been sent, and are not waited for yet."""
        return self._gather.under_way

    def finish(self) -> None:
        """Return when all rows are there; at once if nothing is under way."""
        self._gather.finish()


def padded_rows(most: int, features: Sequence[int], itemsize: int) -> int:
    """Rows per rank so that those of all ranks follow each other in whole cache lines. Pure arithmetic.

    Parameters
    ----------
    most
        Rows of the rank that has most.
    features
        Lengths of the rows of all arrays that have to be gathered alike.
    itemsize
        Of one element [B].

    Examples
    --------
    >>> padded_rows(3, [25088, 1000], 4)
    4
    """
    line = max(1, _LINE // itemsize)
    step = math.lcm(*(line // math.gcd(line, n) for n in features))
    return -(-most // step) * step
