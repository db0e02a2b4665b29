"""Tests of class weights from frequencies: counted over the training samples, stored, the same under every cut."""

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.data import ArrayDataset
from halograd.data.survey import count_classes
from halograd.data.targets import TargetReduction
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.losses import balanced
from halograd.perfmodel.profile.bound import BoundLayer
from halograd.training import evaluate, train
from halograd.training.checkpoint import read_header
from halograd.training.executor import Executor
from tests.training.cuts import overrides_of
from tests.training.runs import EDGE, SAMPLES, read_array, write_named, write_shared

NET = """
import halograd as hg

def build(weights="balanced", ignore=None, auxiliary=True):
    x = hg.Input((16, 16, 2), name="x")
    mask, kind = hg.Input((16, 16, 1), "mask", "int32"), hg.Input((1,), "kind", "int32")
    y = hg.Conv(4, 3, padding=1, activation="relu")(x)
    logits, whole = hg.Conv(3, 1, name="logits")(y), hg.Dense(2, name="whole")(hg.GlobalAveragePool()(y))
    loss = hg.SoftmaxCrossEntropy(weights, ignore_index=ignore)(logits, mask)
    loss = loss + hg.SoftmaxCrossEntropy("balanced")(whole, kind)
    if auxiliary:
        coarse = hg.Conv(2, 1, name="coarse")(hg.Pad(-1)(y))
        loss = loss + hg.training_only(hg.SoftmaxCrossEntropy("balanced", ignore_index=2)(coarse, hg.Pad(-1)(mask)))
    return hg.Network({"prediction": logits, "kind": whole, "loss": loss}, name="balanced")
"""
DATA = """
validation = 0.3
inputs = "u"
targets = {mask = "label", kind = "kind"}
"""


def write(folder, network=NET, data=DATA):
    rng = np.random.default_rng(5)
    arrays = {
        "u": rng.standard_normal((SAMPLES, EDGE, EDGE, 2)),
        "label": rng.choice(3, (SAMPLES, EDGE, EDGE), p=(0.9, 0.08, 0.02)),
        "kind": np.arange(SAMPLES) % 4 == 0,
    }
    write_named(folder, network, data, arrays, u="NHWC")


def weights_of(labels, classes):
    """Return the weights by the formula of scikit-learn's `compute_class_weight`."""
    return labels.size / (classes * np.bincount(labels.reshape(-1), minlength=classes))


def trained(found):
    """Return the indices of the training samples of a run; `found` contains the predictions of the others."""
    return np.setdiff1d(np.arange(SAMPLES), read_array(found, "sample"))


@pytest.mark.mpi
def test_as_with_the_numbers_themselves(comm, config, capfd):
    """Balanced weights equal those of given counts of the training samples; counts are printed, logged and stored."""
    cut = {1: {}, 2: {"height": 2}, 3: {"sample": 3}, 4: {"height": 2, "width": 2}}[comm.size]
    sets = overrides_of(cut)
    found = train(config, [*sets, "model.auxiliary=false", "output.progress=true"], comm=comm)
    evaluate(config, [*sets, "model.auxiliary=false"], predictions="p.h5", comm=comm)
    with h5py.File("data.h5") as file:
        labels, kind = (file[name][()].astype(int)[trained("p.h5")] for name in ("label", "kind"))
    numbers = [*weights_of(labels, 3)]
    given = ["model.auxiliary=false", "output.directory=given", f"model.weights={json.dumps(numbers)}"]
    want = train(config, [*sets, *given], comm=comm)
    assert found["validation"] == pytest.approx(want["validation"], rel=1e-12)
    if comm.rank == 0:
        progress, _ = read_header("out/checkpoints/latest.h5")
        assert progress.class_counts == {
            "mask": np.bincount(labels.reshape(-1)).tolist(),
            "kind": np.bincount(kind).tolist(),
        }
        first = json.loads(Path("out/log.jsonl").read_text().splitlines()[0])
        assert first["class_counts"] == progress.class_counts
        said = capfd.readouterr().err
        counts = np.bincount(kind)
        line = f"weights: 0: {counts[0]} ({kind.size / 2 / counts[0]:.4g}), 1: {counts[1]} ("
        assert f"classes of kind in the training samples, and their {line}" in " ".join(said.split())


@pytest.mark.ranks(1, 2)
def test_a_run_that_goes_on_and_its_evaluation_keep_the_counts(comm, config):
    train(config, ["training.epochs=1"], comm=comm)
    before = evaluate(config, ["training.epochs=1"], samples="all", comm=comm)
    if comm.rank == 0:
        with h5py.File("data.h5", "r+") as file:  # the counts of the file are others from now on
            kept = file["kind"][()]
            file["kind"][...] = ~kept
    comm.barrier()
    train(config, ["training.epochs=2"], resume=True, comm=comm)
    after, _ = read_header("out/checkpoints/latest.h5")
    first = json.loads(Path("out/log.jsonl").read_text().splitlines()[0])
    assert after.class_counts == first["class_counts"]
    assert after.class_counts["kind"][0] > after.class_counts["kind"][1]
    assert before["loss"] is not None


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ['data.targets={mask="kind16", kind="kind"}', "model.auxiliary=false"],
            'class_weights: expected all of 3 classes in the training samples for "balanced", got none of class 2',
        ),
        (['model.weights="even"'], "class_weights: expected one number >= 0 per class or \"balanced\", got 'even'"),
    ],
)
def test_refused(comm, config, sets, message):
    if comm.rank == 0:
        with h5py.File("data.h5", "r+") as file:
            file["kind16"] = np.minimum(file["label"][()], 1)
    comm.barrier()
    with pytest.raises(UserError, match=message):
        train(config, sets, comm=comm)


ONE_CHANNEL = """
import halograd as hg

def build(weight="balanced", channels=1):
    x, kind = hg.Input((16, 16, 2), name="x"), hg.Input((channels,), "kind")
    y = hg.Conv(4, 3, padding=1, activation="relu")(x)
    whole = hg.Dense(channels, name="whole")(hg.GlobalAveragePool()(y))
    loss = 0.5 * hg.BinaryCrossEntropyWithLogits(weight)(whole, kind) + 0.1 * hg.MeanSquaredError()(whole, kind)
    return hg.Network({"prediction": whole, "loss": loss}, name="balanced")
"""


@pytest.fixture
def one_channel(comm, working):
    one_target = DATA.replace('mask = "label", ', "")
    return write_shared(comm, working, lambda folder: write(folder, ONE_CHANNEL, one_target))


@pytest.mark.ranks(1, 2, 4)
def test_the_positive_class_as_with_the_number_itself(comm, one_channel, capfd):
    cut = {1: [], 2: ["strategy.height=2"], 4: ["strategy.height=2", "strategy.width=2"]}[comm.size]
    found = train(one_channel, [*cut, "output.progress=true"], comm=comm)
    evaluate(one_channel, cut, predictions="p.h5", comm=comm)
    kind = read_array("data.h5", "kind")[trained("p.h5")]
    ratio = float(np.sum(~kind) / np.sum(kind))
    want = train(one_channel, [*cut, "output.directory=given", f"model.weight={ratio!r}"], comm=comm)
    even = train(one_channel, [*cut, "output.directory=even", "model.weight=1.0"], comm=comm)
    assert found["validation"]["loss"] == pytest.approx(want["validation"]["loss"], rel=1e-12)
    assert found["validation"]["loss"] != pytest.approx(even["validation"]["loss"], rel=1e-3)
    if comm.rank == 0:
        line = f"weights: 0: {np.sum(~kind)} (1), 1: {np.sum(kind)} ({ratio:.4g})"
        assert f"classes of kind in the training samples, and their {line}" in " ".join(capfd.readouterr().err.split())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (["model.channels=2"], 'pos_weight: expected one channel with "balanced", got 2; give numbers'),
        (["model.weight=even"], "pos_weight: expected a number > 0, one per channel, or \"balanced\", got 'even'"),
        (['data.targets={kind="none"}'], "pos_weight: expected all of 2 classes in the training samples for"),
        (['data.targets={kind="soft"}'], r"expected class indices in 'kind', to count them, got 0\.5; give"),
    ],
)
def test_refused_weights_of_the_positive_class(comm, one_channel, sets, message):
    if comm.rank == 0:
        with h5py.File("data.h5", "r+") as file:
            file["none"], file["soft"] = np.zeros(SAMPLES), np.full(SAMPLES, 0.5)
    comm.barrier()
    with pytest.raises(UserError, match=message):
        train(one_channel, sets, comm=comm)


def test_counts_of_patches_and_of_many_rows(monkeypatch):
    """Class counts are those of the listed samples and reduced targets, read in parts, without ignored positions."""
    from halograd.data import survey

    labels = np.random.default_rng(1).integers(-1, 4, (5, 12, 8, 1))
    data = ArrayDataset({"x": labels, "t": labels}, ("t",))
    for part in (1, 50, 1 << 20):
        monkeypatch.setattr(survey, "PART", part)
        chosen = labels[[0, 3]]
        assert count_classes(data, "t", 3, [0, 3]).tolist() == [(chosen == c).sum() for c in range(3)]
        found = count_classes(data, "t", 4, [1], TargetReduction("max", (3, 2)))
        patches = labels[1].reshape(4, 3, 4, 2).max((1, 3))
        assert found.tolist() == [(patches == c).sum() for c in range(4)]


def test_ignored_classes_have_no_weight():
    """An ignored class has weight 0, and neither its positions nor the class itself count in the formula."""
    layer = hg.SoftmaxCrossEntropy("balanced", ignore_index=0).with_counts({1: [258, 142, 32]})
    assert layer.class_factors(1) == pytest.approx((0.0, 174 / 2 / 142, 174 / 2 / 32))
    layer = hg.SoftmaxCrossEntropy("balanced", ignore_index=2).with_counts({1: [6, 2, 0]})
    assert layer.class_factors(1) == pytest.approx((8 / 2 / 6, 8 / 2 / 2, 0.0))
    with pytest.raises(ValueError, match="got none of class 1"):
        hg.SoftmaxCrossEntropy("balanced", ignore_index=2).with_counts({1: [6, 0, 2]})


def test_a_network_that_was_not_balanced_says_so():
    """An executor of a balanced loss without counts raises an error, because it would weigh all classes equally."""

    def network():
        x = hg.Input((4, 3), "x")
        loss = hg.SoftmaxCrossEntropy("balanced")(x, hg.Input((4, 1), "t", "int32"))
        return hg.Network({"loss": loss}, name="net")

    with Communicator(MPI.COMM_SELF) as alone:
        with pytest.raises(ValueError, match=r'3 classes for "balanced", got 0'):
            Executor(network(), alone, get_backend("numpy"), 2)
        made = network()
        assert made.counted == {"t": 3}
        with pytest.raises(ValueError, match="3 classes of input 't', got 2"):
            made.balance({"t": [1, 2]})
        made.balance({"t": [1, 2, 1]})
        Executor(made, alone, get_backend("numpy"), 2).close()
        loss = hg.BinaryCrossEntropyWithLogits("balanced")(hg.Input((4, 1), "x"), hg.Input((4, 1), "t"))
        with pytest.raises(ValueError, match='2 classes for "balanced", got none'):
            Executor(hg.Network({"loss": loss}), alone, get_backend("numpy"), 2)
    both = hg.Input((4, 1), "a", "int32"), hg.Input((4, 1), "b", "int32")
    loss = hg.SoftmaxCrossEntropy("balanced")(hg.Input((4, 3), "x"), hg.Add()(*both))
    with pytest.raises(ValueError, match=r"counted in one Input, got .* a, b"):
        hg.Network({"loss": loss}).balance()


@pytest.mark.parametrize(
    ("layer", "channels"), [(hg.SoftmaxCrossEntropy("balanced"), 3), (hg.BinaryCrossEntropyWithLogits("balanced"), 1)]
)
def test_layers_are_measured_without_counts(layer, channels):
    """Layers with balanced losses can be measured without counts, because a plan precedes reading the data."""
    inputs = [(2, 4, channels), (2, 4, 1)]
    with Communicator(MPI.COMM_SELF) as alone, get_backend("numpy") as kernels:
        bound = BoundLayer(layer, inputs, "float32", kernels, alone)
        bound.run()
        bound.close()
    assert layer._counts == ()


def test_weights_may_be_an_array():
    assert hg.SoftmaxCrossEntropy(np.arange(3.0)).class_weights.tolist() == [0, 1, 2]


def test_the_weights_have_the_mean_1():
    counts = (7, 20, 3)
    assert np.dot(counts, balanced(counts)) == pytest.approx(30)


def test_mesh_models_weigh_the_positive_class():
    assert hg.models.build("mesh", resolution=64, pos_weight="balanced").counted == {"target": 2}
    assert hg.models.build("mesh", resolution=64, pos_weight=2.0).counted == {}


@pytest.mark.parametrize("model", ["lenet5", "alexnet", "vgg_a", "googlenet", "inception_v3", "resnet50", "unet2d"])
def test_models_take_weights(model):
    network = hg.models.build(model, classes=3, class_weights="balanced")
    assert network.counted == {"target": 3}
    assert hg.models.build(model, classes=2, class_weights=[1.0, 2.0]).counted == {}
