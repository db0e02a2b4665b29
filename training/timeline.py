"""Timelines: the activities of each rank over time, as Chrome-trace JSON, with the overlap ratio and a table of phases.

A :class:`Timeline` is the recorder of a communicator: set it as ``comm.instruments.recorder`` before the executor is
built. Open the merged file in ``chrome://tracing`` or https://ui.perfetto.dev. It shows one process per rank, with rows
for the main thread and for the messages that travel at the same time::

    rank 0   compute         [conv1 forward][bn1 forward]      [conv2 forward]
             wait                           [halo]
             halo                [  halo travels  ]
             gradient sums   [ all-reduce of the last step ]
             other sums                  [ statistics of bn1 ]
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halograd.documents import write_whole, writing

if TYPE_CHECKING:
    from ..comm import Communicator, Recorder
    from ..device import Device, TimedEvent

__all__ = ["Phase", "Spans", "Timeline", "merge_traces", "overlap_ratio", "trace_events", "write_trace"]

#: Categories of work of the main thread; "again": operations of the forward pass that the backward pass repeats.
#: "communication" runs concurrently, "wait" within it.
BUSY = ("forward", "backward", "again", "update", "io")


@dataclass
class Phase:
    """Number and total duration [s] of the spans of one name and category."""

    count: int = 0
    seconds: float = 0.0


def overlap_ratio(communication: float, blocked: float) -> float | None:
    """Compute the overlap ratio [%]: the share of the communication time that computation hides.

    ``R = 100 * sum(T_c - T_b) / sum(T_c)``, with T_c the duration of a communication and T_b the time that the main
    thread was blocked in it; None without communication.

    Parameters
    ----------
    communication, blocked
        Sums of T_c and T_b [s].

    References
    ----------
    Lee et al. 2017, Eq. 11. The paper's sum is over the all-reduces of one step, this one over any spans.
    """
    return 100.0 * (communication - blocked) / communication if communication > 0 else None


class Timeline:
    """Recorder of spans with bounded memory: sums of all spans, details of the last `capacity` spans. Local.

    Parameters
    ----------
    rank
        Process id in the trace.
    capacity
        Number of spans whose times are kept; newer spans overwrite older ones (the sums stay).
    alone
        Whether there is only one rank; its communication and waits are not recorded.

    Attributes
    ----------
    phases
        Sums by name and category.
    recorded
        Number of recorded spans.
    paused
        Whether spans are currently ignored, as during a validation between training steps.

    Notes
    -----
    Spans may come from several threads (the prefetch thread records its reads).
    """

    def __init__(self, rank: int = 0, capacity: int = 50_000, alone: bool = False) -> None:
        if capacity < 1:
            raise ValueError(f"capacity: expected at least 1, got {capacity}")
        self.rank, self.capacity, self._alone = rank, capacity, alone
        self.phases: dict[tuple[str, str], Phase] = {}
        self.recorded = 0
        self.paused = False
        self._spans: deque[tuple[str, str, float, float]] = deque(maxlen=capacity)
        self._lock = threading.Lock()

    def span(self, name: str, category: str, t0: float, t1: float) -> None:
        """Record a span from `t0` to `t1` (`time.perf_counter` [s])."""
        if self.paused or (self._alone and category in ("communication", "wait")):
            return
        # The prefetch thread records too, and `+=` is not atomic.
        with self._lock:
            phase = self.phases.setdefault((name, category), Phase())
            phase.count += 1
            phase.seconds += t1 - t0
            self._spans.append((name, category, t0, t1))
            self.recorded += 1

    @contextmanager
    def measure(self, name: str, category: str) -> Iterator[None]:
        """Record the ``with`` block as a span."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.span(name, category, begin, time.perf_counter())

    def spans(self) -> Iterator[tuple[str, str, float, float]]:
        """Yield the name, category, begin and end [s] of the kept spans, oldest first."""
        with self._lock:
            kept = tuple(self._spans)
        yield from kept

    def seconds(self, category: str, kind: str = "") -> float:
        """Return the time in all spans of a category [s], or of one kind of communication if `kind` is given."""
        with self._lock:
            found = [p.seconds for (n, c), p in self.phases.items() if c == category and kind in ("", kind_of(n))]
        return sum(found)

    def overlap(self, kind: str = "") -> float | None:
        """Compute the overlap ratio [%] of all communication, or of one kind ("halo", "allreduce", ...); None if there
        was none.
        """
        return overlap_ratio(self.seconds("communication", kind), self.seconds("wait", kind))

    def kinds(self) -> list[str]:
        """List the recorded kinds of communication."""
        with self._lock:
            return sorted({kind_of(n) for n, c in self.phases if c in ("communication", "wait")})

    def summary(self) -> dict[str, dict[str, float | None]]:
        """Return seconds by category, and per kind of communication its duration, blocked time [s] and overlap [%].

        Without repeated operations there is no category ``"again"``.
        """
        spent = {category: self.seconds(category) for category in BUSY}
        summary: dict[str, dict[str, float | None]] = {c: {"seconds": s} for c, s in spent.items() if s or c != "again"}
        for kind in self.kinds():
            summary[kind] = {
                "communication": self.seconds("communication", kind),
                "blocked": self.seconds("wait", kind),
                "overlap": self.overlap(kind),
            }
        return summary

    def table(self, steps: int = 1) -> str:
        """Return a table of the time per step and phase [ms], and of the hidden communication, over `steps` recorded
        steps.
        """
        lines = [f"{'phase':24}{'ms/step':>10}"]
        for category in BUSY:
            seconds = self.seconds(category)
            if seconds:
                lines.append(f"{category:24}{1e3 * seconds / steps:>10.2f}")
        lines.append(f"{'communication':24}{'ms/step':>10}{'blocked':>10}{'hidden':>9}")
        for kind in self.kinds():
            true, blocked = self.seconds("communication", kind), self.seconds("wait", kind)
            ratio = overlap_ratio(true, blocked)
            hidden = "-" if ratio is None else f"{ratio:.1f} %"
            lines.append(f"  {kind:22}{1e3 * true / steps:>10.2f}{1e3 * blocked / steps:>10.2f}{hidden:>9}")
        return "\n".join(lines)

    def clear(self) -> None:
        """Remove all spans, and set all sums to 0."""
        # The keys stay: kinds without spans after this are still listed, with 0.
        with self._lock:
            self.phases = {key: Phase() for key in self.phases}
            self.recorded = 0
            self._spans.clear()


def kind_of(name: str) -> str:
    """Return the kind of communication in the name of a span.

    >>> kind_of("statistics: bn1"), kind_of("halo")
    ('statistics', 'halo')
    """
    return name.partition(":")[0]


# -- times of calls --------------------------------------------------------------------------------


class Spans:
    """Timer of the calls of a step, which passes their times to a recorder. Local.

    On a device, the times are those of the device. They are read later, and are relative to an instant that was
    measured on host and device at construction, so that they fit the host's spans in one timeline.

    Parameters
    ----------
    device
        Device of the work.
    recorder
        Receiver of the spans; None: nothing is timed. Work that is enqueued while the recorder is paused is not
        recorded.
    """

    def __init__(self, device: Device, recorder: Recorder | None) -> None:
        self._device, self._recorder = device, recorder
        self._waiting: deque[tuple[str, str, TimedEvent, TimedEvent]] = deque()
        if recorder is not None and not device.is_host:
            # The device is idle, so that both clocks are read at the same time.
            device.synchronize()
            self._origin, self._began = device.timestamp(), time.perf_counter()

    @property
    def active(self) -> bool:
        """Whether calls are timed now."""
        return self._recorder is not None and not getattr(self._recorder, "paused", False)

    def timed(self, name: str, category: str, calls: Sequence[Callable[[], object]]) -> Sequence[Callable[[], object]]:
        """Return calls that make `calls` and record their time as one span; without a recorder, return `calls`."""
        if self._recorder is None:
            return calls
        record = self._record if self._device.is_host else self._enqueue
        return [partial(record, self._recorder, name, category, calls)]

    def _record(self, recorder: Recorder, name: str, category: str, calls: Sequence[Callable[[], object]]) -> None:
        begin = time.perf_counter()
        for call in calls:
            call()
        recorder.span(name, category, begin, time.perf_counter())

    def _enqueue(self, recorder: Recorder, name: str, category: str, calls: Sequence[Callable[[], object]]) -> None:
        """Make the calls, which enqueue work, between two timing events."""
        first = self._device.timestamp() if self.active else None
        for call in calls:
            call()
        if first is not None:
            self._waiting.append((name, category, first, self._device.timestamp()))
            self._record_complete(recorder)

    def _record_complete(self, recorder: Recorder) -> None:
        """Record the spans that are complete. Does not wait."""
        # Events of one stream complete in the order in which they were enqueued.
        while self._waiting and self._waiting[0][3].done():
            name, category, first, second = self._waiting.popleft()
            times = (self._began + self._device.seconds(self._origin, timestamp) for timestamp in (first, second))
            recorder.span(name, category, *times)

    def finish(self) -> None:
        """Record all spans so far. Waits for a device."""
        if self._waiting and self._recorder is not None:
            self._device.synchronize()
            self._record_complete(self._recorder)


# -- files -----------------------------------------------------------------------------------------

_ROWS = {"compute": 0, "wait": 1, "I/O": 2, "halo": 3, "gradient sums": 4, "other sums": 5, "other": 6}
_ROW_OF = {
    **dict.fromkeys(("allreduce", "reduce_scatter", "all_gather", "replicated_dense"), "gradient sums"),
    **dict.fromkeys(("loss", "statistics", "running statistics", "metrics"), "other sums"),
}


def trace_events(timeline: Timeline, origin: float) -> Iterator[dict[str, Any]]:
    """Yield the trace events of one rank; times count from `origin` (`time.perf_counter` [s])."""
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
            # Times of the format are in microseconds.
            "ts": round(1e6 * (t0 - origin), 3),
            "dur": round(1e6 * (t1 - t0), 3),
        }


def _row(name: str, category: str) -> str:
    if category == "communication":
        kind = kind_of(name)
        return _ROW_OF.get(kind, kind if kind in _ROWS else "other")
    return {"wait": "wait", "io": "I/O"}.get(category, "compute")


def write_trace(timeline: Timeline, comm: Communicator, path: str | Path) -> None:
    """Write the timelines of all ranks to one file. Collective over `comm`.

    Every rank writes its part next to `path` (on a file system that all ranks share), and rank 0 merges them. Raises
    UserError on all ranks if that fails.
    """
    path = Path(path)
    origin = _common_origin(comm)
    parts = [path.with_name(f"{path.name}.rank{rank}") for rank in range(comm.size)]
    with comm.agreement(), writing(f"timeline {path}"):
        # Two agreements: all parts are complete before rank 0 merges them.
        parts[comm.rank].write_text(json.dumps(list(trace_events(timeline, origin))))
    with comm.agreement(), writing(f"timeline {path}"):
        if comm.rank == 0:
            merge_traces(parts, path)


def merge_traces(parts: list[Path], path: Path) -> None:
    """Merge files with the events of one rank each into one trace, whose times start at 0; remove the files. Local."""
    events = [event for part in parts for event in json.loads(part.read_text())]
    # Events that name processes and threads have no time.
    first = min((e["ts"] for e in events if "ts" in e), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(event["ts"] - first, 3)
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    for part in parts:
        part.unlink()


def _common_origin(comm: Communicator, rounds: int = 5) -> float:
    """Return this rank's `perf_counter` at a common instant of all ranks [s]. Collective.

    Ranks of one node read the same clock. For ranks of other nodes, the clocks are compared at the end of a barrier,
    which is accurate to some microseconds; an offset of at most 50 ms counts as 0, because the ranks may have one
    clock.
    """
    ends = []
    for _ in range(rounds):
        # All ranks leave a barrier at nearly the same time.
        comm.barrier()
        ends.append(comm.allgather_objects(time.perf_counter()))
    # The median: some rounds end late, when a rank is interrupted after the barrier.
    offset = statistics.median(row[comm.rank] - row[0] for row in ends)
    return float(ends[0][0]) + (offset if abs(offset) > 0.05 else 0.0)
