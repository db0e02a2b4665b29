"""Windows of samples of different size: each is the slice of the padded whole sample, whatever box is read."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halograd.data import Batch, DataError, Loader, Rules, StandardAugmentation
from halograd.data.normalize import ChannelStatistics
from halograd.data.structure import Field
from halograd.data.windows import SampleWindows
from halograd.dtensor import Box

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
