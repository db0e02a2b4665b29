"""Targets: rules that reduce cells, label maps, and absent ones (weight 0), against brute force; invalid numbers."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.data import ArrayDataset, FileSet, Hdf5Dataset, Loader, channel_statistics, open_dataset
from halograd.data.disk import DataError
from halograd.data.survey import count_classes, find_invalid, look_at
from halograd.data.targets import RULES, LabelMap, TargetRange, TargetReduction, has_no_weight
from halograd.dtensor.box import Box


def brute_force(rule: str, patch: np.ndarray) -> float:
    cells = patch.ravel()
    middle = patch[tuple((n - 1) // 2 for n in patch.shape)]
    return {
        "any": float(any(c == 1 for c in cells)),
        "all": float(all(c == 1 for c in cells)),
        "majority": float(sum(cells) > len(cells) / 2),
        "fraction": sum(cells) / len(cells),
        "max": max(cells),
        "center": middle,
    }[rule]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("factors", [(4,), (2, 3), (2, 2, 3)])
def test_rules_against_a_loop(rule: str, factors: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    patches = (3, 2, 2)[: len(factors)]
    cells = rng.integers(0, 2, (2, *(p * f for p, f in zip(patches, factors)), 2)).astype(np.float32)
    out = np.empty((2, *patches, 2), np.float32)
    TargetReduction(rule, factors).apply(cells, out)
    for at in np.ndindex(*out.shape):
        n, *where, c = at
        patch = cells[(n, *(slice(w * f, (w + 1) * f) for w, f in zip(where, factors)), c)]
        assert out[at] == pytest.approx(brute_force(rule, patch)), (rule, at)


@pytest.mark.parametrize("rule", RULES)
def test_a_patch_does_not_depend_on_the_cut(rule: str) -> None:
    """A rank with one patch along an axis gets the same bits as a rank with all of them."""
    cells = np.random.default_rng(0).random((2, 20, 28, 1))
    reduction, whole = TargetReduction(rule, (5, 7)), np.empty((2, 4, 4, 1))
    reduction.apply(cells, whole)
    for column in range(4):
        part = np.empty((2, 4, 1, 1))
        reduction.apply(np.ascontiguousarray(cells[:, :, 7 * column : 7 * column + 7]), part)
        np.testing.assert_array_equal(part[:, :, 0], whole[:, :, column])


def test_boxes_and_shapes() -> None:
    reduction = TargetReduction("any", (4, 2))
    assert reduction.coarse_shape((8, 6, 1)) == (2, 3, 1)
    assert reduction.fine_box(Box((1, 1, 0, 0), (2, 2, 3, 1))) == Box((1, 4, 0, 0), (2, 8, 6, 1))
    reduction.apply(np.empty((1, 0, 6, 1)), np.empty((1, 0, 3, 1)))


def test_wrong_arguments() -> None:
    with pytest.raises(DataError, match=r"target rule: expected one of any, all, .* got 'most'"):
        TargetReduction("most", (2,))
    with pytest.raises(DataError, match=r"expected 1 or more on every spatial axis, got \(0, 2\)"):
        TargetReduction("any", (0, 2))
    with pytest.raises(DataError, match=r"divisible into patches of \(4, 2\), got \(6, 6\)"):
        TargetReduction("any", (4, 2)).coarse_shape((6, 6, 1))
    with pytest.raises(DataError, match=r"expected cells for patches \(1, 2, 1\) of \(2,\), got shape \(1, 5, 1\)"):
        TargetReduction("any", (2,)).apply(np.zeros((1, 5, 1)), np.zeros((1, 2, 1)))


NUMBERS = st.integers(-300, 300)


@given(st.dictionaries(NUMBERS, NUMBERS, max_size=6), st.lists(NUMBERS | st.just(2**24), max_size=30))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_as_a_dictionary(dtype, numbers, values):
    """A label map replaces all values at once, like a dictionary; a result is not replaced again."""
    found = np.array([values, values], dtype).T.copy()[:, ::-1]
    LabelMap(numbers).apply(found)
    want = [numbers.get(value, value) for value in values]
    assert found[:, 0].tolist() == found[:, 1].tolist() == want


def test_no_numbers_stay_no_numbers():
    values = np.array([np.nan, np.inf, 0.5, 1.0], np.float32)
    LabelMap({0: 5, 1: 2}).apply(values)
    np.testing.assert_array_equal(values, np.array([np.nan, np.inf, 0.5, 2.0], np.float32))


def test_numbers_that_are_not_exact_are_refused():
    with pytest.raises(DataError, match="expected whole numbers of at most 16777216, got 16777217"):
        LabelMap({1: 2**24 + 1})


def test_descriptions_follow_the_numbers():
    said = {"long_name": "cover", "flag_values": [10, 20, 30], "flag_meanings": "water land ice"}
    assert LabelMap({10: 1, 20: 0}).described(said) == {**said, "flag_values": [1, 0, 30]}
    for numbers in ({10: 20}, {10: -1, 20: -1}):  # two meanings of one number
        assert LabelMap(numbers).described(said) == {"long_name": "cover"}
    assert LabelMap({1: 2}).described({"flag_meanings": "water land", "units": "1"}) == {"units": "1"}
    assert LabelMap({1: 2}).described({"flag_values": ["a", "b"]}) == {}


ABSENT_N, GRID = 4, (4, 6)
SHAPE = (ABSENT_N, *GRID, 2)
#: Shapes of weights of one sample: coarser, finer, or broadcast.
WEIGHTS = [(4, 6, 1), (4, 6, 2), (1, 6, 1), (4, 1, 1), (1, 1, 1), (2, 3, 1), (8, 12, 1), (2, 12, 1), (1,)]


def spread(weights: np.ndarray) -> np.ndarray:
    """Return which elements of the target have weight 0, by a loop over all elements."""
    found = np.zeros(SHAPE, bool)
    for at in np.ndindex(*SHAPE):
        if weights.ndim == 2:
            found[at] = weights[at[0], 0] == 0
            continue
        where = [slice(i * m // n, max(i * m // n + 1, (i + 1) * m // n)) for i, n, m in zip(at, SHAPE, weights.shape)]
        found[at] = not weights[tuple(where)].any()
    return found


@given(st.data())
def test_elements_without_weight(data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shapes = data.draw(st.lists(st.sampled_from(WEIGHTS), min_size=1, max_size=2))
    weights = {f"w{k}": rng.integers(0, 2, (ABSENT_N, *shape)).astype(float) for k, shape in enumerate(shapes)}
    dataset = ArrayDataset({"x": np.zeros(SHAPE), "t": np.zeros(SHAPE), **weights}, ["t", *weights])
    indices = data.draw(st.lists(st.integers(0, ABSENT_N - 1), min_size=1, max_size=4))
    whole = np.logical_and.reduce([spread(one) for one in weights.values()])[indices]
    ranges = []
    for n in whole.shape:
        low = data.draw(st.integers(0, n - 1))
        ranges.append((low, data.draw(st.integers(low + 1, n))))
    box = Box.of_ranges(ranges)
    found = has_no_weight(lambda *a: dataset.read(a[0], indices, *a[1:]), dataset.fields, "t", [*weights], box)
    np.testing.assert_array_equal(found, whole[box.slices()])


@pytest.mark.parametrize("shape", [(3, 6, 1), (4, 6), (4, 6, 1, 1)])
def test_weights_on_another_grid_excuse_nothing(shape):
    dataset = ArrayDataset({"x": np.zeros(SHAPE), "t": np.zeros(SHAPE), "w": np.zeros((ABSENT_N, *shape))}, ["t", "w"])
    assert not has_no_weight(dataset.read, dataset.fields, "t", ["w"], Box.of_shape(SHAPE)).any()


@pytest.fixture(params=["file", "files", "arrays"])
def dataset(request, tmp_path):
    """Return a data set with targets that are invalid where their weight is 0; also arrays, invalid mask and ranges."""
    rng = np.random.default_rng(1)
    land = rng.random((ABSENT_N, *GRID)) < 0.4
    numbers, classes = rng.integers(0, 2, SHAPE).astype(float), rng.integers(0, 3, (ABSENT_N, *GRID)).astype(float)
    numbers[land], classes[land] = np.nan, 255
    classes[0][land[0]] = np.nan
    arrays = {"x": np.ones(SHAPE), "t": numbers, "c": classes[..., None], "w": (~land[..., None]).astype(float)}
    if request.param == "arrays":
        found = ArrayDataset(arrays, ["t", "c", "w"])
    else:
        step = ABSENT_N if request.param == "file" else 1
        for first in range(0, ABSENT_N, step):
            with h5py.File(tmp_path / f"{first}.h5", "w") as file:
                for name, array in arrays.items():
                    file[name] = array[first : first + step]
                file["x"].attrs["layout"] = "NHWC"
        found = open_dataset(tmp_path, "x", {"t": "t", "c": "c", "w": "w"})
        found.fields = {name.replace("target", "t"): field for name, field in found.fields.items()}
    ranges = {"c": TargetRange(0, 2, whole=True), "w": TargetRange(0, np.inf)}
    for one in getattr(found, "parts", [found]):
        one.ranges = ranges
    found.weighted = {"t": ["w"], "c": ["w"]}
    return found, arrays, land, ranges


def read(dataset, name):
    out = np.zeros((ABSENT_N, *dataset.fields[name].shape))
    dataset.read(name, range(ABSENT_N), Box.of_shape(out.shape), out)
    return out


def strict(dataset):
    dataset.weighted = {}
    return dataset


def test_no_number_of_weight_0_is_a_fault(dataset):
    found, arrays, land, ranges = dataset
    np.testing.assert_array_equal(read(found, "t"), arrays["t"])  # NaN stays: losses and scores ignore it
    np.testing.assert_array_equal(read(found, "c"), np.where(land[..., None], 0, arrays["c"]))
    assert find_invalid(found, ranges, range(ABSENT_N)) == {}
    with pytest.raises(DataError, match=r"target nan in sample 0 of 't' .*or give it the weight 0 there"):
        read(strict(found), "t")
    assert len(find_invalid(found, ranges, range(ABSENT_N))) == ABSENT_N


@pytest.mark.parametrize("dataset", ["arrays"], indirect=True)
def test_others_are_refused_as_before(dataset):
    found, arrays, land, ranges = dataset
    at = tuple(np.argwhere(~land[2])[0])
    arrays["t"][(2, *at, 1)] = np.nan
    with pytest.raises(DataError, match=rf"target nan in sample 2 of 't' at \({at[0]}, {at[1]}, 1\)"):
        read(found, "t")
    assert find_invalid(found, ranges, range(ABSENT_N)) == {2: "nan in target 't'"}
    arrays["w"][2] = np.nan
    with pytest.raises(DataError, match="target nan in sample 2 of 'w'"):
        read(found, "t")


def test_surveys_pass_over_them(dataset):
    found, arrays, land, _ = dataset
    squares = np.square(arrays["t"])
    assert look_at(found, "t", ABSENT_N).scale == pytest.approx(
        max(max(np.nanmean(arrays["t"][k]), np.nanmean(squares[k])) for k in range(ABSENT_N)), rel=1e-6
    )
    counts = np.bincount(arrays["c"][..., 0][~land].astype(int), minlength=3)
    assert count_classes(found, "c", 3, range(ABSENT_N)).tolist() == counts.tolist()


@pytest.mark.parametrize("rule", ["any", "all", "majority", "fraction", "max"])
def test_patches_are_made_of_the_cells_that_are_there(dataset, rule):
    """A reduced target is computed from the cells that are present; the loader and the count of patches agree."""
    found, arrays, land, _ = dataset
    reduction = TargetReduction(rule, (2, 3))
    want = np.zeros((ABSENT_N, 2, 2, 2))
    for at in np.ndindex(*want.shape):
        n, i, j, c = at
        cells = arrays["t"][n, 2 * i : 2 * i + 2, 3 * j : 3 * j + 3, c]
        some = cells[~np.isnan(cells)]
        if some.size:
            full = {
                "any": np.max,
                "all": np.min,
                "majority": lambda a: a.mean() > 0.5,
                "fraction": np.mean,
                "max": np.max,
            }
            want[at] = full[rule](some if rule in ("fraction", "max") else some > 0.5)
        else:
            want[at] = rule == "all"
    boxes = {"t": Box.of_shape((ABSENT_N, 2, 2, 2))}
    with Loader(found, boxes, reductions={"t": reduction}, dtype="float64") as loader:
        (batch,) = loader.iterate([range(ABSENT_N)])
        np.testing.assert_allclose(batch.arrays["t"], want, rtol=1e-12)
    if rule == "max":
        gone = land.reshape(ABSENT_N, 2, 2, 2, 3).all(axis=(2, 4))
        counts = count_classes(found, "t", 2, range(ABSENT_N), reduction)
        assert counts.tolist() == np.bincount(want[~gone].astype(int).ravel(), minlength=2).tolist()


INVALID_N, EDGE, CHANNELS = 6, 9, 3
RANGES = {"target": TargetRange(0, 1, True)}


@pytest.fixture
def arrays():
    rng = np.random.default_rng(3)
    x = 5 + 2 * rng.standard_normal((INVALID_N, EDGE, EDGE, CHANNELS))
    return x, rng.integers(0, 2, (INVALID_N, EDGE, EDGE)).astype(float)


def write(path, x, t):
    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=x).attrs.update(layout="NHWC", channel_names=["rho", "p", "u"])
        file["mask"] = t
    return path


def test_samples_and_what_is_wrong_with_them(tmp_path, arrays):
    x, t = arrays
    x[1, 8, 0, 1], x[4, 2, 2, 2], x[4, 2, 1, 0] = np.nan, np.nan, -np.inf
    t[0, 3, 3], t[3, 8, 8] = 2, 0.5
    dataset = Hdf5Dataset(write(tmp_path / "a.h5", x, t), ranges=RANGES)
    assert find_invalid(dataset, RANGES, range(INVALID_N)) == {
        0: "2 in target 'mask'",
        1: "nan in channel 1 (p)",
        3: "0.5 in target 'mask'",
        4: "-inf in channel 0 (rho)",
    }
    assert find_invalid(dataset, RANGES, [2, 5, 4]) == {4: "-inf in channel 0 (rho)"}
    with pytest.raises(DataError, match="expected finite numbers"):  # strict mode is restored
        dataset.read("x", [1], Box.of_shape((1, EDGE, EDGE, CHANNELS)), np.empty((1, EDGE, EDGE, CHANNELS)))


def test_of_several_files_the_place_is_named(tmp_path, arrays):
    x, t = arrays
    paths = [write(tmp_path / "a.h5", x, t), tmp_path / "b.h5"]
    x[2, 0, 0, 0] = np.inf
    write(paths[1], x, t)
    dataset = FileSet([Hdf5Dataset(path, ranges=RANGES) for path in paths])
    assert find_invalid(dataset, RANGES, range(2 * INVALID_N)) == {INVALID_N + 2: "inf in channel 0 (rho)"}
    assert dataset.place(INVALID_N + 2) == f"{paths[1]}, sample 2" and not dataset.lenient


@given(st.data())
def test_statistics_are_those_of_the_numbers_that_are_there(tmp_path_factory, data):
    """Statistics ignore missing values in any pattern; transformed infinities count as missing."""
    holes = data.draw(st.lists(st.integers(0, INVALID_N * EDGE * EDGE * CHANNELS - 1), max_size=40))
    value = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    rng = np.random.default_rng(3)
    x = rng.standard_normal((INVALID_N, EDGE, EDGE, CHANNELS))
    x.reshape(-1)[holes] = value
    dataset = Hdf5Dataset(write(tmp_path_factory.mktemp("d") / "a.h5", x, np.zeros((INVALID_N, EDGE, EDGE))))
    dataset.lenient = frozenset(["x"])
    there = np.where(np.isfinite(x), x, np.nan).astype(np.float32).astype(float)
    for rules, want in (({}, there), ({"p": "log"}, np.copysign(np.log1p(np.abs(there)), there))):
        found = channel_statistics(dataset, "x", range(INVALID_N), transforms=rules)
        chosen = [1] if rules else range(CHANNELS)
        for k in chosen:
            assert found.mean[k] == pytest.approx(np.nanmean(want[..., k]), rel=1e-6, abs=1e-6)
            assert found.std[k] == pytest.approx(np.nanstd(want[..., k]), rel=1e-6)


def test_a_channel_of_holes_is_refused(tmp_path, arrays):
    x, t = arrays
    x[..., 2] = np.nan
    dataset = Hdf5Dataset(write(tmp_path / "a.h5", x, t))
    dataset.lenient = frozenset(["x"])
    with pytest.raises(DataError, match=r"expected finite numbers in channel 2 \(u\), got none"):
        channel_statistics(dataset, "x", range(INVALID_N))


@pytest.mark.parametrize("normalized", [True, False])
def test_holes_become_the_mean_and_are_counted(tmp_path, arrays, normalized):
    x, t = arrays
    x[0, 0, 0, 0], x[2, 4, 4, 1], x[3, 8, 8, 2] = np.nan, np.inf, -np.inf
    dataset = Hdf5Dataset(write(tmp_path / "a.h5", x, t))
    dataset.lenient = frozenset(["x"])
    statistics = {"x": channel_statistics(dataset, "x", range(INVALID_N))} if normalized else {}
    boxes = {"x": Box((0, -1, 0, 0), (4, EDGE, EDGE, CHANNELS)), "target": Box.of_shape((4, EDGE, EDGE, 1))}
    with Loader(dataset, boxes, statistics=statistics, dtype="float64") as loader:
        (batch,) = loader.iterate([[0, 1, 2, 3]])
        found = batch.arrays["x"][:, 1:]
    want = np.where(np.isfinite(x[:4]), x[:4], 0)
    if normalized:
        want = np.where(np.isfinite(x[:4]), (x[:4] - statistics["x"].mean) / statistics["x"].std, 0)
    np.testing.assert_allclose(found, want, rtol=1e-12, atol=1e-12)
    assert loader.absent == 3 and not batch.arrays["x"][:, 0].any()
