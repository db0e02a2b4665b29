"""Chrome-trace files: the timelines of all ranks merged into one JSON file."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from halograd.comm import Communicator
from halograd.training.timeline import Timeline, kind_of

__all__ = ["merge_traces", "trace_events", "write_trace"]

_ROWS = {"compute": 0, "wait": 1, "I/O": 2, "halo": 3, "all-reduce": 4, "other": 5}
_REDUCTIONS = (
    "allreduce",
    "reduce_scatter",
    "all_gather",
    "replicated_dense",
    "loss",
    "statistics",
    "running statistics",
    "metrics",
)


def trace_events(timeline: Timeline, origin: float) -> Iterator[dict[str, Any]]:
    """Events of one rank; times count from `origin` (`time.perf_counter` [s])."""
    pid = timeline.rank
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"rank {pid}"}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    for title, row in _ROWS.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": row, "args": {"name": title}}
    for name, category, t0, t1 in timeline.spans():
        yield {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": pid,
            "tid": _ROWS[_row(name, category)],
            "ts": round(1e6 * (t0 - origin), 3),
            "dur": round(1e6 * (t1 - t0), 3),
        }


def _row(name: str, category: str) -> str:
    if category == "communication":
        kind = kind_of(name)
        return "all-reduce" if kind in _REDUCTIONS else kind if kind in _ROWS else "other"
    return {"wait": "wait", "io": "I/O"}.get(category, "compute")


def write_trace(timeline: Timeline, comm: Communicator, path: str | Path) -> None:
    """Write the timelines of all ranks to one file. Collective over `comm`.

    Every rank writes its part beside `path` (a file system that all ranks see), rank 0 merges them.
    """
    path = Path(path)
    origin = _common_origin(comm)
    fault = None
    try:
        with _part(path, comm.rank).open("w") as file:
            json.dump(list(trace_events(timeline, origin)), file)
    except OSError as error:
        fault = error
    comm.agree(fault)
    try:
        if comm.rank == 0:
            merge_traces([_part(path, r) for r in range(comm.size)], path)
    except OSError as error:
        fault = error
    comm.agree(fault)


def merge_traces(parts: list[Path], path: Path) -> None:
    """Merge per-rank lists of events into one trace, whose times begin with 0; removes the parts. Local."""
    events = [event for part in parts for event in json.loads(part.read_text())]
    first = min((e["ts"] for e in events if "ts" in e), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 3)
    beside = path.with_name(path.name + ".new")
    with beside.open("w") as file:
        json.dump({"traceEvents": events, "displayTimeUnit": "ms"}, file)
    os.replace(beside, path)
    for part in parts:
        part.unlink()


def _part(path: Path, rank: int) -> Path:
    return path.with_name(f"{path.name}.rank{rank}")


def _common_origin(comm: Communicator, rounds: int = 5) -> float:
    """This rank's `perf_counter` at a moment that all ranks share [s]. Collective.

    Ranks of one node read the same clock; of other nodes we know only when they left a barrier (some
    microseconds), which is taken where the difference is too large for one clock.
    """
    ends = []
    for _ in range(rounds):
        comm.barrier()
        ends.append(comm.allgather_objects(time.perf_counter()))
    offset = statistics.median(row[comm.rank] - row[0] for row in ends)
    return float(ends[0][0]) + (offset if abs(offset) > 0.05 else 0.0)
