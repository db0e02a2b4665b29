"""Communicators: ranks, the channels and reductions between them, and agreement on faults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import numpy as np
from mpi4py import MPI

from ..device import HOST, Device
from . import contexts
from .boot import begin, launched_size
from .channel import Channel, ChannelSpec
from .codec import UNCHANGED, Codec
from .counters import Instruments
from .ending import Guard, end
from .errors import CommError, agree, is_agreed, is_shared
from .gpu.choice import Choice
from .gpu.link import DeviceLinks
from .maker import Maker
from .progress import Progress
from .reduction import Reduction, ReductionSpec
from .transport import Emulated, Links, Transport, transport_of
from .transports.base import TransportContext
from .transports.host_links import HostLinks

__all__ = ["Communicator"]

#: Objects that a communicator closes when it is closed.
Kept = TypeVar("Kept", "Communicator", Channel, Reduction)

_OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


class Communicator:
    """A group of ranks that exchange data. Creating and closing it is collective.

    Parameters
    ----------
    mpi_comm
        MPI communicator; it is cloned, and not used after the construction.
    transport
        Transport, or the text that names one (`halograd.comm.transport`): ``"auto"``, ``"mpi"``, ``"shared"``,
        ``"emulated:alpha=SECONDS,beta=SECONDS_PER_BYTE"``, optionally with ``",node=RANKS"``, or ``"FILE.py:CLASS"``.

    Attributes
    ----------
    rank, size : int
        Rank of this process, and number of ranks.
    ranks : tuple of int
        Rank in the root communicator of each rank of this one.
    transport : str
        The argument, as a string.
    mpi
        The clone, for libraries that need an MPI communicator (parallel HDF5). Do not free it.
    counters
        Traffic of this process, shared by the root communicator and all communicators split from it.
    instruments
        The counters; ``instruments.recorder``, which receives the times of waits and communications (None: times are
        not recorded); and ``instruments.waiting``, the meter of the exchange or sum that the main thread waits for
        now, which another thread may read.
    devices
        Transport of device arrays; ``devices.choice`` is None before `use_device`.
    closed
        Whether `close` was called.

    Raises
    ------
    CommError
        If the transport is unknown, MPI lacks THREAD_MULTIPLE, the launcher started a different number of ranks than
        MPI reports, or too many communicators are open.

    Notes
    -----
    Close each communicator, by `close` or by ``with``. Closing is collective, so the garbage collector cannot do it. An
    open communicator holds MPI communicators and windows, whose number per process is limited
    (:mod:`halograd.comm.contexts`), and shared memory.

    While a communicator of several ranks is open, an uncaught exception on one of them, also in a thread, ends the job
    with its traceback (:mod:`halograd.comm.ending`). Interactive sessions (``python -i``, Jupyter) are not ended.
    Only channels and reductions are counted, recorded and (by the emulated network) delayed; `bcast` and similar calls
    are not.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, transport: str | Transport = "auto") -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise CommError(
                f"MPI thread level: expected THREAD_MULTIPLE ({MPI.THREAD_MULTIPLE}), got {MPI.Query_thread()}; "
                f"leave mpi4py.rc.thread_level alone"
            )
        # `begin` is collective over all ranks, so call it only if all of them are here.
        if mpi_comm == MPI.COMM_WORLD:
            begin()
        ranks = tuple(range(mpi_comm.size))
        fault: Exception | None = None
        try:  # a file of the user may be missing on one rank
            chosen = transport_of(transport)
        except CommError as error:
            fault = error
        # Before `Dup`: the other ranks would wait there for a rank with a fault.
        agree(mpi_comm, ranks, fault or contexts.shortage())
        # A clone: messages of this library never match those of the program.
        own = contexts.hold(mpi_comm.Dup())
        self.transport = str(transport)
        self._set_up(own, chosen, Progress(), Instruments(), ranks, DeviceLinks())
        self._is_root = True
        self._guard = Guard(mpi_comm)

    @classmethod
    def launched(cls, transport: str = "auto") -> Communicator:
        """Return the communicator of all ranks that were launched; of this process alone without a launcher. Collective
        over them.
        """
        return cls(MPI.COMM_SELF if launched_size() is None else MPI.COMM_WORLD, transport)

    def _set_up(
        self,
        own: MPI.Intracomm,
        transport: Transport,
        progress: Progress,
        instruments: Instruments,
        ranks: tuple[int, ...],
        links: DeviceLinks,
    ) -> None:
        self.mpi, self.rank, self.size, self.ranks = own, own.rank, own.size, ranks
        self._transport, self.devices = transport, links
        self.instruments, self.counters = instruments, instruments.counters
        self._progress = progress
        self._context = TransportContext(own, progress, self.agree, ranks)
        self._links: Links = transport.connect(HostLinks(self._context, transport))
        self._maker = Maker(self, self._context, self._links, links, instruments)
        self._open: list[Communicator | Channel | Reduction] = []
        self._is_root = self.closed = False

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of one node read each other's memory, as hierarchical sums require. Local."""
        return self._transport.shares

    @property
    def network(self) -> Emulated | None:
        """Emulated network that delays messages; None if the network is real. Local."""
        return self._transport.network

    @cached_property
    def waits_for_network(self) -> bool:
        """Whether messages cross a (real or emulated) network. Collective at first use.

        If so, ranks can compute while messages travel. Otherwise all ranks are on one node, and their cores copy the
        data.
        """
        return max(self.nodes) > 0

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Number of the (real or emulated) node of every rank, counted from 0 in order of appearance. Collective at
        first use.

        Ranks of one node share memory.
        """
        # A rank whose set-up has failed waits in an agreement, not in the collective below.
        self.agree(None)
        return self._links.nodes()

    @property
    def buffer_bytes(self) -> int:
        """Host memory of the messages of all open channels and reductions on this rank [B].

        This includes memory inside the MPI library: a sum by an MPI collective needs as much as its buffer.
        """
        return self._links.buffer_bytes + sum(item.buffer_bytes for item in self._open if not item.closed)

    @property
    def device_bytes(self) -> int:
        """Device memory of the messages of open channels and reductions on this rank [B]; `buffer_bytes` is that of the
        host.
        """
        return sum(item.device_bytes for item in self._open if not item.closed)

    def use_device(self, device: Device, transport: str = "auto", timeout: float | None = None) -> Choice:
        """Choose the transport of device arrays for this communicator and all split from it; return the choice.
        Collective.

        Call it before any device array travels. `transport` is ``"auto"`` or a name of `halograd.comm.gpu`. Without
        this call, device arrays travel by way of pinned host memory; sums that the host makes (hierarchical or encoded)
        always do. `timeout` [s] is the time after which NCCL operations count as lost; None means
        ``HALOGRAD_GPU_TIMEOUT``, or 600 s. Raises CommError on all ranks if the transport cannot work.
        """
        self._check_open()
        if not self._is_root:
            raise CommError("use_device(): expected the root communicator, got one that was split from it")
        return self.devices.choose(self, device, transport, timeout)

    def channel(
        self,
        send_counts: Mapping[int, int],
        recv_counts: Mapping[int, int],
        dtype: Any,
        *,
        kind: str = "halo",
        name: str | None = None,
        device: Device = HOST,
    ) -> Channel:
        """Return a channel with at most one message to and one from each peer. Collective over this communicator.

        Parameters
        ----------
        send_counts, recv_counts, dtype, kind, name, device
            See :class:`halograd.comm.channel.ChannelSpec`.

        Raises
        ------
        CommError
            On all ranks, if the counts are invalid or do not match.
        """
        return self.channels([ChannelSpec(send_counts, recv_counts, dtype, kind, name, device)])[0]

    def channels(self, specs: Sequence[ChannelSpec]) -> list[Channel]:
        """Return several channels, by as many collectives as one channel needs; see :meth:`channel`. Collective, in the
        same order on all ranks.

        The channels are all for arrays of the host, or all for the same kind of device.
        """
        self._check_open()
        return self._keep(self._maker.channels(specs))

    def reduction(
        self,
        buffer: np.ndarray,
        *,
        kind: str = "allreduce",
        name: str | None = None,
        method: str = "allreduce",
        codec: Codec = UNCHANGED,
    ) -> Reduction:
        """Return a reduction, which sums `buffer` in place over all ranks. Collective over this communicator.

        Parameters
        ----------
        buffer
            C-contiguous array of the same shape and dtype on all ranks, on the host or on a device. Dtypes that are
            summed are float32, float64, int32 and int64; on a device, those of its transport. Modified by each run.
        kind, name
            Kind for the traffic counters, and name for the recorder (by default the kind).
        method
            ``"allreduce"``
                Sum by the algorithm of the transport.
            ``"ordered"``
                Sum in the order of the ranks: the bits depend neither on the transport nor on other elements of
                the buffer.
            ``"reduce_scatter"``
                Afterwards this rank's shard (:func:`halograd.comm.shards`) holds the sum; the others are undefined.
            ``"all_gather"``
                No sum: every rank's shard is copied to the same position in the buffers of all ranks. Any dtype.
            ``"hierarchical"``
                Sum within each node in shared memory, then across nodes by one rank per node, then back. `start` and
                `finish` copy the buffer to shared memory and back; the progress thread does the rest.
            ``"accumulate"``
                As ``"hierarchical"``, but the progress thread also copies: the result may be in the buffer long before
                `finish`.
        codec
            Format of contributions in messages (:mod:`halograd.comm.codec`), such as ``BFloat16()``. The first two
            methods take a codec other than the default, and then add in the order of the ranks. The reduction's
            `encoding` can :meth:`~halograd.comm.encoding.Encoding.compensate` for the encoding error.

        Raises
        ------
        CommError
            On all ranks, if an argument is invalid or differs between ranks, or if the method needs shared memory and
            the transport has none.

        Notes
        -----
        Traffic per run, on a group of several ranks: one message of this rank's contribution. This is the buffer; for
        an all-gather, its shard; with a codec, the encoded buffer. The last two methods count it under `kind` on the
        first rank of each node if there are several nodes, and the buffer under ``"node"`` on ranks that share a node.
        """
        return self.reductions([ReductionSpec(buffer, kind, name, method, codec)])[0]

    def reductions(self, specs: Sequence[ReductionSpec]) -> list[Reduction]:
        """Create several reductions, with no more collective calls than a single one takes; see :meth:`reduction`.

        Collective, in the same order on all ranks.
        """
        self._check_open()
        return self._keep(self._maker.reductions(specs))

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return the communicator of the ranks with the same color, ordered by key. Collective.

        Ranks with color None get None. The new communicator shares the transport, progress thread, counters and
        recorder of this one; closing this one closes it, too.

        Raises
        ------
        CommError
            On all ranks, if a color is not in ``0 .. 2**31 - 1``, or too many communicators are open.
        """
        self._check_open()
        fault = contexts.shortage()
        # The standard has no other colors: some libraries take them, others and mpi4py raise on this rank alone.
        if color is not None and not 0 <= color < 1 << 31:
            fault = CommError(f"split(): expected None or a color in 0 .. 2**31 - 1, got {color}; renumber the colors")
        self.agree(fault)
        part = self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
        if part == MPI.COMM_NULL:
            return None
        assert isinstance(part, MPI.Intracomm)
        contexts.hold(part)
        ranks = tuple(part.allgather(self.ranks[self.rank]))
        # Not by `__init__`, which would clone the communicator and create another progress thread and guard.
        child = Communicator.__new__(Communicator)
        child.transport = self.transport
        child._set_up(part, self._transport, self._progress, self.instruments, ranks, self.devices)
        return self._keep([child])[0]

    def share_devices(self, group: Communicator | None) -> None:
        """Let a group that was split from this communicator share its transport of device arrays. Collective.

        Only set-up time and memory depend on it. Call it directly after `split`, before device arrays travel in the
        group; ranks without a group pass None. Without this call, a group creates its own transport at first use.
        """
        self.devices.split(self._context, None if group is None else group._context)

    def agree(self, fault: Exception | None) -> None:
        """Raise on all ranks if any rank has a fault. Collective.

        Each rank passes its own fault or None. All ranks raise an error with the type and text of the fault on the
        lowest rank that has one; the text names that rank (by its number in the root communicator). A fault that is
        the same on all ranks is raised unchanged. The error has the attributes ``agreed`` (number of ranks that raise
        it) and ``arose_here``.

        Raises
        ------
        Exception
            An exception of the type of the fault; a CommError if that type cannot be constructed from a string alone.
        """
        agree(self.mpi, self.ranks, fault)

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """Run the body, and raise on all ranks if it raises on any. Collective.

        The body may create channels, reductions, groups and agreements of this communicator, and do nothing else that
        communicates: each of these begins with :meth:`agree`. So a rank whose body raises enters the agreement at the
        end, and the other ranks enter the agreement of their next call: both are the same collective. ::

            rank 0   | compute | channel: agree, ...                 raises what rank 1 raised
            rank 1   | compute: a fault -> agree                     raises it

        Agreements may be nested: an error that all ranks raise passes through the outer one.
        """
        fault: Exception | None = None
        try:
            yield
        except Exception as raised:
            if is_agreed(raised, self.size):  # all ranks raise it: none waits in an agreement
                raise
            fault = raised
        self.agree(fault)

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Broadcast a small object from `root` and return it. Collective."""
        return self.mpi.bcast(value, root=root)

    def allgather_objects(self, value: Any) -> list[Any]:
        """Return the small objects of all ranks, in order. Collective."""
        return self.mpi.allgather(value)

    def allreduce_scalar(self, value: float, operation: str = "sum") -> float:
        """Return the sum (or ``"max"``, ``"min"``) of a number over all ranks, with the same bits on all ranks.
        Collective.

        Integers stay integers. All ranks pass the same type.
        """
        if operation not in _OPERATIONS:
            raise CommError(f"operation: expected one of {sorted(_OPERATIONS)}, got {operation!r}")
        # Integers stay in int64, because float64 would round those above 2**53.
        buffer = np.array([value], np.int64 if isinstance(value, (int, np.integer)) else np.float64)
        self.mpi.Allreduce(MPI.IN_PLACE, buffer, _OPERATIONS[operation])
        return buffer[0].item()

    def barrier(self) -> None:
        """Wait until all ranks have called `barrier`. Collective."""
        self.mpi.Barrier()

    def abort(self, code: int = 1) -> NoReturn:
        """End all ranks of the job at once with this exit code. Local; does not return."""
        end(self.mpi, code)

    def close(self) -> None:
        """Free channels, reductions, split communicators, windows and the clone. Idempotent. Collective."""
        if self.closed:
            return
        self.closed = True
        # Before the channels: graphs contain their messages.
        if self._is_root:
            self.devices.drop_graphs()
        # Last in, first out: all ranks created these objects in the same order, so they close them in the same order.
        for item in reversed(self._open):
            item.close()
        self._open.clear()
        self.devices.leave(self._context)
        self._links.close()
        contexts.free(self.mpi)
        # Split communicators share these objects, which the channels and sums needed until now.
        if self._is_root:
            self.devices.close()
            self._progress.close()
            self._guard.close()

    def __enter__(self) -> Communicator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if is_shared(value, self.size):
            self.close()
        elif self._is_root and value is not None:
            # The other ranks do not have this exception: a collective close would hang. (A split communicator does
            # nothing: the exception reaches its root.)
            self._guard.leave(value)
            self.devices.abort()
            self._progress.close()

    def _keep(self, items: list[Kept]) -> list[Kept]:
        """Register objects for `close`, and drop those that are closed already."""
        self._open = [*(other for other in self._open if not other.closed), *items]
        return items

    def _check_open(self) -> None:
        if self.closed:
            raise CommError("expected an open communicator, got a closed one")
