"""Tests of the lock on a run's directory: one run at a time, and when a run takes a lock over."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
import zlib
from dataclasses import asdict, replace

import pytest

from halograd.demo.files import Files, prepare
from halograd.errors import UserError
from halograd.training import directory
from halograd.training.checkpoint import Snapshot, TrainingProgress
from halograd.training.checkpoints import CheckpointFolder
from halograd.training.directory import Owner, RunLock
from tests.harness.limits import wait_until

LONG = 3600.0  # [s]; no test waits for so long


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """Make the waiting times of locks short, and remove the variables of job schedulers."""
    for name, seconds in {"POLL": 0.01, "ENDING": 0.0, "SILENCE": LONG, "OLD": LONG}.items():
        monkeypatch.setattr(directory, name, seconds)
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def process():
    """Return another process of this machine."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as found:
        yield found
        found.kill()


def owner_of(process, **changes):
    started = directory._started(process.pid) or ""
    return replace(Owner.this(), key="other", process=process.pid, started=started, **changes)


def hold(folder, owner):
    folder.mkdir(exist_ok=True)
    (folder / "run.lock").write_text(owner if isinstance(owner, str) else json.dumps(asdict(owner)))


def acquired(folder):
    """Return whether a run gets the directory."""
    with RunLock(folder) as lock:
        lock.acquire()
        return Owner.parse((folder / "run.lock").read_text()).process == os.getpid()


def test_made_and_given_back(tmp_path):
    folder = tmp_path / "runs" / "mesh"
    assert acquired(folder)
    assert not folder.exists() and folder.parent.exists()
    folder.mkdir()
    assert acquired(folder)
    assert list(folder.iterdir()) == []


def test_another_process_of_this_machine(tmp_path, process):
    hold(tmp_path / "out", owner_of(process, job="4711"))
    held = rf"got .*/out, held by process {process.pid} on \S+ \(job 4711\)"
    with pytest.raises(UserError, match=rf"{held}; .* remove \S+/out/run\.lock$"):
        acquired(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "run.lock").read_text())["key"] == "other"


def test_the_same_process(tmp_path):
    with RunLock(tmp_path) as lock:
        lock.acquire()
        with pytest.raises(UserError, match=f"held by process {os.getpid()} on"):
            acquired(tmp_path)


@pytest.mark.parametrize("waited_for", [True, False], ids=["gone", "zombie"])
def test_a_process_that_is_gone(tmp_path, process, caplog, waited_for):
    hold(tmp_path, owner_of(process))
    process.kill()
    if waited_for:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert acquired(tmp_path)
    (told,) = caplog.messages
    assert told.endswith(f"run.lock: taken over from {owner_of(process)}: its process is gone")
    assert list(tmp_path.iterdir()) == []


def test_a_number_that_another_process_has_now(tmp_path, process):
    hold(tmp_path, replace(owner_of(process), started="1"))
    assert acquired(tmp_path)


def test_a_process_that_is_ending_is_waited_for(tmp_path, process, monkeypatch):
    monkeypatch.setattr(directory, "ENDING", LONG)
    hold(tmp_path, owner_of(process))
    threading.Timer(0.1, process.kill).start()
    threading.Timer(0.1, process.wait).start()
    assert acquired(tmp_path)


ELSEWHERE = replace(Owner.this(), key="other", host="n17", place="another kernel", job="4711")


def test_another_node_that_is_at_work(tmp_path, caplog):
    """A lock that another node updates while a run watches it is kept, whatever the node's clock shows."""
    hold(tmp_path, ELSEWHERE)
    os.utime(tmp_path / "run.lock", (1e9, time.time() - 60))
    ended = threading.Event()

    def work():
        while not ended.wait(0.02):
            os.utime(tmp_path / "run.lock")

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with pytest.raises(UserError, match=rf"held by process {os.getpid()} on n17 \(job 4711\)"):
            acquired(tmp_path)
    finally:
        ended.set()
        thread.join()
    assert len(caplog.messages) == 1 and "waiting up to" in caplog.messages[0]


@pytest.mark.parametrize("name, seconds", [("SILENCE", 0.1), ("OLD", 0.0)])
def test_another_node_that_is_silent(tmp_path, monkeypatch, caplog, name, seconds):
    hold(tmp_path, ELSEWHERE)
    monkeypatch.setattr(directory, name, seconds)
    assert acquired(tmp_path)
    assert caplog.messages[-1].endswith("on n17 (job 4711): it no longer touches the lock")


def test_another_node_that_has_just_ended(tmp_path):
    hold(tmp_path, ELSEWHERE)
    threading.Timer(0.1, (tmp_path / "run.lock").unlink).start()
    assert acquired(tmp_path)


def test_a_job_that_was_requeued(tmp_path, monkeypatch, process, caplog):
    """A requeued job takes its own lock over at once on any node; another job or restart does not."""
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    for owner in (ELSEWHERE, owner_of(process, job="4711", restarts=0)):
        hold(tmp_path, owner)
        assert acquired(tmp_path)
        assert caplog.messages[-1].endswith("the job was requeued")
    for owner in (replace(ELSEWHERE, job="4712"), replace(ELSEWHERE, restarts=1), replace(ELSEWHERE, restarts=2)):
        assert owner.gone(Owner.this()) is None


UNREADABLE = ["", "{", "[1]", "12", '{"key": "a"}', "\0" * 400, "[" * 10**5]


@pytest.mark.parametrize("text", [*UNREADABLE, json.dumps({**asdict(ELSEWHERE), "process": "12"})])
def test_a_lock_that_cannot_be_read(tmp_path, monkeypatch, caplog, text):
    """An unreadable lock is taken over after the time without a sign of life, as one of another node."""
    hold(tmp_path, text)
    monkeypatch.setattr(directory, "SILENCE", 0.05)
    assert acquired(tmp_path)
    assert "taken over from an unknown process" in caplog.messages[-1]


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, os.mkdir, *(lambda path, to=to: os.symlink(to, path) for to in ("nowhere", "run.lock", "/dev/zero"))],
    ids=["pipe", "folder", "dangling link", "link to itself", "link to a device"],
)
def test_something_else_in_its_place(tmp_path, make):
    """A link to nothing in place of the lock is an error; the run does not retry forever."""
    make(tmp_path / "run.lock")
    with pytest.raises(OSError, match=r"no regular file.*; remove it.*/run\.lock"):
        acquired(tmp_path)
    assert os.path.lexists(tmp_path / "run.lock")


def test_a_claim_that_leads_nowhere(tmp_path, monkeypatch, process):
    """A link to nothing in place of a claim to a lock is removed like a claim."""
    process.kill()
    process.wait()
    hold(tmp_path, owner_of(process))
    text = (tmp_path / "run.lock").read_text()
    (tmp_path / f"run.lock.{zlib.crc32(text.encode()):08x}").symlink_to("nowhere")
    monkeypatch.setattr(directory, "SILENCE", 0.0)
    assert acquired(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [shutil.rmtree, lambda path: path.rename(path.with_name("moved"))])
def test_a_directory_that_is_removed_or_moved(tmp_path, change):
    """After the directory is removed or replaced, checks raise an error, and nothing is written to the new one."""
    folder = tmp_path / "out"
    with RunLock(folder) as lock:
        lock.acquire()
        lock.check()
        change(folder)
        for _ in range(2):
            with pytest.raises(UserError, match=r"\S+/out .* removed or moved.*--resume"):
                lock.check()
            folder.mkdir(exist_ok=True)
    assert list(folder.iterdir()) == [] and not list(tmp_path.glob("moved/*"))


def test_of_several_one_takes_over(tmp_path, process):
    """If several runs find the lock of a dead process, exactly one takes it over."""
    process.kill()
    process.wait()
    for _ in range(20):
        hold(tmp_path, replace(owner_of(process), started="1"))
        locks, held, refused = [RunLock(tmp_path) for _ in range(6)], [], []
        barrier = threading.Barrier(len(locks))

        def start(lock, barrier=barrier, held=held, refused=refused):
            barrier.wait()
            try:
                lock.acquire()
                held.append(lock)
            except UserError:
                refused.append(lock)

        threads = [threading.Thread(target=start, args=(lock,)) for lock in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) == 1 and len(refused) == 5
        held[0].check()
        held[0].release()
        assert list(tmp_path.iterdir()) == []


def test_a_claim_of_a_run_that_was_killed(tmp_path, process, monkeypatch):
    """A claim of a run that was killed before it took the lock over is removed."""
    process.kill()
    process.wait()
    hold(tmp_path, owner_of(process))
    text = (tmp_path / "run.lock").read_text()
    claim = tmp_path / f"run.lock.{zlib.crc32(text.encode()):08x}"
    claim.write_text("")
    with RunLock(tmp_path) as lock:
        assert not lock._replace(text) and claim.exists()
    monkeypatch.setattr(directory, "SILENCE", 0.0)
    assert acquired(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_owner_touches_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(directory, "BEAT", 0.02)
    path = tmp_path / "run.lock"
    with RunLock(tmp_path) as lock:
        lock.acquire()
        os.utime(path, (0, 0))
        wait_until(lambda: path.stat().st_mtime > 0, "the lock to be touched")
        looks, is_mine = [], lock._is_mine
        monkeypatch.setattr(lock, "_is_mine", lambda: (looks.append(is_mine()), looks[-1])[1])
        hold(tmp_path, ELSEWHERE)  # taken over: not touched any more, nor removed at the end
        wait_until(lambda: looks[-2:] == [False] * 2, "what was under way to be over")
        os.utime(path, (0, 0))
        before = len(looks)
        wait_until(lambda: len(looks) >= before + 2, "two more looks")
        assert path.stat().st_mtime == 0
    assert path.exists()


def test_who_was_taken_over_writes_nothing_more(tmp_path, make_store):
    """A run whose lock was taken over writes no more checkpoints, and removes no files."""
    with RunLock(tmp_path) as lock:
        folder = CheckpointFolder(tmp_path / "checkpoints", 1, lock.check)
        snapshot = Snapshot.of(make_store())
        lock.acquire()
        folder.write(snapshot, TrainingProgress(step=1), "")
        (tmp_path / "run.lock").unlink()  # by hand, by mistake
        folder.write(snapshot, TrainingProgress(step=2), "")
        assert Owner.parse((tmp_path / "run.lock").read_text()).process == os.getpid()
        hold(tmp_path, ELSEWHERE)
        left = folder.path / ".step-00000003.h5.99.partial"
        left.write_text("half")
        with pytest.raises(UserError, match=r"taken over by process .* on n17 "):
            folder.write(snapshot, TrainingProgress(step=3), "")
    assert sorted(p.name for p in folder.path.iterdir()) == [left.name, "latest.h5", "step-00000002.h5"]


def test_a_disk_that_takes_no_lock(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(OSError, match="No space left"), RunLock(tmp_path) as lock:
        lock.acquire()
    assert list(tmp_path.iterdir()) == []


def test_a_second_demonstration_in_one_folder(tmp_path, process):
    hold(tmp_path / "run.new", owner_of(process))
    (tmp_path / "run.new" / "log.jsonl").write_text("theirs")
    with pytest.raises(UserError, match=r"no other run writes to, got .*run\.new"):
        prepare(Files(tmp_path))
    assert (tmp_path / "run.new" / "log.jsonl").exists()
    process.kill()
    process.wait()
    prepare(Files(tmp_path))
    assert not (tmp_path / "run.new").exists()
