"""Tests of whole runs in this process: the same losses on every grid, evaluation, the path of a call, errors."""

import errno
import json
import sys

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd
from halograd.cli import main
from halograd.cli import run as command
from halograd.data.disk import DataError
from halograd.errors import UserError
from halograd.kernels.kernel import Kernel
from halograd.testing import grids
from halograd.training.checkpoint import Snapshot, read_header, write_checkpoint
from halograd.training.log import read_log, rewind_log
from halograd.training.run import train
from halograd.training.trained import evaluate
from halograd.training.trainer import Diverged
from tests.training.cuts import TOLERANCE, assert_same, curve, overrides_of
from tests.training.runs import CHANNELS, EDGE, SAMPLES, write_config


@pytest.mark.mpi
def test_the_same_curve_on_every_grid(comm, config):
    folder = config.parent
    if comm.rank == 0:
        alone = train(config, [f"output.directory={folder / 'alone'}"], comm=MPI.COMM_SELF)
        assert alone["steps"] == 9 and alone["validation"]["iou"] > 0.3
    comm.Barrier()
    wanted = curve(folder / "alone")
    for number, parts in enumerate(grids(comm.size, ("sample", "height", "width"))):
        out = folder / f"out{number}"
        train(config, [f"output.directory={out}", *overrides_of(parts)], comm=comm)
        assert_same(curve(out), wanted)


@pytest.mark.mpi
def test_resume_on_another_grid(comm, config):
    """A run stopped after 5 of 9 steps on one rank continues on all ranks with the same losses."""
    folder = config.parent
    common = ["output.checkpoint_steps=5", "training.clip_norm=0.5", "optimizer.kind=adam", "output.keep=9"]
    if comm.rank == 0:
        train(config, [*common, f"output.directory={folder / 'whole'}"], comm=MPI.COMM_SELF)
        stopped = folder / "stopped" / "checkpoints"
        stopped.mkdir(parents=True)
        name = "step-00000005.h5"
        (stopped / name).write_bytes((folder / "whole" / "checkpoints" / name).read_bytes())
        lines = (folder / "whole" / "log.jsonl").read_text().splitlines(keepends=True)
        # What a killed run has logged: some steps beyond the checkpoint, the last line half.
        (folder / "stopped" / "log.jsonl").write_text("".join(lines[:-6]) + lines[-6][:20])
    comm.Barrier()
    train(config, [*common, f"output.directory={folder / 'stopped'}", f"strategy.height={comm.size}"], True, comm=comm)
    found = read_log(folder / "stopped" / "log.jsonl", "step")
    assert [e["step"] for e in found] == list(range(1, 10))
    assert_same(curve(folder / "stopped"), curve(folder / "whole"))


@pytest.mark.mpi
def test_evaluate(comm, config):
    """An evaluation on any grid equals the last validation, and metrics of its predictions agree."""
    folder = config.parent
    trained = train(config, ["training.epochs=1", f"strategy.sample={comm.size}"], comm=comm)["validation"]
    for parts in grids(comm.size, ("sample", "height", "width")):
        found = evaluate(folder / "out", overrides_of(parts), predictions=folder / "p.h5", comm=comm)
        assert {k: found[k] for k in trained} == pytest.approx(trained, rel=TOLERANCE)
        assert found["step"] == 3
    with h5py.File(folder / "p.h5") as file:
        guess, truth = file["prediction"][...] > 0, file["target"][...] > 0.5
        assert len(file["sample"]) == 6 and guess.shape == (6, EDGE, EDGE, 1)
    assert (guess & truth).sum() / (guess | truth).sum() == pytest.approx(trained["iou"])
    by_config = evaluate(config, [f"strategy.sample={comm.size}"], comm=comm)
    by_file = evaluate(folder / "out" / "checkpoints" / "latest.h5", overrides_of(parts), comm=comm)
    assert by_config["iou"] == by_file["iou"] == found["iou"]
    everything = evaluate(folder / "out", overrides_of(parts), samples="all", comm=comm)
    assert everything["accuracy"] != found["accuracy"]


@pytest.mark.mpi
def test_timeline(comm, config):
    train(config, ["output.timeline=true", f"strategy.height={comm.size}", "training.epochs=1"], comm=comm)
    events = json.loads((config.parent / "out" / "timeline.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    for rank in range(comm.size):
        own = {(e["name"], e["cat"]) for e in spans if e["pid"] == rank}
        assert {("conv1_1", "forward"), ("conv1_1", "backward"), ("update", "update"), ("read", "io")} <= own
        sums = {("allreduce", "communication"), ("allreduce", "wait")}
        assert sums <= own if comm.size > 1 else not sums & own  # on one rank nothing travels
        halos = {name for name, category in own if category == "communication" and name.startswith("halo: ")}
        assert ("halo: conv2_1" in halos) == (comm.size > 1) == bool(halos)
    steps = [e for e in spans if e["name"] == "conv1_1" and e["cat"] == "forward" and e["pid"] == 0]
    assert len(steps) == 3  # validation is not in it
    (phases,) = read_log(config.parent / "out" / "log.jsonl", "phases")
    assert phases["phases"]["forward"]["seconds"] > 0


@pytest.mark.mpi
def test_nan_stops_all_ranks(comm, config):
    """If the loss overflows, all ranks stop, and the checkpoint of the previous epoch is finite."""
    settings = ["schedule.kind=step", "schedule.milestones=[1]", "schedule.factor=1e30", "schedule.warmup_epochs=0"]
    settings += ["optimizer={kind = 'sgd'}", "training.dtype=float32", f"strategy.sample={comm.size}"]
    with pytest.raises(Diverged) as caught:
        train(config, settings, comm=comm)
    latest = config.parent / "out" / "checkpoints" / "step-00000003.h5"
    assert str(caught.value).endswith(f"; the last good checkpoint is {latest}")
    assert "lower schedule.learning_rate" in str(caught.value)
    assert evaluate(config.parent / "out", comm=comm)["step"] == 3
    comm.Barrier()
    assert read_log(config.parent / "out" / "log.jsonl", "stopped")


@pytest.mark.mpi
def test_nan_before_any_checkpoint(comm, config):
    settings = ["schedule.learning_rate=1e30", "schedule.warmup_epochs=0", "optimizer={kind = 'sgd'}"]
    settings.append("training.dtype=float32")
    with pytest.raises(Diverged, match="; no checkpoint was written yet"):
        train(config, settings, comm=comm)


@pytest.mark.mpi
def test_full_disk(comm, config, monkeypatch):
    """With a full disk all ranks stop with one line, and the previous checkpoint is intact."""
    from halograd.training import checkpoint as module

    def full(file, name, arrays):
        raise OSError(errno.ENOSPC, "No space left on device")

    train(config, ["training.epochs=1"], comm=comm)
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_arrays", full)
        with pytest.raises(DataError, match=r"step-00000006\.h5: the disk is full"):
            train(config, ["training.epochs=2"], True, comm=comm)
    folder = config.parent / "out" / "checkpoints"
    assert sorted(p.name for p in folder.iterdir()) == ["best.h5", "latest.h5", "step-00000003.h5"]
    assert read_header(folder / "latest.h5")[0].step == 3


@pytest.mark.mpi
def test_a_timeline_that_cannot_be_written(comm, config, monkeypatch, caplog):
    """A run that is complete, with its last checkpoint, does not fail because its timeline does not fit on the disk."""
    from halograd.training import timeline as module

    def full(parts, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "merge_traces", full)
    assert train(config, ["training.epochs=1", "output.timeline=true"], comm=comm)["steps"] == 3
    assert len(read_log(config.parent / "out" / "log.jsonl", "finished")) == 1
    warned = [text for text in caplog.messages if "the run is complete without it" in text]
    assert len(warned) == (comm.rank == 0) and all("timeline.json" in text for text in warned)


MODEL = "model={name='mesh', channels=3, widths=[4, 6], convs=1, resolution=16"

REFUSED = [
    (
        ["model.resolution=32"],
        r"data\.path: expected samples of shape \(32, 32, 3\) for 'x' of model 'mesh', got \(16, 16, 3\)",
    ),
    (["model.name=mush"], "model.name: expected one of .*mesh.*, got 'mush'"),
    (["model.depth=3"], "model.depth: unknown key; expected one of resolution, channels"),
    (["model.convs=-1"], "model.convs: expected a whole number >= 1, got -1"),
    (["model.widths=[]"], "model.widths: expected 1 or more entries, got \\[\\]"),
    (["model.widths=[1000000, 1000000]"], "expected a network and a batch within the .* of a node, got .* GiB"),
    ([MODEL + "}"], r"data\.rule: expected a rule from cells to patches \(any, .* predicts \(4, 4\) patches"),
    (["backend.transport=pigeon"], "backend.transport: expected auto, mpi, .* got 'pigeon'"),
    (["backend.kernels=abacus"], "backend.kernels: expected auto, .* got 'abacus'"),
    (["data.path=none.h5"], r"none\.h5: no such file"),
    (["data.targets=x"], "expected a dataset 'x', got inputs .*, mask"),
    (["training.batch=14"], "training.batch: expected at most 13, the training samples of .*data.h5, got 14; choose"),
    (["training.batch=2147483647"], "training.batch: expected at most 13, the training samples of .*, got 2147483647"),
    (["training.batch=100000000000000000000"], "training.batch: expected a whole number of at most 64 bits, got one"),
    (["strategy.height=64"], "strategy: 64 parts along 'height', but input 'x' has an extent of 16 there; use at most"),
    (["strategy.height=16"], r"strategy: 16 spatial parts do not divide the . ranks; start a multiple of 16 ranks"),
    (["strategy.sample=64"], "strategy: .* needs 64 ranks, the run has ."),
    (["strategy={file = 'none.json'}"], "none.json: expected a JSON file to read"),
]


@pytest.mark.mpi
@pytest.mark.parametrize("overrides, message", REFUSED, ids=[m for _, m in REFUSED])
def test_refused(comm, config, overrides, message):
    with pytest.raises((UserError, ValueError), match=message) as caught:
        train(config, overrides, comm=comm)
    assert "\n" not in str(caught.value)
    assert not (config.parent / "out" / "checkpoints").exists()


@pytest.mark.mpi
def test_patches(comm, config):
    train(config, [MODEL + "}", "data.rule=any", "training.epochs=1"], comm=comm)
    assert (config.parent / "out" / "checkpoints" / "latest.h5").exists()


@pytest.mark.mpi
def test_another_runs_directory(comm, config):
    train(config, ["training.epochs=1"], comm=comm)
    with pytest.raises(UserError, match=r"output\.directory: .*checkpoints, .*--resume"):
        train(config, comm=comm)
    with pytest.raises(UserError, match=r"'conv1_1: Conv 8x8x5', got .*8x8x4'"):
        train(config, ["model.widths=[5, 6]"], True, comm=comm)
    with pytest.raises(ValueError, match="checkpoint has seed = 7, this run has 8"):
        train(config, ["training.seed=8"], True, comm=comm)


@pytest.mark.mpi
def test_nothing_to_resume(comm, config, caplog):
    """With --resume and no checkpoint, as in the first job of a batch script, a run starts at step 0 with a message."""
    if comm.rank == 0:  # what a run that was killed before its first checkpoint has logged
        (config.parent / "out").mkdir()
        (config.parent / "out" / "log.jsonl").write_text('{"event": "step", "step": 1, "loss": 7.0}\n')
    comm.Barrier()
    train(config, ["training.epochs=1"], resume=True, comm=comm)
    assert sum("starting from the beginning" in text for text in caplog.messages) == (comm.rank == 0)
    assert list(curve(config.parent / "out")[0]) == [1, 2, 3]


@pytest.mark.mpi
def test_nothing_to_evaluate(comm, config):
    with pytest.raises(UserError, match=r"a trained run \(its configuration, "):
        evaluate(config, comm=comm)
    if comm.rank == 0:
        write_checkpoint(config.parent / "alone.h5", Snapshot([], "float32", {}, {}, {}, None))
    comm.Barrier()
    with pytest.raises(UserError, match=r"configuration in .*alone\.h5"):  # a script wrote it without a configuration
        evaluate(config.parent / "alone.h5", comm=comm)
    with pytest.raises(UserError, match=r"samples: .*all, got 'test'"):
        evaluate(config, samples="test", comm=comm)
    train(config, ["training.epochs=1", "data.validation=0"], comm=comm)
    with pytest.raises(UserError, match=r"training\.batch: .* 19, .*data.h5, got 20"):
        evaluate(config, ["training.batch=20"], comm=comm)
    with pytest.raises(UserError, match=r"data\.validation: .*held-out.*, got 0"):
        evaluate(config.parent / "out", comm=comm)


def test_rewinding_a_log(tmp_path):
    path = tmp_path / "log.jsonl"
    rewind_log(path, 3)
    values = {"loss": 0.5, "learning_rate": 0.1, "seconds": 0.2, "samples_per_second": 20.0}
    entries = [{"event": "step", "step": s, **values} for s in range(1, 6)]
    path.write_text("".join(json.dumps(e) + "\n" for e in entries) + "[" * 100_000 + '\n3\n{"event": "st')
    rewind_log(path, 3)
    assert read_log(path) == entries[:3]


def test_the_data_are_what_the_tests_think(tmp_path):
    write_config(tmp_path)
    with h5py.File(tmp_path / "data.h5") as file:
        assert file["inputs"].shape == (SAMPLES, EDGE, EDGE, CHANNELS) and 0.3 < np.mean(file["mask"]) < 0.7


FOLDER = halograd.__path__[0] + "/"


@pytest.mark.ranks(1)
def test_a_step_goes_through_four_files(config, monkeypatch):
    """The stack of every kernel call of a training step, from the command's function on, has four files of ours."""
    paths, call = {}, Kernel.__call__

    def watched(kernel):
        frame, files = sys._getframe(1), []
        while frame is not None:
            files.insert(0, frame.f_code.co_filename)
            frame = frame.f_back
        own = dict.fromkeys(file.removeprefix(FOLDER) for file in files if file.startswith(FOLDER))
        paths.setdefault(tuple(own), kernel.impl)
        call(kernel)

    monkeypatch.setattr(Kernel, "__call__", watched)
    monkeypatch.setattr(command, "leave", sys.exit)  # the command line finalizes MPI, which other tests need
    with pytest.raises(SystemExit):
        main(["train", str(config), "--set", "training.epochs=1"])
    step = ("cli/run.py", "cli/commands.py", "training/run.py", "training/trainer.py", "training/executor.py")
    assert step in paths, paths
    own = {path[len(step) :] for path in paths if path[: len(step)] == step}
    assert all(len(more) == 0 or more[0].startswith("layers/") for more in own), "what a layer computes between kernels"
