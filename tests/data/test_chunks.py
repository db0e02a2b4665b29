"""Tests of compressed chunks: the size of the cache against brute force, and the warning about slow reading."""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.data import FileSet, Hdf5Dataset
from halograd.data.chunks import CACHE, SLOW, Chunks
from halograd.data.hdf5 import Hdf5Array
from halograd.dtensor import Box


def write(
    path: Path, x: np.ndarray, chunks: tuple[int, ...], filter_: int | str | None = 1, layout: str = "NHWC"
) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=x, chunks=chunks, compression=filter_).attrs["layout"] = layout
        file["mask"] = np.zeros(len(x), np.uint8)
    return path


def memory(dataset: Hdf5Dataset) -> int:
    """Return the size [B] of the chunk cache that HDF5 uses for the inputs."""
    return dataset._dataset("x").stored.id.get_access_plist().get_chunk_cache()[1]


def loads(chunks: Chunks, ranges: list, order: list[int], cache: int) -> int:
    """Return how many elements are decompressed if samples are read in this order with a cache of the last chunks."""
    kept: OrderedDict[tuple[int, ...], None] = OrderedDict()
    size, count = int(np.prod(chunks.shape)), 0
    columns = [range(low // c, -(-high // c)) for (low, high), c in zip(ranges, chunks.shape[1:])]
    for sample in order:
        for rest in itertools.product(*columns):
            at = (sample // chunks.shape[0], *rest)
            count += 0 if at in kept else size
            kept[at] = None
            kept.move_to_end(at)
            while len(kept) > max(1, cache // (size * chunks.itemsize)):
                kept.popitem(last=False)
    return count


@given(st.data())
def test_the_factor_is_that_of_a_cache_of_the_last_chunks(data):
    whole = tuple(data.draw(st.integers(2, 12)) for _ in range(3))
    shape = tuple(data.draw(st.integers(1, n)) for n in whole)
    chunks = Chunks(shape, whole, 1, 4)
    ranges = []
    for n in whole[1:]:
        low = data.draw(st.integers(0, n - 1))
        ranges.append((low, data.draw(st.integers(low + 1, n))))
    used = int(np.prod([high - low for low, high in ranges]))
    least, everything = chunks.cache(0), chunks.cache(1 << 40)
    in_order = loads(chunks, ranges, list(range(whole[0])), least)
    # The last chunk may be incomplete.
    samples = -(-whole[0] // shape[0]) * shape[0]
    assert chunks.factor(ranges, least, False) == pytest.approx(in_order / used / samples)
    order = [int(k) for k in np.random.default_rng(0).permutation(whole[0])]
    assert chunks.factor(ranges, everything, True) == pytest.approx(
        loads(chunks, ranges, order, everything) / used / samples
    )
    assert chunks.factor(ranges, 0, True) >= loads(chunks, ranges, order, 0) / used / whole[0] - 1e-9


def test_rows_of_a_sample_need_one_row_of_chunks():
    """The cache holds one row of chunks, as statistics read 64 rows at a time, and also chunks of several samples."""
    assert Chunks((1, 512, 900, 2), (9, 5000, 2000, 4), 1, 4).cache(0) == 512 * 2700 * 4 * 4
    assert Chunks((1, 2, 512, 900), (9, 4, 5000, 2000), 2, 4).cache(0) == 512 * 2700 * 4 * 4
    assert Chunks((1, 32, 50, 2), (9, 5000, 2000, 4), 1, 4).cache(0) == 8 << 20
    assert Chunks((1, 32, 50, 2), (9, 100, 120, 4), 1, 4).cache(0) == 128 * 150 * 4 * 4
    assert Chunks((3, 32, 50, 2), (9, 100, 120, 4), 1, 4).cache(0) == 3 * 128 * 150 * 4 * 4
    assert Chunks((3, 32), (9, 100), 1, 4).cache(2000) == 2000
    assert Chunks((1, 32), (9, 100), 1, 4).cache(2000) == 512
    assert Chunks((4,), (9,), 0, 1).cache(1000) == 12


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize("link", ["", "soft", "external"])
def test_memory_for_chunks(tmp_path, layout, link):
    """HDF5 caches chunks of plain and linked datasets; values are correct, and large plain chunks are read in part."""
    x = np.random.default_rng(0).integers(0, 9, (6, 64, 64, 8)).astype(np.float32)
    stored = x if layout == "NHWC" else np.moveaxis(x, -1, 1)
    name = "inputs"
    write(tmp_path / "a.h5", stored, (6, *stored.shape[1:]), layout=layout)
    if link:
        with h5py.File(tmp_path / "b.h5", "w") as file:
            file["x"] = h5py.ExternalLink("a.h5", "inputs")
            file["y"] = h5py.SoftLink("/x")
        name = "x" if link == "external" else "y"
    path = tmp_path / ("b.h5" if link else "a.h5")
    with Hdf5Dataset(path, name, None) as dataset:
        assert memory(dataset) == dataset.cached == x.nbytes
        out = np.empty((3, *x.shape[1:]), np.float32)
        dataset.read("x", [5, 0, 3], Box.of_shape(out.shape), out)
        np.testing.assert_array_equal(out, x[[5, 0, 3]])
        again = Hdf5Dataset(path, structure=dataset.structure)
        assert memory(again) == x.nbytes  # on a rank that has not examined the file
    with Hdf5Dataset(write(tmp_path / "c.h5", x, (6, 64, 64, 8), None)) as dataset:
        assert memory(dataset) == dataset.cached == x.nbytes  # HDF5 keeps chunks up to 8 MiB, and reads them whole
    large = np.zeros((40, 64, 64, 16), np.float32)
    with Hdf5Dataset(write(tmp_path / "d.h5", large, large.shape, None)) as dataset:
        assert dataset.cached == 0 and memory(dataset) == h5py.File(path).id.get_access_plist().get_cache()[2]


def test_many_files_share_the_memory(tmp_path, monkeypatch):
    x = np.ones((8, 32, 32, 1), np.float32)
    sample = x[0].nbytes
    files = [write(tmp_path / f"{k}.h5", x, (2, 32, 32, 1)) for k in range(6)]
    monkeypatch.setattr("halograd.data.files.CACHE", 12 * sample)
    found = FileSet([Hdf5Dataset(path) for path in files], 4)
    assert found._most_open == 4 and [part.cached for part in found.parts] == [3 * sample] * 6
    monkeypatch.setattr("halograd.data.files.CACHE", 4 * sample)  # less than each file needs for a sample
    found = FileSet([Hdf5Dataset(path) for path in files], 4)
    assert found._most_open == 2 and [part.cached for part in found.parts] == [2 * sample] * 6
    found.close()
    for k in (0, 9, 18, 27, 36, 45, 0):
        found.read("x", [k], Box.of_shape((1, 32, 32, 1)), np.empty((1, 32, 32, 1), np.float32))
        assert sum(part._file is not None for part in found.parts) <= 2


@pytest.mark.parametrize(
    ("shape", "chunks", "filter_"),
    [
        ((48, 400, 120, 8), (24, 400, 120, 8), "lzf"),
        ((4, 1200, 1000, 8), (1, 1200, 1000, 8), "lzf"),
        ((48, 400, 120, 8), (24, 40, 40, 8), None),
    ],
)
def test_chunks_are_read_once(tmp_path, shape, chunks, filter_):
    """Each chunk is decompressed once, also if a sample has more than 8 MiB of chunks and is read in parts."""
    x = np.random.default_rng(0).integers(0, 255, shape, np.uint8)
    path, rows = write(tmp_path / "a.h5", x, chunks, filter_), shape[1] // 4
    with Hdf5Dataset(path) as dataset:
        before = _bytes_read()
        for k in np.random.default_rng(1).permutation(len(x)):
            for first in range(0, shape[1], rows):
                box = Box((0, first, 0, 0), (1, first + rows, *shape[2:]))
                dataset.read("x", [int(k)], box, np.empty(box.shape, np.float32))
        assert _bytes_read() - before < 1.2 * path.stat().st_size


def _bytes_read() -> int:
    """Return the bytes that this process has read from files."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


SLOW_LINE = r"a.h5: 'inputs' is stored in chunks \((.*)\); a run reads \(and decompresses\) (\d+) x the numbers that .*"


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_slow_chunks_and_the_remedy(tmp_path, monkeypatch, layout):
    """A warning covers chunks of which a rank uses a quarter, and of many samples; the suggested chunks are fast."""
    x = np.zeros((64, 64, 96, 2), np.float32)
    stored = x if layout == "NHWC" else np.moveaxis(x, -1, 1)
    path = write(tmp_path / "a.h5", stored, (4, *stored.shape[1:]), layout=layout)
    box = Box((0, -1, 48, 0), (2, 17, 97, 2))
    for share, shuffled, factor in (
        (CACHE, True, 64 / 17 * 2),
        (0, False, 64 / 17 * 2),
        (0, True, 64 / 17 * 2 * 4 * 15 / 16),
    ):
        dataset = Hdf5Dataset(path)
        dataset.share = share
        found = re.match(".*" + SLOW_LINE, dataset.slow_chunks("x", box, shuffled))
        assert found is not None and int(found[2]) == round(factor)
    assert dataset.slow_chunks("target", Box((0, 0), (2, 1)), True) == ""
    text = dataset.slow_chunks("x", box, True)
    command = re.search(r"`halograd data repack (\S+) NEW.h5 --chunk inputs=(\S+)`", text)
    assert command is not None and Path(command[1]) == path
    better = tuple(map(int, command[2].split("x")))
    assert better == ((1, 17, 48, 2) if layout == "NHWC" else (1, 2, 17, 48))
    fast = Hdf5Dataset(write(tmp_path / "b.h5", stored, better, layout=layout))
    assert fast.slow_chunks("x", box, True) == ""
    other = write(tmp_path / "c.h5", stored, (4, *stored.shape[1:]), layout=layout)
    both = FileSet([Hdf5Dataset(path), fast, Hdf5Dataset(other)], most_open=2)
    assert re.match(".*" + SLOW_LINE + r"; and of 1 more files", both.slow_chunks("x", box, True))
    open_ = FileSet([Hdf5Dataset(path), fast, Hdf5Dataset(other)])  # all chunks stay in memory
    assert open_.slow_chunks("x", box, True) == ""
    assert SLOW == 4


def test_suggested_chunks_are_small():
    assert Chunks((1, 4096, 4096, 3), (9, 4096, 4096, 3), 1, 4).better([(0, 4096), (0, 4096), (0, 3)]) == (
        1,
        128,
        128,
        3,
    )


@pytest.mark.parametrize("dtype", ["u1", ">u2", "i2", "i8", "f2", ">f4", "f8", "?"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_hdf5_converts_nothing(tmp_path, monkeypatch, dtype, layout):
    """NumPy converts types, because HDF5 is 2 to 180 times slower; HDF5 converts only types that NumPy lacks."""
    x = np.random.default_rng(0).integers(0, 2, (2, 4, 5, 3)).astype(dtype)
    path = write(tmp_path / "a.h5", x if layout == "NHWC" else np.moveaxis(x, -1, 1), (1, 3, 3, 3), None, layout)
    types, plain = [], Hdf5Array.read

    def spy(self, where, target):
        types.append((self.stored.dtype, target.dtype))
        plain(self, where, target)

    monkeypatch.setattr(Hdf5Array, "read", spy)
    out = np.empty((2, 4, 5, 3), np.float32)
    Hdf5Dataset(path).read("x", [0, 1], Box.of_shape(out.shape), out)
    np.testing.assert_array_equal(out, x)
    assert types and all(stored == read for stored, read in types)


def test_what_overflows_is_infinite(tmp_path):
    x = np.full((1, 2, 2, 1), 1e300)
    dataset = Hdf5Dataset(write(tmp_path / "a.h5", x, x.shape, None))
    dataset.lenient = frozenset("x")
    out = np.empty(x.shape, np.float32)
    dataset.read("x", [0], Box.of_shape(x.shape), out)
    assert np.isposinf(out).all()
