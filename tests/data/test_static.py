"""Fields that all samples share: axes by layout, dimension scales or shape; every box is the slice; one read."""

from __future__ import annotations

import h5py
import numpy as np
import pytest

from halograd.data import DataError, Hdf5Dataset, open_dataset
from halograd.dtensor import Box

N, GRID, C = 5, (4, 6), 3


def write(path, field, order="NHWC", scales=(), **attributes):
    """Write inputs and a dataset `field`; `scales` are the names of the scales of its axes."""
    names = {"NHWC": ("time", "lat", "lon", "level"), "NCHW": ("time", "level", "lat", "lon")}[order]
    sizes = dict(zip(("time", "lat", "lon", "level"), (N, *GRID, C)))
    with h5py.File(path, "w") as file:
        file["x"] = np.ones([sizes[name] for name in names])
        file["x"].attrs["layout"] = order
        file["field"] = field
        file["field"].attrs.update(attributes)
        if scales:
            for name, size in sizes.items():
                file[name] = np.arange(size)
                file[name].make_scale(name)
            for dataset, some in ((file["x"], names), (file["field"], scales)):
                for axis, name in enumerate(some):
                    dataset.dims[axis].attach_scale(file[name])
    return path


#: Shape, layout of the inputs, attributes, scales; and the axes that are found.
CASES = {
    "grid": ((4, 6), "NHWC", {}, (), "HW"),
    "coarser": ((2, 6), "NHWC", {}, (), "HW"),
    "channels last": ((4, 6, 2), "NHWC", {}, (), "HWC"),
    "channels first": ((2, 4, 6), "NCHW", {}, (), "CHW"),
    "stated": ((2, 4, 6), "NHWC", {"layout": "CHW"}, (), "CHW"),
    "stated out of order": ((6, 4), "NHWC", {"layout": "WH"}, (), "WH"),
    "a single sample": ((1, 4, 6), "NHWC", {}, (), "NHW"),
    "a single sample with channels": ((1, 2, 4, 6), "NCHW", {}, (), "NCHW"),
    "per row": ((4,), "NHWC", {"layout": "H"}, (), "H"),
    "as many rows as samples": ((5, 6), "NHWC", {"layout": "HW"}, (), "HW"),
    "scale of rows": ((4,), "NHWC", {}, ("lat",), "H"),
    "scale of columns": ((6,), "NCHW", {}, ("lon",), "W"),
    "scales": ((4, 6), "NHWC", {}, ("lat", "lon"), "HW"),
    "channels by scale": ((3,), "NHWC", {}, ("level",), "C"),
    "scales out of order": ((6, 4), "NHWC", {}, ("lon", "lat"), "WH"),
    "packed": ((4, 6), "NHWC", {"scale_factor": 0.5, "_FillValue": 7.0}, (), "HW"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_box_is_the_slice(tmp_path, case):
    shape, layout, attributes, scales, axes = CASES[case]
    stored = np.arange(1.0, 1 + np.prod(shape)).reshape(shape)
    if case == "packed":
        stored[stored == 7] = 8
    with Hdf5Dataset(write(tmp_path / "a.h5", stored, layout, scales, **attributes), "x", {"w": "field"}) as dataset:
        once, named = (stored[0], axes[1:]) if axes[0] == "N" else (stored, axes)
        values = np.einsum(f"{named}->{''.join(sorted(named, key='DHWC'.index))}", once)
        values = values.reshape([dict(zip(named, once.shape)).get(axis, 1) for axis in "HWC"])
        values = values * attributes.get("scale_factor", 1)
        field = dataset.fields["w"]
        assert field.static == axes and field.shape == values.shape and field.is_target
        indices = [3, 0, 3]
        whole = np.broadcast_to(values, (3, *values.shape))
        for start in np.ndindex(2, *values.shape):
            for stop in ((3, *values.shape), tuple(n + 2 for n in whole.shape)):
                box, dtype = Box(start, stop), np.float32 if start[0] else np.float64
                out = np.full(box.shape, -1, dtype)
                filled = dataset.read("w", indices, box, out)
                part = (box & Box.of_shape(whole.shape)).slices()
                np.testing.assert_array_equal(out[filled], whole[part].astype(dtype))
                out[filled] = -1
                assert (out == -1).all()


@pytest.mark.parametrize(
    ("shape", "scales", "static"),
    [((5, 6), (), ""), ((5, 6), ("time", "lon"), ""), ((5, 4, 6), (), ""), ((5,), (), "")],
)
def test_what_has_samples_is_not_shared(tmp_path, shape, scales, static):
    path = write(tmp_path / "a.h5", np.ones(shape), scales=scales)
    assert Hdf5Dataset(path, "x", {"w": "field"}).fields["w"].static == static


@pytest.mark.parametrize(
    ("shape", "attributes"), [((4,), {}), ((3, 6), {}), ((), {}), ((4, 6, 2, 2), {}), ((6, 4), {"layout": "WW"})]
)
def test_others_are_refused(tmp_path, shape, attributes):
    with pytest.raises(DataError, match=r"or a field that all samples share: on the same grid, or with an attribute"):
        Hdf5Dataset(write(tmp_path / "a.h5", np.ones(shape), **attributes), "x", {"w": "field"})


def test_it_is_read_once_and_of_its_own_file(tmp_path):
    box = Box.of_ranges([(0, 2), (1, 3), (0, 6), (0, 1)])
    for number, name in enumerate(("a.nc", "b.nc")):
        write(tmp_path / name, np.full(GRID, number))
    dataset = open_dataset(tmp_path, "x", {"w": "field"})
    out = np.empty(box.shape)
    for _ in range(3):
        dataset.read("w", [1, N + 1], box, out)
        assert (out[0] == 0).all() and (out[1] == 1).all()
    assert dataset.bytes_read == 2 * 12 * 8
    dataset.close()
    write(tmp_path / "b.nc", np.full((2, 6), 1))
    with pytest.raises(DataError, match=r"b.nc: expected 'field' to be \(4, 6, 1\), .* got \(2, 6, 1\)"):
        dataset.read("w", [N], box.replace(0, 0, 1), np.empty((1, 2, 6, 1)))
