"""Hierarchical sums: within nodes in shared memory, then across nodes by one rank of each. They overlap with
computation.

::

    every rank      deposit   its summand, in its part of shared memory
    every rank      add       its shard of all summands of the node            after all deposits on the node
    the first rank  send      the node's total to the first ranks of others    after all additions on the node
    the first rank  collect   the totals of the other nodes                    when they have arrived
    every rank      return    the result to its buffer                         when the first rank has collected

One flag per rank holds its progress. The progress thread runs all steps, or all but the first and the last copy. Of
several sums that wait for the same stage it polls only the first, because all ranks start the sums in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from mpi4py import MPI

from ..progress import OperationQueue, Progress, Stage, StagedOperation, Work
from ..reduction import Plain, ReductionPlan
from ..sums import Method, shards
from ..transport import Emulated
from .base import ALIGNMENT
from .emulated import TimestampedSignal, Timestamps
from .memory import Planning, SharedBlock, Signal, rounded
from .mpi import Native

__all__ = ["Attempt", "NodeGroup", "plan_by_nodes"]

TIMESTAMP_BYTES = 4 * ALIGNMENT  # [B]: send times and arrival times, each for two sums that alternate


@dataclass(frozen=True)
class NodeGroup:
    """The ranks of one hierarchical sum, by their numbers in the communicator that shares memory.

    Attributes
    ----------
    mine
        Rank of this process.
    here
        Ranks on the node of this process, in order.
    heads
        First rank of every node on an emulated network, where all nodes share memory; else the first rank of this node.
    leaders
        Communicator of the first ranks of nodes that share no memory; COMM_NULL on other ranks, and for a single node.
    network
        Emulated network between the nodes; None without one.
    queue
        Queue of all hierarchical sums of a communicator.
    """

    mine: int
    here: Sequence[int]
    heads: Sequence[int]
    leaders: MPI.Comm = field(default_factory=lambda: MPI.COMM_NULL)
    network: Emulated | None = None
    queue: OperationQueue = field(default_factory=OperationQueue)

    @property
    def leads(self) -> bool:
        """Whether this rank is the first of its node."""
        return self.mine == self.here[0]

    @property
    def emulated(self) -> bool:
        """Whether the first ranks of several nodes share memory."""
        return len(self.heads) > 1


class Attempt(Stage):
    """A stage that may fail on one rank while the other ranks of its node continue. It keeps the exception."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.fault: Exception | None = None

    def begin(self) -> None:
        self._attempt(self._stage.begin)

    def over(self) -> bool:
        return self.fault is not None or bool(self._attempt(self._stage.over))

    def wait(self) -> None:
        if self.fault is None:
            self._attempt(self._stage.wait)

    def _attempt(self, call: Callable[[], object]) -> object:
        try:
            return call()
        except Exception as fault:
            self.fault = fault
            return True  # over: the other ranks of the node wait for the stages after this one

    def raise_fault(self) -> None:
        """Raise the kept exception, if there is one, and forget it."""
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault


class _NodeBuffers:
    """The shared memory of one sum; `bind` creates the views.

    ::

        first rank of a node   | timestamps | total, ... | summand |
        other ranks            | timestamps | summand |

    A rank that is alone on its node deposits into the total, and has no summand. One summand per rank is enough: it is
    read before the node's total is sent, and written again after `finish`. Between emulated nodes there are totals for
    two alternating sums, and the result. A total is safe to overwrite: the total of sum n + 2 is made after all ranks
    of the node have finished sum n + 1, so all first ranks have sent sum n + 1. They sent it after their nodes had
    finished sum n, and had then read everything of sum n.
    """

    def __init__(self, node_group: NodeGroup, flat: np.ndarray) -> None:
        self._node_group, self._flat, self._size = node_group, flat, rounded(flat.nbytes)
        self._totals = 3 if node_group.emulated else 1
        arrays = (len(node_group.here) > 1) + (self._totals if node_group.leads else 0)
        #: Bytes of shared memory that this rank needs, and the part of them that it reports as buffers [B].
        self.requested, self.nbytes = TIMESTAMP_BYTES + arrays * self._size, arrays * flat.nbytes

    def bind(self, block: SharedBlock) -> None:
        """Create the views into the shared memory."""
        self.block, node_group = block, self._node_group
        # Arrays of the first rank: totals 0 and 1, and the result 2. One array is all of these without emulated nodes.
        self.result = self.total(node_group.here[0], 2 if node_group.emulated else 0)
        self.totals = [self.total(node_group.here[0], slot) if node_group.emulated else self.result for slot in (0, 1)]
        several = len(node_group.here) > 1
        self.summands = [
            self._array(r, self._totals if r == node_group.here[0] else 0) for r in node_group.here if several
        ]

    def timestamps(self, rank: int, pair: int) -> Timestamps:
        """Return the timestamps of a rank: of its sends (pair 0), or of the arrivals (pair 1)."""
        first, second = (self.block.view(rank, (2 * pair + i) * ALIGNMENT, 8, np.float64) for i in range(2))
        return first, second

    def total(self, rank: int, number: int) -> np.ndarray:
        """Return total `number` of `rank`, which is the first rank of its node."""
        return self._array(rank, number)

    def _array(self, rank: int, number: int) -> np.ndarray:
        return self.block.view(rank, TIMESTAMP_BYTES + number * self._size, self._flat.nbytes, self._flat.dtype)


def plan_by_nodes(flat: np.ndarray, method: Method, node_group: NodeGroup, progress: Progress) -> Planning:
    """Return the plan of the hierarchical sum of a flat, non-empty buffer over several ranks."""
    buffers, here, codec = _NodeBuffers(node_group, flat), node_group.here, Plain()
    block = yield buffers.requested
    buffers.bind(block)
    flags, me = buffers.block.flags, here.index(node_group.mine)
    share = shards(flat.size, len(here), flat.itemsize)[me]
    # All ranks have the same signals, awaited or not, so that their counts agree.
    deposited, added = Signal(flags, here), Signal(flags, here if node_group.leads else ())
    sent, attempt = _sent(buffers, node_group), None
    across: list[list[Stage]] = [[sent], [sent]]  # of two alternating sums
    if node_group.leads and node_group.emulated:
        for slot, stages in enumerate(across):
            stages.append(codec.add([buffers.total(head, slot) for head in node_group.heads], buffers.result))
    elif node_group.leaders != MPI.COMM_NULL:
        attempt = Attempt(Native(lambda: node_group.leaders.Iallreduce(MPI.IN_PLACE, buffers.result, MPI.SUM)))
        across = [[sent, attempt], [sent, attempt]]
    head = buffers.timestamps(here[0], 1)
    when = (lambda: sent.arrived) if isinstance(sent, TimestampedSignal) else None
    # The first rank passes the time of arrival on, so that all ranks of its node report the same.
    arrived = TimestampedSignal(
        flags, () if node_group.leads else here[:1], head, [(head, 0.0)], now=when, raises=node_group.leads
    )
    runs = []
    for total, between in zip(buffers.totals, across):
        stages = [codec.deposit([(buffers.summands[me] if buffers.summands else total, flat)]), deposited]
        if buffers.summands:
            stages.append(codec.add([summand[share] for summand in buffers.summands], total[share]))
        stages += [added, *between, arrived, codec.copy_back([(flat, buffers.result)])]
        runs.append(stages if attempt is None else [*stages, Work([attempt.raise_fault])])
    # The background does everything except raising exceptions; otherwise the owner makes the first and the last copy.
    copies = 0 if method.in_background else 1
    operation = StagedOperation(*runs, first=copies, last=copies + (attempt is not None), queue=node_group.queue)
    # MPI may hold a copy of the total during its all-reduce.
    nbytes = buffers.nbytes + (flat.nbytes if attempt is not None else 0)
    return ReductionPlan(operation, progress, arrival=arrived, nbytes=nbytes, close=[buffers.block.free])


def _sent(buffers: _NodeBuffers, node_group: NodeGroup) -> Signal:
    """Return the signal that the node's total can be read. Between emulated nodes it arrives after the time of an
    all-reduce among them.
    """
    flags = buffers.block.flags
    # Only the first ranks of emulated nodes await each other: they read the totals of all nodes in shared memory.
    if node_group.network is None or not (node_group.leads and node_group.emulated):
        return Signal(flags, (), raises=node_group.leads)
    seconds = node_group.network.collective(Method(), len(node_group.heads), buffers.result.nbytes)
    sent = [(buffers.timestamps(rank, 0), seconds) for rank in node_group.heads]
    return TimestampedSignal(flags, node_group.heads, buffers.timestamps(node_group.mine, 0), sent)
