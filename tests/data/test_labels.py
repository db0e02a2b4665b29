"""Numbers of a file that stand for other classes, against a dictionary."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.data import DataError, LabelMap

NUMBERS = st.integers(-300, 300)


@given(st.dictionaries(NUMBERS, NUMBERS, max_size=6), st.lists(NUMBERS | st.just(2**24), max_size=30))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_as_a_dictionary(dtype, numbers, values):
    """All at once: a number that another became is not replaced again."""
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
