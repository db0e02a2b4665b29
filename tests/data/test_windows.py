"""Samples of different size and their windows, and positions of foreground: what is read lies inside."""

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halograd.data import (
    ArrayDataset,
    Batch,
    DataError,
    Loader,
    Rules,
    StandardAugmentation,
    channel_statistics,
    open_dataset,
)
from halograd.data import windows as module
from halograd.data.masked import Masked
from halograd.data.normalize import ChannelStatistics
from halograd.data.source import sample_shape
from halograd.data.steps import TimeSteps
from halograd.data.structure import Field
from halograd.data.survey import count_classes, find_invalid, look_at, look_at_data
from halograd.data.targets import TargetRange, TargetReduction
from halograd.data.windows import Foreground, SampleWindows, find_foreground, most_positions
from halograd.dtensor import Box
from tests.training.runs import write_arrays

SIZES = [(8, 12), (20, 4), (12, 10), (6, 6)]
WINDOW = (10, 8)
SEED = 5


class Samples:
    """Double of a data set of samples of different size, in memory: inputs, targets on half the grid, rows, numbers."""

    def __init__(self, sizes=SIZES):
        rng = np.random.default_rng(1)
        shapes = {"x": lambda h, w: (h, w, 2), "t": lambda h, w: (h // 2, w // 2, 1), "r": lambda h, w: (1, w, 1)}
        self.samples = [{name: rng.random(shape(*size)) for name, shape in shapes.items()} for size in sizes]
        for sample in self.samples:
            sample["v"] = rng.random(3)
        self.extents = {
            name: np.array([sample[name].shape[:-1] for sample in self.samples], np.int64).reshape(len(sizes), -1)
            for name in self.samples[0]
        }
        self.fields = {
            name: Field(name, "channels last", (*own.max(axis=0).tolist(), self.samples[0][name].shape[-1]),
                        ["a", "b", "c"][: self.samples[0][name].shape[-1]], name in "tr")
            for name, own in self.extents.items()
        }  # fmt: skip
        self.lenient = frozenset()

    def place(self, index):
        return f"sample {index}"

    def read(self, name, indices, box, out):
        for k in range(*box.ranges[0]):
            values = self.samples[indices[k]][name]
            part = Box.of_ranges(box.ranges[1:])
            assert Box.of_shape(values.shape).contains(part), "only elements of the sample are read"
            out[k - box.start[0]] = values[part.slices()]
        return tuple(slice(0, n) for n in out.shape)


def windows_of(dataset, window=WINDOW):
    return SampleWindows(dataset, {"x": (*window, 2)}, SEED)


def padded(values, starts, shape, outside):
    """Return the window of a sample, padded on all sides."""
    around = [(max(0, -start), max(0, start + n - m)) for start, n, m in zip(starts, shape, values.shape)]
    whole = np.pad(values, around, constant_values=outside)
    return whole[tuple(slice(start + low, start + low + n) for start, (low, _), n in zip(starts, around, shape))]


@given(st.integers(0, 99), st.booleans(), st.data())
@settings(max_examples=25)
def test_a_window_is_the_slice_of_the_padded_sample(epoch, augmented, data):
    dataset = Samples()
    windows = windows_of(dataset)
    assert {name: field.shape for name, field in windows.fields.items()} == {
        "x": (10, 8, 2), "t": (5, 4, 1), "r": (1, 8, 1), "v": (3,)
    }  # fmt: skip
    assert [windows.pads(name) for name in "xtrv"] == [True, True, False, False]
    batch = Batch((2, 0, 1, 3), 4, epoch, 0, augmented, patches=(0, 3, 1, 0))
    for name, field in windows.fields.items():
        want = []
        for k, index in enumerate(batch.indices):
            starts = (*windows.starts(name, batch, k), 0) if name != "v" else (0,)
            want.append(padded(dataset.samples[index][name], starts, field.shape, windows.outside[name]))
        whole = np.stack(want)
        # Also beyond the window: nothing is read there.
        low = [data.draw(st.integers(-1, n - 1)) for n in whole.shape] if name != "v" else [0, 0]
        high = [data.draw(st.integers(a + 1, n + 1)) for a, n in zip(low, whole.shape)] if name != "v" else [4, 3]
        box = Box(tuple(low), tuple(high))
        out, expected = np.full(box.shape, 7.0), np.full(box.shape, 7.0)
        inside = box & Box.of_shape(whole.shape)
        expected[inside.slices(origin=box.start)] = whole[inside.slices()]
        filled = windows.read_batch(name, batch, box, out)
        assert filled == inside.slices(origin=box.start) or not inside.size
        np.testing.assert_array_equal(out, expected)


def test_places():
    """Windows lie within larger samples, in all places; smaller samples, and unchanged ones, are in the middle."""
    windows = windows_of(Samples())
    found = {k: {windows.start(Batch((2, 1), 2, epoch, 0, True), k) for epoch in range(200)} for k in (0, 1)}
    # The unit is that of the coarser grid, two elements of x: 12 x 10 holds 10 x 8 in two places along each axis.
    assert found[0] == {(a, b) for a in (0, 1) for b in (0, 1)}
    assert found[1] == {(a, -1) for a in range(6)}
    middle = Batch((2, 1, 3), 3, 0, 0)
    assert [windows.start(middle, k) for k in range(3)] == [(0, 0), (2, -1), (-1, -1)]
    same = [windows.start(Batch((2,), 1, 4, 0, True, patches=(p,)), 0) for p in range(20)]
    assert len(set(same)) == 4, "patches of a sample are drawn one by one"
    assert windows.starts("t", middle, 1) == (2, -1) and windows.starts("x", middle, 1) == (4, -2)


def test_a_sample_is_read_beyond_its_window():
    dataset = Samples()
    windows, batch = windows_of(dataset, (4, 4)), Batch((2,), 1, 3, 0, True)
    (a, b), out = windows.starts("x", batch, 0), np.empty((4 + 40, 4 + 40, 2))
    windows.read("x", batch, 0, Box((-20, -20, 0), (24, 24, 2)), out)
    np.testing.assert_array_equal(out, padded(dataset.samples[2]["x"], (a - 20, b - 20, 0), out.shape, np.nan))


@pytest.mark.parametrize("rules", [Rules(flips=["height", "width"]), Rules(flips=["width"], turns=True)])
def test_augmented_windows_are_loaded(rules):
    """Padding is 0 after normalization, and moves with the sample."""
    dataset = Samples()
    del dataset.fields["r"]
    windows = windows_of(dataset, (8, 8))
    augmentation = StandardAugmentation(rules, windows, SEED)
    statistics = {"x": ChannelStatistics(np.array([0.5, 0.25]), np.array([2.0, 0.5]), ("none", "none"), 9)}
    boxes = {name: Box((0, 1, 0, 0), (4, *windows.fields[name].shape)) for name in ("x", "t")}
    batch, first = Batch((0, 1, 2, 3), 4, 6, 0, True), {}
    whole = {name: Box.of_shape((4, *windows.fields[name].shape)) for name in boxes}
    with Loader(
        dataset, whole, statistics=statistics, windows=windows, augmentation=augmentation, dtype="float64"
    ) as loader:
        for loaded in loader.iterate([Batch((2, 2, 2, 2), 4, 0, 0, True), batch]):
            first = {name: array.copy() for name, array in loaded.arrays.items()}
    for k, index in enumerate(batch.indices):
        placement = augmentation.placement(batch, k)
        for name in boxes:
            field = windows.fields[name]
            starts = (*windows.starts(name, batch, k), 0)
            want = padded(dataset.samples[index][name], starts, field.shape, 0.0 if name == "t" else np.nan)
            want = want.transpose(*placement.axes, 2)
            want = np.flip(want, [axis for axis in range(2) if placement.mirrored[axis]])
            if name == "x":
                want = np.nan_to_num((want - statistics["x"].mean) / statistics["x"].std, nan=0.0)
            np.testing.assert_allclose(first[name][k], want, rtol=1e-14)
    with Loader(
        dataset, boxes, statistics=statistics, windows=windows, augmentation=augmentation, dtype="float64"
    ) as loader:
        for loaded in loader.iterate([batch]):
            for name, array in loaded.arrays.items():
                np.testing.assert_array_equal(array, first[name][:, 1:])


def test_what_is_refused():
    with pytest.raises(DataError, match=r"data.patches: expected a window \(9, 8\) of whole parts of every grid, got"):
        windows_of(Samples(), (9, 8))
    odd = Samples()
    odd.extents["t"][1] = (9, 2)
    with pytest.raises(DataError, match=r"sample 1: expected extents of 't' that are multiples of \[1, 1\], the same"):
        windows_of(odd)
    with pytest.raises(DataError, match=r"shifts: expected samples of at least the window's extent along width"):
        StandardAugmentation(Rules(shifts=["width"]), windows_of(Samples()), SEED)


SEVERAL_SIZES = ((2, 8, 12), (1, 80, 4), (3, 12, 8))  # samples, rows and columns of each file
NAMES = {"inputs": {"x": "inputs", "height": "height"}, "targets": {"coarse": "coarse", "mask": "mask"}}


def write(folder):
    """Write files of samples of different size; return the fields of every sample by name."""
    rng, samples = np.random.default_rng(3), []
    for i, (n, *grid) in enumerate(SEVERAL_SIZES):
        half = [extent // 2 for extent in grid]
        arrays = {
            "inputs": rng.standard_normal((n, *grid, 2)).astype(np.float32),
            "mask": rng.integers(0, 3, (n, *grid)).astype(np.uint8),
            "coarse": rng.random((n, *half)).astype(np.float32),
            "height": rng.random(grid).astype(np.float32),
        }
        write_arrays(folder / f"s{i}.h5", arrays, inputs="NHWC", height="HW")
        for k in range(n):
            found = {name: arrays[name][k] for name in ("inputs", "mask", "coarse")} | {"height": arrays["height"]}
            found = {name: values.reshape(*values.shape[:2], -1) for name, values in found.items()}
            samples.append({"x": found.pop("inputs"), **found})
    return samples


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    samples = write(folder)
    with open_dataset(folder, several_sizes=True, **NAMES) as dataset:
        yield dataset, samples


def test_boxes_lie_inside_the_samples(written):
    dataset, samples = written
    assert dataset.fields["x"].shape == (80, 12, 2) and dataset.fields["coarse"].shape == (40, 6, 1)
    for name in dataset.fields:
        shapes = [sample[name].shape for sample in samples]
        assert dataset.extents[name].tolist() == [list(shape[:-1]) for shape in shapes]
        assert [sample_shape(dataset, name, k) for k in range(len(samples))] == shapes
    for name, (low, high) in (("x", (3, 30)), ("mask", (0, 80)), ("coarse", (2, 5)), ("height", (7, 9))):
        indices = (3, 0, 2)
        box = Box((0, low, -1, 0), (3, high, 20, dataset.fields[name].shape[-1]))
        out, want = np.full(box.shape, 7.0, np.float32), np.full(box.shape, 7.0, np.float32)
        for k, index in enumerate(indices):
            part = samples[index][name][low:high]
            want[k, : part.shape[0], 1 : 1 + part.shape[1]] = part
        dataset.read(name, indices, box, out)
        np.testing.assert_array_equal(out, want)


def test_statistics_counts_and_checks(written):
    dataset, samples = written
    flat = np.concatenate([sample["x"].reshape(-1, 2) for sample in samples]).astype(np.float64)
    found = channel_statistics(dataset, "x", range(6))
    assert found.count == len(flat)
    np.testing.assert_allclose(found.mean, flat.mean(0), atol=1e-12)
    np.testing.assert_allclose(found.std, flat.std(0), rtol=1e-10)
    labels = np.concatenate([sample["mask"].ravel() for sample in samples]).astype(np.int64)
    assert count_classes(dataset, "mask", 3, range(6)).tolist() == np.bincount(labels).tolist()
    assert count_classes(dataset, "mask", 3, range(6), TargetReduction("center", (2, 2))).sum() == labels.size // 4
    assert look_at(dataset, "x").constant == {}
    assert look_at_data(dataset, {"x": found}, 2, 64) > 0
    limits = {"mask": TargetRange(0, 1, whole=True)}
    wrong = {k for k, sample in enumerate(samples) if sample["mask"].max() > 1}
    assert set(find_invalid(dataset, limits, range(6))) == wrong


def test_views_have_the_sizes_of_their_samples(written):
    dataset, samples = written
    steps = TimeSteps(dataset, 1)
    assert steps.rows.tolist() == [0, 3, 4]
    assert steps.extents["x"].tolist() == [[8, 12], [12, 8], [12, 8]]
    limits = {"mask": TargetRange(0, 1, whole=True)}
    before = dataset.lenient
    masked = Masked(dataset, {"weights": ["mask"]}, {"weights": 1}, limits)
    assert masked.extents["weights"].tolist() == dataset.extents["mask"].tolist()
    out = np.empty((1, *sample_shape(masked, "weights", 2)), np.float32)
    masked.read("weights", [2], Box.of_shape(out.shape), out)
    np.testing.assert_array_equal(out[0], samples[2]["mask"] <= 1)
    beyond = np.full((1, 40, 40, 1), 0.5, np.float32)
    masked.read("weights", [2], Box.of_shape(beyond.shape), beyond)
    largest, (high, wide) = masked.fields["weights"].shape, samples[2]["mask"].shape[:2]
    assert (high, wide) != largest[:2]
    assert not beyond[:, high : largest[0], : largest[1]].any() and not beyond[:, : largest[0], wide : largest[1]].any()
    dataset.lenient = before


def test_several_what_is_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(DataError, match=r"s1.h5: 'inputs': expected samples of shape \(8, 12, 2\) as in .*s0.h5, got"):
        open_dataset(tmp_path, **NAMES)
    with h5py.File(tmp_path / "s1.h5", "r+") as file:
        del file["coarse"]
        file["coarse"] = np.zeros((1, 80, 4), np.float32)
    message = (
        r"s1.h5: 'coarse': expected extents with the factors of \(4, 6\) for \(8, 12\) of 'inputs' as in .*s0.h5, got "
        r"\(80, 4\) for \(80, 4\) of 'inputs'; write it so, or leave that file out"
    )
    with pytest.raises(DataError, match=message):
        open_dataset(tmp_path, several_sizes=True, **NAMES)
    with h5py.File(tmp_path / "s1.h5", "r+") as file:
        del file["inputs"]
    write_arrays(tmp_path / "more.h5", {"inputs": np.zeros((1, 80, 4, 3), np.float32)}, inputs="NHWC")
    with h5py.File(tmp_path / "s1.h5", "r+") as file, h5py.File(tmp_path / "more.h5") as more:
        more.copy("inputs", file)
    (tmp_path / "more.h5").unlink()
    message = r"s1.h5: 'inputs': expected samples with 2 channel\(s\) as in .*s0.h5, got 3; write it so, or leave"
    for several_sizes in (False, True):
        with pytest.raises(DataError, match=message):
            open_dataset(tmp_path, several_sizes=several_sizes, **NAMES)


FOREGROUND_SEED = 3


@pytest.fixture(scope="module")
def foreground_dataset():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, (3, 20, 24, 1)) * (rng.random((3, 20, 24, 1)) < 0.3)
    labels[2], labels[1, 0, 0] = 0, 9
    half = labels[:, ::2, ::2]
    return ArrayDataset({"x": rng.random((3, 20, 24, 2)), "t": labels, "half": half}, targets=("t", "half"))


def test_positions_are_those_of_the_labels(foreground_dataset, monkeypatch):
    labels = foreground_dataset.arrays["t"][..., 0]
    found = find_foreground(foreground_dataset, "t", range(3), seed=FOREGROUND_SEED)
    for index, own in found.items():
        assert own[0].tolist() == np.flatnonzero(labels[index] > 0).tolist()
    assert (
        find_foreground(foreground_dataset, "t", [1], ignored=9)[1][0].tolist()
        == np.flatnonzero(labels[1] % 9 > 0).tolist()
    )
    by_class = find_foreground(foreground_dataset, "t", range(2), [1, 3], FOREGROUND_SEED)
    for index, own in by_class.items():
        assert {c: at.tolist() for c, at in own.items()} == {
            c: np.flatnonzero(labels[index] == c).tolist() for c in (1, 3)
        }
    few = find_foreground(foreground_dataset, "t", range(2), [1, 3], FOREGROUND_SEED, most=7)
    monkeypatch.setattr(module, "PART", 60)  # blocks of two rows
    assert str(find_foreground(foreground_dataset, "t", range(2), [1, 3], FOREGROUND_SEED, most=7)) == str(few)
    for index, own in few.items():
        assert all(len(at) == 7 and set(at) <= set(by_class[index][c]) for c, at in own.items())
    assert [most_positions(n, 2) for n in (10, 10**4, 10**9)] == [10**4, 3355, 100]
    table = Foreground("t", dict.fromkeys(range(3), (20, 24)), found)
    assert table.empty == [2] and table.draw(2, np.random.default_rng(0)) is None
    with pytest.raises(DataError, match=r"data.foreground_classes: expected a target of class indices, got 'x' with 2"):
        find_foreground(foreground_dataset, "x", [0], [1])


@pytest.mark.parametrize("name", ["t", "half"])
def test_windows_lie_around_foreground(foreground_dataset, name):
    """The middle of a window is a position of a class, as far as the sample goes; each class is as likely."""
    windows = SampleWindows(foreground_dataset, {"x": (6, 8, 2)}, FOREGROUND_SEED)
    shape = foreground_dataset.fields[name].shape[:-1]
    classes = find_foreground(foreground_dataset, name, range(3), [1, 2], FOREGROUND_SEED)
    windows.foreground = Foreground(name, dict.fromkeys(range(3), shape), classes)
    labels, ratio, hits = foreground_dataset.arrays[name][..., 0], 20 // shape[0], {1: 0, 2: 0}
    for epoch in range(100):
        batch = Batch((0, 1, 2), 3, epoch, 0, True, centered=(True, True, True))
        for k in range(2):
            (low, left), n = windows.starts(name, batch, k), 6 // ratio
            near = labels[k, low : low + n, left : left + 8 // ratio]
            inner = 0 < low < shape[0] - n and 0 < left < shape[1] - 8 // ratio
            unit = 1 if name == "half" else 2  # windows of 3 x 4 units start at elements of the coarse grid
            middle = near[unit : 2 * unit, 2 * unit : 3 * unit] if inner else near
            assert np.isin([1, 2], middle).any()
            hits[1] += bool((middle == 1).any())
            hits[2] += bool((middle == 2).any())
    assert min(hits.values()) > 60
    alone = [windows.start(Batch((2,), 1, e, 0, True, centered=(True,)), 0) for e in range(50)]
    assert alone == [windows.start(Batch((2,), 1, e, 0, True), 0) for e in range(50)], "no foreground: any place"
    shifted = SampleWindows(foreground_dataset, {"x": (6, 8, 2)}, FOREGROUND_SEED)
    shifted.foreground = windows.foreground
    shifted.shift(["width"])
    for epoch in range(50):
        batch = Batch((0,), 1, epoch, 0, True, centered=(True,))
        low, left = shifted.starts(name, batch, 0)
        rolled = np.roll(labels[0], -left, 1)[low : low + 6 // ratio, : 8 // ratio]
        assert np.isin([1, 2], rolled).any()
