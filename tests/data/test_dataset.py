"""Reading by boxes: correct values, only the rank's own box, and one-line errors."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from halograd.data.dataset import Hdf5Dataset
from halograd.data.disk import DataError
from halograd.data.structure import OF_NUMBERS, plain_attributes
from halograd.data.targets import TargetRange
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
