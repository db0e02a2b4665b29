"""Tests of data of other forms: named, shared, packed, normalized, of several times: equal to copies under cuts."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.errors import UserError
from halograd.training import apply, evaluate, samples, train
from halograd.training.checkpoint import read_header
from tests.training.cuts import CUTS, check_equal_runs, check_resumed, check_scores, overrides_of
from tests.training.runs import (
    EDGE,
    OPTIONS,
    SAMPLES,
    check_refused,
    read_array,
    write_arrays,
    write_named,
    write_own,
    written,
)

NAMED_NET = """
import halograd as hg

def build(edge=16):
    fields = hg.Input((edge, edge, 3), name="fields")
    settings = hg.Input((2,), name="settings")
    mask = hg.Input((edge, edge, 1), name="mask", dtype="int32")
    speed = hg.Input((edge // 2, edge // 2, 2), name="speed")
    kind = hg.Input((1,), name="kind", dtype="int32")
    y = hg.Conv(4, 3, padding=1, activation="relu")(fields)
    y = y * hg.Sigmoid()(hg.Dense(4)(settings))
    logits, flow = hg.Conv(3, 1, name="logits")(y), hg.Conv(2, 2, stride=2, name="flow")(y)
    whole = hg.Dense(2, name="whole")(hg.GlobalAveragePool()(y))
    loss = hg.SoftmaxCrossEntropy()(logits, mask) + 0.1 * hg.Huber()(flow, speed)
    loss = loss + 0.5 * hg.SoftmaxCrossEntropy()(whole, kind)
    return hg.Network({"classes": logits, "flow": flow, "kind of": whole, "loss": loss}, name="several")

def itself(edge=16):
    x = hg.Input((edge, edge, 3), name="x")
    y = hg.Conv(3, 3, padding=1)(hg.Conv(2, 3, padding=1, activation="relu")(x))
    return hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, x)})
"""
NAMED_DATA = """
validation = 0.3
normalize = ["fields"]
inputs = {fields = "u", settings = "run/settings"}
targets = {mask = "label", speed = "v", kind = "kind"}
"""


@written
def named(folder: Path) -> None:
    rng = np.random.default_rng(5)
    arrays = {
        "u": 5 + 3 * rng.standard_normal((SAMPLES, EDGE, EDGE, 3)),
        "run/settings": rng.random((SAMPLES, 2)),
        "label": rng.integers(0, 3, (SAMPLES, EDGE, EDGE)),
        "v": rng.random((SAMPLES, 2, EDGE // 2, EDGE // 2)),
        "kind": rng.integers(0, 2, SAMPLES),
    }
    write_named(folder, NAMED_NET, NAMED_DATA, arrays, u="NHWC", v="NCHW")


@pytest.mark.mpi
def test_trains_and_judges_as_one_process_does(comm, named):
    """A network with five arrays and three tasks has the results of one process under every cut."""
    want = check_scores(comm, named)
    if comm.rank == 0:
        assert {"accuracy", "iou", "flow mae", "kind of accuracy"} <= set(want)
        for number in range(len(CUTS[comm.size])):
            with h5py.File(f"{number}.h5") as mine, h5py.File("alone.h5") as theirs:
                names = {"prediction", "target", "sample", "source_file", "source_sample", "flow", "kind of"}
                assert set(mine) == names == set(theirs)
                for name in ("prediction", "target", "flow/prediction", "flow/target", "kind of/prediction"):
                    np.testing.assert_allclose(mine[name][()], theirs[name][()], rtol=1e-8, atol=1e-10)
        progress, _ = read_header(Path("alone/checkpoints/latest.h5"))
        assert set(progress.normalization) == {"fields"}


@pytest.mark.ranks(1, 2)
def test_a_network_may_compare_with_what_it_reads(comm, named):
    sets = ['model.file="net.py:itself"', 'data={path="data.h5", inputs="u"}', "training.epochs=2"]
    train(named, sets, comm=comm)
    found = evaluate(named, sets, comm=comm)
    assert found["rmse"] is not None and "mae" in found


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (
            ['data.inputs="u"'],
            "data.inputs: expected a table with fields, settings, as the network reads them, got one",
        ),
        (
            ['data.targets={mask="label"}'],
            "data.targets: expected a dataset for 'speed', which network 'several' reads",
        ),
        (['data.inputs.other="u"'], "data.inputs.other: expected inputs of network 'several' .fields, "),
        (['data.inputs.kind="kind"'], "data.targets: expected 'kind' in one table, got it also in data.inputs"),
        (['data.normalize=["mask"]'], r"data.normalize: expected names of inputs \(fields, settings\), got 'mask'"),
        (['data.inputs.settings="none"'], "data.h5: expected a dataset 'none', got kind "),
        (['data.inputs.settings="v"'], r"expected samples of shape \(2,\) for 'settings' of model 'several', got \(8"),
        (
            ['data.targets.mask="run/settings"'],
            r"data.targets: expected targets of shape \(16, 16, 1\) .*'run/settings'",
        ),
        (['data.targets.kind="label"'], r"data.targets: expected targets of shape \(1,\) "),
        (
            ['model.file="net.py:itself"', 'data={path="data.h5", inputs="u", targets="v"}'],
            "data.targets: expected nothing, got one dataset, 'v'",
        ),
    ],
)
def test_what_does_not_fit_is_named(comm, named, sets, message):
    with pytest.raises((UserError, ValueError), match=message):
        train(named, sets, comm=comm)


@pytest.mark.ranks(1, 2)
def test_a_run_says_which_channels_it_transforms(comm, named, capfd):
    """A run prints the channels that are transformed because of their names, and the rules."""
    if comm.rank == 0:
        with h5py.File("data.h5", "a") as file:
            file["u"].attrs["channel_names"] = ["Density", "speed", "Pressure"]
    comm.barrier()
    for number, (sets, rules) in enumerate(
        (
            ([], 'Density, Pressure by "log"'),
            (['data.transforms={Pressure="none", speed="asinh"}'], 'Density by "log"; speed by "asinh"'),
            (['data.transforms={fields="none"}'], None),
        )
    ):
        more = ["training.epochs=1", "output.progress=true", f"output.directory=run-{number}"]
        train(named, [*sets, *more], comm=comm)
        if comm.rank == 0:
            said = " ".join(capfd.readouterr().err.split())
            line = f"fields: transformed before they are normalized (data.transforms): {rules}"
            assert (line in said) == (rules is not None)
            assert ("(data.transforms)" in said) == (rules is not None)


SHARED_FIELDS_NET = """
import halograd as hg

def build(edge=16):
    x, ground = hg.Input((edge, edge, 3), name="x"), hg.Input((edge, edge, 1), name="ground")
    t, area = hg.Input((edge, edge, 2), name="t"), hg.Input((edge, 1, 1), name="area")
    y = hg.Conv(2, 3, padding=1)(hg.Conv(4, 3, padding=1, activation="relu")(hg.Concat()(x, ground)))
    loss = hg.MeanSquaredError(normalization="weights")(y, t, area)
    return hg.Network({"prediction": y, "loss": loss}, name="shared")
"""
SHARED_FIELDS_DATA = """
[data]
path = "{name}.h5"
validation = 0.3
inputs = {{x = "u", ground = "g"}}
targets = {{t = "h", area = "a"}}
augment = {{flips = ["height", "width"]}}
"""


@written
def shared_fields(folder):
    rng = np.random.default_rng(5)
    ground, area = rng.standard_normal((EDGE, EDGE)), rng.random(EDGE)
    arrays = {"u": rng.standard_normal((SAMPLES, EDGE, EDGE, 3)), "h": rng.standard_normal((SAMPLES, EDGE, EDGE, 2))}
    write_arrays(folder / "shared.h5", {**arrays, "g": ground, "a": area}, u="NHWC", g="HW", a="H")
    each = {"g": np.broadcast_to(ground, (SAMPLES, EDGE, EDGE)), "a": np.broadcast_to(area, (SAMPLES, EDGE))}
    each["a"] = each["a"][..., None, None]
    write_arrays(folder / "each.h5", {**arrays, **each}, u="NHWC")
    write_own(folder, SHARED_FIELDS_NET, SHARED_FIELDS_DATA.format(name="shared"))


@pytest.mark.mpi
def test_as_fields_of_each_sample(comm, shared_fields):
    names = ("shared", "each")
    check_equal_runs(comm, shared_fields, {name: [f'data.path="{name}.h5"'] for name in names})
    for number in range(len(CUTS[comm.size])):
        for name in names:
            apply(f"{name}{number}", f"{name}.h5", f"{name}.out", comm=comm)
        if comm.rank == 0:
            np.testing.assert_array_equal(read_array("shared.out"), read_array("each.out"))
        comm.barrier()


@pytest.mark.ranks(1, 2, 4)
def test_shared_fields_resumed(comm, shared_fields):
    cuts = [overrides_of(cut) for cut in CUTS[comm.size]]
    check_resumed(comm, shared_fields, [], cuts)


@pytest.mark.ranks(1, 2)
def test_a_target_of_all_samples_is_refused(comm, shared_fields):
    with pytest.raises(UserError, match=r"data.targets: .*'t' of each sample, got 'g' "):
        train(shared_fields, [f"strategy.height={comm.size}", 'data.targets.t="g"'], comm=comm)


PACKED_NET = """
import halograd as hg

def build(edge=16):
    x, t = hg.Input((edge, edge, 2), name="x"), hg.Input((edge, edge, 1), name="t")
    y = hg.Conv(1, 3, padding=1)(hg.Conv(3, 3, padding=1, activation="relu")(x))
    return hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, t)}, name="packed")
"""
PACKED_DATA = """
validation = 0.3
invalid = "fill"
inputs = {x = "x"}
targets = {t = "t"}
"""
X = {"scale_factor": np.float32(0.01), "add_offset": np.float32(273.15), "_FillValue": np.int16(-32768), "units": "K"}
T = {"scale_factor": 2.0**-7, "missing_value": np.uint8(255), "units": "m", "valid_range": np.uint8([0, 254])}


@written
def packed(folder):
    """Write a file of packed data, and the file values.h5 of its values."""
    rng = np.random.default_rng(5)
    x = rng.integers(-3000, 3000, (SAMPLES, EDGE, EDGE, 2)).astype(np.int16)
    x[rng.random(x.shape) < 0.1] = -32768
    t = rng.integers(0, 255, (SAMPLES, EDGE, EDGE)).astype(np.uint8)
    write_named(folder, PACKED_NET, PACKED_DATA, {"x": x, "t": t}, x="NHWC")
    values = x.astype(float) * float(X["scale_factor"]) + float(X["add_offset"])
    values[x == -32768] = np.nan
    write_arrays(folder / "values.h5", {"x": values, "t": t * 2.0**-7}, x="NHWC")
    with h5py.File(folder / "data.h5", "r+") as file:
        file["x"].attrs.update(X)
        file["t"].attrs.update(T)


@pytest.mark.mpi
def test_as_on_the_values(comm, packed):
    check_equal_runs(comm, packed, {name: [f'data.path="{name}.h5"'] for name in ("data", "values")})
    for number, cut in enumerate(CUTS[comm.size]):
        apply(f"data{number}", ["data.h5"], f"{number}.h5", overrides_of(cut), comm=comm)
        if comm.rank == 0:
            with h5py.File(f"{number}.h5") as file:
                said = dict(file["prediction"].attrs)
            assert said["units"] == "m" and not said.keys() & {*X, *T} - {"units"}


@pytest.mark.ranks(1)
def test_numbers_as_they_are_stored(comm, packed):
    found = [train(packed, [f"data.unpack={on}", f"output.directory=run-{on}"], comm=comm) for on in ("true", "false")]
    assert found[0]["loss"] < 10 < 100 < found[1]["loss"]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("version", [2, 3])
def test_a_run_of_before_is_warned_of(comm, packed, caplog, monkeypatch, version):
    """A run of a version that did not unpack gets a warning, because its statistics are those of packed values."""
    with monkeypatch.context() as before:
        before.setattr("halograd.data.normalize._RULES", version)
        train(packed, ["training.epochs=1", f"data.unpack={str(version == 3).lower()}"], comm=comm)
    with caplog.at_level(logging.WARNING):
        evaluate(packed, ["data.unpack=true"], "all", comm=comm)
    said = [record.getMessage() for record in caplog.records]
    assert any("data.unpack: x is unpacked by scale_factor, add_offset" in text for text in said) == (version == 2)


@pytest.mark.ranks(1, 2)
def test_what_cannot_be_applied_is_refused_on_all_ranks(comm, packed):
    if comm.rank == 0:
        with h5py.File("data.h5", "r+") as file:
            file["x"].attrs["scale_factor"] = [0.1, 0.2]
    comm.barrier()
    with pytest.raises(UserError, match=r"attribute 'scale_factor': .*one finite number"):
        train(packed, comm=comm)


@pytest.mark.mpi
def test_slow_chunks_are_named_once(comm, packed, caplog, monkeypatch):
    """One warning names the slow chunks, of which each rank decompresses whole samples for its rows."""
    if comm.rank == 0:
        with h5py.File("data.h5", "r+") as file:
            x = file["x"][()]
            del file["x"]
            file.create_dataset("x", data=x, chunks=(1, EDGE, EDGE, 2), compression=1).attrs.update(layout="NHWC", **X)
    comm.barrier()
    monkeypatch.setattr("halograd.data.dataset.SLOW", 2.0)
    with caplog.at_level(logging.WARNING):
        train(packed, ["training.epochs=1", f"strategy.height={comm.size}"], comm=comm)
    found = [record.getMessage() for record in caplog.records if "--chunk x=1x" in record.getMessage()]
    assert len(found) == (comm.size > 2 and comm.rank == 0)


TIMES = 30
TIMES_NET = """
import halograd as hg

def build(edge=16):
    x, ground = hg.Input((edge, edge, 4), name="x"), hg.Input((edge, edge, 1), name="ground")
    t = hg.Input((edge, edge, 4), name="t")
    step = hg.Conv(2, 3, padding=1, name="step")
    later = hg.Conv(2, 3, padding=1, name="later")
    first = step(hg.Concat()(x, ground))
    y = hg.Concat()(first, later(hg.Concat()(first, ground)))
    return hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, t)}, name="steps")
"""
TIMES_DATA = """
[data]
path = "times.h5"
validation = 0.3
split = "random"
inputs = {x = "u", ground = "g"}
targets = {t = "u"}
augment = {flips = ["height", "width"]}
lag = 2
history = 2
rollout = 2
"""


@written
def time_steps(folder):
    rng = np.random.default_rng(5)
    u, ground = rng.standard_normal((TIMES, EDGE, EDGE, 2)), rng.standard_normal((EDGE, EDGE))
    write_arrays(folder / "times.h5", {"u": u, "g": ground, "simulation": np.arange(TIMES) // 15}, u="NHWC", g="HW")
    now = [n for n in range(TIMES) if 2 <= n % 15 < 11]
    pairs = {"u": np.stack([np.concatenate([u[n - 2], u[n]], -1) for n in now])}
    pairs["t"] = np.stack([np.concatenate([u[n + 2], u[n + 4]], -1) for n in now])
    write_arrays(folder / "pairs.h5", {**pairs, "g": ground}, u="NHWC", g="HW", t="NHWC")
    write_arrays(folder / "new.h5", {"u": u[:8], "g": ground, "time": np.arange(8.0)}, u="NHWC", g="HW")
    with h5py.File(folder / "new.h5", "r+") as file:
        file["time"].make_scale("time")
        file["time"].attrs["units"] = "hours since 2000-01-01"
        file["u"].dims[0].attach_scale(file["time"])
    write_own(folder, TIMES_NET, TIMES_DATA)


COPIED = ['data.path="pairs.h5"', 'data.targets.t="t"', "data.lag=0", "data.history=1", "data.rollout=1"]


@pytest.mark.mpi
def test_as_copied_pairs(comm, time_steps):
    check_equal_runs(comm, time_steps, {"steps": [], "pairs": COPIED})


@pytest.mark.ranks(1, 2)
def test_predictions_have_the_times_of_their_inputs(comm, time_steps):
    train(time_steps, [f"strategy.height={comm.size}", "training.epochs=1", "output.directory=one"], comm=comm)
    apply("one", "new.h5", "out.nc", comm=comm)
    if comm.rank == 0:
        with h5py.File("out.nc") as file:
            assert file["prediction"].shape == (6, EDGE, EDGE, 4)
            assert file["time"][()].tolist() == [2, 3, 4, 5, 6, 7] == file["source_sample"][()].tolist()
            assert file["prediction"].dims[0][0].name == "/time"
            assert file["prediction"].attrs["steps_ahead"].tolist() == [2, 4]


@pytest.mark.ranks(1, 2, 4)
def test_times_resumed(comm, time_steps):
    check_resumed(comm, time_steps, [], [overrides_of(cut) for cut in CUTS[comm.size]])


@pytest.mark.ranks(1, 2)
def test_too_few_times(comm, time_steps):
    with pytest.raises(UserError, match=r"data.lag: .*25 .* got at most 15"):
        train(time_steps, [f"strategy.height={comm.size}", "data.lag=8"], comm=comm)
    if comm.rank == 0:
        check_refused(["data.lag=0"], "history: expected lag = 1 or more with it, got 0")


NORMALIZED_EDGE, NORMALIZED_SAMPLES = 8, 11
NORMALIZED_CUTS = {1: {}, 2: {"height": 2}, 4: {"sample": 2, "width": 2}}


def network():
    x, height, valid = (
        hg.Input((NORMALIZED_EDGE, NORMALIZED_EDGE, 3), "x"),
        hg.Input((NORMALIZED_EDGE, NORMALIZED_EDGE, 2), "h"),
        hg.Input((NORMALIZED_EDGE, NORMALIZED_EDGE, 1), "valid"),
    )
    y = hg.Conv(2, 3, padding=1)(hg.Conv(4, 3, padding=1, activation="relu")(x))
    label, logits = hg.Input((NORMALIZED_EDGE, NORMALIZED_EDGE, 1), "label"), hg.Conv(1, 1, name="logits")(x)
    loss = hg.MeanSquaredError(normalization="weights")(y, height, valid)
    loss = loss + hg.BinaryCrossEntropyWithLogits()(logits, label)
    return hg.Network({"prediction": y, "logits": logits, "loss": loss})


def arrays():
    rng = np.random.default_rng(3)
    x = rng.standard_normal((NORMALIZED_SAMPLES, NORMALIZED_EDGE, NORMALIZED_EDGE, 3)).astype(np.float32)
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
        "strategy": NORMALIZED_CUTS[comm.size],
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
    assert found[2]["x"].count == 2 * NORMALIZED_EDGE**2 < found[None]["x"].count == 8 * NORMALIZED_EDGE**2
    if comm.rank == 0:
        pairs = {
            (i, j): arrays()["u"][[i, j]].mean((0, 1, 2), np.float64)
            for i in range(NORMALIZED_SAMPLES)
            for j in range(i)
        }
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
    runtime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install 'halograd[interchange]'")
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
