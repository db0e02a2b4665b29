"""Absent targets (weight 0) against brute force, for weights on any grid, in every pass over the data."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.data import ArrayDataset, DataError, Loader, TargetReduction, open_dataset
from halograd.data.survey import count_classes, find_invalid, look_at
from halograd.data.targets import TargetRange, has_no_weight
from halograd.dtensor import Box

N, GRID = 4, (4, 6)
SHAPE = (N, *GRID, 2)
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
    weights = {f"w{k}": rng.integers(0, 2, (N, *shape)).astype(float) for k, shape in enumerate(shapes)}
    dataset = ArrayDataset({"x": np.zeros(SHAPE), "t": np.zeros(SHAPE), **weights}, ["t", *weights])
    indices = data.draw(st.lists(st.integers(0, N - 1), min_size=1, max_size=4))
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
    dataset = ArrayDataset({"x": np.zeros(SHAPE), "t": np.zeros(SHAPE), "w": np.zeros((N, *shape))}, ["t", "w"])
    assert not has_no_weight(dataset.read, dataset.fields, "t", ["w"], Box.of_shape(SHAPE)).any()


@pytest.fixture(params=["file", "files", "arrays"])
def dataset(request, tmp_path):
    """Return a data set with targets that are invalid where their weight is 0; also arrays, invalid mask and ranges."""
    rng = np.random.default_rng(1)
    land = rng.random((N, *GRID)) < 0.4
    numbers, classes = rng.integers(0, 2, SHAPE).astype(float), rng.integers(0, 3, (N, *GRID)).astype(float)
    numbers[land], classes[land] = np.nan, 255
    classes[0][land[0]] = np.nan
    arrays = {"x": np.ones(SHAPE), "t": numbers, "c": classes[..., None], "w": (~land[..., None]).astype(float)}
    if request.param == "arrays":
        found = ArrayDataset(arrays, ["t", "c", "w"])
    else:
        step = N if request.param == "file" else 1
        for first in range(0, N, step):
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
    out = np.zeros((N, *dataset.fields[name].shape))
    dataset.read(name, range(N), Box.of_shape(out.shape), out)
    return out


def strict(dataset):
    dataset.weighted = {}
    return dataset


def test_no_number_of_weight_0_is_a_fault(dataset):
    found, arrays, land, ranges = dataset
    np.testing.assert_array_equal(read(found, "t"), arrays["t"])  # NaN stays: losses and scores ignore it
    np.testing.assert_array_equal(read(found, "c"), np.where(land[..., None], 0, arrays["c"]))
    assert find_invalid(found, ranges, range(N)) == {}
    with pytest.raises(DataError, match=r"target nan in sample 0 of 't' .*or give it the weight 0 there"):
        read(strict(found), "t")
    assert len(find_invalid(found, ranges, range(N))) == N


@pytest.mark.parametrize("dataset", ["arrays"], indirect=True)
def test_others_are_refused_as_before(dataset):
    found, arrays, land, ranges = dataset
    at = tuple(np.argwhere(~land[2])[0])
    arrays["t"][(2, *at, 1)] = np.nan
    with pytest.raises(DataError, match=rf"target nan in sample 2 of 't' at \({at[0]}, {at[1]}, 1\)"):
        read(found, "t")
    assert find_invalid(found, ranges, range(N)) == {2: "nan in target 't'"}
    arrays["w"][2] = np.nan
    with pytest.raises(DataError, match="target nan in sample 2 of 'w'"):
        read(found, "t")


def test_surveys_pass_over_them(dataset):
    found, arrays, land, _ = dataset
    squares = np.square(arrays["t"])
    assert look_at(found, "t", N).scale == pytest.approx(
        max(max(np.nanmean(arrays["t"][k]), np.nanmean(squares[k])) for k in range(N)), rel=1e-6
    )
    counts = np.bincount(arrays["c"][..., 0][~land].astype(int), minlength=3)
    assert count_classes(found, "c", 3, range(N)).tolist() == counts.tolist()


@pytest.mark.parametrize("rule", ["any", "all", "majority", "fraction", "max"])
def test_patches_are_made_of_the_cells_that_are_there(dataset, rule):
    """A reduced target is computed from the cells that are present; the loader and the count of patches agree."""
    found, arrays, land, _ = dataset
    reduction = TargetReduction(rule, (2, 3))
    want = np.zeros((N, 2, 2, 2))
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
    boxes = {"t": Box.of_shape((N, 2, 2, 2))}
    with Loader(found, boxes, reductions={"t": reduction}, dtype="float64") as loader:
        (batch,) = loader.iterate([range(N)])
        np.testing.assert_allclose(batch.arrays["t"], want, rtol=1e-12)
    if rule == "max":
        gone = land.reshape(N, 2, 2, 2, 3).all(axis=(2, 4))
        counts = count_classes(found, "t", 2, range(N), reduction)
        assert counts.tolist() == np.bincount(want[~gone].astype(int).ravel(), minlength=2).tolist()
