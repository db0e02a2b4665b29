"""Transports of device arrays, and the choice among them from facts that every rank reports.

A transport is one class; other files read its properties instead of its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from halograd.errors import UserError
from halograd.registry import Registry

from ..errors import CommError

if TYPE_CHECKING:
    from ..transports.base import TransportContext

__all__ = [
    "DEVICE_TRANSPORTS",
    "MULTI_RANK_VERSION",
    "Choice",
    "MpiCuda",
    "MpiStaged",
    "Nccl",
    "RankFacts",
    "Route",
    "choose",
    "named_route",
    "route_of",
    "version_text",
]

AUTO = "auto"
MULTI_RANK_VERSION = 23003  # first NCCL with which ranks may share a GPU, as ``ncclGetVersion`` counts
MIG_VERSION = 23100  # first NCCL with which ranks may use instances (MIG) of one GPU
OLDEST_NCCL = 22600  # first NCCL whose communicators of one device may run at the same time without deadlocks


@dataclass(frozen=True)
class RankFacts:
    """Facts that one rank reports about itself.

    Attributes
    ----------
    node
        Number of its node.
    gpu
        PCI address of its GPU, e.g. ``"0000:3B:00.0"``; empty if its device is no CUDA device.
    instance
        Identifier of the device that this rank uses: instances (MIG) of one GPU have the same address, but not the same
        identifier.
    nccl
        Version of NCCL as ``ncclGetVersion`` counts: 23203 is 2.32.3. 0: NCCL is not available.
    nccl_fault
        Reason why NCCL is not available.
    shares
        Whether NCCL lets ranks share a GPU (``NCCL_MULTI_RANK_GPU_ENABLE=1``).
    mpi_fault
        Reason why MPI does not reach device memory, as it reports or as the test has shown; empty if it does.
    """

    node: int
    gpu: str
    instance: str = ""
    nccl: int = 0
    nccl_fault: str = ""
    shares: bool = False
    mpi_fault: str = ""


class Route(ABC):
    """Base class of the transports of device arrays. Local.

    Attributes
    ----------
    name
        Name in the registry; a class in a user's file needs none.
    reason
        Reason that the log gives if ``"auto"`` chooses the transport.
    captures
        Whether communication can be part of a CUDA graph; otherwise the host takes part in it.
    staged
        Whether arrays go through pinned host memory and the host's transport, so that no connection is made.
    proven
        Whether :meth:`fault` needs the result of the test that MPI reaches device memory (`RankFacts.mpi_fault`).
    uses_nccl
        Whether the transport needs NCCL.
    """

    name: ClassVar[str] = ""
    reason: ClassVar[str] = ""
    captures: ClassVar[bool] = False
    staged: ClassVar[bool] = False
    proven: ClassVar[bool] = False
    uses_nccl: ClassVar[bool] = False

    @abstractmethod
    def fault(self, facts: Sequence[RankFacts]) -> str:
        """Return the reason why the transport cannot work on these ranks; empty if it can. The same on all ranks."""

    @abstractmethod
    def connect(self, opened: Any, context: TransportContext) -> Any:
        """Return the `halograd.comm.gpu.link.DeviceTransport` of one communicator. Collective over it.

        `opened` has the objects that all communicators share: `cuda`, `comm_streams`, `watchdog`, `nccl`, `spans`.
        """


#: Transports of device arrays by name, in the order in which ``"auto"`` tries them.
DEVICE_TRANSPORTS: Registry[Route] = Registry("device_transport", Route, key="backend.device_transport")


@DEVICE_TRANSPORTS.register
class Nccl(Route):
    """Transport by NCCL: every rank has a GPU of its own, or NCCL lets ranks share one."""

    name = "nccl"
    reason = "NCCL on every rank"
    captures = True
    uses_nccl = True

    def fault(self, facts: Sequence[RankFacts]) -> str:
        return _nccl_fault(facts)

    def connect(self, opened: Any, context: TransportContext) -> Any:
        # Not at the top: configurations read this module without MPI.
        from .nccl import NcclTransport

        return NcclTransport(opened.comm_streams, context, opened.watchdog, opened.nccl, opened.spans)


@DEVICE_TRANSPORTS.register
class MpiCuda(Route):
    """Transport by MPI messages of device memory, if a test has shown that MPI reaches it."""

    name = "mpi-cuda"
    reason = "MPI reaches device memory"
    proven = True

    def fault(self, facts: Sequence[RankFacts]) -> str:
        return _mpi_fault(facts)

    def connect(self, opened: Any, context: TransportContext) -> Any:
        from .mpi_cuda import MpiCudaTransport

        # Additions run on the stream that NCCL would use for large sums; MPI's messages use no stream.
        return MpiCudaTransport(opened.cuda, opened.comm_streams[1], context)


@DEVICE_TRANSPORTS.register
class MpiStaged(Route):
    """Transport through pinned host memory and the host's transport, which works everywhere."""

    name = "mpi-staged"
    staged = True

    def fault(self, facts: Sequence[RankFacts]) -> str:
        return ""

    def connect(self, opened: Any, context: TransportContext) -> Any:
        # `DeviceLinks` opens nothing for a staged transport.
        raise AssertionError("arrays go through the host")


@dataclass(frozen=True)
class Choice:
    """A transport, and the reason for it."""

    route: Route
    reason: str

    @property
    def name(self) -> str:
        """Name of the transport."""
        # From `vars`: a user's class may inherit the name of one of ours.
        return vars(type(self.route)).get("name") or type(self.route).__name__

    @property
    def captures(self) -> bool:
        """Whether communication can be part of a CUDA graph."""
        return self.route.captures

    def matches(self, requested: str) -> bool:
        """Return whether the chosen transport is the one that `requested` names; ``"auto"`` names any."""
        return requested == AUTO or type(route_of(requested)) is type(self.route)

    def describe(self) -> str:
        """Return one line for the log."""
        return f"{self.name} ({self.reason})"


#: Names of transports that were removed: configurations may still have them.
REMOVED = ("cuda-ipc",)


def named_route(name: str, at: str = "backend.device_transport") -> Route | None:
    """Return the transport with this name; None for ``"auto"``. Local.

    Raises
    ------
    UserError
        There is no such transport; the message starts with the key `at`.
    """
    if name in REMOVED:
        names = ", ".join([AUTO, *DEVICE_TRANSPORTS.names])
        raise UserError(f"{at}: expected one of {names}, got {name!r}, which was removed")
    return None if name == AUTO else DEVICE_TRANSPORTS.make(name, at)


def route_of(name: str) -> Route | None:
    """Return the transport with this name; None for ``"auto"``. Local. Raises CommError if there is none."""
    try:
        return named_route(name, "device transport")
    except UserError as error:
        raise CommError(str(error)) from error


def version_text(version: int) -> str:
    """Return the text of an NCCL version number.

    >>> version_text(23203), version_text(20805)
    ('2.32.3', '2.8.5')
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def choose(requested: str, facts: Sequence[RankFacts]) -> Choice:
    """Return the transport for device arrays; `facts` has one item per rank, in order. Local; the same on all ranks.

    For several ranks, ``"auto"`` takes the first of these that works: ``nccl``, if every rank has a GPU of its own or
    NCCL lets ranks share one (NCCL 2.30.3 or later; 2.31 or later for MIG instances of one GPU; with
    ``NCCL_MULTI_RANK_GPU_ENABLE=1``); ``mpi-cuda``, if MPI was proven to reach device memory; ``mpi-staged``.

    Raises
    ------
    CommError
        If the requested transport cannot work; the text gives the reason.
    """
    route = route_of(requested)
    if route is not None:
        fault = route.fault(facts)
        if fault:
            raise CommError(f"device transport: expected one that works here, got {requested!r}: {fault}")
        return Choice(route, "requested")
    if len(facts) == 1:
        return Choice(MpiStaged(), "one rank: no messages")
    reasons: list[str] = []
    for name in DEVICE_TRANSPORTS.names:
        route = DEVICE_TRANSPORTS.make(name)
        fault = route.fault(facts)
        if not fault:
            # With the faults of the transports tried before: `mpi-staged` has no other reason.
            return Choice(route, "; ".join(filter(None, [route.reason, *reasons])))
        reasons.append(f"no {name}: {fault}")
    raise AssertionError("one of the transports works everywhere")


def _no_cuda(facts: Sequence[RankFacts]) -> str:
    bare = [rank for rank, fact in enumerate(facts) if not fact.gpu]
    return f"rank {bare[0]} has no CUDA device; use 'mpi-staged'" if bare else ""


def _nccl_fault(facts: Sequence[RankFacts]) -> str:
    fault = _no_cuda(facts)
    if fault:
        return fault
    for rank, fact in enumerate(facts):
        if fact.nccl < OLDEST_NCCL:
            reason = fact.nccl_fault or f"version {version_text(fact.nccl)} is older than {version_text(OLDEST_NCCL)}"
            return f"rank {rank} has no NCCL ({reason}); pip install nvidia-nccl-cu13, or use 'mpi-staged'"
        if fact.nccl != facts[0].nccl:
            return (
                f"rank 0 has NCCL {version_text(facts[0].nccl)}, rank {rank} {version_text(fact.nccl)}; install one "
                "version on all nodes"
            )
    return _sharing_fault(facts)


def _sharing_fault(facts: Sequence[RankFacts]) -> str:
    """Return the reason why ranks that share a GPU cannot use NCCL; empty if they can, or if none share a GPU."""
    for first, other in _sharing(facts):
        both, version = _both(facts, first, other), facts[other].nccl
        needed = MULTI_RANK_VERSION if facts[first].instance == facts[other].instance else MIG_VERSION
        if version < needed:
            return (
                f"{both}, for which NCCL {version_text(needed)} is needed, got {version_text(version)}; use "
                "'mpi-staged', or one rank per GPU"
            )
        # Kernels of NCCL that share a GPU wait for each other, and may hang if its SMs run out: so few CTAs each.
        if not all(f.shares for f in facts):
            return f"{both}; set NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks (and NCCL_MAX_CTAS=8), or use 'mpi-staged'"
    return ""


def _sharing(facts: Sequence[RankFacts]) -> Iterator[tuple[int, int]]:
    """Yield the pairs (first rank of a GPU, other rank that uses the same GPU or an instance of it)."""
    first: dict[tuple[int, str], int] = {}
    for rank, fact in enumerate(facts):
        # A PCI address identifies a GPU on its node only.
        other = first.setdefault((fact.node, fact.gpu), rank)
        if other != rank:
            yield other, rank


def _both(facts: Sequence[RankFacts], first: int, other: int) -> str:
    shared = "share" if facts[first].instance == facts[other].instance else "use instances (MIG) of"
    return f"ranks {first} and {other} {shared} GPU {facts[first].gpu}"


def _mpi_fault(facts: Sequence[RankFacts]) -> str:
    fault = _no_cuda(facts)
    if fault:
        return fault
    for first, other in _sharing(facts):
        if facts[first].instance != facts[other].instance:
            return f"{_both(facts, first, other)}, which have no access to each other's memory; use 'mpi-staged'"
    bad = [rank for rank, fact in enumerate(facts) if fact.mpi_fault]
    return f"rank {bad[0]}: {facts[bad[0]].mpi_fault}; use 'nccl' or 'mpi-staged'" if bad else ""
