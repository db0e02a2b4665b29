"""Samples in several files: found by patterns, read as one, held out by names; channels in datasets of their own."""

import datetime
import os
import re
import resource
from contextlib import ExitStack

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halograd.data import ArrayDataset, DataError, FileSet, Hdf5Dataset, find_files, open_dataset
from halograd.data.dataset import named
from halograd.data.files import locate, natural
from halograd.data.sampler import held_out, years
from halograd.data.steps import TimeSteps
from halograd.dtensor import Box

LENGTHS = (3, 1, 4, 2)
SHAPE, FILES_CHANNELS = (5, 6), 3


def write_files(folder, lengths=LENGTHS, groups=False):
    """Write files of these lengths; return all inputs and masks."""
    rng = np.random.default_rng(7)
    xs, ys = [], []
    for i, n in enumerate(lengths):
        x = rng.standard_normal((n, *SHAPE, FILES_CHANNELS)).astype(np.float32)
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
    return folder, *write_files(folder)


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
    write_files(tmp_path)
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
    write_files(tmp_path)
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
    write_files(tmp_path)
    with h5py.File(tmp_path / "run3.h5", "r+") as file:
        file["inputs"].attrs["channel_names"] = ["a", "b", "c"]
    message = (
        r"run3.h5: 'inputs': expected the channels .* got \['a', 'b', 'c'\]; correct its attribute 'channel_names', or "
    )
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path)


def test_more_files_than_a_process_may_open(tmp_path):
    write_files(tmp_path, [1] * 40)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [number for number in range(soft) if not os.path.exists(f"/proc/self/fd/{number}")]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[20], hard))
    try:
        with open_dataset(tmp_path) as found, ExitStack() as stack:
            assert len(found) == 40
            with pytest.raises(DataError, match=r"h5: cannot be opened, too many open files; raise the limit of o"):
                for k in range(40):
                    stack.enter_context(Hdf5Dataset(tmp_path / f"run{k}.h5"))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_messages_name_the_file_and_the_sample_in_it(tmp_path):
    write_files(tmp_path)
    with h5py.File(tmp_path / "run2.h5", "r+") as file:
        file["inputs"][1, 2, 3, 0] = np.nan
    with open_dataset(tmp_path) as found, pytest.raises(DataError, match=r"run2.h5: nan in sample 1, channel 0"):
        out = np.zeros((2, *found.fields["x"].shape), np.float32)
        found.read("x", [0, 5], Box.of_shape(out.shape), out)
    with pytest.raises(DataError, match=r"and 3 more files.*: expected a sample of 0 .. 9, got 10"):
        found.read("x", [10], Box.of_shape(out[:1].shape), out[:1])


def test_groups_are_those_of_the_files_and_shared_by_none(tmp_path):
    write_files(tmp_path, groups=True)
    with open_dataset(tmp_path) as found:
        assert isinstance(found, FileSet)
        assert found.groups.tolist() == [0, 0, 1, 2, 3, 3, 4, 4, 5, 5]
        assert found.file_of.tolist() == [0, 0, 0, 1, 2, 2, 2, 2, 3, 3]
        assert found.names == ["run0.h5 3", "run1.h5 1", "run2.h5 4", "run3.h5 2"]
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_files(tmp_path / name, lengths=(2,))
    with open_dataset(tmp_path / "?" / "*.h5") as found:
        assert isinstance(found, FileSet) and found.names == ["a/run0.h5 2", "b/run0.h5 2"]


RNG = np.random.default_rng(3)


def touch(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def found(folder, inputs, targets=None, others=None):
    datasets = {**named(inputs, "x"), **named(targets, "target")}
    return [one.sample for one in locate(folder, None, datasets, named(others, "target"))]


def test_samples_are_found_by_patterns(tmp_path):
    """nnU-Net's names, those of one folder per patient, and an image whose name is the beginning of its mask's."""
    touch(tmp_path / "a", *(f"imagesTr/c{n}_000{k}.nii.gz" for n in (2, 10) for k in (0, 1)))
    touch(tmp_path / "a", "labelsTr/c2.nii.gz", "labelsTr/c10.nii.gz", "dataset.json", "imagesTr/notes.txt")
    inputs = ["imagesTr/{sample}_0000.nii.gz", "imagesTr/{sample}_0001.nii.gz"]
    assert found(tmp_path / "a", inputs, "labelsTr/{sample}.nii.gz") == ["c2", "c10"]
    touch(tmp_path / "b", "p1/p1_t1.nii", "p1/p1_seg.nii", "p2/p2_t1.nii", "p2/p2_seg.nii", "p2/p1_t1.nii")
    assert found(tmp_path / "b", "{sample}/{sample}_t1.nii", "{sample}/{sample}_seg.nii") == ["p1", "p2"]
    touch(tmp_path / "c", "p1.nii", "p1_seg.nii", "p2.nii")
    assert found(tmp_path / "c", "{sample}.nii", None, "{sample}_seg.nii") == ["p1", "p2"]
    touch(tmp_path / "d", "[1]/p1.nii", "[1]/._p1.nii")  # a name that is no pattern, and a hidden file of macOS
    assert found(tmp_path / "d", "[1]/{sample}.nii") == ["p1"]


def test_a_sample_without_all_files_is_named(tmp_path):
    touch(tmp_path, *(f"p{n}_t1.nii" for n in range(12)), *(f"p{n}_t2.nii" for n in range(7)))
    message = r"expected 2 files of each of the 12 samples in .*, got fewer of p7 \(no p7_t2.nii\), p8 .*, and 2 more;"
    with pytest.raises(DataError, match=message):
        found(tmp_path, ["{sample}_t1.nii", "{sample}_t2.nii"])
    with pytest.raises(DataError, match=r"expected files {sample}.tif in .*, got none; give .* data\.inputs\.x"):
        found(tmp_path, "{sample}.tif")
    with pytest.raises(DataError, match=r"expected {sample} in all names of datasets or in none, got 'mask'"):
        found(tmp_path, "{sample}_t1.nii", "mask")
    with pytest.raises(DataError, match=r"expected {sample} in all names of datasets or in none, got '.*\+ b'"):
        found(tmp_path, ["{sample}_t1.nii", "b"])
    with pytest.raises(DataError, match=r"expected a folder with the files of the samples, got .*missing"):
        found(tmp_path / "missing", "{sample}_t1.nii")


def write_patterns(path, values, slope=(1.0, 0.0)):
    nibabel = pytest.importorskip("nibabel", reason="needs nibabel: pip install 'halograd[formats]'")
    nibabel.save(nibabel.Nifti1Image(values, np.eye(4)), path)
    if path.suffix == ".nii":
        data = bytearray(path.read_bytes())
        data[112:120] = np.array(slope, "<f4").tobytes()
        path.write_bytes(data)


def test_modalities_are_channels(tmp_path):
    """Modalities of other types and factors are the channels of one input, for patients of several sizes."""
    shapes, want = [(6, 5, 4), (4, 7, 4)], []
    for n, shape in enumerate(shapes):
        t1, t2 = RNG.integers(0, 99, shape).astype(np.int16), RNG.random(shape).astype(np.float32)
        write_patterns(tmp_path / f"p{n}_t1.nii", t1, (0.5, -1.0))
        write_patterns(tmp_path / f"p{n}_t2.nii.gz", t2)
        write_patterns(tmp_path / f"p{n}_seg.nii.gz", (t1 > 50).astype(np.uint8))
        want.append((np.stack([0.5 * t1 - 1, t2], -1), t1 > 50))
    with open_dataset(
        tmp_path, ["{sample}_t1.nii", "{sample}_t2.nii.gz"], {"seg": "{sample}_seg.nii.gz"}, several_sizes=True
    ) as data:
        assert data.fields["x"].channel_names == ["t1", "t2"] and data.fields["x"].shape == (6, 7, 4, 2)
        assert data.source(1) == (str(tmp_path / "p1_t1.nii"), 0) and data.names == ["p0_t1.nii 1", "p1_t1.nii 1"]
        for n in range(len(shapes)):
            for name, values in (("x", want[n][0]), ("seg", want[n][1][..., None])):
                for box in (Box.of_shape((1, *values.shape)), Box.of_ranges([(0, 1), (2, 4), (1, 5), (0, 4), (0, 1)])):
                    out = np.empty(box.shape, np.float32)
                    data.read(name, [n], box, out)
                    np.testing.assert_allclose(out[0], values[box.slices()[1:]].astype(np.float32))
        out = np.empty((1, 2, 3, 4, 1), np.float32)
        data.read("x", [0], Box.of_ranges([(0, 1), (0, 2), (0, 3), (0, 4), (1, 2)]), out)  # the second modality only
        np.testing.assert_array_equal(out[0], want[0][0][:2, :3, :, 1:].astype(np.float32))


def test_files_with_several_arrays(tmp_path):
    for name in ("a", "b"):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            for dataset in ("u", "v"):
                file.create_dataset(dataset, data=RNG.random((1, 4, 4, 2))).attrs["layout"] = "NHWC"
    with open_dataset(tmp_path, ["{sample}.h5:u", "{sample}.h5:v"], None) as data:
        assert len(data) == 2 and data.fields["x"].shape == (4, 4, 4)
        out = np.empty((2, 4, 4, 4), np.float32)
        data.read("x", [1, 0], Box.of_shape(out.shape), out)
    for k, name in enumerate("ba"):
        with h5py.File(tmp_path / f"{name}.h5") as file:
            np.testing.assert_array_equal(out[k], np.concatenate([file["u"][0], file["v"][0]], -1).astype(np.float32))
    with pytest.raises(DataError, match=r'expected one array, or its name .* "{sample}.h5:u", got u, v'):
        open_dataset(tmp_path, "{sample}.h5", None)
    with pytest.raises(DataError, match=r"data.unpack: expected true with several datasets per input"):
        open_dataset(tmp_path, ["{sample}.h5:u", "{sample}.h5:v"], None, unpack=False)


def test_modalities_on_other_grids_are_refused(tmp_path):
    write_patterns(tmp_path / "p_t1.nii", np.zeros((4, 4, 4), np.int16))
    write_patterns(tmp_path / "p_t2.nii", np.zeros((4, 4, 5), np.int16))
    with pytest.raises(DataError, match=r"expected arrays on one grid.*\(1, 4, 4, 4, 1\), \(1, 4, 4, 5, 1\)"):
        open_dataset(tmp_path, ["{sample}_t1.nii", "{sample}_t2.nii"], None)


def write_held_out(path, samples=4, groups=None, times=None):
    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=np.zeros((samples, 4, 4, 1), np.float32)).attrs["layout"] = "NHWC"
        if groups is not None:
            file["simulation"] = groups
        if times is not None:
            file["time"] = times
            file["time"].attrs["units"] = "days since 2017-12-30"
            file["time"].make_scale()
            file["inputs"].dims[0].attach_scale(file["time"])


def held(dataset, *names):
    return np.flatnonzero(held_out(dataset, names)).tolist()


def test_names_of_files_simulations_and_years(tmp_path):
    """A name is a file if there is one of this name, else a simulation, else a year."""
    write_held_out(tmp_path / "run1.h5", groups=[0, 0, 5, 2018], times=[0, 1, 2, 3])
    write_held_out(tmp_path / "run2.h5", 2, groups=[5, 1], times=[1, 2])
    write_held_out(tmp_path / "2019.nc", 1, groups=[2], times=[0])
    with open_dataset(tmp_path, targets=None) as found:
        assert found.names == ["2019.nc 1", "run1.h5 4", "run2.h5 2"]
        assert held(found, "run2") == held(found, "run2.h5") == held(found, "*/run2*") == [5, 6]
        assert held(found, "run?") == [1, 2, 3, 4, 5, 6] and held(found, "2019") == [0]
        assert held(found, "5") == [3, 5] and held(found, "5", "run2", "2019") == [0, 3, 5, 6]
        assert held(found, "2018") == [4] and held(found, "2017") == [0, 1, 2, 5]
        with pytest.raises(DataError, match=r"got 'run3', to which no sample belongs; files: 2019.nc 1, run1.h5 4"):
            held(found, "2018", "run3")
        with pytest.raises(DataError, match=r"expected some of the 7 samples, got all of them by 'run\?', '2019'"):
            held(found, "run?", "2019")


def test_years_of_pairs_of_times(tmp_path):
    write_held_out(tmp_path / "a.h5", 6, times=[0, 1, 2, 3, 4, 5])
    with open_dataset(tmp_path / "a.h5", "inputs", {"target": "inputs"}) as found:
        assert held(found, "2018") == [2, 3, 4, 5] and held(TimeSteps(found, 1), "2018") == [2, 3, 4]


def test_groups_of_arrays():
    found = ArrayDataset({"x": np.zeros((3, 4, 4, 1))}, (), groups=[7, 8, 7])
    assert held(found, "8") == [1]
    with pytest.raises(DataError, match="got '2018', to which no sample belongs"):
        held(found, "2018")
    times = ArrayDataset({"x": np.zeros((5, 4, 4, 1))}, (), groups=[7, 7, 8, 8, 8])
    assert held(TimeSteps(times, 1), "8") == [1, 2]


@pytest.mark.parametrize("units, step", [("hours", 3600), ("days", 86400), ("seconds", 1), ("minutes", 60)])
def test_years_are_those_of_the_calendar(units, step):
    begin = datetime.datetime(1999, 12, 30, 12, 30)
    times = np.arange(-40000, 40000, 777.0) * (86400 // step if step > 60 else 8640)
    want = [(begin + datetime.timedelta(seconds=time * step)).year for time in times]
    assert years(times, f"{units} since 1999-12-30 12:30:00").tolist() == want


def test_years_of_other_calendars():
    days = np.array([-1.0, 0.0, 58.0, 59.0, 306.0, 365.0, 366.0])
    assert years(days, "days since 2000-03-01", "noleap").tolist() == [2000] * 4 + [2001, 2001, 2001]
    assert years(days, "days since 2000-01-01", "366_day").tolist() == [1999] + [2000] * 5 + [2001]
    assert years(days, "days since 2000-01-01", "julian") is None and years(days, "months since 2000-01-01") is None
    for units in ("days since 0000-00-00", "days since 2001-13-01"):
        assert years(days, units) is None and years(days, units, "noleap") is None


N, GRID = 4, (5, 6)
TEMPERATURE = RNG.integers(-300, 300, (N, *GRID)).astype(np.int16)
CURRENT = RNG.standard_normal((N, *GRID)).astype(">f8")
MASK = RNG.integers(0, 2, (N, *GRID)).astype(np.uint8)
SEPARATE_CHANNELS = np.stack([TEMPERATURE * 0.25 + 1, CURRENT, MASK], -1)
NAMES = ["ocean/temperature", "current", "mask"]


@pytest.fixture(scope="module")
def separate_path(tmp_path_factory):
    """Return a file as a model of the ocean writes it: variables of their own, with coordinates and no layout."""
    path = tmp_path_factory.mktemp("channels") / "ocean.nc"
    with h5py.File(path, "w") as file:
        for name, values in zip(NAMES, (TEMPERATURE, CURRENT, MASK)):
            file.create_dataset(name, data=values, chunks=(2, 5, 3), compression=1)
        file["ocean/temperature"].attrs.update(scale_factor=0.25, add_offset=1.0, units=np.bytes_("K"))
        file["current"].attrs["units"] = np.array([b"m s-1"])
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
def test_boxes_are_those_of_stacked_datasets(separate_path, low):
    with Hdf5Dataset(separate_path, {"x": NAMES}, {"t": ["current", "mask"]}) as dataset:
        field = dataset.fields["x"]
        assert field.shape == (*GRID, 3) and field.channel_names == ["temperature", "current", "mask"]
        assert field.attributes["units"] == "K, m s-1, 1" and dataset.fields["t"].shape == (*GRID, 2)
        for high in range(low + 1, 4):
            box = Box((-1, 1, -2, low), (3, 6, 4, high))
            out = np.full(box.shape, -7.0)
            filled = dataset.read("x", [2, 0, 3], box, out)
            want = np.full(box.shape, -7.0)
            want[1:, :4, 2:] = SEPARATE_CHANNELS[[2, 0, 3], 1:, :4, low:high]
            np.testing.assert_array_equal(out, want)
            np.testing.assert_array_equal(out[filled], want[1:, :4, 2:])


def test_a_map_in_time_needs_no_layout(separate_path):
    with Hdf5Dataset(separate_path, "current", None) as dataset:
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
def test_other_shapes_are_refused(separate_path, names):
    with pytest.raises(DataError, match=r"expected arrays on one grid, \(N, \*spatial\)"):
        Hdf5Dataset(separate_path, {"x": names}, None)


def test_files_with_other_packing_are_one_data_set(separate_path, tmp_path):
    with h5py.File(tmp_path / "b.nc", "w") as file:
        for name, values in zip(NAMES, SEPARATE_CHANNELS.transpose(3, 0, 1, 2)):
            file[name] = values
    with open_dataset([separate_path, tmp_path / "b.nc"], {"x": NAMES}, None) as dataset:
        out = np.empty((2, *GRID, 3))
        dataset.read("x", [1, N + 1], Box.of_shape(out.shape), out)
        np.testing.assert_array_equal(out[0], out[1])
        np.testing.assert_array_equal(out[0], SEPARATE_CHANNELS[1])
