"""Rules that reduce cells to patches, and label maps, against brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.data.disk import DataError
from halograd.data.targets import RULES, LabelMap, TargetReduction
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
