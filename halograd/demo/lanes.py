"""Spans of a timeline arranged in lanes: arithmetic for the picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Bar", "read_bars", "typical_steps", "without"]

Interval = tuple[float, float]


@dataclass(frozen=True)
class Bar:
    """One span.

    Attributes
    ----------
    lane
        "compute", "wait", "I/O", "halo", "all-reduce" or "other": the row of the trace.
    kind
        "forward", "backward", "update", "wait", "io"; of a communication "halo", "allreduce", "statistics", ...
    begin, end
        Since the trace begins [ms].
    """

    rank: int
    lane: str
    kind: str
    begin: float
    end: float


def read_bars(path: Path) -> list[Bar]:
    """The spans of a Chrome trace that a run has written. Local."""
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    bars = []
    for e in events:
        if e["ph"] == "X":
            lane, kind = lanes[e["pid"], e["tid"]], e["cat"]
            if kind == "communication":  # a halo, or the all-reduce of gradients, of statistics, of the loss
                kind = e["name"].partition(":")[0]
            bars.append(Bar(e["pid"], lane, kind, 1e-3 * e["ts"], 1e-3 * (e["ts"] + e["dur"])))
    return bars


def typical_steps(bars: Sequence[Bar], count: int) -> Interval | None:
    """Begin and end of `count` steps in a row on rank 0 that took about as long as most did; None if there are fewer.

    A step ends with its update.
    """
    ends = np.sort([bar.end for bar in bars if bar.rank == 0 and bar.kind == "update"])
    if len(ends) <= count:
        return None
    durations = ends[count:] - ends[:-count]
    first = int(np.argmin(np.abs(durations - np.median(durations))))
    return float(ends[first]), float(ends[first + count])


def without(spans: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """What is left of the spans outside the holes; both in order and without overlaps.

    >>> without([(0, 10), (12, 14)], [(1, 2), (9, 13)])
    [(0, 1), (2, 9), (13, 14)]
    """
    left = []
    for begin, end in spans:
        for b, e in holes:
            if e <= begin or b >= end:
                continue
            if b > begin:
                left.append((begin, b))
            begin = max(begin, e)
        if begin < end:
            left.append((begin, end))
    return left
