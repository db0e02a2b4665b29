"""One step in time: backward, the all-reduces behind it, and the next forward that waits for them.

All-reduces are overlapped greedily (Dryden et al. 2019, Section V-B): one at a time, in the order in which backward
completes their buckets, behind the rest of backward and, because the runtime waits for a bucket only when its first
parameter is needed again, behind the next forward::

    compute    | backward .......................| forward of the next step ...|
    network        | bucket 0 | bucket 1 |    | bucket 2 |
                                                    ^ waits here if bucket 2 is late

A step lasts from the beginning of one backward to that of the next. The emulated network differs: there all sums
under way travel at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from halograd.perfmodel.cost.layer_cost import LayerCost
from halograd.perfmodel.cost.parameters import Bucket

__all__ = ["Reduction", "Timeline", "run_step"]


@dataclass(frozen=True)
class Reduction:
    """One bucket's sum.

    Attributes
    ----------
    bucket
        What is summed.
    seconds
        How long it takes [s].
    update
        How long the optimizer takes behind it [s].
    work
        The part of `seconds` that is done where the sum is waited for, and not behind computation [s].
    """

    bucket: Bucket
    seconds: float
    update: float
    work: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """What a step takes [s].

    Attributes
    ----------
    seconds
        The whole step.
    forward, backward
        The two passes, without waiting for sums of gradients and without updates.
    waits
        Per bucket, what computation waited for it.
    update
        The optimizer.
    """

    seconds: float
    forward: float
    backward: float
    waits: tuple[float, ...]
    update: float


def run_step(
    names: Sequence[str],
    costs: Sequence[LayerCost],
    reductions: Sequence[Reduction],
    concurrent: bool = False,
    barrier: bool = False,
) -> Timeline:
    """A step in its steady state.

    Parameters
    ----------
    names, costs
        Stages in order of computation.
    reductions
        Buckets in the order in which backward completes them.
    concurrent
        All sums travel at the same time (the emulated network).
    barrier
        Nothing is overlapped with the next forward: all sums end, and all parameters are updated, before it begins.
    """
    buckets_of: dict[str, list[int]] = {}
    for i, reduction in enumerate(reductions):
        for name in reduction.bucket.layers:
            buckets_of.setdefault(name, []).append(i)
    missing = [len(r.bucket.layers) for r in reductions]
    started: list[int] = []
    ready = [0.0] * len(reductions)
    now = 0.0
    for name, cost in zip(reversed(names), reversed(costs)):
        now += cost.backward_seconds
        for i in buckets_of.get(name, ()):
            missing[i] -= 1
            if not missing[i]:
                ready[i] = now
                started.append(i)
    backward = now
    ends = _ends(reductions, started, ready, concurrent)
    waits = [0.0] * len(reductions)
    due = set(started)
    if barrier:
        for i in started:
            now = _complete(i, now, ends, waits, reductions)
        due.clear()
    forward = 0.0
    for name, cost in zip(names, costs):
        for i in due.intersection(buckets_of.get(name, ())):
            due.discard(i)
            now = _complete(i, now, ends, waits, reductions)
        now += cost.forward_seconds
        forward += cost.forward_seconds
    return Timeline(now, forward, backward, tuple(waits), sum(r.update for r in reductions))


def _ends(
    reductions: Sequence[Reduction], started: Sequence[int], ready: Sequence[float], concurrent: bool
) -> list[float]:
    """When every sum is done."""
    ends, free = [0.0] * len(reductions), 0.0
    for i in started:
        begin = ready[i] if concurrent else max(free, ready[i])
        ends[i] = free = begin + reductions[i].seconds - reductions[i].work
    return ends


def _complete(
    i: int, now: float, ends: Sequence[float], waits: list[float], reductions: Sequence[Reduction]
) -> float:
    """Wait for a bucket and update it; the time afterwards."""
    waits[i] = max(0.0, ends[i] - now) + reductions[i].work
    return now + waits[i] + reductions[i].update
