"""MPI transport: channels of one persistent message per peer, and the stages of sums."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
from mpi4py import MPI

from ..channel import Channel
from ..counters import Meter
from ..encoding import Encoding
from ..progress import Stage, StagedOperation, Work
from ..reduction import Plain, ReductionPlan, Room
from ..sums import Method, shards
from .base import Pattern, TransportContext, aligned_bytes

__all__ = ["Messages", "MpiChannel", "Native", "plan_over_mpi", "words"]

# Messages above this wait for the receiver (rendezvous): without the progress thread they would not even
# leave before finish(). Below it a message has left when start() returns, and waking the thread costs more.
EAGER_LIMIT = 16 * 1024  # [B]

_WORDS = {8: MPI.UINT64_T, 4: MPI.UINT32_T, 2: MPI.UINT16_T, 1: MPI.UINT8_T}


def words(memory: np.ndarray) -> tuple[np.ndarray, MPI.Datatype]:
    """Return the bytes as words of the largest size that divides their number, with the MPI datatype of the words.

    MPI counts are limited to 2^31 in some libraries; a count of bytes would reach this limit eight times earlier.
    """
    for size, datatype in _WORDS.items():
        if memory.nbytes % size == 0:
            return memory.view(f"u{size}"), datatype
    raise AssertionError("every number is a multiple of 1")


class Messages(Stage):
    """Persistent messages that are sent and received together."""

    def __init__(self, requests: Sequence[MPI.Prequest]) -> None:
        self._requests = list(requests)

    def begin(self) -> None:
        MPI.Prequest.Startall(self._requests)

    def over(self) -> bool:
        return bool(MPI.Request.Testall(self._requests))

    def wait(self) -> None:
        MPI.Request.Waitall(self._requests)

    def free(self) -> None:
        """Free the requests. None may be active."""
        for request in self._requests:
            request.Free()
        self._requests.clear()


class Native(Stage):
    """A non-blocking collective of the MPI library."""

    def __init__(self, post: Callable[[], MPI.Request]) -> None:
        self._post, self._request = post, MPI.REQUEST_NULL

    def begin(self) -> None:
        self._request = self._post()

    def over(self) -> bool:
        return bool(self._request.Test())

    def wait(self) -> None:
        self._request.Wait()


class MpiChannel(Channel):
    """Channel with one buffer per peer for both slots. `start` starts the messages, `finish` waits for them.

    One buffer is enough: `finish` waits for the sends too, and the next receive begins in the next `start`.
    """

    def __init__(self, context: TransportContext, pattern: Pattern, meter: Meter) -> None:
        super().__init__(pattern.sends, pattern.recvs, pattern.dtype, meter)
        self._progress = context.progress
        self._sent, self._received = self._allocate(pattern.sends), self._allocate(pattern.recvs)
        self._messages = Messages(
            [
                *(context.mpi.Recv_init(words(m), peer, pattern.tag) for peer, m in self._received.items()),
                *(context.mpi.Send_init(words(m), peer, pattern.tag) for peer, m in self._sent.items()),
            ]
        )
        self._operation = StagedOperation([self._messages])
        for array in self._received.values():
            array.flags.writeable = False
        longest = max((m.nbytes for m in (*self._sent.values(), *self._received.values())), default=0)
        self._in_background = longest > EAGER_LIMIT

    def _allocate(self, counts: Mapping[int, int]) -> dict[int, np.ndarray]:
        size, dtype = self.dtype.itemsize, self.dtype
        return {peer: aligned_bytes(count * size).view(dtype) for peer, count in counts.items()}

    def _send_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._sent[peer]

    def _recv_buffer(self, peer: int, slot: int) -> np.ndarray:
        return self._received[peer]

    def _start(self) -> None:
        if self._in_background:
            self._progress.submit(self._operation)
        else:
            self._messages.begin()

    def _finish(self) -> float:
        if self._in_background:
            self._progress.complete(self._operation)
            return self._operation.completed_at
        self._messages.wait()
        return 0.0

    def _close(self) -> None:
        self._messages.free()
        self._sent.clear()
        self._received.clear()


def plan_over_mpi(context: TransportContext, flat: np.ndarray, method: Method) -> ReductionPlan:
    """Return the plan of the sum of a flat buffer by MPI messages.

    The buffer is not empty, there are several ranks, and the sum is not hierarchical. A sum in rank order consists of
    messages. Any other sum is a collective of the MPI library, whose order of additions is unspecified and may depend
    on the number of bytes. The progress thread drives both.
    """
    mpi = context.mpi
    parts = shards(flat.size, mpi.size, flat.itemsize)
    own = parts[mpi.rank]
    if method.ordered:
        return _in_order(context, flat, method)
    nbytes = method.held(flat.nbytes, mpi.size, (own.stop - own.start) * flat.itemsize)
    direct: Callable[[], None] | None = None
    if method.adds and method.gathers:
        stages: list[Stage] = [Native(lambda: mpi.Iallreduce(MPI.IN_PLACE, flat, MPI.SUM))]
        direct = partial(mpi.Allreduce, MPI.IN_PLACE, flat, MPI.SUM)
    elif method.adds:
        # In place, MPI would write the sum to the start of the buffer, over the summands of another rank.
        total, counts = np.empty_like(flat[own]), [part.stop - part.start for part in parts]
        native = Native(lambda: mpi.Ireduce_scatter(flat, total, counts, MPI.SUM))
        stages = [native, Work([lambda: np.copyto(flat[own], total)])]
    else:
        # As words: MPI has no datatype for some element types (bfloat16).
        size = math.gcd(flat.itemsize, max(_WORDS))
        each = flat.itemsize // size
        counts, places = [(p.stop - p.start) * each for p in parts], [p.start * each for p in parts]
        message = [flat.view(f"u{size}"), (counts, places), _WORDS[size]]
        stages = [Native(lambda: mpi.Iallgatherv(MPI.IN_PLACE, message))]
    return ReductionPlan(StagedOperation(stages), context.progress, direct=direct, nbytes=nbytes)


def _in_order(context: TransportContext, flat: np.ndarray, method: Method) -> ReductionPlan:
    """Return the plan of a sum in rank order, in which every rank adds up one shard.

    Every rank receives the summands of its shard from all ranks, adds them up, and sends the sum to all ranks. This is
    a reduce-scatter and an all-gather: each rank sends ``2 (P - 1) / P`` times the buffer, as in the best all-reduce.
    """
    mpi, codec = context.mpi, method.codec
    wire = flat if codec.identity else np.zeros(flat.size, codec.wire)
    shares = shards(wire.size, mpi.size, wire.itemsize)
    parts, peers = [wire[share] for share in shares], [r for r in range(mpi.size) if r != mpi.rank]
    own, tags = parts[mpi.rank], (context.tag(), context.tag())
    received = [own if r == mpi.rank else np.empty_like(own) for r in range(mpi.size)]
    filled, mine = [r for r in peers if parts[r].size], peers if own.size else []
    there = [mpi.Send_init(words(parts[r]), r, tags[0]) for r in filled]
    there += [mpi.Recv_init(words(received[r]), r, tags[0]) for r in mine]
    back = [mpi.Recv_init(words(parts[r]), r, tags[1]) for r in filled]
    back += [mpi.Send_init(words(own), r, tags[1]) for r in mine]
    scatter, gather = Messages(there), Messages(back)
    encoding = None if codec.identity else Encoding(codec, flat.dtype, [shares[mpi.rank]])
    copies = [] if encoding is None else [(wire, flat)]
    room = Room(copies, scatter, received, own, gather, [] if encoding is None else [(flat, wire)])
    stages = room.stages(encoding or Plain())
    # The owner encodes and decodes; the progress thread, or the rank in `finish`, does the steps between.
    operation = StagedOperation(stages, first=1, last=len(room.returns))
    held = sum(one.nbytes for one in received) - own.nbytes + (0 if encoding is None else wire.nbytes)
    close: list[Callable[[], object]] = [scatter.free, gather.free]
    return ReductionPlan(operation, context.progress, encoding=encoding, nbytes=held, close=close)
