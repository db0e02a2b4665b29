"""Tests that an output file that cannot be written is an error before the computation, and that no file is replaced."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.data.disk import DataError
from halograd.training import evaluation, trained
from halograd.training.evaluation import check_predictions, write_predictions
from halograd.training.run import train
from halograd.training.trained import evaluate
from tests.training.runs import write_own


def listing(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def test_where_predictions_may_be_written(tmp_path):
    check_predictions(tmp_path / "new" / "folder" / "p.h5")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "empty.h5").touch()
    check_predictions(tmp_path / "empty.h5")
    with h5py.File(tmp_path / "old.h5", "w") as file:
        for name in ("prediction", "target", "sample"):
            file[name] = np.zeros(3)
    check_predictions(tmp_path / "old.h5")


@pytest.mark.parametrize(
    "name, message",
    [
        ("folder", "it is a folder; give the name of a file in it"),
        ("text", "expected no file there, or older predictions, got another"),
        ("data.h5", "expected no file there, or older predictions, got another"),
        ("pipe", "expected no file there, or older predictions, got another"),
        ("device", "expected no file there, or older predictions, got another"),
        ("text/p.h5", "file exists"),
        ("/proc/none/p.h5", "no such file or directory"),
        ("p" * 300, "file name too long"),
        ("nul\0", "embedded null byte"),
    ],
)
def test_where_they_may_not(tmp_path, name, message):
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["inputs"] = np.zeros(3)
    before = listing(tmp_path)
    with pytest.raises(DataError, match=message) as caught:
        check_predictions(tmp_path / name)
    assert str(caught.value).startswith(f"cannot write {tmp_path / name}: ") and "\n" not in str(caught.value)
    assert listing(tmp_path) == before


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("fault", [MemoryError("all predictions at once"), RuntimeError("h5py"), OSError("disk")])
def test_whatever_keeps_rank_0_from_writing_is_told_to_the_others(shared, monkeypatch, fault):
    def fail(*_, **__):
        raise fault

    monkeypatch.setattr(evaluation, "atomic_path", fail)
    monkeypatch.setattr(evaluation, "compared_pairs", lambda executor: [])
    monkeypatch.setattr(evaluation, "Gather", lambda executor, names: SimpleNamespace(close=lambda: None))
    samples = SimpleNamespace(dataset=None)
    with Communicator(MPI.COMM_WORLD) as comm:
        session = SimpleNamespace(executor=None, comm=comm, samples=samples, feed=lambda batches: batches)
        with pytest.raises(Exception, match=str(fault)):
            write_predictions(session, [], shared / "p.h5")


@pytest.mark.ranks(1, 2)
def test_found_before_the_evaluation(comm, config, monkeypatch):
    folder = config.parent
    if comm.rank == 0:
        (folder / "mine.h5").write_text("mine")
    comm.Barrier()
    cut = [f"strategy.sample={comm.size}"]
    train(folder / "run.toml", [*cut, "training.epochs=1"], comm=comm)
    for name in ("evaluate_parts", "write_predictions"):
        monkeypatch.setattr(trained, name, lambda *_: pytest.fail("expected no evaluation"))
    with pytest.raises(DataError, match=r"mine\.h5: .*no file.*, got another"):
        evaluate(folder / "out", cut, predictions=folder / "mine.h5", comm=comm)
    comm.Barrier()
    monkeypatch.undo()
    assert (folder / "mine.h5").read_text() == "mine" and trained.write_predictions is write_predictions
    for _ in range(2):  # the second time in place of the first
        evaluate(folder / "out", cut, predictions=folder / "new" / "p.h5", comm=comm)
        comm.Barrier()
        assert [p.name for p in (folder / "new").iterdir()] == ["p.h5"]


TWO_TARGETS = """
from halograd.layers import *

def build():
    x = Input((16, 16, 3), "x")
    y = Conv(1, 3, padding=1)(x)
    fine, coarse = Input((16, 16, 1), "mask"), Input((16, 16, 1), "other")
    loss = BinaryCrossEntropyWithLogits()(y, fine) + 0.5 * Dice()(y, coarse)
    loss = loss + MeanSquaredError()(Conv(1, 1)(x), Input((16, 16, 1), "field"))
    return Network({"prediction": y, "loss": loss}, name="own")
"""


def test_one_prediction_beside_two_targets(tmp_path, monkeypatch):
    """For one prediction with two targets, scores and datasets of the second pair have both names."""
    monkeypatch.chdir(tmp_path)
    path = write_own(tmp_path, TWO_TARGETS)
    targets = "data.targets={mask = 'mask', other = 'mask', field = 'mask'}"
    train(path, [targets, "training.epochs=1"])
    found = evaluate("out", predictions=tmp_path / "p.h5")
    assert {"iou", "prediction other iou"} <= set(found) and found["iou"] == found["prediction other iou"]
    with h5py.File(tmp_path / "p.h5") as file:
        np.testing.assert_array_equal(file["prediction"], file["prediction other/prediction"])
        assert len(file) == 7 and "conv2/target" in file
    check_predictions(tmp_path / "p.h5")
