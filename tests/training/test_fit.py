"""Tests of `hg.fit`: a script's network is trained, evaluated and applied as by the command line."""

from types import MappingProxyType

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.data import ArrayDataset, DataError
from halograd.errors import UserError
from halograd.fitting import _optimizer
from halograd.training import METRICS, SCHEDULES, SGD, Metric, Optimizer, Schedule, evaluate, train
from halograd.training.parts import PartFile
from tests.training.runs import EDGE, OPTIONS, read_array, unet, write_config, write_data


class Notes(hg.Callback):
    """Callback that records its calls."""

    def __init__(self):
        self.steps, self.epochs, self.checkpoints = [], [], []

    def on_step(self, step, loss, learning_rate):
        self.steps.append((step, float(loss), learning_rate))

    def on_epoch(self, epoch, scores):
        self.epochs.append((epoch, dict(scores)))

    def on_checkpoint(self, step, path, best):
        self.checkpoints.append((step, path.name, best))


@pytest.fixture
def folder(comm, shared):
    if comm.rank == 0:
        write_data(shared / "data.h5")
    comm.barrier()
    return shared


@pytest.mark.ranks(1, 2, 4)
def test_as_in_one_process(comm, folder):
    notes, cut = Notes(), {"height": 2, "width": comm.size // 2} if comm.size > 1 else {}
    data = {"path": str(folder / "data.h5"), "validation": 0.3}
    run = hg.fit(unet(), data, folder / "out", comm=comm, strategy=cut, callbacks=[notes], **OPTIONS)
    assert [step for step, *_ in notes.steps] == list(range(1, 10))
    assert notes.epochs[-1][1] == run.result["validation"] and [e for e, _ in notes.epochs] == [0, 1, 2]
    assert [(step, name) for step, name, _ in notes.checkpoints] == [(n, f"step-{n:08d}.h5") for n in (3, 6, 9)]
    assert run.history["step"] == [3, 6, 9] and run.history["loss"][-1] == run.result["validation"]["loss"]
    assert run.losses == pytest.approx({step: loss for step, loss, _ in notes.steps})
    assert run.best["value"] == min(run.history["loss"])
    best = next(step for step, _, best in reversed(notes.checkpoints) if best)
    assert run.best["step"] == best and run.checkpoint("best").resolve().name == f"step-{best:08d}.h5"
    assert run.evaluate()["loss"] == pytest.approx(run.history["loss"][-1], rel=1e-12)
    run.apply(str(folder / "data.h5"), folder / "p.h5", which="best")
    comm.barrier()
    if comm.rank == 0:
        alone = hg.fit(unet(), data, folder / "alone", comm=MPI.COMM_SELF, **OPTIONS)
        assert alone.losses == pytest.approx(run.losses, rel=1e-9)
        alone.apply([folder / "data.h5"], folder / "q.h5", which="best")
        np.testing.assert_allclose(read_array(folder / "p.h5"), read_array(folder / "q.h5"), rtol=1e-8, atol=1e-10)


@pytest.mark.ranks(1, 2)
def test_goes_on_and_remembers_its_network(comm, folder):
    data = str(folder / "data.h5")
    some = {**OPTIONS, "schedule": {"kind": "constant", "learning_rate": 0.01}, "comm": comm}
    whole = hg.fit(unet(), data, folder / "whole", **some)
    hg.fit(unet(), data, folder / "out", **{**some, "epochs": 1})
    run = hg.fit(unet(), data, folder / "out", resume=True, **some)
    assert run.losses == pytest.approx(whole.losses, rel=1e-12)
    other = hg.fit(unet(6), data, folder / "other", **some)  # of the same name
    assert whole.evaluate()["loss"] == pytest.approx(whole.history["loss"][-1], rel=1e-12)
    assert other.evaluate()["loss"] == pytest.approx(other.history["loss"][-1], rel=1e-12)
    with pytest.raises(UserError, match="of another network"):
        hg.fit(unet(6), data, folder / "out", resume=True, **some)
    with pytest.raises(UserError, match="expected one without checkpoints"):
        hg.fit(unet(), data, folder / "out", **some)


@pytest.mark.ranks(1)
def test_a_model_by_its_name(comm, folder):
    """A model given by its name has the result of a run with a configuration."""
    write_config(folder)
    options = {"resolution": EDGE, "channels": 3, "widths": [4, 6], "convs": 1, "decoder": True, "pos_weight": 2.0}
    schedule = {"kind": "cosine", "learning_rate": 0.01, "warmup_epochs": 1}
    data = {"path": str(folder / "data.h5"), "validation": 0.3}
    some = {**OPTIONS, "schedule": schedule, "strategy": {"bucket_bytes": 512}}
    run = hg.fit("mesh", data, folder / "fit", model=options, comm=comm, **some)
    assert run.result["loss"] == train(folder / "run.toml", comm=comm)["loss"]


@pytest.mark.ranks(1)
def test_refusals(comm, folder, monkeypatch):
    data = str(folder / "data.h5")
    with pytest.raises(UserError, match=r"fit\(\): training\.batch: .*whole"):
        hg.fit(unet(), data, folder / "out", epochs=1, batch=0, comm=comm)
    with pytest.raises(UserError, match=r"fit\(\): optimiser: unknown key"):
        hg.fit(unet(), data, folder / "out", epochs=1, batch=2, comm=comm, optimiser={"kind": "sgd"})
    with pytest.raises(UserError, match=r"fit\(\): epoch: .*; .*batch, .*mean epochs"):
        hg.fit(unet(), data, folder / "out", epoch=1, batch=2, comm=comm)
    unknown = dict.fromkeys(("zeta", "beta", "eta", "alpha", "theta", "delta", "gamma", "iota"), 1)
    with pytest.raises(UserError, match=r"fit\(\): zeta: unknown key"):  # the first one: the same on all ranks
        hg.fit(unet(), data, folder / "out", comm=comm, **unknown, **OPTIONS)
    for metrics in ("iou", None):
        with pytest.raises(UserError, match=rf"fit\(\): metrics: expected a list of names, .*, got {metrics!r}"):
            hg.fit(unet(), data, folder / "out", comm=comm, metrics=metrics, **OPTIONS)
    wrong = {"an object of Notes": Notes(), "the class Notes in it": [Notes], "an object of int in it": [Notes(), 3]}
    for found, callbacks in wrong.items():
        with pytest.raises(UserError, match=f"callbacks: .*halograd.Callback, got {found}$"):
            hg.fit(unet(), data, folder / "out", comm=comm, callbacks=callbacks, **OPTIONS)
    run = hg.fit(unet(), data, folder / "out", comm=comm, **OPTIONS)
    with pytest.raises(ValueError, match=r"checkpoint: .*'latest' or 'best', got 'newest'"):
        run.checkpoint("newest")
    monkeypatch.setattr("halograd.models.own._MADE", {})  # as in another process
    with pytest.raises(UserError, match=r"model\.file: 'mine' was made by a script"):
        evaluate(folder / "out", comm=comm)


def predictions(path, name="prediction"):
    with h5py.File(path) as file:
        return file[name][()]


@pytest.mark.ranks(1, 2, 4)
def test_arrays_are_applied_like_files(comm, folder):
    """Predictions for arrays of any type, memory layout and batch axis equal those for files."""
    cut = {"height": 2, "width": comm.size // 2} if comm.size > 1 else {}
    run = hg.fit(unet(), str(folder / "data.h5"), folder / "out", comm=comm, strategy=cut, **OPTIONS)
    x = read_array(folder / "data.h5", "inputs")
    run.apply(str(folder / "data.h5"), folder / "files.h5", "probabilities")
    want = predictions(folder / "files.h5")
    backwards = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, -1, 1)), 1, -1)[::-1]
    for number, (given, expected) in enumerate(
        [(x, want), ({"x": backwards}, want[::-1]), (x.astype(">f8")[3:9], want[3:9])]
    ):
        found = run.apply(given, folder / f"{number}.h5", "probabilities")
        assert found["samples"] == found["computed"] == len(expected)
        np.testing.assert_allclose(predictions(folder / f"{number}.h5"), expected, rtol=1e-12)
        assert set(predictions(folder / f"{number}.h5", "source_file")) == {b"array"}
        assert predictions(folder / f"{number}.h5", "source_sample").tolist() == list(range(len(expected)))
    run.apply(x[5], folder / "one.h5", "probabilities")
    np.testing.assert_allclose(predictions(folder / "one.h5"), want[5:6], rtol=1e-12)
    whole = (10 * x).astype(np.int16)
    run.apply(whole, folder / "whole.h5")
    run.apply(whole.astype(np.float64), folder / "float.h5")
    np.testing.assert_array_equal(predictions(folder / "whole.h5"), predictions(folder / "float.h5"))


@pytest.mark.ranks(1, 2)
def test_arrays_of_several_inputs_have_names(comm, folder):
    def network():
        x, depth = hg.Input((EDGE, EDGE, 3), "x"), hg.Input((1,), "depth")
        y = hg.Conv(2, 3, padding=1)(x) * hg.Dense(2)(depth)
        loss = hg.MeanSquaredError()(y, hg.Input(y.shape, "target"))
        return hg.Network({"prediction": y, "loss": loss}, name="two")

    rng = np.random.default_rng(3)
    x, depth = rng.standard_normal((12, EDGE, EDGE, 3)), rng.standard_normal(12)
    data = ArrayDataset({"x": x, "depth": depth, "target": x[..., :2] * depth[:, None, None, None]})
    run = hg.fit(network(), data, folder / "out", comm=comm, strategy={"height": comm.size}, **OPTIONS)
    run.apply(data, folder / "set.h5")
    for given in ({"depth": depth, "x": x}, {"x": x, "depth": depth[:, None]}):
        run.apply(given, folder / "arrays.h5")
        np.testing.assert_array_equal(predictions(folder / "arrays.h5"), predictions(folder / "set.h5"))
    run.apply({"x": x[7], "depth": depth[7:8]}, folder / "one.h5")
    np.testing.assert_allclose(predictions(folder / "one.h5")[0], predictions(folder / "set.h5")[7], rtol=1e-12)
    names = r"expected arrays \{'x': ..., 'depth': ...\}, got "
    for given, message in (
        (x, names + r"one, ndarray of shape \(12, 16, 16, 3\)"),
        ({"x": x}, names + "'x'"),
        ({"x": x, "depth": depth, "target": x}, names + "'x', 'depth', 'target'"),
        ({"x": x, "depth": depth[:4]}, r"expected arrays of as many samples each, got .*12.*4"),
    ):
        with pytest.raises(UserError, match=message):
            run.apply(given, folder / "no.h5")
    assert not (folder / "no.h5").exists()


@pytest.mark.ranks(1, 2)
def test_what_is_no_data_is_refused_on_all_ranks(comm, folder):
    """Invalid data, also on one rank alone, are an error on all ranks before any computation or wait."""
    run = hg.fit(unet(), str(folder / "data.h5"), folder / "out", comm=comm, strategy={"height": comm.size}, **OPTIONS)
    x = np.ones((5, EDGE, EDGE, 3))
    expected = "apply.*: data: expected files, an array of samples, arrays by the names of inputs or a data set, got "
    shapes = r"'x': expected samples of shape \(N, 16, 16, 3\), or one of \(16, 16, 3\), channels last .*, got "
    wrong = [
        (3, expected + "int"),
        (None, expected + "NoneType"),
        ([x, x], expected + "list"),
        (x[..., :2], shapes + r"\(5, 16, 16, 2\)"),
        (np.moveaxis(x, -1, 1), shapes + r"\(5, 3, 16, 16\)"),
        (x[..., 0], shapes + r"\(5, 16, 16\)"),
        (x[:0], shapes + r"\(0, 16, 16, 3\)"),
        (np.float64(3), shapes + r"\(\)"),
        (x + 1j, "'x': expected an array of real numbers, got one of complex128"),
        (np.ma.masked_array(x, x > 0), "'x': expected an array without masked elements, got some"),
    ]
    later = [
        (x + np.nan, "array: nan in sample 0"),
    ]
    run.apply(x[:, :9], folder / "nine.h5")  # no error: the same layers take samples of another size
    assert predictions(folder / "nine.h5").shape[:3] == (5, 9, 16)
    for given, message in wrong + later:
        with pytest.raises(UserError, match=message):
            run.apply(given, folder / "p.h5")
    if comm.size > 1:
        other = "expected the array of rank 0, got something else; send it to"
        some = [x[:4], x + comm.rank, x.astype(np.float32), str(folder / "data.h5")]
        for given, message in wrong + [(given, other) for given in some]:
            with pytest.raises(UserError, match=f"rank 1: .*{message}"):
                run.apply(given if comm.rank else x, folder / "p.h5")
    for given, kind in ((x, r"ndarray of shape \(5, 16, 16, 3\)"), ({"x": x, "target": x}, "dict"), (7, "int")):
        with pytest.raises(UserError, match=rf"fit\(\): data: .*, got {kind}; .*ArrayDataset"):
            hg.fit(unet(), given, folder / "other", comm=comm, **OPTIONS)
    assert not (folder / "p.h5").exists() and not (folder / "other").exists()


@pytest.mark.ranks(1, 2)
def test_objects_of_a_script_are_never_continued(comm, folder, monkeypatch):
    """An interrupted job on arrays begins anew, because arrays cannot be compared with those of the previous job."""
    run = hg.fit(unet(), str(folder / "data.h5"), folder / "out", comm=comm, strategy={"height": comm.size}, **OPTIONS)
    x = np.random.default_rng(1).standard_normal((12, EDGE, EDGE, 3))
    run.apply(x, folder / "whole.h5")
    write = PartFile.write

    def failing(self, blocks):
        if self.done == 2:
            raise DataError("the disk is full")
        write(self, blocks)

    for make in (lambda x: x, lambda x: ArrayDataset({"x": x}, ())):
        with monkeypatch.context() as patched, pytest.raises(DataError, match="the disk is full"):
            patched.setattr(PartFile, "write", failing)
            run.apply(make(x + 1), folder / "p.h5")
        assert run.apply(make(x), folder / "p.h5")["computed"] == 12
        np.testing.assert_array_equal(predictions(folder / "p.h5"), predictions(folder / "whole.h5"))


class Within(Metric):
    """Share of the predictions that differ from their targets by less than a limit."""

    better = MappingProxyType({"within": "higher"})

    def __init__(self, limit=1.0):
        self.limit, self.counts = limit, np.zeros(2, np.int64)

    def add(self, prediction, target, weights=None):
        near = np.abs(prediction - target) < self.limit
        self.counts += near.size, near.sum()

    def scores(self):
        n, near = self.counts
        return {"within": near / n if n else None}


class Damped(SGD):
    """SGD of a tenth of the rate."""

    def rule(self, piece, numbers):
        np.multiply(piece.g, 0.1 * numbers.rate * numbers.scale, out=piece.scratch[0])
        np.subtract(piece.p, piece.scratch[0], out=piece.p)

    def kernel(self, arrays):
        return Optimizer.kernel(self, arrays)


@pytest.mark.ranks(1, 2, 4)
def test_objects_of_a_script(comm, folder):
    """Schedules, optimizers and metrics of a script are objects, functions and classes: under cuts, and resumed."""
    data, cut = {"path": str(folder / "data.h5"), "validation": 0.3}, {"height": comm.size} if comm.size > 1 else {}

    def fit(out, comm=comm, cut=cut, **more):
        given = {**OPTIONS, "strategy": cut, "comm": comm, **more}
        given["output"] = {"progress": False, "best": "within"}
        return hg.fit(unet(), data, folder / out, **given)

    mine = {"schedule": lambda step: 0.02 / (1 + step), "optimizer": Damped, "metrics": ["errors", Within(0.5)]}
    fit("out", **{**mine, "epochs": 1})
    run = fit("out", resume=True, **mine)
    assert run.best["name"] == "within" and 0 < run.history["within"][-1] < 1 and run.history["mae"]
    assert run.evaluate()["within"] == run.history["within"][-1]
    comm.barrier()
    if comm.rank == 0:
        table = {"kind": "sgd"}
        rates = {"schedule": Halved(0.002), "optimizer": table, "metrics": [Within(0.5)]}
        alone = fit("alone", MPI.COMM_SELF, {}, **rates)
        assert run.losses == pytest.approx(alone.losses, rel=1e-9)
        assert run.history["within"] == alone.history["within"]


class Halved(Schedule):
    """The rate divided by the number of the update."""

    def __init__(self, rate):
        self.rate = rate

    def __call__(self, step, group=""):
        return self.rate / (1 + step)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"schedule": 0.1}, "fit(): schedule: expected a table, a halograd.training.Schedule, or a function"),
        ({"optimizer": Within}, "optimizer.kind: expected a Optimizer, or a class derived from it, got <class"),
        ({"metrics": [SGD]}, "output.metrics: expected a Metric, or a class derived from it, got <class"),
        ({"schedule": lambda step: -1.0}, "schedule: expected a learning rate >= 0 for step 0, got -1.0"),
        ({"optimizer": {"kind": hg.Lion, "beta3": 1}}, "optimizer.beta3: unknown key"),
    ],
)
def test_other_objects_are_refused(comm, folder, given, message):
    with pytest.raises(UserError) as error:
        hg.fit(unet(), str(folder / "data.h5"), folder / "out", comm=comm, **{**OPTIONS, **given})
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.ranks(1)
def test_names_of_a_script_are_known_there_only():
    with pytest.raises(UserError, match=r"schedule\.kind: 'Mine' .* script"):
        SCHEDULES.find("script:Mine")
    first, second = (METRICS.give(Within(limit)) for limit in (0.5, 2.0))
    assert first != second and [METRICS.make(name).limit for name in (first, second)] == [0.5, 2.0]
    assert METRICS.make(first) is not METRICS.make(first)
    settings = hg.AdamW.Settings(kind="adamw", weight_decay=0.1)
    assert _optimizer(settings) == {"kind": "adamw", "weight_decay": 0.1}
    assert _optimizer(hg.AdamW) == {"kind": "adamw"}
