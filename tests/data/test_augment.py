"""Augmentation: each rank's box equals its part of the whole sample augmented in NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.data import Batch, DataError, Rules, StandardAugmentation
from halograd.data.structure import Field
from halograd.data.windows import SampleWindows
from halograd.dtensor import Box

N = 5
BOTH = ["height", "width"]
FLAGS = st.booleans()


class Arrays:
    """Double of a data set, in memory."""

    def __init__(self, arrays, names=None):
        self.arrays, self.fields = arrays, fields_of(arrays, names)

    def read(self, name, indices, box, out):
        values = self.arrays[name][list(indices)]
        part = box & Box.of_shape(values.shape)
        filled = part.slices(origin=box.start)
        out[filled] = values[part.slices()]
        return filled


def fields_of(arrays, names=None):
    kind = "channels last"
    found = {}
    for name, array in arrays.items():
        channels = (names or {}).get(name) or [f"channel {k}" for k in range(array.shape[-1])]
        found[name] = Field(name, kind, array.shape[1:], channels, name == "t")
    return found


def augmented(rules, arrays, wanted=None, seed=0, names=None):
    """Return the augmentation of arrays; of windows of the shapes `wanted`, if they are cropped."""
    windows = SampleWindows(Arrays(arrays, names), wanted if rules.crop else None, seed, "data.augment.crop")
    return StandardAugmentation(rules, windows, seed)


def varied(x, placement, starts, window):
    """Return a whole sample augmented in NumPy: shifted, cropped, rotated, flipped."""
    axes = range(len(window))
    x = np.roll(x, [-s for s in starts], list(axes))
    x = x[tuple(slice(n) for n in window)]
    x = x.transpose(*placement.axes, len(window))
    return np.flip(x, [axis for axis in axes if placement.mirrored[axis]])


@st.composite
def cases(draw):
    rank = draw(st.integers(1, 3))
    unit = [draw(st.integers(1, 5)) for _ in range(rank)]
    if rank > 1:
        unit[-1] = unit[-2]
    ratios = {"x": draw(st.integers(1, 3)), "t": draw(st.integers(1, 3))}
    axes = ("depth", "height", "width")[3 - rank :]
    chosen = st.lists(st.sampled_from(axes), unique=True)
    crop = draw(FLAGS)
    window = [draw(st.integers(1, n)) for n in unit] if crop else list(unit)
    if rank > 1:
        window[-1] = window[-2]
    rules = Rules(flips=draw(chosen), turns=rank > 1 and draw(FLAGS), shifts=draw(chosen), crop=crop)
    return unit, ratios, window, rules


@given(cases(), st.data())
def test_boxes_are_those_of_the_whole_sample(case, data):
    """Boxes of two fields on different grids match the whole sample; elements outside the sample are not changed."""
    unit, ratios, window, rules = case
    rng = np.random.default_rng(1)
    arrays = {name: rng.random((N, *(n * r for n in unit), 2)) for name, r in ratios.items()}
    arrays["v"] = rng.random((N, 4))
    wanted = {"x": (*(n * ratios["x"] for n in window), 2)}
    augmentation = augmented(rules, arrays, wanted, seed=3)
    indices = (2, 0, 4, 4)
    batch = Batch(indices, 4, data.draw(st.integers(0, 50)), 0, True)
    for name, r in ratios.items():
        shape = (4, *(n * r for n in window), 2)
        assert augmentation.fields[name].shape == shape[1:]
        places = [(augmentation.placement(batch, k), augmentation.windows.starts(name, batch, k)) for k in range(4)]
        whole = np.stack([varied(arrays[name][i], *place, shape[1:-1]) for i, place in zip(indices, places)])
        low = [data.draw(st.integers(-1, n)) for n in shape]
        box = Box.of_ranges([(a, data.draw(st.integers(a, n + 1))) for a, n in zip(low, shape)])
        out = np.full(box.shape, 7.0)
        augmentation.read(name, batch, box, out)
        want = np.full(box.shape, 7.0)
        inside = box & Box.of_shape(shape)
        if inside.size:
            want[inside.slices(origin=box.start)] = whole[inside.slices()]
        np.testing.assert_array_equal(out, want)
    out = np.empty((4, 4))
    augmentation.read("v", batch, Box.of_shape((4, 4)), out)
    np.testing.assert_array_equal(out, arrays["v"][list(indices)])


@given(cases(), st.data())
def test_what_has_one_row_is_the_same_along_it(case, data):
    """Weights that have one value per row, column or sample are augmented like the full maps that they represent."""
    unit, ratios, window, rules = case
    full = [n * ratios["x"] for n in unit]
    flat = [data.draw(FLAGS) for _ in unit]
    if rules.turns:
        flat[-1] = flat[-2]
    rng = np.random.default_rng(2)
    arrays = {"x": rng.random((N, *full, 2)), "w": rng.random((N, *(1 if f else n for f, n in zip(flat, full)), 1))}
    wanted = {"x": (*(n * ratios["x"] for n in window), 2)}
    batch = Batch((2, 0, 4), 3, data.draw(st.integers(0, 50)), 0, True)
    plain = {"x": arrays["x"], "w": np.broadcast_to(arrays["w"], (*arrays["x"].shape[:-1], 1)).copy()}
    found = []
    for some in (arrays, plain):
        augmentation = augmented(rules, some, wanted, seed=3)
        shape = augmentation.fields["w"].shape
        out = np.empty((3, *shape))
        augmentation.read("w", batch, Box.of_shape(out.shape), out)
        found.append(out)
    np.testing.assert_array_equal(np.broadcast_to(found[0], found[1].shape), found[1])


def test_turns_are_those_of_numpy():
    """All four rotations match NumPy's, with and without a flip."""
    x = np.random.default_rng(1).random((1, 6, 6, 1))
    augmentation = augmented(Rules(flips=BOTH, turns=True), {"x": x})
    turned = [np.rot90(x[0], k) for k in range(4)]
    known = turned + [np.flip(y, 0) for y in turned]
    found = set()
    for epoch in range(60):
        out = np.empty_like(x)
        augmentation.read("x", Batch((0,), 1, epoch, 0, True), Box.of_shape(x.shape), out)
        found.add(next(k for k, y in enumerate(known) if (y == out[0]).all()))
    assert found == set(range(8))


@given(st.integers(0, 200))
def test_vectors_keep_pointing_where_they_point(epoch):
    """Vector components are augmented correctly: the gradient of an augmented field equals its augmented gradient."""
    n = 8
    rng = np.random.default_rng(epoch)
    f = rng.random((1, n, n))
    gradient = [np.roll(f, -1, a) - np.roll(f, 1, a) for a in (1, 2)]
    x = np.stack([gradient[1], f, gradient[0]], axis=-1)
    rules = Rules(flips=BOTH, turns=True, shifts=BOTH, vectors=[["dy", "dx"]])
    augmentation = augmented(rules, {"x": x}, names={"x": ["dx", "f", "dy"]})
    batch, out = Batch((0,), 1, epoch, 0, True), np.empty_like(x)
    augmentation.read("x", batch, Box.of_shape(x.shape), out)
    found = out[..., 1]
    for axis, channel in ((1, 2), (2, 0)):
        np.testing.assert_allclose(out[..., channel], np.roll(found, -1, axis) - np.roll(found, 1, axis), atol=1e-12)
    for channel in range(3):  # ranks whose channels are cut
        part = np.empty((*x.shape[:-1], 1))
        box = Box((0, 0, 0, channel), (1, n, n, channel + 1))
        augmentation.read("x", batch, box, part)
        np.testing.assert_array_equal(part[..., 0], out[..., channel])


@given(st.data())
def test_numbers_are_altered_as_in_the_whole_sample(data):
    shape = (3, 7, 5, 4)
    x = np.random.default_rng(2).random(shape)
    arrays = {"x": x, "t": x.copy(), "v": x[:, 0, 0]}
    rules = Rules(noise=0.1, brightness=0.2, contrast=0.3)
    augmentation = augmented(rules, arrays, seed=9)
    batch = Batch((0, 1, 2), 3, data.draw(st.integers(0, 9)), 0, True)
    for name, array in arrays.items():
        whole = array.copy()
        augmentation.alter(name, batch, Box.of_shape(array.shape), whole)
        box = Box.of_ranges([sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2))) for n in array.shape])
        part = array[box.slices()].copy()
        augmentation.alter(name, batch, box, part)
        np.testing.assert_array_equal(part, whole[box.slices()])
        assert (whole == array).all() == (name == "t")
        plain = array.copy()
        augmentation.alter(name, Batch((0, 1, 2), 3, 0, 0), Box.of_shape(array.shape), plain)
        np.testing.assert_array_equal(plain, array)


def test_what_is_added_has_the_size_that_was_asked_for():
    shape = (50, 40, 30, 2)
    arrays = {"x": np.empty(shape)}
    batch, box = Batch(tuple(range(50)), 50, 0, 0, True), Box.of_shape(shape)
    noise = np.zeros(shape)
    augmented(Rules(noise=0.5), arrays).alter("x", batch, box, noise)
    assert noise.std() == pytest.approx(0.5, rel=0.02) and abs(noise.mean()) < 0.01
    assert len(np.unique(noise.astype(np.float32))) > 0.99 * noise.size, "every row and channel has numbers of its own"
    terms = np.zeros(shape)
    augmented(Rules(brightness=0.5), arrays).alter("x", batch, box, terms)
    assert (terms == terms[:, :1, :1]).all() and 0.4 < np.abs(terms).max() <= 0.5 and terms.min() < 0
    factors = np.ones(shape)
    augmented(Rules(contrast=0.5), arrays).alter("x", batch, box, factors)
    assert (factors == factors[:, :1, :1]).all() and 0.5 <= factors.min() < 0.6 and 1.4 < factors.max() <= 1.5
    some = np.zeros(shape)
    rules = Rules(noise=0.5, brightness=0.5, probability={"noise": 0.4, "brightness": 0.0})
    augmented(rules, arrays).alter("x", batch, box, some)
    changed = some.any((1, 2, 3))
    assert 10 <= changed.sum() <= 30 and (some[changed] == noise[changed]).all()


def test_refusals():
    square, flat = np.empty((2, 6, 6, 2)), np.empty((2, 6, 4, 2))
    for arrays, rules, wanted, message in (
        ({"v": np.empty((2, 3))}, Rules(flips=["width"]), (3,), "expected samples with spatial axes"),
        ({"x": square}, Rules(flips=["depth"]), (6, 6, 2), "flips: expected axes of height, width, got 'depth'"),
        ({"x": flat}, Rules(turns=True), (6, 4, 2), "turns: expected as many rows as columns"),
        (
            {"x": square, "t": np.empty((2, 3, 3, 1))},
            Rules(crop=True),
            (3, 3, 2),
            r"crop: .* got 'x' of \(6, 6\) with",
        ),
        ({"x": square}, Rules(vectors=[["u", "v"]]), (6, 6, 2), "vectors: expected 2 channels of one dataset each"),
        ({"x": square, "y": square[..., 0]}, Rules(), (6, 6, 2), "expected samples of 2 spatial axes, got 'y'"),
    ):
        with pytest.raises(DataError, match=message):
            augmented(rules, arrays, {next(iter(arrays)): wanted})
    names = {"x": ["u", "a"], "y": ["v", "b"]}
    with pytest.raises(DataError, match="out of u, a; v, b, got u, v"):
        augmented(Rules(vectors=[["u", "v"]]), {"x": square, "y": square}, names=names)


def test_evaluation_sees_the_middle():
    x = np.arange(2 * 8 * 8.0).reshape(2, 8, 8, 1)
    augmentation = augmented(Rules(flips=["width"], crop=True), {"x": x}, {"x": (4, 6, 1)})
    out = np.empty((2, 4, 6, 1))
    augmentation.read("x", Batch((0, 1), 2, 0, 0), Box.of_shape(out.shape), out)
    np.testing.assert_array_equal(out, x[:, 2:6, 1:7])
    assert augmentation.fields["x"].shape == (4, 6, 1)
