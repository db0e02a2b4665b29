"""Weights made from targets (``data.invalid = "mask"``): the run of a stored mask under every cut, bit by bit."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.data import ArrayDataset, DataError
from halograd.data.masked import Masked
from halograd.data.targets import TargetRange
from halograd.dtensor import Box
from halograd.errors import UserError
from halograd.training import train
from tests.training.cuts import CUTS, curve, overrides_of, scores_of
from tests.training.runs import EDGE, SAMPLES, write_arrays, write_own

NET = """
import halograd as hg

def build(edge=16):
    x, valid = hg.Input((edge, edge, 3), name="x"), hg.Input((edge, edge, 1), name="valid")
    mask = hg.Input((edge, edge, 1), name="mask", dtype="int32")
    y = hg.Conv(4, 3, padding=1, activation="relu")(x)
    logits, field = hg.Conv(3, 1, name="logits")(y), hg.Conv(2, 1, name="field")(y)
    coarse = hg.Conv(1, 4, stride=4, name="coarse")(y)
    height, part = hg.Input((edge, edge, 2), name="height"), hg.Input(coarse.shape, name="part")
    sea, some = hg.Input((edge, edge, 2), name="sea"), hg.Input(coarse.shape, name="some")
    loss = hg.SoftmaxCrossEntropy(class_weights="balanced", normalization="weights")(logits, mask, valid)
    loss = loss + 0.1 * hg.MeanSquaredError(normalization="weights")(field, height, sea)
    loss = loss + 0.1 * hg.Dice("softmax")(logits, mask, valid) + 0.1 * hg.AbsoluteError()(coarse, part, some)
    return hg.Network({"prediction": logits, "field": field, "coarse": coarse, "loss": loss}, name="masked")
"""
DATA = """
[data]
path = "{name}.h5"
validation = 0.3
rule = "max"
augment = {{flips = ["height", "width"], shifts = ["width"]}}
inputs = {{x = "u"}}
invalid = "{invalid}"
[data.targets]
mask = "label"
height = "h"
part = "p"
"""
#: Datasets of the weights of the file whose masks are stored.
STORED = ['data.targets.valid="valid"', 'data.targets.sea="sea"', 'data.targets.some="valid"']
#: By the name of the file: class, height and part where there is no valid number.
ABSENT = {"nan": (255, np.nan, np.nan), "packed": (9, -32768, np.inf)}


def write(folder):
    rng = np.random.default_rng(5)
    valid, sea = rng.random((SAMPLES, EDGE, EDGE)) < 0.7, rng.random((SAMPLES, EDGE, EDGE, 2)) < 0.8
    valid[:, :4, 4:8] = False  # whole patches too
    u, label = rng.standard_normal((SAMPLES, EDGE, EDGE, 3)), rng.integers(0, 3, valid.shape).astype(float)
    h, p = rng.integers(-9, 9, (SAMPLES, EDGE, EDGE, 2)).astype(float), rng.standard_normal(valid.shape)
    for name, (kind, height, part) in {**ABSENT, "stored": (0, 0, 0)}.items():
        arrays = {"u": u, "label": np.where(valid, label, kind), "p": np.where(valid, p, part)}
        arrays |= {"h": np.where(sea, h, height), "valid": valid.astype(np.uint8), "sea": sea.astype(np.uint8)}
        arrays["h"] = arrays["h"].astype(np.int16 if name == "packed" else float)
        write_arrays(folder / f"{name}.h5", arrays, u="NHWC", h="NHWC", sea="NHWC")
    with h5py.File(folder / "packed.h5", "r+") as file:
        file["h"].attrs["_FillValue"] = np.int16(-32768)
    write_own(folder, NET, DATA.format(name="nan", invalid="mask"))


def run(config, comm, cut, name, out):
    sets = [*overrides_of(cut), f'data.path="{name}.h5"', f"output.directory={out}"]
    return scores_of(comm, config, [*sets, 'data.invalid="refuse"', *STORED] if name == "stored" else sets)


@pytest.mark.mpi
def test_the_run_of_a_stored_mask(comm, config):
    """NaN, missing values, infinity and classes that do not exist give the bits of zeros with stored weights of 0."""
    for number, cut in enumerate(CUTS[comm.size]):
        names = [*ABSENT, "stored"]
        found = {name: run(config, comm, cut, name, f"{name}{number}") for name in names}
        curves = {name: curve(config.parent / f"{name}{number}") for name in names}
        assert found["nan"] == found["packed"] == found["stored"] and np.isfinite(found["nan"]["loss"])
        assert curves["nan"] == curves["packed"] == curves["stored"]
    if comm.rank == 0:
        alone = run(config, MPI.COMM_SELF, {}, "nan", "alone")
        assert found["nan"] == pytest.approx(alone, rel=1e-9, abs=1e-12)


@pytest.mark.ranks(1, 2)
def test_faults_are_refused_on_all_ranks(comm, config):
    sets = [f"strategy.height={comm.size}"]
    with pytest.raises(UserError, match=r'data\.rule: .*another.* "center"'):
        train(config, [*sets, 'data.rule="center"'], comm=comm)
    with pytest.raises(UserError, match=r"data\.targets: .* for 'valid'"):
        train(config, [*sets, 'data.invalid="fill"'], comm=comm)
    if comm.rank == 0:
        (config.parent / "net.py").write_text(
            NET.replace(", mask, valid)", ", mask)").replace(", sea)", ")").replace(", some)", ")")
        )
    comm.barrier()
    with pytest.raises(UserError, match=r"data\.invalid: .*weights .*'masked' for .mask."):
        train(config, sets, comm=comm)


def test_a_single_target_needs_no_table(working):
    x, t, w = (hg.Input((4, 4, n), name=name) for n, name in ((2, "x"), (1, "t"), (1, "w")))
    network = hg.Network({"loss": hg.MeanSquaredError()(hg.Conv(1, 1)(x), t, w)}, name="one")
    rng = np.random.default_rng(1)
    target = rng.standard_normal((6, 4, 4, 1))
    target[rng.random(target.shape) < 0.3] = np.nan
    arrays = {"x": rng.standard_normal((6, 4, 4, 2)), "t": target}
    options = {"epochs": 2, "batch": 2, "backend": {"kernels": "numpy"}, "output": {"progress": False}}
    made = hg.fit(network, ArrayDataset(arrays, ["t"]), "a", invalid="mask", **options)
    arrays = {**arrays, "t": np.nan_to_num(target), "w": np.isfinite(target).astype(float)}
    stored = hg.fit(network, ArrayDataset(arrays, ["t", "w"]), "b", **options)
    assert curve(made.directory) == curve(stored.directory)


# -- the data set --------------------------------------------------------------------------------------

SHAPE = (3, 4, 6, 2)


def arrays_of(weights):
    rng = np.random.default_rng(2)
    target = rng.standard_normal(SHAPE)
    target[rng.random(SHAPE) < 0.3] = np.nan
    return {"x": np.zeros(SHAPE), "t": target} | ({} if weights is None else {"w": rng.random((3, *weights))})


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("weights", [None, (4, 6, 1), (4, 1, 1), (1, 1, 1), (1,)])
def test_every_box_is_the_slice(weights, channels):
    """Stored weights of any extent are multiplied by the mask; a box is the slice of the whole, also beyond the end."""
    arrays = arrays_of(weights)
    dataset = Masked(ArrayDataset(arrays, ["t", "w"][: len(arrays) - 1]), {"w": ["t"]}, {"w": channels}, {})
    good = np.isfinite(arrays["t"])
    want = good.all(-1, keepdims=True) if channels == 1 else good
    if weights is not None:
        want = want * arrays["w"].reshape(3, *((1, 1, 1) if weights == (1,) else weights))
    want = want.astype(float)
    indices = [2, 0]
    assert dataset.fields["w"].shape == want.shape[1:]
    for start in np.ndindex(2, 3, 4, channels):
        for stop in ((2, 4, 6, channels), (3, 5, 7, channels)):
            box = Box(start, stop)
            out = np.full(box.shape, 7.0)
            filled = dataset.read("w", indices, box, out)
            part = box & Box.of_shape((2, *want.shape[1:]))
            np.testing.assert_array_equal(out[filled], want[indices][part.slices()])
            assert (np.delete(out.ravel(), np.ravel_multi_index(np.indices(out.shape), out.shape)[filled]) == 7).all()
    out = np.empty((2, *SHAPE[1:]))
    dataset.read("t", indices, Box.of_shape(out.shape), out)
    np.testing.assert_array_equal(out, np.nan_to_num(arrays["t"][indices]))


def test_stored_weights_on_another_grid():
    with pytest.raises(DataError, match=r"'w' on .*\(4, 6, 1\).* 't', .* got \(2, 3, 1\)"):
        Masked(ArrayDataset(arrays_of((2, 3, 1)), ["t", "w"]), {"w": ["t"]}, {"w": 1}, {"t": TargetRange()})
