"""Protocol of the watchdog: the actions of a rank when a rank is dead or makes no progress. No sockets, no threads.

A rank that detects a fault reports it up the tree (:class:`Tree`) until the heads have it:

- ``gone``: a connection ended without notice; its process was killed or its node failed;
- ``stalled``: a rank has made no progress for longer than allowed;
- ``dying``: a rank has an error of its own and is about to end the job.

The first head acts. For ``stalled`` it requests the position of every rank (``where``, ``place``) and determines the
rank that blocks the other ranks. It prints one message, announces the end to all ranks (``ending``), and ends the job.
Every other head does the same if the heads before it do nothing for `TURN` each. So a head that is stopped, or whose
interpreter is locked by a call, is detected like any other rank: it does not respond. Ranks that are cut off from the
heads end themselves without a message.

In normal operation no message is sent. Heartbeats would not detect a silent rank earlier: a call may lock the
interpreter for as long as a rank may be without progress, and after that time the heads send requests anyway.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

__all__ = ["Message", "Place", "Pulse", "Station", "Tree", "Watch", "describe_stall"]

SHOWN = 4  # maximum number of ranks that a message names
FANOUT = 16
INTERVAL = 1.0  # time between two readings of the main thread's state [s]
ANSWERS = 3.0  # time limit for ranks to send their place [s]
TURN = 2.5  # time for each head before this one to act [s]
LAST = 2.0  # time until a rank ends itself after the message is printed [s]
GRACE = 8.0  # time for a rank with an error of its own to end the job; the command line uses 5 s of it [s]

Message = dict[str, Any]


@dataclass(slots=True)
class Pulse:
    """Progress of the main thread: the main thread writes it, the thread of the watchdog reads it. Local.

    A write is one store per attribute: no lock, no system call, no array. A reader may get a new phase with the old
    layer, once.

    Attributes
    ----------
    step
        Number of updates.
    count
        Number of forward and backward passes, including validation.
    phase
        ``"forward"``, ``"backward"``, ``"data"``, ``"checkpoint"``, ...
    place
        Name of the layer, or of another activity.
    """

    step: int = 0
    count: int = 0
    phase: str = "start"
    place: str = ""

    def at(self, phase: str, place: str) -> None:
        """Record the start of an activity of the main thread: its phase, and its layer or another name."""
        self.phase, self.place = phase, place

    def state(self) -> tuple[int, int, str, str]:
        """Return all attributes, to compare them with an earlier state."""
        return self.step, self.count, self.phase, self.place


@dataclass(frozen=True)
class Place:
    """Position of a rank in the program.

    Attributes
    ----------
    step, phase, layer
        Number of updates; ``"forward"``, ``"backward"``, ``"data"``, ...; name of the layer, empty outside of layers.
    waiting
        ``"kind: name"`` of the exchange or sum that the rank waits for; empty if it does not wait.
    line
        Line of code that its main thread executes.
    idle
        Time since the last progress [s].
    """

    step: int
    phase: str
    layer: str
    waiting: str
    line: str
    idle: float

    def text(self) -> str:
        """Return a text that describes the position."""
        where = f"step {self.step + 1}, {self.phase}" + (f" of layer {self.layer!r}" if self.layer else "")
        waits = f", waiting for {self.waiting!r}" if self.waiting else ", not in an exchange"
        return f"{where}{waits} (at {self.line})"


def describe_stall(hosts: Sequence[str], places: Mapping[int, Place | None], patience: float) -> tuple[int, str]:
    """Return the rank that blocks the other ranks, and a text with the reason.

    It is the first rank that did not respond; else the rank that is in no exchange; else the rank with the least
    progress.

    Parameters
    ----------
    hosts
        Name of the host, per rank.
    places
        Position in the program, by rank; None for a rank that did not respond. Ranks that forward messages precede the
        ranks that they reach.
    patience
        Maximum time without progress [s].
    """
    behind = [(rank, place) for rank, place in sorted(places.items()) if place is not None]
    mute = [rank for rank, place in places.items() if place is None]
    for_how_long = f"no progress for {patience / 60:.3g} min"
    if mute:
        culprit = mute[0]
        text = f"{for_how_long}: it does not respond (stopped, in a call that locks the interpreter, or its node hangs)"
    else:
        culprit, place = min(behind, key=lambda item: (bool(item[1].waiting), item[1].step, -item[1].idle))
        text = f"{for_how_long}: {place.text()}"
    others = [f"rank {r} on {hosts[r]}: {p.text()}" for r, p in behind if r != culprit]
    if others:
        more = f"; and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        text += f". The others: {'; '.join(others[:SHOWN])}{more}"
    return culprit, text


class Tree:
    r"""Topology of the connections between the ranks of a job. Pure arithmetic.

    Ranks have positions: the first rank of every host, then all others. The first ``fanout + 1`` ranks are *heads*,
    each of which is connected with all other heads; every later rank is connected with its parent. With ``fanout =
    2``::

        position       0 ------ 1 ------ 2       heads: 0 and 2 are connected too
                      / \      / \      / \
                     3   4    5   6    7   8
                    / \  :
                   9  10

    A rank has at most ``2 * fanout`` connections, for any number of ranks. Rank 0 is the first head, and ends the job
    after a fault; if it cannot, the next head does.

    Parameters
    ----------
    hosts
        Name of the host of every rank.
    fanout
        Children per rank; the number of heads is one more.

    Attributes
    ----------
    order
        Ranks by position. Heads are on as many hosts as possible, so that the failure of a node ends few of them.
    """

    def __init__(self, hosts: Sequence[str], fanout: int = FANOUT) -> None:
        first: dict[str, int] = {}
        for rank, host in enumerate(hosts):
            first.setdefault(host, rank)
        self.hosts, self.fanout = hosts, fanout
        self.order = sorted(range(len(hosts)), key=lambda rank: first[hosts[rank]] != rank)
        self._positions = {rank: position for position, rank in enumerate(self.order)}

    def is_head(self, rank: int) -> bool:
        """Return whether a rank is connected with all heads."""
        return self._positions[rank] <= self.fanout

    def ups(self, rank: int) -> list[int]:
        """Return the ranks that a rank reports to: all heads before it, or its parent."""
        position = self._positions[rank]
        if position <= self.fanout:
            return self.order[:position]
        return [self.order[(position - 1) // self.fanout - 1]]

    def children(self, rank: int) -> list[int]:
        """Return the ranks whose parent is `rank`."""
        first = (self._positions[rank] + 1) * self.fanout + 1
        return self.order[first : first + self.fanout]

    def downs(self, rank: int) -> list[int]:
        """Return the ranks that report to a rank: all heads after it, and its children."""
        later = self.order[self._positions[rank] + 1 : self.fanout + 1]
        return [*later, *self.children(rank)]

    def reached(self, rank: int, joined: Sequence[Collection[int]], without: Collection[int] = ()) -> list[int]:
        """Return the ranks that messages of `rank` reach, itself included, by position.

        Parameters
        ----------
        joined
            Ranks that each rank has a connection with.
        without
            Ranks that forward no messages.
        """
        found, edge = {rank}, [rank]
        while edge:
            beyond = {other for one in edge for other in joined[one]}.difference(found, without)
            found |= beyond
            edge = list(beyond)
        return sorted(found, key=self._positions.__getitem__)


class Station(Protocol):
    """Protocol of the actions that a :class:`Watch` requires of its rank."""

    def send(self, rank: int, message: Message) -> None:
        """Send a message to a rank that is connected with this one."""

    def state(self) -> object:
        """Return a value that changes when the main thread makes progress; None while it is not watched."""

    def place(self, idle: float) -> Place:
        """Return the position of the main thread, which has made no progress for `idle` [s]."""
        ...

    def say(self, rank: int, cause: str) -> None:
        """Print that the job ends because of a rank."""

    def log(self, rank: int, cause: str) -> None:
        """Append the message to the log."""

    def end(self) -> None:
        """End the job."""

    def leave(self) -> None:
        """End this process."""


class Watch:
    """Decisions of one rank in the watchdog protocol. Local; for one thread.

    Parameters
    ----------
    tree, joined
        The planned connections, and the established ones per rank.
    rank
        Rank of this process.
    patience
        Maximum time without progress [s]; 0: no limit.
    station
        Executor of the decisions.
    clock
        Function that returns the time [s]. At most `INTERVAL` is counted between two calls: if more time has passed,
        the process was stopped, perhaps with the whole job (Slurm's suspend), or its interpreter was locked, and no
        other rank is the cause.
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
        self._left: set[int] = set()  # ranks that closed their connection regularly
        self._before: object = None
        self._since = self._complained = 0.0
        self._deadline = math.inf
        self._pending: list[tuple[float, Message]] = []  # reports, and the time of arrival
        self._quiet = -math.inf  # until then another rank requests places
        self._asker = rank
        self._awaited: set[int] | None = None  # ranks whose place is still missing; None: no request is open
        self._until = 0.0
        self._places: dict[int, Place] = {}

    def tick(self) -> float:
        """Execute actions that are due; return the longest time until the next call [s]."""
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
        """Process a message from another rank."""
        self._advance()
        kind = message["kind"]
        if kind == "ending":  # ranks that end from now on end for this reason
            self.over, self._deadline = True, min(self._deadline, self._now + message["within"])
            self._pass_down(message)
        elif kind == "where":
            self._answer(sender, message)
        elif kind == "place":
            self._note(sender, message)
        else:
            self._report(message, sender)

    def ended(self, rank: int, cause: str | None) -> None:
        """Process the end of the connection to a rank; `cause` is None if the rank announced its end."""
        self._advance()
        for ranks in (self._ups, self._downs):
            if rank in ranks:
                ranks.remove(rank)
        if cause is None:
            self._left.add(rank)
        elif not self.over and rank in self._tree.ups(self._rank) and not self._tree.is_head(self._rank):
            self._announce(GRACE)  # others detect it too and end the job, out of reach of this rank
        else:
            self._report({"kind": "gone", "rank": rank, "cause": cause})

    def dying(self, cause: str, logged: bool) -> None:
        """Announce that this rank ends the job because of its own fault; it processes no more messages."""
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
        """Time that a report waits until this rank acts on it [s]: heads act first, one after another."""
        acts = self._tree.is_head(self._rank) or not self._ups
        return TURN * (len(self._ups) if acts else self._tree.fanout + 2)

    def _report(self, message: Message, sender: int | None = None) -> None:
        """Send a report up, and keep it in case no rank acts on it."""
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
            self._announce(LAST)  # no head has responded: a rank in between is frozen and does not forward the end
        elif message["kind"] == "stalled":
            self._ask()
        elif message["kind"] == "gone":
            self._end(message["rank"], message["cause"])
        else:
            self._announce(GRACE)
            if message["logged"]:
                self._station.log(message["rank"], message["cause"])

    # -- places of all ranks --------------------------------------------------------------------

    def _ask(self) -> None:
        self._places = {self._rank: self._station.place(self._now - self._since)}
        self._awaited = set(self._tree.reached(self._rank, self._joined, self._left)) - {self._rank}
        self._until = self._now + ANSWERS
        self._send_all({"kind": "where"})

    def _answer(self, sender: int, message: Message) -> None:
        if self._awaited is None or sender in self._ups:  # otherwise this rank's own request has priority
            self._awaited, self._asker, self._quiet = None, sender, self._now + 2 * ANSWERS
            self._pending = [item for item in self._pending if item[1]["kind"] != "stalled"]
            self._pass_down(message)
        place = self._station.place(self._now - self._since)
        left = sorted(self._left)
        self._station.send(sender, {"kind": "place", "rank": self._rank, "left": left, "place": asdict(place)})

    def _note(self, sender: int, message: Message) -> None:
        if self._awaited is not None:
            self._places[message["rank"]] = Place(**message["place"])
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
        """Report the rank and the cause, and end the job."""
        self._station.say(rank, cause)
        self._announce(LAST)
        self._station.log(rank, cause)
        self._station.end()

    def _announce(self, within: float) -> None:
        """Announce to all ranks that the job ends and that this rank prints the message.

        A rank that still runs after `within` [s] ends itself: MPI_Abort ends the other ranks only if the launcher does.
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
