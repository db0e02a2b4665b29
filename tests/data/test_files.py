"""Samples in several files are read as from one file, in any order; errors name files that differ."""

import re

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halograd.data import DataError, FileSet, Hdf5Dataset, find_files, open_dataset
from halograd.data.files import natural
from halograd.dtensor import Box

LENGTHS = (3, 1, 4, 2)
SHAPE, CHANNELS = (5, 6), 3


def write(folder, lengths=LENGTHS, groups=False):
    """Write files of these lengths; return all inputs and masks."""
    rng = np.random.default_rng(7)
    xs, ys = [], []
    for i, n in enumerate(lengths):
        x = rng.standard_normal((n, *SHAPE, CHANNELS)).astype(np.float32)
        y = rng.integers(0, 2, (n, *SHAPE)).astype(np.uint8)
        with h5py.File(folder / f"run{i}.h5", "w") as file:
            # Every second file has channels first: the storage order may differ between files.
            first = bool(i % 2)
            file["inputs"] = np.moveaxis(x, -1, 1) if first else x
            file["inputs"].attrs["layout"] = "NCHW" if first else "NHWC"
            file["mask"] = y
            if groups and i != 1:
                file["simulation"] = np.arange(n) // 2
        xs.append(x)
        ys.append(y[..., None])
    return np.concatenate(xs), np.concatenate(ys)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return folder, *write(folder)


@given(st.lists(st.integers(0, sum(LENGTHS) - 1), min_size=1, max_size=6), st.data(), st.integers(1, 3))
@settings(max_examples=60)
def test_any_box_of_any_batch_is_that_of_one_array(written, indices, data, most):
    folder, x, y = written
    with open_dataset(folder) as found:
        found._most_open = most
        shapes = {name: field.shape for name, field in found.fields.items()}
        assert len(found) == len(x) and shapes == {"x": x.shape[1:], "target": y.shape[1:]}
        for array, name in ((x, "x"), (y, "target")):
            batch = array[indices].astype(np.float32)
            low = [data.draw(st.integers(-1, n - 1)) for n in batch.shape]
            high = [data.draw(st.integers(a + 1, n + 1)) for a, n in zip(low, batch.shape)]
            low[0], high[0] = max(low[0], 0), min(high[0], len(batch))
            if low[-1] < 0 or high[-1] > batch.shape[-1] or low[0] >= high[0]:
                continue
            box = Box(tuple(low), tuple(high))
            out = np.full(box.shape, 9.0, np.float32)
            filled = found.read(name, indices, box, out)
            inside = box & Box.of_shape(batch.shape)
            np.testing.assert_array_equal(out[filled].ravel(), batch[inside.slices()].ravel())
            outside = np.ones(box.shape, bool)
            outside[filled] = False
            assert (out[outside] == 9).all()
        assert sum(part._file is not None for part in found.parts) <= most


def test_what_a_path_stands_for(tmp_path):
    write(tmp_path)
    (tmp_path / "notes.txt").write_text("no data")
    (tmp_path / "._run0.h5").write_text("hidden, by macOS")
    names = [tmp_path / f"run{i}.h5" for i in range(4)]
    assert find_files(tmp_path) == names == find_files(str(tmp_path / "run*.h5")) == find_files([tmp_path])
    assert find_files([names[2], names[0]]) == [names[2], names[0]]
    assert find_files(tmp_path / "missing.h5") == [tmp_path / "missing.h5"]
    odd = tmp_path / "a[1].h5"
    odd.write_bytes(names[0].read_bytes())
    assert find_files(odd) == [odd]
    (tmp_path / "empty").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "latest.h5").symlink_to(names[3])
    for given_, message in (
        (tmp_path / "empty", "expected files, got none by .*empty .a folder with files of hdf5: .h5, .hdf5"),
        (tmp_path / "*.nc", "expected files, got none by .*nc .a pattern"),
        ([names[0], tmp_path], "expected every file once, got .*run0.h5 twice"),
        ([tmp_path, tmp_path / "linked"], "expected every file once, got .*latest.h5 and .*run3.h5, which are one"),
        ([names[0], tmp_path / "linked" / ".." / "run0.h5"], "run0.h5 and .*run0.h5, which are one; name it once"),
        ([], "got an empty list"),
    ):
        with pytest.raises(DataError, match=message):
            find_files(given_)
    assert isinstance(open_dataset(names[0]), Hdf5Dataset)


def test_numbers_in_names_are_sorted_by_value(tmp_path):
    """Numbers anywhere in names are compared by value; other names are sorted as text; a list keeps its order."""
    want = ["a.h5", "a1.h5", "a01.h5", "a2b3.h5", "a2b20.h5", "a10.h5", "a10b.h5", "b-2.h5", "b.h5", "b0.h5", "b7.h5"]
    for name in reversed(want):
        (tmp_path / name).touch()
    want[1:3] = ["a01.h5", "a1.h5"]  # equal values are sorted as text
    assert [path.name for path in find_files(tmp_path)] == want
    assert [path.name for path in find_files(tmp_path / "*.h5")] == want
    for run in ("run9", "run10", "run100"):
        (tmp_path / run).mkdir()
        (tmp_path / run / "fields.h5").touch()
    assert [path.parent.name for path in find_files(tmp_path / "run*" / "*")] == ["run9", "run10", "run100"]
    given_ = [tmp_path / "a10.h5", tmp_path / "a2b3.h5"]
    assert find_files(given_) == given_


@given(st.lists(st.text("ab-._5", max_size=6), max_size=8), st.lists(st.integers(0, 10**30), max_size=8))
def test_the_order_of_names_is_that_of_text_and_of_numbers(texts, numbers):
    texts = [re.sub("5+", "5", text) for text in texts]  # numbers of equal width
    assert sorted(texts, key=natural) == sorted(texts)
    assert sorted([f"a{n}" for n in numbers], key=natural) == [f"a{n}" for n in sorted(numbers)]
    padded = [f"a{n:040}.h5" for n in numbers]
    assert sorted(padded, key=natural) == sorted(padded)


def test_files_that_differ_are_named(tmp_path):
    write(tmp_path)
    with h5py.File(tmp_path / "run2.h5", "r+") as file:
        x = file["inputs"][:, :-1]
        del file["inputs"], file["mask"]
        file["inputs"], file["mask"] = x, np.zeros(x.shape[:-1], np.uint8)
        file["inputs"].attrs["layout"] = "NHWC"
    message = r"run2.h5: 'inputs': expected samples of shape \(5, 6, 3\) as in .*run0.h5, got \(4, 6, 3\); set "
    with pytest.raises(
        DataError,
        match=message + r"data.patches, .* samples of any size \(docs/data.md, Samples of different size",
    ):
        open_dataset(tmp_path)
    write(tmp_path)
    with h5py.File(tmp_path / "run3.h5", "r+") as file:
        file["inputs"].attrs["channel_names"] = ["a", "b", "c"]
    message = (
        r"run3.h5: 'inputs': expected the channels .* got \['a', 'b', 'c'\]; correct its attribute 'channel_names', or "
    )
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path)


def test_messages_name_the_file_and_the_sample_in_it(tmp_path):
    write(tmp_path)
    with h5py.File(tmp_path / "run2.h5", "r+") as file:
        file["inputs"][1, 2, 3, 0] = np.nan
    with open_dataset(tmp_path) as found, pytest.raises(DataError, match=r"run2.h5: nan in sample 1, channel 0"):
        out = np.zeros((2, *found.fields["x"].shape), np.float32)
        found.read("x", [0, 5], Box.of_shape(out.shape), out)
    with pytest.raises(DataError, match=r"and 3 more files.*: expected a sample of 0 .. 9, got 10"):
        found.read("x", [10], Box.of_shape(out[:1].shape), out[:1])


def test_groups_are_those_of_the_files_and_shared_by_none(tmp_path):
    write(tmp_path, groups=True)
    with open_dataset(tmp_path) as found:
        assert isinstance(found, FileSet)
        assert found.groups.tolist() == [0, 0, 1, 2, 3, 3, 4, 4, 5, 5]
        assert found.file_of.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3]
        assert found.names == ["run0.h5 3", "run1.h5 1", "run2.h5 4", "run3.h5 2"]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, lengths=(2,))
    with open_dataset(tmp_path / "?" / "*.h5") as found:
        assert isinstance(found, FileSet) and found.names == ["a/run0.h5 2", "b/run0.h5 2"]
