"""Tests of signals, kills and hanging ranks, in real jobs and in this process: reported, ended in time, resumed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import h5py
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.data.disk import DataError
from halograd.errors import UserError
from halograd.report.status import read_record, status_of
from halograd.training import checkpoint, chunk_file
from halograd.training import directory as directory_of_run
from halograd.training import watchdog as module
from halograd.training.directory import Owner
from halograd.training.evaluation import Evaluation
from halograd.training.log import read_log
from halograd.training.monitors import Callback
from halograd.training.process_monitor import MonitoredRanks, cause_of, start_monitor
from halograd.training.run import train
from halograd.training.session import Session
from halograd.training.signals import CHECKPOINTED
from halograd.training.trained import evaluate
from halograd.training.trainer import Trainer
from halograd.training.watchdog import LOCKED, STALLS, Heartbeat, Position, Watchdog, describe_stall, read_positions
from tests.harness import jobs
from tests.harness.limits import LIMIT, slowness, wait_until
from tests.launch import mpiexec
from tests.training.cuts import assert_same, curve
from tests.training.launching import UNSEEN, Gate, losses, rank_processes, sets, started, wait_for_step
from tests.training.runs import write_config

HOST = platform.node()
#: Four epochs of six steps.
COMMON = ["training.batch=2", "training.epochs=4", "output.checkpoint_epochs=2"]
STEPS = 24


def curve_of_job(folder: Path) -> tuple[dict[int, float], list[tuple]]:
    """Return the losses by step, and the epoch and loss of every validation."""
    return losses(folder), [(e["epoch"], e["loss"]) for e in read_log(folder / "log.jsonl", "validation")]


def assert_same_jobs(found: Path, wanted: Path) -> None:
    (mine, judged), (theirs, expected) = curve_of_job(found), curve_of_job(wanted)
    assert list(mine) == list(theirs) == list(range(1, STEPS + 1))
    assert list(mine.values()) == pytest.approx(list(theirs.values()), rel=1e-9)
    assert [epoch for epoch, _ in judged] == [epoch for epoch, _ in expected]
    assert [loss for _, loss in judged] == pytest.approx([loss for _, loss in expected], rel=1e-9)


def said(stderr: str) -> list[str]:
    """Return the lines that the library, and not the launcher, has written."""
    found = [line for line in stderr.splitlines() if line.startswith("halograd: ")]
    assert found, stderr
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with data, configuration, and an undisturbed run of one process in `whole`."""
    folder = tmp_path_factory.mktemp("survival")
    config = write_config(folder)
    done = mpiexec(1, ["-m", "halograd", "train", config, *sets(*COMMON, f"output.directory={folder / 'whole'}")])
    assert done.returncode == 0, done.stderr
    return folder


def test_signals(whole):
    """After USR1 to the launcher, and after TERM twice to one rank, the exit code is 75, and no step is lost."""
    out = whole / "signals"
    train = ["-m", "halograd", "train", whole / "run.toml", "--resume", *sets(*COMMON, f"output.directory={out}")]
    gate = Gate(whole, 8, 0)
    with started(2, *train, *sets("strategy.height=2"), gate=gate) as (process, _):
        wait_for_step(out, 8, process)
        gate.await_waiting(1)  # the launcher signals all ranks: of those that get it in one step the first is named
        process.send_signal(signal.SIGUSR1)
        stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == CHECKPOINTED, stderr
    assert f"halograd: no checkpoint in {out}/checkpoints yet: starting from the beginning" in stderr.splitlines()
    (stopped,) = read_log(out / "log.jsonl", "stopped")
    first = stopped["step"]
    assert first in (9, 10) and max(losses(out)) == first and stopped["code"] == 75  # the step of the gate, or the next
    assert stdout.splitlines()[-1] == f"stopped after step {first} (SIGUSR1 to rank 0 of 2); go on with --resume"

    gate = Gate(whole, first + 3, 1)
    with started(3, *train, *sets("strategy.sample=1", "strategy.width=3"), gate=gate) as (process, mark):
        wait_for_step(out, first + 3, process)
        victim = rank_processes(mark)[1]
        os.kill(victim, signal.SIGTERM)
        gate.await_signal()
        os.kill(victim, signal.SIGTERM)
        stdout, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == CHECKPOINTED, stderr
    assert max(losses(out)) - first in (4, 5)
    assert stdout.splitlines()[-1].endswith("(SIGTERM to rank 1 of 3); go on with --resume")

    done = mpiexec(1, train)
    assert done.returncode == 0, done.stderr
    assert_same_jobs(out, whole / "whole")
    assert [p.name for p in (out / "checkpoints").glob(".*")] == []


# A rank makes one of these calls in the backward pass of one layer, in the third step.
FAULTS = """
import ctypes, os, signal, sys, time
from pathlib import Path

from mpi4py import MPI

from halograd.cli import main
from halograd.training.executor import Executor

faults = {
    "hangs": lambda: time.sleep(10**6),
    "locks": lambda: ctypes.PyDLL(None).sleep(10**6),
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "suspends": lambda: os.kill(os.getpid(), signal.SIGTSTP),
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
}
def listening():
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    accepting = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    return len([one for one in Path("/proc/self/fd").iterdir() if one.is_symlink() and os.readlink(one) in accepting])

MPI.COMM_WORLD.Barrier()
by_mpi = listening()
fault, victim = faults[sys.argv.pop(1)], int(sys.argv.pop(1))
recorded = Executor._recorded

def disturbed(self, name, category, calls):
    def disturb():
        if self.heartbeat.step == 2 and name == "conv2_1" and category == "backward":
            if listening() > by_mpi:
                os.write(2, f"halograd: {listening()} sockets listen, {by_mpi} of them are MPI's\\n".encode())
            if self.comm.rank == victim:
                fault()
    return recorded(self, name, category, [disturb, *calls])

Executor._recorded = disturbed
main()
"""
JOB_SILENT = "it does not respond (killed, stopped, in a call that locks the interpreter, or its node hangs)"


NIGHTLY = [pytest.param(*case, marks=pytest.mark.nightly) for case in (("hangs", 1), ("locks", 0), ("dies", 1))]


@pytest.mark.parametrize(("fault", "victim"), [("stops", 0), *NIGHTLY])
def test_a_rank_without_progress(whole, fault, victim):
    """The other ranks report a rank that hangs, does not respond or is dead, and no rank is left. The run goes on.

    No rank listens on a network.
    """
    script, out, size = whole / "faults.py", whole / fault, 3 if fault == "hangs" else 2
    script.write_text(FAULTS)
    settings = sets(*COMMON, f"output.directory={out}")
    patience = sets(f"strategy.height={size}", "run.stall_minutes=0.03")
    wrapper, gate = UNSEEN if fault == "dies" else (), Gate(whole)
    train = ["train", whole / "run.toml", *settings]
    with started(size, script, fault, victim, *train, *patience, wrapper=wrapper, gate=gate) as (process, mark):
        gate.await_waiting(*{*range(size)} - {victim}, updates=2)
        gate.let_hang()
        if fault == "dies":  # the launcher does not notice it
            wait_until(lambda: not rank_processes(mark), "all ranks to end")
            jobs.end(mark)
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode not in (0, 2, 64, 75, 130)  # what a script does not start again
    (line,) = said(stderr)
    where = "step 3, backward of layer 'conv2_1', not in an exchange (at faults.py:" if fault == "hangs" else JOB_SILENT
    where = "its process was killed" if fault == "dies" else f"no progress for 0.03 min: {where}"
    assert line.startswith(f"halograd: rank {victim} of {size} on {HOST}: {where}")
    for rank in {*range(size)} - {victim} if fault != "dies" else ():
        assert f"rank {rank} on {HOST}: step 3, backward of layer '" in line and "waiting for 'halo: " in line
    (failed,) = read_log(out / "log.jsonl", "failed")
    assert (failed["rank"], failed["host"], failed.get("at_step", 2)) == (victim, HOST, 2)
    assert status_of(read_record(out)).state == "failed"
    (stacks,) = [one.read_text() for one in (out / STALLS).glob(f"rank-{victim:05d}.*")]
    assert ("faults.py" in stacks) == (fault in ("hangs", "locks")), stacks
    if fault == "stops":
        done = mpiexec(1, ["-m", "halograd", *train, "--resume"])
        assert done.returncode == 0, done.stderr
        told = f"halograd: the job before ended without progress: rank {victim} on {HOST}: {JOB_SILENT}"
        assert [line for line in said(done.stderr) if line.startswith(told)], done.stderr
        assert_same_jobs(out, whole / "whole")
        assert not (out / STALLS).exists()


@pytest.mark.nightly
def test_a_suspended_job(whole):
    """A job that is suspended (SIGTSTP, as by Ctrl-Z) for longer than its limit goes on when it is continued."""
    script, out = whole / "faults.py", whole / "suspended"
    script.write_text(FAULTS)
    settings = sets(*COMMON, f"output.directory={out}", "run.stall_minutes=0.01")
    with started(1, script, "suspends", 0, "train", whole / "run.toml", *settings, gate=Gate(whole)) as (process, mark):
        stopped = lambda: [one for one in rank_processes(mark) if state_of(one) == "T"]  # noqa: E731
        (suspended,) = wait_until(stopped, "the rank to stop")
        time.sleep(0.6 + min(4.0, slowness()) * LOCKED + 1)
        os.kill(suspended, signal.SIGCONT)
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, stderr
    assert_same_jobs(out, whole / "whole")


def state_of(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def run_folder(comm, config):
    """Return a folder with data, a configuration, and an undisturbed run."""
    if comm.rank == 0:
        train(config, [f"output.directory={config.parent / 'whole'}"], comm=MPI.COMM_SELF)
    comm.Barrier()
    return config.parent


def files(folder):
    return sorted(p.name for p in (folder / "out" / "checkpoints").iterdir())


@pytest.mark.ranks(2)
def test_damaged_checkpoints_are_skipped(comm, run_folder, caplog):
    """A run skips a truncated and a damaged checkpoint, and resumes from the third with the same losses."""
    train(run_folder / "run.toml", ["training.epochs=3", "output.checkpoint_steps=2"], comm=comm)
    before = files(run_folder)
    if comm.rank == 0:
        *_, second, first = sorted((run_folder / "out" / "checkpoints").glob("step-*.h5"))
        first.write_bytes(first.read_bytes()[:-1000])
        with h5py.File(second) as file:
            at = file["params/conv1_1/w"].id.get_offset()
        data = bytearray(second.read_bytes())
        data[at] ^= 1
        second.write_bytes(data)
    comm.Barrier()
    caplog.clear()
    train(run_folder / "run.toml", ["output.keep=2"], True, comm=comm)
    assert_same(curve(run_folder / "out"), curve(run_folder / "whole"))
    assert before == ["best.h5", "latest.h5", "step-00000006.h5", "step-00000008.h5", "step-00000009.h5"]
    damaged = ["step-00000008.damaged", "step-00000009.damaged"]
    assert files(run_folder) == ["best.h5", "latest.h5", "step-00000006.h5", damaged[0], damaged[1], "step-00000009.h5"]
    if comm.rank == 0:
        (told,) = caplog.messages
        first, second, taken = told.split("; ")
        assert first.startswith("checkpoint ") and "is truncated or damaged" in first and first.endswith(damaged[1])
        assert "checksum" in second and second.endswith(damaged[0])
        assert taken == "step-00000006.h5 is used instead"
    else:
        assert caplog.messages == []


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("transport, nodes", [("auto", 1), ("emulated:alpha=0,beta=0,node=2", 2)])
def test_resumption_reads_each_byte_once_per_node(comm, run_folder, monkeypatch, transport, nodes):
    """A resumed run reads each byte of the newest checkpoint once per node, including its verification."""
    train(run_folder / "run.toml", ["training.epochs=1"], comm=comm)
    size = (run_folder / "out" / "checkpoints" / "step-00000003.h5").stat().st_size
    read_all, read = chunk_file._read_all, []

    def counted(file, data):
        read.append(read_all(file, data))
        return read[-1]

    monkeypatch.setattr(chunk_file, "_read_all", counted)
    comm.Barrier()
    train(run_folder / "run.toml", ["training.epochs=1", f"backend.transport={transport}"], True, comm=comm)
    per_rank = [size if rank == 0 or (nodes == 2 and rank % 2 == 0) else 0 for rank in range(comm.size)]
    assert comm.allgather(sum(read)) == per_rank


@pytest.mark.ranks(2)
def test_all_checkpoints_damaged(comm, run_folder):
    """Resumption is an error if all checkpoints are damaged; the run does not begin anew."""
    train(run_folder / "run.toml", ["training.epochs=1"], comm=comm)
    if comm.rank == 0:
        (run_folder / "out" / "checkpoints" / "step-00000003.h5").write_bytes(b"")
    comm.Barrier()
    with pytest.raises(UserError, match=r"all are damaged: .*restore"):
        train(run_folder / "run.toml", [], True, comm=comm)


@pytest.mark.ranks(2)
def test_full_disk_in_the_middle(comm, run_folder, monkeypatch, caplog):
    """With a full disk older checkpoints stay, training continues, and the end reports the missing checkpoint."""

    write, begun = checkpoint._write_arrays, []

    def full(file, name, arrays):
        begun.append(name)
        if begun.count("params") > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, name, arrays)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "_write_arrays", full)
        with pytest.raises(DataError, match=r"disk is full; .*checkpoint is .*step-00000002\.h5"):
            train(run_folder / "run.toml", ["output.checkpoint_steps=2"], comm=comm)
    assert files(run_folder) == ["latest.h5", "step-00000002.h5"]
    assert [e["step"] for e in read_log(run_folder / "out" / "log.jsonl", "checkpoint_failed")] == [3, 4, 6, 8]
    assert len(caplog.messages) == (4 if comm.rank == 0 else 0)
    train(run_folder / "run.toml", [], True, comm=comm)
    assert_same(curve(run_folder / "out"), curve(run_folder / "whole"))


@pytest.mark.ranks(2)
def test_signal_while_validating(comm, run_folder, monkeypatch):
    """A signal during a validation ends the run; the resumed run repeats the validation, and logs it once."""
    add, calls = Evaluation.add, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 3 and comm.rank == 1:  # the second epoch: two batches per validation
            os.kill(os.getpid(), signal.SIGTERM)
        add(self)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "add", interrupted)
        stopped = train(run_folder / "run.toml", comm=comm)
    assert (stopped["steps"], stopped["stopped"]) == (6, "SIGTERM to rank 1 of 2")
    assert [e["epoch"] for e in read_log(run_folder / "out" / "log.jsonl", "validation")] == [0]
    comm.Barrier()
    done = train(run_folder / "run.toml", [], True, comm=comm)
    assert (done["steps"], done["stopped"]) == (9, None)
    assert_same(curve(run_folder / "out"), curve(run_folder / "whole"))


@pytest.mark.ranks(2)
def test_signal_before_the_first_step(comm, run_folder, monkeypatch):
    """After a signal before the first step there is no checkpoint, and the next run begins at step 0."""
    make = Session.open.__func__

    def late(cls, *args, **kwargs):
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        return make(cls, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "open", classmethod(late))
        stopped = train(run_folder / "run.toml", [], True, comm=comm)
    assert (stopped["steps"], stopped["stopped"]) == (0, "SIGUSR1 to rank 0 of 2")
    assert not (run_folder / "out" / "checkpoints").exists()
    train(run_folder / "run.toml", [], True, comm=comm)
    assert_same(curve(run_folder / "out"), curve(run_folder / "whole"))


@pytest.mark.ranks(2)
def test_checkpoints_by_time(comm, run_folder):
    """If a step takes longer than the interval, each step has a checkpoint, of which the last two are kept."""
    settings = ["output.checkpoint_minutes=1e-9", "output.checkpoint_epochs=0", "output.keep=2", "training.epochs=2"]
    train(run_folder / "run.toml", settings, comm=comm)
    assert [e["step"] for e in read_log(run_folder / "out" / "log.jsonl", "checkpoint")] == [1, 2, 3, 4, 5, 6]
    assert files(run_folder) == ["latest.h5", "step-00000005.h5", "step-00000006.h5"]


@pytest.mark.ranks(1, 2)
def test_another_run_in_the_directory(comm, run_folder, monkeypatch, caplog):
    """A second run in a directory is an error on all ranks; evaluations and requeued jobs are permitted."""
    for name in directory_of_run._JOBS:
        monkeypatch.delenv(name, raising=False)
    train(run_folder / "run.toml", ["training.epochs=1"], comm=comm)
    out = run_folder / "out"
    other = replace(Owner.this(), key="other", job="4711")
    if comm.rank == 0:
        (out / "run.lock").write_text(json.dumps(asdict(other)))
        (out / "checkpoints" / ".step-00000004.h5.99.partial").write_text("half")
    comm.Barrier()
    before = (files(run_folder), (out / "log.jsonl").read_text())
    monkeypatch.setattr(directory_of_run, "ENDING", 0.0)
    for resume in (False, True):
        with pytest.raises(UserError, match=rf"got {out}, held by process \d+ .*job 4711"):
            train(run_folder / "run.toml", [], resume, comm=comm)
    comm.Barrier()
    assert (files(run_folder), (out / "log.jsonl").read_text()) == before
    assert evaluate(out, comm=comm)["step"] == 3
    assert status_of(read_record(out)).step == 3
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    comm.Barrier()
    train(run_folder / "run.toml", [], True, comm=comm)
    comm.Barrier()
    assert list(curve(out)[0]) == list(range(1, 10))
    assert sum("the job was requeued" in text for text in caplog.messages) == (comm.rank == 0)
    assert not (out / "run.lock").exists() and not any(name.endswith("partial") for name in files(run_folder))


@pytest.mark.ranks(1, 2)
def test_evaluation_of_a_run_that_goes_on(comm, run_folder, monkeypatch):
    """An evaluation reads its checkpoint although the run removes the file and changes latest.h5 meanwhile."""
    train(run_folder / "run.toml", ["training.epochs=1"], comm=comm)
    wanted = evaluate(run_folder / "out", comm=comm)
    make = Session.open.__func__

    def later(cls, *args, **kwargs):
        if comm.rank == 0:
            checkpoints = run_folder / "out" / "checkpoints"
            (checkpoints / "step-00000003.h5").unlink()
            os.replace(run_folder / "whole" / "checkpoints" / "step-00000009.h5", checkpoints / "step-00000009.h5")
            (checkpoints / "latest.h5").write_text("step-00000009.h5\n")
        comm.Barrier()
        return make(cls, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "open", classmethod(later))
        assert evaluate(run_folder / "out", comm=comm) == wanted
    assert evaluate(run_folder / "out", comm=comm)["step"] == 9


@pytest.mark.ranks(1, 2)
def test_a_run_that_was_taken_over_ends(comm, run_folder, monkeypatch):
    """A run that lost the lock on its directory ends before its next checkpoint; the other run's checkpoint stays."""
    step = Trainer.step

    def taken(self):
        if self.optimizer.step == 4 and comm.rank == 0:
            other = replace(Owner.this(), key="other", host="n17", place="another kernel")
            (run_folder / "out" / "run.lock").write_text(json.dumps(asdict(other)))
        return step(self)

    monkeypatch.setattr(Trainer, "step", taken)
    with pytest.raises(UserError, match=r"out was taken over by process \d+ on n17"):
        train(run_folder / "run.toml", ["output.checkpoint_steps=2"], comm=comm)
    comm.Barrier()
    assert files(run_folder) == ["best.h5", "latest.h5", "step-00000002.h5", "step-00000003.h5", "step-00000004.h5"]
    assert (run_folder / "out" / "run.lock").exists()


@pytest.mark.ranks(3)
def test_fewer_ranks(comm, run_folder):
    """A cut for four ranks on three is an error that names cuts for three ranks, the first of which trains."""
    cut = ["strategy.height=2", "strategy.width=2"]
    with pytest.raises(UserError, match=r"4 spatial parts .* 3 ranks; .*; for 3 ranks: `--") as caught:
        train(run_folder / "run.toml", cut, comm=comm)
    shown = str(caught.value).split("`")[1].replace("--set ", "").split()
    assert "`--set strategy=auto`" in str(caught.value)
    train(run_folder / "run.toml", [*cut, *shown], comm=comm)
    assert_same(curve(run_folder / "out"), curve(run_folder / "whole"))


@pytest.mark.ranks(2)
def test_a_directory_that_is_moved_while_the_run_writes(comm, run_folder):
    """If its directory is moved, all ranks of a run end with the same line, and no new directory is created."""

    class Moving(Callback):
        def on_step(self, step, loss, learning_rate):
            if step == 4 and comm.rank == 0:
                (run_folder / "out").rename(run_folder / "moved")

    with pytest.raises(UserError, match=r"\S+/out to stay .* moved; .*--resume"):
        train(run_folder / "run.toml", comm=comm, callbacks=[Moving()])
    comm.Barrier()
    assert not (run_folder / "out").exists()
    comm.Barrier()
    if comm.rank == 0:
        (run_folder / "moved").rename(run_folder / "out")
    comm.Barrier()
    train(run_folder / "run.toml", resume=True, comm=comm)
    assert_same(curve(run_folder / "out"), curve(run_folder / "whole"))


def place(step=4, waiting="", ranks=(), since=60.0, layer="conv1"):
    return Position("n0", 1, step, "forward", layer, waiting, list(ranks), "flags.py:88", since)


WATCHDOG_SILENT = Position("n1", 7)
STALLED = [
    ([place(waiting="halo: conv1"), place(), place(waiting="loss")], 1, "step 5, forward of layer 'conv1', not in an"),
    (
        [place(waiting="halo: conv1"), place(), WATCHDOG_SILENT],
        2,
        "it does not respond .*The others: rank 0 on n0: step 5",
    ),
    (
        [WATCHDOG_SILENT, place(waiting="halo", ranks=[2]), WATCHDOG_SILENT],
        2,
        "does not .*waiting for 'halo' with rank 2 .at fla",
    ),
    (
        [WATCHDOG_SILENT, place(waiting="halo", ranks=[0]), replace(WATCHDOG_SILENT, line="Fatal Python error: x")],
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
    assert read_positions(folder) == {
        0: place(waiting="halo: a", ranks=[1]),
        1: WATCHDOG_SILENT,
        2: WATCHDOG_SILENT,
        3: WATCHDOG_SILENT,
    }
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
