"""How many ranks compute on a host at the same time, and whether they take turns on its cores."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass

from halograd.comm import Communicator

__all__ = ["Crowd"]


@dataclass(frozen=True)
class Crowd:
    """Who computes on a host at the same time.

    Attributes
    ----------
    ranks
        On the host that has the most of them for its cores; they share its memory. Nodes of an emulated network do
        not count.
    cores
        Those that they take turns on; 0 if every thread of the run has its own.
    """

    ranks: int = 1
    cores: int = 0

    @classmethod
    def of(cls, comm: Communicator, threads: int) -> Crowd:
        """The fullest host of a run, for so many threads per rank. Collective over `comm`."""
        return cls.among(comm.allgather_objects((platform.node(), _allowed())), threads)

    @classmethod
    def here(cls, ranks: int, threads: int) -> Crowd:
        """What so many ranks would be on this host. Local."""
        return cls.among([(platform.node(), _allowed())] * ranks, threads)

    @classmethod
    def among(cls, places: Iterable[tuple[str, frozenset[int]]], threads: int) -> Crowd:
        """From the host and the cores of every rank, which may be bound to some or share them all. Local.

        >>> Crowd.among([("a", frozenset({0, 1}))] * 4, threads=1)
        Crowd(ranks=4, cores=2)
        >>> Crowd.among([("a", frozenset({0})), ("a", frozenset({1}))], threads=1)
        Crowd(ranks=2, cores=0)
        """
        hosts: dict[str, list[frozenset[int]]] = {}
        for host, cores in places:
            hosts.setdefault(host, []).append(cores)
        counts = [(len(some), len(frozenset().union(*some))) for some in hosts.values()]
        in_turn = [cls(ranks, cores) for ranks, cores in counts if ranks * threads > cores > 0]
        if in_turn:
            return max(in_turn, key=lambda crowd: crowd.ranks / crowd.cores)
        return cls(max(ranks for ranks, _ in counts))


def _allowed() -> frozenset[int]:
    """Cores this process may use; none where the system does not tell."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()
