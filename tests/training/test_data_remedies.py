"""Tests of the remedies for unsuitable data in messages and docs/data.md, exactly as they are written."""

from __future__ import annotations

import re
from pathlib import Path

import h5py
import numpy as np
import pytest

from halograd.errors import UserError
from halograd.training import evaluate, train
from tests.training.runs import write_own

DOCS = Path(__file__).parents[2] / "docs/data.md"


def code(heading: str) -> str:
    """Return the example below a heading of docs/data.md."""
    return re.split(r"```python\n|```", DOCS.read_text(encoding="utf-8").split(f"### {heading}\n")[1])[1]


PADDED = """
import halograd as hg

def build():
    x, target, inside = (hg.Input((8, 8, 8, 1), name) for name in ("x", "target", "inside"))
    y = hg.Conv(1, 3, padding=1)(x)
    loss = hg.BinaryCrossEntropyWithLogits(normalization="weights")(y, target, inside)
    return hg.Network({"prediction": y, "loss": loss}, name="padded")
"""


@pytest.mark.ranks(1, 2)
def test_samples_of_several_sizes(comm, working):
    """The example that pads samples of different size trains; its loss is the mean over the existing voxels."""
    sizes, rng = [(4, 6, 5), (8, 4, 8), (7, 8, 6), (8, 8, 8)], np.random.default_rng(0)
    if comm.rank == 0:
        with h5py.File("patients.h5", "w") as file:
            for patient, extents in enumerate(sizes):
                file[f"{patient}/image"] = rng.random((*extents, 1))
                file[f"{patient}/mask"] = rng.integers(0, 2, (*extents, 1))
        Path("data.py").write_text(code("Samples of different size"))
        table = '[data]\npath = "patients.h5"\nfile = "data.py:open_padded"\nvalidation = 0\nnormalize = false\n'
        write_own(working, PADDED, table)
    comm.barrier()
    sets = ["training.epochs=1", f"strategy.height={comm.size}"]
    train("run.toml", sets, comm=comm)
    found = evaluate("run.toml", sets, "all", "p.h5", comm)
    if comm.rank == 0:
        with h5py.File("p.h5") as file:
            losses = []
            for k, sample in enumerate(file["sample"]):
                inside = tuple(slice(n) for n in sizes[sample])
                y, t = (file[name][k][inside].astype(float) for name in ("prediction", "target"))
                losses.append((np.logaddexp(0, y) - t * y).ravel())
        assert found["loss"] == pytest.approx(np.concatenate(losses).mean(), rel=1e-6)


NET = """
import halograd as hg

def build(resolution: int = 16):
    x, t = hg.Input((resolution, resolution, 3), name="x"), hg.Input((resolution, resolution, 1), name="target")
    y = hg.Conv(1, 3, padding=1)(x)
    return hg.Network({"prediction": y, "loss": hg.BinaryCrossEntropyWithLogits()(y, t)}, name="window")
"""


def write(folder):
    write_own(folder, NET, settings="resolution = 8\n")


@pytest.mark.ranks(1, 2)
def test_the_middle_window_is_reported(comm, config, capfd):
    crop, line = "data.augment={crop=true}", "only the middle window of every sample is evaluated, 8x8 of 16x16 (25 %)"
    for sets, said in (([crop], True), (["model.resolution=16", crop, "output.directory=whole"], False)):
        sets = [*sets, "training.epochs=1", f"strategy.height={comm.size}"]
        train(config, [*sets, "output.progress=true"], comm=comm)
        printed = capfd.readouterr()
        assert (line in printed.out + printed.err) == (said and comm.rank == 0)
        evaluate(config, sets, "all", comm=comm)
        assert (line in capfd.readouterr().out) == (said and comm.rank == 0)
    whole = ["data.evaluate=whole", f"strategy.height={comm.size}"]
    found = evaluate("out", whole, "all", comm=comm)
    printed = capfd.readouterr().out
    assert np.isfinite(found["loss"]) and "middle window" not in printed


@pytest.mark.ranks(1)
def test_one_sample(comm, config):
    with h5py.File("data.h5", "r+") as file:
        x, t = file["inputs"][:1], file["mask"][:1]
        del file["inputs"], file["mask"]
        file["inputs"], file["mask"] = x, t
        file["inputs"].attrs["layout"] = "NHWC"
    sets = ["model.resolution=16", "training.epochs=1", "training.batch=1"]
    with pytest.raises(UserError, match=r"data.validation: .*set data.validation = 0"):
        train(config, sets, comm=comm)
    assert np.isfinite(train(config, [*sets, "data.validation=0"], comm=comm)["loss"])
