"""Tests of an evaluation's results per class against NumPy on the written predictions, under every cut."""

import json
import math

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from halograd.training import evaluate, train
from halograd.training.metrics import BINS, Calibration, Confusion, by_class, read_details, write_details
from tests.training.cuts import CUTS, overrides_of
from tests.training.runs import EDGE, SAMPLES, write_named

NET = """
import halograd as hg

def build():
    x = hg.Input((16, 16, 2), name="x")
    mask, kind = hg.Input((16, 16, 1), "mask", "int32"), hg.Input((1,), "kind", "int32")
    valid, yes = hg.Input((16, 16, 1), "valid"), hg.Input((16, 16, 2), "yes")
    y = hg.Conv(4, 3, padding=1, activation="relu")(x)
    logits, whole = hg.Conv(4, 1, name="logits")(y), hg.Dense(3, name="whole")(hg.GlobalAveragePool()(y))
    answers = hg.Conv(2, 1, name="answers")(y)
    loss = hg.SoftmaxCrossEntropy(ignore_index=-1)(logits, mask, valid) + hg.SoftmaxCrossEntropy()(whole, kind)
    loss = loss + hg.BinaryCrossEntropyWithLogits()(answers, yes)
    return hg.Network({"prediction": logits, "kind": whole, "answers": answers, "loss": loss}, name="judged")
"""
DATA = """
validation = 0.5
inputs = "u"
targets = {mask = "label", kind = "kind", valid = "valid", yes = "yes"}
"""


def write(folder):
    rng = np.random.default_rng(5)
    arrays = {
        "u": rng.standard_normal((SAMPLES, EDGE, EDGE, 2)),
        "label": rng.integers(-1, 3, (SAMPLES, EDGE, EDGE)),  # class 3 is nowhere
        "kind": rng.integers(0, 3, SAMPLES),
        "valid": rng.integers(0, 2, (SAMPLES, EDGE, EDGE)),
        "yes": rng.integers(0, 2, (SAMPLES, EDGE, EDGE, 2)),
    }
    write_named(folder, NET, DATA, arrays, u="NHWC")


# -- by NumPy ----------------------------------------------------------------------------------------


def confusion(guess, truth, classes):
    counts = np.zeros((classes, classes), int)
    for t, g in zip(truth.tolist(), guess.tolist()):
        counts[t, g] += 1
    return counts


def reliability(probability, true):
    """Return count, mean probability and frequency of each bin, and the expected calibration error."""
    rows, error = [], 0.0
    for k in range(BINS):
        last = k == BINS - 1
        some = (probability >= k / BINS) & ((probability < (k + 1) / BINS) | last)
        n = int(some.sum())
        rows.append((n, probability[some].mean() if n else None, true[some].mean() if n else None))
        error += n * abs(rows[-1][1] - rows[-1][2]) / len(true) if n else 0.0
    return rows, error


def check(found, guess, truth, probability, true, classes):
    counts = confusion(guess, truth, classes)
    assert found["confusion"] == counts.tolist()
    for c, row in enumerate(found["by_class"]):
        both, either = ((truth == c) & (guess == c)).sum(), ((truth == c) | (guess == c)).sum()
        assert (row["count"], row["predicted"]) == ((truth == c).sum(), (guess == c).sum())
        assert row["iou"] == (pytest.approx(both / either) if either else None)
        assert row["recall"] == (pytest.approx(both / (truth == c).sum()) if (truth == c).any() else None)
        assert row["precision"] == (pytest.approx(both / (guess == c).sum()) if (guess == c).any() else None)
    rows, error = reliability(probability, true)
    assert found["calibration"]["error"] == pytest.approx(error, abs=1e-6)
    for row, (count, mean, frequency) in zip(found["calibration"]["bins"], rows):
        assert row["count"] == count
        assert row["probability"] == (None if mean is None else pytest.approx(mean, abs=1e-6))
        assert row["frequency"] == (None if frequency is None else pytest.approx(frequency))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.mpi
def test_as_numpy_finds_on_every_cut(comm, config):
    """Details equal NumPy's under every cut, for ignored positions, classes per sample, and two outputs."""
    train(config, [f"strategy.sample={comm.size}", "training.epochs=1"], comm=comm)
    for cut in CUTS[comm.size]:
        sets = ["strategy={}", *overrides_of(cut)]
        evaluate(config, sets, predictions="p.h5", details="details.json", comm=comm)
    if comm.rank:
        return
    evaluate(config, ["strategy={}"], details="alone.json", comm=MPI.COMM_SELF)
    with open("details.json") as mine, open("alone.json") as theirs:
        found, alone = json.load(mine), json.load(theirs)
    assert [one["confusion"] for one in found["predictions"]] == [one["confusion"] for one in alone["predictions"]]
    assert found["count"] == 10 and found["samples"] == "validation" and found["loss"] == pytest.approx(alone["loss"])
    mask, kind, answers = found["predictions"]
    assert [one["name"] for one in (mask, kind, answers)] == ["prediction", "kind", "answers"]
    with h5py.File("p.h5") as file, h5py.File("data.h5") as data:
        x, t = file["prediction"][()], file["target"][..., 0]
        some = (data["valid"][()][file["sample"][()]] > 0) & (t != -1)
        p, truth = softmax(x)[some], t[some]
        check(mask, p.argmax(-1), truth, p.max(-1), p.argmax(-1) == truth, 4)
        assert mask["by_class"][3]["recall"] is None
        p, truth = softmax(file["kind/prediction"][()]), file["kind/target"][:, 0]
        check(kind, p.argmax(-1), truth, p.max(-1), p.argmax(-1) == truth, 3)
        p, truth = 1 / (1 + np.exp(-file["answers/prediction"][()].ravel())), file["answers/target"][()].ravel() >= 0.5
        check(answers, (p > 0.5).astype(int), truth.astype(int), p, truth, 2)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=40), st.integers(0, 40))
def test_calibration_is_its_definition_in_any_order(given, cut):
    """Calibration follows its definition, in any order of the samples; counts of two parts add up to the whole."""
    p, true = np.array([q for q, _ in given], float), np.array([t for _, t in given], bool)
    whole, first, second = Calibration(), Calibration(), Calibration()
    whole.add(p, true)
    first.add(p[:cut], true[:cut])
    second.add(p[cut:][::-1], true[cut:][::-1])
    assert np.array_equal(whole.counts, first.counts + second.counts)
    found = whole.result()
    assert sum(row["count"] for row in found["bins"]) == len(given)
    if not given:
        assert found["error"] is None
        return
    where = np.minimum((p * BINS).astype(int), BINS - 1)
    error = sum(abs(p[where == k].sum() - true[where == k].sum()) for k in range(BINS)) / len(p)
    assert found["error"] == pytest.approx(error, abs=1e-6)


def test_probabilities_that_are_some_already():
    """The calibration of a loss of probabilities uses the predictions without a sigmoid."""
    p, t = np.array([[0.9], [0.2], [0.6]]), np.array([[1.0], [0.0], [0.0]])
    made = Confusion(2, 0.5, probabilities=True)
    made.calibration = Calibration()
    made.add(p, t)
    found = made.details()["calibration"]
    assert found["error"] == pytest.approx((0.1 + 0.2 + 0.6) / 3, abs=1e-6)


def test_of_nothing():
    assert by_class(np.zeros((2, 2), int))[0] == {
        **{"class": 0, "count": 0, "predicted": 0},
        **dict.fromkeys(("iou", "precision", "recall", "f1")),
    }


def test_what_is_no_number_is_null(tmp_path):
    """Values that are not finite are written as null, which JSON permits, so a diverged network can be evaluated."""
    write_details(tmp_path / "d.json", {"loss": math.nan}, [{"scores": {"rmse": math.inf, "mae": 1.0}, "bins": [0.5]}])
    found = read_details(tmp_path / "d.json")
    assert found["loss"] is None and found["predictions"] == [{"scores": {"rmse": None, "mae": 1.0}, "bins": [0.5]}]
