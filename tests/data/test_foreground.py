"""Positions of foreground: those of the labels, bounded, the same for any reading, and in the middle of windows."""

import numpy as np
import pytest

from halograd.data import ArrayDataset, Batch, DataError
from halograd.data import windows as module
from halograd.data.windows import Foreground, SampleWindows, find_foreground, most_positions

SEED = 3


@pytest.fixture(scope="module")
def dataset():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, (3, 20, 24, 1)) * (rng.random((3, 20, 24, 1)) < 0.3)
    labels[2], labels[1, 0, 0] = 0, 9
    half = labels[:, ::2, ::2]
    return ArrayDataset({"x": rng.random((3, 20, 24, 2)), "t": labels, "half": half}, targets=("t", "half"))


def test_positions_are_those_of_the_labels(dataset, monkeypatch):
    labels = dataset.arrays["t"][..., 0]
    found = find_foreground(dataset, "t", range(3), seed=SEED)
    for index, own in found.items():
        assert own[0].tolist() == np.flatnonzero(labels[index] > 0).tolist()
    assert find_foreground(dataset, "t", [1], ignored=9)[1][0].tolist() == np.flatnonzero(labels[1] % 9 > 0).tolist()
    by_class = find_foreground(dataset, "t", range(2), [1, 3], SEED)
    for index, own in by_class.items():
        assert {c: at.tolist() for c, at in own.items()} == {
            c: np.flatnonzero(labels[index] == c).tolist() for c in (1, 3)
        }
    few = find_foreground(dataset, "t", range(2), [1, 3], SEED, most=7)
    monkeypatch.setattr(module, "PART", 60)  # blocks of two rows
    assert str(find_foreground(dataset, "t", range(2), [1, 3], SEED, most=7)) == str(few)
    for index, own in few.items():
        assert all(len(at) == 7 and set(at) <= set(by_class[index][c]) for c, at in own.items())
    assert [most_positions(n, 2) for n in (10, 10**4, 10**9)] == [10**4, 3355, 100]
    table = Foreground("t", dict.fromkeys(range(3), (20, 24)), found)
    assert table.empty == [2] and table.draw(2, np.random.default_rng(0)) is None
    with pytest.raises(DataError, match=r"data.foreground_classes: expected a target of class indices, got 'x' with 2"):
        find_foreground(dataset, "x", [0], [1])


@pytest.mark.parametrize("name", ["t", "half"])
def test_windows_lie_around_foreground(dataset, name):
    """The middle of a window is a position of a class, as far as the sample goes; each class is as likely."""
    windows = SampleWindows(dataset, {"x": (6, 8, 2)}, SEED)
    shape = dataset.fields[name].shape[:-1]
    classes = find_foreground(dataset, name, range(3), [1, 2], SEED)
    windows.foreground = Foreground(name, dict.fromkeys(range(3), shape), classes)
    labels, ratio, hits = dataset.arrays[name][..., 0], 20 // shape[0], {1: 0, 2: 0}
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
    shifted = SampleWindows(dataset, {"x": (6, 8, 2)}, SEED)
    shifted.foreground = windows.foreground
    shifted.shift(["width"])
    for epoch in range(50):
        batch = Batch((0,), 1, epoch, 0, True, centered=(True,))
        low, left = shifted.starts(name, batch, 0)
        rolled = np.roll(labels[0], -left, 1)[low : low + 6 // ratio, : 8 // ratio]
        assert np.isin([1, 2], rolled).any()
