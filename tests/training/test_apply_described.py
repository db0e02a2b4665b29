"""Tests of the metadata of predictions: attributes of the data and of the target, coordinates of the samples."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from mpi4py import MPI

from halograd.training import apply, train
from tests.training.runs import EDGE, write_config, write_own, write_shared

NO_VARIABLE = "This is a netCDF dimension but not a netCDF variable. {:10d}"
HALF_DATA = '[data]\npath = "data.h5"\ntargets = "target"\n'
HALF = f"""
import halograd as hg

def build():
    x = hg.Input(({EDGE}, {EDGE}, 3), name="x")
    y = hg.Conv(2, 3, padding=1, stride=2)(x)
    loss = hg.MeanSquaredError()(y, hg.Input(y.shape, name="target"))
    return hg.Network({{"whole": hg.Conv(1, 1)(x), "half": y, "label": hg.GlobalAveragePool()(y), "loss": loss}})
"""


def write_map(folder: Path, edge: int = EDGE) -> None:
    """Write two files in netCDF's layout, with two and three samples, different columns, and a map projection."""
    folder.mkdir()
    rng = np.random.default_rng(2)
    for number, samples in enumerate((2, 3), 9):
        with h5py.File(folder / f"{number}.h5", "w") as file:
            file["inputs"] = rng.standard_normal((samples, edge, edge, 3))
            file["inputs"].attrs.update(layout="NHWC", grid_mapping="crs")
            file["crs"] = 0
            file["crs"].attrs["epsg_code"] = "EPSG:4326"
            axes = {"time": 10.0 * number + np.arange(samples), "lat": np.arange(edge), "lon": number + np.arange(edge)}
            for k, (name, values) in enumerate(axes.items()):
                file[name] = values
                file[name].make_scale(name)
                file["inputs"].dims[k].attach_scale(file[name])


def content(path: Path) -> dict[str, tuple]:
    """Return the datasets of a file by name: scales of the axes, attributes without references, and values or shape."""
    with h5py.File(path) as file:
        return {
            name: (
                [sorted(dim.keys()) for dim in one.dims],
                {k: v for k, v in one.attrs.items() if k not in ("REFERENCE_LIST", "DIMENSION_LIST")},
                one[()].tolist() if one.ndim < 3 else one.shape,
            )
            for name, one in file.items()
        }


@pytest.mark.ranks(1, 2, 4)
def test_has_the_coordinates_of_the_samples(comm, working, caplog):
    """Predictions have the samples' coordinates under every cut; on another grid they have none, with a message."""
    if comm.rank == 0:
        write_map(Path("map"))
        with h5py.File("data.h5", "w") as file:
            file.create_dataset("inputs", data=np.ones((8, EDGE, EDGE, 3))).attrs["layout"] = "NHWC"
            file["target"] = np.ones((8, EDGE // 2, EDGE // 2, 2))
        train(write_own(working, HALF, HALF_DATA), ["training.epochs=1"], comm=MPI.COMM_SELF)
        apply("out", ["map"], "alone.h5", ["training.batch=2"], comm=MPI.COMM_SELF)
    comm.barrier()
    cut = [f"strategy.height={comm.size}", "training.batch=2"]
    for what in ("logits", "classes"):
        apply("out", ["map"], f"{what}.h5", cut, what, comm)
        comm.barrier()
        found = content(Path(f"{what}.h5"))
        assert found == content(Path("alone.h5"))
    assert found["time"][2] == [90, 91, 100, 101, 102] and found["lat"][2] == list(range(EDGE))
    assert [row[0] for row in found["lon"][2]] == [9, 9, 10, 10, 10]
    assert found["whole"][:2] == (
        [["time"], ["lat"], [NO_VARIABLE.format(EDGE)], [NO_VARIABLE.format(1)]],
        {"coordinates": "lon", "grid_mapping": "crs", "layout": "NHWC"},
    )
    assert found["half"][:2] == ([["time"], *[[NO_VARIABLE.format(n)] for n in (8, 8, 2)]], {"layout": "NHWC"})
    assert found["label"][0] == [["time"], [NO_VARIABLE.format(2)]]
    assert not [r for r in caplog.records if "coordinates" in r.message]
    if comm.rank == 0:
        with h5py.File("map/9.h5", "a") as file:
            file["time"].attrs["units"] = "hours since 1900-01-01"
        apply("out", ["map"], "time.h5", ["training.batch=2"], comm=MPI.COMM_SELF)
        (said,) = [r.message for r in caplog.records if "coordinates" in r.message]
        assert said.endswith("coordinates of the data: time (in map/10.h5: it has another 'units')")
        there = content(Path("time.h5"))
        assert there["time"][1]["NAME"].decode() == NO_VARIABLE.format(5) and there["lat"] == found["lat"]


@pytest.mark.ranks(1, 2)
def test_samples_of_another_size_have_their_own_coordinates(comm, working):
    cut = [f"strategy.height={comm.size}", "training.batch=2"]
    train(write_shared(comm, working, write_config), ["training.epochs=1", *cut], comm=comm)
    if comm.rank == 0:
        write_map(working / "map", 2 * EDGE)
    comm.barrier()
    apply("out", ["map"], "p.h5", [f"model.resolution={2 * EDGE}", *cut], comm=comm)
    assert content(Path("p.h5"))["lat"][2] == list(range(2 * EDGE))


SAID = """
import halograd as hg

def build(edge=16):
    x = hg.Input((edge, edge, 3), name="x")
    y = hg.Conv(4, 3, padding=1, activation="relu")(x)
    flow, logits = hg.Conv(2, 1, name="flow")(y), hg.Conv(3, 1, name="logits")(y)
    loss = hg.MeanSquaredError()(flow, hg.Input((edge, edge, 2), "speed"))
    loss = loss + hg.SoftmaxCrossEntropy()(logits, hg.Input((edge, edge, 1), "mask", "int32"))
    return hg.Network({"prediction": flow, "kind": logits, "features": y, "loss": loss}, name="said")
"""
SAID_DATA = """[data]
path = "data.h5"
inputs = "u"
[data.targets]
speed = "v"
mask = "label"
"""
SPEED = {"units": "m s-1", "long_name": "velocity", "channel_names": ["u", "v"]}
MASK = {"long_name": "kind of cell", "flag_values": [0, 1, 2], "flag_meanings": "land sea ice", "units": "1"}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("what", ["logits", "classes"])
def test_says_what_the_data_say(comm, working, what):
    """Predictions have the attributes of their target in training, the file those of the new inputs."""
    if comm.rank == 0:
        rng = np.random.default_rng(5)
        write_own(working, SAID, SAID_DATA)
        with h5py.File("data.h5", "w") as file:
            file.create_dataset("u", data=rng.random((12, EDGE, EDGE, 3))).attrs["layout"] = "NHWC"
            file["v"], file["label"] = rng.random((12, EDGE, EDGE, 2)), rng.integers(0, 3, (12, EDGE, EDGE))
            for name, said in (("v", SPEED), ("label", MASK)):
                file[name].attrs.update(said)
            file["v"].attrs["comment"] = np.zeros((2, 2))
        for number in range(2):
            with h5py.File(f"new{number}.h5", "w") as file:
                file.create_dataset("u", data=rng.random((4, EDGE, EDGE, 3))).attrs["layout"] = "NHWC"
                file.attrs.update(title="Ocean", history=f"run {number}", year=np.int32(2020), written_by="somebody")
                file.attrs["nothing"] = h5py.Empty("f")
    comm.barrier()
    sets = ["training.epochs=1", f"strategy.height={comm.size}"]
    train("run.toml", sets, comm=comm)
    apply("out", ["new0.h5", "new1.h5"], "p.h5", sets, what, comm)
    apply("out", ["new0.h5"], "one.h5", sets, what, comm)
    if comm.rank == 0:
        with h5py.File("p.h5") as file, h5py.File("one.h5") as one:
            said = {"title": "Ocean", "year": 2020, "written_by": "halograd apply", "network": "said"}
            found = dict(file.attrs)
            assert ("needs" in found) == (comm.size > 1) and {**found, "needs": ""} == {**said, "needs": ""}
            assert one.attrs["history"] == "run 0"
            found = dict(file["prediction"].attrs)
            assert found.pop("channel_names").tolist() == ["u", "v"]
            assert found == {"layout": "NHWC", "units": "m s-1", "long_name": "velocity"}
            kind = dict(file["kind"].attrs)
            assert kind["long_name"] == "kind of cell" and ("flag_meanings" in kind) == (what == "classes")
            assert dict(file["features"].attrs) == {"layout": "NHWC"}
        with h5py.File("p.h5", "r+") as file:  # so that the next job may replace it
            assert file.attrs["written_by"] == "halograd apply"
