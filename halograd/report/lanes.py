"""Spans of a timeline arranged in lanes: arithmetic for the picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

__all__ = ["Bar", "read_bars", "step_begins", "typical_steps", "without"]

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


def step_begins(bars: Sequence[Bar], rank: int) -> list[float]:
    """When each step of a rank began: with its first forward. (Updates may lie within the forward of the next.)"""
    mine = sorted((b for b in bars if b.rank == rank and b.kind in ("forward", "backward")), key=lambda b: b.begin)
    before = ["backward", *(bar.kind for bar in mine)]
    return [bar.begin for kind, bar in zip(before, mine) if kind == "backward" and bar.kind == "forward"]


def typical_steps(bars: Sequence[Bar], count: int) -> Interval | None:
    """Begin and end of `count` whole steps of rank 0, in a row, that took about as long as most; None for fewer."""
    begins = np.array(step_begins(bars, 0)[1:])  # the first that is kept may have lost its begin
    if len(begins) <= count:
        return None
    durations = begins[count:] - begins[:-count]
    first = int(np.argmin(np.abs(durations - np.median(durations))))
    return float(begins[first]), float(begins[first + count])


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
