"""Tests of jobs that fail or go on: killed and resumed with another cut, after another run, in other batches."""

import importlib
import json
import os
import platform
import shutil
import signal
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.errors import UserError
from halograd.report.status import read_record, status_of
from halograd.training import apply, evaluate
from halograd.training.directory import checkpoint_of
from halograd.training.log import read_log
from halograd.training.run import train
from halograd.training.watchdog import STALLS, read_positions
from tests.harness.limits import LIMIT, wait_until
from tests.launch import PATIENT, mpiexec
from tests.training.cuts import CUTS, Stop, logged_losses, logged_rates, overrides_of
from tests.training.launching import Gate, losses, rank_processes, sets, started, wait_for_step
from tests.training.runs import write_config

COMMON = ["training.batch=2", "training.epochs=4", "output.checkpoint_steps=4", "output.keep=99"]
STEPS, KILL_AFTER = 24, 10  # six steps per epoch: step 8 is a checkpoint in the middle of the second one


def test_killed_and_resumed(tmp_path):
    """A job of 2 x 2 ranks in space, one of which is killed, is resumed by 2 ranks that cut samples.

    The losses are those of one process.
    """
    config = write_config(tmp_path)
    train = ["-m", "halograd", "train", config, *sets(*COMMON)]
    whole = mpiexec(1, [*train, *sets(f"output.directory={tmp_path / 'whole'}")])
    assert whole.returncode == 0, whole.stderr

    gate = Gate(tmp_path, KILL_AFTER, 2)
    with started(4, *train, *sets("strategy.height=2", "strategy.width=2"), gate=gate) as (process, mark):
        wait_for_step(tmp_path / "out", KILL_AFTER, process)
        ranks = rank_processes(mark)
        assert len(ranks) == 4
        os.kill(ranks[2], signal.SIGKILL)
        process.wait(timeout=LIMIT)
    assert process.returncode != 0
    assert max(losses(tmp_path / "out")) == KILL_AFTER

    assert (tmp_path / "out" / "run.lock").exists()
    # The monitor of the node reports the rank that was killed, after the launcher has ended.
    wait_until(lambda: read_log(tmp_path / "out" / "log.jsonl", "failed"), "the line of the killed rank")
    status = status_of(read_record(tmp_path / "out"))
    assert status.state == "failed" and status.detail.startswith(f"rank 2 on {platform.node()}: its process was killed")
    assert read_positions(tmp_path / "out" / STALLS)[2].process == ranks[2]  # the launcher names the process
    resumed = mpiexec(2, [*train, *sets("strategy.sample=2"), "--resume"])
    assert resumed.returncode == 0, resumed.stderr
    assert "run.lock: taken over from process" in resumed.stderr and "its process is gone" in resumed.stderr
    assert not (tmp_path / "out" / "run.lock").exists()
    found, wanted = losses(tmp_path / "out"), losses(tmp_path / "whole")
    assert list(found) == list(wanted) == list(range(1, STEPS + 1))
    assert list(found.values()) == pytest.approx(list(wanted.values()), rel=1e-9)
    mine, theirs = (read_log(tmp_path / f / "log.jsonl", "validation") for f in ("out", "whole"))
    assert [e["loss"] for e in mine] == pytest.approx([e["loss"] for e in theirs], rel=1e-9)
    assert [e["iou"] for e in mine] == [e["iou"] for e in theirs]


def test_diverged(tmp_path):
    """A diverged run prints one line, ends with exit code 2, and names the last good checkpoint."""
    config = write_config(tmp_path)
    settings = ["optimizer={kind = 'sgd'}", "schedule={kind = 'step', learning_rate = 0.01, milestones = [1]}"]
    settings += ["schedule.factor=1e30", "training.dtype=float32", "strategy.height=2"]
    done = mpiexec(2, [*PATIENT, "train", config, *sets(*settings)])
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("halograd: error: step ") and "lower schedule.learning_rate" in line
    assert f" (on rank 0 of 2 on {platform.node()}, and on 1 more); the last" in line
    named = Path(line.rpartition("the last good checkpoint is ")[2])
    with h5py.File(named) as file:
        assert "params" in file


def test_two_runs_in_one_directory(tmp_path):
    """A second run in a directory ends with a one-line error; the first one continues until its signal."""
    config = write_config(tmp_path)
    train = ["-m", "halograd", "train", config, *sets(*COMMON)]
    with started(2, *train, *sets("strategy.height=2"), gate=Gate(tmp_path, 5, 0)) as (process, mark):
        wait_for_step(tmp_path / "out", 5, process)
        for more in ([], ["--resume"]):
            second = mpiexec(1, [*train, *more])
            assert second.returncode == 2 and len(second.stderr.splitlines()) == 1
            assert "expected one that no other run writes to" in second.stderr and "held by process" in second.stderr
        os.kill(rank_processes(mark)[0], signal.SIGUSR1)
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode == 75, stderr
    steps = list(losses(tmp_path / "out"))
    assert steps == list(range(1, len(steps) + 1))
    assert checkpoint_of(tmp_path / "out" / "checkpoints" / "latest.h5").name == f"step-{steps[-1]:08d}.h5"


FAILS = """
import sys
from halograd.cli import main
from halograd.training.trainer import Trainer

step = Trainer.step

def fail(self):
    if self.executor.comm.rank == 1 and self.optimizer.step == 2:
        raise RuntimeError("a bug on one rank")
    return step(self)

Trainer.step = fail
main(sys.argv[1:])
"""


def test_one_rank_fails(tmp_path):
    """An error of one rank ends the job at once, with the traceback of this rank, and leaves no process."""
    config = write_config(tmp_path)
    script = tmp_path / "fails.py"
    script.write_text(FAILS)
    with started(3, script, "train", config, *sets("strategy.height=3"), gate=Gate(tmp_path)) as (process, _):
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    assert "[rank 1 of 3] RuntimeError: a bug on one rank" in stderr
    assert f"halograd: rank 1 of 3 on {platform.node()}: RuntimeError: a bug on one rank; the job ends" in stderr
    (failed,) = read_log(tmp_path / "out" / "log.jsonl", "failed")
    assert (failed["rank"], failed["cause"]) == (1, "RuntimeError: a bug on one rank") and failed["time"] > 1e9
    assert "[rank 0 of 3]" not in stderr and "[rank 2 of 3]" not in stderr


def test_bad_data_on_one_rank(tmp_path):
    """A NaN that only one rank reads ends the job with one line."""
    config = write_config(tmp_path)
    with h5py.File(tmp_path / "data.h5", "r+") as file:
        file["inputs"][1:, 13, 3, 1] = float("nan")  # the look at sample 0 before the run finds nothing
    settings = sets("strategy.height=2", "data.normalize=false")
    with started(2, "-m", "halograd", "train", config, *settings, gate=Gate(tmp_path)) as (process, _):
        _, stderr = process.communicate(timeout=LIMIT)
    assert process.returncode != 0
    lines = [line for line in stderr.splitlines() if line.startswith("halograd: error: ")]
    assert len(lines) == 1 and "nan in sample" in lines[0] and lines[0].endswith(f"(rank 1 of 2 on {platform.node()})")
    assert "Traceback" not in stderr


@pytest.mark.mpi
def test_a_refused_start_leaves_no_trace(comm, config):
    """A run that is rejected at its start does not change the log of the previous job, which may still run."""
    folder = config.parent
    sets = [f"strategy.height={comm.size}", "training.epochs=1"]
    train(folder / "run.toml", sets, comm=comm)
    comm.Barrier()
    before = (folder / "out" / "log.jsonl").read_text()
    for more, resume in ((sets, False), ([*sets, f"strategy.height={comm.size + 1}"], True)):
        with pytest.raises(UserError):
            train(folder / "run.toml", more, resume, comm=comm)
        comm.Barrier()
        assert (folder / "out" / "log.jsonl").read_text() == before


FROM = ["optimizer={kind='adam'}", "schedule={kind='constant', learning_rate=0.01}", "data.shuffle=false"]


def steps(folder):
    return [(entry["epoch"], entry["step"]) for entry in read_log(folder / "log.jsonl", "step")]


@pytest.mark.ranks(1, 2, 4)
def test_a_run_goes_on_as_the_other_one_would(comm, config):
    """The order of samples is the same in every epoch, so the first epoch of the new run is the next one of the old."""
    cuts = [overrides_of(cut) for cut in CUTS[comm.size]]
    train("run.toml", [*FROM, *cuts[0], "training.epochs=2", "output.directory=old"], comm=comm)
    for number, cut in enumerate(cuts):
        new = [*FROM, *cut, "training.init_from=old", "training.epochs=1", f"output.directory=new{number}"]
        assert train("run.toml", new, comm=comm, callbacks=[Stop(8)])["stopped"]
        comm.barrier()
        train("run.toml", new, True, comm=comm)
        comm.barrier()
    train("run.toml", [*FROM, *cuts[-1], "training.epochs=3", "output.directory=old"], True, comm=comm)
    comm.barrier()
    old = config.parent / "old"
    for new in (config.parent / f"new{number}" for number in range(len(cuts))):
        assert [step for _, step in steps(new)] == [step for _, step in steps(old)[6:]]
        assert logged_losses(new) == pytest.approx(logged_losses(old)[6:], rel=1e-9)


@pytest.mark.ranks(1, 2)
def test_other_runs_to_begin_from_are_refused(comm, config):
    with pytest.raises(UserError, match=r"init_from: .*a run.*, got no"):
        train("run.toml", ["training.init_from=nothing", "output.directory=out"], comm=comm)
    train("run.toml", ["training.epochs=1", "output.directory=old"], comm=comm)
    comm.barrier()
    with pytest.raises(UserError, match=r"expected the optimizer SGD .*, got AdamW"):
        train("run.toml", ["optimizer={kind='sgd'}", "training.init_from=old", "output.directory=out2"], comm=comm)
    with pytest.raises(UserError, match=r"init_from: .*one source .*, got init"):
        train("run.toml", ["training.init_from=old", "training.init=a.safetensors"], comm=comm)


@pytest.mark.ranks(1)
def test_the_first_and_the_last_step_are_logged(comm, config):
    train(config, ["training.epochs=1", "output.directory=old"], comm=comm)
    train(config, ["training.init_from=old", "training.epochs=2", "output.log_steps=50"], comm=comm)
    assert [step for _, step in steps(config.parent / "out")] == [4, 9]


def in_smaller_batches(out, sets, comm):
    """Train in batches of 4, in the second epoch after a signal in batches of 2. Collective over `comm`."""
    sets = ["training.epochs=2", "schedule={kind='linear', learning_rate=0.01}", *sets, f"output.directory={out}"]
    assert train("run.toml", sets, comm=comm, callbacks=[Stop(4)])["stopped"]
    comm.barrier()
    return train("run.toml", [*sets, "training.batch=2"], True, comm=comm)


@pytest.mark.ranks(1, 2, 4)
def test_with_smaller_batches(comm, config):
    """13 samples: an epoch of 3 steps of 4, then 1 or 2 of 4 and the rest of 2; the rate is that of the samples."""
    for number, cut in enumerate(CUTS[comm.size]):
        result = in_smaller_batches(f"cut{number}", overrides_of(cut), comm)
        comm.barrier()
        folder = config.parent / f"cut{number}"
        epochs, rates = [epoch for epoch, _ in steps(folder)], logged_rates(folder)
        stopped = max(n for n in (4, 5) if n <= result["steps"] and (len(epochs) - n) * 2 + (n - 3) * 4 == 12)
        assert epochs.count(0) == 3 and result["steps"] == len(epochs) and result["validation"]
        assert rates[:stopped] == pytest.approx([0.01 * (1 - s / 6) for s in range(stopped)])
        begin = 6 + 2 * (stopped - 3)  # in steps of 2 samples
        assert rates[stopped:] == pytest.approx([0.01 * (1 - s / 12) for s in range(begin, 12)])
        comm.barrier()
    if comm.rank == 0 and comm.size > 1:
        in_smaller_batches("alone", [], MPI.COMM_SELF)
        assert logged_losses(folder)[:4] == pytest.approx(logged_losses(config.parent / "alone")[:4], rel=1e-9)


#: Six steps per epoch.
EVERY = [
    *("training.validate_every=4", "training.batch=2", "training.epochs=4", "training.patience=3"),
    *("schedule={kind='plateau', learning_rate=0.3, factor=0.5, patience=1}", "output.checkpoint_epochs=0"),
]


def entries(folder):
    kinds = ("step", "validation", "early_stop", "checkpoint")
    fields = ("event", "step", "epoch", "loss", "learning_rate", "best")
    found = [entry for entry in read_log(folder / "log.jsonl") if entry["event"] in kinds]
    return [{key: entry.get(key) for key in fields} for entry in found]


@pytest.mark.ranks(2)
def test_between_epochs_and_resumed(comm, config):
    """Interrupted before, during or long after a validation, a run goes on the same, to the same best and last one."""
    cut = [f"strategy.height={comm.size}"]
    whole = train(config, [*EVERY, *cut, "output.directory=whole"], comm=comm)
    for signalled, stopped in ((3, 4), (8, 8), (9, 10)):
        callbacks = [Stop(signalled, here=comm.rank == comm.size - 1)]
        result = train(config, [*EVERY, *cut], signalled > 3, comm=comm, callbacks=callbacks)
        assert result["stopped"] is not None and result["steps"] == stopped
    again = train(config, [*EVERY, *cut], True, comm=comm)
    assert again["best"] == whole["best"] and again["steps"] == whole["steps"] and again["validation"]
    if comm.rank == 0:
        want, got = (entries(config.parent / name) for name in ("whole", "out"))
        validated = [one for one in want if one["event"] == "validation"]
        steps = [one["step"] for one in validated]
        assert steps == [4, 8, 12, 16, 20, 24][: len(steps)] and [one["epoch"] for one in validated[:3]] == [0, 1, 1]
        assert [one for one in got if one["event"] != "checkpoint"] == [x for x in want if x["event"] != "checkpoint"]
        assert len({one["learning_rate"] for one in want if one["event"] == "step"}) > 1
        losses = {one["step"]: one["loss"] for one in validated}
        assert whole["best"]["step"] == min(losses, key=losses.get)
        better = [one["step"] for one in want if one["event"] == "checkpoint" and one["best"]]
        assert better[-1] == whole["best"]["step"] and better[0] == 4


def test_the_last_update_is_validated(working):
    config = write_config(working)
    train(config, ["training.validate_every=4", "training.epochs=2", "output.checkpoint_epochs=0"])
    assert [one["step"] for one in read_log(working / "out/log.jsonl", "validation")] == [4, 6]
    assert [one["step"] for one in read_log(working / "out/log.jsonl", "checkpoint")] == [6]


JOBS = Path(__file__).parents[2] / "examples"
CUT = {1: {}, 2: {"height": 2}, 4: {"height": 2, "width": 2}}


@pytest.fixture
def job(request, shared, comm, monkeypatch):
    """Enter a folder of a job with its data and new data; return the settings of a short run in float64."""
    name, sizes, new = request.param
    folder = shared / name
    if comm.rank == 0:
        shutil.copytree(JOBS / name, folder, ignore=shutil.ignore_patterns("__pycache__"))
        write = importlib.import_module(f"examples.{name}.data").write
        write(*sizes(folder))
        write(*new(folder))
    comm.barrier()
    monkeypatch.chdir(folder)
    return ["training.epochs=2", 'training.dtype="float64"', 'backend.kernels="numpy"']


def check(comm, sets, data, run, predicted):
    """Assert that losses and scores under a cut are those of one process; apply the network to new data."""
    cut = overrides_of(CUT[comm.size])
    train("run.toml", [*sets, *cut], comm=comm)
    found = evaluate("run.toml", [*sets, *cut], comm=comm)
    apply(run, data, predicted, what="classes", comm=comm)
    if comm.rank == 0:
        alone = [*sets, "output.directory=alone"]
        train("run.toml", alone, comm=MPI.COMM_SELF)
        want = evaluate("run.toml", alone, comm=MPI.COMM_SELF)
        np.testing.assert_allclose(logged_losses(Path(run)), logged_losses(Path("alone")), rtol=1e-10)
        assert {k: found[k] for k in want.keys() - {"checkpoint"}} == pytest.approx(
            {k: want[k] for k in want.keys() - {"checkpoint"}}, rel=1e-10
        )


def only(*jobs):
    return pytest.mark.parametrize("job", jobs, indirect=True, ids=[job[0] for job in jobs])


@only(("climate", lambda f: (f / "ocean.nc", 10, 16, 24), lambda f: (f / "next.nc", 4, 16, 24)))
@pytest.mark.ranks(1, 2, 4)
def test_climate(comm, job):
    sets = [*job, "model.rows=16", "model.columns=24", "model.width=4"]
    check(comm, sets, "next.nc", "runs/ocean", "predicted.nc")
    if comm.rank == 0:
        with h5py.File("predicted.nc") as file:
            values = file["prediction"]
            assert values.shape == (4, 16, 24, 1) and values.attrs["units"] == "degC"
            assert [values.dims[k][0].name for k in range(3)] == ["/time", "/lat", "/lon"]


@only(("medicine", lambda f: (f / "patients", 4), lambda f: (f / "new", 2, 50, False)))
@pytest.mark.ranks(1, 2, 4)
def test_medicine(comm, job):
    check(comm, [*job, "model.width=2", "data.patches=2"], "new", "runs/lesions", "predicted")
    if comm.rank == 0:
        sources = json.loads(Path("predicted/sources.json").read_text())["files"]
        assert [one["source"] for one in sources.values()] == [f"new/imagesTr/p{n}_0000.nii.gz" for n in (50, 51)]
        shapes = [h5py.File(f"predicted/{name}")["prediction"].shape for name in sources]
        assert len(set(shapes)) == 2


@only(("slide", lambda f: (f / "slides", 2, 1024), lambda f: (f / "new", 1, 1024, 9)))
@pytest.mark.ranks(1, 2, 4)
def test_slide(comm, job):
    check(comm, [*job, "model.width=2", "training.steps_per_epoch=2"], "new", "runs/tumor", "predicted.h5")
    if comm.rank == 0:
        with h5py.File("predicted.h5") as file:
            assert file["prediction"].shape == (1, 256, 256, 1) and file["prediction"].dtype == np.uint8


@pytest.mark.parametrize("name", ["climate", "medicine", "slide"])
def test_own_lines_are_few(name):
    code = [line for line in (JOBS / name / "net.py").read_text().splitlines() if line.strip()]
    assert len(code) <= 30
