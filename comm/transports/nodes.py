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

from ..progress import Line, Progress, Stage, StagedOperation, Work
from ..reduction import Plain, ReductionPlan
from ..sums import Method, shards
from ..transport import Emulated
from .base import ALIGNMENT
from .emulated import Stamped, Stamps
from .memory import Places, Planning, Signal, rounded
from .mpi import Native

__all__ = ["Attempt", "Team", "plan_by_nodes"]

STAMPS = 4 * ALIGNMENT  # [B]: send times and arrival times, each for two sums that alternate


@dataclass(frozen=True)
class Team:
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
    line
        Queue of all hierarchical sums of a communicator.
    """

    mine: int
    here: Sequence[int]
    heads: Sequence[int]
    leaders: MPI.Comm = field(default_factory=lambda: MPI.COMM_NULL)
    network: Emulated | None = None
    line: Line = field(default_factory=Line)

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
            return True

    def settle(self) -> None:
        """Raise the kept exception once."""
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault


class _Room:
    """The shared memory of one sum; `lie` creates the views.

    ::

        first rank of a node   | stamps | total, ... | summand |
        other ranks            | stamps | summand |

    A rank that is alone on its node deposits into the total, and has no summand. One summand per rank is enough: it is
    read before the node's total is sent, and written again after `finish`. Between emulated nodes there are totals for
    two alternating sums, and the result. A total is safe to overwrite: the total of sum n + 2 is made after all ranks
    of the node have finished sum n + 1, so all first ranks have sent sum n + 1. They sent it after their nodes had
    finished sum n, and had then read everything of sum n.
    """

    def __init__(self, team: Team, flat: np.ndarray) -> None:
        self._team, self._flat, self._size = team, flat, rounded(flat.nbytes)
        self._totals = 3 if team.emulated else 1
        arrays = (len(team.here) > 1) + (self._totals if team.leads else 0)
        #: Bytes of shared memory that this rank needs, and the part of them that it reports as buffers [B].
        self.wanted, self.nbytes = STAMPS + arrays * self._size, arrays * flat.nbytes

    def lie(self, places: Places) -> None:
        """Create the views into the shared memory."""
        self.places, team = places, self._team
        self.result = self.total(team.here[0], 2 if team.emulated else 0)
        self.totals = [self.total(team.here[0], turn) if team.emulated else self.result for turn in (0, 1)]
        several = len(team.here) > 1
        self.summands = [self._array(r, self._totals if r == team.here[0] else 0) for r in team.here if several]

    def stamps(self, rank: int, pair: int) -> Stamps:
        """Return the timestamps of a rank: of its sends (pair 0), or of the arrivals (pair 1)."""
        first, second = (self.places.view(rank, (2 * pair + i) * ALIGNMENT, 8, np.float64) for i in range(2))
        return first, second

    def total(self, rank: int, number: int) -> np.ndarray:
        """Return the array of total `number` of the first rank of a node."""
        return self._array(rank, number)

    def _array(self, rank: int, number: int) -> np.ndarray:
        return self.places.view(rank, STAMPS + number * self._size, self._flat.nbytes, self._flat.dtype)


def plan_by_nodes(flat: np.ndarray, method: Method, team: Team, progress: Progress) -> Planning:
    """Return the plan of the hierarchical sum of a flat, non-empty buffer over several ranks."""
    room, here, codec = _Room(team, flat), team.here, Plain()
    places = yield room.wanted
    room.lie(places)
    flags, me = room.places.flags, here.index(team.mine)
    share = shards(flat.size, len(here), flat.itemsize)[me]
    # All ranks have the same signals, awaited or not, so that their counts agree.
    deposited, added = Signal(flags, here), Signal(flags, here if team.leads else ())
    sent, attempt = _sent(room, team), None
    across: list[list[Stage]] = [[sent], [sent]]
    if team.leads and team.emulated:
        for turn, stages in enumerate(across):
            stages.append(codec.add([room.total(head, turn) for head in team.heads], room.result))
    elif team.leaders != MPI.COMM_NULL:
        attempt = Attempt(Native(lambda: team.leaders.Iallreduce(MPI.IN_PLACE, room.result, MPI.SUM)))
        across = [[sent, attempt], [sent, attempt]]
    head = room.stamps(here[0], 1)
    when = (lambda: sent.arrived) if isinstance(sent, Stamped) else None
    arrived = Stamped(flags, () if team.leads else here[:1], head, [(head, 0.0)], now=when, raises=team.leads)
    turns = []
    for total, between in zip(room.totals, across):
        stages = [codec.deposit([(room.summands[me] if room.summands else total, flat)]), deposited]
        if room.summands:
            stages.append(codec.add([one[share] for one in room.summands], total[share]))
        stages += [added, *between, arrived, codec.give_back([(flat, room.result)])]
        turns.append(stages if attempt is None else [*stages, Work([attempt.settle])])
    # The background does everything except raising exceptions; otherwise the owner makes the first and the last copy.
    copies = 0 if method.in_background else 1
    operation = StagedOperation(*turns, first=copies, last=copies + (attempt is not None), line=team.line)
    nbytes = room.nbytes + (flat.nbytes if attempt is not None else 0)
    return ReductionPlan(operation, progress, arrival=arrived, nbytes=nbytes, close=[room.places.give_back])


def _sent(room: _Room, team: Team) -> Signal:
    """Return the signal that the node's total can be read. Between emulated nodes it arrives after the time of a ring.
    """
    flags = room.places.flags
    if team.network is None or not (team.leads and team.emulated):
        return Signal(flags, (), raises=team.leads)
    seconds = team.network.collective(Method(), len(team.heads), room.result.nbytes)
    stamps = [(room.stamps(rank, 0), seconds) for rank in team.heads]
    return Stamped(flags, team.heads, room.stamps(team.mine, 0), stamps)
