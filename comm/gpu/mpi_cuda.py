"""The `mpi-cuda` transport: MPI sends and receives device memory itself. For an MPI that was proven to.

MPI knows nothing of streams: it may be called when what it is to send has been computed, and what it has received is
there when it says so. So somebody on the host has to see both: the progress thread, and whoever calls `finish`. ::

    start    pack -> [device buffer], ticket           (nobody waits)
    thread   ticket done: MPI_Startall; MPI_Testall ...
    finish   waits for the messages, then whatever unpacks is enqueued
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from halograd.comm.channel import Channel
from halograd.comm.counters import Meter
from halograd.comm.device_channel import DeviceChannel
from halograd.comm.gpu.adding import add_up
from halograd.comm.gpu.base import DeviceTransport, check_dtype
from halograd.comm.gpu.streams import Cuda, Lane, Passage
from halograd.comm.progress import Operation
from halograd.comm.reduction import Reduction
from halograd.comm.shard import shards
from halograd.comm.transports.base import Context, Pattern
from halograd.device import Ticket

__all__ = ["MpiCudaChannel", "MpiCudaTransport", "raw"]


def raw(address: int, nbytes: int) -> tuple[Any, MPI.Datatype]:
    """Bytes at an address, for MPI; mpi4py does not look at them. (An array of CuPy would make it synchronize.)"""
    return MPI.buffer.fromaddress(address, nbytes), MPI.BYTE


class Stage:
    """Something to begin, and how to know that it is over."""

    def __init__(self, begin: Callable[[], None], over: Callable[[], bool], wait: Callable[[], object]) -> None:
        self.begin, self.over, self.wait = begin, over, wait


class Stages(Operation):
    """One thing after the other, driven by the progress thread or by the owner, never by both."""

    def __init__(self, stages: Sequence[Stage], prepare: Callable[[], None]) -> None:
        super().__init__()
        self._stages, self._prepare, self._at = list(stages), prepare, 0

    def start(self) -> None:
        """Begin the first. Does not wait."""
        self._at = 0
        self._stages[0].begin()

    def poll(self) -> bool:
        self._prepare()
        while self._stages[self._at].over():
            if not self._go_on():
                return True
        return False

    def wait(self) -> None:
        self._prepare()
        while True:
            self._stages[self._at].wait()
            if not self._go_on():
                return

    def _go_on(self) -> bool:
        """Begin the next; False if there is none."""
        if self._at + 1 == len(self._stages):
            self.completed_at = time.perf_counter()
            return False
        self._at += 1
        self._stages[self._at].begin()
        return True


class Computed(Stage):
    """Over when the device has done what was enqueued so far."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._ticket: Ticket | None = None
        super().__init__(self._begin, lambda: self._now().done(), lambda: self._now().wait())

    def _begin(self) -> None:
        self._ticket = self._device.mark()

    def _now(self) -> Ticket:
        assert self._ticket is not None
        return self._ticket


class Messages(Stage):
    """Persistent requests; over when all are complete."""

    def __init__(self, requests: list[MPI.Prequest]) -> None:
        self.requests = requests
        super().__init__(
            lambda: MPI.Prequest.Startall(requests),
            lambda: MPI.Request.Testall(requests),
            lambda: MPI.Request.Waitall(requests),
        )

    def free(self) -> None:
        """Free the requests; none is under way."""
        for request in self.requests:
            request.Free()
        self.requests.clear()


class MpiCudaTransport(DeviceTransport):
    """Persistent messages of device memory; sums by such messages, added up on the device in the order of the ranks.

    Not ``MPI_Iallreduce``: libraries that reach device memory by point-to-point messages often do not by that.
    """

    def __init__(self, cuda: Cuda, lane: Lane, context: Context) -> None:
        self._cuda, self._lane = cuda, lane
        self._mpi, self._progress = context.mpi.Dup(), context.progress
        self._tags = 0

    def tag(self) -> int:
        """A tag of no other message. Local, the same on all ranks."""
        self._tags += 1
        return self._tags % (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767)

    def channel(self, pattern: Pattern, meter: Meter) -> Channel:
        return MpiCudaChannel(self._cuda, self._mpi, self._progress, pattern, meter, self.tag())

    def reduction(self, buffer: Any, meter: Meter, method: str, tags: tuple[int, int]) -> Reduction:
        return MpiCudaSum(self._lane, self._mpi, self._progress, buffer, meter, method, (self.tag(), self.tag()))

    def check(self, dtype: np.dtype) -> None:
        check_dtype(dtype)

    def close(self) -> None:
        if self._mpi != MPI.COMM_NULL:
            self._mpi.Free()


class MpiCudaChannel(DeviceChannel):
    """One buffer per direction for both slots: `finish` waits for the sends too."""

    def __init__(self, cuda: Cuda, mpi: MPI.Intracomm, progress: Any, pattern: Pattern, meter: Meter, tag: int) -> None:
        super().__init__(pattern.sends, pattern.recvs, pattern.dtype, meter, cuda.device)
        device, self._progress = cuda.device, progress

        def message(array: Any, where: slice) -> tuple[Any, MPI.Datatype]:
            part = array[where]
            return raw(device.address(part), part.nbytes)

        self._messages = Messages(
            [
                *(mpi.Recv_init(message(self._in, where), peer, tag) for peer, where in self._recvs.items()),
                *(mpi.Send_init(message(self._out, where), peer, tag) for peer, where in self._sends.items()),
            ]
        )
        self._operation = Stages([Computed(device), self._messages], device.use)

    def _start(self) -> None:
        if self.peers:
            # Behind the unpacking of the exchange before, too: receives may begin as soon as the ticket is done.
            self._operation.start()
            self._progress.submit(self._operation)

    def _finish(self) -> float:
        if not self.peers:
            return 0.0
        self._progress.complete(self._operation)
        return self._operation.completed_at

    def _close(self) -> None:
        self._messages.free()


class MpiCudaSum(Reduction):
    """Shards to those who add them up, on a lane, and the sums back; by messages of device memory.

    A reduce-scatter is the first half, an all-gather the second.
    """

    def __init__(
        self,
        lane: Lane,
        mpi: MPI.Intracomm,
        progress: Any,
        buffer: Any,
        meter: Meter,
        method: str,
        tags: tuple[int, int],
    ) -> None:
        super().__init__(buffer, meter)
        self._lane, self._progress, self._passage = lane, progress, Passage(lane)
        device = lane.cuda.device
        flat, rank = buffer.reshape(-1), mpi.rank
        parts = [flat[part] for part in shards(flat.size, mpi.size, buffer.itemsize)]
        own, adds = parts[rank], method != "all_gather"
        self._received = device.zeros((mpi.size if adds else 0, own.size), buffer.dtype)
        self._add_up: Callable[[], None] | None = None
        if adds and own.size:
            self._add_up = add_up(device, [own if r == rank else self._received[r] for r in range(mpi.size)], own)

        def message(array: Any) -> tuple[Any, MPI.Datatype]:
            return raw(device.address(array), array.nbytes)

        peers = [r for r in range(mpi.size) if r != rank]
        filled, mine = [r for r in peers if parts[r].size], peers if own.size else []
        stages: list[Stage] = [Computed(device)]
        self._requests: list[Messages] = []
        if adds:
            there = [mpi.Send_init(message(parts[r]), r, tags[0]) for r in filled]
            there += [mpi.Recv_init(message(self._received[r]), r, tags[0]) for r in mine]
            self._requests.append(Messages(there))
            stages += [self._requests[-1], Stage(self._add, lambda: self._passage.done, self._passage.wait)]
        if method != "reduce_scatter":
            back = [mpi.Recv_init(message(parts[r]), r, tags[1]) for r in filled]
            back += [mpi.Send_init(message(own), r, tags[1]) for r in mine]
            self._requests.append(Messages(back))
            stages.append(self._requests[-1])
        self._operation = Stages(stages, device.use)

    @property
    def buffer_bytes(self) -> int:
        """Memory of the host: none [B]."""
        return 0

    @property
    def device_bytes(self) -> int:
        """Memory of the device beside the buffer [B]."""
        return int(self._received.nbytes)

    def _add(self) -> None:
        # All summands are there, and somebody on the host has seen it: the lane need not wait for anything.
        if self._add_up is not None:
            with self._lane.stream:
                self._add_up()
        self._passage.leave()

    def _start(self) -> None:
        self._operation.start()
        self._progress.submit(self._operation)

    def _finish(self) -> float:
        self._progress.complete(self._operation)
        return self._operation.completed_at

    def _close(self) -> None:
        for requests in self._requests:
            requests.free()
