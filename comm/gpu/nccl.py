"""The `nccl` transport: messages and sums by NCCL, on their own streams, ordered by events. The host never waits."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..channel import Channel
from ..counters import Meter
from ..device_channel import DeviceChannel
from ..errors import CommError
from ..progress import Stage, StagedOperation, Work
from ..reduction import Reduction, ReductionPlan, SumBuffers
from ..sums import Method, shards
from ..transports.base import Pattern, TransportContext
from .streams import CommStream, Join, Passage, StreamCodec, StreamMeter, StreamSpans
from .watchdog import DeviceWatchdog

__all__ = ["SUMMABLE", "NcclChannel", "NcclLink", "NcclTransport", "aborting", "load_nccl", "nccl_sum"]

#: Dtypes that NCCL sums, and NCCL's names for them.
SUMMABLE = {
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "int32": "NCCL_INT32",
    "int64": "NCCL_INT64",
    "float16": "NCCL_FLOAT16",
    "bfloat16": "NCCL_BFLOAT16",
}
#: Sums up to this size are needed at once, like messages, and do not queue after large sums [B].
URGENT = 64 * 1024
#: Color of a rank that is in no group, ``NCCL_SPLIT_NOCOLOR``; CuPy has no name for it.
NO_COLOR = -1


def load_nccl() -> Any:
    """Return the module ``cupy.cuda.nccl``, which loads NCCL from the wheel nvidia-nccl-cu13 or from the system.

    Raises
    ------
    CommError
        If NCCL is not available.
    """
    try:
        # Kernels of several communicators could wait forever for each other's resources on the GPU. With this setting,
        # NCCL starts them in the order of the host's calls, which is the same on all ranks.
        os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
        nccl = importlib.import_module("cupy.cuda.nccl")
        if getattr(nccl, "available", True):
            return nccl
        reason = "CuPy was built without it, or found no library"
    except Exception as error:  # no CuPy, or incompatible libraries
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    raise CommError(f"nccl: expected cupy.cuda.nccl, got none ({reason}); pip install 'halograd[gpu]' nvidia-nccl-cu13")


class NcclLink:
    """One NCCL communicator and the stream of all its calls. Creating and closing it is collective over
    `context.mpi`.

    NCCL runs the calls of a communicator one after the other, so urgent calls have a link of their own.

    Parameters
    ----------
    comm
        Communicator of these ranks, made by a split of another one. By default a new one is created: its ranks exchange
        their addresses and explore the machine anew, which takes longer than a split.
    """

    def __init__(
        self, nccl: Any, comm_stream: CommStream, context: TransportContext, watchdog: DeviceWatchdog, comm: Any = None
    ) -> None:
        self.nccl, self.comm_stream, self._context, self._watchdog = nccl, comm_stream, context, watchdog
        self.rank, self.size = context.mpi.rank, context.mpi.size
        self._taking = threading.Lock()
        self._comm: Any = self._created() if comm is None else comm
        watchdog.add(self)

    def _created(self) -> Any:
        nccl, unique, fault = self.nccl, None, None
        # NCCL creates a communicator on the current device of the thread.
        self.comm_stream.cuda.device.use()
        if self.rank == 0:
            unique, fault = _tried(nccl.get_unique_id, "to begin a communicator")
        # Before the broadcast, in which the others would wait for a first rank with a fault.
        self._context.agree(fault)
        unique = self._context.mpi.bcast(unique, root=0)
        # The first communicator of a family decides whether those split from it share its connections and buffers.
        shares = (nccl.NcclConfig(split_share=1),) if hasattr(nccl, "NcclConfig") else ()
        with self._watchdog.watching("the start of NCCL"):
            comm, fault = _tried(
                lambda: nccl.NcclCommunicator(self.size, unique, self.rank, *shares), "to join a communicator"
            )
        self._context.agree(fault)
        return comm

    def split(self, group: TransportContext | None) -> NcclLink | None:
        """Return the link of this rank's group, on the same stream; None without a group. Collective over this link.

        The communicator of the group shares connections and buffers with this one. That is safe because all their calls
        are on one stream, so no two of them run at the same time. Close it before this one.

        Parameters
        ----------
        group
            The group of this rank, disjoint from all others; None for a rank in no group.
        """
        cuda = self.comm_stream.cuda
        cuda.device.use()
        # NCCL splits only an idle communicator. Messages in graphs run on the kernels' stream.
        cuda.device.synchronize()
        self.comm_stream.stream.synchronize()
        # Groups are disjoint, so the first rank of a group is a color that no other group has.
        color, key = (NO_COLOR, 0) if group is None else (group.ranks[0], group.mpi.rank)
        with self._watchdog.watching("the split of NCCL"):
            comm, fault = _tried(lambda: self._comm.commSplit(color, key), "to split a communicator")
        try:
            self._context.agree(fault)
        except Exception:
            if comm is not None:
                comm.abort()  # other ranks of the group may have none
            raise
        return None if group is None else NcclLink(self.nccl, self.comm_stream, group, self._watchdog, comm)

    @contextmanager
    def group(self) -> Iterator[Any]:
        """Return a context with the communicator, whose calls NCCL merges into one operation; sends and receives need
        it.

        Raises
        ------
        CommError
            If NCCL rejects a call, or the watchdog has found a fault.
        """
        self._watchdog.raise_fault()
        fault: Exception | None = None
        self.nccl.groupStart()
        try:
            yield self._comm
        except Exception as error:
            fault = error
        try:
            self.nccl.groupEnd()  # also after a fault: otherwise the next group would be nested in this one
        except Exception as error:
            fault = fault or error
        if fault is not None:
            raise _wrapped(fault, "to enqueue messages or sums") from fault

    def leave(self, passage: Passage, label: str) -> None:
        """Leave the communication stream, and notify the watchdog.

        The watchdog is not notified while a graph is recorded: an event that was recorded in a graph can no longer be
        queried, so an earlier operation with this event, although complete, would eventually count as lost.
        """
        recording = self.comm_stream.cuda.compute.is_capturing()
        if recording:
            self._watchdog.forget(passage)
        passage.leave()
        if not recording:
            self._watchdog.under_way(passage, label)

    def raise_fault(self) -> None:
        """Raise the fault that the watchdog has found, if any."""
        self._watchdog.raise_fault()

    def forget(self, passage: Passage) -> None:
        """Remove an operation from those that the watchdog observes."""
        self._watchdog.forget(passage)

    def check(self) -> None:
        """Raise the asynchronous error of the communicator, if it has one."""
        # Another thread must not destroy the communicator during the check.
        with self._taking:
            if self._comm is not None:
                self._comm.check_async_error()

    def abort(self) -> None:
        """End all kernels of the communicator, on this rank."""
        comm = self._taken()
        if comm is not None:
            comm.abort()

    def _taken(self) -> Any:
        """Remove the communicator from the link and return it, so that only one thread (this one or the watchdog's)
        ends it.
        """
        with self._taking:
            comm, self._comm = self._comm, None
        return comm

    def close(self) -> None:
        """Wait for active operations and free the communicator. Idempotent."""
        if self._comm is not None:
            self.comm_stream.stream.synchronize()  # the watchdog monitors it: if a peer is gone, it aborts this
        self._watchdog.remove(self)
        comm = self._taken()
        if comm is not None:
            comm.destroy()


@contextmanager
def aborting(nccl: Any, device: Any) -> Iterator[None]:
    """Drop the device's graphs, and group the aborts in the body; separate aborts would wait for each other."""
    device.drop_graphs()  # otherwise NCCL would wait for the graphs
    nccl.groupStart()
    try:
        yield
    finally:
        nccl.groupEnd()


class NcclTransport:
    """Transport with messages and small sums on one communication stream, and large sums on another, each with its own
    link.

    Parameters
    ----------
    comm_streams
        The two streams, of the root communicator and all communicators split from it. Communicators that share ranks
        enqueue on a stream in the same order on all ranks, so that they do not wait for each other.
    """

    summable = tuple(SUMMABLE)

    def __init__(
        self,
        comm_streams: tuple[CommStream, CommStream],
        context: TransportContext,
        watchdog: DeviceWatchdog,
        nccl: Any,
        spans: StreamSpans,
    ) -> None:
        self._comm_streams, self._context = comm_streams, context
        self._watchdog, self._nccl, self._spans = watchdog, nccl, spans
        self._links: dict[int, NcclLink] = {}

    def link(self, urgent: bool) -> NcclLink:
        """Return the link for urgent operations, or the link for large sums. Collective at the first call of each."""
        which = 0 if urgent else 1
        if which not in self._links:
            self._links[which] = NcclLink(self._nccl, self._comm_streams[which], self._context, self._watchdog)
        return self._links[which]

    def split(self, group: TransportContext | None) -> NcclTransport | None:
        """Return the transport of this rank's group, with both links split from those of this transport; None for a
        rank without a group. Collective over this transport's communicator.

        Whether a group needs its second link depends on the sizes of its sums, which differ between groups and which
        ranks without a group do not know. So both are split: sharing makes them cheap. Without support by CuPy on every
        rank, the group creates its links at their first use.
        """
        context = self._context
        part = NcclTransport(self._comm_streams, group, self._watchdog, self._nccl, self._spans) if group else None
        supported = context.mpi.allgather(hasattr(self._nccl, "NcclConfig"))
        if all(supported):
            for which, urgent in enumerate((True, False)):
                link = self.link(urgent).split(group)
                if part is not None and link is not None:
                    part._links[which] = link
        return part

    def channels(self, patterns: Sequence[Pattern], meters: Sequence[Meter]) -> list[Channel]:
        return [self._channel(pattern, meter) for pattern, meter in zip(patterns, meters)]

    def _channel(self, pattern: Pattern, meter: Meter) -> Channel:
        return NcclChannel(self.link(urgent=True), pattern, StreamMeter(meter, self._spans))

    def reduction(self, buffer: Any, meter: Meter, method: Method) -> Reduction:
        return nccl_sum(self.link(urgent=buffer.nbytes <= URGENT), buffer, StreamMeter(meter, self._spans), method)

    def close(self) -> None:
        # In one order on all ranks, whichever link they used first.
        for which in sorted(self._links, reverse=True):
            self._links[which].close()
        self._links.clear()


class NcclChannel(DeviceChannel):
    """Channel of one group of sends and receives on the communication stream.

    In ``start``, this stream waits for all work enqueued on the kernels' stream, thus for the packing, and runs one
    group. In ``finish``, the kernels' stream waits for the group. One buffer serves both slots: it is packed again
    after `finish`, when all of it has been sent.
    """

    def __init__(self, link: NcclLink, pattern: Pattern, meter: StreamMeter) -> None:
        super().__init__(pattern.sends, pattern.recvs, pattern.dtype, meter, link.comm_stream.cuda.device)
        self._link, self._passage = link, meter.passage(link.comm_stream)
        self._to = self._pointers(self._out, self._sends)
        self._from = self._pointers(self._in, self._recvs)

    def _pointers(self, array: Any, where: dict[int, slice]) -> list[tuple[int, int, int]]:
        """Return peer, address and length [B] of every message."""
        device, size = self._link.comm_stream.cuda.device, self.dtype.itemsize
        first = device.address(array) if array.size else 0
        return [(peer, first + s.start * size, (s.stop - s.start) * size) for peer, s in where.items()]

    def _start(self) -> None:
        if not self.peers:
            return
        link, stream = self._link, self._link.comm_stream.ptr
        # A message computes nothing, so bytes serve for every dtype.
        as_bytes = link.nccl.NCCL_UINT8
        self._passage.enter()
        with link.group() as comm:
            for peer, address, nbytes in self._to:
                comm.send(address, nbytes, as_bytes, peer, stream)
            for peer, address, nbytes in self._from:
                comm.recv(address, nbytes, as_bytes, peer, stream)
        link.leave(self._passage, f"exchange {self._meter.label!r}")

    def _finish(self) -> float:
        if self.peers:
            self._link.raise_fault()
            self._passage.join()
        return 0.0

    def _close(self) -> None:
        self._link.forget(self._passage)


def nccl_sum(link: NcclLink, buffer: Any, meter: StreamMeter, method: Method) -> Reduction:
    """Return an in-place sum by NCCL; `start` enqueues all of it on the communication stream. The host never waits.

    An unordered sum is a collective of NCCL; its bits are the same on all ranks and depend on the number of ranks. A
    sum in the order of the ranks uses messages; its bits are the same as with all other links.
    """
    passage, calls = meter.passage(link.comm_stream), _Calls(link, buffer)
    label = f"sum {meter.label!r} of {buffer.nbytes} bytes"
    stages, held = calls.in_order() if method.ordered else ([Work([calls.native(method)])], 0)
    enqueued = [Work([passage.enter]), *stages, Work([lambda: link.leave(passage, label)])]
    operation = StagedOperation([*enqueued, Join(passage, link.raise_fault)], first=len(enqueued))
    plan = ReductionPlan(operation, device_nbytes=held, close=[lambda: link.forget(passage)])
    return Reduction(buffer, [meter], plan)


class _Calls:
    """NCCL calls on a buffer and its shards; each call is one NCCL group."""

    def __init__(self, link: NcclLink, buffer: Any) -> None:
        self._link, self._flat = link, buffer.reshape(-1)
        self._parts = shards(self._flat.size, link.size, buffer.itemsize)
        self._lengths = [part.stop - part.start for part in self._parts]
        self._address = link.comm_stream.cuda.device.address(buffer)
        self._at = [self._address + part.start * buffer.itemsize for part in self._parts]
        #: Whether all shards are as long as each other: then NCCL has one call for all of them.
        self._even = len(set(self._lengths)) == 1
        self._bytes, self._stream = link.nccl.NCCL_UINT8, link.comm_stream.ptr

    def native(self, method: Method) -> Callable[[], None]:
        """Return the function that runs the NCCL collective of `method`."""
        if not method.adds:
            return self._gather
        return self._reduce if method.gathers else self._scatter

    def _reduce(self) -> None:
        at = self._address
        with self._link.group() as comm:
            comm.allReduce(at, at, self._flat.size, self._dtype, self._link.nccl.NCCL_SUM, self._stream)

    def _scatter(self) -> None:
        total = self._link.nccl.NCCL_SUM
        with self._link.group() as comm:
            if self._even:
                own = self._at[self._link.rank]
                # In place for NCCL: the result is at the rank's own offset in the array of summands.
                comm.reduceScatter(self._address, own, self._lengths[0], self._dtype, total, self._stream)
                return
            # NCCL has no reduce-scatter of unequal shards; the group makes one operation of these sums.
            for root, (at, length) in enumerate(zip(self._at, self._lengths)):
                if length:
                    comm.reduce(at, at, length, self._dtype, total, root, self._stream)

    def _gather(self) -> None:
        """Send all shards to all ranks, as bytes."""
        size = self._flat.itemsize
        with self._link.group() as comm:
            if self._even:
                own = self._at[self._link.rank]
                comm.allGather(own, self._address, self._lengths[0] * size, self._bytes, self._stream)
                return
            for root, (at, length) in enumerate(zip(self._at, self._lengths)):
                if length:
                    # NCCL's all-gather takes shards of one length only.
                    comm.broadcast(at, at, length * size, self._bytes, root, self._stream)

    @property
    def _dtype(self) -> int:
        return int(getattr(self._link.nccl, SUMMABLE[self._flat.dtype.name]))

    def in_order(self) -> tuple[list[Stage], int]:
        """Return the stages of a sum in rank order, and their device memory [B].

        Every rank sends shards to the ranks that add them up, and receives the sums.
        """
        link, own = self._link, self._flat[self._parts[self._link.rank]]
        received = link.comm_stream.cuda.device.zeros((link.size - 1, own.size), own.dtype)
        slots = iter(received)
        summands = [own if r == link.rank else next(slots) for r in range(link.size)]
        to = [(r, self._at[r], n * own.itemsize) for r, n in enumerate(self._lengths) if n and r != link.rank]
        address = link.comm_stream.cuda.device.address
        back = [(r, address(summands[r]), own.nbytes) for r in range(link.size) if own.size and r != link.rank]

        def scatter() -> None:
            with link.group() as comm:
                for peer, at, nbytes in to:
                    comm.send(at, nbytes, self._bytes, peer, self._stream)
                for peer, at, nbytes in back:
                    comm.recv(at, nbytes, self._bytes, peer, self._stream)

        # Work on the stream runs in order: its stages are over as soon as they are enqueued.
        buffers = SumBuffers(scatter=Work([scatter]), summands=summands, total=own, gather=Work([self._gather]))
        return buffers.stages(StreamCodec(link.comm_stream)), int(received.nbytes)


def _tried(call: Callable[[], Any], what: str) -> tuple[Any, Exception | None]:
    try:
        return call(), None
    except Exception as error:
        return None, _wrapped(error, what)


def _wrapped(error: Exception, what: str) -> CommError:
    if isinstance(error, CommError):
        return error
    return CommError(f"nccl: expected {what}, got {error}; run with NCCL_DEBUG=WARN to see why")
