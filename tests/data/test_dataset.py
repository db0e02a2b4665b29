"""Reading by boxes, from files and arrays, of shared fields and pairs of times: correct values, one-line errors."""

from __future__ import annotations

import logging
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.data import ArrayDataset, StandardAugmentation, open_dataset
from halograd.data.augment import Rules
from halograd.data.dataset import Hdf5Dataset
from halograd.data.disk import DataError
from halograd.data.steps import TimeSteps, simulations
from halograd.data.structure import OF_NUMBERS, plain_attributes
from halograd.data.survey import find_invalid
from halograd.data.targets import LabelMap, TargetRange
from halograd.data.windows import SampleWindows
from halograd.dtensor.box import Box

N, CHANNELS = 5, 3


def make(path: Path, spatial=(6, 8), layout="NHWC", dtype=np.float32, mask_channels=None, **extra) -> np.ndarray:
    """Write a file; return the inputs as ``(N, *spatial, C)``."""
    rng = np.random.default_rng(1)
    x = (rng.normal(0, 100, (N, *spatial, CHANNELS))).astype(dtype)
    y = rng.integers(0, 2, (N, *spatial)).astype(np.uint8)
    with h5py.File(path, "w") as file:
        last = layout == "NHWC"
        file["inputs"] = x if last else np.moveaxis(x, -1, 1)
        file["inputs"].attrs["layout"] = layout
        if mask_channels is not None:
            y = y[..., None] if last else y[:, None]
        file["mask"] = y
        for name, value in extra.items():
            file[name] = value
    return x


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data.h5"


@pytest.mark.parametrize("spatial", [(9,), (6, 8), (4, 3, 5)])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int16, np.bool_])
def test_any_box_of_any_layout(path: Path, spatial: tuple, layout: str, dtype: type) -> None:
    x = make(path, spatial, layout, dtype)
    rng = np.random.default_rng(0)
    with Hdf5Dataset(path) as data:
        assert len(data) == N and data.fields["x"].shape == (*spatial, CHANNELS)
        for out_dtype in (np.float32, np.float64):
            indices = [int(i) for i in rng.permutation(N)[:4]]
            batch = x[indices].astype(out_dtype)
            for _ in range(5):
                low = [int(rng.integers(0, n)) for n in batch.shape]
                high = [int(rng.integers(a + 1, n + 1)) for a, n in zip(low, batch.shape)]
                box = Box(tuple(low), tuple(high))
                out = np.full(box.shape, np.nan, out_dtype)
                data.read("x", indices, box, out)
                np.testing.assert_array_equal(out, batch[box.slices()])


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("contiguous", [True, False])
def test_margins_outside_the_sample_are_left_alone(path: Path, layout: str, contiguous: bool) -> None:
    x = make(path, layout=layout)
    box = Box((0, -2, 3, 0), (2, 4, 11, 3))
    whole = np.full((2, 6, 10 if not contiguous else 8, 3), -7.0, np.float32)
    out = whole[:, :, :8]
    assert out.flags.c_contiguous == contiguous
    with Hdf5Dataset(path) as data:
        filled = data.read("x", [4, 0], box, out)
    expected = np.full(box.shape, -7.0, np.float32)
    expected[:, 2:6, 0:5] = x[[4, 0], 0:4, 3:8]
    np.testing.assert_array_equal(out, expected)
    assert filled == (slice(0, 2), slice(2, 6), slice(0, 5), slice(0, 3))
    assert np.all(whole[:, :, 8:] == -7)


def test_each_rank_reads_only_its_box(path: Path) -> None:
    """In a 2 x 2 cut with a halo of one, every rank reads only its block and halo."""
    x = make(path)
    for rows, cols in (((0, 4), (0, 5)), ((0, 4), (3, 8)), ((2, 6), (0, 5)), ((2, 6), (3, 8))):
        with Hdf5Dataset(path) as data:
            box = Box((0, rows[0], cols[0], 0), (2, rows[1], cols[1], 3))
            out = np.empty(box.shape, np.float32)
            data.read("x", [1, 3], box, out)
            assert data.bytes_read == 2 * 4 * 5 * 3 * 4
            np.testing.assert_array_equal(out, x[[1, 3], slice(*rows), slice(*cols)])
            data.read("target", [1, 3], box.replace(3, 0, 1), np.empty((2, 4, 5, 1), np.float32))
            assert data.bytes_read == 2 * 4 * 5 * 3 * 4 + 2 * 4 * 5


def test_samples_of_other_ranks_and_empty_boxes_are_not_read(path: Path) -> None:
    x = make(path)
    with Hdf5Dataset(path) as data:
        out = np.empty((1, 6, 8, 3), np.float32)
        data.read("x", [3, 0, 2], Box((2, 0, 0, 0), (3, 6, 8, 3)), out)
        assert data.bytes_read == x[0].nbytes
    np.testing.assert_array_equal(out[0], x[2])
    with Hdf5Dataset(path) as data:
        data.read("x", [0], Box((0, 6, 0, 0), (1, 6, 8, 3)), np.empty((1, 0, 8, 3), np.float32))
        data.read("x", [0], Box((0, 20, 0, 0), (1, 22, 8, 3)), np.empty((1, 2, 8, 3), np.float32))
        assert data.bytes_read == 0


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("channels", [None, 1])
def test_targets_with_and_without_channels(path: Path, layout: str, channels: int | None) -> None:
    make(path, layout=layout, mask_channels=channels)
    with h5py.File(path) as file:
        mask = file["mask"][()].reshape(N, 6, 8, 1)
    with Hdf5Dataset(path) as data:
        assert data.fields["target"].shape == (6, 8, 1)
        out = np.empty((2, 3, 4, 1), np.float32)
        data.read("target", [1, 2], Box((0, 2, 1, 0), (2, 5, 5, 1)), out)
    np.testing.assert_array_equal(out, mask[[1, 2], 2:5, 1:5])


def test_labels_vectors_and_coarse_targets(path: Path) -> None:
    labels, vectors = np.arange(N) * 10, np.arange(N * 4.0).reshape(N, 4)
    make(path, labels=labels, vectors=vectors, coarse=np.arange(N * 12).reshape(N, 3, 4))
    out = np.empty((2, 1))
    with Hdf5Dataset(path, targets="labels") as data:
        data.read("target", [4, 1], Box((0, 0), (2, 1)), out)
    np.testing.assert_array_equal(out[:, 0], [40, 10])
    out = np.empty((2, 2))
    with Hdf5Dataset(path, targets="vectors") as data:
        data.read("target", [4, 1], Box((0, 1), (2, 3)), out)
    np.testing.assert_array_equal(out, vectors[[4, 1], 1:3])
    with Hdf5Dataset(path, targets="coarse") as data:
        assert data.fields["target"].shape == (3, 4, 1)


def test_names_and_groups(path: Path) -> None:
    make(path, simulation=np.array([0, 0, 1, 1, 2]))
    with Hdf5Dataset(path) as data:
        assert data.fields["x"].channel_names == ["channel 0", "channel 1", "channel 2"]
        assert list(data.groups) == [0, 0, 1, 1, 2]
    with h5py.File(path, "a") as file:
        file["inputs"].attrs["channel_names"] = ["Density", "Pressure", "oddy"]
    with Hdf5Dataset(path) as data:
        assert data.fields["x"].channel_names == ["Density", "Pressure", "oddy"]


@pytest.mark.parametrize("name", ["channel_names", "layout"])
@pytest.mark.parametrize("value", ["x" * 10_000, ["y" * 10_000] * 4, list(range(5000))], ids=["text", "list", "long"])
def test_a_long_attribute_is_not_printed_whole(path: Path, name: str, value: object) -> None:
    make(path)
    with h5py.File(path, "a") as file:
        file["inputs"].attrs[name] = value
    with pytest.raises(DataError) as caught:
        Hdf5Dataset(path)
    assert name in str(caught.value) and len(str(caught.value)) < 400 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"data\.h5: no such file; correct the path"),
        (b"", "expected an HDF5 file, got something else"),
        (b"a text file, not HDF5", "expected an HDF5 file, got something else"),
        ("truncated", "truncated or damaged: write it again"),
    ],
)
def test_no_file_of_hdf5(path: Path, content: bytes | str | None, message: str) -> None:
    if content == "truncated":
        make(path)
        content = path.read_bytes()[:-1500]
    if isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        Hdf5Dataset(path)
    assert "\n" not in str(caught.value)


def test_a_damaged_chunk_is_named_when_it_is_read(path: Path) -> None:
    with h5py.File(path, "w") as file:
        inputs = file.create_dataset(
            "inputs", (2, 4, 4, 1), np.float32, chunks=(1, 4, 4, 1), fletcher32=True, data=np.ones((2, 4, 4, 1))
        )
        inputs.attrs["layout"] = "NHWC"
        offset = inputs.id.get_chunk_info(1).byte_offset
    raw = bytearray(path.read_bytes())
    raw[offset + 5] ^= 255
    path.write_bytes(raw)
    box, out = Box((0, 0, 0, 0), (1, 4, 4, 1)), np.empty((1, 4, 4, 1), np.float32)
    with Hdf5Dataset(path, targets=None) as data:
        data.read("x", [0], box, out)
        with pytest.raises(DataError, match=r"cannot read sample 1 of '/inputs' .*the file is damaged") as caught:
            data.read("x", [1], box, out)
    assert "\n" not in str(caught.value)


def test_a_missing_dataset_lists_what_is_there(path: Path) -> None:
    make(path)
    with pytest.raises(DataError, match=r"expected a dataset 'x', got inputs \(5, 6, 8, 3\), mask \(5, 6, 8\)"):
        Hdf5Dataset(path, inputs="x")


def test_layout_must_be_known(path: Path) -> None:
    make(path)
    with h5py.File(path, "a") as file:
        del file["inputs"].attrs["layout"]
    with pytest.raises(DataError, match=r"has no attribute 'layout'; set data.layout .* to 'NHWC' or 'NCHW'"):
        Hdf5Dataset(path)
    assert Hdf5Dataset(path, targets=None, layout="NCHW").fields["x"].shape == (8, 3, 6)
    with pytest.raises(DataError, match=r"expected layout 'NHWC' or 'NCHW' .*, got 'HWCN'"):
        Hdf5Dataset(path, layout="HWCN")


def test_wrong_ranks_shapes_and_types(path: Path) -> None:
    make(path, flat=np.zeros((5, 6)), text=np.array([b"a"] * 5), empty=np.zeros((0, 6, 8, 3)),
         few=np.zeros((4, 6, 8)), off=np.zeros((5, 6, 7)), scalar=np.float32(1))  # fmt: skip
    cases = [
        ({"inputs": "flat", "layout": "NHWC"}, r"expected \(N, \*spatial, C\) .* got shape \(5, 6\)"),
        ({"inputs": "text", "layout": "NHWC"}, "'/text': expected numbers, got .*; write numbers, or name others"),
        ({"inputs": "empty", "layout": "NHWC"}, r"is empty: expected samples, got shape \(0, 6, 8, 3\)"),
        ({"targets": "few"}, r"'/inputs' has 5 samples, '/few' the shape \(4, 6, 8\)"),
        ({"targets": "scalar"}, r"'/inputs' has 5 samples, '/scalar' the shape \(\)"),
        ({"targets": "off"}, r"'/inputs' has the grid \(6, 8\), '/off' the shape \(5, 6, 7\)"),
    ]
    for arguments, message in cases:
        with pytest.raises(DataError, match=message):
            Hdf5Dataset(path, **arguments)


def test_wrong_requests(path: Path) -> None:
    make(path)
    with Hdf5Dataset(path) as data:
        box = Box((0, 0, 0, 0), (1, 6, 8, 3))
        with pytest.raises(DataError, match=r"expected a box of 4 axes within \(1, 6, 8, 3\)"):
            data.read("x", [0], box, np.empty((1, 6, 8), np.float32))
        with pytest.raises(DataError, match=r"expected a sample of 0 \.\. 4, got 5"):
            data.read("x", [5], box, np.empty(box.shape, np.float32))
    with (
        Hdf5Dataset(path, targets=None) as data,
        pytest.raises(DataError, match="expected one of x, got 'target'; name it when you open the file"),
    ):
        data.read("target", [0], box, np.empty(box.shape, np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nan_names_sample_and_channel(path: Path, bad: float) -> None:
    make(path)
    with h5py.File(path, "a") as file:
        file["inputs"][3, 4, 5, 1] = bad
    out = np.zeros((2, 4, 8, 3), np.float32)
    with Hdf5Dataset(path) as data:
        data.read("x", [1, 3], Box((0, 0, 0, 0), (2, 4, 8, 3)), out)
        with pytest.raises(DataError, match=rf"{bad} in sample 3, channel 1 at \(4, 5\)"):
            data.read("x", [1, 3], Box((0, 2, 0, 0), (2, 6, 8, 3)), out)


@pytest.mark.parametrize(("value", "whole"), [(9, ""), (0.5, "a whole number of ")])
def test_targets_out_of_range_or_between_classes(path: Path, value: float, whole: str) -> None:
    """Targets outside of the classes, or fractions such as 2.7, are an error; they are not truncated."""
    make(path)
    with h5py.File(path, "a") as file:
        values = file["mask"][:].astype(np.float32 if whole else file["mask"].dtype)
        values[2, 1, 1] = value
        del file["mask"]
        file["mask"] = values
    out, box = np.zeros((1, 6, 8, 1), np.float32), Box((0, 0, 0, 0), (1, 6, 8, 1))
    with Hdf5Dataset(path, ranges={"target": TargetRange(0, 1, whole=bool(whole))}) as data:
        data.read("target", [0], box, out)
        expected = rf"target {value} in sample 2 of '\w+' at \(1, 1, 0\); expected {whole}0 \.\. 1"
        with pytest.raises(DataError, match=expected):
            data.read("target", [2], box, out)
    with Hdf5Dataset(path) as data:
        data.read("target", [2], box, out)


def test_reading_again_allocates_no_arrays(path: Path) -> None:
    make(path, layout="NCHW")
    box = Box((0, 0, 0, 0), (2, 6, 8, 3))
    out = np.empty(box.shape, np.float32)
    with Hdf5Dataset(path) as data:
        data.read("x", [0, 1], box, out)
        scratch = data._scratch
        data.read("x", [2, 3], box, out)
        assert data._scratch is scratch


def test_attributes_as_plain_data(tmp_path):
    """Attributes that are texts, scalars or lists are returned; others are left out without an error."""
    given = {
        "units": "m",
        "bytes": np.bytes_(b"abc"),
        "whole": np.int16(3),
        "yes": np.bool_(True),
        "number": 0.5,
        "list": np.array([1, 2], np.uint8),
        "names": ["a", "b"],
    }
    left_out = {
        "nan": np.nan,
        "none": h5py.Empty("f"),
        "table": np.zeros((2, 2)),
        "long": "x" * 9000,
        "many": np.zeros(300),
        "complex": 1j,
        "_NCProperties": "version=2",
    }
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.attrs.update({**given, **left_out})
        file.attrs["reference"] = file.ref
        found = plain_attributes(file.attrs)
        assert found == {**given, "bytes": "abc", "whole": 3, "yes": 1, "list": [1, 2]}
        assert all(type(value) in (str, int, float, list) for value in found.values())
        assert plain_attributes(file.attrs, OF_NUMBERS) == {"units": "m"}


@pytest.mark.parametrize(("dtype", "checked"), [(np.uint8, False), (np.int16, False), (np.float32, True)])
def test_integers_of_inputs_are_finite_without_a_check(path, monkeypatch, dtype, checked):
    """Integers cannot be NaN, so only floats, targets and packed numbers cost a pass over what was read."""
    x = make(path, dtype=dtype)
    names = []
    monkeypatch.setattr("halograd.data.dataset.check_read", lambda dataset, name, *rest: names.append(name))
    with Hdf5Dataset(path) as dataset:
        out, mask = np.empty(x.shape, np.float32), np.empty((*x.shape[:-1], 1), np.float32)
        dataset.read("x", range(N), Box.of_shape(out.shape), out)
        dataset.read("target", range(N), Box.of_shape(mask.shape), mask)
        np.testing.assert_array_equal(out, x.astype(np.float32))
    assert names == ["x"] * checked + ["target"]


SHAPE = (4, 6, 5, 3)


@given(st.data())
def test_boxes(data):
    """Boxes of maps, vectors and scalars are read; elements outside of the arrays are not changed."""
    rng = np.random.default_rng(1)
    arrays = {"x": rng.random(SHAPE), "v": rng.random((4, 3)), "k": rng.integers(0, 3, 4)}
    dataset = ArrayDataset(arrays, ["k"])
    indices = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    for name, array in arrays.items():
        whole = array[indices].reshape(len(indices), *dataset.fields[name].shape)
        ranges = [sorted(data.draw(st.tuples(st.integers(-1, n + 1), st.integers(-1, n + 1)))) for n in whole.shape]
        box = Box.of_ranges(ranges)
        out, want = np.full(box.shape, 9.0), np.full(box.shape, 9.0)
        inside = box & Box.of_shape(whole.shape)
        if inside.size:
            want[inside.slices(origin=box.start)] = whole[inside.slices()]
        filled = dataset.read(name, indices, box, out)
        np.testing.assert_array_equal(out, want)
        assert out[filled].size == inside.size


@pytest.mark.parametrize("dtype", ["complex64", "datetime64[s]", "U4"])
def test_arrays_of_other_types_are_refused(dtype):
    with pytest.raises(DataError, match=r"arrays: 'x': expected an array of real numbers, got one of "):
        ArrayDataset({"x": np.zeros(SHAPE, dtype)}, ())


class Tensor:
    """A tensor of a library whose types NumPy does not have."""

    shape, dtype = (3, 4, 1), "library.float32"


@pytest.mark.parametrize("data", [[[1.0]], Tensor(), np.array(2.0), 3])
def test_what_is_no_array_is_refused(data):
    with pytest.raises(DataError, match=rf"'x': expected an array of .*, got {type(data).__name__}; numpy\.asarray"):
        ArrayDataset({"x": data}, ())


def test_of_a_file_and_of_its_arrays(tmp_path):
    """A data set of a memory map is read like the HDF5 file with the same data, including names and order."""
    import h5py

    rng = np.random.default_rng(1)
    x, t = rng.random(SHAPE).astype(np.float32), rng.integers(0, 2, (*SHAPE[:-1], 1)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("inputs", data=x).attrs.update(layout="NHWC", channel_names=["a", "b", "c"])
        file["mask"] = t[..., 0]
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    mine = ArrayDataset({"target": t, "x": mapped}, channel_names={"x": ["a", "b", "c"]})
    theirs = Hdf5Dataset(tmp_path / "a.h5")
    assert list(mine.fields) == list(theirs.fields) == ["x", "target"] and len(mine) == len(theirs)
    for name, field in theirs.fields.items():
        assert (mine.fields[name].shape, mine.fields[name].is_target) == (field.shape, field.is_target)
        box = Box.of_shape((2, *field.shape))
        found, want = np.empty(box.shape), np.empty(box.shape)
        mine.read(name, [3, 1], box, found)
        theirs.read(name, [3, 1], box, want)
        np.testing.assert_array_equal(found, want)
    assert mine.fields["x"].channel_names == theirs.fields["x"].channel_names
    assert mine.bytes_read == 2 * (x[0].nbytes + t[0].nbytes)


def test_numbers_that_are_no_numbers():
    x, t = np.zeros(SHAPE), np.zeros((*SHAPE[:-1], 1))
    x[2, 5, 4, 1], t[1, 0, 3] = np.nan, 3
    dataset = ArrayDataset({"x": x, "target": t}, path="mine")
    dataset.ranges = {"target": TargetRange(0, 1, True)}
    assert find_invalid(dataset, dataset.ranges, range(4)) == {1: "3 in target 'target'", 2: "nan in channel 1"}
    box = Box((0, 4, 0, 0), (3, 6, 5, 3))
    with pytest.raises(DataError, match=r"mine: nan in sample 2, channel 1 at \(5, 4\); expected finite numbers"):
        dataset.read("x", [0, 1, 2], box, np.empty(box.shape))
    with pytest.raises(
        DataError, match=r"mine: target 3 in sample 1 of 'target' at \(0, 3, 0\); expected a whole number of 0 .. 1"
    ):
        dataset.read("target", [1], Box.of_shape((1, 6, 5, 1)), np.empty((1, 6, 5, 1)))
    dataset.labels = {"target": LabelMap({3: -1, 2: 1})}
    with pytest.raises(DataError, match=r"target -1 \(3 in the file, replaced by data.labels\) in .*\(ignore_index of"):
        dataset.read("target", [1], Box.of_shape((1, 6, 5, 1)), np.empty((1, 6, 5, 1)))


def test_refusals():
    x = np.zeros(SHAPE)
    for arguments, options, message in (
        (({},), {}, "expected arrays of as many samples each"),
        (({"x": x, "target": x[:3]},), {}, "expected arrays of as many samples each"),
        (({"x": x},), {}, r"targets out of x, got 'target'; name them: ArrayDataset\(arrays, \['x'\]\)"),
        (({"x": x}, []), {"channel_names": {"x": ["a"]}}, "expected 3 names of channels of 'x', got 1"),
        (({"x": x}, []), {"groups": [1, 2]}, r"expected a group per sample, \(4,\), got \(2,\)"),
    ):
        with pytest.raises(DataError, match=message):
            ArrayDataset(*arguments, **options)
    for index in (-1, len(x)):
        with pytest.raises(DataError, match=f"expected a sample of 0 .. 3, got {index}"):
            ArrayDataset({"x": x}, []).read("x", [index], Box.of_shape(x[:1].shape), np.empty(x[:1].shape))


STATIC_N, STATIC_GRID, STATIC_C = 5, (4, 6), 3


def write_static(path, field, order="NHWC", scales=(), grid=STATIC_GRID, **attributes):
    """Write inputs and a dataset `field`; `scales` are the names of the scales of its axes."""
    names = {"NHWC": ("time", "lat", "lon", "level"), "NCHW": ("time", "level", "lat", "lon")}[order]
    sizes = dict(zip(("time", "lat", "lon", "level"), (STATIC_N, *grid, STATIC_C)))
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
    with Hdf5Dataset(
        write_static(tmp_path / "a.h5", stored, layout, scales, **attributes), "x", {"w": "field"}
    ) as dataset:
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


@pytest.mark.parametrize(("shape", "axes"), [((1, 4, 8), "NHW"), ((1, 4, 3), "HWC"), ((1, 4, 8, 2), "NHWC")])
def test_a_grid_after_an_extent_of_1_is_a_sample(tmp_path, shape, axes):
    """Also if 4 rows could be the columns of a coarser grid of one row; what is not the whole grid has channels."""
    path = write_static(tmp_path / "a.h5", np.ones(shape), grid=(4, 8))
    assert Hdf5Dataset(path, "x", {"w": "field"}).fields["w"].static == axes


@pytest.mark.parametrize(
    ("shape", "scales", "static"),
    [((5, 6), (), ""), ((5, 6), ("time", "lon"), ""), ((5, 4, 6), (), ""), ((5,), (), "")],
)
def test_what_has_samples_is_not_shared(tmp_path, shape, scales, static):
    path = write_static(tmp_path / "a.h5", np.ones(shape), scales=scales)
    assert Hdf5Dataset(path, "x", {"w": "field"}).fields["w"].static == static


@pytest.mark.parametrize(
    ("shape", "attributes"), [((4,), {}), ((3, 6), {}), ((), {}), ((4, 6, 2, 2), {}), ((6, 4), {"layout": "WW"})]
)
def test_others_are_refused(tmp_path, shape, attributes):
    with pytest.raises(DataError, match=r"or a field that all samples share: on the same grid, or with an attribute"):
        Hdf5Dataset(write_static(tmp_path / "a.h5", np.ones(shape), **attributes), "x", {"w": "field"})


def test_it_is_read_once_and_of_its_own_file(tmp_path):
    box = Box.of_ranges([(0, 2), (1, 3), (0, 6), (0, 1)])
    for number, name in enumerate(("a.nc", "b.nc")):
        write_static(tmp_path / name, np.full(STATIC_GRID, number))
    dataset = open_dataset(tmp_path, "x", {"w": "field"})
    out = np.empty(box.shape)
    for _ in range(3):
        dataset.read("w", [1, STATIC_N + 1], box, out)
        assert (out[0] == 0).all() and (out[1] == 1).all()
    assert dataset.bytes_read == 2 * 12 * 8
    dataset.close()
    write_static(tmp_path / "b.nc", np.full((2, 6), 1))
    with pytest.raises(DataError, match=r"b.nc: expected 'field' to be \(4, 6, 1\), .* got \(2, 6, 1\)"):
        dataset.read("w", [STATIC_N], box.replace(0, 0, 1), np.empty((1, 2, 6, 1)))


STEPS_GRID, STEPS_C = (3, 4), 2


def arrays_of(rows):
    rng = np.random.default_rng(rows)
    return {
        "x": rng.standard_normal((rows, *STEPS_GRID, STEPS_C)),
        "t": rng.standard_normal((rows, *STEPS_GRID, 1)),
        "n": rng.random(rows),
    }


def samples_of(numbers, lag, history, rollout):
    """Return, by a loop, the rows of inputs and of targets of every sample."""
    found = []
    for row, number in enumerate(numbers):
        chain = [k for k, other in enumerate(numbers) if other == number]
        at = chain.index(row)
        steps = [at + lag * k for k in range(1 - history, rollout + 1)]
        if steps[0] >= 0 and steps[-1] < len(chain):
            rows = [chain[k] for k in steps]
            found.append((rows[:history], rows[history:]))
    return found


@given(st.data())
def test_every_box_is_that_of_a_loop(data):
    numbers = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=14))
    lag, history, rollout = (data.draw(st.integers(1, 3)) for _ in range(3))
    arrays = arrays_of(len(numbers))
    dataset = ArrayDataset(arrays, ["t", "n"], groups=numbers)
    want = samples_of(numbers, lag, history, rollout)
    if not want:
        with pytest.raises(
            DataError, match=rf"data.lag: expected {1 + lag * (history + rollout - 1)} successive times"
        ):
            TimeSteps(dataset, lag, history, rollout)
        return
    steps = TimeSteps(dataset, lag, history, rollout)
    assert len(steps) == len(want) and steps.rows.tolist() == [rows[-1] for rows, _ in want]
    assert steps.groups.tolist() == [numbers[rows[-1]] for rows, _ in want]
    indices = data.draw(st.lists(st.integers(0, len(want) - 1), min_size=1, max_size=3))
    for name, which in (("x", 0), ("t", 1), ("n", 1)):
        whole = np.stack(
            [np.concatenate([arrays[name][row].reshape(*STEPS_GRID, -1) if name != "n" else arrays[name][[row]]
                             for row in want[k][which]], -1) for k in indices]
        )  # fmt: skip
        assert steps.fields[name].shape == whole.shape[1:]
        ranges = []
        for n in whole.shape:
            low = data.draw(st.integers(-1, n - 1))
            ranges.append((low, data.draw(st.integers(max(low, 0) + 1, n + 1))))
        box = Box.of_ranges(ranges)
        out = np.full(box.shape, 9.0)
        filled = steps.read(name, indices, box, out)
        np.testing.assert_array_equal(out[filled], whole[(box & Box.of_shape(whole.shape)).slices()])
        out[filled] = 9
        assert (out == 9).all()


def test_without_labels_the_steps_of_inputs_suffice():
    dataset = ArrayDataset(arrays_of(6), ["t", "n"])
    assert TimeSteps(dataset, 2, 2, 1, labelled=False).rows.tolist() == [2, 3, 4, 5]
    steps = TimeSteps(dataset, 2, 2, 1)
    assert steps.rows.tolist() == [2, 3] and steps.groups is None
    assert steps.source(1) == ("arrays", 3) and steps.place(1) == "arrays, sample 3"
    with pytest.raises(DataError, match=r"expected a sample of 0 \.\. 1, got 2"):
        steps.source(2)


def write_steps(path, times, units="days since 2000-01-01", first=0):
    with h5py.File(path, "w") as file:
        file["x"] = np.arange(first, first + len(times), dtype=float)[:, None, None, None] * np.ones(
            (*STEPS_GRID, STEPS_C)
        )
        file["x"].attrs["layout"] = "NHWC"
        file["time"] = np.asarray(times)
        file["time"].make_scale("time")
        file["time"].attrs["units"] = units
        file["x"].dims[0].attach_scale(file["time"])


def test_no_pair_across_files_or_gaps(tmp_path, caplog):
    write_steps(tmp_path / "a.nc", [0, 31, 59, 90])  # months
    write_steps(tmp_path / "b.nc", [0.0, 6.0, 12.0, 24.0, 30.0, 24.0], "hours since 1990-01-01", first=4)
    dataset = open_dataset(tmp_path, "x", {"t": "x"})
    with caplog.at_level(logging.WARNING):
        assert simulations(dataset).tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 3]
    assert "gaps or steps backwards of time: 2" in caplog.text
    steps = TimeSteps(dataset, 1)
    assert steps.rows.tolist() == [0, 1, 2, 4, 5, 7] and steps.file_of.tolist() == [0, 0, 0, 1, 1, 1]
    assert steps.groups.tolist() == [0, 0, 0, 1, 1, 2]  # held out together
    out = np.empty((6, *STEPS_GRID, STEPS_C))
    steps.read("t", range(6), Box.of_shape(out.shape), out)
    assert out[:, 0, 0, 0].tolist() == [1, 2, 3, 5, 6, 8]
    assert steps.source(3) == (str(tmp_path / "b.nc"), 0)


def test_other_coordinates_are_no_times(tmp_path):
    write_steps(tmp_path / "a.nc", [5, 1, 3], "km")
    assert simulations(open_dataset(tmp_path, "x", {"t": "x"})).tolist() == [0, 0, 0]


def test_vectors_of_all_steps_are_mirrored():
    dataset = ArrayDataset(arrays_of(6), ["t", "n"], channel_names={"x": ["v", "u"]})
    steps = TimeSteps(dataset, 1, history=2)
    augmentation = StandardAugmentation(Rules(vectors=[["v", "u"]]), SampleWindows(steps), 0)
    assert augmentation._vectors["x"] == {0: (0, (0, 1)), 1: (1, (0, 1)), 2: (0, (2, 3)), 3: (1, (2, 3))}
