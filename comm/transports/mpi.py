"""MPI transport: channels of one persistent message per peer, and sums by messages and collectives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from mpi4py import MPI

from .. import contexts
from ..channel import Channel
from ..counters import Meter
from ..encoding import Encoding
from ..progress import Stage, StagedOperation, Work
from ..reduction import Plain, ReductionPlan, SumBuffers
from ..ring import Ring
from ..sums import Method, is_large, shards
from .base import Pattern, TransportContext, aligned_bytes

__all__ = ["MessageSums", "Messages", "MpiChannel", "Native", "words"]

# Messages above this wait for the receiver (rendezvous): without the progress thread they would not even
# leave before finish(). Below it a message has left when start() returns, and waking the thread costs more.
EAGER_LIMIT = 16 * 1024  # [B]

_WORDS = {8: MPI.UINT64_T, 4: MPI.UINT32_T, 2: MPI.UINT16_T, 1: MPI.UINT8_T}


def words(memory: np.ndarray) -> tuple[np.ndarray, MPI.Datatype]:
    """Return the bytes as words of the largest size that divides their number, with the MPI datatype of the words.

    MPI counts are limited to 2^31 in some libraries; a count of bytes would reach this limit up to eight times
    earlier.
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
        # Receives first: a message that finds its receive is not copied to a buffer of the library.
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


@dataclass(eq=False)
class _Shared:
    """Memory and communicator that several sums use, one after the other.

    Attributes
    ----------
    ring
        Slots of the sums.
    mpi
        Communicator of their collectives.
    memory
        Memory of the slots.
    users
        Number of open sums.
    """

    ring: Ring
    mpi: MPI.Intracomm
    memory: np.ndarray
    users: int = 0

    def slot(self, number: int, nbytes: int) -> np.ndarray:
        """Return the first bytes of the slot of a sum, ``(nbytes,)`` (uint8)."""
        start, _ = self.ring.here[number]
        return self.memory[start : start + nbytes]

    def leave(self) -> None:
        self.users -= 1


class MessageSums:
    """Factory of sums by MPI messages on one communicator. The progress thread drives them.

    A sum in rank order consists of messages. Any other sum is a collective of the MPI library, whose order of additions
    is unspecified and may depend on the number of bytes. Large sums that are planned together share memory
    (`halograd.comm.ring`): for received messages, and what MPI holds while its collectives are under way. A
    collective that waits for its slot begins after others that were started later, so the collectives of such sums
    run on a clone of the communicator.
    """

    def __init__(self, context: TransportContext) -> None:
        self._context = context
        self._shared: list[_Shared] = []
        self._clones: list[MPI.Intracomm] = []

    @property
    def buffer_bytes(self) -> int:
        """Memory that several sums share, here and in MPI [B]."""
        return sum(shared.ring.nbytes for shared in self._shared if shared.users)

    def plans(self, sums: Sequence[tuple[np.ndarray, Method]]) -> list[ReductionPlan]:
        """Return the plans of the sums of flat buffers. Collective over the communicator.

        No buffer is empty, there are several ranks, and no sum is hierarchical.
        """
        mpi, plans = self._context.mpi, list[ReductionPlan]()
        # Drop the memory of sums that are closed.
        self._shared = [shared for shared in self._shared if shared.users]
        helds = [method.held(flat.size, flat.itemsize, mpi.size, mpi.rank) for flat, method in sums]
        large = [i for i, (flat, _) in enumerate(sums) if is_large(flat.nbytes)]
        ring = Ring([helds[i] for i in large])
        # Only collectives need the clone: messages find their receives by tags, in any order.
        waits = ring.queue is not None and any(not sums[i][1].ordered for i in large)
        common = _Shared(ring, self._clone() if waits else mpi, aligned_bytes(ring.here_bytes), len(large))
        self._shared.append(common)
        for i, ((flat, method), held) in enumerate(zip(sums, helds)):
            make = self._in_order if method.ordered else self._native
            if i in large:
                plan = make(flat, method, common, large.index(i))
                plan.close.append(common.leave)
            else:
                plan = make(flat, method, _Shared(Ring([held]), mpi, aligned_bytes(held.here)), 0)
                plan.nbytes += held.here + held.inside
            plans.append(plan)
        return plans

    def _clone(self) -> MPI.Intracomm:
        """Return a clone of the communicator that no open sum uses. Collective."""
        in_use = [shared.mpi for shared in self._shared]
        for clone in self._clones:
            if clone not in in_use:
                return clone
        self._context.agree(contexts.shortage())
        self._clones.append(contexts.hold(self._context.mpi.Dup()))
        return self._clones[-1]

    def close(self) -> None:
        """Free the clones. Idempotent. Collective."""
        for clone in self._clones:
            contexts.free(clone)
        self._clones.clear()

    def _native(self, flat: np.ndarray, method: Method, shared: _Shared, number: int) -> ReductionPlan:
        """Return the plan of a collective of the MPI library."""
        mpi = shared.mpi
        parts = shards(flat.size, mpi.size, flat.itemsize)
        direct: Callable[[], None] | None = None
        if method.adds and method.gathers:
            stages: list[Stage] = [Native(lambda: mpi.Iallreduce(MPI.IN_PLACE, flat, MPI.SUM))]
            # Not on the clone: when its collectives begin, relative to a call of `run`, differs between ranks.
            direct = partial(self._context.mpi.Allreduce, MPI.IN_PLACE, flat, MPI.SUM)
        elif method.adds:
            # In place, MPI would write the sum to the start of the buffer, over the summands of another rank.
            counts, own = [part.stop - part.start for part in parts], flat[parts[mpi.rank]]
            total = shared.slot(number, own.nbytes).view(flat.dtype)
            native = Native(lambda: mpi.Ireduce_scatter(flat, total, counts, MPI.SUM))
            stages = [native, Work([lambda: np.copyto(own, total)])]
        else:
            # As words: MPI has no datatype for some element types (bfloat16).
            size = math.gcd(flat.itemsize, max(_WORDS))
            each = flat.itemsize // size
            counts, starts = [(p.stop - p.start) * each for p in parts], [p.start * each for p in parts]
            message = [flat.view(f"u{size}"), (counts, starts), _WORDS[size]]
            stages = [Native(lambda: mpi.Iallgatherv(MPI.IN_PLACE, message))]
        return ReductionPlan(shared.ring.operation(number, stages, len(stages)), self._context.progress, direct=direct)

    def _in_order(self, flat: np.ndarray, method: Method, shared: _Shared, number: int) -> ReductionPlan:
        """Return the plan of a sum in rank order, in which every rank adds up one shard.

        Every rank receives the summands of its shard from all ranks, adds them up, and sends the sum to all ranks. This
        is a reduce-scatter and an all-gather: each rank sends ``2 (P - 1) / P`` times the buffer, as in the best
        all-reduce. Encoded elements take the place of those that they encode, in the buffer.
        """
        mpi, codec = shared.mpi, method.codec
        dtype, nbytes = flat.dtype if codec.identity else np.dtype(codec.wire), 0
        if dtype.itemsize <= flat.itemsize:
            encoded = flat.view(np.uint8)[: flat.size * dtype.itemsize].view(dtype)
        else:  # a codec of a user may make elements wider; they do not fit the buffer
            encoded = np.zeros(flat.size, dtype)
            nbytes = encoded.nbytes
        shares = shards(encoded.size, mpi.size, encoded.itemsize)
        parts, peers = [encoded[share] for share in shares], [r for r in range(mpi.size) if r != mpi.rank]
        own, tags = parts[mpi.rank], (self._context.tag(), self._context.tag())
        slots = iter(shared.slot(number, len(peers) * own.nbytes).view(dtype).reshape(len(peers), own.size))
        received = [own if r == mpi.rank else next(slots) for r in range(mpi.size)]
        # Peers with a shard that is not empty; all peers, unless the shard of this rank is empty.
        filled, mine = [r for r in peers if parts[r].size], peers if own.size else []
        there = [mpi.Send_init(words(parts[r]), r, tags[0]) for r in filled]
        there += [mpi.Recv_init(words(received[r]), r, tags[0]) for r in mine]
        back = [mpi.Recv_init(words(parts[r]), r, tags[1]) for r in filled]
        back += [mpi.Send_init(words(own), r, tags[1]) for r in mine]
        scatter, gather = Messages(there), Messages(back)
        encoding = None if codec.identity else Encoding(codec, flat.dtype, [shares[mpi.rank]])
        # Without a codec, messages send from the buffer, and sums arrive in it: there is nothing to copy.
        copies = [] if encoding is None else [(encoded, flat)]
        buffers = SumBuffers(copies, scatter, received, own, gather, [] if encoding is None else [(flat, encoded)])
        stages = buffers.stages(encoding or Plain())
        # The owner encodes and decodes; the progress thread, or the rank in `finish`, does the steps between. Of these
        # the first two need the received summands.
        operation = shared.ring.operation(number, stages, 2, first=1, last=len(buffers.returns))
        close: list[Callable[[], object]] = [scatter.free, gather.free]
        return ReductionPlan(operation, self._context.progress, encoding=encoding, nbytes=nbytes, close=close)

