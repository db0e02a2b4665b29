"""Runs whose samples are varied: under every cut as in one process, resumed or not; evaluated as they are."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.data import DataError
from halograd.training import apply, evaluate, train
from halograd.training.checkpoint import read_header
from halograd.training.log import read_log
from tests.training.runs import EDGE, write_config

CUTS = {1: [{}], 2: [{"height": 2}, {"sample": 2}], 3: [{"width": 3}], 4: [{"height": 2, "width": 2}]}
RULES = (
    'data.augment={flips = ["height", "width"], turns = true, shifts = ["width"], noise = 0.05, contrast = 0.1, '
    'brightness = 0.1, vectors = [["channel 2", "channel 0"]]}'
)
CROP = "data.augment={flips = ['height'], crop = true}"


@pytest.fixture
def config(comm, shared):
    if comm.rank == 0:
        write_config(shared)
    comm.barrier()
    return shared / "run.toml"


def losses(folder):
    return [entry["loss"] for entry in read_log(folder / "log.jsonl", "step")]


@pytest.mark.mpi
@pytest.mark.parametrize("rules", [[RULES], [CROP, "model.resolution=12"]], ids=["turned", "cropped"])
def test_as_in_one_process(comm, config, rules):
    def run(out, cut, comm, parts=(1, 2)):
        more = [*rules, *(f"strategy.{axis}={n}" for axis, n in cut.items()), f"output.directory={config.parent / out}"]
        for epochs in parts:
            train(config, [*more, f"training.epochs={epochs}", 'schedule.kind="constant"'], epochs > 1, comm=comm)
        return evaluate(config, more, "all", comm=comm)

    found = [run(f"cut{number}", cut, comm) for number, cut in enumerate(CUTS.get(comm.size, []))]
    if comm.rank:
        return
    want = run("alone", {}, MPI.COMM_SELF, parts=(2,))
    for number, one in enumerate(found):
        assert losses(config.parent / f"cut{number}") == pytest.approx(losses(config.parent / "alone"), rel=1e-9)
        assert one["loss"] == pytest.approx(want["loss"], rel=1e-9)
    if len(rules) == 1:
        train(
            config,
            ["training.epochs=2", 'schedule.kind="constant"', f"output.directory={config.parent / 'plain'}"],
            comm=MPI.COMM_SELF,
        )
        assert losses(config.parent / "plain") != pytest.approx(losses(config.parent / "alone"), rel=1e-3)
        # Statistics are those of the samples as they are.
        plain, varied = (
            read_header(config.parent / f"{run}/checkpoints/latest.h5")[0].normalization for run in ("plain", "alone")
        )
        assert plain == varied


@pytest.mark.ranks(1)
def test_evaluation_and_predictions(comm, config):
    """Of a run with crops: evaluation of the middle, predictions of all of it."""
    out = config.parent / "out"
    sets = [CROP, "model.resolution=12", "training.epochs=1"]
    train(config, sets, comm=comm)
    evaluate(out, predictions=config.parent / "judged.h5", samples="all", comm=comm)
    apply(out, [str(config.parent / "data.h5")], config.parent / "p.h5", [f"model.resolution={EDGE}"], comm=comm)
    with h5py.File(config.parent / "data.h5") as file, h5py.File(config.parent / "middle.h5", "w") as middle:
        middle.create_dataset("inputs", data=file["inputs"][:, 2:14, 2:14]).attrs["layout"] = "NHWC"
    apply(out, [str(config.parent / "middle.h5")], config.parent / "m.h5", comm=comm)
    with h5py.File(config.parent / "judged.h5") as judged, h5py.File(config.parent / "m.h5") as applied:
        order = np.argsort(judged["sample"])
        np.testing.assert_allclose(judged["prediction"][()][order], applied["prediction"][()], rtol=1e-9)
    with h5py.File(config.parent / "p.h5") as file:
        assert file["prediction"].shape[1:3] == (EDGE, EDGE)
    with pytest.raises(DataError, match=r"data.augment.crop: expected a window \(20, 20\)"):
        train(config, [*sets, "model.resolution=20", f"output.directory={config.parent / 'x'}"], comm=comm)
    with pytest.raises(DataError, match=r"data\.augment\.flips: expected axes of height, width, got 'depth'"):
        train(config, ["data.augment={flips = ['depth']}", f"output.directory={config.parent / 'x'}"], comm=comm)
