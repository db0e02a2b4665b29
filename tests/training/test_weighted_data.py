"""Tests of weights of positions and samples from files: as in one process under every cut, augmented, checked."""

import logging

import h5py
import numpy as np
import pytest

import halograd as hg
from halograd.data import ArrayDataset
from halograd.errors import UserError
from halograd.training import train
from tests.training.cuts import check_scores
from tests.training.runs import EDGE, SAMPLES, write_named

NET = """
import halograd as hg

def build(edge=16):
    x = hg.Input((edge, edge, 3), name="x")
    mask = hg.Input((edge, edge, 1), name="mask", dtype="int32")
    valid = hg.Input((edge, edge, 1), name="valid")
    share, rows = hg.Input((1,), name="share"), hg.Input((edge, 1, 1), name="rows")
    patches = hg.Input((edge // 4, edge // 4, 1), name="patches")
    y = hg.Conv(4, 3, padding=1, activation="relu")(x)
    logits, coarse = hg.Conv(3, 1, name="logits")(y), hg.Conv(1, 4, stride=4, name="coarse")(y)
    field, height = hg.Conv(3, 1, name="field")(y), hg.Input((edge, edge, 3), name="height")
    part = hg.Input(coarse.shape, name="part")
    loss = hg.SoftmaxCrossEntropy(normalization="weights")(logits, mask, valid)
    loss = loss + 0.1 * hg.MeanSquaredError(normalization="weights")(field, height, rows)
    loss = loss + 0.1 * hg.AbsoluteError()(coarse, part, patches) + 0.1 * hg.Dice("softmax")(logits, mask, share)
    return hg.Network({"prediction": logits, "coarse": coarse, "loss": loss}, name="weighted")
"""
DATA = """
validation = 0.3
rule = "max"
augment = {flips = ["height", "width"], shifts = ["width"]}
inputs = {x = "u"}
targets = {mask = "label", valid = "valid", share = "share", rows = "rows", height = "u", \
part = "label", patches = "valid"}
"""


def write(folder):
    rng = np.random.default_rng(5)
    arrays = {
        "u": rng.standard_normal((SAMPLES, EDGE, EDGE, 3)),
        "label": rng.integers(0, 3, (SAMPLES, EDGE, EDGE)),
        "valid": rng.integers(0, 2, (SAMPLES, EDGE, EDGE)).astype(np.uint8),
        "share": rng.random(SAMPLES),
        "rows": rng.random((SAMPLES, EDGE, 1, 1)),
    }
    write_named(folder, NET, DATA, arrays, u="NHWC")


@pytest.mark.mpi
def test_trains_and_judges_as_one_process_does(comm, config):
    """Weights per position, row and sample, moved and reduced with their images, have the results of one process."""
    want = check_scores(comm, config)
    if comm.rank == 0:
        with h5py.File("alone.h5") as file, h5py.File("data.h5") as data:
            samples = file["sample"][()]
            guess, counts = np.argmax(file["prediction"][()], -1), data["valid"][()][samples] > 0
            right = (guess == file["target"][()][..., 0])[counts]
            assert want["accuracy"] == pytest.approx(right.mean(), rel=1e-12)
            cells = data["valid"][()][samples].reshape(-1, EDGE // 4, 4, EDGE // 4, 4).mean((2, 4)) > 0
            wrong = np.abs(file["coarse/prediction"][()] - file["coarse/target"][()])[..., 0]
            assert want["coarse mae"] == pytest.approx(wrong[cells].mean(), rel=1e-6)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("share", -0.5), r"target -0.5 in sample \d+ of 'share' at \(0,\); expected a finite number >= 0"),
        (("rows", np.nan), r"target nan in sample \d+ of 'rows' at \(3, 0, 0\); expected a finite number >= 0"),
    ],
)
def test_weights_that_are_none_are_refused(comm, config, change, message):
    name, value = change
    if comm.rank == 0:
        with h5py.File("data.h5", "r+") as file:
            file[name][(slice(None), 3) if name == "rows" else slice(None)] = value
    comm.barrier()
    with pytest.raises(ValueError, match=message):
        train(config, ["data.augment={flips=[]}"], comm=comm)


@pytest.mark.ranks(1)
def test_weights_of_0_are_worth_a_warning(comm, config, caplog):
    """Weights that are all 0 cause a warning; other constant weights do not."""
    with h5py.File("data.h5", "r+") as file:
        file["valid"][...], file["share"][...], file["rows"][...] = 0, 1, 1e9
    with caplog.at_level(logging.WARNING):
        train(config, ["training.epochs=1"], comm=comm)
    found = [record.getMessage() for record in caplog.records]
    assert any("the weights valid are 0 in all 19 samples: no position has a loss" in text for text in found)
    assert not any("share" in text or "rows" in text for text in found)


@pytest.mark.ranks(1)
def test_weights_belong_to_the_targets(comm, config):
    sets = ['data.inputs={x="u", share="share"}', 'data.targets={mask="label"}']
    with pytest.raises(UserError, match=r"data\.inputs\.share: .*in data.targets"):
        train(config, sets, comm=comm)


@pytest.mark.ranks(1)
def test_arrays_of_weights_are_neither_normalized_nor_altered(comm, working):
    """Arrays of weights are neither normalized nor changed, whether or not the data set declares them as targets."""
    rng = np.random.default_rng(1)
    x, t = rng.random((8, 6, 6, 2)), rng.random((8, 6, 6, 1))
    w = np.full((8, 1), 1e3)
    w[::2] = 0

    def build():
        y = hg.Conv(1, 3, padding=1)(hg.Input((6, 6, 2), "x"))
        loss = hg.MeanSquaredError(normalization="weights")(y, hg.Input((6, 6, 1), "target"), hg.Input((1,), "w"))
        return hg.Network({"prediction": y, "loss": loss}, name="fitted")

    found = []
    for number, targets in enumerate([("target",), ("target", "w")]):
        data = ArrayDataset({"x": x, "target": t, "w": w}, targets)
        run = hg.fit(build(), data, f"run{number}", epochs=2, batch=2, validation=0.25, augment={"noise": 0.5})
        found.append(run.history["loss"])
    assert found[0] == found[1] and all(0 < value < 10 for value in found[0])
