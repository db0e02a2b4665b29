"""What a rank does when it, or another one, is dead or does not move: messages and times, no sockets, no threads.

A rank that finds something wrong reports it upwards (:class:`~halograd.training.tree.Tree`), until the heads know:

- ``gone``: a connection ended without a word, its process was killed or its node is gone;
- ``stalled``: a rank has been at one place for longer than allowed;
- ``dying``: a rank has an error of its own and is about to end the job.

The first head acts: for ``stalled`` it asks all ranks where they are (``where``, ``place``), and finds who holds up the
others; it prints one message, announces the end to all ranks (``ending``), and ends the job. Every other head does the
same if the heads before it do nothing for `TURN` each. So a head that is stopped, or whose interpreter is locked by a
call, is found like any other rank: it does not say where it is. Ranks whose way to the heads is cut off end themselves
without a message.

Nothing is sent while all is well. Heartbeats would find a silent rank no earlier: a call may lock the interpreter for
as long as a rank may be at one place, and when that time is over the others ask.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

from .stall import Place, describe_stall
from .tree import Tree

__all__ = ["ANSWERS", "GRACE", "INTERVAL", "LAST", "TURN", "Station", "Watch"]

INTERVAL = 1.0  # between two looks [s]
ANSWERS = 3.0  # for ranks to say where they are [s]
TURN = 2.5  # for each head before this one to act [s]
LAST = 2.0  # until a rank ends itself when all is said [s]
GRACE = 8.0  # for a rank with an error of its own to end the job itself: the command line takes 5 of them [s]

Message = dict[str, Any]


class Station(Protocol):
    """What a rank can do."""

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank that this one is connected with."""

    def state(self) -> object:
        """Something that changes when the main thread moves; None as long as it is not watched."""

    def place(self, idle: float) -> Place:
        """Where the main thread is, and has been for `idle` [s]."""
        ...

    def say(self, rank: int, cause: str) -> None:
        """Print that the job ends because of a rank."""

    def log(self, rank: int, cause: str) -> None:
        """Append it to the log."""

    def end(self) -> None:
        """End the job."""

    def leave(self) -> None:
        """End this process."""


class Watch:
    """Decisions of one rank. Local; for one thread.

    Parameters
    ----------
    tree, joined
        The connections that are wanted, and per rank those that were made.
    rank
        This one.
    patience
        How long a rank may be at one place [s]; 0: for ever.
    station
        What is done with the decisions.
    clock
        Time [s]. Of the time between two calls at most `INTERVAL` counts: if it is longer the process was stopped, with
        the whole job perhaps (Slurm's suspend), or its interpreter was locked, and no other rank is to blame for it.
    """

    def __init__(
        self,
        tree: Tree,
        rank: int,
        joined: Sequence[Collection[int]],
        patience: float,
        station: Station,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.over = False  # the job is being ended
        self._tree, self._rank, self._joined, self._patience = tree, rank, joined, patience
        self._station, self._clock, self._ticked, self._now = station, clock, clock(), 0.0
        self._ups = [up for up in tree.ups(rank) if up in joined[rank]]
        self._downs = [down for down in tree.downs(rank) if down in joined[rank]]
        self._left: set[int] = set()  # have taken leave
        self._before: object = None
        self._since = self._complained = 0.0
        self._deadline = math.inf
        self._pending: list[tuple[float, Message]] = []  # reports, and when they came
        self._quiet = -math.inf  # until then another rank asks
        self._asker = rank
        self._awaited: set[int] | None = None  # ranks that have not said where they are; None: not asked
        self._until = 0.0
        self._places: dict[int, Place] = {}

    def tick(self) -> float:
        """Do what is due; return the time [s] until the next call at the latest."""
        now = self._advance()
        if now > self._deadline:
            self._station.leave()
        self._look(now)
        while not self.over and (due := [item for item in self._pending if item[0] + self._turn <= now]):
            self._pending.remove(due[0])
            self._act(due[0][1])
        if not self.over and self._awaited is not None and (not self._awaited or now >= self._until):
            self._conclude()
        times = [self._deadline, *(since + self._turn for since, _ in self._pending)]
        return max(0.0, min(INTERVAL, min(times) - now))

    def heard(self, sender: int, message: Message) -> None:
        """A message has come."""
        self._advance()
        kind = message["kind"]
        if kind == "ending":  # what ends from now on ends because of that
            self.over, self._deadline = True, min(self._deadline, self._now + message["within"])
            self._pass_down(message)
        elif kind == "where":
            self._answer(sender, message)
        elif kind == "place":
            self._note(sender, message)
        else:
            self._report(message, sender)

    def ended(self, rank: int, cause: str | None) -> None:
        """The connection to a rank ended, because of this; None if it has taken leave."""
        self._advance()
        for ranks in (self._ups, self._downs):
            if rank in ranks:
                ranks.remove(rank)
        if cause is None:
            self._left.add(rank)
        elif not self.over and rank in self._tree.ups(self._rank) and not self._tree.is_head(self._rank):
            self._announce(GRACE)  # others find it, too, and end the job; this rank cannot see them do so
        else:
            self._report({"kind": "gone", "rank": rank, "cause": cause})

    def dying(self, cause: str, logged: bool) -> None:
        """This rank is about to end the job, because of a fault of its own, and will hear nothing any more."""
        message = {"kind": "dying", "rank": self._rank, "cause": cause, "logged": logged}
        if self.over:
            return
        if self._ups:
            self._report(message)
            self._pass_down({"kind": "ending", "within": GRACE})
        else:
            self._act(message)

    # -- time ----------------------------------------------------------------------------------

    def _advance(self) -> float:
        ticked = self._clock()
        self._now += min(ticked - self._ticked, INTERVAL)
        self._ticked = ticked
        return self._now

    def _look(self, now: float) -> None:
        state = self._station.state()
        if state != self._before or state is None:
            self._before, self._since, self._complained = state, now, now
        elif self._patience and now - self._complained > self._patience:
            self._complained = now  # not again at once
            self._report({"kind": "stalled"})

    # -- reports -------------------------------------------------------------------------------

    @property
    def _turn(self) -> float:
        """How long a report waits until this rank acts on it [s]: the heads first, each for itself."""
        acts = self._tree.is_head(self._rank) or not self._ups
        return TURN * (len(self._ups) if acts else self._tree.fanout + 2)

    def _report(self, message: Message, sender: int | None = None) -> None:
        """Pass a report up, and keep it for the case that no rank acts on it."""
        known = any(message == other for _, other in self._pending)
        asked = message["kind"] == "stalled" and (self._now < self._quiet or self._awaited is not None)
        if self.over or known or asked:
            return
        self._pending.append((self._now, message))
        if sender is None or not self._tree.is_head(sender):  # a head has sent it to all heads before it
            for up in self._ups:
                self._station.send(up, message)

    def _act(self, message: Message) -> None:
        if self._ups and not self._tree.is_head(self._rank):
            self._announce(LAST)  # no head has answered: what lies between is frozen, and does not pass on the end
        elif message["kind"] == "stalled":
            self._ask()
        elif message["kind"] == "gone":
            self._end(message["rank"], message["cause"])
        else:
            self._announce(GRACE)
            if message["logged"]:
                self._station.log(message["rank"], message["cause"])

    # -- where all ranks are -------------------------------------------------------------------

    def _ask(self) -> None:
        self._places = {self._rank: self._station.place(self._now - self._since)}
        self._awaited = set(self._tree.reached(self._rank, self._joined, self._left)) - {self._rank}
        self._until = self._now + ANSWERS
        self._send_all({"kind": "where"})

    def _answer(self, sender: int, message: Message) -> None:
        if self._awaited is None or sender in self._ups:  # else this rank asks, and comes first
            self._awaited, self._asker, self._quiet = None, sender, self._now + 2 * ANSWERS
            self._pending = [item for item in self._pending if item[1]["kind"] != "stalled"]
            self._pass_down(message)
        place = self._station.place(self._now - self._since)
        left = sorted(self._left)
        self._station.send(sender, {"kind": "place", "rank": self._rank, "left": left, **place.as_dict()})

    def _note(self, sender: int, message: Message) -> None:
        if self._awaited is not None:
            self._places[message["rank"]] = Place.from_dict(message)
            self._left.update(message["left"])
            self._awaited -= {message["rank"], *message["left"]}
        elif self._asker not in (self._rank, sender):
            self._station.send(self._asker, message)

    def _conclude(self) -> None:
        reached = self._tree.reached(self._rank, self._joined, self._left)
        places = {rank: self._places.get(rank) for rank in reached}
        self._end(*describe_stall(self._tree.hosts, places, self._patience))

    # -- the end -------------------------------------------------------------------------------

    def _end(self, rank: int, cause: str) -> None:
        """Say which rank it was and why, and end the job."""
        self._station.say(rank, cause)
        self._announce(LAST)
        self._station.log(rank, cause)
        self._station.end()

    def _announce(self, within: float) -> None:
        """Announce to all ranks that the job is being ended, and that the message is out or will be.

        A rank that is still there after so many seconds ends itself: to abort ends the others only where the launcher
        sees to it.
        """
        self.over, self._deadline = True, self._now + within
        self._send_all({"kind": "ending", "within": within})

    def _send_all(self, message: Message) -> None:
        for rank in [*self._ups, *self._downs]:
            self._station.send(rank, message)

    def _pass_down(self, message: Message) -> None:
        children = self._tree.children(self._rank)
        for rank in [down for down in self._downs if down in children]:
            self._station.send(rank, message)
