"""How many ranks compute on a host at the same time, and whether they take turns on its cores."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from halograd.comm import Communicator

__all__ = ["Crowd"]


@dataclass(frozen=True)
class Crowd:
    """Who computes on a host at the same time.

    Ranks that take turns on the cores are timed by what they compute, times ranks per core: a clock on the wall would
    show each of them its own turn and nothing of those of others. A core does not rest while one of them computes.

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
    def of(cls, comm: Communicator, kernels: Any) -> Crowd:
        """The fullest host of a run with a backend. Collective over `comm`."""
        return cls.among(comm.allgather_objects(_place(kernels)), kernels.threads)

    @classmethod
    def here(cls, ranks: int, kernels: Any) -> Crowd:
        """What so many ranks with a backend would be on this host. Local."""
        return cls.among([_place(kernels)] * ranks, kernels.threads)

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

    @property
    def in_turn(self) -> bool:
        """Whether the ranks take turns on the cores."""
        return self.cores > 0

    def clock(self) -> float:
        """Differences are what something takes a rank of this crowd [s]. Local."""
        return time.process_time() * self.ranks / self.cores if self.in_turn else time.perf_counter()


def _place(kernels: Any) -> tuple[str, frozenset[int]]:
    """Host, and cores this process computes on; none with a device, or where the system does not tell."""
    tells = kernels.device.is_host and hasattr(os, "sched_getaffinity")
    return platform.node(), frozenset(os.sched_getaffinity(0)) if tells else frozenset()
