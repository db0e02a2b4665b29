"""Tests of the rank that a message names, and of the files in which ranks without progress write their positions."""

import contextlib
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from halograd.comm import Communicator
from halograd.report.status import read_record, status_of
from halograd.training import watchdog as module
from halograd.training.log import read_log
from halograd.training.process_monitor import MonitoredRanks, cause_of, start_monitor
from halograd.training.watchdog import STALLS, Heartbeat, Position, Watchdog, describe_stall, read_positions
from tests.harness import jobs
from tests.harness.limits import LIMIT, wait_until


def place(step=4, waiting="", ranks=(), since=60.0, layer="conv1"):
    return Position("n0", 1, step, "forward", layer, waiting, list(ranks), "flags.py:88", since)


SILENT = Position("n1", 7)
STALLED = [
    ([place(waiting="halo: conv1"), place(), place(waiting="loss")], 1, "step 5, forward of layer 'conv1', not in an"),
    ([place(waiting="halo: conv1"), place(), SILENT], 2, "it does not respond .*The others: rank 0 on n0: step 5"),
    (
        [SILENT, place(waiting="halo", ranks=[2]), SILENT],
        2,
        "does not .*waiting for 'halo' with rank 2 .at fla",
    ),
    (
        [SILENT, place(waiting="halo", ranks=[0]), replace(SILENT, line="Fatal Python error: x")],
        2,
        "Fatal Python error: x",
    ),
    ([place(waiting="loss"), place(step=3, waiting="loss")], 1, "step 4, .* waiting for 'loss' .at flags.py:88"),
    ([place(since=90), place(since=60, layer="")], 1, "step 5, forward, not in .*The others: rank 0 on n0: .*'conv1'"),
    ([place(waiting="sum", ranks=range(9))] * 7 + [place()], 7, "ranks 0, 1, 2, 3 and 5 more .*rank 3 .*; and 3 more"),
]


@pytest.mark.parametrize(
    ("places", "culprit", "text"), STALLED, ids=["idle", "silent", "awaited", "crashed", "behind", "first", "many"]
)
def test_the_rank_that_blocks_the_others(places, culprit, text):
    rank, told = describe_stall(dict(enumerate(places)))
    assert rank == culprit and re.search(text, told), told


def test_status_of_a_run_without_progress(tmp_path):
    """The status of a run names the rank that is silent, or that waits for none; damaged files are silent ranks."""
    (tmp_path / "log.jsonl").write_text(json.dumps({"event": "begin"}) + "\n")
    folder = tmp_path / STALLS
    folder.mkdir()
    texts = [json.dumps(asdict(place(waiting="halo: a", ranks=[1]))) + "\nstacks", "", "{}\n", "["]
    for rank, text in enumerate(texts):
        (folder / f"rank-{rank:05d}.n1.7.txt").write_text(text)
    (folder / "rank-x.txt").touch()
    assert read_positions(folder) == {0: place(waiting="halo: a", ranks=[1]), 1: SILENT, 2: SILENT, 3: SILENT}
    begin = read_record(tmp_path).modified
    status = status_of(read_record(tmp_path), now=begin + 1)
    assert status.state == "running" and re.match(
        r"no progress for .*: rank 1 on n1: it does not respond", status.detail
    )
    for rank in (1, 2, 3):
        here = json.dumps(asdict(replace(place(waiting="" if rank == 2 else "halo: b"), since=begin))) + "\n"
        (folder / f"rank-{rank:05d}.n1.7.txt").write_text(here)
    status = status_of(read_record(tmp_path), now=begin + 300)
    assert status.state == "quiet" and re.match(r"no progress for 5 min 00 s: rank 2 on n0: step 5, for", status.detail)


@pytest.mark.ranks(1, 2)
def test_a_rank_writes_its_position_only_while_it_makes_no_progress(comm, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "QUIET", 0.1)
    log = comm.bcast(tmp_path) / "log.jsonl"
    log.touch()
    folder = log.with_name(STALLS)
    with Communicator(comm) as ranks, Watchdog(ranks, 5.0, log, lambda: None) as watchdog:
        heartbeat = Heartbeat(step=7)
        watchdog.follow(heartbeat)
        assert read_positions(folder) == {
            rank: Position(*here) for rank, here in enumerate(comm.allgather((platform.node(), os.getpid())))
        }
        comm.Barrier()
        found = wait_until(
            lambda: (one := read_positions(folder)[comm.rank]).phase and one, "a rank to write its position"
        )
        assert (found.step, found.phase, found.waiting) == (7, "start", "") and "limits.py" in found.line
        heartbeat.at("forward", "conv1")
        wait_until(lambda: not read_positions(folder)[comm.rank].phase, "a rank to remove its position")
        comm.Barrier()
    comm.Barrier()
    assert not folder.exists() and log.read_text() == ""


def test_a_position_is_written_on_a_full_disk(tmp_path):
    """A file of a rank has its disk space from the start: it does not grow when the rank writes its position."""
    file = module._StallFile(tmp_path / f"rank-00000.n0.{os.getpid()}.txt")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = file.path.stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        for here in (place(), place(step=5)):
            file.write(here)
            assert read_positions(tmp_path)[0] == here
            file.clear()
            assert not read_positions(tmp_path)[0].phase and file.path.stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        file.remove()


DEAD = "its process was killed, or ended without a message"


@pytest.mark.parametrize(
    ("text", "logged", "left", "cause"),
    [
        ("", "begin", False, DEAD),
        ("x\nFatal Python error: Bus error\n", "begin", False, "Fatal Python error: Bus error"),
        ("{}\nTimeout (0:00:19)!\n", "begin", False, "no progress for run.stall_minutes, and no other rank could"),
        ("", "interrupted", False, None),
        ("", "begin", True, None),
        ("", "begin", False, f"{DEAD}; or MPI ended it, with a message of its own, because a rank on another node"),
    ],
    ids=["killed", "crashed", "locked", "interrupted", "left", "two nodes"],
)
def test_the_first_rank_that_dies_is_logged(tmp_path, text, logged, left, cause):
    """A launcher kills the other ranks too; nothing is logged if the end has a cause, or if a rank has left the run."""
    log = tmp_path / "log.jsonl"
    before = {"event": "failed", "rank": 0, "host": "n9", "cause": "that of an earlier job"}
    log.write_text("".join(f"{json.dumps(entry)}\n" for entry in (before, {"event": "begin"}, {"event": logged})))
    ranks = [subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(3)]
    try:
        files = {
            rank: (ranks[rank].pid, str(tmp_path / f"rank-{rank:05d}.n0.{ranks[rank].pid}.txt")) for rank in (2, 1)
        }
        for _, path in files.values():
            Path(path).write_text(text)
        nodes = 2 if cause is not None and "another node" in cause else 1
        for _ in range(1, nodes):
            (tmp_path / "rank-00000.n1.1.txt").touch()
        process = start_monitor(MonitoredRanks(str(log), "n0", 3, 1 + nodes, files))
        assert process is not None
        if left:
            Path(files[1][1]).unlink()
        wait_until(lambda: held_processes(process.pid) == 2, "the monitor to wait")
        for rank in (1, 2):
            ranks[rank].kill()
            ranks[rank].wait()
        process.wait(LIMIT)
        assert ranks[0].poll() is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    new = read_log(log, "failed")[1:]
    assert [(one["rank"], one["host"]) for one in new] == ([] if cause is None else [(1, "n0")])
    assert all(one["cause"].startswith(cause) and ("another node" in one["cause"]) == (nodes == 2) for one in new)


def held_processes(pid):
    """Return how many processes the process `pid` holds by descriptors; one may be closed while they are listed."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(descriptor))
    return sum("pidfd" in link for link in links)


def test_a_process_that_the_kernel_kills_for_lack_of_memory():
    assert cause_of("", False, other_nodes=False) == DEAD
    assert cause_of("", True, other_nodes=True).startswith(f"{DEAD}; the kernel kills processes")


CRASHES = """
import os, resource, signal, sys
from pathlib import Path
from mpi4py import MPI
from halograd.comm import Communicator
from halograd.training.watchdog import Heartbeat, Watchdog

with Communicator(MPI.COMM_SELF) as alone, Watchdog(alone, 5.0, Path(sys.argv[1]), lambda: None) as watchdog:
    watchdog.follow(Heartbeat())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_a_crash_is_found_in_the_file_of_its_rank(tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps({"event": "begin"}) + "\n")
    done = subprocess.run([sys.executable, "-c", CRASHES, str(log)], env=jobs.job_environment(jobs.new_mark()))
    assert done.returncode == -signal.SIGSEGV
    detail = status_of(read_record(tmp_path)).detail
    assert detail == f"rank 0 on {platform.node()}: Fatal Python error: Segmentation fault"
