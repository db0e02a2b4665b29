"""Sums by memory that the ranks of a node have mapped: every rank adds up its shard of all summands, on a lane."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from halograd.comm.gpu.adding import add_up, both
from halograd.comm.gpu.ipc import Notices
from halograd.comm.gpu.ipc_memory import ALIGNMENT, Exchanged
from halograd.comm.gpu.spans import LaneMeter
from halograd.comm.gpu.streams import Lane
from halograd.comm.progress import Progress
from halograd.comm.reduction import Reduction
from halograd.comm.shard import shards
from halograd.comm.transports.arena import rounded

__all__ = ["IpcSum"]


@dataclass(frozen=True)
class Step:
    """Part of a sum: behind event `behind` of all others do `work`, then record the own event `event`."""

    behind: int | None
    work: Callable[[], None]
    event: int | None


def _nothing() -> None:
    return None


class IpcSum(Reduction):
    """A sum in the order of the ranks in three steps, or half of it. ::

        start    copy the summands to shared memory                         event 0, flag 2 n - 1
        then     behind all events 0: add up the own shard of all           event 1, flag 2 n
        then     behind all events 1: copy the shards of the others

    A step can be enqueued when all flags are up; the progress thread sees to that, or `finish`. A reduce-scatter adds
    up straight into the buffer, an all-gather begins with the second copy; both end behind all events 1.

    *Nothing is overwritten while it is read*: the summands of run n + 1 are copied on a lane behind events 1 of run n
    of all others, which are behind what reads the summands. A shard of run n + 1 is written behind events 0 of run
    n + 1 of all others, which are behind what copies the shards of run n. An event is recorded again only when all
    others wait for it already: run n + 1 starts when flags 2 n are up, raised behind their waiting for event 0; and
    event 1 is recorded again when flags 2 n + 1 are up, raised behind their waiting for event 1.
    """

    def __init__(
        self,
        lane: Lane,
        place: tuple[int, int],
        progress: Progress,
        buffer: Any,
        meter: LaneMeter,
        method: str,
        shared: Exchanged,
        notices: Notices,
    ) -> None:
        super().__init__(buffer, meter)
        self._lane, self._progress, self._shared, self._notices = lane, progress, shared, notices
        (self._rank, self._size), self._passage = place, meter.passage(lane)
        self._count, self._at, self._lock = 0, 0, threading.Lock()
        self._steps = self._make_steps(method)
        self._at = len(self._steps)

    @staticmethod
    def bytes_for(buffer: Any, rank: int, ranks: int, method: str) -> int:
        """Memory that a rank shares for a sum of this buffer [B]."""
        own = shards(buffer.size, ranks, buffer.itemsize)[rank]
        total = rounded((own.stop - own.start) * buffer.itemsize, ALIGNMENT)
        return (0 if method == "all_gather" else rounded(buffer.nbytes, ALIGNMENT)) + total

    def _make_steps(self, method: str) -> list[Step]:
        device, flat, dtype = self._lane.cuda.device, self.buffer.reshape(-1), self.buffer.dtype
        parts = shards(flat.size, self._size, dtype.itemsize)
        own, ranks = parts[self._rank], range(self._size)
        behind = 0 if method == "all_gather" else rounded(self.buffer.nbytes, ALIGNMENT)
        lengths = [part.stop - part.start for part in parts]
        totals = [self._shared.array(r, behind, lengths[r], dtype) for r in ranks]
        back = device.copies([(flat[parts[r]], totals[r]) for r in ranks if lengths[r] and r != self._rank])
        here = device.copies([(totals[self._rank], flat[own])] if own.stop > own.start else [])
        if method == "all_gather":
            return [Step(None, here, 0), Step(0, back, 1), Step(1, _nothing, None)]
        deposit = device.copies([(self._shared.array(self._rank, 0, flat.size, dtype), flat)])
        summands = [self._shared.array(r, own.start * dtype.itemsize, lengths[self._rank], dtype) for r in ranks]
        add = add_up(device, summands, flat[own]) if own.stop > own.start else _nothing
        if method == "reduce_scatter":
            return [Step(None, deposit, 0), Step(0, add, 1), Step(1, _nothing, None)]
        return [Step(None, deposit, 0), Step(0, both(add, here), 1), Step(1, back, None)]

    @property
    def buffer_bytes(self) -> int:
        """Memory of the host: a flag [B]."""
        return ALIGNMENT

    @property
    def device_bytes(self) -> int:
        """Memory of the device beside the buffer: the summands and a shard [B]."""
        return int(self.buffer.nbytes * (self._size + 1) // self._size)

    # -- driven by the progress thread, and by `finish` -----------------------------------------
    @property
    def idle(self) -> bool:
        """Whether every step is enqueued."""
        return self._at == len(self._steps)

    def advance(self) -> bool:
        """Enqueue the next step if all flags are up. Does not wait. Whether a step was enqueued."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self.idle or not self._notices.flags.reached(self._due):
                return False
            self._enqueue(self._steps[self._at])
            return True
        finally:
            self._lock.release()

    @property
    def _due(self) -> int:
        """Count that all flags must have for the next step."""
        return 2 * self._count - 2 + self._at

    def _enqueue(self, step: Step) -> None:
        """Enqueue a step; called with the lock held, on either thread."""
        self._lane.cuda.device.use()
        stream = self._lane.stream
        if step.behind is not None:
            for rank in (r for r in range(self._size) if r != self._rank):
                stream.wait_event(self._shared.peer_event(rank, step.behind))
        with stream:
            step.work()
        self._at += 1
        if step.event is None:
            self._passage.leave()
            return
        self._shared.events[step.event].record(stream)
        self._notices.flags.raise_to(2 * self._count - 2 + self._at)

    def _start(self) -> None:
        with self._lock:
            self._count, self._at = self._count + 1, 0
            self._passage.enter()
            self._enqueue(self._steps[0])
        self._progress.employ(self)

    def _finish(self) -> float:
        while not self.idle:
            # Not beyond the last flag: the thread may have enqueued the last step meanwhile.
            self._notices.flags.wait_for(min(self._due, 2 * self._count))
            with self._lock:
                if not self.idle and self._notices.flags.reached(self._due):
                    self._enqueue(self._steps[self._at])
        self._passage.join()
        return 0.0

    def _close(self) -> None:
        self._shared.close()
        self._notices.close()
