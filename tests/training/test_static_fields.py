"""Fields that all samples share give the run of fields that each sample has, bit by bit, under every cut."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from halograd.errors import UserError
from halograd.training import apply, train
from tests.training.cuts import CUTS, check_resumed, curve, overrides_of, scores_of
from tests.training.runs import EDGE, SAMPLES, write_arrays, write_own

NET = """
import halograd as hg

def build(edge=16):
    x, ground = hg.Input((edge, edge, 3), name="x"), hg.Input((edge, edge, 1), name="ground")
    t, area = hg.Input((edge, edge, 2), name="t"), hg.Input((edge, 1, 1), name="area")
    y = hg.Conv(2, 3, padding=1)(hg.Conv(4, 3, padding=1, activation="relu")(hg.Concat()(x, ground)))
    loss = hg.MeanSquaredError(normalization="weights")(y, t, area)
    return hg.Network({"prediction": y, "loss": loss}, name="shared")
"""
DATA = """
[data]
path = "{name}.h5"
validation = 0.3
inputs = {{x = "u", ground = "g"}}
targets = {{t = "h", area = "a"}}
augment = {{flips = ["height", "width"]}}
"""


def write(folder):
    rng = np.random.default_rng(5)
    ground, area = rng.standard_normal((EDGE, EDGE)), rng.random(EDGE)
    arrays = {"u": rng.standard_normal((SAMPLES, EDGE, EDGE, 3)), "h": rng.standard_normal((SAMPLES, EDGE, EDGE, 2))}
    write_arrays(folder / "shared.h5", {**arrays, "g": ground, "a": area}, u="NHWC", g="HW", a="H")
    each = {"g": np.broadcast_to(ground, (SAMPLES, EDGE, EDGE)), "a": np.broadcast_to(area, (SAMPLES, EDGE))}
    each["a"] = each["a"][..., None, None]
    write_arrays(folder / "each.h5", {**arrays, **each}, u="NHWC")
    write_own(folder, NET, DATA.format(name="shared"))


@pytest.mark.mpi
def test_as_fields_of_each_sample(comm, config):
    for number, cut in enumerate(CUTS[comm.size]):
        found, curves = {}, {}
        for name in ("shared", "each"):
            sets = [*overrides_of(cut), f'data.path="{name}.h5"', f"output.directory={name}{number}"]
            found[name] = scores_of(comm, config, sets)
            curves[name] = curve(config.parent / f"{name}{number}")
            apply(f"{name}{number}", f"{name}.h5", f"{name}.out", comm=comm)
        assert found["shared"] == found["each"] and curves["shared"] == curves["each"]
        if comm.rank == 0:
            with h5py.File("shared.out") as mine, h5py.File("each.out") as theirs:
                np.testing.assert_array_equal(mine["prediction"][()], theirs["prediction"][()])
        comm.barrier()


@pytest.mark.ranks(1, 2, 4)
def test_resumed(comm, config):
    cuts = [overrides_of(cut) for cut in CUTS[comm.size]]
    check_resumed(comm, config, [], cuts)


@pytest.mark.ranks(1, 2)
def test_a_target_of_all_samples_is_refused(comm, config):
    with pytest.raises(UserError, match=r"data.targets: .*'t' of each sample, got 'g' "):
        train(config, [f"strategy.height={comm.size}", 'data.targets.t="g"'], comm=comm)
