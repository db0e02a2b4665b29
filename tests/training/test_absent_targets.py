"""Tests that targets with weight 0 change no bit under any cut, whatever their value: 0, out of range or NaN."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.errors import UserError
from halograd.training import evaluate, train
from tests.training.cuts import CUTS, curve, overrides_of, scores_of
from tests.training.runs import EDGE, SAMPLES, write_arrays, write_own

NET = """
import halograd as hg

def build(edge=16):
    x, valid = hg.Input((edge, edge, 3), name="x"), hg.Input((edge, edge, 1), name="valid")
    mask = hg.Input((edge, edge, 1), name="mask", dtype="int32")
    rows, share = hg.Input((edge, 1, 1), name="rows"), hg.Input((1,), name="share")
    y = hg.Conv(4, 3, padding=1, activation="relu")(x)
    logits, coarse = hg.Conv(3, 1, name="logits")(y), hg.Conv(1, 4, stride=4, name="coarse")(y)
    field = hg.Conv(2, 1, name="field")(y)
    height, part = hg.Input((edge, edge, 2), name="height"), hg.Input(coarse.shape, name="part")
    patches = hg.Input(coarse.shape, name="patches")
    loss = hg.SoftmaxCrossEntropy(class_weights="balanced", normalization="weights")(logits, mask, valid)
    loss = loss + 0.1 * hg.MeanSquaredError(normalization="weights")(field, height, rows)
    loss = loss + 0.1 * hg.Huber()(field, height, share) + 0.1 * hg.Dice("softmax")(logits, mask, valid)
    loss = loss + 0.1 * hg.AbsoluteError()(coarse, part, patches)
    return hg.Network({"prediction": logits, "field": field, "coarse": coarse, "loss": loss}, name="absent")
"""
DATA = """
[data]
path = "{name}.h5"
validation = 0.3
rule = "{rule}"
augment = {{flips = ["height", "width"], shifts = ["width"]}}
inputs = {{x = "u"}}
targets = {{mask = "label", valid = "valid", share = "share", rows = "rows", height = "h", part = "p", \
patches = "valid"}}
"""
#: By the name of the file: class, height and part where there is no weight.
THERE = {"zero": (0, 0, 0), "large": (77, 1e6, -1e6), "nan": (np.nan, np.nan, np.nan)}


def write(folder):
    rng = np.random.default_rng(5)
    valid = rng.random((SAMPLES, EDGE, EDGE)) < 0.7
    valid[:, :4, 4:8] = False  # whole patches too
    rows, share = (rng.integers(0, 2, (SAMPLES, n)).astype(float) for n in (EDGE, 1))
    u = rng.standard_normal((SAMPLES, EDGE, EDGE, 3))
    label = rng.integers(0, 3, (SAMPLES, EDGE, EDGE)).astype(float)
    h, p = rng.standard_normal((SAMPLES, EDGE, EDGE, 2)), rng.standard_normal((SAMPLES, EDGE, EDGE))
    neither = np.broadcast_to(((rows == 0) & (share == 0))[..., None], valid.shape)  # two losses read the height
    for name, (kind, height, part) in THERE.items():
        arrays = {
            "u": u,
            "label": np.where(valid, label, kind),
            "valid": valid.astype(np.uint8),
            "rows": rows[..., None, None],
            "share": share[:, 0],
            "h": np.where(neither[..., None], height, h),
            "p": np.where(valid, p, part),
        }
        write_arrays(folder / f"{name}.h5", arrays, u="NHWC")
    write_own(folder, NET, DATA.format(name="zero", rule="fraction"))


def run(config, comm, cut, name, out, sets=()):
    return scores_of(comm, config, [*overrides_of(cut), f'data.path="{name}.h5"', f"output.directory={out}", *sets])


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param("fraction", marks=pytest.mark.ranks(1, 2, 4)),
        pytest.param("max", marks=pytest.mark.ranks(2, 3)),
    ],
)
def test_no_digit_depends_on_what_has_no_weight(comm, config, rule):
    sets = [f'data.rule="{rule}"']
    for number, cut in enumerate(CUTS[comm.size]):
        found = {name: run(config, comm, cut, name, f"{name}{number}", sets) for name in THERE}
        curves = {name: curve(config.parent / f"{name}{number}") for name in THERE}
        assert found["nan"] == found["large"] == found["zero"] and np.isfinite(found["zero"]["loss"])
        assert curves["nan"] == curves["large"] == curves["zero"]
    if comm.rank == 0:
        alone = run(config, MPI.COMM_SELF, {}, "nan", "alone", sets)
        assert found["nan"] == pytest.approx(alone, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    "invalid", [pytest.param("skip", marks=pytest.mark.ranks(2)), pytest.param("fill", marks=pytest.mark.ranks(1))]
)
def test_policies_see_no_fault(comm, config, invalid):
    """Policies for invalid data ignore NaN in targets with weight 0, and find NaN in inputs."""
    if comm.rank == 0:
        for name in THERE:
            with h5py.File(f"{name}.h5", "r+") as file:
                file["u"][3, 0, 0, 1] = np.nan
    comm.barrier()
    cut, sets = {"height": comm.size}, [f'data.invalid="{invalid}"']
    found = {name: run(config, comm, cut, name, f"of-{name}", sets) for name in THERE}
    assert found["nan"] == found["large"] == found["zero"]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("trainable", [True, False])
def test_no_sample_left(comm, config, trainable):
    """A run is an error if all samples have NaN in a target with a weight above 0."""
    sets = ["training.epochs=1", f"strategy.height={comm.size}"]
    train(config, sets, comm=comm)
    if comm.rank == 0:
        with h5py.File("zero.h5", "r+") as file:
            file["h"][:, 5, 5, 0], file["rows"][:, 5] = np.nan, 1
    comm.barrier()
    with pytest.raises(
        UserError, match=r"target nan in .*'h' at \(5, \d+, 0\).*weight 0"
    ):
        train(config, [*sets, "data.augment={flips=[]}", "output.directory=other"], comm=comm)
    message = (
        r"data.invalid: expected .*, got 0: \"skip\" leaves out 19 of 19 \(.*zero.h5, sample 0: nan in target 'h'"
    )
    with pytest.raises(UserError, match=message):
        if trainable:
            train(config, [*sets, 'data.invalid="skip"', "output.directory=third"], comm=comm)
        else:
            evaluate(config, [*sets, 'data.invalid="skip"'], "all", comm=comm)
