"""Samples of an array, which the ranks own, brought together whole on every one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from halograd.comm import Communicator
from halograd.layers.memory import Memory

__all__ = ["RowGather", "padded_rows"]

_LINE = 64  # [B]: parts of an all-gather are whole cache lines


class RowGather:
    """All-gather of the rows ``(n, features)`` of all ranks of a group. Collective over `group` to build and run.

    ::

        gather.put()       # copy the own rows; where they came from may be overwritten afterwards
        gather.start()     # send them; does not wait
        ...                # compute
        gather.finish()    # `array` holds the rows of all ranks

    Parameters
    ----------
    group
        The ranks that take part, in the order of their rows.
    memory
        Where the array is made.
    rows
        Rows that every rank has room for in the array, from :func:`padded_rows`.
    own
        This rank's rows, ``(n, features)`` with ``n <= rows``, packed; read by :meth:`put` only.
    name
        For the recorder.

    Attributes
    ----------
    array
        ``(group.size * rows, features)``, where `own` lives and of its dtype: rank r's rows from ``r * rows`` on, zeros
        behind them. Written by `put` and `finish`.

    Notes
    -----
    Communication per process: one message of ``rows * features * itemsize`` bytes, booked under
    ``"replicated_dense"``; it receives ``size - 1`` times as much.
    """

    def __init__(self, group: Communicator, memory: Memory, rows: int, own: Any, name: str) -> None:
        features = own.shape[1]
        self.array = memory.keep((group.size * rows, features), own.dtype, "replicated gradient")
        self._own = own
        self._place = self.array[group.rank * rows : group.rank * rows + own.shape[0]]
        self._gather = group.reduction(self.array.reshape(-1), kind="replicated_dense", name=name, method="all_gather")
        self.under_way = False

    def put(self) -> None:
        """Copy this rank's rows into the array. Local."""
        self._place[...] = self._own

    def start(self) -> None:
        """Send this rank's rows. Does not wait."""
        self._gather.start()
        self.under_way = True

    def finish(self) -> None:
        """Return when all rows are there; at once if nothing is under way."""
        if self.under_way:
            self.under_way = False
            self._gather.finish()

    def close(self) -> None:
        """Free the all-gather; one that is under way is finished first."""
        self._gather.close()


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

    >>> padded_rows(3, [25088, 1000], 4)
    4
    """
    line = max(1, _LINE // itemsize)
    step = math.lcm(*(line // math.gcd(line, n) for n in features))
    return -(-most // step) * step
