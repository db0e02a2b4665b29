"""Tests of rollouts in `apply`: equal to applications by hand under every cut, times of the file, refusals."""

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.cli.run import run
from halograd.errors import UserError
from halograd.training import apply, session, train
from tests.support.fake_device import FakeBackend
from tests.training.cuts import CUTS, overrides_of
from tests.training.runs import EDGE, write_arrays, write_own

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


def write(folder):
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


def by_hand(run, count, times=1):
    """Return predictions ``(N, count, *spatial, C)`` of `times` at once, each from a file of the last ones."""
    with h5py.File("new.h5") as file:
        u, ground = file["u"][()], file["g"][()]
    state, found = np.concatenate([u[:-2], u[2:]], -1), []
    for _ in range(0, count, times):
        write_arrays("pairs.h5", {"u": state, "g": ground}, u="NHWC", g="HW")
        apply(run, "pairs.h5", "hand.h5", COPIED, comm=MPI.COMM_SELF)
        with h5py.File("hand.h5") as file:
            new = np.split(file["prediction"][()], times, -1)
        found += new
        state = np.concatenate([state, *(y[..., ::-1] for y in new)], -1)[..., -4:]
        state[:, 3:6, 4] = np.nan
    return np.stack(found, 1)


@pytest.mark.ranks(1, 2, 4)
def test_as_by_hand(comm, config):
    if comm.rank == 0:
        train(config, ["training.epochs=1"], comm=MPI.COMM_SELF)
        np.save("want.npy", by_hand("out", 4))
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
def test_several_times_at_once_and_refusals(comm, config, capsys, monkeypatch):
    train(config, ["model.times=2", "data.rollout=2", "training.epochs=1"], comm=comm)
    apply("out", "new.h5", "out.nc", rollout=6, comm=comm)
    with monkeypatch.context() as patch:
        patch.setattr(session, "open_kernels", lambda *_: FakeBackend())
        apply("out", "new.h5", "device.nc", rollout=6, comm=comm)
    want = by_hand("out", 6, 2)
    for name in ("out.nc", "device.nc"):
        with h5py.File(name) as file:
            np.testing.assert_allclose(file["prediction"][()], want, rtol=1e-9, atol=1e-12)
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
def test_a_series_of_fewer_samples_than_a_batch(comm, config):
    """The batch is adapted to the samples, which are fewer than the times: the first ones have no history."""
    train(config, ["training.epochs=1"], comm=comm)
    with h5py.File("new.h5") as file:
        write_arrays("short.h5", {"u": file["u"][:5], "g": file["g"][()]}, u="NHWC", g="HW")
    found = apply("out", "short.h5", "x.nc", comm=comm)
    assert found["samples"] == 3 and "training.batch=3" in found["settings"]


@pytest.mark.ranks(1)
def test_predictions_must_have_all_channels(comm, config):
    with h5py.File("times.h5", "r+") as file:
        file["v"].attrs["channel_names"] = ["b", "c"]
    train(config, ["training.epochs=1"], comm=comm)
    message = r"all of its channels \(a, b\), got 't' with b, c; predict them all"
    with pytest.raises(UserError, match=message):
        apply("out", "new.h5", "x.nc", rollout=2, comm=comm)
