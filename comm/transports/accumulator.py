"""Who adds up what the ranks of a node have in shared memory, piece by piece, while the ranks compute.

Every sum passes five stages, in the order in which sums were started, which is that of all ranks::

    every rank      deposit   its summand, in its part of shared memory
    every rank      add       its shard of all summands of the node            after all deposits on the node
    the first rank  send      the node's total to the first ranks of others    after all additions on the node
    the first rank  collect   their totals                                     when they are there
    every rank      return    the result to its buffer                         when the first rank has collected

The count of the last sum that has passed a stage lies in shared memory, one per rank: the numbers of sums are the same
on all ranks, so no sum needs flags of its own, and nobody ever waits for more than the sum at the head of a stage.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from halograd.comm.progress import Progress
from halograd.comm.transports.base import ALIGNMENT
from halograd.comm.transports.places import Places
from halograd.comm.transports.shared_sum import add_up

__all__ = ["TALLIES", "Accumulator", "Pieces", "Task", "Team"]

# Worked on at once [B]: fits the cache of a core, and whoever waits for the thread does not wait long.
PIECE = 256 * 1024
TALLIES = 4  # counts per rank, a cache line each

# As in `flags`: so many offers of the core, so many naps, then long naps.
OFFERS = 100
NAPS = 50
NAP, LONG_NAP = 1e-5, 2e-4  # [s]
PATIENCE = 1e-4  # [s] to wait for the other thread before looking whether the sum is done


class Pieces:
    """``target = source`` or ``target = source + source + ...``, a piece at a time. Local.

    Parameters
    ----------
    target, sources
        Flat arrays of the same length; no sources: nothing is to be done.
    """

    def __init__(self, target: np.ndarray, sources: Sequence[np.ndarray]) -> None:
        step = PIECE // target.itemsize
        starts = range(0, target.size, step) if sources else range(0)
        self._pieces = [(target[i : i + step], [source[i : i + step] for source in sources]) for i in starts]
        self._next = 0

    def advance(self) -> bool:
        """Do the next piece, if there is one; whether none is left. Then the first is next again."""
        if self._next < len(self._pieces):
            target, sources = self._pieces[self._next]
            if len(sources) == 1:
                np.copyto(target, sources[0])
            else:
                add_up(sources, target)
            self._next += 1
        if self._next < len(self._pieces):
            return False
        self._next = 0
        return True

    def finish(self) -> None:
        """Do all that are left."""
        while not self.advance():
            pass


class Task(Protocol):
    """A sum on its way through the stages."""

    number: int
    done: bool
    fault: Exception | None
    deposit: Pieces
    addition: Pieces
    collection: Pieces
    way_back: Pieces

    def send(self) -> None:
        """Send the total of the node to the others, if there are any. Does not wait."""

    def there(self) -> bool:
        """Whether the totals of the other nodes are there."""


class Tally:
    """One count per rank in shared memory; a rank raises its own and looks at those of some."""

    def __init__(self, places: Places, line: int, ranks: Sequence[int]) -> None:
        views: list[Any] = [view.view(np.int64) for view in places.views(line * ALIGNMENT, 8)]
        counts = [memoryview(view) for view in views]
        self._own, self._all, self._sync = counts[places.mine], [counts[rank] for rank in ranks], places.sync

    def raise_to(self, count: int) -> None:
        """This rank has come to `count`; what it wrote before is seen by whoever has seen this."""
        self._sync()
        self._own[0] = count

    def reached(self, count: int) -> bool:
        """Whether all have come to `count`. Does not wait."""
        for one in self._all:
            if one[0] < count:
                return False
        self._sync()
        return True


class Team:
    """Who adds up together.

    Parameters
    ----------
    places
        Of `TALLIES` cache lines, zeroed.
    here
        Those ranks of `places` that form the node of this one, in order.
    heads
        The first ranks of all nodes, as far as they share memory (on an emulated network), else that of this one.
    """

    def __init__(self, places: Places, here: Sequence[int], heads: Sequence[int]) -> None:
        self.places, self.here, self.heads = places, tuple(here), tuple(heads)
        self.mine = places.mine
        self.leads = self.mine == self.here[0]
        self.deposited, self.added = Tally(places, 0, here), Tally(places, 1, here)
        self.sent, self.arrived = Tally(places, 2, heads), Tally(places, 3, here[:1])


class _Stage:
    """Sums that wait for the same to be done; only the first is looked at."""

    def __init__(
        self, ready: Callable[[Task], bool], pieces: Callable[[Task], Pieces | None], then: Callable[[Task], None]
    ) -> None:
        self.waiting: deque[Task] = deque()
        self._ready, self._pieces, self._then = ready, pieces, then

    def advance(self) -> bool:
        """Do a piece for the first, if it is ready; whether something was done."""
        if not self.waiting:
            return False
        task = self.waiting[0]
        if not self._ready(task):
            return False
        pieces = self._pieces(task)
        if pieces is None or task.fault is not None or pieces.advance():
            self.waiting.popleft()
            self._then(task)
        return True


class Accumulator:
    """Drives the sums of one communicator through their stages; a `Worker` of the progress thread.

    Every rank has one. It is advanced by the progress thread, and by the main thread while that waits for a sum: a lock
    keeps them apart, and who does not get it does something else.
    """

    def __init__(self, team: Team, progress: Progress) -> None:
        self.team, self._progress = team, progress
        self._lock = threading.Lock()
        self._count = 0
        self._returning = _Stage(lambda t: team.arrived.reached(t.number), lambda t: t.way_back, self._end)
        self._collecting = _Stage(self._there, lambda t: t.collection, lambda t: team.arrived.raise_to(t.number))
        self._sending = _Stage(lambda t: team.added.reached(t.number), lambda t: None, self._send)
        self._adding = _Stage(
            lambda t: team.deposited.reached(t.number),
            lambda t: t.addition,
            lambda t: team.added.raise_to(t.number),
        )
        self._depositing = _Stage(lambda t: True, lambda t: t.deposit, lambda t: team.deposited.raise_to(t.number))
        # What is nearest to its end goes first.
        self._stages = (self._returning, self._collecting, self._sending, self._adding, self._depositing)

    def submit(self, task: Task) -> None:
        """A sum begins. Does not wait."""
        self._count += 1
        task.number, task.done, task.fault = self._count, False, None
        # Back to front: the thread may be at work, and finds the sum in the stage that comes next.
        self._returning.waiting.append(task)
        if self.team.leads:
            self._sending.waiting.append(task)
        self._adding.waiting.append(task)
        self._depositing.waiting.append(task)
        self._progress.employ(self)

    @property
    def idle(self) -> bool:
        """Whether all sums have passed all stages."""
        return not any(stage.waiting for stage in self._stages)

    def advance(self) -> bool:
        """Do a piece of the first sum that is ready for its next stage; False if there is none."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._advance()
        finally:
            self._lock.release()

    def complete(self, task: Task) -> None:
        """Return when a sum has passed all stages, driving it (and those before it) meanwhile."""
        unsuccessful = 0
        while not task.done:
            if not self._lock.acquire(timeout=PATIENCE):
                continue  # the thread does a piece, and then perhaps another
            try:
                unsuccessful = 0 if self._advance() else unsuccessful + 1
            finally:
                self._lock.release()
            if unsuccessful:
                _rest(unsuccessful)

    def _advance(self) -> bool:
        return any(stage.advance() for stage in self._stages)

    def _send(self, task: Task) -> None:
        try:
            task.send()
        except Exception as fault:  # raised by whoever waits for the sum; the other ranks of the node go on
            task.fault = fault
        self.team.sent.raise_to(task.number)
        self._collecting.waiting.append(task)

    def _there(self, task: Task) -> bool:
        try:
            return task.there()
        except Exception as fault:
            task.fault = fault
            return True

    def _end(self, task: Task) -> None:
        task.done = True


def _rest(unsuccessful: int) -> None:
    """Wait a little before looking again, longer when that was in vain many times."""
    if unsuccessful < OFFERS:
        os.sched_yield()
    else:
        time.sleep(NAP if unsuccessful < OFFERS + NAPS else LONG_NAP)
