"""Tests of bfloat16: rounding to nearest, exact conversion back, and the rounding error."""

import numpy as np
import pytest

from halograd.comm.codec import PIECE, BFloat16
from halograd.comm.encoding import Encoding

HALF_ULP = 2.0**-8  # relative, of 8 significant bits


def draw(count, seed=0):
    """Return random numbers with magnitudes of gradients, and with much larger and smaller ones."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(count) * 10.0 ** rng.integers(-30, 30, count)).astype(np.float32)


def rounded(values, error=None):
    """Return the values after one rank has encoded them and decoded its own message."""
    encoding = Encoding(BFloat16(), values.dtype, [slice(0, values.size)])
    wire, out = np.zeros(values.size, np.uint16), np.full(values.size, np.nan, np.float32)
    if error is not None:
        encoding.compensate(error)
    encoding.deposit([(wire, values)]).wait()
    encoding.copy_back([(out, wire)]).wait()
    return out


@pytest.mark.parametrize("count", [0, 1, 1000, PIECE, PIECE + 1, 3 * PIECE - 5])
def test_rounded_to_the_nearest_number_of_eight_bits(count):
    values = draw(count)
    bits = values.view(np.uint32).astype(np.uint64)
    nearest = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(rounded(values), nearest)
    assert (np.abs(nearest - values) <= HALF_ULP * np.abs(values)).all()


def test_the_error_is_exactly_what_was_taken_away():
    values, before = draw(5000, 1), 1e-3 * draw(5000, 2)
    error, kept = before.copy(), values.copy()
    result = rounded(values, error)
    np.testing.assert_array_equal(values, kept)
    np.testing.assert_array_equal(result + error, values + before)


def test_numbers_that_fit_stay_as_they_are():
    few = np.array([0.0, -0.0, 1.0, -1.5, 2.0**100, 2.0**-100, 255.0], np.float32)
    result = rounded(few)
    np.testing.assert_array_equal(result, few)
    np.testing.assert_array_equal(np.signbit(result), np.signbit(few))


def test_what_is_not_finite_does_not_get_lost():
    full = np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)  # NaN whose bits a carry would wrap around
    bad = np.concatenate([full, np.array([np.nan, np.inf, -np.inf, 3e38], np.float32)])
    assert np.isnan(rounded(bad)).all()


def test_added_up_in_float32():
    size = PIECE + 7
    encoding = Encoding(BFloat16(), np.dtype(np.float32), [slice(0, size)])
    wire, total, out = np.zeros(size, np.uint16), np.zeros(size, np.uint16), np.zeros(size, np.float32)
    encoding.deposit([(wire, np.full(size, 1 + 2.0**-7, np.float32))]).wait()
    encoding.add([wire] * 254, total).wait()
    encoding.copy_back([(out, total)]).wait()
    assert (out == 256).all(), "254 times 1.0078125 are 255.98: more bits than a bfloat16 has were added up"
