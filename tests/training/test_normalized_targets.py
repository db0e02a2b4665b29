"""Tests of normalized targets: the loss is that of normalized numbers, and all else has the units of the data."""

from __future__ import annotations

import json

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.errors import UserError
from halograd.training import samples
from tests.training.runs import OPTIONS, write_arrays

EDGE, SAMPLES = 8, 11
CUTS = {1: {}, 2: {"height": 2}, 4: {"sample": 2, "width": 2}}


def network():
    x, height, valid = (
        hg.Input((EDGE, EDGE, 3), "x"),
        hg.Input((EDGE, EDGE, 2), "h"),
        hg.Input((EDGE, EDGE, 1), "valid"),
    )
    y = hg.Conv(2, 3, padding=1)(hg.Conv(4, 3, padding=1, activation="relu")(x))
    label, logits = hg.Input((EDGE, EDGE, 1), "label"), hg.Conv(1, 1, name="logits")(x)
    loss = hg.MeanSquaredError(normalization="weights")(y, height, valid)
    loss = loss + hg.BinaryCrossEntropyWithLogits()(logits, label)
    return hg.Network({"prediction": y, "logits": logits, "loss": loss})


def arrays():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((SAMPLES, EDGE, EDGE, 3)).astype(np.float32)
    h = np.round(
        np.array([1000, -40]) + np.array([90, 7]) * (x[..., :2] + 0.1 * rng.standard_normal((*x.shape[:3], 2)))
    )
    valid = (rng.random((*x.shape[:3], 1)) < 0.8).astype(float)
    label = (x[..., :1] > 0).astype(float)
    return {"u": x, "h": np.where(valid > 0, h, 1e6), "valid": valid, "label": label}


def table(path, **more):
    targets = {"h": "h", "valid": "valid", "label": "label"}
    return {"path": str(path), "inputs": {"x": "u"}, "targets": targets, "validation": 0.3, "layout": "NHWC"} | more


@pytest.mark.ranks(1, 2, 4)
def test_it_is_the_run_of_normalized_numbers_in_units_of_the_data(comm, shared):
    files = [shared / name for name in ("data.h5", "normal.h5")]
    if comm.rank == 0:
        write_arrays(files[0], arrays())
    comm.barrier()
    some = OPTIONS | {
        "comm": comm,
        "strategy": CUTS[comm.size],
        "schedule": {"kind": "constant", "learning_rate": 0.05},
    }
    run = hg.fit(network(), table(files[0], normalize_targets=True), shared / "out", **some)
    known = run.normalization()
    assert set(known) == {"x", "h"}
    scores = run.evaluate("all")
    run.apply(str(files[0]), shared / "p.h5")
    run.apply(arrays()["u"].astype(np.float64), shared / "q.h5")
    comm.barrier()
    if comm.rank == 0:
        mean, std, given = known["h"].mean, known["h"].std, arrays()
        assert abs(mean - [1000, -40]).max() < 10 and (std < [120, 12]).all(), "absent numbers count"
        write_arrays(files[1], given | {"h": (given["h"] - mean) / std})
        plain = hg.fit(network(), table(files[1]), shared / "plain", **some | {"comm": MPI.COMM_SELF, "strategy": {}})
        assert run.losses == pytest.approx(plain.losses, rel=1e-9)
        assert run.history["loss"] == pytest.approx(plain.history["loss"], rel=1e-9)
        assert run.history["logits accuracy"] == pytest.approx(plain.history["logits accuracy"])
        plain.apply(str(files[1]), shared / "r.h5")
        with h5py.File(shared / "p.h5") as p, h5py.File(shared / "q.h5") as q, h5py.File(shared / "r.h5") as r:
            found = p["prediction"][()]
            np.testing.assert_allclose(found, mean + std * r["prediction"][()], rtol=1e-8)
            np.testing.assert_array_equal(found, q["prediction"][()])
            np.testing.assert_allclose(p["logits"][()], r["logits"][()], rtol=1e-7, atol=1e-9)
        error = (found - given["h"])[given["valid"][..., 0] > 0]
        assert scores["rmse"] == pytest.approx(np.sqrt(np.mean(error**2)), rel=1e-9) and scores["rmse"] > 1
    comm.barrier()
    again = hg.fit(
        network(), table(files[0], normalize_targets=True), shared / "out", resume=True, **some | {"epochs": 4}
    )
    assert again.normalization()["h"].mean.tolist() == known["h"].mean.tolist()


@pytest.mark.ranks(1, 2)
def test_statistics_of_some_samples(comm, shared):
    """Means of `data.statistics` samples are those of samples that the seed draws, whatever the number of ranks."""
    if comm.rank == 0:
        write_arrays(shared / "data.h5", arrays())
    comm.barrier()
    found = {}
    for count in (2, 100, None):
        data = table(shared / "data.h5", normalize_targets=["h"], **({"statistics": count} if count else {}))
        run = hg.fit(network(), data, shared / f"out{count}", **OPTIONS | {"comm": comm, "epochs": 1})
        found[count] = run.normalization()
    assert found[100]["x"].state_dict() == found[None]["x"].state_dict()
    assert found[2]["x"].count == 2 * EDGE**2 < found[None]["x"].count == 8 * EDGE**2
    if comm.rank == 0:
        pairs = {(i, j): arrays()["u"][[i, j]].mean((0, 1, 2), np.float64) for i in range(SAMPLES) for j in range(i)}
        (drawn,) = [pair for pair, mean in pairs.items() if np.allclose(mean, found[2]["x"].mean, rtol=1e-6)]
        given = arrays()
        there = given["valid"][list(drawn), ..., 0] > 0
        np.testing.assert_allclose(found[2]["h"].mean, given["h"][list(drawn)][there].mean(0), rtol=1e-12)
        np.testing.assert_allclose(found[2]["h"].std, given["h"][list(drawn)][there].std(0), rtol=1e-9)


def gone(dataset, about):
    raise FileNotFoundError("no data on rank 0")


@pytest.mark.ranks(1, 2)
def test_statistics_are_kept_beside_the_data(comm, shared, monkeypatch):
    """Another run on the same samples reads no data for them; other samples or files have a file of their own."""

    def run(out, **more):
        comm.barrier()
        data = table(shared / "data.h5", **{"statistics": 3, "normalize_targets": True} | more)
        found = hg.fit(network(), data, shared / out, **OPTIONS | {"comm": comm, "epochs": 1}).normalization()
        comm.barrier()
        return {name: one.state_dict() for name, one in found.items()}, sorted(
            shared.glob("halograd-statistics-*.json")
        )

    if comm.rank == 0:
        write_arrays(shared / "data.h5", arrays())
    first, files = run("first", normalize_targets=False)
    assert set(first) == {"x"} and len(files) == 1
    both, files = run("both")
    assert both["x"] == first["x"] and set(json.loads(files[0].read_text())["statistics"]) == {"x", "h"}
    with monkeypatch.context() as patched:
        patched.setattr(samples, "channel_statistics", None)
        assert run("again") == (both, files)
    with monkeypatch.context() as patched:
        patched.setattr(samples, "KeptStatistics", gone)
        with pytest.raises(FileNotFoundError, match="no data on rank 0"):  # on all ranks, not a wait for rank 0
            run("gone")
    assert len(run("other", transforms={"x": "asinh"})[1]) == 2 and len(run("more", statistics=4)[1]) == 3
    if comm.rank == 0:
        files[0].write_text("damaged")
    assert run("damaged") == (both, run("last")[1])
    if comm.rank == 0:
        write_arrays(
            shared / "data.h5",
            {name: 2 * array for name, array in arrays().items() if name != "label"} | {"label": arrays()["label"]},
        )
    changed, files = run("changed")
    assert len(files) == 4 and changed["x"]["mean"] != both["x"]["mean"]


def test_an_exported_network_has_the_units_of_the_data(tmp_path):
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'halograd[onnx]'")
    write_arrays(tmp_path / "data.h5", arrays())
    run = hg.fit(network(), table(tmp_path / "data.h5", normalize_targets=True), tmp_path / "out", **OPTIONS)
    run.export(tmp_path / "net.onnx", normalize=True)
    run.apply(str(tmp_path / "data.h5"), tmp_path / "p.h5")
    session = runtime.InferenceSession(str(tmp_path / "net.onnx"))
    x = np.moveaxis(arrays()["u"], -1, 1).astype(np.float32)
    found = dict(zip([o.name for o in session.get_outputs()], session.run(None, {"x": x})))
    with h5py.File(tmp_path / "p.h5") as file:
        for name in ("prediction", "logits"):
            np.testing.assert_allclose(np.moveaxis(found[name], 1, -1), file[name][()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["label", "valid", "x", "y"])
def test_other_names_are_refused(tmp_path, name):
    write_arrays(tmp_path / "data.h5", arrays())
    with pytest.raises(UserError, match=rf"data\.normalize_targets: .*\(h\), got '{name}'"):
        hg.fit(network(), table(tmp_path / "data.h5", normalize_targets=[name]), tmp_path / "out", **OPTIONS)
