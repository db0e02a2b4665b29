"""Tests of disturbed runs in this process: damaged and unwritable checkpoints, signals at unfavorable moments."""

import errno
import json
import os
import signal
from dataclasses import asdict, replace

import h5py
import pytest
from mpi4py import MPI

from halograd.data.disk import DataError
from halograd.errors import UserError
from halograd.report.status import read_record, status_of
from halograd.training import checkpoint, chunk_file
from halograd.training import directory as directory_of_run
from halograd.training.directory import Owner
from halograd.training.evaluation import Evaluation
from halograd.training.log import read_log
from halograd.training.monitors import Callback
from halograd.training.run import train
from halograd.training.session import Session
from halograd.training.trained import evaluate
from halograd.training.trainer import Trainer
from tests.training.cuts import assert_same, curve


@pytest.fixture
def folder(comm, config):
    """Return a folder with data, a configuration, and an undisturbed run."""
    if comm.rank == 0:
        train(config, [f"output.directory={config.parent / 'whole'}"], comm=MPI.COMM_SELF)
    comm.Barrier()
    return config.parent


def files(folder):
    return sorted(p.name for p in (folder / "out" / "checkpoints").iterdir())


@pytest.mark.ranks(2)
def test_damaged_checkpoints_are_skipped(comm, folder, caplog):
    """A run skips a truncated and a damaged checkpoint, and resumes from the third with the same losses."""
    train(folder / "run.toml", ["training.epochs=3", "output.checkpoint_steps=2"], comm=comm)
    before = files(folder)
    if comm.rank == 0:
        *_, second, first = sorted((folder / "out" / "checkpoints").glob("step-*.h5"))
        first.write_bytes(first.read_bytes()[:-1000])
        with h5py.File(second) as file:
            at = file["params/conv1_1/w"].id.get_offset()
        data = bytearray(second.read_bytes())
        data[at] ^= 1
        second.write_bytes(data)
    comm.Barrier()
    caplog.clear()
    train(folder / "run.toml", ["output.keep=2"], True, comm=comm)
    assert_same(curve(folder / "out"), curve(folder / "whole"))
    assert before == ["best.h5", "latest.h5", "step-00000006.h5", "step-00000008.h5", "step-00000009.h5"]
    damaged = ["step-00000008.damaged", "step-00000009.damaged"]
    assert files(folder) == ["best.h5", "latest.h5", "step-00000006.h5", damaged[0], damaged[1], "step-00000009.h5"]
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
def test_resumption_reads_each_byte_once_per_node(comm, folder, monkeypatch, transport, nodes):
    """A resumed run reads each byte of the newest checkpoint once per node, including its verification."""
    train(folder / "run.toml", ["training.epochs=1"], comm=comm)
    size = (folder / "out" / "checkpoints" / "step-00000003.h5").stat().st_size
    read_all, read = chunk_file._read_all, []

    def counted(file, data):
        read.append(read_all(file, data))
        return read[-1]

    monkeypatch.setattr(chunk_file, "_read_all", counted)
    comm.Barrier()
    train(folder / "run.toml", ["training.epochs=1", f"backend.transport={transport}"], True, comm=comm)
    per_rank = [size if rank == 0 or (nodes == 2 and rank % 2 == 0) else 0 for rank in range(comm.size)]
    assert comm.allgather(sum(read)) == per_rank


@pytest.mark.ranks(2)
def test_all_checkpoints_damaged(comm, folder):
    """Resumption is an error if all checkpoints are damaged; the run does not begin anew."""
    train(folder / "run.toml", ["training.epochs=1"], comm=comm)
    if comm.rank == 0:
        (folder / "out" / "checkpoints" / "step-00000003.h5").write_bytes(b"")
    comm.Barrier()
    with pytest.raises(UserError, match=r"all are damaged: .*restore"):
        train(folder / "run.toml", [], True, comm=comm)


@pytest.mark.ranks(2)
def test_full_disk_in_the_middle(comm, folder, monkeypatch, caplog):
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
            train(folder / "run.toml", ["output.checkpoint_steps=2"], comm=comm)
    assert files(folder) == ["latest.h5", "step-00000002.h5"]
    assert [e["step"] for e in read_log(folder / "out" / "log.jsonl", "checkpoint_failed")] == [3, 4, 6, 8]
    assert len(caplog.messages) == (4 if comm.rank == 0 else 0)
    train(folder / "run.toml", [], True, comm=comm)
    assert_same(curve(folder / "out"), curve(folder / "whole"))


@pytest.mark.ranks(2)
def test_signal_while_validating(comm, folder, monkeypatch):
    """A signal during a validation ends the run; the resumed run repeats the validation, and logs it once."""
    add, calls = Evaluation.add, []

    def interrupted(self):
        calls.append(1)
        if len(calls) == 3 and comm.rank == 1:  # the second epoch: two batches per validation
            os.kill(os.getpid(), signal.SIGTERM)
        add(self)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "add", interrupted)
        stopped = train(folder / "run.toml", comm=comm)
    assert (stopped["steps"], stopped["stopped"]) == (6, "SIGTERM to rank 1 of 2")
    assert [e["epoch"] for e in read_log(folder / "out" / "log.jsonl", "validation")] == [0]
    comm.Barrier()
    done = train(folder / "run.toml", [], True, comm=comm)
    assert (done["steps"], done["stopped"]) == (9, None)
    assert_same(curve(folder / "out"), curve(folder / "whole"))


@pytest.mark.ranks(2)
def test_signal_before_the_first_step(comm, folder, monkeypatch):
    """After a signal before the first step there is no checkpoint, and the next run begins at step 0."""
    make = Session.open.__func__

    def late(cls, *args, **kwargs):
        if comm.rank == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        return make(cls, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "open", classmethod(late))
        stopped = train(folder / "run.toml", [], True, comm=comm)
    assert (stopped["steps"], stopped["stopped"]) == (0, "SIGUSR1 to rank 0 of 2")
    assert not (folder / "out" / "checkpoints").exists()
    train(folder / "run.toml", [], True, comm=comm)
    assert_same(curve(folder / "out"), curve(folder / "whole"))


@pytest.mark.ranks(2)
def test_checkpoints_by_time(comm, folder):
    """If a step takes longer than the interval, each step has a checkpoint, of which the last two are kept."""
    settings = ["output.checkpoint_minutes=1e-9", "output.checkpoint_epochs=0", "output.keep=2", "training.epochs=2"]
    train(folder / "run.toml", settings, comm=comm)
    assert [e["step"] for e in read_log(folder / "out" / "log.jsonl", "checkpoint")] == [1, 2, 3, 4, 5, 6]
    assert files(folder) == ["latest.h5", "step-00000005.h5", "step-00000006.h5"]


@pytest.mark.ranks(1, 2)
def test_another_run_in_the_directory(comm, folder, monkeypatch, caplog):
    """A second run in a directory is an error on all ranks; evaluations and requeued jobs are permitted."""
    for name in directory_of_run._JOBS:
        monkeypatch.delenv(name, raising=False)
    train(folder / "run.toml", ["training.epochs=1"], comm=comm)
    out = folder / "out"
    other = replace(Owner.this(), key="other", job="4711")
    if comm.rank == 0:
        (out / "run.lock").write_text(json.dumps(asdict(other)))
        (out / "checkpoints" / ".step-00000004.h5.99.partial").write_text("half")
    comm.Barrier()
    before = (files(folder), (out / "log.jsonl").read_text())
    monkeypatch.setattr(directory_of_run, "ENDING", 0.0)
    for resume in (False, True):
        with pytest.raises(UserError, match=rf"got {out}, held by process \d+ .*job 4711"):
            train(folder / "run.toml", [], resume, comm=comm)
    comm.Barrier()
    assert (files(folder), (out / "log.jsonl").read_text()) == before
    assert evaluate(out, comm=comm)["step"] == 3
    assert status_of(read_record(out)).step == 3
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    comm.Barrier()
    train(folder / "run.toml", [], True, comm=comm)
    comm.Barrier()
    assert list(curve(out)[0]) == list(range(1, 10))
    assert sum("the job was requeued" in text for text in caplog.messages) == (comm.rank == 0)
    assert not (out / "run.lock").exists() and not any(name.endswith("partial") for name in files(folder))


@pytest.mark.ranks(1, 2)
def test_evaluation_of_a_run_that_goes_on(comm, folder, monkeypatch):
    """An evaluation reads its checkpoint although the run removes the file and changes latest.h5 meanwhile."""
    train(folder / "run.toml", ["training.epochs=1"], comm=comm)
    wanted = evaluate(folder / "out", comm=comm)
    make = Session.open.__func__

    def later(cls, *args, **kwargs):
        if comm.rank == 0:
            checkpoints = folder / "out" / "checkpoints"
            (checkpoints / "step-00000003.h5").unlink()
            os.replace(folder / "whole" / "checkpoints" / "step-00000009.h5", checkpoints / "step-00000009.h5")
            (checkpoints / "latest.h5").write_text("step-00000009.h5\n")
        comm.Barrier()
        return make(cls, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "open", classmethod(later))
        assert evaluate(folder / "out", comm=comm) == wanted
    assert evaluate(folder / "out", comm=comm)["step"] == 9


@pytest.mark.ranks(1, 2)
def test_a_run_that_was_taken_over_ends(comm, folder, monkeypatch):
    """A run that lost the lock on its directory ends before its next checkpoint; the other run's checkpoint stays."""
    step = Trainer.step

    def taken(self):
        if self.optimizer.step == 4 and comm.rank == 0:
            other = replace(Owner.this(), key="other", host="n17", place="another kernel")
            (folder / "out" / "run.lock").write_text(json.dumps(asdict(other)))
        return step(self)

    monkeypatch.setattr(Trainer, "step", taken)
    with pytest.raises(UserError, match=r"out was taken over by process \d+ on n17"):
        train(folder / "run.toml", ["output.checkpoint_steps=2"], comm=comm)
    comm.Barrier()
    assert files(folder) == ["best.h5", "latest.h5", "step-00000002.h5", "step-00000003.h5", "step-00000004.h5"]
    assert (folder / "out" / "run.lock").exists()


@pytest.mark.ranks(3)
def test_fewer_ranks(comm, folder):
    """A cut for four ranks on three is an error that names cuts for three ranks, the first of which trains."""
    cut = ["strategy.height=2", "strategy.width=2"]
    with pytest.raises(UserError, match=r"4 spatial parts .* 3 ranks; .*; for 3 ranks: `--") as caught:
        train(folder / "run.toml", cut, comm=comm)
    shown = str(caught.value).split("`")[1].replace("--set ", "").split()
    assert "`--set strategy=auto`" in str(caught.value)
    train(folder / "run.toml", [*cut, *shown], comm=comm)
    assert_same(curve(folder / "out"), curve(folder / "whole"))


@pytest.mark.ranks(2)
def test_a_directory_that_is_moved_while_the_run_writes(comm, folder):
    """If its directory is moved, all ranks of a run end with the same line, and no new directory is created."""

    class Moving(Callback):
        def on_step(self, step, loss, learning_rate):
            if step == 4 and comm.rank == 0:
                (folder / "out").rename(folder / "moved")

    with pytest.raises(UserError, match=r"\S+/out to stay .* moved; .*--resume"):
        train(folder / "run.toml", comm=comm, callbacks=[Moving()])
    comm.Barrier()
    assert not (folder / "out").exists()
    comm.Barrier()
    if comm.rank == 0:
        (folder / "moved").rename(folder / "out")
    comm.Barrier()
    train(folder / "run.toml", resume=True, comm=comm)
    assert_same(curve(folder / "out"), curve(folder / "whole"))
