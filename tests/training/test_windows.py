"""Tests of rollouts and sliding windows in `apply`, and of whole samples in validations: as by hand."""

import itertools
import json
from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.cli.run import run
from halograd.data import DataError
from halograd.data.windows import SMALLEST, starts_along, weights_along
from halograd.errors import UserError
from halograd.layers import Strategy
from halograd.models import build
from halograd.training import apply, evaluate, session, train
from halograd.training.applying import TABLE
from halograd.training.checkpoint import read_header
from halograd.training.log import read_log
from halograd.training.whole import planned_or_similar
from tests.support.fake_device import FakeBackend
from tests.training.cuts import CUTS, overrides_of
from tests.training.runs import EDGE, read_array, write_arrays, write_config, write_own, written

TIMES = 20
NET = """
import halograd as hg

def build(edge=16, times=1):
    x, ground = hg.Input((edge, edge, 4), name="x"), hg.Input((edge, edge, 1), name="ground")
    t = hg.Input((edge, edge, 2 * times), name="t")
    y = hg.Conv(2 * times, 3, padding=1)(hg.Concat()(x, ground))
    return hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, t)}, name="steps")
"""
DATA = """
[data]
path = "times.h5"
validation = 0.3
split = "random"
inputs = {x = "u", ground = "g"}
targets = {t = "v"}
normalize_targets = true
lag = 2
history = 2
invalid = "fill"
"""
#: The same inputs as copies.
COPIED = ['data.path="pairs.h5"', "data.lag=0", "data.history=1", "data.rollout=1"]


@written
def rollout_config(folder):
    """Write times whose targets have the channels of the inputs in another order, and later ones with land."""
    rng = np.random.default_rng(5)
    u, ground = 3 + rng.standard_normal((TIMES, EDGE, EDGE, 2)) * [1, 5], rng.standard_normal((EDGE, EDGE))
    write_arrays(folder / "times.h5", {"u": u, "v": u[..., ::-1].copy(), "g": ground}, u="NHWC", v="NHWC", g="HW")
    u[:, 3:6, 4] = np.nan  # land
    write_arrays(folder / "new.h5", {"u": u[:7], "g": ground, "time": np.arange(7.0)}, u="NHWC", g="HW")
    with h5py.File(folder / "times.h5", "r+") as file:
        file["u"].attrs["channel_names"], file["v"].attrs["channel_names"] = ["a", "b"], ["b", "a"]
    with h5py.File(folder / "new.h5", "r+") as file:
        file["u"].attrs["channel_names"] = ["a", "b"]
        file["time"].make_scale("time")
        file["time"].attrs["units"] = "hours since 2000-01-01"
        file["u"].dims[0].attach_scale(file["time"])
    write_own(folder, NET, DATA)


def rollout_by_hand(run, count, times=1):
    """Return predictions ``(N, count, *spatial, C)`` of `times` at once, each from a file of the last ones."""
    u, ground = read_array("new.h5", "u"), read_array("new.h5", "g")
    state, found = np.concatenate([u[:-2], u[2:]], -1), []
    for _ in range(0, count, times):
        write_arrays("pairs.h5", {"u": state, "g": ground}, u="NHWC", g="HW")
        apply(run, "pairs.h5", "hand.h5", COPIED, comm=MPI.COMM_SELF)
        new = np.split(read_array("hand.h5"), times, -1)
        found += new
        state = np.concatenate([state, *(y[..., ::-1] for y in new)], -1)[..., -4:]
        state[:, 3:6, 4] = np.nan
    return np.stack(found, 1)


@pytest.mark.ranks(1, 2, 4)
def test_as_by_hand(comm, rollout_config):
    if comm.rank == 0:
        train(rollout_config, ["training.epochs=1"], comm=MPI.COMM_SELF)
        np.save("want.npy", rollout_by_hand("out", 4))
    comm.barrier()
    for number, cut in enumerate(CUTS[comm.size]):
        apply("out", "new.h5", f"{number}.nc", overrides_of(cut), rollout=4, comm=comm)
        with h5py.File(f"{number}.nc") as file:
            found = file["prediction"]
            np.testing.assert_allclose(found[()], np.load("want.npy"), rtol=1e-9, atol=1e-12)
            assert [len(axis) for axis in found.dims] == [1] * 5
            assert found.dims[0][0].name == "/time" and found.dims[1][0].name == "/step"
            assert file["time"][()].tolist() == [2, 3, 4, 5, 6] and file["step"][()].tolist() == [2, 4, 6, 8]
            assert list(found.attrs["channel_names"]) == ["b", "a"]


@pytest.mark.ranks(1)
def test_several_times_at_once_and_refusals(comm, rollout_config, capsys, monkeypatch):
    train(rollout_config, ["model.times=2", "data.rollout=2", "training.epochs=1"], comm=comm)
    apply("out", "new.h5", "out.nc", rollout=6, comm=comm)
    with monkeypatch.context() as patch:
        patch.setattr(session, "open_kernels", lambda *_: FakeBackend())
        apply("out", "new.h5", "device.nc", rollout=6, comm=comm)
    want = rollout_by_hand("out", 6, 2)
    for name in ("out.nc", "device.nc"):
        np.testing.assert_allclose(read_array(name), want, rtol=1e-9, atol=1e-12)
    for rollout, message in ((3, "1 step or more, a multiple of data.rollout = 2, got 3"), (-2, "got -2")):
        with pytest.raises(UserError, match=f"--rollout: expected .*{message}"):
            apply("out", "new.h5", "x.nc", rollout=rollout, comm=comm)
    refused = {
        "--flips height": "--rollout: expected no --flips with it",
        "--window 8,8": "--rollout: expected whole samples, got --window",
    }
    for options, message in refused.items():
        more = ["-o", "y.nc", "--rollout", "2"]
        assert run(["apply", "out", "new.h5", *more, *options.split()]) == 2
        assert message in capsys.readouterr().err

    with pytest.raises(UserError, match=r"--rollout: .*trained with data"):
        apply("out", "pairs.h5", "x.nc", COPIED, rollout=2, comm=comm)


@pytest.mark.ranks(1)
def test_a_series_of_fewer_samples_than_a_batch(comm, rollout_config):
    """The batch is adapted to the samples, which are fewer than the times: the first ones have no history."""
    train(rollout_config, ["training.epochs=1"], comm=comm)
    with h5py.File("new.h5") as file:
        write_arrays("short.h5", {"u": file["u"][:5], "g": file["g"][()]}, u="NHWC", g="HW")
    found = apply("out", "short.h5", "x.nc", comm=comm)
    assert found["samples"] == 3 and "training.batch=3" in found["settings"]


@pytest.mark.ranks(1)
def test_predictions_must_have_all_channels(comm, rollout_config):
    with h5py.File("times.h5", "r+") as file:
        file["v"].attrs["channel_names"] = ["b", "c"]
    train(rollout_config, ["training.epochs=1"], comm=comm)
    message = r"all of its channels \(a, b\), got 't' with b, c; predict them all"
    with pytest.raises(UserError, match=message):
        apply("out", "new.h5", "x.nc", rollout=2, comm=comm)


HEIGHT, WIDTH = 2 * EDGE + 3, EDGE + 5


def write_samples(path, x):
    write_arrays(path, {"inputs": x}, inputs="NHWC")


@pytest.mark.ranks(1, 2, 4)
def test_mean_of_images(comm, config):
    if comm.rank == 0:
        train(config, ["training.epochs=1"], comm=MPI.COMM_SELF)
        with h5py.File("data.h5") as file:
            x = file["inputs"][:6]
        want = 0
        for axes in ((), (1,), (2,), (1, 2)):
            write_samples("image.h5", np.flip(x, axes))
            apply("out", ["image.h5"], "p.h5", comm=MPI.COMM_SELF)
            want = want + np.flip(read_array("p.h5"), axes) / 4
        write_samples("new.h5", x)
        np.save("want.npy", want)
    comm.barrier()
    for number, cut in enumerate(CUTS[comm.size]):
        apply("out", ["new.h5"], f"mean{number}.h5", overrides_of(cut), comm=comm, flips=["width", "height"])
        np.testing.assert_allclose(read_array(f"mean{number}.h5"), np.load("want.npy"), rtol=1e-9, atol=1e-12)
    if comm.rank == 0:
        with pytest.raises(UserError, match=r"--flips: .*height, width, got depth"):
            apply("out", ["new.h5"], "x.h5", ["strategy={sample = 1}"], comm=MPI.COMM_SELF, flips=["depth"])


def test_starts_and_weights():
    assert starts_along(26, 8, 0.5) == [0, 4, 8, 12, 16, 18]
    assert starts_along(8, 8, 0.5) == [0] and starts_along(5, 8, 0.5) == [-2]
    assert starts_along(16, 4, 0.0) == [0, 4, 8, 12] and starts_along(6, 4, 0.9) == [0, 1, 2]
    assert starts_along(26, 8, 0.6, 2) == [0, 4, 8, 12, 16, 18]  # 3.2 is nearer to 4 than to 2
    for n in (1, 2, 5, 16):
        middle = (n - 1) / 2
        want = np.exp(-0.5 * ((np.arange(n) - middle) / (n / 8)) ** 2)
        np.testing.assert_allclose(weights_along(n), np.maximum(want / want.max(), SMALLEST), rtol=1e-12)
    assert weights_along(64).min() == SMALLEST


def windows_by_hand(x, window, overlap, pad=0, flips=((),), factor=1):
    """Return the weighted mean of the predictions of all windows of samples, a mean over mirror images.

    Samples are padded along the width by `pad` elements before, and to the width of the window after. Predictions are
    coarser by `factor`.
    """
    (known,) = read_header(Path("out/checkpoints/latest.h5").resolve())[0].normalization.values()
    mean = known["mean"]
    wide = np.tile(np.float64(mean), (*x.shape[:2], max(x.shape[2], window[1]), 1))
    inside = slice(pad, pad + x.shape[2])
    wide[:, :, inside] = x
    result, extents = 0, wide.shape[1:3]
    places = [*itertools.product(*(starts_along(n, w, overlap, factor) for n, w in zip(extents, window)))]
    weights = np.multiply.outer(*(weights_along(w // factor) for w in window))[..., None]
    for axes in flips:
        image = np.flip(wide, axes)
        parts = [image[:, top : top + window[0], left : left + window[1]] for top, left in places]
        write_samples("windows.h5", np.concatenate(parts))
        apply("out", ["windows.h5"], "y.h5", comm=MPI.COMM_SELF)
        sums = np.zeros((len(x), *(n // factor for n in extents), 1))
        total = np.zeros(sums.shape[1:])
        for place, y in zip(places, np.split(read_array("y.h5"), len(places))):
            at = tuple(slice(start // factor, start // factor + n) for start, n in zip(place, weights.shape))
            sums[(slice(None), *at)] += weights * y
            total[at] += weights
        result = result + np.flip(sums / total, axes) / len(flips)
    return result[:, :, slice(inside.start // factor, inside.stop // factor)]


@pytest.mark.ranks(1, 2, 4)
def test_sums_of_windows(comm, config):
    """Samples of two sizes, one narrower than the window, alone and together, also with flips."""
    window = (EDGE, EDGE)
    if comm.rank == 0:
        train(config, ["training.epochs=1"], comm=MPI.COMM_SELF)
        rng = np.random.default_rng(5)
        x, narrow = rng.standard_normal((3, HEIGHT, WIDTH, 3)), rng.standard_normal((2, HEIGHT, EDGE - 5, 3))
        write_samples("wide.h5", x)
        write_samples("narrow.h5", narrow)
        np.save("wide.npy", windows_by_hand(x, window, 0.5))
        np.save("narrow.npy", windows_by_hand(narrow, window, 0.5, 3))
        np.save("flipped.npy", windows_by_hand(x, window, 0.25, flips=((), (1,))))
    comm.barrier()
    for number, cut in enumerate(CUTS[comm.size]):
        sets, both = [*overrides_of(cut), "training.batch=4"], f"both{number}"
        found = apply("out", ["wide.h5", "narrow.h5"], both, sets, window=window, comm=comm)
        assert found["windows"] == 3 * 4 * 2 + 2 * 4 and found["computed"] == 5
        for name in ("wide", "narrow"):
            np.testing.assert_allclose(read_array(f"{both}/{name}.h5"), np.load(f"{name}.npy"), rtol=1e-9, atol=1e-12)
        apply("out", ["wide.h5"], "x.h5", sets, window=window, overlap=0.25, flips=["height"], comm=comm)
        np.testing.assert_allclose(read_array("x.h5"), np.load("flipped.npy"), rtol=1e-9, atol=1e-12)


WRONG = {
    "16": "--window: expected one extent for each of 2 axes, got '16'",
    "16,a": "--window: expected extents such as 128,128,128, got '16,a'",
    "0,16": "--window: expected one extent per axis, such as 128,128,128, got '0,16'",
    "16,16 --overlap 1": "--overlap: expected a number from 0 to below 1, got 1.0",
    "16,16 --set model.resolution=16": "--window: expected no --set of model.resolution or data.extents with it",
    "18,16": "--window: expected outputs of the window's extents (18, 16) or coarser by whole factors, got (5, 4) of",
}


@pytest.mark.ranks(1)
def test_coarser_predictions(comm, config, capsys):
    """Windows begin at multiples of what a prediction covers; a job goes on after the last complete sample."""
    train(config, ["model.decoder=false", 'data.rule="any"', "training.epochs=1"], comm=comm)
    x = np.random.default_rng(5).standard_normal((3, 2 * EDGE + 4, 2 * EDGE, 3))
    write_samples("new.h5", x)

    def stop(done, _):
        raise RuntimeError(f"after {done}")

    with pytest.raises(RuntimeError, match="after 1"):
        apply("out", ["new.h5"], "x.h5", window=(EDGE, EDGE), overlap=0.3, comm=comm, report=stop)
    found = apply("out", ["new.h5"], "x.h5", window=(EDGE, EDGE), overlap=0.3, comm=comm)
    assert found["computed"] == 2 and found["windows"] == 3 * 3 * 3
    np.testing.assert_allclose(
        read_array("x.h5"), windows_by_hand(x, (EDGE, EDGE), 0.3, factor=4), rtol=1e-9, atol=1e-12
    )
    assert run(["apply", "out", "new.h5", "-o", "y.h5", "--window", "16,16", "--what", "classes"]) == 0
    assert "36 windows of 16,16, overlap 0.5" in capsys.readouterr().out
    assert read_array("y.h5").dtype == np.uint8 and read_array("y.h5").shape == (3, 9, 8, 1)
    for text, message in WRONG.items():
        assert run(["apply", "out", "new.h5", "-o", "y.h5", "--window", *text.split()]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(UserError, match="--overlap: expected --window with it"):
        apply("out", ["new.h5"], "y.h5", overlap=0.3, comm=comm)
    write_samples("new.h5", x[:, 1:])
    with pytest.raises(UserError, match=r"multiples of \[4, 4\], .* got \[35, 32\]"):
        apply("out", ["new.h5"], "y.h5", window=(EDGE, EDGE), comm=comm)


#: Samples of 22 x 26, of which windows of 16 x 16 are trained on; the network divides multiples of 4.
WHOLE = ["data.augment={crop = true}", 'data.evaluate="whole"', "training.epochs=1"]
METRICS = ['output.metrics=["dice"]']


def test_a_plan_that_does_not_fit_whole_samples():
    """A plan whose layers are cut along samples gives way to a cut of space where there is one sample."""
    network = build("mesh", resolution=32, channels=3, widths=[4, 6], convs=1, decoder=True)
    planned = Strategy({"sample": 2, "height": 2}, {"conv1_1": {"sample": 1, "height": 2, "width": 2}})
    assert planned_or_similar(planned, network, 4, 2) is planned
    found = planned_or_similar(planned, network, 4, 1).parts_of("conv2_1")
    assert {axis for axis, parts in found.items() if parts > 1} == {"height", "width"}
    assert planned_or_similar(planned, network, 4096, 1) is planned


def write_whole_config(folder):
    rng = np.random.default_rng(2)
    x = rng.standard_normal((10, 22, 26, 3)).astype(np.float32)
    write_arrays(folder / "data.h5", {"inputs": x, "mask": (x[..., 0] > x[..., 1]).astype(np.uint8)}, inputs="NHWC")
    return write_config(folder)


whole_config = written(write_whole_config)


def validation(out):
    (entry,) = read_log(out / "log.jsonl", "validation")
    return {key: value for key, value in entry.items() if key not in ("event", "time", "epoch", "step")}


@pytest.mark.ranks(1, 2, 4)
def test_validations_are_evaluations_of_whole_samples(comm, whole_config, capsys):
    for number, cut in enumerate(CUTS[comm.size]):
        out = whole_config.parent / f"cut{number}"
        trained = train(whole_config, [*WHOLE, *METRICS, *overrides_of(cut), f"output.directory={out}"], comm=comm)
        again = evaluate(out, comm=comm)
        comm.barrier()
        if comm.rank == 0:
            assert "whole samples are evaluated: 3 of 22x26 (" in capsys.readouterr().out
            found = validation(out)
            alone = evaluate(out, ["data.augment={crop = false}"], comm=MPI.COMM_SELF)
            for name, value in found.items():
                assert value == trained["validation"][name]
                assert value == pytest.approx(alone[name], rel=1e-10) == pytest.approx(again[name], rel=1e-10)
            middle = evaluate(out, ['data.evaluate="middle"', "strategy={sample = 1}"], comm=MPI.COMM_SELF)
            assert middle["loss"] != pytest.approx(found["loss"], rel=1e-3)


@pytest.mark.ranks(1, 2)
def test_predictions_of_whole_samples(comm, whole_config):
    train(whole_config, [*WHOLE, f"strategy.height={comm.size}"], comm=comm)
    evaluate("out", [], "all", "judged.h5", comm)
    apply("out", ["data.h5"], "p.h5", comm=comm)
    with h5py.File("judged.h5") as judged, h5py.File("p.h5") as applied:
        order = np.argsort(judged["sample"][()])
        np.testing.assert_allclose(judged["prediction"][()][order], applied["prediction"][()], rtol=1e-9, atol=1e-12)


def test_refusals(working):
    config = write_whole_config(working)
    text = config.read_text()
    model = '[model]\nname = "lenet5"\nclasses = 2\nchannels = 3\nresolution = 16\n'
    text = text[text.index("[data]") :].replace("validation = 0.3", 'targets = "label"')
    config.write_text(model + text)
    with h5py.File("data.h5", "a") as file:
        file["label"] = np.arange(10) % 2
    with pytest.raises(UserError, match=r"data.extents: .* 22 x 26: .*/w depends on"):
        train(config, WHOLE, comm=MPI.COMM_SELF)


def write_sizes(folder):
    """Write five files of samples of 22 x 26 and 16 x 20 in turn, and a configuration that reads them."""
    rng = np.random.default_rng(4)
    (folder / "patients").mkdir()
    for number in range(5):
        x = rng.standard_normal((1, *((22, 26), (16, 20))[number % 2], 3)).astype(np.float32)
        arrays = {"inputs": x, "mask": (x[..., 0] > x[..., 1]).astype(np.uint8)}
        write_arrays(folder / "patients" / f"{number}.h5", arrays, inputs="NHWC")
    write_config(folder)


SIZES = ['data.path="patients"', "data.augment={crop = true}", "data.validation=0.5", "training.batch=2"]


@pytest.mark.ranks(2)
def test_several_sizes(comm, working):
    """Samples of several sizes are validated whole by default; the scores are those of all of them."""
    if comm.rank == 0:
        write_sizes(working)
    comm.barrier()
    sets = [*SIZES, "training.epochs=2", f"strategy.height={comm.size}"]
    train("run.toml", sets, comm=comm)
    again = evaluate("out", comm=comm)
    every = evaluate("out", [], "all", comm=comm)
    comm.barrier()
    if comm.rank == 0:
        found = read_log(working / "out/log.jsonl", "validation")[-1]
        assert found["loss"] == pytest.approx(again["loss"], rel=1e-10)
        losses = []
        for number in range(5):  # each file by itself, under another configuration
            path = ["data.augment={crop = false}", f'data.path="patients/{number}.h5"']
            losses.append(evaluate("out", path, "all", comm=MPI.COMM_SELF)["loss"])
        assert every["loss"] == pytest.approx(np.mean(losses), rel=1e-10)
        with pytest.raises(UserError, match=r"--predictions: .*one size, got several"):
            evaluate("out", ["strategy={sample = 1}"], "all", "judged.h5", MPI.COMM_SELF)


def read_sources(path):
    with h5py.File(path) as file:
        return file["prediction"][()], file["source_file"].asstr()[()].tolist()


@pytest.mark.ranks(2)
def test_applies_to_each_file(comm, working):
    """Files of samples of several sizes get a file each, as if they were applied by themselves; a job continues."""
    if comm.rank == 0:
        write_sizes(working)
        train("run.toml", [*SIZES, "training.epochs=1", "strategy.sample=1"], comm=MPI.COMM_SELF)
    comm.barrier()
    found = apply("out", ["patients"], "predicted", comm=comm)
    assert found["samples"] == found["computed"] == 5
    assert not any("extents" in one or "resolution" in one for one in found["settings"])
    comm.barrier()
    if comm.rank == 0:
        for number in (0, 1):
            path = f"patients/{number}.h5"
            apply("out", [path], f"alone-{number}.h5", comm=MPI.COMM_SELF)
            (mine, source), (alone, _) = read_sources(f"predicted/{number}.h5"), read_sources(f"alone-{number}.h5")
            assert mine.shape == (1, *((22, 26), (16, 20))[number % 2], 1) and source == [path]
            np.testing.assert_allclose(mine, alone, rtol=1e-9, atol=1e-12)
        table = json.loads((working / "predicted/sources.json").read_text())["files"]
        assert [table[f"{number}.h5"]["source"] for number in range(5)] == [f"patients/{n}.h5" for n in range(5)]
        (working / "predicted/3.h5").unlink()
    comm.barrier()
    # On several ranks the parts are still there.
    assert apply("out", ["patients"], "predicted", comm=comm)["computed"] == (comm.size == 1)
    assert (working / "predicted/3.h5").exists()
    assert apply("out", ["patients"], "predicted", comm=comm)["computed"] == 0
    assert apply("out", ["patients"], "predicted", what="classes", comm=comm)["computed"] == 5
    with pytest.raises(UserError, match=r"--out: .*folder, .*, got one.h5"):
        apply("out", ["patients"], "one.h5", comm=comm)
    apply("out", ["patients"], "whole", comm=comm, format="hdf5-whole")
    comm.barrier()
    if comm.rank == 0:
        assert sorted(path.name for path in (working / "whole").iterdir()) == [*(f"{k}.h5" for k in range(5)), TABLE]
        np.testing.assert_array_equal(read_sources("whole/1.h5")[0] > 0, read_sources("predicted/1.h5")[0])
        damaged = (working / "whole/2.h5").read_bytes()
        (working / "whole/2.h5").write_bytes(damaged[: len(damaged) // 2])
        (working / "mine").mkdir()
        (working / "mine/notes").touch()
    comm.barrier()
    assert apply("out", ["patients"], "whole", comm=comm, format="hdf5-whole")["computed"] == 1
    with pytest.raises(DataError, match=r"cannot write mine: .*empty folder"):
        apply("out", ["patients"], "mine", comm=comm)
