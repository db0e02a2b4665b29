"""Tests that no shared memory outlives a run, even a killed one."""

import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halograd.comm import sweep as module
from halograd.comm.sweep import sweep
from tests.harness import jobs
from tests.harness.limits import LIMIT
from tests.harness.mpi import LAUNCHER
from tests.launch import find_mpiexec, mpiexec

PROGRAM = """
import os, sys, time
import numpy as np
from halograd.comm import Communicator, boot
comm = Communicator(boot(), "shared")
peers = {p: 100_000 for p in range(comm.size) if p != comm.rank}
channel = comm.channel(peers, peers, np.float32)
for _ in range(3):
    channel.start(); channel.finish(); channel.release()
pids = comm.allgather_objects(os.getpid())
if comm.rank == 0:
    print(*pids, flush=True)
time.sleep(10**6)
"""


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    """Return a directory that stands for /dev/shm."""
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path)
    return tmp_path


def segments_mapped_by(pids):
    found = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/dev/shm/" in line:
                found.add(line.split(maxsplit=5)[-1])
    return found


def swept(names):
    """Make `names` old; return those that a sweep removes. Segments of starting jobs stay."""
    for name in names:
        if Path(name).exists():
            os.utime(name, (0, time.time() - 1000))
    return {str(path) for path in sweep(min_age=500)} & set(names)


def test_a_killed_job_leaves_no_shared_memory(tmp_path):
    mark = jobs.new_mark()
    process = subprocess.Popen(
        [find_mpiexec(), "-n", "3", sys.executable, "-c", PROGRAM],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=jobs.job_environment(mark, None), start_new_session=True,
    )  # fmt: skip
    try:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        mapped = segments_mapped_by(pids)
        named = {name for name in mapped if not name.endswith("(deleted)")}
        assert len(mapped) > len(named), "the windows of the transport have no name any more"
        assert not swept(named), "what a live process has mapped stays"
        os.kill(pids[1], signal.SIGKILL)
        assert process.wait(LIMIT) != 0
    finally:
        jobs.end(mark)
        process.wait(LIMIT)
        process.stdout.close()
    assert not jobs.await_end(mark)
    swept(named)
    assert not {name for name in named if Path(name).exists()}


def test_only_unmapped_segments_of_mpi_that_are_old_enough_go(shared_memory):
    old, young, mapped, foreign = (
        shared_memory / name for name in ("mpich_shm_1", "mpich_shm_2", "sm_segment.host.3", "numpy_4")
    )
    for path in (old, young, mapped, foreign):
        path.write_bytes(bytes(mmap.PAGESIZE))
    for path in (old, mapped, foreign):
        os.utime(path, (0, time.time() - 100))
    with mapped.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert sweep(min_age=50) == [old]
    assert sorted(shared_memory.iterdir()) == sorted([young, mapped, foreign])
    assert set(sweep(min_age=0)) == {young, mapped}
    assert list(shared_memory.iterdir()) == [foreign]


def test_segments_of_others_stay(shared_memory, monkeypatch):
    path = shared_memory / "mpich_shm_1"
    path.write_bytes(b"")
    monkeypatch.setattr(os, "getuid", lambda: path.stat().st_uid + 1)
    assert sweep(min_age=0) == []
    assert path.exists()


def test_where_there_is_no_shared_memory(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path / "missing")
    assert sweep() == []


def test_by_hand():
    done = subprocess.run([sys.executable, "-m", "halograd.comm.sweep"], capture_output=True, text=True, timeout=LIMIT)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_of_a_job_has_a_name():
    """After `boot` no segment of MPICH has a name, so a killed job leaves no segment."""
    if os.environ.get(LAUNCHER):
        pytest.skip("needs MPICH: Open MPI looks its names up again, and removes them itself when the job ends")
    body = "import numpy as np\nfrom halograd.comm import boot, Communicator\nworld = boot()\n"
    body += "with Communicator(world) as comm:\n    r = comm.reduction(np.ones(9)); r.run(); assert r.buffer[0] == 3\n"
    body += "    names = [l.split(maxsplit=5)[-1].strip() for l in open('/proc/self/maps') if '/dev/shm/' in l]\n"
    body += "    print('\\n'.join(sorted(set(names))), flush=True)\n"
    done = mpiexec(3, ["-c", body])
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout and all(line.endswith(" (deleted)") for line in done.stdout.splitlines() if line)
