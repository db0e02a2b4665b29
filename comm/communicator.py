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
from .boot import begin
from .channel import Channel, ChannelSpec
from .counters import Instruments
from .ending import Guard, end
from .errors import CommError, agree, is_agreed, is_shared
from .gpu.choice import Choice
from .gpu.link import DeviceLinks
from .maker import Maker
from .progress import Progress
from .reduction import Reduction, ReductionSpec
from .transports import Transport, TransportContext, make_transport, parse_transport

__all__ = ["Communicator"]

#: What a communicator closes with itself.
Kept = TypeVar("Kept", "Communicator", Channel, Reduction)

_OPERATIONS = {"sum": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}


class Communicator:
    """A group of ranks that exchange data. Collective to make and to close.

    Parameters
    ----------
    mpi_comm
        Cloned once; the caller's communicator is not used afterwards.
    transport
        ``"auto"``, ``"mpi"``, ``"shared"`` or ``"emulated:alpha=SECONDS,beta=SECONDS_PER_BYTE"``, for the last also
        ``",node=RANKS"`` (see `halograd.comm.transports`).

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are.
    ranks : tuple of int
        Rank in the root communicator of each rank of this one.
    transport : str
        As given.
    mpi
        The clone, for libraries that want an MPI communicator (parallel HDF5). Do not free it.
    counters
        Traffic of this process, shared by the root communicator and all split from it.
    instruments
        These counters; ``instruments.recorder``, which gets the times of waits and communications (None: they are not
        recorded); and ``instruments.waiting``, what the main thread waits for now (an exchange or a sum, as
        ``"kind: name"``), for another thread to ask.
    devices
        How arrays of devices travel; `choice` is None before `use_device`.
    closed
        Whether `close` was called.

    Raises
    ------
    CommError
        If the transport is not known, MPI has not THREAD_MULTIPLE, the launcher started another number of ranks, or too
        many communicators are open.

    Notes
    -----
    Close each one, by `close` or by ``with``; nothing closes it when it is no longer referenced, as to close is
    collective. One that is not closed keeps some communicators and windows of MPI, of which a process may hold
    so many (:mod:`halograd.comm.contexts`), and memory that ranks share.

    While a communicator of several ranks is open, an exception that nothing catches on one of them, in a thread too,
    ends the job with its traceback (:mod:`halograd.comm.ending`); not before a prompt (``python -i``, Jupyter).
    Only channels and reductions are counted, recorded and (by the emulated network) delayed, not `bcast` and the like.
    """

    def __init__(self, mpi_comm: MPI.Intracomm, transport: str = "auto") -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise CommError(
                f"MPI thread level: expected THREAD_MULTIPLE ({MPI.THREAD_MULTIPLE}), got {MPI.Query_thread()}; "
                f"leave mpi4py.rc.thread_level alone"
            )
        parse_transport(transport)
        if mpi_comm == MPI.COMM_WORLD:
            begin()
        ranks = tuple(range(mpi_comm.size))
        agree(mpi_comm, ranks, contexts.shortage())
        own = contexts.hold(mpi_comm.Dup())
        self._set_up(own, transport, Progress(), Instruments(), ranks, DeviceLinks())
        self._is_root = True
        self._guard = Guard(mpi_comm)

    def _set_up(
        self,
        own: MPI.Intracomm,
        transport: str,
        progress: Progress,
        instruments: Instruments,
        ranks: tuple[int, ...],
        links: DeviceLinks,
    ) -> None:
        self.mpi, self.rank, self.size, self.ranks = own, own.rank, own.size, ranks
        self.transport, self.devices = transport, links
        self.instruments, self.counters = instruments, instruments.counters
        self._progress = progress
        self._context = TransportContext(own, progress, self.agree, ranks)
        self._transport: Transport = make_transport(transport, self._context)
        self._maker = Maker(self, self._context, self._transport)
        self._open: list[Communicator | Channel | Reduction] = []
        self._is_root = self.closed = False

    @cached_property
    def waits_for_network(self) -> bool:
        """Whether messages cross a (real or emulated) network. Collective at first use.

        Then there is time to compute meanwhile; ranks that read each other's memory copy a halo without a message.
        """
        return max(self.nodes) > 0

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Number of the (real or emulated) node of every rank, counted from 0 as they appear. Collective at first use.

        Ranks of one node share memory.
        """
        self.agree(None)
        return self._transport.nodes()

    @property
    def buffer_bytes(self) -> int:
        """Memory that the messages of all open channels and reductions take on this rank [B].

        A sum by MPI takes its own size again, inside the MPI library.
        """
        return self._transport.buffer_bytes + sum(item.buffer_bytes for item in self._open if not item.closed)

    @property
    def device_bytes(self) -> int:
        """Memory on a device that the messages of open channels take on this rank [B]; `buffer_bytes` is the host's."""
        return sum(item.device_bytes for item in self._open if not item.closed)

    def use_device(self, device: Device, transport: str = "auto", timeout: float | None = None) -> Choice:
        """Choose how arrays of a device travel, here and in all that is split from it. Collective; before any does.

        `transport` is ``"auto"`` or a name of `halograd.comm.gpu`. Without this call, and for sums that the host makes
        (by nodes, or rounded), they go by way of pinned host memory. What NCCL has not done after `timeout` [s] counts
        as lost; None for ``HALOGRAD_GPU_TIMEOUT``, or 600 s. Raises CommError on all ranks if it cannot work.
        """
        self._check_open()
        if not self._is_root:
            raise CommError("use_device(): expected the communicator that the others are split from, got one of those")
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
        """Return a channel that moves one message to and from each peer. Collective over this communicator.

        Parameters
        ----------
        send_counts, recv_counts, dtype, kind, name, device
            See :class:`halograd.comm.channel.ChannelSpec`.

        Raises
        ------
        CommError
            On all ranks alike, if the counts are not valid or do not match.
        """
        return self.channels([ChannelSpec(send_counts, recv_counts, dtype, kind, name, device)])[0]

    def channels(self, specs: Sequence[ChannelSpec]) -> list[Channel]:
        """Return several channels at once, for the price of one: see :meth:`channel`. Collective, in the same order.

        All are made for arrays of the host, or all for the same kind of device.
        """
        self._check_open()
        return self._keep(self._maker.channels(specs))

    def reduction(
        self, buffer: np.ndarray, *, kind: str = "allreduce", name: str | None = None, method: str = "allreduce"
    ) -> Reduction:
        """Return an in-place sum of `buffer` over all ranks. Collective over this communicator.

        Parameters
        ----------
        buffer
            Array of the same shape and dtype on all ranks (float32, float64, int32 or int64), packed, on the host or
            on a device. Modified by each run.
        kind, name
            What the counters book it under, and what the recorder is given (by default the kind).
        method
            ``"allreduce"``
                The sum, by the algorithm of the transport.
            ``"ordered"``
                The sum, added up in the order of the ranks: the same bits whatever the transport, and whatever else is
                in the buffer.
            ``"rounded"``
                The sum of float32, in this order, that travels as bfloat16 with half the bytes. The reduction's
                `codec` can :meth:`~halograd.comm.rounding.Rounded.compensate` for what that takes away.
            ``"reduce_scatter"``
                Afterwards this rank's shard (:func:`halograd.comm.shards`) holds the sum; the others are undefined.
            ``"all_gather"``
                No sum: every rank's shard goes to that place of the buffers of all ranks. Any dtype.
            ``"hierarchical"``
                The sum: within each node in shared memory, then across by one rank per node, then back. `start` and
                `finish` copy the buffer to shared memory and back, the progress thread does the rest.
            ``"accumulate"``
                The same, but the progress thread copies too: the sum may be back long before `finish`.

        Raises
        ------
        CommError
            On all ranks alike, if the buffers are not valid or differ, or the transport shares no memory and the method
            needs it.

        Notes
        -----
        Booked per run, on a group of several ranks: one message of this rank's contribution, which is the buffer, for
        an all-gather its shard, for a rounded sum half the bytes. The last two methods book it under `kind` on the
        first rank of each node if there are several, and the buffer under ``"node"`` on ranks that share a node.
        """
        return self.reductions([ReductionSpec(buffer, kind, name, method)])[0]

    def reductions(self, specs: Sequence[ReductionSpec]) -> list[Reduction]:
        """Return several sums at once, for the price of one: see :meth:`reduction`. Collective, in the same order."""
        self._check_open()
        return self._keep(self._maker.reductions(specs))

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return the communicator of the ranks with the same color, ordered by key. Collective.

        Ranks with color None get None. Transport, progress thread, counters and recorder are shared; this
        communicator closes those split from it.
        """
        self._check_open()
        self.agree(contexts.shortage())
        part = self.mpi.Split(MPI.UNDEFINED if color is None else color, key)
        if part == MPI.COMM_NULL:
            return None
        assert isinstance(part, MPI.Intracomm)
        contexts.hold(part)
        ranks = tuple(part.allgather(self.ranks[self.rank]))
        child = Communicator.__new__(Communicator)
        child._set_up(part, self.transport, self._progress, self.instruments, ranks, self.devices)
        return self._keep([child])[0]

    def agree(self, fault: Exception | None) -> None:
        """Raise on all ranks if any rank has a fault. Collective.

        Each rank passes its own fault or None. All ranks raise an error of the same type and text, that of
        the lowest rank with a fault; its text names that rank (by its number in the root communicator). A fault that
        is the same on all ranks is raised as it is. The error has attributes ``agreed``, how many ranks raise it, and
        ``arose_here``.

        Raises
        ------
        Exception
            Of the type of the fault; a CommError if that type cannot be made from a text alone.
        """
        agree(self.mpi, self.ranks, fault)

    @contextmanager
    def agreement(self) -> Iterator[None]:
        """Run the body, and raise on all ranks if it raises on any. Collective.

        The body may make channels, reductions, groups and agreements of this communicator, and nothing else that
        communicates: each of these begins with :meth:`agree`. So a rank whose body raises, which goes to the agreement
        at the end, meets there those that go on to the next of these. ::

            rank 0   | compute | channel: agree, ...                 raises what rank 1 raised
            rank 1   | compute: a fault -> agree                     raises it

        Agreements within agreements are one: an error that all ranks have is raised on.
        """
        fault: Exception | None = None
        try:
            yield
        except Exception as raised:
            if is_agreed(raised, self.size):
                raise
            fault = raised
        self.agree(fault)

    def bcast(self, value: Any, root: int = 0) -> Any:
        """Return the small object that `root` passes. Collective."""
        return self.mpi.bcast(value, root=root)

    def allgather_objects(self, value: Any) -> list[Any]:
        """Return the small objects of all ranks, in order. Collective."""
        return self.mpi.allgather(value)

    def allreduce_scalar(self, value: float, operation: str = "sum") -> float:
        """Sum (or ``"max"``, ``"min"``) of a number over all ranks, the same bits on all. Collective.

        Integers stay integers. All ranks pass the same type.
        """
        if operation not in _OPERATIONS:
            raise CommError(f"operation: expected one of {sorted(_OPERATIONS)}, got {operation!r}")
        buffer = np.array([value], np.int64 if isinstance(value, (int, np.integer)) else np.float64)
        self.mpi.Allreduce(MPI.IN_PLACE, buffer, _OPERATIONS[operation])
        return buffer[0].item()

    def barrier(self) -> None:
        """Return when all ranks have called it. Collective."""
        self.mpi.Barrier()

    def abort(self, code: int = 1) -> NoReturn:
        """End all ranks of the job at once with this exit code. Local; does not return."""
        end(self.mpi, code)

    def close(self) -> None:
        """Free channels, reductions, split communicators, windows and the clone; idempotent. Collective."""
        if self.closed:
            return
        self.closed = True
        if self._is_root:
            self.devices.drop_graphs()
        # Last in, first out: the order of making was the same on all ranks, and so is that of closing.
        for item in reversed(self._open):
            item.close()
        self._open.clear()
        self.devices.leave(self._context)
        self._transport.close()
        contexts.free(self.mpi)
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
            # The other ranks know nothing of this fault: to free anything together would hang.
            self._guard.leave(value)
            self.devices.abort()
            self._progress.close()

    def _keep(self, items: list[Kept]) -> list[Kept]:
        """Remember what to close, and forget what its owner has closed."""
        self._open = [*(other for other in self._open if not other.closed), *items]
        return items

    def _check_open(self) -> None:
        if self.closed:
            raise CommError("expected an open communicator, got a closed one")
