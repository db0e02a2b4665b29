"""Tests of orders of axes and of sizes, against loops over all cases."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from halograd.interchange.feature_order import pieces
from halograd.interchange.patterns import permuted
from halograd.interchange.sliding import ceil_padding
from halograd.interchange.weights import Arrangement

SMALL = st.integers(1, 6)


@given(st.integers(1, 40), st.integers(1, 7), st.integers(1, 5), st.integers(0, 3), st.integers(0, 3))
def test_padding_that_rounds_up_gives_the_windows_of_torch(size, kernel, stride, low, high):
    """The added padding gives as many windows as torch, whose windows start in the array or in its low padding."""
    low, high = min(low, kernel // 2), min(high, kernel // 2)
    if size + low + high < kernel:
        return
    starts = [s for s in range(0, size + low, stride) if s < size + low + high - kernel + stride]
    padded = size + low + ceil_padding(size, kernel, stride, low, high)
    assert (padded - kernel) // stride + 1 == len(starts)


@given(SMALL, st.lists(SMALL, min_size=1, max_size=3))
def test_flattened_features_are_found_where_they_were(channels, spatial):
    image = np.arange(channels * math.prod(spatial)).reshape(*spatial, channels)
    theirs = np.moveaxis(image, -1, 0).reshape(1, -1)  # torch has channels first
    np.testing.assert_array_equal(permuted(theirs, spatial), image.reshape(1, -1))
    one = Arrangement(("w",), (1, image.size), {1: pieces((*spatial, channels))})
    np.testing.assert_array_equal(one.from_torch(theirs), image.reshape(1, -1))
    np.testing.assert_array_equal(one.to_torch(image.reshape(1, -1)), theirs)
