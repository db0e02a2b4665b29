"""Tests of targets with weights, masks or label maps: equal to other files, or one process, under every cut."""

import logging

import h5py
import numpy as np
import pytest

import halograd as hg
from halograd.data import ArrayDataset, DataError
from halograd.data.masked import Masked
from halograd.data.targets import TargetRange
from halograd.dtensor import Box
from halograd.errors import UserError
from halograd.training import evaluate, train
from tests.training.cuts import check_equal_runs, check_scores, curve
from tests.training.runs import EDGE, SAMPLES, write_arrays, write_own, written

WEIGHTED_NET = """
import halograd as hg

def build(edge=16, classes="balanced"):
    x, valid = hg.Input((edge, edge, 3), name="x"), hg.Input((edge, edge, 1), name="valid")
    mask = hg.Input((edge, edge, 1), name="mask", dtype="int32")
    rows, share = hg.Input((edge, 1, 1), name="rows"), hg.Input((1,), name="share")
    y = hg.Conv(4, 3, padding=1, activation="relu")(x)
    logits, coarse = hg.Conv(3, 1, name="logits")(y), hg.Conv(1, 4, stride=4, name="coarse")(y)
    field = hg.Conv(2, 1, name="field")(y)
    height, part = hg.Input((edge, edge, 2), name="height"), hg.Input(coarse.shape, name="part")
    patches = hg.Input(coarse.shape, name="patches")
    loss = hg.SoftmaxCrossEntropy(class_weights=classes or None, normalization="weights")(logits, mask, valid)
    loss = loss + 0.1 * hg.MeanSquaredError(normalization="weights")(field, height, rows)
    loss = loss + 0.1 * hg.Huber()(field, height, share) + 0.1 * hg.Dice("softmax")(logits, mask, valid)
    loss = loss + 0.1 * hg.AbsoluteError()(coarse, part, patches)
    return hg.Network({"prediction": logits, "field": field, "coarse": coarse, "loss": loss}, name="weighted")
"""
WEIGHTED_DATA = """
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


@written
def weighted(folder):
    rng = np.random.default_rng(5)
    valid = rng.random((SAMPLES, EDGE, EDGE)) < 0.7
    valid[:, :4, 4:8] = False  # whole patches too
    rows, share = (np.maximum(0, rng.uniform(-1, 1, (SAMPLES, n))) for n in (EDGE, 1))
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
    write_own(folder, WEIGHTED_NET, WEIGHTED_DATA.format(name="zero", rule="max"))


@pytest.mark.mpi
def test_trains_and_judges_as_one_process_does(comm, weighted):
    """Weights per position, row and sample, moved and reduced with their images, have the results of one process."""
    want = check_scores(comm, weighted)
    if comm.rank == 0:
        with h5py.File("alone.h5") as file, h5py.File("zero.h5") as data:
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
def test_weights_that_are_none_are_refused(comm, weighted, change, message):
    name, value = change
    if comm.rank == 0:
        with h5py.File("zero.h5", "r+") as file:
            file[name][(slice(None), 3) if name == "rows" else slice(None)] = value
    comm.barrier()
    with pytest.raises(ValueError, match=message):
        train(weighted, ["data.augment={flips=[]}"], comm=comm)


@pytest.mark.ranks(1)
def test_weights_of_0_are_worth_a_warning(comm, weighted, caplog):
    """Weights that are all 0 cause a warning; other constant weights do not."""
    with h5py.File("zero.h5", "r+") as file:
        file["valid"][...], file["share"][...], file["rows"][...] = 0, 1, 1e9
    with caplog.at_level(logging.WARNING):
        train(weighted, ["training.epochs=1", "model.classes=''"], comm=comm)
    found = [record.getMessage() for record in caplog.records]
    assert any("the weights valid are 0 in all 19 samples: no position has a loss" in text for text in found)
    assert not any("share" in text or "rows" in text for text in found)


@pytest.mark.ranks(1)
def test_weights_belong_to_the_targets(comm, weighted):
    sets = ['data.inputs={x="u", share="share"}', 'data.targets={mask="label"}']
    with pytest.raises(UserError, match=r"data\.inputs\.share: .*in data.targets"):
        train(weighted, sets, comm=comm)


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


@pytest.mark.parametrize(
    "rule",
    [
        pytest.param("fraction", marks=pytest.mark.ranks(1, 2, 4)),
        pytest.param("max", marks=pytest.mark.ranks(2, 3)),
    ],
)
def test_no_digit_depends_on_what_has_no_weight(comm, weighted, rule):
    check_equal_runs(comm, weighted, {name: [f'data.path="{name}.h5"', f'data.rule="{rule}"'] for name in THERE})


@pytest.mark.parametrize(
    "invalid", [pytest.param("skip", marks=pytest.mark.ranks(2)), pytest.param("fill", marks=pytest.mark.ranks(1))]
)
def test_policies_see_no_fault(comm, weighted, invalid):
    """Policies for invalid data ignore NaN in targets with weight 0, and find NaN in inputs."""
    if comm.rank == 0:
        for name in THERE:
            with h5py.File(f"{name}.h5", "r+") as file:
                file["u"][3, 0, 0, 1] = np.nan
    comm.barrier()
    check_equal_runs(comm, weighted, {name: [f'data.path="{name}.h5"', f'data.invalid="{invalid}"'] for name in THERE})


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("trainable", [True, False])
def test_no_sample_left(comm, weighted, trainable):
    """A run is an error if all samples have NaN in a target with a weight above 0."""
    sets = ["training.epochs=1", f"strategy.height={comm.size}"]
    train(weighted, sets, comm=comm)
    if comm.rank == 0:
        with h5py.File("zero.h5", "r+") as file:
            file["h"][:, 5, 5, 0], file["rows"][:, 5] = np.nan, 1
    comm.barrier()
    with pytest.raises(UserError, match=r"target nan in .*'h' at \(5, \d+, 0\).*weight 0"):
        train(weighted, [*sets, "data.augment={flips=[]}", "output.directory=other"], comm=comm)
    message = r"data.invalid: expected .*, got 0: \"skip\" leaves out 19 of 19 \(.*zero.h5, sample 0: nan in target 'h'"
    with pytest.raises(UserError, match=message):
        if trainable:
            train(weighted, [*sets, 'data.invalid="skip"', "output.directory=third"], comm=comm)
        else:
            evaluate(weighted, [*sets, 'data.invalid="skip"'], "all", comm=comm)


MASKED_NET = """
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
MASKED_DATA = """
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


@written
def masked(folder):
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
    write_own(folder, MASKED_NET, MASKED_DATA.format(name="nan", invalid="mask"))


@pytest.mark.mpi
def test_the_run_of_a_stored_mask(comm, masked):
    """NaN, missing values, infinity and classes that do not exist give the bits of zeros with stored weights of 0."""
    runs = {name: [f'data.path="{name}.h5"'] for name in ABSENT}
    check_equal_runs(comm, masked, {**runs, "stored": ['data.path="stored.h5"', 'data.invalid="refuse"', *STORED]})


@pytest.mark.ranks(1, 2)
def test_absent_targets_are_nan_in_a_file_of_predictions(comm, masked):
    """They are read as 0, which a reader of the file would take for a number of the data; classes stay as they are."""
    sets = [f"strategy.height={comm.size}"]
    train(masked, [*sets, "training.epochs=1"], comm=comm)
    evaluate(masked, sets, "all", predictions="p.h5", comm=comm)
    if comm.rank == 0:
        with h5py.File("p.h5") as file, h5py.File("nan.h5") as source:
            np.testing.assert_array_equal(file["field/target"][()], source["h"][file["sample"][()]])
            some = np.isnan(source["h"][()]).mean()
            assert 0.1 < some < 0.3 and np.isfinite(file["field/prediction"][()]).all()
            assert np.isnan(file["coarse/target"][()]).any() and set(np.unique(file["target"][()])) == {0, 1, 2}


@pytest.mark.ranks(1, 2)
def test_faults_are_refused_on_all_ranks(comm, masked):
    sets = [f"strategy.height={comm.size}"]
    with pytest.raises(UserError, match=r'data\.rule: .*another.* "center"'):
        train(masked, [*sets, 'data.rule="center"'], comm=comm)
    with pytest.raises(UserError, match=r"data\.targets: .* for 'valid'"):
        train(masked, [*sets, 'data.invalid="fill"'], comm=comm)
    if comm.rank == 0:
        (masked.parent / "net.py").write_text(
            MASKED_NET.replace(", mask, valid)", ", mask)").replace(", sea)", ")").replace(", some)", ")")
        )
    comm.barrier()
    with pytest.raises(UserError, match=r"data\.invalid: .*weights .*'masked' for .mask."):
        train(masked, sets, comm=comm)


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


@pytest.mark.parametrize("extents", [(4, 1, 1), (1, 4, 1), (1, 1, 1), (1,)])
def test_a_mask_does_not_fit_into_weights_of_rows_columns_or_samples(working, extents):
    """Such weights of the network cannot hold the mask of a position: NaN would be trained on as 0."""
    x, t, w = hg.Input((4, 4, 2), name="x"), hg.Input((4, 4, 1), name="t"), hg.Input(extents, name="w")
    network = hg.Network({"loss": hg.MeanSquaredError()(hg.Conv(1, 1)(x), t, w)}, name="one")
    arrays = {"x": np.ones((6, 4, 4, 2)), "t": np.ones((6, 4, 4, 1)), "w": np.ones((6, *extents))}
    arrays["t"][:, 1, 2] = np.nan
    with pytest.raises(UserError, match=r"data\.invalid: .*'w' .*'t' .*\(4, 4, 1\)"):
        hg.fit(network, ArrayDataset(arrays, ["t", "w"]), "a", invalid="mask", epochs=1, batch=2)


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


LABELLED_NET = """
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
LABELLED_DATA = """[data]
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


@written
def labelled(folder):
    rng = np.random.default_rng(5)
    x, raw = rng.standard_normal((SAMPLES, EDGE, EDGE, 2)), rng.choice([0, 7, 1, 255], (SAMPLES, EDGE, EDGE))
    ready = np.vectorize(lambda value: MAP.get(value, value))(raw)
    for name, some, labels in (("raw0", slice(10), raw), ("raw1", slice(10, None), raw), ("new", slice(None), ready)):
        arrays = {"u": x[some], "label": labels[some], "valid": np.ones(SAMPLES)[some]}
        write_arrays(folder / f"{name}.h5", arrays, u="NHWC")
    write_own(folder, LABELLED_NET, LABELLED_DATA)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("invalid", ["refuse", "skip"])
def test_as_a_file_with_the_new_numbers(comm, labelled, invalid):
    """Training, class counts, evaluation and predictions with a label map equal those on mapped files."""
    sets = [f"strategy.height={comm.size}", f'data.invalid="{invalid}"', 'data.augment={flips=["width"], turns=true}']
    ready = ['data.path="new.h5"', "data.labels={}", 'output.directory="new"']
    found, want = (train(labelled, [*sets, *more], comm=comm) for more in ([], ready))
    assert found["validation"] == want["validation"] and found["loss"] == want["loss"]
    scores = [evaluate(labelled, [*sets, *more], predictions=f"{len(more)}.h5", comm=comm) for more in ([], ready)]
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
def test_refused(comm, labelled, sets, message):
    with pytest.raises((UserError, ValueError), match=message):
        train(labelled, sets, comm=comm)


@pytest.mark.ranks(1, 2)
def test_numbers_of_no_class_are_refused_where_others_are_ignored(comm, labelled):
    if comm.rank == 0:
        with h5py.File("raw0.h5", "r+") as file:
            file["label"][2, 3, 4] = 9
    comm.barrier()
    want = (
        r"raw0.h5: target 9 in sample 2 of 'label' at \(3, 4, 0\); expected a whole number of 0 .. 2, or -1, which is"
    )
    with pytest.raises(DataError, match=want):
        train(labelled, ["training.epochs=2", "data.validation=0.0"], comm=comm)
    found = train(labelled, ['data.invalid="skip"'], comm=comm)
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
