"""Samples in arrays: read by boxes as from a file, and checked."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.data import ArrayDataset, DataError, Hdf5Dataset
from halograd.data.survey import find_invalid
from halograd.data.targets import TargetRange
from halograd.dtensor import Box

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


def test_refusals():
    x = np.zeros(SHAPE)
    for arguments, options, message in (
        (({},), {}, "expected arrays of as many samples each"),
        (({"x": x, "target": x[:3]},), {}, "expected arrays of as many samples each"),
        (({"x": x},), {}, "expected targets out of x, got 'target'"),
        (({"x": x}, []), {"channel_names": {"x": ["a"]}}, "expected 3 names of channels of 'x', got 1"),
        (({"x": x}, []), {"groups": [1, 2]}, r"expected a group per sample, \(4,\), got \(2,\)"),
    ):
        with pytest.raises(DataError, match=message):
            ArrayDataset(*arguments, **options)
    for index in (-1, len(x)):
        with pytest.raises(DataError, match=f"expected a sample of 0 .. 3, got {index}"):
            ArrayDataset({"x": x}, []).read("x", [index], Box.of_shape(x[:1].shape), np.empty(x[:1].shape))
