"""The `mpi-cuda` transport: MPI sends and receives device memory itself. For an MPI that was proven to.

MPI knows nothing of streams: it may be called when what it is to send has been computed, and what it has received is
there when it says so. So the host has to see both: in the progress thread, and in the thread that calls `finish`. ::

    start    pack -> [device buffer], ticket           (no wait)
    thread   ticket done: MPI_Startall; MPI_Testall ...
    finish   waits for the messages, then whatever unpacks is enqueued
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from ..channel import Channel
from ..counters import Meter
from ..device_channel import DeviceChannel
from ..progress import Stage, StagedOperation
from ..reduction import REDUCIBLE, Reduction, ReductionPlan, Room
from ..sums import Method, shards
from ..transports.base import Pattern, TransportContext
from ..transports.mpi import Messages
from .streams import Cuda, Lane, LaneCodec, Passage

__all__ = ["MpiCudaChannel", "MpiCudaTransport", "raw"]


def raw(address: int, nbytes: int) -> tuple[Any, MPI.Datatype]:
    """Return bytes at an address, for MPI; mpi4py does not look at them. (An array of CuPy would make it synchronize.)
    """
    return MPI.buffer.fromaddress(address, nbytes), MPI.BYTE


class Computed(Stage):
    """Over when the device has done what was enqueued so far."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._ticket: Any = None

    def begin(self) -> None:
        self._ticket = self._device.mark()

    def over(self) -> bool:
        return bool(self._ticket.done())

    def wait(self) -> None:
        self._ticket.wait()


class Added(Stage):
    """Over when the lane has done what it was given: MPI sends it then."""

    def __init__(self, passage: Passage, work: Stage) -> None:
        self._passage, self._work = passage, work

    def begin(self) -> None:
        # The host has seen that all summands are there: the lane need not wait for anything.
        self._work.wait()
        self._passage.leave()

    def over(self) -> bool:
        return self._passage.done

    def wait(self) -> None:
        self._passage.wait()


class AwaitedCodec(LaneCodec):
    """Sums on a lane that the host sees the end of."""

    def add(self, summands: Sequence[Any], total: Any) -> Stage:
        return Added(Passage(self.lane), super().add(summands, total))


class MpiCudaTransport:
    """Persistent messages of device memory; sums by such messages, added up on the device in the order of the ranks.

    Not ``MPI_Iallreduce``: libraries that reach device memory by point-to-point messages often do not by that.
    """

    summable = REDUCIBLE

    def __init__(self, cuda: Cuda, lane: Lane, context: TransportContext) -> None:
        self._cuda, self._lane, self._context = cuda, lane, context

    def channels(self, patterns: Sequence[Pattern], meters: Sequence[Meter]) -> list[Channel]:
        return [self._channel(pattern, meter) for pattern, meter in zip(patterns, meters)]

    def _channel(self, pattern: Pattern, meter: Meter) -> Channel:
        return MpiCudaChannel(self._cuda, self._context, pattern, meter)

    def reduction(self, buffer: Any, meter: Meter, method: Method) -> Reduction:
        """Shards to those who add them up, on a lane, and the sums back; of a half, one of them."""
        mpi, flat, device = self._context.mpi, buffer.reshape(-1), self._cuda.device
        parts = [flat[part] for part in shards(flat.size, mpi.size, flat.itemsize)]
        own, tags = parts[mpi.rank], (self._context.tag(), self._context.tag())
        peers = [r for r in range(mpi.size) if r != mpi.rank]
        filled, mine = [r for r in peers if parts[r].size], peers if own.size else []
        room, moves, held = Room(), [], 0
        if method.adds:
            received = device.zeros((mpi.size, own.size), flat.dtype)
            there = [mpi.Send_init(self._message(parts[r]), r, tags[0]) for r in filled]
            there += [mpi.Recv_init(self._message(received[r]), r, tags[0]) for r in mine]
            moves.append(Messages(there))
            room.scatter, room.total, held = moves[-1], own, int(received.nbytes)
            room.summands = [own if r == mpi.rank else received[r] for r in range(mpi.size)]
        if method.gathers:
            back = [mpi.Recv_init(self._message(parts[r]), r, tags[1]) for r in filled]
            back += [mpi.Send_init(self._message(own), r, tags[1]) for r in mine]
            moves.append(Messages(back))
            room.gather = moves[-1]
        stages = [Computed(device), *room.stages(AwaitedCodec(self._lane))]
        plan = ReductionPlan(StagedOperation(stages, prepare=device.use), self._context.progress, device_nbytes=held)
        plan.close += [move.free for move in moves]
        return Reduction(buffer, [meter], plan)

    def close(self) -> None:
        """Do nothing: its channels and sums are all there is to free."""

    def _message(self, array: Any) -> tuple[Any, MPI.Datatype]:
        return raw(self._cuda.device.address(array), array.nbytes)


class MpiCudaChannel(DeviceChannel):
    """One buffer per direction for both slots: `finish` waits for the sends too."""

    def __init__(self, cuda: Cuda, context: TransportContext, pattern: Pattern, meter: Meter) -> None:
        super().__init__(pattern.sends, pattern.recvs, pattern.dtype, meter, cuda.device)
        device, mpi, self._progress = cuda.device, context.mpi, context.progress

        def message(array: Any, where: slice) -> tuple[Any, MPI.Datatype]:
            part = array[where]
            return raw(device.address(part), part.nbytes)

        self._messages = Messages(
            [
                *(mpi.Recv_init(message(self._in, where), peer, pattern.tag) for peer, where in self._recvs.items()),
                *(mpi.Send_init(message(self._out, where), peer, pattern.tag) for peer, where in self._sends.items()),
            ]
        )
        self._operation = StagedOperation([Computed(device), self._messages], prepare=device.use)

    def _start(self) -> None:
        if self.peers:
            # Behind the unpacking of the exchange before, too: receives may begin as soon as the ticket is done.
            self._progress.submit(self._operation)

    def _finish(self) -> float:
        if not self.peers:
            return 0.0
        self._progress.complete(self._operation)
        return self._operation.completed_at

    def _close(self) -> None:
        self._messages.free()
