"""Augmentation and smooth maps: each rank's box is its part of the whole sample, which a loop in NumPy computes."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halograd.data import Batch, ChannelStatistics, DataError, Loader, Rules, StandardAugmentation, warp
from halograd.data.source import ArrayDataset
from halograd.data.structure import Field
from halograd.data.targets import TargetRange
from halograd.data.warp import Displacement, GridMap, SmoothMap, linear_map, sample_block
from halograd.data.windows import SampleWindows
from halograd.dtensor import Box
from halograd.errors import UserError
from halograd.schema import build

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


BORDERS = ["reflect", "nearest", "wrap", "zero"]
SETTINGS = [
    {"rotate": 30.0},
    {"rotate": 180.0, "scale": [0.5, 1.6], "border": "zero"},
    {"stretch": [0.8, 1.2], "shear": 0.2, "border": "nearest", "flips": ["height"]},
    {"elastic": {"magnitude": 2.0, "spacing": 5.0}, "border": "wrap"},
    {"rotate": 20.0, "elastic": {"magnitude": 1.0, "spacing": 4.0}, "turns": True, "shifts": ["width"], "crop": True},
]


class Swirl(StandardAugmentation):
    """An augmentation with a map of its own only: positions turn about the first corner."""

    def map(self, batch, k, positions):
        angle = 0.1 * self.random("", batch, k).random()
        first, *rest, last = positions
        return [
            first * math.cos(angle) - last * math.sin(angle),
            *rest,
            last * math.cos(angle) + first * math.sin(angle),
        ]


def dataset_of(rank, edge=12, ratio=2):
    """Return random inputs, classes on a finer grid, regression targets and weights."""
    rng = np.random.default_rng(1)
    shape, fine = (3, *(edge + 2 * axis for axis in range(rank))), (3, *(ratio * (edge + 2 * a) for a in range(rank)))
    if rank > 1:
        shape, fine = (*shape[:-1], shape[-2]), (*fine[:-1], fine[-2])
    arrays = {
        "x": rng.standard_normal((*shape, 3)),
        "classes": rng.integers(0, 4, (*fine, 1)),
        "y": rng.standard_normal((*shape, 1)),
        "w": rng.integers(0, 3, (*shape, 1)).astype(float),
    }
    return ArrayDataset(arrays, targets=("classes", "y", "w"))


def made(dataset, rules, kind=StandardAugmentation):
    first = dataset.fields["x"].shape
    window = (*(n // 2 if rules.get("crop") else n for n in first[:-1]), first[-1])
    wanted = {"x": window} if rules.get("crop") else None
    augmentation = kind(build(Rules, rules), SampleWindows(dataset, wanted, 3), 3)
    ranges = {"classes": TargetRange(0, 3, whole=True, ignored=9)}
    augmentation.prepare(ranges, {"classes": ["w"], "y": ["w"]})
    return augmentation


def read(augmentation, dataset, name, box, epoch=4):
    out = np.full(box.shape, 7.0)
    augmentation.read(name, Batch((2, 0), 2, epoch, 0, True), box, out)
    return out


@settings(max_examples=25)
@given(st.integers(1, 3), st.sampled_from(SETTINGS), st.integers(0, 20), st.booleans(), st.data())
def test_warp_boxes_are_those_of_the_whole_sample(rank, rules, epoch, own, data):
    if rank == 1:
        if "crop" in rules:
            return
        rules = {key: value for key, value in rules.items() if key not in ("rotate", "shear", "flips")}
    dataset = dataset_of(rank, 8 if rank == 3 else 30)
    augmentation = made(dataset, rules, Swirl if own and rank > 1 else StandardAugmentation)
    for name in dataset.fields:
        shape = (2, *augmentation.fields[name].shape)
        whole = read(augmentation, dataset, name, Box.of_shape(shape), epoch)
        low = [data.draw(st.integers(-1, n - 1)) for n in shape]
        box = Box.of_ranges([(a, data.draw(st.integers(a + 1, n + 1))) for a, n in zip(low, shape)])
        part = read(augmentation, dataset, name, box, epoch)
        inside = box & Box.of_shape(shape)
        assert part[inside.slices(origin=box.start)].tobytes() == whole[inside.slices()].tobytes()
        assert np.count_nonzero(part != 7) <= inside.size


def folded(i, n, border):
    """Return the element that position `i` stands for."""
    if border == "wrap":
        return i % n
    while border == "reflect" and not 0 <= i < n:
        i = -1 - i if i < 0 else 2 * n - 1 - i
    return min(max(i, 0), n - 1)


def interpolated(x, position, borders, way):
    """Return the value of an array at a position, by sums over its neighbors."""
    near = [(math.floor(p), p - math.floor(p)) for p in position]
    if way == "nearest":
        return x[tuple(folded(math.floor(p + 0.5), n, b) for p, n, b in zip(position, x.shape, borders))]
    total, zero = 0.0, False
    for upper in itertools.product((0, 1), repeat=x.ndim):
        weight = math.prod(f if u else 1 - f for (_, f), u in zip(near, upper))
        value = x[tuple(folded(i + u, n, b) for (i, _), u, n, b in zip(near, upper, x.shape, borders))]
        total, zero = total + weight * value, zero or (weight > 0 and value == 0)
    return 0.0 if way == "weight" and zero else total


@pytest.mark.parametrize("way", ["linear", "nearest", "weight"])
@pytest.mark.parametrize("shape", [(17,), (9, 12), (3, 5, 4)], ids=str)
def test_samples_are_those_of_a_loop(shape, way):
    rng = np.random.default_rng(len(shape))
    x, rank = rng.integers(0, 5, shape).astype(float), len(shape)
    displacement = Displacement.draw(rng, shape, 1.5, 4.0)
    matrix = linear_map([0.5, -0.3, 0.2][: (0, 1, 3)[rank - 1]], [1.3, 0.7, 0.9][:rank], np.full((rank, rank), 0.2))
    smooth = SmoothMap(shape, matrix, displacement)
    axes = tuple(range(rank))
    grid = GridMap(smooth, axes, (False,) * rank, (0,) * rank, shape)
    borders = [BORDERS[(axis + rank) % 4] for axis in range(rank)]
    out = np.empty((*shape, 1))

    def reader(ranges, channels, part):
        part[...] = x[tuple(slice(*one) for one in ranges)][..., None]

    box = [*((0, n) for n in shape), (0, 1)]
    sample_block(reader, grid, box, out, extents=shape, borders=borders, interpolation=way, outside=-5.0)
    centre = np.array([(n - 1) / 2 for n in shape])
    for at in np.ndindex(shape):
        u = np.array(at) + [spline(p, displacement.spacing, at) for p in displacement.points]
        position = matrix @ (u - centre) + centre
        beyond = [b == "zero" and not -0.5 <= p < n - 0.5 for p, n, b in zip(position, shape, borders)]
        want = -5.0 if any(beyond) else interpolated(x, position, borders, way)
        assert out[(*at, 0)] == pytest.approx(want, abs=1e-12)


def spline(points, spacing, at):
    """Return a tensor product of cubic B-splines at an element, by the formula of its basis function."""
    total = 0.0
    for index in np.ndindex(points.shape):
        distances = [abs(u / spacing - (i - 2)) for i, u in zip(index, at)]
        if max(distances) < 2:
            total += points[index] * math.prod(
                2 / 3 - d * d + d**3 / 2 if d < 1 else (2 - d) ** 3 / 6 for d in distances
            )
    return total


@pytest.mark.parametrize("rules", [SETTINGS[1], SETTINGS[3], {**SETTINGS[0], "vectors": [["channel 0", "channel 2"]]}])
def test_blocks_that_are_read_in_parts_have_the_same_bits(monkeypatch, rules):
    dataset = dataset_of(2, 30)
    augmentation = made(dataset, rules)
    box = Box.of_shape((2, *dataset.fields["x"].shape))
    want, sizes = read(augmentation, dataset, "x", box), []
    monkeypatch.setattr(warp, "_TILE", 50)
    monkeypatch.setattr(warp, "_SOURCE", 4000)
    plain = dataset.read
    monkeypatch.setattr(dataset, "read", lambda *args: sizes.append(args[2].size) or plain(*args))
    assert read(augmentation, dataset, "x", box).tobytes() == want.tobytes()
    assert len(sizes) > 8 and max(sizes) * 8 <= 4000


def test_samples_that_end_within_their_windows_are_padded():
    """The same values lie outside of the sample with a map as without one."""
    x = np.random.default_rng(0).random((1, 10, 10, 1))
    dataset = ArrayDataset({"x": x, "classes": x.round()}, targets=("classes",))
    windows = SampleWindows(dataset, {"x": (16, 12, 1)}, 1)
    augmentation = StandardAugmentation(build(Rules, {"rotate": 20.0}), windows, 1)
    augmentation.prepare({"classes": TargetRange(0, 1, whole=True, ignored=9)}, {})
    batch, x, classes = Batch((0,), 1, 0, 0, True), np.empty((1, 16, 12, 1)), np.empty((1, 16, 12, 1))
    augmentation.read("x", batch, Box.of_shape(x.shape), x)
    augmentation.read("classes", batch, Box.of_shape(classes.shape), classes)
    np.testing.assert_array_equal(np.isnan(x), classes == 9)
    assert 60 <= np.isnan(x).sum() <= 120 and augmentation.leaves_gaps("x")


def test_a_map_that_moves_nothing_changes_no_bit():
    """A probability of 0, the factor 1, and epochs in which nothing is drawn."""
    dataset = dataset_of(2)
    box = Box.of_shape((2, *dataset.fields["x"].shape))
    plain = read(made(dataset, {}), dataset, "x", box)
    for rules in ({"rotate": 30.0, "probability": 0.0}, {"scale": [1.0, 1.0]}, {"rotate": 9.0, "probability": 0.01}):
        assert read(made(dataset, rules), dataset, "x", box).tobytes() == plain.tobytes()
    assert (read(made(dataset, {"rotate": 30.0}), dataset, "x", box) != plain).mean() > 0.9
    turned = SmoothMap((5, 5), linear_map([math.pi / 2], [1.0, 1.0]))
    rows, columns = turned.at([np.arange(5.0), np.arange(5.0)])
    np.testing.assert_allclose(np.broadcast_to(rows, (5, 5)), np.arange(5.0)[::-1][None].repeat(5, 0), atol=1e-12)
    np.testing.assert_allclose(np.broadcast_to(columns, (5, 5)), np.arange(5.0)[:, None].repeat(5, 1), atol=1e-12)


def test_grids_and_periodic_axes_stay_together():
    """A field on a finer grid moves with the coarse one, and shifts of periodic data are whole elements of a ramp."""
    edge = 24
    ramp = np.arange(edge, dtype=float)
    coarse = np.stack(np.meshgrid(ramp, ramp, indexing="ij"), -1)
    points = (np.arange(2 * edge) + 0.5) / 2 - 0.5
    fine = np.stack(np.meshgrid(points, points, indexing="ij"), -1)
    dataset = ArrayDataset({"x": coarse[None], "y": fine[None]}, targets=("y",))
    augmentation = StandardAugmentation(
        Rules(rotate=25.0, scale=(1.2, 1.5), border="nearest"), SampleWindows(dataset), 0
    )
    augmentation.prepare({}, {})
    for epoch in range(3):
        batch, x, y = Batch((0,), 1, epoch, 0, True), np.empty((1, *coarse.shape)), np.empty((1, *fine.shape))
        augmentation.read("x", batch, Box.of_shape(x.shape), x)
        augmentation.read("y", batch, Box.of_shape(y.shape), y)
        middle = y[0].reshape(edge, 2, edge, 2, 2).mean((1, 3))  # linear functions of the position
        inner = slice(8, 16)
        np.testing.assert_allclose(middle[inner, inner], x[0, inner, inner], atol=1e-9)


@pytest.mark.parametrize("angles", [0.0, 180.0])
def test_vectors_rotate_with_the_map(angles):
    """The difference of two positions in the sample, as a vector, is that of their positions in the window."""
    edge = 16
    ramp = np.arange(edge, dtype=float)
    # The vector at each element points to the element (3, 5).
    field = np.stack([3 - ramp[:, None] + 0 * ramp, 5 - ramp + 0 * ramp[:, None]], -1)
    dataset = ArrayDataset({"x": field[None]}, (), channel_names={"x": ["v", "u"]})
    rules = Rules(
        rotate=angles, scale=(0.9, 1.2), shear=0.1, flips=["width"], turns=True, border="nearest", vectors=[["v", "u"]]
    )
    augmentation = StandardAugmentation(rules, SampleWindows(dataset, seed=1), 1)
    for epoch in range(4):
        batch, out = Batch((0,), 1, epoch, 0, True), np.empty((1, *field.shape))
        augmentation.read("x", batch, Box.of_shape(out.shape), out)
        one = np.empty((1, *field.shape[:-1], 1))
        augmentation.read("x", batch, Box((0, 0, 0, 1), (1, edge, edge, 2)), one)
        assert one[..., 0].tobytes() == np.ascontiguousarray(out[..., 1]).tobytes()
        points = out[0, 6:10, 6:10] + np.stack(np.meshgrid(ramp[6:10], ramp[6:10], indexing="ij"), -1)
        np.testing.assert_allclose(points, np.broadcast_to(points[0, 0], points.shape), atol=1e-9)


VALUES = [{"blur": [0.6, 1.2]}, {"gamma": [0.6, 1.5]}, {"blur": [1.0, 1.0], "gamma": [0.7, 1.4], "noise": 0.1}]


@pytest.mark.parametrize("rules", [*VALUES, {**VALUES[2], "rotate": 40.0, "border": "zero"}], ids=[*"bgn", "all"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_loaded_boxes_are_those_of_the_whole_sample(rules, dtype):
    """Values too, with normalization and halos: a filter reads more than the box."""
    dataset = dataset_of(2)
    augmentation = made(dataset, rules)
    shape = (2, *dataset.fields["x"].shape)
    statistics = {"x": ChannelStatistics(np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 0.5]), ("none",) * 3, 9)}
    batch = Batch((2, 0), 2, 1, 0, True)

    def loaded(box, augmentation=augmentation):
        loader = Loader(dataset, {"x": box}, statistics=statistics, augmentation=augmentation, dtype=dtype)
        return next(iter(loader.iterate([batch]))).arrays["x"].copy()

    whole, plain = loaded(Box.of_shape(shape)), loaded(Box.of_shape(shape), None)
    assert np.isfinite(whole).all() and (whole != plain).mean() > 0.5
    for box in (
        Box((0, -1, 3, 0), (2, 7, 13, 3)),
        Box((1, 5, 0, 1), (2, 6, 4, 3)),
        Box((0, 11, 11, 2), (1, 14, 12, 3)),
    ):
        inside, found = box & Box.of_shape(shape), loaded(box)
        assert found[inside.slices(origin=box.start)].tobytes() == whole[inside.slices()].tobytes()
    if "border" in rules:
        assert augmentation.leaves_gaps("x") and not augmentation.leaves_gaps("y")


def test_filters_are_those_of_their_formulas():
    x = np.random.default_rng(0).standard_normal((1, 9, 8, 2))
    dataset = ArrayDataset({"x": x}, ())
    box, batch = Box.of_shape(x.shape), Batch((0,), 1, 0, 0, True)
    found = x.copy()
    StandardAugmentation(Rules(blur=(0.8, 0.8)), SampleWindows(dataset), 0).alter("x", batch, box, found)
    weights = np.exp(-0.5 * (np.arange(-3, 4) / 0.8) ** 2)
    weights /= weights.sum()
    padded = np.pad(x[0], [(3, 3), (3, 3), (0, 0)], "edge")
    want = sum(a * b * padded[i : i + 9, j : j + 8] for i, a in enumerate(weights) for j, b in enumerate(weights))
    np.testing.assert_allclose(found[0], want, atol=1e-12)
    found = x.copy()
    rules = Rules(gamma=(2.0, 2.0), gamma_range=(0.0, 1.0))
    StandardAugmentation(rules, SampleWindows(dataset), 0).alter("x", batch, box, found)
    np.testing.assert_allclose(found, np.sign(x) * x**2, atol=1e-12)


def test_missing_and_outside_values_do_not_spread():
    """A value of weight 0 is part of no value with a weight; a neighbor with the fraction 0 does not count."""
    edge = 16
    y, w = np.ones((1, edge, edge, 1)), np.ones((1, edge, edge, 1))
    y[0, 4:7, 5:9], w[0, 4:7, 5:9] = np.nan, 0
    dataset = ArrayDataset({"x": y * 0 + 1, "y": y, "w": w}, targets=("y", "w"))
    dataset.lenient = frozenset(["x", "y"])
    augmentation = StandardAugmentation(Rules(rotate=180.0, border="zero"), SampleWindows(dataset), 0)
    augmentation.prepare({}, {"y": ["w"]})
    for epoch in range(3):
        batch, found = Batch((0,), 1, epoch, 0, True), {name: np.empty(y.shape) for name in "yw"}
        for name, out in found.items():
            augmentation.read(name, batch, Box.of_shape(out.shape), out)
        assert (found["y"][found["w"] > 0] == 1).all() and 0 < (found["w"] == 0).sum() < edge * edge


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"scale": [1.2, 0.8]}, "scale: expected the lower bound first, got [1.2, 0.8]"),
        ({"elastic": {"magnitude": 5.0, "spacing": 10.0}}, "magnitude: expected at most 0.4 x spacing = 4, got 5"),
        ({"probability": {"flips": 0.5}}, "probability: expected names out of rotate, scale, stretch, shear"),
        ({"probability": 2.0}, "probability: expected a number <= 1 or a table, got 2"),
        ({"blur": [1.0, 40.0]}, "blur[1]: expected a number <= 32, got 40"),
        ({"rotate": [1.0, 2.0, 3.0]}, "data.augment.rotate: expected 1 angle for samples of 2 axes, got 3"),
        ({"rotate": 1.0, "border": ["wrap"]}, "data.augment.border: expected one per axis of height, width, got"),
        ({"elastic": {"magnitude": 1.0, "spacing": 9.0}, "vectors": [["channel 0", "channel 1"]]},
         "data.augment.elastic: expected no data.augment.vectors with a map that is not linear"),
    ],
)  # fmt: skip
def test_what_is_refused(rules, message):
    with pytest.raises((UserError, DataError)) as error:
        made(dataset_of(2), rules)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_what_cannot_be_ignored_or_moved_is_refused():
    dataset = dataset_of(2)
    augmentation = made(dataset, {"rotate": 5.0, "border": "zero"})
    with pytest.raises(
        DataError, match=r"data\.augment\.border: expected a loss that ignores targets 'y' outside of the"
    ):
        augmentation.prepare({"classes": TargetRange(0, 3, True, 9)}, {})
    dataset.arrays["w"] = dataset.arrays["w"][:, :, :1]
    thin = ArrayDataset(dataset.arrays, targets=("classes", "y", "w"))
    with pytest.raises(DataError, match=r"data\.augment: expected 'w' on the whole grid, to be moved by rotate, got"):
        made(thin, {"rotate": 5.0})


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (lambda positions: positions[:1], r"expected 2 arrays of positions of shape \(14, 14\) from `map`, got \("),
        (lambda positions: [p / 0 for p in positions], "expected finite positions from `map`, got"),
    ],
)
def test_positions_of_an_own_map_are_checked(positions, message):
    class Wrong(StandardAugmentation):
        def map(self, batch, k, given):
            with np.errstate(all="ignore"):
                return positions(given)

    dataset = dataset_of(2, 14)
    with pytest.raises(DataError, match=message):
        read(made(dataset, {}, Wrong), dataset, "x", Box.of_shape((2, *dataset.fields["x"].shape)))


def test_a_neighbor_with_the_fraction_0_does_not_count():
    """A missing layer stays one layer, when all layers rotate within themselves."""
    x = np.ones((1, 5, 6, 6, 1))
    x[0, 2] = np.nan
    dataset = ArrayDataset({"x": x}, ())
    dataset.lenient, out = frozenset("x"), np.empty(x.shape)
    augmentation = StandardAugmentation(Rules(rotate=[40.0, 0.0, 0.0]), SampleWindows(dataset), 0)
    augmentation.read("x", Batch((0,), 1, 0, 0, True), Box.of_shape(x.shape), out)
    np.testing.assert_array_equal(out, x)
