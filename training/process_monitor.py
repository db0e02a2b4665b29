"""Process that reports which rank of a node is killed, or crashes, first.

When a rank dies, MPICH's ``mpiexec`` kills all others within a millisecond, and reports any one of the killed
processes. No rank lives long enough to report the first one. So one rank of each node starts this file as a process in
a session of its own, which launchers do not kill. It sleeps until a process of a rank ends (``pidfd``, Linux 5.3).

This file imports no other module of the library, so that the process starts in 10 ms and needs 7 MB.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["TAIL", "MonitoredRanks", "append_line", "start_monitor"]

TAIL = 1 << 16  # size of the end of a log that holds the lines of all ranks that end at the same time [B]
MEMORY_SECONDS = 60.0  # time between two readings of the kernel's count of processes killed for lack of memory [s]


@dataclass(frozen=True)
class MonitoredRanks:
    """Ranks of this node.

    Attributes
    ----------
    log
        Path of ``log.jsonl`` of the run.
    host, size
        Name of this node, and number of all ranks of the job.
    files
        Number of ranks, on all nodes, that have a file (``rank-*.txt``) in the folder of these files when the job
        starts; a rank that leaves its run removes its file.
    ranks
        Process ID and path of the file of each rank of this node.
    """

    log: str
    host: str
    size: int
    files: int
    ranks: Mapping[int, tuple[int, str]]


def start_monitor(monitored: MonitoredRanks) -> subprocess.Popen[bytes] | None:
    """Start the monitor; the caller terminates it. Local. Returns None if this system cannot start or use it."""
    if not hasattr(os, "pidfd_open"):
        return None
    with contextlib.suppress(OSError):
        return subprocess.Popen(
            # Without the site packages and variables of the user: a fast start, and nothing of theirs runs.
            [sys.executable, "-I", "-S", __file__, json.dumps(asdict(monitored))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # stderr is that of the job
            start_new_session=True,
        )
    return None


def append_line(log: Path, entry: Mapping[str, Any]) -> None:
    """Append `entry`, with the time, to an existing log in one write, so that lines of processes do not mix. Local."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(descriptor, (json.dumps({**entry, "time": round(time.time(), 3)}) + "\n").encode())
    finally:
        os.close(descriptor)


def monitor(job: MonitoredRanks) -> None:
    """Wait until a rank ends; report this unless the rank has ended as it should, or another process has reported a
    cause.
    """
    rank, out_of_memory = _first_end(job)
    folder = Path(job.ranks[rank][1]).parent
    # A rank that leaves its run, also by an exception, removes its file. Launchers may kill the others after that.
    if len(list(folder.glob("rank-*.txt"))) < job.files or _is_explained(Path(job.log)):
        return
    text = Path(job.ranks[rank][1]).read_text(errors="replace")
    cause = cause_of(text, out_of_memory, other_nodes=len(job.ranks) < job.files)
    text = f"halograd: rank {rank} of {job.size} on {job.host}: {cause}; the job ends, continue with --resume\n"
    os.write(2, text.encode())
    append_line(Path(job.log), {"event": "failed", "rank": rank, "host": job.host, "cause": cause, "by": rank})


def _first_end(job: MonitoredRanks) -> tuple[int, bool]:
    """Return the first rank whose process ends, and whether the kernel has just killed a process to free memory."""
    poll, ranks, killed = select.epoll(), {}, _killed_for_memory()
    for rank, (process, _) in job.ranks.items():
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:  # it ended before this process began
            # No count was read before its end, so nothing is known about memory.
            return rank, False
        ranks[descriptor] = rank
        poll.register(descriptor, select.EPOLLIN)
    while True:
        # With a limit, so that a process killed for memory hours ago is not taken for the cause.
        events, now = poll.poll(MEMORY_SECONDS), _killed_for_memory()
        if events:
            return ranks[events[0][0]], now > killed
        killed = now


def cause_of(text: str, out_of_memory: bool, other_nodes: bool) -> str:
    """Return why a process ended, from the text of its file (after a crash, Python's report with the stacks).

    With `out_of_memory`, the kernel has just killed a process of the node to free memory. With `other_nodes`, a rank on
    another node may have ended earlier.
    """
    for line in text.splitlines():
        if line.startswith("Fatal Python error"):
            return line
        if line.startswith("Timeout ("):
            return "no progress for run.stall_minutes, and no other rank could report it"
    cause = "its process was killed, or ended without a message"
    if not out_of_memory:
        # MPICH was seen to abort a rank whose connection broke, and it does not name the other rank.
        hint = "; or MPI ended it, with a message of its own, because a rank on another node is gone"
        return cause + hint * other_nodes
    return (
        f"{cause}; the kernel kills processes because the memory of the node, or the limit of the job or container, is "
        "exhausted: use more nodes, or smaller batches"
    )


def _killed_for_memory() -> int:
    """Return how many processes of this node the kernel has killed because memory was short; 0 if unknown."""
    with contextlib.suppress(OSError, ValueError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return 0


def _is_explained(log: Path) -> bool:
    """Return whether the log has a line about the end of the latest job."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - TAIL))
        # Lines of earlier jobs do not explain the end of this one.
        latest = file.read().rpartition(b'{"event": "begin"')[2]
    return any(b'{"event": "%s"' % event in latest for event in (b"failed", b"interrupted", b"stopped", b"finished"))


if __name__ == "__main__":
    received = json.loads(sys.argv[1])
    received["ranks"] = {int(rank): tuple(pair) for rank, pair in received["ranks"].items()}
    with contextlib.suppress(OSError):  # a kernel without pidfd; no disk: there is nothing else to report to
        monitor(MonitoredRanks(**received))
