"""Compressed chunks: the cache, slow reading, copies with other chunks, regular selections, and files in one piece."""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from pathlib import Path

import h5py
import numpy as np
import pytest
from h5py import h5s
from hypothesis import given
from hypothesis import strategies as st

from halograd.cli.run import run
from halograd.data import DataError, FileSet, Hdf5Dataset
from halograd.data import repack as module
from halograd.data.chunks import CACHE, SLOW, Chunks
from halograd.data.hdf5 import Hdf5Array
from halograd.data.repack import repack
from halograd.data.storage import Hyperslab, hyperslabs
from halograd.data.writers import join
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


X = np.random.default_rng(1).integers(0, 9, (7, 6, 5, 2)).astype(">i2")


def write_repack(path):
    with h5py.File(path, "w") as file:
        file.attrs["title"] = "t"
        x = file.create_dataset("run/x", data=X, chunks=(4, 6, 5, 1), compression=3, shuffle=True, fillvalue=3)
        x.attrs.update(layout="NHWC", units="K")
        file.create_dataset("run/plain", data=X)
        file["mask"] = X[..., 0]
        file["link"] = h5py.SoftLink("/run/x")
        for axis, (name, n) in enumerate((("time", 7), ("lat", 6))):
            file[name] = np.arange(float(n))
            file[name].make_scale(name)
            for dataset in ("run/x", "mask"):
                file[dataset].dims[axis].attach_scale(file[name])
    return path


def test_copy(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SLAB", 200)
    source, path = write_repack(tmp_path / "a.h5"), tmp_path / "b.h5"
    repack(source, path, {"run/x": (1, 3, 5, 2), "run/plain": (7, 2, 2, 2)})
    with h5py.File(source) as old, h5py.File(path) as new:
        for name in ("run/x", "run/plain", "mask", "time", "link"):
            assert new[name].dtype == old[name].dtype
            np.testing.assert_array_equal(new[name][()], old[name][()])
        x = new["run/x"]
        assert (x.chunks, x.compression, x.compression_opts, x.shuffle) == ((1, 3, 5, 2), "gzip", 3, True)
        assert new["run/plain"].chunks == (7, 2, 2, 2) and new["mask"].chunks is None and x.fillvalue == 3
        assert dict(new.attrs) == {"title": "t"} and x.attrs["units"] == "K"
        for name in ("run/x", "mask"):
            assert [new[name].dims[k][0] == new[scale] for k, scale in enumerate(("time", "lat"))] == [True, True]
        assert isinstance(new.get("link", getlink=True), h5py.SoftLink)


def test_command(tmp_path, capsys):
    source = write_repack(tmp_path / "a.h5")
    assert run(["data", "repack", str(source), str(tmp_path / "b.h5"), "--chunk", "mask=1x6x5"]) == 0
    assert "with other chunks of mask" in capsys.readouterr().out
    assert run(["data", "repack", str(source), str(tmp_path / "c.h5"), "--chunk", "mask=1x6y5"]) == 2
    assert "expected DATASET=SHAPE, such as inputs=1x128x128x4, got 'mask=1x6y5'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ({"y": (1,)}, "expected a dataset 'y', got none; it has "),
        ({"run": (1,)}, "expected a dataset 'run', got none"),
        ({"mask": (1, 6)}, "expected a chunk within 7x6x5, got 1x6"),
        ({"mask": (1, 7, 5)}, "expected a chunk within 7x6x5, got 1x7x5"),
    ],
)
def test_refused(tmp_path, chunks, message):
    with pytest.raises(DataError, match=message):
        repack(write_repack(tmp_path / "a.h5"), tmp_path / "b.h5", chunks)
    assert not (tmp_path / "b.h5").exists()
    with pytest.raises(DataError, match=r"missing\.h5: no such file"):
        repack(tmp_path / "missing.h5", tmp_path / "b.h5", chunks)
    with pytest.raises(DataError, match="it exists; give another name"):
        repack(tmp_path / "a.h5", tmp_path / "a.h5", {"mask": (1, 6, 5)})


def test_a_virtual_dataset(tmp_path):
    """It becomes a dataset of its own; without its source, which HDF5 would read as zeros, it is refused."""
    write_repack(tmp_path / "a.h5")
    layout = h5py.VirtualLayout(X.shape, X.dtype)
    layout[:] = h5py.VirtualSource("a.h5", "run/x", X.shape)
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    repack(tmp_path / "virtual.h5", tmp_path / "b.h5", {"x": (1, 3, 5, 2)})
    with h5py.File(tmp_path / "b.h5") as new:
        assert not new["x"].is_virtual
        np.testing.assert_array_equal(new["x"][()], X)
    (tmp_path / "a.h5").unlink()
    with pytest.raises(DataError, match=r"a\.h5"):
        repack(tmp_path / "virtual.h5", tmp_path / "c.h5", {"x": (1, 3, 5, 2)})
    assert not (tmp_path / "c.h5").exists()


@pytest.mark.parametrize("name", ["soft", "group/hard", "run/x"])
def test_a_dataset_of_several_names(tmp_path, name):
    """A dataset gets the chunks by any of its names, and is copied once; a group may contain a group around it."""
    with h5py.File(write_repack(tmp_path / "a.h5"), "r+") as file:
        file["soft"] = h5py.SoftLink("/link")
        group = file.create_group("group")
        group["hard"], group["around"] = file["run/x"], file["/"]
    repack(tmp_path / "a.h5", tmp_path / "b.h5", {name: (1, 3, 5, 2)})
    with h5py.File(tmp_path / "b.h5") as new:
        assert new["run/x"].chunks == (1, 3, 5, 2) and new["soft"] == new["group/hard"] == new["run/x"]
        np.testing.assert_array_equal(new["run/x"][()], X)
        assert new["group/around"] == new["/"]


@pytest.mark.parametrize("ordered", [True, False])
def test_the_order_of_members(tmp_path, ordered):
    """Files of netCDF keep the order in which variables were written, and cannot be extended without it."""
    with h5py.File(tmp_path / "a.h5", "w", track_order=ordered) as file:
        file.create_group("z", track_order=ordered)
        for name in ("z/b", "z/a", "x", "b"):
            file[name] = X
    repack(tmp_path / "a.h5", tmp_path / "b.h5", {"x": (1, 3, 5, 2)})
    with h5py.File(tmp_path / "a.h5") as old, h5py.File(tmp_path / "b.h5") as new:
        assert list(new) == list(old) == (["z", "x", "b"] if ordered else ["b", "x", "z"])
        assert list(new["z"]) == list(old["z"]) == (["b", "a"] if ordered else ["a", "b"])


def test_data_of_other_files(tmp_path):
    """Data in external files become part of the copy; a dataset of another file is refused."""
    X.tofile(tmp_path / "x.raw")
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", X.shape, X.dtype, external=[(str(tmp_path / "x.raw"), 0, X.nbytes)])
        file["other"] = h5py.ExternalLink(str(write_repack(tmp_path / "c.h5")), "/mask")
    repack(tmp_path / "a.h5", tmp_path / "b.h5", {"x": (1, 3, 5, 2)})
    with h5py.File(tmp_path / "b.h5") as new:
        assert new["x"].external is None and new["x"].chunks == (1, 3, 5, 2)
        np.testing.assert_array_equal(new["x"][()], X)
    with pytest.raises(DataError, match=r"'other' of this file, got a link into \S+c\.h5; repack that one"):
        repack(tmp_path / "a.h5", tmp_path / "d.h5", {"other": (1, 6, 5)})
    (tmp_path / "x.raw").write_bytes(bytes(100))
    with pytest.raises(DataError, match="expected 840 B in its external file"):
        repack(tmp_path / "a.h5", tmp_path / "d.h5", {"x": (1, 3, 5, 2)})


def chosen(slab: Hyperslab, n: int) -> list[int]:
    """Return the indices along the single axis of a selection, by the definition of regular selections."""
    count = n if slab.count[0] == h5s.UNLIMITED else slab.count[0]
    starts = (slab.start[0] + k * slab.stride[0] for k in range(count))
    return [i for start in starts for i in range(start, start + slab.block[0]) if i < n]


def test_what_is_selected_within_an_array() -> None:
    for start, block, gap, count in itertools.product(range(4), range(1, 4), range(3), (0, 1, 2, 5, h5s.UNLIMITED)):
        slab = Hyperslab((start,), (block + gap,), (count,), (block,))
        for n in range(12):
            indices = chosen(slab, n)
            assert slab.selected((n,)) == (len(indices),) and slab.size((n,)) == len(indices)
            inside = slab.within((n,))
            assert chosen(inside, n) == indices
            assert not inside.count[0] or inside.start[0] + (inside.count[0] - 1) * inside.stride[0] < n
        if count not in (0, h5s.UNLIMITED):
            assert slab.stop == (chosen(slab, 100)[-1] + 1,) and slab.block_size == len(chosen(slab, 100))


def test_one_block_of_a_growing_selection() -> None:
    slab = Hyperslab((1, 0), (4, 1), (h5s.UNLIMITED, 1), (2, 3))
    assert slab.growing == 0 and slab.stop == (None, 3) and slab.block_size == 6
    assert slab.part(0, 5) == Hyperslab((21, 0), (4, 1), (1, 1), (2, 3))


def test_selections_of_hdf5() -> None:
    """The union of the regular selections equals HDF5's selection, also if that is irregular."""
    rng = np.random.default_rng(0)
    space = h5s.create_simple((9, 7))
    assert [slab.size((9, 7)) for slab in hyperslabs(space, (9, 7))] == [63]
    space.select_none()
    assert hyperslabs(space, (9, 7)) == []
    for _ in range(20):
        expected = np.zeros((9, 7), bool)
        space.select_none()
        for _ in range(3):
            low = [int(rng.integers(0, n)) for n in (9, 7)]
            size = [int(rng.integers(1, n - a + 1)) for n, a in zip((9, 7), low)]
            space.select_hyperslab(tuple(low), (1, 1), (1, 1), tuple(size), h5s.SELECT_OR)
            expected[low[0] : low[0] + size[0], low[1] : low[1] + size[1]] = True
        found = np.zeros((9, 7), int)
        for slab in hyperslabs(space, (9, 7)):
            for rows in range(slab.count[0]):
                for columns in range(slab.count[1]):
                    a = [s + k * t for s, k, t in zip(slab.start, (rows, columns), slab.stride)]
                    found[a[0] : a[0] + slab.block[0], a[1] : a[1] + slab.block[1]] += 1
        np.testing.assert_array_equal(found, expected)
    space.select_elements([(0, 0), (3, 3)])
    with pytest.raises(ValueError, match="a selection of points"):
        hyperslabs(space, (9, 7))


def write_joining(folder):
    """Write a file of two parts with a dimension scale; return its path and numbers."""
    out, x = folder / "p.h5", np.arange(2 * 6 * 4 * 1, dtype=np.float32).reshape(2, 6, 4, 1)
    (folder / "p.h5.parts/0").mkdir(parents=True)
    layout = h5py.VirtualLayout(x.shape, x.dtype)
    for k in range(2):
        with h5py.File(folder / f"p.h5.parts/0/{k}.h5", "w") as file:
            file["y"] = x[:, 3 * k : 3 * k + 3]
        layout[:, 3 * k : 3 * k + 3] = h5py.VirtualSource(f"p.h5.parts/0/{k}.h5", "y", (2, 3, 4, 1))
    with h5py.File(out, "w") as file:
        y = file.create_virtual_dataset("y", layout, np.nan)
        y.attrs["units"] = "K"
        file["lat"] = np.arange(6.0)
        file["lat"].make_scale("lat")
        y.dims[1].attach_scale(file["lat"])
        y.dims[1].label = "lat"
        file.attrs["needs"] = "p.h5.parts/0/0.h5\np.h5.parts/0/1.h5"
    return out, x


def test_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SLAB", 40)
    out, x = write_joining(tmp_path)
    assert join(out) and not join(out)
    assert [path.name for path in tmp_path.iterdir()] == ["p.h5"]
    with h5py.File(out) as file:
        y = file["y"]
        np.testing.assert_array_equal(y[()], x)
        assert not y.is_virtual and y.attrs["units"] == "K" and "needs" not in file.attrs
        assert y.dims[1].label == "lat" and y.dims[1][0] == file["lat"] and sorted(file) == ["lat", "y"]


def test_missing_part(tmp_path):
    out, _ = write_joining(tmp_path)
    (tmp_path / "p.h5.parts/0/1.h5").unlink()
    with pytest.raises(DataError, match=r"1.h5, a part of .*p.h5: no such file; apply again"):
        join(out)
    assert (tmp_path / "p.h5.parts/0/0.h5").exists()
