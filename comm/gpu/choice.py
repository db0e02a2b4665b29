"""Choice of the transport of device arrays. Pure arithmetic on facts that every rank reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import CommError

__all__ = ["MULTI_RANK_VERSION", "NAMES", "Choice", "RankFacts", "check_name", "choose", "version_text"]

#: Names that `Communicator.use_device` accepts in addition to ``"auto"``.
NAMES = ("nccl", "mpi-cuda", "mpi-staged", "cuda-ipc")
MULTI_RANK_VERSION = 23003  # first NCCL with which ranks may share a GPU, as ``ncclGetVersion`` counts
OLDEST_NCCL = 20700  # first NCCL with send and recv


@dataclass(frozen=True)
class RankFacts:
    """Facts that one rank reports about itself.

    Attributes
    ----------
    node
        Number of its node.
    gpu
        PCI address of its GPU, e.g. ``"0000:3B:00.0"``; empty if its device is no CUDA device.
    reachable
        Addresses of the GPUs of this node whose memory this rank can read, its own included.
    nccl
        Version of NCCL as ``ncclGetVersion`` counts: 23203 is 2.32.3. 0: NCCL is not available.
    nccl_fault
        Reason why NCCL is not available.
    shares
        Whether NCCL lets ranks share a GPU (``NCCL_MULTI_RANK_GPU_ENABLE=1``).
    mpi_fault
        Reason why MPI does not reach device memory; empty if it was proven to.
    """

    node: int
    gpu: str
    reachable: tuple[str, ...] = ()
    nccl: int = 0
    nccl_fault: str = ""
    shares: bool = False
    mpi_fault: str = ""


@dataclass(frozen=True)
class Choice:
    """A transport, and the reason for it."""

    name: str
    reason: str

    @property
    def captures(self) -> bool:
        """Whether the work of a step can be part of a CUDA graph; with the other transports the host takes part."""
        return self.name == "nccl"

    def describe(self) -> str:
        """Return one line for the log."""
        return f"{self.name} ({self.reason})"


def check_name(wanted: str) -> None:
    """Raise CommError unless `wanted` is ``"auto"`` or the name of a transport. Local."""
    if wanted not in ("auto", *NAMES):
        raise CommError(f"device transport: expected 'auto', {', '.join(map(repr, NAMES))}, got {wanted!r}")


def version_text(version: int) -> str:
    """Return the text of an NCCL version number.

    >>> version_text(23203), version_text(20805)
    ('2.32.3', '2.8.5')
    """
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def choose(wanted: str, facts: Sequence[RankFacts]) -> Choice:
    """Return the transport for arrays on the devices of these ranks, in order of rank. Local; the same on all ranks.

    ``"auto"`` takes the first of these that works: ``nccl``, if every rank has a GPU of its own or NCCL lets ranks
    share one (from 2.30.3 on, with ``NCCL_MULTI_RANK_GPU_ENABLE=1``); ``cuda-ipc``, if all ranks are on one node and
    reach each other's GPUs; ``mpi-cuda``, if MPI was proven to reach device memory; ``mpi-staged``.

    Raises
    ------
    CommError
        If the requested transport cannot work; the text gives the reason.
    """
    check_name(wanted)
    if wanted != "auto":
        fault = _FAULTS[wanted](facts)
        if fault:
            raise CommError(f"device transport: expected one that works here, got {wanted!r}: {fault}")
        return Choice(wanted, "asked for")
    if len(facts) == 1:
        return Choice("mpi-staged", "one rank: nothing travels")
    reasons: list[str] = []
    for name in ("nccl", "cuda-ipc", "mpi-cuda"):
        fault = _FAULTS[name](facts)
        if not fault:
            return Choice(name, "; ".join([_WHY[name], *reasons]))
        reasons.append(f"no {name}: {fault}")
    return Choice("mpi-staged", "; ".join(reasons))


def _no_cuda(facts: Sequence[RankFacts]) -> str:
    bare = [rank for rank, fact in enumerate(facts) if not fact.gpu]
    return f"rank {bare[0]} has no CUDA device; use 'mpi-staged'" if bare else ""


def _nccl_fault(facts: Sequence[RankFacts]) -> str:
    fault = _no_cuda(facts)
    if fault:
        return fault
    for rank, fact in enumerate(facts):
        if fact.nccl < OLDEST_NCCL:
            found = fact.nccl_fault or f"version {version_text(fact.nccl)} is older than {version_text(OLDEST_NCCL)}"
            return f"rank {rank} has no NCCL ({found}); pip install nvidia-nccl-cu13, or use 'mpi-staged'"
        if fact.nccl != facts[0].nccl:
            return (
                f"rank 0 has NCCL {version_text(facts[0].nccl)}, rank {rank} {version_text(fact.nccl)}; install one "
                "version on all nodes"
            )
    return _sharing_fault(facts)


def _sharing_fault(facts: Sequence[RankFacts]) -> str:
    """Return the reason why ranks that share a GPU cannot use NCCL; empty if none share."""
    first: dict[tuple[int, str], int] = {}
    for rank, fact in enumerate(facts):
        other = first.setdefault((fact.node, fact.gpu), rank)
        if other == rank:
            continue
        both = f"ranks {other} and {rank} share GPU {fact.gpu}"
        if fact.nccl < MULTI_RANK_VERSION:
            return (
                f"{both}, for which NCCL {version_text(MULTI_RANK_VERSION)} is needed, got "
                f"{version_text(fact.nccl)}; use 'cuda-ipc' or 'mpi-staged', or one rank per GPU"
            )
        if not all(f.shares for f in facts):
            return f"{both}; set NCCL_MULTI_RANK_GPU_ENABLE=1 on all ranks (and NCCL_MAX_CTAS=8), or use 'cuda-ipc'"
    return ""


def _ipc_fault(facts: Sequence[RankFacts]) -> str:
    fault = _no_cuda(facts)
    if fault:
        return fault
    for rank, fact in enumerate(facts):
        if fact.node != facts[0].node:
            return f"ranks 0 and {rank} are on different nodes; use 'nccl', 'mpi-cuda' or 'mpi-staged'"
        for other, peer in enumerate(facts):
            if peer.gpu not in fact.reachable:
                return (
                    f"rank {rank} cannot read GPU {peer.gpu} of rank {other} (no peer access, or hidden by "
                    "CUDA_VISIBLE_DEVICES); use 'nccl' or 'mpi-staged'"
                )
    return ""


def _mpi_fault(facts: Sequence[RankFacts]) -> str:
    fault = _no_cuda(facts)
    if fault:
        return fault
    bad = [rank for rank, fact in enumerate(facts) if fact.mpi_fault]
    return f"rank {bad[0]}: {facts[bad[0]].mpi_fault}; use 'nccl' or 'mpi-staged'" if bad else ""


_FAULTS: dict[str, Callable[[Sequence[RankFacts]], str]] = {
    "nccl": _nccl_fault,
    "cuda-ipc": _ipc_fault,
    "mpi-cuda": _mpi_fault,
    "mpi-staged": lambda facts: "",
}
_WHY = {
    "nccl": "NCCL on every rank",
    "cuda-ipc": "all ranks on one node, GPUs reach each other",
    "mpi-cuda": "MPI reaches device memory",
}
