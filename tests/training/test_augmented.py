"""Tests of runs with augmented samples: equal under every cut, also resumed; evaluation does not augment."""

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.data import DataError
from halograd.errors import UserError
from halograd.training import apply, evaluate, train
from halograd.training.checkpoint import read_header
from tests.training.cuts import CUTS, check_resumed, logged_losses, overrides_of
from tests.training.runs import EDGE

RULES = (
    'data.augment={flips = ["height", "width"], turns = true, shifts = ["width"], noise = 0.05, contrast = 0.1, '
    'brightness = 0.1, vectors = [["channel 2", "channel 0"]]}'
)
SMOOTH = (
    'data.augment={rotate = 40, scale = [0.8, 1.3], elastic = {magnitude = 1.5, spacing = 5}, blur = [0.5, 0.9], '
    "gamma = [0.7, 1.4], flips = ['width'], crop = true, probability = {scale = 0.5}}"
)
CROP = "data.augment={flips = ['height'], crop = true}"


@pytest.mark.mpi
@pytest.mark.parametrize(
    "rules",
    [[RULES], [CROP, "model.resolution=12"], [SMOOTH, "model.resolution=12"]],
    ids=["turned", "cropped", "warped"],
)
def test_as_in_one_process(comm, config, rules):
    check_resumed(comm, config, rules, [overrides_of(cut) for cut in CUTS[comm.size]])
    if comm.rank == 0 and len(rules) == 1:
        train(
            config,
            ["training.epochs=2", 'schedule.kind="constant"', f"output.directory={config.parent / 'plain'}"],
            comm=MPI.COMM_SELF,
        )
        assert logged_losses(config.parent / "plain") != pytest.approx(logged_losses(config.parent / "alone"), rel=1e-3)
        # Statistics are those of the samples as they are.
        plain, varied = (
            read_header(config.parent / f"{run}/checkpoints/latest.h5")[0].normalization for run in ("plain", "alone")
        )
        assert plain == varied


@pytest.mark.ranks(1)
def test_evaluation_and_predictions(comm, config):
    """After training with crops, evaluation uses the middle of each sample, and `apply` the whole sample."""
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
    with pytest.raises(UserError, match=r"data.augment.crop: .* 20x20"):
        train(config, [*sets, "model.resolution=20", f"output.directory={config.parent / 'x'}"], comm=comm)
    with pytest.raises(DataError, match=r"data\.augment\.flips: .*got 'depth'"):
        train(config, ["data.augment={flips = ['depth']}", f"output.directory={config.parent / 'x'}"], comm=comm)
