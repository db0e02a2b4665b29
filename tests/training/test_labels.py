"""Tests of label maps: a run with a map equals a run on a file with the mapped labels."""

import h5py
import numpy as np
import pytest

import halograd as hg
from halograd.data import ArrayDataset, DataError
from halograd.errors import UserError
from halograd.training import evaluate, train
from tests.training.runs import EDGE, SAMPLES, write_arrays, write_own

NET = """
import halograd as hg

def build(edge=16, several=False):
    x = hg.Input((edge, edge, 2), name="x")
    mask, valid = hg.Input((edge, edge, 1), "mask", "int32"), hg.Input((1,), "valid")
    y = hg.Conv(4, 3, padding=1, activation="relu")(x)
    logits = hg.Conv(3, 1, name="logits")(y)
    loss = hg.SoftmaxCrossEntropy("balanced", ignore_index=-1)(logits, mask, valid)
    if several:
        loss = loss + hg.Huber()(logits, hg.Input((edge, edge, 3), "other"))
    return hg.Network({"prediction": logits, "loss": loss}, name="labelled")
"""
DATA = """[data]
path = "raw*.h5"
validation = 0.3
inputs = "u"
[data.targets]
mask = "label"
valid = "valid"
[data.labels.mask]
255 = -1
7 = 0
0 = 2
"""
MAP = {255: -1, 7: 0, 0: 2}


def write(folder):
    rng = np.random.default_rng(5)
    x, raw = rng.standard_normal((SAMPLES, EDGE, EDGE, 2)), rng.choice([0, 7, 1, 255], (SAMPLES, EDGE, EDGE))
    ready = np.vectorize(lambda value: MAP.get(value, value))(raw)
    for name, some, labels in (("raw0", slice(10), raw), ("raw1", slice(10, None), raw), ("new", slice(None), ready)):
        arrays = {"u": x[some], "label": labels[some], "valid": np.ones(SAMPLES)[some]}
        write_arrays(folder / f"{name}.h5", arrays, u="NHWC")
    write_own(folder, NET, DATA)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("invalid", ["refuse", "skip"])
def test_as_a_file_with_the_new_numbers(comm, config, invalid):
    """Training, class counts, evaluation and predictions with a label map equal those on mapped files."""
    sets = [f"strategy.height={comm.size}", f'data.invalid="{invalid}"', 'data.augment={flips=["width"], turns=true}']
    ready = ['data.path="new.h5"', "data.labels={}", 'output.directory="new"']
    found, want = (train(config, [*sets, *more], comm=comm) for more in ([], ready))
    assert found["validation"] == want["validation"] and found["loss"] == want["loss"]
    scores = [evaluate(config, [*sets, *more], predictions=f"{len(more)}.h5", comm=comm) for more in ([], ready)]
    for key in set(scores[0]) - {"checkpoint"}:
        assert scores[0][key] == scores[1][key]
    if comm.rank == 0:
        with h5py.File("0.h5") as mine, h5py.File("3.h5") as other:
            np.testing.assert_array_equal(mine["target"][()], other["target"][()])
            assert set(np.unique(mine["target"][()])) == {-1, 0, 1, 2}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["data.labels={a = 1}"], r"data.labels: expected whole numbers of the file as keys, got 'a'"),
        (
            ["data.labels={255 = -1, mask = {7 = 1}}"],
            "data.labels: expected a new number per number, or such a table .* got both",
        ),
        (["data.labels={valid = {7 = 1}}"], r"data.labels.valid: expected a target \(mask\)"),
        (["data.labels={mask = {7 = 0.5}}"], r"data.labels.mask.7: expected a whole number, got 0.5"),
        (['data.labels={mask = "x"}'], r"data.labels.mask: expected a whole number or a table, got 'x'"),
        (["data.labels={mask = {7 = 100000000}}"], "data.labels: expected whole numbers of at most 16777216"),
        (
            ["data.labels={255 = -1}", "model.several=true", 'data.targets.other="u"'],
            r"data.labels: expected a table per target \(mask, other\), got only numbers",
        ),
    ],
)
def test_refused(comm, config, sets, message):
    with pytest.raises((UserError, ValueError), match=message):
        train(config, sets, comm=comm)


@pytest.mark.ranks(1, 2)
def test_numbers_of_no_class_are_refused_where_others_are_ignored(comm, config):
    if comm.rank == 0:
        with h5py.File("raw0.h5", "r+") as file:
            file["label"][2, 3, 4] = 9
    comm.barrier()
    want = (
        r"raw0.h5: target 9 in sample 2 of 'label' at \(3, 4, 0\); expected a whole number of 0 .. 2, or -1, which is"
    )
    with pytest.raises(DataError, match=want):
        train(config, ["training.epochs=2", "data.validation=0.0"], comm=comm)
    found = train(config, ['data.invalid="skip"'], comm=comm)
    assert np.isfinite(found["loss"])


@pytest.mark.ranks(1)
def test_arrays_and_data_sets_of_ones_own(comm, working):
    rng = np.random.default_rng(1)
    x, t = rng.random((8, 6, 6, 2)), rng.choice([0, 1, 9], (8, 6, 6, 1))

    class Bare:
        """Data set of a user that has no support for label maps."""

        def __init__(self, data):
            self.path, self.fields, self.groups, self.lenient = data.path, data.fields, None, frozenset()
            self.read, self.place, self.close, self.__len__ = data.read, data.place, data.close, data.__len__

        def __len__(self):
            return 8

    def run(data, number, **more):
        y = hg.Conv(3, 3, padding=1)(hg.Input((6, 6, 2), "x"))
        loss = hg.SoftmaxCrossEntropy()(y, hg.Input((6, 6, 1), "target", "int32"))
        network = hg.Network({"prediction": y, "loss": loss}, name="fitted")
        return hg.fit(network, data, f"run{number}", epochs=2, batch=2, validation=0.25, **more)

    mapped = run(ArrayDataset({"x": x, "target": t}), 0, labels={"9": 2})
    ready = run(ArrayDataset({"x": x, "target": np.where(t == 9, 2, t)}), 1)
    assert mapped.history["loss"] == ready.history["loss"]
    with pytest.raises(UserError, match=r"data.labels: .*, got Bare"):
        run(Bare(ArrayDataset({"x": x, "target": t})), 2, labels={"9": 2})
