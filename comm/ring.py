"""Memory of sums that are under way: a ring of slots, which the sums of a communicator use one after the other.

Every sum has its slot in the ring from its set-up on, so that messages bind to fixed memory; slots overlap if the
ring is smaller than all sums together. A sum waits until no overlapping slot is in use. So the memory is that of a few
sums, not of all gradients, and a step allocates nothing. ::

    slots   | 0       | 1    | 2        |
             | 3    | 4           | 5    |        sum 3 waits for 0, sum 4 for 0 and 1, sum 5 for 2

*Data are not overwritten while they are read.* A few stages after `FreeSlot` use the memory (`count` in
`Ring.operation`). Nothing else reads or writes it, and messages into it are requested and awaited in these stages. The
next sum in this memory passes its `FreeSlot` when these stages are over.

*No order of calls deadlocks.* All ranks start their sums in one order; `start` and the stages before the slot do not
wait. The last stages of a sum are run by its owner and need no other rank, so they are not considered here. Let n be
the first sum in this order that is not over on some rank. On a rank that has started n, all sums before n are over, so
n has its slot and is the first in the queue. It waits for another rank only until that rank has started n and has the
slot, too. The other rank starts n without waiting, or after it has waited for sums before n, which are over. The stages
from the slot on need no owner: the progress thread runs them, or a thread that waits for any sum of the queue. So n
ends on all ranks, whichever sums they finish first.
"""

from __future__ import annotations

from collections.abc import Sequence

from .progress import OperationQueue, Stage, StagedOperation
from .sums import Held, ring_slots

__all__ = ["FreeSlot", "Ring"]


class FreeSlot(Stage):
    """Stage that is over when the memory of a sum is free.

    Attributes
    ----------
    others
        Slots that overlap with this one.
    """

    def __init__(self) -> None:
        self.others = list[FreeSlot]()
        self.operation: StagedOperation | None = None
        self._after = self._until = 0

    def serve(self, operation: StagedOperation, at: int, count: int) -> None:
        """Set the operation, the index `at` of this stage in it, and how many stages after it (`count`) use the memory.
        """
        self.operation, self._after, self._until = operation, at + 1, at + count

    @property
    def in_use(self) -> bool:
        """Whether the sum uses its memory now."""
        operation = self.operation
        # A sum that has failed does not continue, so it must not block others.
        return operation is not None and operation.fault is None and self._after <= operation.at <= self._until

    def over(self) -> bool:
        return not any(other.in_use for other in self.others)


class Ring:
    """Slots of sums that are planned together. Local.

    Parameters
    ----------
    held
        Memory of each sum while it is under way: here, and inside MPI.

    Attributes
    ----------
    here, inside
        Slot ``(start, stop)`` of each sum in the memory of this library, and in the memory that MPI may use [B].
    here_bytes, nbytes
        Size of the memory of this library, and of both together [B].
    queue
        Queue of the sums if they wait for each other; None if there is memory for all of them at once.
    """

    def __init__(self, held: Sequence[Held]) -> None:
        self.here, self.here_bytes = ring_slots([sum_memory.here for sum_memory in held])
        self.inside, inside_bytes = ring_slots([sum_memory.inside for sum_memory in held])
        self.nbytes = self.here_bytes + inside_bytes
        self._slots = [FreeSlot() for _ in held]
        # Two sums overlap if their slots intersect in either memory.
        for spans in (self.here, self.inside):
            for slot, (first, end) in zip(self._slots, spans):
                pairs = zip(self._slots, spans)
                slot.others += [other for other, (a, b) in pairs if other is not slot and max(a, first) < min(b, end)]
        self.queue = OperationQueue() if any(slot.others for slot in self._slots) else None

    def operation(
        self, number: int, stages: Sequence[Stage], count: int, first: int = 0, last: int = 0
    ) -> StagedOperation:
        """Return the operation of the sum with index `number`.

        Parameters
        ----------
        stages
            Stages of the sum.
        count
            How many stages after the `first` ones use the memory of the sum. None of them is one of the `last`.
        first, last
            As in :class:`StagedOperation`.
        """
        if self.queue is None:  # no slot overlaps another one
            return StagedOperation(stages, first=first, last=last)
        slot = self._slots[number]
        all_stages = [*stages[:first], slot, *stages[first:]]
        operation = StagedOperation(all_stages, first=first, last=last, queue=self.queue)
        slot.serve(operation, first, count)
        return operation
