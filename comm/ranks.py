"""Protocol: the part of a communicator that links, channels and sums use."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from mpi4py import MPI

__all__ = ["Ranks"]


class Ranks(Protocol):
    """Ranks that agree on errors; see :class:`halograd.comm.Communicator`."""

    @property
    def mpi(self) -> MPI.Intracomm: ...

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def ranks(self) -> tuple[int, ...]: ...

    @property
    def nodes(self) -> tuple[int, ...]: ...

    def agree(self, fault: Exception | None) -> None: ...

    def agreement(self) -> AbstractContextManager[None]: ...
