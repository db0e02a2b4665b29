"""Pairs of times in training, evaluation and prediction: the bits of copied pairs under every cut; resumed."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from halograd.errors import UserError
from halograd.training import apply, evaluate, train
from tests.training.cuts import CUTS, check_resumed, curve, overrides_of
from tests.training.runs import EDGE, check_refused, write_arrays, write_own

TIMES = 30
NET = """
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
DATA = """
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


def write(folder):
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
    write_own(folder, NET, DATA)


COPIED = ['data.path="pairs.h5"', 'data.targets.t="t"', "data.lag=0", "data.history=1", "data.rollout=1"]


@pytest.mark.mpi
def test_as_copied_pairs(comm, config):
    for number, cut in enumerate(CUTS[comm.size]):
        found = {}
        for name, more in (("steps", []), ("pairs", COPIED)):
            sets = [*overrides_of(cut), f"output.directory={name}{number}", *more]
            train(config, [*sets, "training.epochs=2"], comm=comm)
            scores = evaluate(config, sets, "all", comm=comm)
            found[name] = (
                curve(config.parent / f"{name}{number}"),
                {k: scores[k] for k in scores.keys() - {"checkpoint"}},
            )
        assert found["steps"] == found["pairs"]


@pytest.mark.ranks(1, 2)
def test_predictions_have_the_times_of_their_inputs(comm, config):
    train(config, [f"strategy.height={comm.size}", "training.epochs=1", "output.directory=one"], comm=comm)
    apply("one", "new.h5", "out.nc", comm=comm)
    if comm.rank == 0:
        with h5py.File("out.nc") as file:
            assert file["prediction"].shape == (6, EDGE, EDGE, 4)
            assert file["time"][()].tolist() == [2, 3, 4, 5, 6, 7] == file["source_sample"][()].tolist()
            assert file["prediction"].dims[0][0].name == "/time"
            assert file["prediction"].attrs["steps_ahead"].tolist() == [2, 4]


@pytest.mark.ranks(1, 2, 4)
def test_resumed(comm, config):
    check_resumed(comm, config, [], [overrides_of(cut) for cut in CUTS[comm.size]])


@pytest.mark.ranks(1, 2)
def test_too_few_times(comm, config):
    with pytest.raises(UserError, match=r"data.lag: .*25 .* got at most 15"):
        train(config, [f"strategy.height={comm.size}", "data.lag=8"], comm=comm)
    if comm.rank == 0:
        check_refused(["data.lag=0"], "history: expected lag = 1 or more with it, got 0")
