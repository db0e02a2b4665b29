r"""Which ranks are connected beside MPI: arithmetic, no sockets.

Ranks stand in an order: the first rank of every host, then all others. The first `FANOUT` + 1 are *heads*, each of
which is connected with all others; every rank behind them is connected with its parent. With ``fanout = 2``::

    position       0 ------ 1 ------ 2       heads: 0 and 2 are connected, too
                  / \      / \      / \
                 3   4    5   6    7   8
                / \  :
               9  10

No rank has more than ``2 * FANOUT`` connections, however many ranks there are. Rank 0 is the first head, and ends the
job when something is wrong; if it cannot, the next head does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["FANOUT", "Tree"]

FANOUT = 16


class Tree:
    """Connections between the ranks of a job. Local.

    Parameters
    ----------
    hosts
        Name of the host of every rank.
    fanout
        Children per rank; one more is the number of heads.

    Attributes
    ----------
    order
        Ranks by position. Heads are on as many hosts as possible: one node that fails takes few of them along.
    """

    def __init__(self, hosts: Sequence[str], fanout: int = FANOUT) -> None:
        first: dict[str, int] = {}
        for rank, host in enumerate(hosts):
            first.setdefault(host, rank)
        self.hosts, self.fanout = hosts, fanout
        self.order = sorted(range(len(hosts)), key=lambda rank: first[hosts[rank]] != rank)
        self._positions = {rank: position for position, rank in enumerate(self.order)}

    def is_head(self, rank: int) -> bool:
        """Whether a rank is connected with all heads."""
        return self._positions[rank] <= self.fanout

    def ups(self, rank: int) -> list[int]:
        """Ranks that a rank reports to: all heads before it, or its parent."""
        position = self._positions[rank]
        if position <= self.fanout:
            return self.order[:position]
        return [self.order[(position - 1) // self.fanout - 1]]

    def children(self, rank: int) -> list[int]:
        """Ranks whose parent a rank is."""
        first = (self._positions[rank] + 1) * self.fanout + 1
        return self.order[first : first + self.fanout]

    def downs(self, rank: int) -> list[int]:
        """Ranks that report to a rank: all heads behind it, and its children."""
        later = self.order[self._positions[rank] + 1 : self.fanout + 1]
        return [*later, *self.children(rank)]

    def reached(self, rank: int, joined: Sequence[Collection[int]], without: Collection[int] = ()) -> list[int]:
        """Ranks that messages of `rank` reach, itself included, by position.

        Parameters
        ----------
        joined
            Ranks that each rank has a connection with.
        without
            Ranks that pass on nothing any more.
        """
        found, edge = {rank}, [rank]
        while edge:
            beyond = {other for one in edge for other in joined[one]}.difference(found, without)
            found |= beyond
            edge = list(beyond)
        return sorted(found, key=self._positions.__getitem__)
