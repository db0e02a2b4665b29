"""Detection of races and deadlocks in the operations that ranks have enqueued, by vector clocks.

Two operations are ordered if one follows the other on a stream, follows an event that was recorded after the other,
or was enqueued after the host had waited for the other. Two operations that access the same bytes, one of them
writing, must be ordered. The result holds for every speed of devices and hosts, not only for this run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tests.support.trace import Entry

__all__ = ["Ordered", "check_collectives", "find_races"]

Clock = dict[Any, int]
#: Accesses are kept and compared by blocks of memory [B]: few others lie in the same one.
BLOCK = 4096


class Ordered:
    """Operations of some ranks, and their happens-before relation.

    Attributes
    ----------
    races
        One line per race.
    """

    def __init__(self, traces: Sequence[Sequence[Entry]]) -> None:
        self.races: list[str] = []
        self._streams: dict[tuple[int, int], Clock] = defaultdict(dict)
        self._hosts: list[Clock] = [{} for _ in traces]
        self._events: dict[Any, Clock] = {}
        self._touched: dict[Any, list[tuple[int, int, bool, Any, int, str]]] = defaultdict(list)
        #: Clock, timeline and number of every operation, by rank and place in the trace.
        self._of: dict[tuple[int, int], tuple[Clock, Any, int]] = {}
        self._run(traces)

    def before(self, first: tuple[int, int], second: tuple[int, int]) -> bool:
        """Return whether an operation, given by rank and position in the trace, happens before another."""
        _, timeline, number = self._of[first]
        return self._of[second][0].get(timeline, 0) >= number

    def _run(self, traces: Sequence[Sequence[Entry]]) -> None:
        at = [0] * len(traces)
        while any(i < len(trace) for i, trace in zip(at, traces)):
            stuck = True
            for rank, trace in enumerate(traces):
                while at[rank] < len(trace) and self._ready(trace[at[rank]]):
                    self._take(rank, at[rank], trace[at[rank]])
                    at[rank] += 1
                    stuck = False
            if stuck:
                waiting = [trace[i].name for i, trace in zip(at, traces) if i < len(trace)]
                self.races.append(f"waits for what is never recorded: {waiting}")
                return

    def _ready(self, entry: Entry) -> bool:
        return entry.kind not in ("wait", "host wait") or entry.event in self._events

    def _take(self, rank: int, place: int, entry: Entry) -> None:
        line = (rank, entry.stream)
        if entry.kind == "record":
            self._events[entry.event] = _joined(self._streams[line], self._hosts[rank])
        elif entry.kind == "host record":
            self._events[entry.event] = dict(self._hosts[rank])
        elif entry.kind == "wait":
            self._streams[line] = _joined(self._streams[line], self._events[entry.event])
        elif entry.kind == "host wait":
            self._hosts[rank] = _joined(self._hosts[rank], self._events[entry.event])
        elif entry.kind == "op":
            clock = _joined(self._streams[line], self._hosts[rank])
            clock[line] = clock.get(line, 0) + 1
            self._streams[line] = clock
            self._of[rank, place] = (clock, line, clock[line])
            for write, ranges in ((False, entry.reads), (True, entry.writes)):
                for space, lo, hi in ranges:
                    for block in range(lo // BLOCK, (hi - 1) // BLOCK + 1):
                        part = max(lo, block * BLOCK), min(hi, (block + 1) * BLOCK)
                        self._touch((space, block), *part, write, line, clock, f"rank {rank}: {entry.name}")

    def _touch(self, space: Any, lo: int, hi: int, write: bool, line: Any, clock: Clock, name: str) -> None:
        kept = []
        for other in self._touched[space]:
            first, last, wrote, where, number, what = other
            overlap = first < hi and lo < last
            if overlap and (write or wrote) and clock.get(where, 0) < number:
                self.races.append(
                    f"{what} ({'writes' if wrote else 'reads'}) and {name} ({'writes' if write else 'reads'})"
                )
            # What this covers, and is behind, nobody need compare with again.
            if not (lo <= first and last <= hi and (write or (where == line and not wrote))):
                kept.append(other)
        kept.append((lo, hi, write, line, clock[line], name))
        self._touched[space] = kept


def find_races(traces: Sequence[Sequence[Entry]]) -> list[str]:
    """Return one line for each pair of unordered operations of these ranks that access the same bytes."""
    return Ordered(traces).races


def check_collectives(traces: Sequence[Sequence[Entry]]) -> list[str]:
    """Return the errors in NCCL calls: different orders of collectives, messages without a partner, groups that never
    end.

    Every stream executes its groups one after the other. A group ends when all ranks of the communicator have reached
    its collectives and the partner of each message has reached the message. If groups are left at the end, the ranks
    would hang.
    """
    groups = [[e for e in trace if e.nccl is not None] for trace in traces]
    members: dict[str, dict[int, int]] = defaultdict(dict)
    for rank, some in enumerate(groups):
        for entry in some:
            assert entry.nccl is not None
            members[entry.nccl[0]][entry.nccl[2][0][0]] = rank
    queues: dict[tuple[int, int], list[Entry]] = defaultdict(list)
    for rank, some in enumerate(groups):
        for entry in some:
            queues[rank, entry.stream].append(entry)
    faults: list[str] = []
    while True:
        heads = {(key[0], q[0].nccl[0]): (key, q[0]) for key, q in queues.items() if q and q[0].nccl is not None}
        over = _over(heads, members, faults)
        if faults or not over:
            break
        for key in over:
            queues[key].pop(0)
    left = [f"rank {key[0]}: {q[0].name} waits for ever" for key, q in sorted(queues.items()) if q]
    return faults or left


def _over(heads: Any, members: Any, faults: list[str]) -> list[tuple[int, int]]:
    """Return the streams whose first group can complete, with the streams of other ranks in the group."""
    done: set[Any] = {(key, comm) for key, comm in heads}
    changed = True
    while changed:  # the largest set of groups that have all partners among them
        changed = False
        for rank, comm in sorted(done, key=str):
            _, entry = heads[rank, comm]
            if not _partners(rank, entry, comm, heads, done, members, faults):
                done.discard((rank, comm))
                changed = True
    return [heads[key][0] for key in done]


def _partners(rank: int, entry: Entry, comm: str, heads: Any, done: Any, members: Any, faults: list[str]) -> bool:
    assert entry.nccl is not None
    for me, call, *rest in entry.nccl[2]:
        peers = [rest[0]] if call in ("send", "recv") else list(range(rest[-1]))
        for peer in peers:
            other = members[comm].get(peer)
            if other is None or (other, comm) not in done:
                return False
            theirs = heads[other, comm][1].nccl[2]
            mirrored = {"send": "recv", "recv": "send"}.get(call)
            if mirrored:
                sizes = [c[3] for c in entry.nccl[2] if c[1] == call and c[2] == peer]
                there = [c[3] for c in theirs if c[1] == mirrored and c[2] == me]
                if not there:  # it is at its turn later, if ever
                    return False
                if sizes != there:
                    faults.append(f"rank {rank}: {entry.name} {call}s {sizes} bytes, rank {other} {mirrored}s {there}")
                    return False
            elif [c[1:] for c in theirs] != [c[1:] for c in entry.nccl[2]]:
                faults.append(f"rank {rank}: {entry.name} meets {heads[other, comm][1].name} of rank {other}")
                return False
    return True


def _does(write: bool) -> str:
    return "writes" if write else "reads"


def _joined(one: Clock, two: Clock) -> Clock:
    result = dict(one)
    for key, value in two.items():
        if result.get(key, 0) < value:
            result[key] = value
    return result
