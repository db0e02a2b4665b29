"""Inputs without channels, and inputs whose channels are datasets of their own."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from halograd.data import DataError, Hdf5Dataset, open_dataset
from halograd.dtensor import Box

N, GRID = 4, (5, 6)
RNG = np.random.default_rng(3)
TEMPERATURE = RNG.integers(-300, 300, (N, *GRID)).astype(np.int16)
CURRENT = RNG.standard_normal((N, *GRID)).astype(">f8")
MASK = RNG.integers(0, 2, (N, *GRID)).astype(np.uint8)
CHANNELS = np.stack([TEMPERATURE * 0.25 + 1, CURRENT, MASK], -1)
NAMES = ["ocean/temperature", "current", "mask"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Return a file as a model of the ocean writes it: variables of their own, with coordinates and no layout."""
    path = tmp_path_factory.mktemp("channels") / "ocean.nc"
    with h5py.File(path, "w") as file:
        for name, values in zip(NAMES, (TEMPERATURE, CURRENT, MASK)):
            file.create_dataset(name, data=values, chunks=(2, 5, 3), compression=1)
        file["ocean/temperature"].attrs.update(scale_factor=0.25, add_offset=1.0, units="K")
        file["current"].attrs["units"] = "m s-1"
        for axis, (name, units, n) in enumerate(
            (("time", "days since 2000-01-01", N), ("lat", "degrees_north", 5), ("lon", "degrees_east", 6))
        ):
            file[name] = np.arange(float(n))
            file[name].attrs["units"] = units
            file[name].make_scale(name)
            for variable in NAMES:
                file[variable].dims[axis].attach_scale(file[name])
        file["levels"] = np.zeros((N, *GRID, 2))
        file["coarse"] = np.zeros((N, 5, 3))
    return path


@pytest.mark.parametrize("low", range(3))
def test_boxes_are_those_of_stacked_datasets(path, low):
    with Hdf5Dataset(path, {"x": NAMES}, {"t": ["current", "mask"]}) as dataset:
        field = dataset.fields["x"]
        assert field.shape == (*GRID, 3) and field.channel_names == ["temperature", "current", "mask"]
        assert field.attributes["units"] == "K, m s-1, 1" and dataset.fields["t"].shape == (*GRID, 2)
        for high in range(low + 1, 4):
            box = Box((-1, 1, -2, low), (3, 6, 4, high))
            out = np.full(box.shape, -7.0)
            filled = dataset.read("x", [2, 0, 3], box, out)
            want = np.full(box.shape, -7.0)
            want[1:, :4, 2:] = CHANNELS[[2, 0, 3], 1:, :4, low:high]
            np.testing.assert_array_equal(out, want)
            np.testing.assert_array_equal(out[filled], want[1:, :4, 2:])


def test_a_map_in_time_needs_no_layout(path):
    with Hdf5Dataset(path, "current", None) as dataset:
        out = np.empty((N, *GRID, 1), np.float32)
        dataset.read("x", range(N), Box.of_shape(out.shape), out)
        np.testing.assert_array_equal(out[..., 0], CURRENT.astype(np.float32))
        assert dataset.fields["x"].channel_names == ["channel 0"] and len(dataset.structure.times) == N


@pytest.mark.parametrize("shape", [(3, 5), (3, 5, 4), (3, 5, 4, 2)])
def test_layout_without_channels(tmp_path, shape):
    values = RNG.standard_normal(shape)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["inputs"] = values
        file["more"] = np.zeros((*shape, 2))
    with Hdf5Dataset(tmp_path / "a.h5", {"x": "inputs", "more": "more"}, None, "NHW") as dataset:
        out = np.empty((*shape, 1))
        dataset.read("x", range(3), Box.of_shape(out.shape), out)
        np.testing.assert_array_equal(out[..., 0], values)
        assert dataset.fields["more"].shape == (*shape[1:], 2)


@pytest.mark.parametrize("names", [["current", "levels"], ["current", "coarse"], ["levels", "current"]])
def test_other_shapes_are_refused(path, names):
    with pytest.raises(DataError, match=r"expected arrays on one grid, \(N, \*spatial\)"):
        Hdf5Dataset(path, {"x": names}, None)


def test_files_with_other_packing_are_one_data_set(path, tmp_path):
    with h5py.File(tmp_path / "b.nc", "w") as file:
        for name, values in zip(NAMES, CHANNELS.transpose(3, 0, 1, 2)):
            file[name] = values
    with open_dataset([path, tmp_path / "b.nc"], {"x": NAMES}, None) as dataset:
        out = np.empty((2, *GRID, 3))
        dataset.read("x", [1, N + 1], Box.of_shape(out.shape), out)
        np.testing.assert_array_equal(out[0], out[1])
        np.testing.assert_array_equal(out[0], CHANNELS[1])
