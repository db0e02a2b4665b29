"""Tests of runs on packed data: they equal runs on the values, under every cut."""

from __future__ import annotations

import logging

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.errors import UserError
from halograd.training import apply, evaluate, train
from tests.training.cuts import CUTS, curve, overrides_of, scores_of
from tests.training.runs import EDGE, SAMPLES, write_arrays, write_named

NET = """
import halograd as hg

def build(edge=16):
    x, t = hg.Input((edge, edge, 2), name="x"), hg.Input((edge, edge, 1), name="t")
    y = hg.Conv(1, 3, padding=1)(hg.Conv(3, 3, padding=1, activation="relu")(x))
    return hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, t)}, name="packed")
"""
DATA = """
validation = 0.3
invalid = "fill"
inputs = {x = "x"}
targets = {t = "t"}
"""
X = {"scale_factor": np.float32(0.01), "add_offset": np.float32(273.15), "_FillValue": np.int16(-32768), "units": "K"}
T = {"scale_factor": 2.0**-7, "missing_value": np.uint8(255), "units": "m", "valid_range": np.uint8([0, 254])}


def write(folder):
    """Write a file of packed data, and the file values.h5 of its values."""
    rng = np.random.default_rng(5)
    x = rng.integers(-3000, 3000, (SAMPLES, EDGE, EDGE, 2)).astype(np.int16)
    x[rng.random(x.shape) < 0.1] = -32768
    t = rng.integers(0, 255, (SAMPLES, EDGE, EDGE)).astype(np.uint8)
    write_named(folder, NET, DATA, {"x": x, "t": t}, x="NHWC")
    values = x.astype(float) * float(X["scale_factor"]) + float(X["add_offset"])
    values[x == -32768] = np.nan
    write_arrays(folder / "values.h5", {"x": values, "t": t * 2.0**-7}, x="NHWC")
    with h5py.File(folder / "data.h5", "r+") as file:
        file["x"].attrs.update(X)
        file["t"].attrs.update(T)


@pytest.mark.mpi
def test_as_on_the_values(comm, config):
    def run(out, cut, comm, path):
        return scores_of(comm, config, [*overrides_of(cut), f'data.path="{path}"', f"output.directory={out}"])

    for number, cut in enumerate(CUTS[comm.size]):
        scores = [run(f"{name}{number}", cut, comm, f"{name}.h5") for name in ("data", "values")]
        apply(f"data{number}", ["data.h5"], f"{number}.h5", overrides_of(cut), comm=comm)
        if comm.rank == 0:
            assert scores[0] == scores[1]
            assert curve(config.parent / f"data{number}") == curve(config.parent / f"values{number}")
            with h5py.File(f"{number}.h5") as file:
                said = dict(file["prediction"].attrs)
            assert said["units"] == "m" and not said.keys() & {*X, *T} - {"units"}
    if comm.rank == 0:
        assert scores[0]["loss"] == pytest.approx(run("alone", {}, MPI.COMM_SELF, "data.h5")["loss"], rel=1e-9)


@pytest.mark.ranks(1)
def test_numbers_as_they_are_stored(comm, config):
    found = [train(config, [f"data.unpack={on}", f"output.directory=run-{on}"], comm=comm) for on in ("true", "false")]
    assert found[0]["loss"] < 10 < 100 < found[1]["loss"]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("version", [2, 3])
def test_a_run_of_before_is_warned_of(comm, config, caplog, monkeypatch, version):
    """A run of a version that did not unpack gets a warning, because its statistics are those of packed values."""
    with monkeypatch.context() as before:
        before.setattr("halograd.data.normalize._RULES", version)
        train(config, ["training.epochs=1", f"data.unpack={str(version == 3).lower()}"], comm=comm)
    with caplog.at_level(logging.WARNING):
        evaluate(config, ["data.unpack=true"], "all", comm=comm)
    said = [record.getMessage() for record in caplog.records]
    assert any("data.unpack: x is unpacked by scale_factor, add_offset" in text for text in said) == (version == 2)


@pytest.mark.ranks(1, 2)
def test_what_cannot_be_applied_is_refused_on_all_ranks(comm, config):
    if comm.rank == 0:
        with h5py.File("data.h5", "r+") as file:
            file["x"].attrs["scale_factor"] = [0.1, 0.2]
    comm.barrier()
    with pytest.raises(UserError, match=r"attribute 'scale_factor': .*one finite number"):
        train(config, comm=comm)


@pytest.mark.mpi
def test_slow_chunks_are_named_once(comm, config, caplog, monkeypatch):
    """One warning names the slow chunks, of which each rank decompresses whole samples for its rows."""
    if comm.rank == 0:
        with h5py.File("data.h5", "r+") as file:
            x = file["x"][()]
            del file["x"]
            file.create_dataset("x", data=x, chunks=(1, EDGE, EDGE, 2), compression=1).attrs.update(layout="NHWC", **X)
    comm.barrier()
    monkeypatch.setattr("halograd.data.dataset.SLOW", 2.0)
    with caplog.at_level(logging.WARNING):
        train(config, ["training.epochs=1", f"strategy.height={comm.size}"], comm=comm)
    found = [record.getMessage() for record in caplog.records if "--chunk x=1x" in record.getMessage()]
    assert len(found) == (comm.size > 2 and comm.rank == 0)
