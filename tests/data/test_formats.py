"""Zarr, NIfTI and TIFF: a block of each is the slice that its library reads, and no other part of the file is read."""

import gzip

import h5py
import numpy as np
import pytest

from halograd.data import DataError, Hdf5Dataset, open_dataset
from halograd.data.coordinates import write_coordinates
from halograd.data.formats import ChunkCache
from halograd.data.normalize import KeptStatistics
from halograd.dtensor import Box

zarr = pytest.importorskip("zarr", reason="needs zarr: pip install 'halograd[formats]'")
nibabel = pytest.importorskip("nibabel", reason="needs nibabel: pip install 'halograd[formats]'")
tifffile = pytest.importorskip("tifffile", reason="needs tifffile: pip install 'halograd[formats]'")

RNG = np.random.default_rng(5)
VOLUME = RNG.integers(-900, 900, (9, 10, 7)).astype(np.int16)


def cuts(shape, ranks):
    """Yield the blocks of one sample of each of 1, 2 or 4 ranks, cut along the first two axes."""
    parts = {1: (1, 1), 2: (2, 1), 4: (2, 2)}[ranks]
    for i in range(parts[0]):
        for j in range(parts[1]):
            ranges = [(n * k // p, n * (k + 1) // p) for n, k, p in zip(shape, (i, j), parts)]
            yield Box.of_ranges([(0, 1), *ranges, *((0, n) for n in shape[2:])])


def check(dataset, name, sample, want):
    """Compare the blocks of all ranks with `want` ``(*spatial, C)`` of the library."""
    assert dataset.fields[name].shape == want.shape
    for ranks in (1, 2, 4):
        for box in cuts(want.shape, ranks):
            out = np.full(box.shape, -7.0, np.float32)
            dataset.read(name, [sample], box, out)
            np.testing.assert_array_equal(out[0], want[box.slices()[1:]].astype(np.float32))


# -- Zarr ------------------------------------------------------------------------------------------


def write_zarr(path, version, x=None, **options):
    x = RNG.standard_normal((6, 9, 8, 3)).astype(np.float32) if x is None else x
    group = zarr.open_group(str(path), mode="w", zarr_format=version)
    options = {"chunks": (1, 4, 4, 3), **options}
    group.create_array("fields/x", data=x, **options).attrs["layout"] = "NHWC"
    group["fields/x"].attrs["channel_names"] = ["u", "v", "w"]
    group.create_array("mask", data=(x[..., 0] > 0).astype(np.uint8), chunks=(2, 9, 8))
    group.create_array("simulation", data=np.arange(len(x)) // 2, chunks=(6,))
    group.attrs["title"] = "a field"
    return x


@pytest.mark.parametrize("version", [2, 3])
def test_a_block_of_zarr(tmp_path, version):
    """Blocks, groups and attributes are read, and packed numbers unpacked."""
    x = write_zarr(tmp_path / "a.zarr", version)
    with open_dataset(tmp_path / "a.zarr", "fields/x", "mask") as found:
        assert found.groups.tolist() == [0, 0, 1, 1, 2, 2] and found.attributes == {"title": "a field"}
        assert found.fields["x"].channel_names == ["u", "v", "w"]
        for sample in (0, 5, 1):
            check(found, "x", sample, x[sample])
            check(found, "target", sample, (x[sample][..., :1] > 0))
    stored = RNG.integers(-5, 5, (2, 4, 4, 3)).astype(np.int16)
    write_zarr(tmp_path / "a.zarr", version, stored)
    array = zarr.open_group(str(tmp_path / "a.zarr"))["fields/x"]
    array.attrs.update(scale_factor=0.5, add_offset=10.0, _FillValue=-5)
    found = Hdf5Dataset(tmp_path / "a.zarr", "fields/x", None)
    found.lenient = frozenset("x")
    check(found, "x", 1, np.where(stored[1] == -5, np.nan, 0.5 * stored[1] + 10))


def test_no_statistics_are_kept_of_samples_in_folders(tmp_path):
    """The time of change of a folder does not show that a number in it changed, also if other files are regular."""
    nibabel.save(nibabel.Nifti1Image(np.zeros((4, 4, 4), np.float32), np.eye(4)), tmp_path / "p1_a.nii")
    group = zarr.open_group(str(tmp_path / "p1_b.zarr"), mode="w")
    group.create_array("data", data=np.ones((1, 4, 4, 4), np.float32)).attrs["layout"] = "NDHW"
    with open_dataset(tmp_path, {"x": "{sample}_a.nii"}, None) as files:
        assert KeptStatistics(files, {}).path is not None
    with open_dataset(tmp_path, {"x": "{sample}_a.nii", "y": "{sample}_b.zarr:data"}, None) as both:
        assert KeptStatistics(both, {}).path is None


def test_only_chunks_of_the_block_are_decoded_and_each_once(tmp_path, monkeypatch):
    """Two of the four samples of a chunk, one block of four: each chunk that overlaps is decoded once."""
    x = write_zarr(tmp_path / "a.zarr", 3, RNG.standard_normal((8, 8, 8, 3)).astype(np.float32), chunks=(4, 4, 4, 3))
    fetched = []
    plain = zarr.Array.__getitem__

    def spy(self, where):
        found = plain(self, where)
        fetched.append(found.size)
        return found

    monkeypatch.setattr(zarr.Array, "__getitem__", spy)
    found = Hdf5Dataset(tmp_path / "a.zarr", "fields/x", None)
    fetched.clear()
    for sample in (0, 2, 5, 1, 7):
        out = np.empty((1, 4, 4, 3), np.float32)
        found.read("x", [sample], Box((0, 4, 0, 0), (1, 8, 4, 3)), out)
        np.testing.assert_array_equal(out[0], x[sample, 4:, :4])
    assert sum(fetched) == 2 * 4 * 4 * 4 * 3


def test_a_cache_of_chunks_keeps_its_limit():
    array, fetched = np.arange(7 * 6).reshape(7, 6), []

    def fetch(index):
        fetched.append(index)
        return array[index[0] * 2 : index[0] * 2 + 2, index[1] * 4 : index[1] * 4 + 4]

    cache = ChunkCache((2, 4), 2 * 8 * 8, fetch)
    out = np.empty((3, 6), array.dtype)
    cache.read((slice(3, 6), slice(0, 6)), out)
    np.testing.assert_array_equal(out, array[3:6])
    row = np.empty(2, array.dtype)
    cache.read((5, slice(4, 6)), row)
    assert row.tolist() == array[5, 4:].tolist() and len(fetched) == 4  # the chunk that was read last is there
    cache.read((3, slice(0, 2)), row)
    assert row.tolist() == array[3, :2].tolist() and len(fetched) == 5


# -- NIfTI -----------------------------------------------------------------------------------------


def write_nifti(path, values, slope=None, spacing=(1.0, 2.0, 3.0)):
    image = nibabel.Nifti1Image(values, np.diag([*spacing, 1.0]))
    if slope is not None:
        image.header.set_slope_inter(*slope)
    nibabel.save(image, path)


@pytest.mark.parametrize("suffix", [".nii", ".nii.gz"])
@pytest.mark.parametrize("shape", [(9, 10, 7), (9, 10, 7, 2), (9, 10, 7, 1, 2), (9, 10)])
def test_a_block_of_nifti(tmp_path, suffix, shape):
    values = RNG.integers(-900, 900, shape).astype(np.int16)
    write_nifti(tmp_path / f"p{suffix}", values)
    want = np.asarray(nibabel.load(tmp_path / f"p{suffix}").dataobj).reshape(*shape[:3], shape[-1] if shape[3:] else 1)
    with open_dataset(tmp_path / f"p{suffix}", "data", None) as found:
        check(found, "x", 0, want)


def test_factors_of_nifti_are_those_of_nibabel(tmp_path):
    write_nifti(tmp_path / "p.nii", VOLUME)
    data = bytearray((tmp_path / "p.nii").read_bytes())
    data[112:120] = np.array([0.25, -3.0], "<f4").tobytes()  # scl_slope, scl_inter
    (tmp_path / "p.nii").write_bytes(data)
    want = np.asarray(nibabel.load(tmp_path / "p.nii").dataobj)[..., None]
    assert want[0, 0, 0, 0] == 0.25 * VOLUME[0, 0, 0] - 3
    with open_dataset(tmp_path, "data", None) as found:
        check(found, "x", 0, want)


def test_a_compressed_file_is_inflated_once_and_named(tmp_path, monkeypatch):
    write_nifti(tmp_path / "p.nii.gz", VOLUME)
    found = Hdf5Dataset(tmp_path / "p.nii.gz", "data", None)
    opened = []
    plain = gzip.GzipFile.__init__
    monkeypatch.setattr(gzip.GzipFile, "__init__", lambda *a, **k: (opened.append(1), plain(*a, **k))[1])
    for box in cuts(found.fields["x"].shape, 4):
        found.read("x", [0], box, np.empty(box.shape, np.float32))
    assert len(opened) == 1 and found.cached == VOLUME.nbytes
    text = found.slow_chunks("x", Box((0, 0, 0, 0, 0), (1, 4, 5, 7, 1)), True)
    assert "reads (and decompresses) 4 x the numbers" in text and "gunzip" in text
    assert not found.slow_chunks("x", Box.of_shape((1, 9, 10, 7, 1)), True)


def test_patients_of_several_sizes(tmp_path):
    write_nifti(tmp_path / "p1.nii", VOLUME)
    write_nifti(tmp_path / "p2.nii", VOLUME[:5, :8])
    with open_dataset(tmp_path, "data", None, several_sizes=True) as found:
        assert found.extents["x"].tolist() == [[9, 10, 7], [5, 8, 7]]
        out = np.full((1, 9, 10, 7, 1), -1.0, np.float32)
        found.read("x", [1], Box.of_shape(out.shape), out)
    np.testing.assert_array_equal(out[0, :5, :8, :, 0], VOLUME[:5, :8])
    assert (out[0, 5:] == -1).all() and (out[0, :, 8:] == -1).all()


# -- TIFF ------------------------------------------------------------------------------------------


TILES = {"tile": (16, 16)}


@pytest.mark.parametrize("how", [{}, TILES, {**TILES, "compression": "zlib"}, {"rowsperstrip": 8}])
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_a_block_of_tiff(tmp_path, how, byteorder):
    image = RNG.integers(0, 60000, (37, 41, 3)).astype(np.uint16)
    tifffile.imwrite(tmp_path / "s.tif", image, photometric="rgb", byteorder=byteorder, **how)
    with open_dataset(tmp_path, "level0", None) as found:
        check(found, "x", 0, tifffile.imread(tmp_path / "s.tif"))


def test_pages_are_depth_or_channels(tmp_path):
    pages = RNG.integers(0, 255, (5, 20, 18)).astype(np.uint8)
    tifffile.imwrite(tmp_path / "p.tif", pages, photometric="minisblack", compression="zlib")
    with open_dataset(tmp_path / "p.tif", "level0", None) as found:
        check(found, "x", 0, pages[..., None])
    with open_dataset(tmp_path / "p.tif", "channels0", None) as found:
        check(found, "x", 0, np.moveaxis(pages, 0, -1))


def test_levels_of_a_pyramid_and_its_tiles(tmp_path, monkeypatch):
    image = RNG.integers(0, 255, (64, 64, 3)).astype(np.uint8)
    with tifffile.TiffWriter(tmp_path / "s.tif") as file:
        options = {"tile": (16, 16), "photometric": "rgb", "compression": "zlib"}
        file.write(image, subifds=1, **options)
        file.write(image[::2, ::2], subfiletype=1, **options)
    found = open_dataset(tmp_path / "s.tif", "level1", None)
    check(found, "x", 0, image[::2, ::2])
    decoded = []
    plain = tifffile.FileHandle.read
    monkeypatch.setattr(tifffile.FileHandle, "read", lambda self, n=-1: (decoded.append(n), plain(self, n))[1])
    found = open_dataset(tmp_path / "s.tif", "level0", None)
    found.read("x", [0], Box.of_shape((1, 1, 1, 3)), np.empty((1, 1, 1, 3), np.float32))
    decoded.clear()
    out = np.empty((1, 32, 32, 3), np.float32)
    found.read("x", [0], Box((0, 32, 0, 0), (1, 64, 32, 3)), out)
    np.testing.assert_array_equal(out[0], image[32:, :32])
    sizes = tifffile.TiffFile(tmp_path / "s.tif").pages[0].databytecounts
    assert 0 < sum(decoded) <= 1.3 * sum(sizes[k] for k in (8, 9, 12, 13))


# -- all -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.zarr", "a.nii", "a.nii.gz", "a.tif"])
def test_damaged_and_missing_files(tmp_path, name):
    with pytest.raises(DataError, match=r"a\..*(no such file|cannot read it)"):
        Hdf5Dataset(tmp_path / name, "data", None)
    (tmp_path / name).write_bytes(b"not this format" * 100)
    with pytest.raises(DataError, match=r"a\..*(expected a .* cannot read it|no such file)"):
        Hdf5Dataset(tmp_path / name, "data", None)


def test_a_missing_package_and_a_missing_array(tmp_path, monkeypatch):
    write_nifti(tmp_path / "p.nii", VOLUME)
    with pytest.raises(DataError, match=r"expected a dataset 'image', got data \(1, 9, 10, 7, 1\), affine"):
        Hdf5Dataset(tmp_path / "p.nii", "image", None)
    monkeypatch.setitem(__import__("sys").modules, "nibabel", None)
    with pytest.raises(DataError, match=r"expected the package nibabel .*; pip install 'halograd\[formats\]'"):
        Hdf5Dataset(tmp_path / "p.nii", "data", None)


def test_a_folder_gives_files_of_one_format(tmp_path):
    write_zarr(tmp_path / "b.zarr", 3)
    write_nifti(tmp_path / "a.nii", VOLUME)
    for kind in (None, "zarr"):
        with open_dataset(tmp_path, "fields/x", None, format=kind) as found:
            assert found.path.name == "b.zarr"
    with open_dataset(tmp_path, "data", None, format="nifti") as found:
        assert found.path.name == "a.nii"


def test_an_array_of_zarr_alone_has_one_name(tmp_path, caplog):
    x = RNG.random((3, 4, 5, 1), np.float32)
    zarr.save_array(str(tmp_path / "a.zarr"), x)
    with Hdf5Dataset(tmp_path / "a.zarr", "data", None, "NHWC") as found:
        out = np.empty(x.shape, np.float32)
        found.read("x", range(3), Box.of_shape(x.shape), out)
        np.testing.assert_array_equal(out, x)
        assert found.groups is None and not caplog.records
    with pytest.raises(DataError, match=r"expected a dataset 'mask', got data \(3, 4, 5, 1\)"):
        Hdf5Dataset(tmp_path / "a.zarr", "data", "mask", "NHWC")


def predictions(tmp_path, dataset, shape):
    """Write the coordinates of a data set into a file of predictions; return it and what was left out."""
    file = h5py.File(tmp_path / "p.h5", "w")
    file["prediction"] = np.zeros((len(dataset), *shape), np.float32)
    return file, write_coordinates(file, dataset, {"prediction": shape})


def test_predictions_have_affine_and_spacing_of_each_patient(tmp_path):
    write_nifti(tmp_path / "p1.nii", VOLUME)
    write_nifti(tmp_path / "p2.nii.gz", VOLUME, spacing=(4.0, 5.0, 6.0))
    with open_dataset(tmp_path, "data", None) as found:
        file, left_out = predictions(tmp_path, found, (9, 10, 7, 2))
        assert found.source(1) == (str(tmp_path / "p2.nii.gz"), 0)
    with file:
        assert not left_out and file["spacing"][()].tolist() == [[1, 2, 3], [4, 5, 6]]
        np.testing.assert_array_equal(file["affine"][1], np.diag([4, 5, 6, 1]))


@pytest.mark.parametrize("version", [2, 3])
def test_predictions_have_the_coordinates_of_zarr(tmp_path, version):
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="w", zarr_format=version)

    def add(name, data, dims, **attrs):
        own = {"dimension_names": dims} if version == 3 else {}
        array = group.create_array(name, data=data, **own)
        array.attrs.update({**attrs, **({} if version == 3 else {"_ARRAY_DIMENSIONS": dims})})

    add("time", np.array([0, 1, 2, 9]), ["time"], units="hours since 2000-01-01")
    add("lat", np.linspace(-60, 60, 5), ["lat"], units="degrees_north")
    add("area", np.ones((5, 6)), ["lat", "lon"])
    add("t", RNG.random((4, 5, 6, 1)), ["time", "lat", "lon", "channel"], layout="NHWC", coordinates="area")
    with open_dataset(tmp_path, "t", None) as found:
        assert found.structure.times.tolist() == [0, 1, 2, 9]
        file, _ = predictions(tmp_path, found, (5, 6, 2))
    with file:
        assert file["time"][()].tolist() == [0, 1, 2, 9] and file["lat"].attrs["units"] == "degrees_north"
        assert file["prediction"].dims[1][0].name == "/lat" and file["prediction"].dims[0][0].name == "/time"


def test_a_format_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    x = RNG.random((3, 4, 5, 2))
    np.save(tmp_path / "a.npy", x)
    with open_dataset(tmp_path, "x", None, format="own.py:Npy") as found:
        check(found, "x", 2, x[2])


OWN = '''
import numpy as np
from halograd.data import Format, StoredArray, StoredFile

class Npy(Format):
    suffixes = (".npy",)

    def open(self, path, allow_external=False, checked=False):
        return NpyFile(path)

class NpyFile(StoredFile):
    def __init__(self, path):
        self.path, self.files, self._array = path, {}, NpyArray(path)

    def get(self, name):
        return self._array if name == "x" else None

    def names(self):
        yield "x"

    def close(self):
        pass

class NpyArray(StoredArray):
    name, attrs = "x", {"layout": "NHWC"}

    def __init__(self, path):
        self._values = np.load(path, mmap_mode="r")
        self.shape, self.dtype = self._values.shape, self._values.dtype

    def read(self, where, out):
        out[...] = self._values[where]
'''


@pytest.mark.parametrize("name", ["a.zarr", "a.nii.gz", "a.tif"])
def test_damaged_numbers_are_an_error_of_one_line(tmp_path, name):
    """The headers are right, but compressed numbers are not: the error of the library becomes one line."""
    if name == "a.zarr":
        write_zarr(tmp_path / name, 3)
        damaged, dataset = tmp_path / name / "fields/x/c/0/0/0/0", "fields/x"
        damaged.write_bytes(b"damaged!" * 9)
    elif name == "a.tif":
        image = RNG.integers(0, 255, (64, 64)).astype(np.uint8)
        tifffile.imwrite(tmp_path / name, image, tile=(16, 16), compression="zlib")
        damaged, dataset = tmp_path / name, "level0"
        with tifffile.TiffFile(damaged) as file:
            begin = file.pages[0].dataoffsets[0]
        data = bytearray(damaged.read_bytes())
        data[begin : begin + 40] = b"\0" * 40
        damaged.write_bytes(data)
    else:
        write_nifti(tmp_path / name, np.repeat(VOLUME, 20, 0))
        damaged, dataset = tmp_path / name, "data"
        data = damaged.read_bytes()
        damaged.write_bytes(data[: len(data) // 2])
    found = Hdf5Dataset(tmp_path / name, dataset, None)
    shape = (1, *found.fields["x"].shape)
    with pytest.raises(DataError, match=r"a\.\S+: cannot read sample 0 of .*; the file is damaged"):
        found.read("x", [0], Box.of_shape(shape), np.empty(shape, np.float32))
