"""Contest on one problem: a check that all contestants train the same network, and times of their steps, in turn."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.contestants import Contestant, Entry, EntryError
from benchmarks.machine import Load, Usage, cpu_seconds

__all__ = ["Outcome", "Settings", "Times", "run"]

#: Largest permitted relative difference between the losses of the first steps.
TOLERANCE = 1e-3  # for contestants of equal precision; others have their own
CHECKED = 3


@dataclass(frozen=True)
class Settings:
    """Settings of a contest: duration and number of rounds.

    Attributes
    ----------
    block
        Seconds that a contestant runs before the next one.
    rounds
        Largest number of rounds; in each, all contestants run in one order and then in the reverse order.
    budget
        Approximate limit of seconds per problem; at least two rounds are run.
    """

    block: float = 0.4
    rounds: int = 12
    budget: float = 240.0


@dataclass
class Times:
    """Wall times of one contestant's steps [s], and page faults per step."""

    title: str
    about: str
    seconds: list[float] = field(default_factory=list)
    faults: float = 0.0

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """First and third quartile of the step times [s]."""
        if len(self.seconds) < 2:
            return self.best, self.best
        first, _, last = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, last


@dataclass
class Outcome:
    """Results of a problem: times by contestant, losses of the first steps, and CPU usage in each block."""

    problem: str
    times: dict[str, Times]
    losses: dict[str, list[float]]
    usage: list[Usage] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """Return the outcome as plain data, for JSON."""
        return asdict(self)


def run(
    problem: str,
    entries: Sequence[Entry],
    settings: Settings,
    report: Callable[[str], None],
    spec: Mapping[str, Any] | None = None,
) -> Outcome:
    """Time the entries on one problem.

    Raises
    ------
    EntryError
        If a contestant fails, or its losses differ from those of other contestants.
    """
    with ExitStack() as stack:
        contestants = [stack.enter_context(Contestant(e, problem, spec)) for e in entries]
        for contestant in contestants:
            contestant.ready()
            report(f"  ready: {contestant.about}")
        losses = {c.entry.name: c.command("losses", CHECKED)[0]["losses"] for c in contestants}
        check_losses(losses, {e.name: e.tolerance for e in entries})
        outcome = Outcome(problem, {c.entry.name: Times(c.entry.title, c.about) for c in contestants}, losses)
        _time(contestants, settings, outcome)
    return outcome


def check_losses(losses: Mapping[str, Sequence[float]], tolerances: Mapping[str, float] | None = None) -> None:
    """Check that contestants train the same network; `tolerances` by name, else `TOLERANCE`.

    Raises
    ------
    EntryError
        If losses differ from those of the first contestant by more than the tolerance, or change so little that a wrong
        update would not be detected.
    """
    (reference, expected), *others = losses.items()
    if not all(math.isfinite(v) for v in expected):
        raise EntryError(f"{reference}: expected finite losses, got {expected}")
    if abs(expected[-1] - expected[0]) < 3 * TOLERANCE * abs(expected[0]):
        raise EntryError(f"{reference}: the losses {expected} hardly change; choose a larger learning rate")
    for name, own_losses in others:
        errors = [abs(a - b) / abs(b) for a, b in zip(own_losses, expected)]
        allowed = (tolerances or {}).get(name, TOLERANCE)
        if not all(e <= allowed for e in errors):  # false for NaN
            raise EntryError(
                f"{name}: losses of the first steps {own_losses} differ from {reference}'s {expected} by "
                f"{max(errors):.1e} (allowed are {allowed:.0e}): they do not train one network, so nothing is timed"
            )


def _time(contestants: Sequence[Contestant], settings: Settings, outcome: Outcome) -> None:
    counts = {c.entry.name: _count(c, settings.block) for c in contestants}
    spent, done = 0.0, 0
    while done < settings.rounds and (done < 2 or spent * (done + 1) / done <= settings.budget):
        # Both orders: an advantage of a position in one order is a disadvantage in the other.
        for contestant in [*contestants, *reversed(contestants)]:
            usage = _block(contestant, contestants, counts[contestant.entry.name], outcome)
            spent += usage.seconds
        done += 1


def _count(contestant: Contestant, block: float) -> int:
    """Return the number of steps that fill a block. Steps are warm already, after the comparison of losses."""
    seconds = min(_seconds(contestant.command("measure", 1)))
    if seconds < block:
        seconds = min(_seconds(contestant.command("measure", 3)))
    return max(1, min(200, round(block / max(seconds, 1e-6))))


def _seconds(replies: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return the time of each step on the slowest rank [s]."""
    return [max(times) for times in zip(*(r["seconds"] for r in replies))]


def _block(contestant: Contestant, everybody: Sequence[Contestant], count: int, outcome: Outcome) -> Usage:
    idle = [c for c in everybody if c is not contestant]
    load = Load()
    before = [c.cpu_seconds() for c in idle], contestant.cpu_seconds(), _own()
    start = _wall()
    replies = contestant.command("measure", count)
    seconds = _wall() - start
    busy, stolen = load.since()
    idle_used = sum(c.cpu_seconds() - b for c, b in zip(idle, before[0]))
    others = busy - idle_used - (contestant.cpu_seconds() - before[1]) - (_own() - before[2])
    if not all(math.isfinite(v) for v in replies[0]["losses"]):
        raise EntryError(f"{contestant.entry.name}: the loss became {replies[0]['losses'][-1]} while it was timed")
    times = outcome.times[contestant.entry.name]
    times.seconds += _seconds(replies)
    times.faults = max(r["faults"] for r in replies)
    usage = Usage(seconds, idle_used / seconds, max(0.0, others) / seconds, stolen / seconds)
    outcome.usage.append(usage)
    return usage


def _own() -> float:
    return cpu_seconds([os.getpid()])


_wall = time.perf_counter
