"""Packed values: the formula of the conventions, NaN for missing values, errors for unsupported attributes."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.data import ArrayDataset, DataError, Hdf5Dataset, LabelMap, channel_statistics, open_dataset
from halograd.data.packing import packing_of
from halograd.data.survey import count_classes, find_invalid, look_at
from halograd.data.targets import TargetRange
from halograd.dtensor import Box

N, GRID, CHANNELS = 4, (5, 6), 3
SHAPE = (N, *GRID, CHANNELS)


def write(path: Path, stored: np.ndarray, layout: str = "NHWC", mask: np.ndarray | None = None, **said: object) -> Path:
    """Write a file with inputs ``(N, *spatial, C)`` in this layout, with these attributes, and a mask."""
    with h5py.File(path, "w") as file:
        file["inputs"] = np.moveaxis(stored, -1, 1) if layout == "NCHW" else stored
        file["inputs"].attrs.update(layout=layout, **said)
        file["mask"] = np.zeros(stored.shape[:-1], np.uint8) if mask is None else mask
    return path


def read(dataset: Hdf5Dataset | ArrayDataset, name: str = "x", dtype: type = np.float64) -> np.ndarray:
    out = np.zeros((len(dataset), *dataset.fields[name].shape), dtype)
    dataset.read(name, range(len(dataset)), Box.of_shape(out.shape), out)
    return out


def lenient(path: Path, **options: object) -> Hdf5Dataset:
    dataset = Hdf5Dataset(path, **options)  # type: ignore[arg-type]
    dataset.lenient = frozenset(dataset.fields)
    return dataset


INTEGERS, FLOATS = ("i1", "u1", "i2", ">u2", ">i4", "u4", "i8"), ("f2", "f4", ">f8")


@given(st.data())
def test_values_are_those_of_the_formula(tmp_path_factory, data):
    """Unpacked values are computed in float64 and rounded once, for any stored type, layout and box."""
    dtype = np.dtype(data.draw(st.sampled_from(INTEGERS + FLOATS)))
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    stored = rng.integers(0, 100, SHAPE).astype(dtype)
    number = st.sampled_from([0.5, -0.01, 273.15, 1e4])
    scale, offset = data.draw(st.none() | number), data.draw(st.none() | number)
    missing = data.draw(st.lists(st.integers(0, 99), max_size=3))
    limits = data.draw(st.none() | st.tuples(st.integers(0, 50), st.integers(50, 120)))
    layout = data.draw(st.sampled_from(["NHWC", "NCHW"]))
    said: dict[str, object] = {}
    if scale is not None:
        said["scale_factor"] = data.draw(st.sampled_from([np.float32(scale), np.array([scale])]))
    if offset is not None:
        said["add_offset"] = np.float64(offset)
    if missing:
        said["_FillValue"] = np.array(missing[0], dtype)
        said["missing_value"] = np.array(missing[1:], dtype)
    if limits is not None:
        said |= {"valid_range": np.array(limits, dtype)} if data.draw(st.booleans()) else {"valid_max": limits[1]}
    path = write(tmp_path_factory.mktemp("d") / "a.h5", stored, layout, **said)

    factor = 1.0 if scale is None else float(np.asarray(said["scale_factor"]).item())
    want = stored.astype(np.float64) * factor + (offset or 0.0)
    absent = np.isin(stored.astype(np.int64), missing)
    if limits is not None:
        absent |= stored.astype(np.int64) > limits[1]
        absent |= (stored.astype(np.int64) < limits[0]) & ("valid_range" in said)
    want[absent] = np.nan
    low = [data.draw(st.integers(0, n - 1)) for n in SHAPE]
    box = Box(tuple(low), tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(low, SHAPE)))
    with lenient(path) as dataset:
        for kind in (np.float32, np.float64):
            out = np.zeros(box.shape, kind)
            dataset.read("x", range(N), box, out)
            np.testing.assert_array_equal(out, want[box.slices()].astype(kind))
    with lenient(path, unpack=False) as plain:
        np.testing.assert_array_equal(read(plain), stored.astype(np.float64))


@pytest.mark.parametrize("shape", [(N,), (N, 4), (N, *GRID), (N, *GRID, 1)])
def test_targets_of_any_kind(tmp_path, shape):
    path = write(tmp_path / "a.h5", np.zeros(SHAPE, np.float32))
    with h5py.File(path, "a") as file:
        del file["mask"]
        file["mask"] = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
        file["mask"].attrs.update(scale_factor=0.5, add_offset=-1.0)
    with Hdf5Dataset(path) as dataset:
        np.testing.assert_array_equal(read(dataset, "target").ravel(), 0.5 * np.arange(np.prod(shape)) - 1)


def test_large_samples_are_unpacked_part_by_part(tmp_path):
    """Samples with more elements than one part are unpacked part by part, with channels last and first."""
    stored = np.random.default_rng(0).integers(-(2**15), 2**15, (1, 200, 300, 7), np.int16)
    for layout in ("NHWC", "NCHW"):
        path = write(tmp_path / "a.h5", stored, layout, scale_factor=0.1, _FillValue=np.int16(5))
        with lenient(path) as dataset:
            np.testing.assert_array_equal(read(dataset), np.where(stored == 5, np.nan, stored * 0.1))


@pytest.mark.parametrize(
    ("dtype", "said", "missing", "low", "high"),
    [
        ("f4", {"_FillValue": 1e20, "missing_value": np.float32(1e20)}, (float(np.float32(1e20)),), None, None),
        ("f4", {"_FillValue": np.float32(np.nan), "missing_value": -999}, (-999.0,), None, None),
        ("i2", {"_Unsigned": "true", "_FillValue": np.int16(-1), "valid_range": np.int16([0, -6])},
         (65535,), None, 65530),
        ("u1", {"_Unsigned": b"false", "_FillValue": np.uint8(255)}, (-1,), None, None),
        ("i2", {"scale_factor": 0.5, "add_offset": 10.0, "valid_range": [10.0, 20.0]}, (), 0, 20),
        ("i2", {"scale_factor": -0.5, "add_offset": 10.0, "valid_min": 0.0}, (), None, 20),
        ("i2", {"scale_factor": np.float32(0.01), "valid_max": np.int16(7)}, (), None, 7),
        ("i2", {"valid_min": -np.inf, "valid_max": 2.5}, (), None, 2),
        ("i2", {"valid_min": np.inf}, (), 32768, None),
        ("u1", {"_FillValue": h5py.Empty("f"), "missing_value": [3, 3, 4]}, (3, 4), None, None),
        ("?", {"missing_value": 0}, (0,), None, None),
    ],
)  # fmt: skip
def test_what_attributes_mean(tmp_path, dtype, said, missing, low, high):
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["a"] = np.zeros(3, dtype)
        file["a"].attrs.update(said)
        found = packing_of(file["a"].attrs, file["a"].dtype, "a")
    assert found is not None and (found.missing, found.low, found.high) == (missing, low, high)
    unsigned = {"i2": "u2", "u1": "i1"} if "_Unsigned" in said else {}
    assert np.dtype(found.dtype) == np.dtype(unsigned.get(dtype, dtype))


@pytest.mark.parametrize(
    "said", [{}, {"scale_factor": 1.0, "add_offset": 0}, {"_FillValue": np.nan}, {"units": "K", "valid_min": -np.inf}]
)
def test_numbers_that_are_not_packed(said):
    assert packing_of(said, np.dtype("f4"), "a") is None


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("scale_factor", np.ones(3), r"one finite number for the whole dataset, got \[1.0, 1.0, 1.0\]"),
        ("scale_factor", "0.01", "a number, got '0.01'"),
        ("scale_factor", 0.0, "a number other than 0"),
        ("scale_factor", np.nan, "one finite number"),
        ("add_offset", [np.inf], "one finite number"),
        ("add_offset", 1j, "a number"),
        ("missing_value", "-999", "a number, got '-999'"),
        ("missing_value", ["a", "b"], "a number"),
        ("valid_range", [5, 1], r"two rising numbers, got \[5, 1\]"),
        ("valid_range", [1.0], "two rising numbers"),
        ("valid_min", np.nan, "one number"),
        ("_Unsigned", "yes", "'true' or 'false', got 'yes'"),
    ],
)
def test_attributes_that_cannot_be_applied_are_named(tmp_path, name, value, expected):
    path = write(tmp_path / "a.h5", np.zeros(SHAPE, np.int16), **{name: value})
    with pytest.raises(DataError, match=rf"a.h5: '/inputs': attribute '{name}': expected {expected}.*data.unpack = f"):
        Hdf5Dataset(path)
    assert not read(Hdf5Dataset(path, unpack=False)).any()


@pytest.mark.parametrize("value", [-1, 1e20, 0.5])
def test_a_missing_value_that_no_number_is_equal_to_is_named(tmp_path, caplog, value):
    path = write(tmp_path / "a.h5", np.full(SHAPE, 255, np.uint8), missing_value=value)
    assert (read(Hdf5Dataset(path)) == 255).all()
    assert f"attribute 'missing_value' has no effect: no number of type uint8 is {value}" in caplog.text


def test_missing_values_meet_the_policy_for_nan(tmp_path):
    stored = np.arange(N * 90, dtype=np.int16).reshape(SHAPE)
    path = write(tmp_path / "a.h5", stored, scale_factor=2.0, _FillValue=stored[1, 2, 3, 1])
    with pytest.raises(DataError, match=r"nan \(a missing value by _FillValue\) in sample 1, channel 1"):
        read(Hdf5Dataset(path))
    dataset = Hdf5Dataset(path)
    assert find_invalid(dataset, {}, range(N)) == {1: "nan in channel 1"}
    dataset.lenient = frozenset("x")
    found, want = (
        channel_statistics(dataset, "x", range(N)),
        np.where(stored == stored[1, 2, 3, 1], np.nan, 2.0 * stored),
    )
    np.testing.assert_allclose(found.mean, np.nanmean(want, axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(found.std, np.nanstd(want, axis=(0, 1, 2)), rtol=1e-12)


def test_surveys_see_values(tmp_path):
    stored = np.random.default_rng(0).integers(1, 5, SHAPE).astype(np.uint8)
    dataset = Hdf5Dataset(write(tmp_path / "a.h5", stored, mask=stored[..., 0], scale_factor=10.0))
    squares = np.square(10.0 * stored).mean(axis=(1, 2, 3))
    assert look_at(dataset, "x", N).scale == pytest.approx(squares.max(), rel=1e-12)
    assert count_classes(dataset, "target", 5, range(N)).tolist() == np.bincount(stored[..., 0].ravel()).tolist()


LABELS = {"target": TargetRange(0, 2, whole=True, ignored=255)}


def test_labels_that_the_loss_or_the_user_names_are_not_missing(tmp_path):
    """Labels equal to _FillValue are not missing if `ignore_index` or `labels` names them."""
    mask = np.random.default_rng(0).choice(np.array([0, 1, 2, 255], np.uint8), (N, *GRID))
    path = write(tmp_path / "a.h5", np.zeros(SHAPE, np.float32), mask=mask)
    with h5py.File(path, "a") as file:
        file["mask"].attrs["_FillValue"] = np.uint8(255)
    np.testing.assert_array_equal(read(Hdf5Dataset(path, ranges=LABELS), "target")[..., 0], mask)
    limits = {"target": TargetRange(0, 2, whole=True, ignored=-1)}
    dataset = Hdf5Dataset(path, ranges=limits)
    dataset.labels = {"target": LabelMap({255: -1})}
    np.testing.assert_array_equal(read(dataset, "target")[..., 0], np.where(mask == 255, -1.0, mask))
    message = r"target nan \(a missing value by _FillValue\) in sample 0 of 'mask'.*if the number is a class"
    with pytest.raises(DataError, match=message):
        read(Hdf5Dataset(path, ranges=limits), "target")


def test_labels_of_several_datasets_are_not_missing(tmp_path):
    """Each dataset of a target is unpacked by itself, and there, too, a named label is a label."""
    mask = np.random.default_rng(0).choice(np.array([0, 1, 2, 255], np.uint8), (N, *GRID))
    path = write(tmp_path / "a.h5", np.zeros(SHAPE, np.float32), mask=mask)
    with h5py.File(path, "a") as file:
        file["other"] = mask[::-1]
        for name in ("mask", "other"):
            file[name].attrs["_FillValue"] = np.uint8(255)
    both = np.stack([mask, mask[::-1]], axis=-1)
    np.testing.assert_array_equal(read(Hdf5Dataset(path, targets=["mask", "other"], ranges=LABELS), "target"), both)
    dataset = Hdf5Dataset(path, targets=["mask", "other"], ranges={"target": TargetRange(0, 2, whole=True)})
    dataset.labels = {"target": LabelMap({255: 1})}
    np.testing.assert_array_equal(read(dataset, "target"), np.where(both == 255, 1, both))


def test_packed_labels_are_refused(tmp_path):
    path = write(tmp_path / "a.h5", np.zeros(SHAPE, np.float32))
    with h5py.File(path, "a") as file:
        file["mask"].attrs["scale_factor"] = 0.1
    assert not read(Hdf5Dataset(path, ranges={"target": TargetRange(0, 1)}), "target").any()
    with pytest.raises(DataError, match="'mask' has the attribute 'scale_factor', expected class indices without it"):
        Hdf5Dataset(path, ranges=LABELS)
    assert not read(Hdf5Dataset(path, ranges=LABELS, unpack=False), "target").any()


def test_simulations(tmp_path):
    path = write(tmp_path / "a.h5", np.zeros(SHAPE, np.float32))
    with h5py.File(path, "a") as file:
        file["simulation"] = np.array([3, 3, 2**60, 7])
        file["simulation"].attrs["_FillValue"] = -1
    assert Hdf5Dataset(path).groups.tolist() == [3, 3, 2**60, 7]
    for name, value, what in (("_FillValue", 7, "a missing value for sample 3"), ("scale_factor", 0.5, "scale_factor")):
        with h5py.File(path, "a") as file:
            file["simulation"].attrs[name] = value
        with pytest.raises(DataError, match=f"'simulation': expected a whole number per sample, got {what}"):
            Hdf5Dataset(path)


def test_files_may_be_packed_differently(tmp_path):
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 99, (2, *SHAPE)).astype(np.int16)
    write(tmp_path / "a.h5", stored[0], scale_factor=0.5)
    write(tmp_path / "b.h5", stored[1], add_offset=7.0)
    np.testing.assert_array_equal(read(open_dataset(tmp_path)), np.concatenate([0.5 * stored[0], stored[1] + 7.0]))


def test_arrays_that_say_how_they_are_packed(tmp_path):
    """Datasets of h5py, objects with the same attributes, and masked arrays of netCDF4 are unpacked as arrays."""
    stored = np.random.default_rng(0).integers(0, 9, SHAPE).astype(np.int16)
    labels = stored[..., :1] % 3
    path = write(tmp_path / "a.h5", stored, mask=labels, scale_factor=0.5, _FillValue=np.int16(4))
    want = np.where(stored == 4, np.nan, 0.5 * stored)

    class Masked:
        """Double of a netCDF4 variable."""

        shape, dtype = SHAPE, np.dtype(np.float64)

        def __getitem__(self, key: object) -> np.ma.MaskedArray:
            return np.ma.masked_array(np.where(stored == 4, 9e36, 0.5 * stored), stored == 4)[key]

    with h5py.File(path) as file:
        for array in (file["inputs"], Masked()):
            dataset = ArrayDataset({"x": array, "target": file["mask"]})
            with pytest.raises(DataError, match=r"nan .*in sample"):
                read(dataset)
            dataset.lenient = frozenset("x")
            np.testing.assert_array_equal(read(dataset), want)
    masked = ArrayDataset({"x": stored, "target": np.ma.masked_equal(labels, 2)})
    masked.ranges = {"target": TargetRange(0, 1, whole=True, ignored=2)}
    np.testing.assert_array_equal(read(masked, "target"), labels)


@pytest.mark.parametrize("virtual", ["i2", "f4"])
def test_virtual_datasets_have_the_packing_of_their_sources(tmp_path, virtual):
    """A virtual dataset has the packing attributes of its sources, because HDF5 copies values but no attributes."""
    rng = np.random.default_rng(0)
    stored = rng.integers(0, 9, (2, *SHAPE)).astype(np.int16)
    said = {"scale_factor": 0.5, "_FillValue": np.int16(4)}
    for number in range(2):
        write(tmp_path / f"part{number}.h5", stored[number], **said)
    layout = h5py.VirtualLayout((2 * N, *SHAPE[1:]), virtual)
    for number in range(2):
        source = h5py.VirtualSource(str(tmp_path / f"part{number}.h5"), "inputs", SHAPE)
        for sample in range(N):  # each source occurs many times
            layout[number * N + sample] = source[sample]
    path = tmp_path / "all.h5"
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("inputs", layout).attrs["layout"] = "NHWC"
        file["mask"] = np.zeros(2 * N)
    want = np.where(stored == 4, np.nan, 0.5 * stored).reshape(2 * N, *SHAPE[1:])
    np.testing.assert_array_equal(read(lenient(path)), want)
    np.testing.assert_array_equal(read(lenient(path, unpack=False)), stored.reshape(want.shape))
    with h5py.File(path, "r+") as file:
        file["inputs"].attrs.update(scale_factor=0.5, _FillValue=np.array(4, virtual))
    np.testing.assert_array_equal(read(lenient(path)), want)
    message = "all.h5: '/inputs' takes numbers from datasets that are packed in several ways, or not as its own"
    with h5py.File(path, "r+") as file:
        file["inputs"].attrs["scale_factor"] = 0.25
    with pytest.raises(DataError, match=message):
        Hdf5Dataset(path)
    with h5py.File(path, "r+") as file:
        del file["inputs"].attrs["scale_factor"], file["inputs"].attrs["_FillValue"]
    with h5py.File(tmp_path / "part1.h5", "r+") as file:
        del file["inputs"].attrs["scale_factor"]
    with pytest.raises(DataError, match=message):
        Hdf5Dataset(path)
    with h5py.File(tmp_path / "part1.h5", "r+") as file:
        del file["inputs"].attrs["_FillValue"]
    with pytest.raises(DataError, match=message):
        Hdf5Dataset(path)


def _view(file: h5py.File, name: str, source: h5py.VirtualSource, dtype: str = "i2") -> h5py.Dataset:
    """Return a virtual dataset of a whole source."""
    layout = h5py.VirtualLayout(SHAPE, dtype)
    layout[:] = source
    made = file.create_virtual_dataset(name, layout)
    made.attrs["layout"] = "NHWC"
    return made


def test_each_dataset_has_the_packing_of_its_own_sources(tmp_path):
    """Each dataset has the packing of its own sources, whatever other datasets were examined before."""
    stored = np.arange(np.prod(SHAPE)).reshape(SHAPE).astype("i2")
    packed = {"scale_factor": 0.25, "add_offset": 3.0}
    write(tmp_path / "packed.h5", stored, **packed)
    write(tmp_path / "plain.h5", stored)
    with h5py.File(tmp_path / "between.h5", "w") as file:
        _view(file, "packed", h5py.VirtualSource("packed.h5", "inputs", SHAPE))
        _view(file, "says", h5py.VirtualSource("plain.h5", "inputs", SHAPE)).attrs.update(packed)
    makes = {
        "plain": lambda file, name: file.create_dataset(name, data=stored).attrs.update(layout="NHWC"),
        "packed": lambda file, name: _view(file, name, h5py.VirtualSource("packed.h5", "inputs", SHAPE)),
        "float": lambda file, name: _view(file, name, h5py.VirtualSource("packed.h5", "inputs", SHAPE), "f8"),
        "between": lambda file, name: _view(file, name, h5py.VirtualSource("between.h5", "packed", SHAPE), "i4"),
        "says": lambda file, name: _view(file, name, h5py.VirtualSource("between.h5", "says", SHAPE)),
        "virtual": lambda file, name: _view(file, name, h5py.VirtualSource("plain.h5", "inputs", SHAPE)),
    }
    for one, make in makes.items():
        for other, make_other in makes.items():
            with h5py.File(tmp_path / f"{one} {other}.h5", "w") as file:
                make(file, "inputs")
                make_other(file, "mask")
            with open_dataset(tmp_path / f"{one} {other}.h5", "inputs", "mask") as dataset:
                for name, kind in (("x", one), ("target", other)):
                    expected = stored if kind in ("plain", "virtual") else stored * 0.25 + 3
                    np.testing.assert_array_equal(read(dataset, name), expected, f"{name} of {one}, {other}")


def test_a_virtual_dataset_that_says_the_same_in_other_attributes(tmp_path):
    stored = np.ones(SHAPE, "i2")
    write(tmp_path / "packed.h5", stored, scale_factor=0.5, add_offset=0.0, missing_value=np.int16(7))
    with h5py.File(tmp_path / "data.h5", "w") as file:
        view = _view(file, "inputs", h5py.VirtualSource("packed.h5", "inputs", SHAPE))
        view.attrs.update(scale_factor=np.float32(0.5), _FillValue=np.int16(7))
        file["mask"] = np.zeros(SHAPE[:-1], "u1")
    with Hdf5Dataset(tmp_path / "data.h5") as dataset:
        assert (read(dataset) == 0.5).all()


def test_numbers_without_a_sign_in_a_virtual_dataset_of_another_type(tmp_path):
    """A virtual dataset of a wider type over unsigned bytes is an error, because HDF5 converts the byte 255 to -1."""
    write(tmp_path / "packed.h5", np.full(SHAPE, -1, "i1"), _Unsigned="true")
    for dtype in ("i1", "i2", "f4"):
        with h5py.File(tmp_path / f"{dtype}.h5", "w") as file:
            _view(file, "inputs", h5py.VirtualSource("packed.h5", "inputs", SHAPE), dtype)
            file["mask"] = np.zeros(SHAPE[:-1], "u1")
    with Hdf5Dataset(tmp_path / "i1.h5") as dataset:
        assert (read(dataset) == 255).all()
    for dtype, found in (("i2", "int16"), ("f4", "float32")):
        with pytest.raises(DataError, match=f"_Unsigned.*type int8, got one of {found}"):
            Hdf5Dataset(tmp_path / f"{dtype}.h5")
    with Hdf5Dataset(tmp_path / "i2.h5", unpack=False) as dataset:
        assert (read(dataset) == -1).all()
