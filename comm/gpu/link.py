"""Device transport of a communicator and of all communicators split from it; all ranks choose the same one."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, cast

from mpi4py import MPI

from ...device import Device
from ..channel import Channel
from ..counters import Meter
from ..ending import end
from ..errors import CommError, mark_agreed
from ..ranks import Ranks
from ..reduction import Reduction
from ..sums import Method
from ..transports.base import Pattern, TransportContext
from .choice import Choice, MpiStaged, RankFacts, choose, route_of
from .mpi_aware import claim_fault, prove
from .nccl import aborting, load_nccl
from .streams import CommStream, Cuda, Launched, StreamSpans
from .watchdog import TIMEOUT, DeviceWatchdog

__all__ = ["DeviceLinks", "DeviceTransport", "gpu_address", "rank_facts", "timeout_from"]


class DeviceTransport(Protocol):
    """Factory of channels and sums with buffers on a device, on one communicator.

    Attributes
    ----------
    summable
        Dtypes that the transport sums.
    """

    summable: tuple[str, ...]

    def channels(self, patterns: Sequence[Pattern], meters: Sequence[Meter]) -> list[Channel]:
        """Return one channel per pattern; patterns are valid and match between ranks. Collective over the communicator.
        """
        ...

    def reduction(self, buffer: Any, meter: Meter, method: Method) -> Reduction:
        """Return the sum of a non-empty buffer over several ranks by a method that devices support. Collective over the
        communicator.
        """
        ...

    def split(self, group: TransportContext | None) -> DeviceTransport | None:
        """Return the transport of this rank's group if it shares resources with this one. None without a group (`group`
        is None then), or if the group creates its own at first use. Collective over the communicator.
        """
        ...

    def close(self) -> None:
        """Free the resources of the transport, after its channels were closed. Collective over the communicator."""


@dataclass
class _Opened:
    """The chosen transport, its device, and the objects on it that all communicators share."""

    choice: Choice
    cuda: Cuda
    comm_streams: tuple[CommStream, CommStream]
    watchdog: DeviceWatchdog
    nccl: Any
    spans: StreamSpans

    def make(self, context: TransportContext) -> DeviceTransport:
        """Return the transport for one communicator. Collective over it."""
        transport: DeviceTransport = self.choice.route.connect(self, context)
        return transport


class DeviceLinks:
    """Device transport of a root communicator, shared with the communicators split from it.

    Attributes
    ----------
    choice
        The chosen transport. None until `choose` is called with a device: until then, arrays go through the host.
    """

    def __init__(self) -> None:
        self.choice: Choice | None = None
        self._opened: _Opened | None = None
        self._transports: dict[TransportContext, DeviceTransport] = {}

    def choose(self, comm: Ranks, device: Device, requested: str, timeout: float | None = None) -> Choice:
        """Choose the transport, prepare the shared objects, and return the choice.

        Collective over `comm`, the root communicator.

        Raises
        ------
        CommError
            On all ranks, if the requested transport cannot work, another choice was made before, the timeout in the
            environment is invalid, or the ranks differ in the request or in whether they have a device.
        """
        fault: Exception | None = None
        try:
            route_of(requested)
            seconds = timeout_from(os.environ) if timeout is None else timeout
            if self.choice is not None and not self.choice.matches(requested):
                raise CommError(f"device transport: expected {self.choice.name!r}, which was chosen, got {requested!r}")
        except CommError as error:
            fault = error
        comm.agree(fault)
        if self.choice is not None:
            return self.choice
        # Without this, some ranks would wait in the collectives of a choice that the others do not make.
        first, *others = comm.mpi.allgather((requested, "the host" if device.is_host else "a device"))
        for rank, other in zip(comm.ranks[1:], others):
            if other != first:
                expected, got = (f"{transport!r} on {kind}" for transport, kind in (first, other))
                comm.agree(
                    CommError(
                        f"device transport: expected {expected} as on rank {comm.ranks[0]}, got {got} on rank {rank}; "
                        "request one transport, for one kind of device, on all ranks"
                    )
                )
        if device.is_host:  # the choice is not kept: a later call with a device may still choose
            return Choice(MpiStaged(), "arrays are the host's")
        choice = _decide(comm, device, requested)
        if not choice.route.staged:
            self._opened = _open(comm, device, choice, seconds)
        self.choice = choice
        return choice

    def transport(self, context: TransportContext, device: Device) -> DeviceTransport | None:
        """Return the transport of one communicator for arrays of this device; None if they go through the host.

        Collective over the communicator at the first call.
        """
        opened = self._opened
        if opened is None:
            return None
        if opened.cuda.device is not device:
            raise CommError(
                f"expected arrays on {opened.cuda.device.name}, for which {opened.choice.name} was chosen, got some on "
                f"{device.name}; use one device per run"
            )
        if context not in self._transports:
            # A rank whose set-up has failed is in an agreement, not in the set-up of the transport.
            context.agree(None)
            self._transports[context] = opened.make(context)
        return self._transports[context]

    def split(self, context: TransportContext, group: TransportContext | None) -> None:
        """Let a group share the resources of the communicator that it was split from. Collective over that one.

        Parameters
        ----------
        context
            Context of the communicator.
        group
            Context of this rank's group; None if it has none.
        """
        if self._opened is not None:
            whole = self.transport(context, self._opened.cuda.device)
            assert whole is not None
            part = whole.split(group)
            if group is not None and part is not None:
                self._transports[group] = part

    def launched(self, label: str) -> Callable[[], None]:
        """Return the function to call after each launch of a graph that contains messages.

        It lets the watchdog detect whether the graph ends.
        """
        opened = self._opened
        return _nothing if opened is None else Launched(opened.cuda, opened.watchdog.under_way, label)

    def drop_graphs(self) -> None:
        """Free graphs that contain messages, before the transports of these messages are closed. Local."""
        if self._opened is not None and self._opened.choice.captures:
            self._opened.cuda.device.drop_graphs()

    def leave(self, context: TransportContext) -> None:
        """Close the transport of a communicator, if it has one. Collective over it."""
        transport = self._transports.pop(context, None)
        if transport is not None:
            transport.close()

    def abort(self) -> None:
        """Abort all active operations, without the other ranks. Local."""
        if self._opened is not None:
            self._opened.watchdog.abort()
        self.close()

    def close(self) -> None:
        """Close the shared objects, after all transports. Local."""
        if self._opened is not None:
            self._opened.watchdog.close()
            self._opened = None


def _nothing() -> None:
    pass


def timeout_from(environment: Any) -> float:
    """Return the time after which an operation counts as lost: ``HALOGRAD_GPU_TIMEOUT``, or ten minutes [s].

    >>> timeout_from({}), timeout_from({"HALOGRAD_GPU_TIMEOUT": "30"})
    (600.0, 30.0)
    """
    text = environment.get("HALOGRAD_GPU_TIMEOUT", "")
    try:
        seconds = float(text) if text else TIMEOUT
        if 0 < seconds <= 1e6:
            return seconds
    except ValueError:
        pass
    raise CommError(f"HALOGRAD_GPU_TIMEOUT: expected seconds > 0 and <= 1e6, got {text[:60]!r}")


def _decide(comm: Ranks, device: Device, requested: str) -> Choice:
    """Choose the transport from the facts of all ranks; the choice is the same on all ranks. Collective."""
    node = comm.nodes[comm.rank]
    facts: list[RankFacts] = _gathered(comm, lambda: rank_facts(device, node))
    choice = _choose(comm, requested, facts)
    if not choice.route.proven:
        return choice
    # The first rank of each node runs the proof for the others; it takes seconds, so only if it would be used.
    leads = comm.nodes.index(node) == comm.rank
    faults = _gathered(comm, lambda: prove(cast(Any, device).ordinal) if leads else "")
    return _choose(comm, requested, [replace(fact, mpi_fault=fault) for fact, fault in zip(facts, faults)])


def _choose(comm: Ranks, requested: str, facts: Sequence[RankFacts]) -> Choice:
    try:
        return choose(requested, facts)
    except CommError as error:
        # The error is the same on all ranks, because they have the same facts. The first rank prints it.
        mark_agreed(error, comm.rank == 0, comm.size)
        raise


def _gathered(comm: Ranks, query: Callable[[], Any]) -> list[Any]:
    """Return the result of `query` on every rank; the ranks agree on errors. Collective."""
    result, fault = None, None
    try:
        result = query()
    except Exception as error:  # CuPy and CUDA have exceptions of their own
        fault = CommError(f"device transport: expected to learn what the device can do, got {error}")
    comm.agree(fault)
    return comm.mpi.allgather(result)


def _open(comm: Ranks, device: Device, choice: Choice, timeout: float) -> _Opened:
    cuda = Cuda(device)

    # The other ranks do not know of the loss, and this one cannot agree with a lost peer.
    def lost(text: str) -> None:
        sys.stderr.write(f"halograd: {text}; the job ends\n")
        sys.stderr.flush()
        end(comm.mpi, 1)

    nccl = load_nccl() if choice.route.uses_nccl else None
    together = nullcontext if nccl is None else partial(aborting, nccl, device)
    watchdog = DeviceWatchdog(f"rank {comm.rank} of {comm.size}", timeout, lost, device.use, together)
    # Two streams: messages and small sums must not queue after large sums.
    return _Opened(choice, cuda, (cuda.comm_stream(), cuda.comm_stream()), watchdog, nccl, StreamSpans(cuda))


def rank_facts(device: Device, node: int) -> RankFacts:
    """Return the facts of this rank that the choice of a transport needs. Local."""
    gpu = gpu_address(device)
    if not gpu:
        # Without CUDA neither `nccl` nor `mpi-cuda` can work, whatever the other facts are.
        return RankFacts(node, "")
    version, fault = 0, ""
    try:
        version = int(load_nccl().get_version())
    except CommError as error:
        fault = str(error)
    except Exception as error:  # a library that fails
        fault = f"its version is unknown: {error}"
    shares = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return RankFacts(node, gpu, _instance(device), version, fault, shares, claim_fault(MPI))


def gpu_address(device: Any) -> str:
    """Return the PCI address of a CUDA device, the same in all processes of a node; empty for any other device. Local.
    """
    cupy = getattr(device, "cupy", None)
    if cupy is None:
        return ""
    address = cupy.cuda.runtime.deviceGetPCIBusId(device.ordinal)
    return address.decode() if isinstance(address, bytes) else str(address)


def _instance(device: Any) -> str:
    """Return the identifier of a CUDA device. Instances of one GPU (MIG) have different identifiers, but one address.
    """
    identifier = device.cupy.cuda.runtime.getDeviceProperties(device.ordinal).get("uuid", b"")
    return bytes(identifier)[:16].hex()  # CuPy's value may be longer, up to the next byte that is 0
