"""Runs on patches of samples of different size: the results of one process under every cut, also resumed."""

import re

import numpy as np
import pytest

from halograd.errors import UserError
from halograd.training import train
from halograd.training.log import read_log
from tests.training.cuts import CUTS, check_resumed, logged_losses, overrides_of
from tests.training.runs import write_arrays, write_own

NET = """
import halograd as hg

def build(ignore: bool = True, weights: bool = False):
    x, t = hg.Input((8, 8, 2), name="x"), hg.Input((8, 8, 1), name="mask", dtype="int32")
    y = hg.Conv(3, 3, padding=1)(hg.Conv(4, 3, padding=1, activation="relu")(x))
    loss = hg.SoftmaxCrossEntropy(ignore_index=-1)(y, t) if ignore else hg.SoftmaxCrossEntropy()(y, t)
    if weights:
        loss = hg.SoftmaxCrossEntropy(normalization="weights")(y, t, hg.Input((8, 8, 1), name="valid"))
    return hg.Network({"prediction": y, "loss": loss}, name="patches")
"""
DATA = """[data]
path = "parts"
validation = 0.3
inputs = {x = "image"}
targets = {mask = "label"}
patches = 3
"""
SIZES = ((4, 12, 10), (3, 6, 16), (2, 8, 8))
OWN = """
from halograd.data import open_dataset

def open(path):
    return open_dataset(path, {"x": "image"}, {"mask": "label"}, several_sizes=True)
"""
NEAR = ["data.foreground=0.4", "data.foreground_classes=[2]", "data.augment={flips=['height'], rotate=20}"]


def write(folder):
    (folder / "parts").mkdir()
    rng = np.random.default_rng(5)
    for i, (n, *grid) in enumerate(SIZES):
        arrays = {"image": rng.standard_normal((n, *grid, 2)), "label": rng.integers(0, 3, (n, *grid)).astype(np.uint8)}
        write_arrays(folder / "parts" / f"s{i}.h5", arrays, image="NHWC")
    write_own(folder, NET, DATA)
    (folder / "own.py").write_text(OWN)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("sets", [[], [*NEAR, "training.steps_per_epoch=3"]], ids=["patches", "foreground"])
def test_as_in_one_process(comm, config, sets):
    check_resumed(comm, config, sets, [overrides_of(cut) for cut in CUTS[comm.size][:1]])
    steps = read_log(config.parent / "cut0/log.jsonl", "begin")[0]["steps_per_epoch"]
    assert steps == (3 if sets else 6 * 3 // 4)


@pytest.mark.ranks(1)
def test_what_is_said_and_refused(comm, config, capfd):
    said = ["output.progress=true", "data.evaluate=middle"]
    train(config, [*NEAR[:2], *said, "training.epochs=1"], comm=comm)
    said = " ".join(capfd.readouterr())
    assert "windows of 8x8 in samples of 8x8 to 12x10; the foreground of 'mask' was found in " in said
    assert "only the middle window of every sample is evaluated, 8x8 of 8x8 to 12x10 (" in said
    one = ["data.path=parts/s2.h5", "data.validation=0", "output.directory=one"]
    for sets, message in (
        (["model.ignore=false"], "data.patches: expected samples of at least 8x8 elements, the network's window, got "
         "6x16 in parts/s1.h5, sample 0, beyond which the target 'mask' has no value; give its loss weights"),
        (["data.patches=0"], "parts/s1.h5: 'image': expected samples of shape (12, 10, 2) as in parts/s0.h5, got"),
        (["data.file=own.py:open", "data.patches=0"], "data.patches: expected 1 or more for samples of different"),
        (["training.batch=40"], "expected at most 18, the training samples (3 patches of each) of parts, got 40"),
        ([*one, "data.patches=0", "training.batch=2", NEAR[0]], "data.foreground: expected data.patches = 1 or more"),
        ([*one, NEAR[0], "data.foreground_classes=[7]"], "data.foreground: expected classes 7 in 'mask' of the"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=re.escape(message)) as error:
            train(config, ["output.directory=no", *sets], comm=comm)
        assert "\n" not in str(error.value)
    sets = ["data.path=parts/s2.h5", "data.validation=0", "training.steps_per_epoch=5", "training.epochs=2"]
    assert train(config, [*sets, "output.directory=two"], comm=comm)["steps"] == 10
    own, masked = ["data.file=own.py:open"], ["model.weights=true", "data.invalid=mask"]
    for number, sets in enumerate(([], own, masked)):
        train(config, [*sets, f"output.directory=same{number}", "training.epochs=1"], comm=comm)
    first, *others = (logged_losses(config.parent / f"same{number}") for number in range(3))
    assert others == [pytest.approx(first, rel=1e-12)] * 2, "padding does not count, by class or by weight"
