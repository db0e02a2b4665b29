"""Sums within nodes in shared memory, then across nodes by one rank of each, made while the ranks compute."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
from mpi4py import MPI

from halograd.comm.counters import Meter
from halograd.comm.errors import CommError
from halograd.comm.reduction import Reduction
from halograd.comm.shard import shards
from halograd.comm.transports.accumulator import Accumulator, Pieces, Team
from halograd.comm.transports.arena import rounded
from halograd.comm.transports.base import ALIGNMENT
from halograd.comm.transports.places import Places

__all__ = ["Across", "EmulatedAcross", "MpiAcross", "NodeSum", "Room"]

STAMPS = 3 * ALIGNMENT  # [B]: when a sum was sent, for two sums in turn, and when it was there
NOTHING = Pieces(np.empty(0), ())


class Room:
    """The shared memory of one sum. Collective to make. ::

        first rank of a node   | stamps | total, ... | summand |
        other ranks            | stamps | summand |

    A rank that is alone on its node deposits into the total, and has no summand.

    Parameters
    ----------
    places
        Makes `Places` of so many bytes on this rank.
    totals
        Arrays beside its summand that the first rank of each node needs.
    """

    def __init__(self, places: Callable[[int], Places], team: Team, buffer: np.ndarray, totals: int) -> None:
        self._team, self._dtype, self._nbytes = team, buffer.dtype, buffer.nbytes
        self._totals, self._size = totals, rounded(buffer.nbytes)
        arrays = (len(team.here) > 1) + (totals if team.leads else 0)
        self._places = places(STAMPS + arrays * self._size)
        self.nbytes = arrays * buffer.nbytes
        self.give_back = self._places.give_back

    def stamp(self, rank: int, number: int) -> np.ndarray:
        """A float64 of one rank."""
        return self._places.view(rank, number * ALIGNMENT, 8).view(np.float64)

    def total(self, rank: int, number: int) -> np.ndarray:
        """A total of the first rank of a node, flat."""
        return self._places.view(rank, STAMPS + number * self._size, self._nbytes).view(self._dtype)

    def summand(self, rank: int) -> np.ndarray:
        """The summand of a rank of this node, flat."""
        before = self._totals * self._size if rank == self._team.here[0] else 0
        return self._places.view(rank, STAMPS + before, self._nbytes).view(self._dtype)


class Across:
    """The way to other nodes where there are none.

    Attributes
    ----------
    totals
        For two sums in turn where the node's total is made.
    result
        Where the sum over all nodes is.
    collections
        For two sums in turn what the first rank has to add up when the totals of the others are there.
    arrived
        Since when they are there (`time.perf_counter` [s]).
    """

    #: Arrays that the first rank of a node needs.
    totals_needed = 1

    def __init__(self, team: Team, room: Room) -> None:
        self.result = room.total(team.here[0], 0)
        self.totals: Sequence[np.ndarray] = (self.result, self.result)
        self.collections: Sequence[Pieces] = (NOTHING, NOTHING)
        self.arrived = 0.0

    @property
    def buffer_bytes(self) -> int:
        """Memory that the way takes inside MPI [B]."""
        return 0

    def send(self, turn: int) -> None:
        """Send the total of this turn, 0 or 1. On the first rank of a node; does not wait."""
        self.arrived = time.perf_counter()

    def there(self, turn: int, number: int) -> bool:
        """Whether all totals of this turn, of the sum of this number, are there. On the first rank of a node."""
        return True


class MpiAcross(Across):
    """A non-blocking all-reduce of MPI among the first ranks of the nodes (elsewhere `leaders` is COMM_NULL)."""

    def __init__(self, team: Team, room: Room, leaders: MPI.Comm) -> None:
        super().__init__(team, room)
        self._leaders = leaders
        self._request: MPI.Request = MPI.REQUEST_NULL

    @property
    def buffer_bytes(self) -> int:
        return self.result.nbytes if self._leaders != MPI.COMM_NULL else 0

    def send(self, turn: int) -> None:
        self._request = self._leaders.Iallreduce(MPI.IN_PLACE, self.result, MPI.SUM)

    def there(self, turn: int, number: int) -> bool:
        if not self._request.Test():
            return False
        self.arrived = time.perf_counter()
        return True


class EmulatedAcross(Across):
    """A ring all-reduce on the emulated network: the first ranks read the totals of all when they would be there.

    *Nothing is overwritten while it is read*: the total of sum n + 2 is made after all ranks of the node have finished
    sum n + 1, thus after all first ranks have sent sum n + 1; they did that after their nodes had finished sum n, for
    which they had read everything.
    """

    totals_needed = 3  # one per turn, and the result

    def __init__(self, team: Team, room: Room, seconds: float) -> None:
        super().__init__(team, room)
        lead = team.here[0]
        self.totals, self.result = [room.total(lead, turn) for turn in (0, 1)], room.total(lead, 2)
        if team.leads:
            self.collections = [Pieces(self.result, [room.total(h, turn) for h in team.heads]) for turn in (0, 1)]
        self._own = [room.stamp(team.mine, turn) for turn in (0, 1)]
        self._stamps = [[room.stamp(head, turn) for head in team.heads] for turn in (0, 1)]
        self._sent, self._seconds = team.sent, seconds

    def send(self, turn: int) -> None:
        self._own[turn][0] = time.perf_counter()

    def there(self, turn: int, number: int) -> bool:
        if not self._sent.reached(number):
            return False
        self.arrived = max(float(stamp[0]) for stamp in self._stamps[turn]) + self._seconds
        return time.perf_counter() >= self.arrived


class NodeSum(Reduction):
    """A sum that an :class:`Accumulator` makes.

    Parameters
    ----------
    across, within
        Book what goes to other nodes, and what goes through shared memory.
    way
        To the other nodes.
    in_background
        Whether the thread copies the buffer to shared memory and back; else `start` and `finish` do.

    Notes
    -----
    One summand per rank is enough: it is read before the node's total is sent, and written again after `finish`.
    The copies are plain ones here; with gradients on a device they go to its copy stream.
    """

    def __init__(
        self, buffer: np.ndarray, across: Meter, within: Meter, accumulator: Accumulator, room: Room, way: Across,
        in_background: bool,
    ) -> None:  # fmt: skip
        super().__init__(buffer, across)
        self._within, self._accumulator, self._room, self._way = within, accumulator, room, way
        self._in_background = in_background
        team, flat = accumulator.team, buffer.reshape(-1)
        summands = [room.summand(rank) for rank in team.here] if len(team.here) > 1 else []
        share = shards(flat.size, len(team.here), flat.itemsize)[team.here.index(team.mine)]
        targets = [room.summand(team.mine)] * 2 if summands else way.totals
        self._deposits = [Pieces(target, [flat]) for target in targets]
        self._additions = [Pieces(total[share], [s[share] for s in summands]) for total in way.totals]
        self._return = Pieces(flat, [way.result])
        self._arrival = room.stamp(team.here[0], 2)
        self._turn = 0
        self.number, self.done, self.fault = 0, True, None
        self.deposit = self.addition = self.collection = self.way_back = NOTHING

    number: int
    done: bool
    fault: Exception | None

    @property
    def buffer_bytes(self) -> int:
        return self._room.nbytes + self._way.buffer_bytes

    def _start(self) -> None:
        self._within.sent()
        turn = self._turn = 1 - self._turn
        self.deposit = self._deposits[turn]
        if self._in_background:
            self.way_back = self._return
        else:
            self.deposit.finish()
            self.deposit = NOTHING
        self.addition, self.collection = self._additions[turn], self._way.collections[turn]
        self._accumulator.submit(self)

    def send(self) -> None:
        """Send the node's total to the others. On the first rank of the node."""
        self._way.send(self._turn)

    def there(self) -> bool:
        """Whether the totals of the other nodes are there. On the first rank of the node."""
        if not self._way.there(self._turn, self.number):
            return False
        self._arrival[0] = self._way.arrived
        return True

    def _finish(self) -> float:
        self._accumulator.complete(self)
        fault, self.fault = self.fault, None
        if fault is not None:
            raise CommError(f"reduction {self._meter.name} of {self.buffer.nbytes} bytes failed: {fault}") from fault
        if not self._in_background:
            self._return.finish()
        return float(self._arrival[0])

    def _close(self) -> None:
        self._deposits.clear()
        self._additions.clear()
        self._room.give_back()
