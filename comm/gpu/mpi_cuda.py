"""The `mpi-cuda` transport: the MPI library sends and receives device memory directly.

It is used only if a test shows that the library can do this. MPI does not support streams: it may send data only after
they have been packed, and received data are valid only after MPI has reported their arrival. So the host waits for two
events: the end of packing, in the progress thread, and the arrival, in the thread that calls `finish`. ::

    start    pack -> [device buffer], event            (no wait)
    thread   event done: MPI_Startall; MPI_Testall ...
    finish   wait for the messages, then the unpacking is enqueued
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from ..channel import Channel
from ..counters import Meter
from ..device_channel import DeviceChannel
from ..progress import Stage, StagedOperation
from ..reduction import REDUCIBLE, Reduction, ReductionPlan, SumBuffers
from ..sums import Method, shards
from ..transports.base import Pattern, TransportContext
from ..transports.mpi import Messages
from .streams import CommStream, Cuda, Passage, StreamCodec

__all__ = ["MpiCudaChannel", "MpiCudaTransport", "raw"]


def raw(address: int, nbytes: int) -> tuple[Any, MPI.Datatype]:
    """Return `nbytes` bytes at `address` as an MPI buffer.

    mpi4py does not inspect this memory. (Given a CuPy array, it would synchronize the device.)
    """
    return MPI.buffer.fromaddress(address, nbytes), MPI.BYTE


class Computed(Stage):
    """Stage that is over when the device has finished all work enqueued so far."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._event: Any = None

    def begin(self) -> None:
        self._event = self._device.mark()

    def over(self) -> bool:
        return bool(self._event.done())

    def wait(self) -> None:
        self._event.wait()


class Added(Stage):
    """Stage that enqueues the additions `work`, and is over when the device has done them: MPI can then send the sums.
    """

    def __init__(self, passage: Passage, work: Stage) -> None:
        self._passage, self._work = passage, work

    def begin(self) -> None:
        # The host has observed that all summands have arrived: the stream need not wait for anything.
        self._work.wait()
        self._passage.leave()

    def over(self) -> bool:
        return self._passage.done

    def wait(self) -> None:
        self._passage.wait()


class AwaitedCodec(StreamCodec):
    """Codec that adds up on a communication stream, and whose sums the host waits for."""

    def add(self, summands: Sequence[Any], total: Any) -> Stage:
        return Added(Passage(self.comm_stream), super().add(summands, total))


class MpiCudaTransport:
    """Transport by persistent MPI requests on device memory; the device adds up summands in the order of the ranks.

    It does not use ``MPI_Iallreduce``: many libraries support device memory only in point-to-point messages.
    """

    summable = REDUCIBLE

    def __init__(self, cuda: Cuda, comm_stream: CommStream, context: TransportContext) -> None:
        self._cuda, self._comm_stream, self._context = cuda, comm_stream, context

    def split(self, group: TransportContext | None) -> None:
        """Return None: groups share nothing with the communicator that they were split from."""

    def channels(self, patterns: Sequence[Pattern], meters: Sequence[Meter]) -> list[Channel]:
        return [self._channel(pattern, meter) for pattern, meter in zip(patterns, meters)]

    def _channel(self, pattern: Pattern, meter: Meter) -> Channel:
        return MpiCudaChannel(self._cuda, self._context, pattern, meter)

    def reduction(self, buffer: Any, meter: Meter, method: Method) -> Reduction:
        """Return a sum: every rank sends shards to the ranks that add them up, on a communication stream, and receives
        the sums.

        A reduce-scatter has only the first of these steps, an all-gather only the second.
        """
        mpi, flat, device = self._context.mpi, buffer.reshape(-1), self._cuda.device
        parts = [flat[part] for part in shards(flat.size, mpi.size, flat.itemsize)]
        own, tags = parts[mpi.rank], (self._context.tag(), self._context.tag())
        peers = [r for r in range(mpi.size) if r != mpi.rank]
        # Peers with a shard that is not empty; all peers, unless the shard of this rank is empty.
        filled, mine = [r for r in peers if parts[r].size], peers if own.size else []
        buffers, moves, held = SumBuffers(), [], 0
        if method.adds:
            received = device.zeros((mpi.size - 1, own.size), flat.dtype)
            slots = iter(received)
            buffers.summands = [own if r == mpi.rank else next(slots) for r in range(mpi.size)]
            there = [mpi.Send_init(self._message(parts[r]), r, tags[0]) for r in filled]
            there += [mpi.Recv_init(self._message(buffers.summands[r]), r, tags[0]) for r in mine]
            moves.append(Messages(there))
            buffers.scatter, buffers.total, held = moves[-1], own, int(received.nbytes)
        if method.gathers:
            back = [mpi.Recv_init(self._message(parts[r]), r, tags[1]) for r in filled]
            back += [mpi.Send_init(self._message(own), r, tags[1]) for r in mine]
            moves.append(Messages(back))
            buffers.gather = moves[-1]
        stages = [Computed(device), *buffers.stages(AwaitedCodec(self._comm_stream))]
        # `prepare`: CUDA's current device is set per thread, also on the progress thread.
        plan = ReductionPlan(StagedOperation(stages, prepare=device.use), self._context.progress, device_nbytes=held)
        plan.close += [move.free for move in moves]
        return Reduction(buffer, [meter], plan)

    def close(self) -> None:
        """Do nothing: only channels and sums hold resources."""

    def _message(self, array: Any) -> tuple[Any, MPI.Datatype]:
        return raw(self._cuda.device.address(array), array.nbytes)


class MpiCudaChannel(DeviceChannel):
    """Channel with one buffer per direction for both slots: `finish` waits for the sends too."""

    def __init__(self, cuda: Cuda, context: TransportContext, pattern: Pattern, meter: Meter) -> None:
        super().__init__(pattern.sends, pattern.recvs, pattern.dtype, meter, cuda.device)
        device, mpi, self._progress = cuda.device, context.mpi, context.progress

        def message(array: Any, where: slice) -> tuple[Any, MPI.Datatype]:
            part = array[where]
            return raw(device.address(part), part.nbytes)

        # Receives first, as in `MpiChannel`.
        self._messages = Messages(
            [
                *(mpi.Recv_init(message(self._in, where), peer, pattern.tag) for peer, where in self._recvs.items()),
                *(mpi.Send_init(message(self._out, where), peer, pattern.tag) for peer, where in self._sends.items()),
            ]
        )
        self._operation = StagedOperation([Computed(device), self._messages], prepare=device.use)

    def _start(self) -> None:
        if self.peers:
            # The event also follows the previous exchange's unpacking, so receives may begin as soon as it is done.
            self._progress.submit(self._operation)

    def _finish(self) -> float:
        if not self.peers:
            return 0.0
        self._progress.complete(self._operation)
        return self._operation.completed_at

    def _close(self) -> None:
        self._messages.free()
