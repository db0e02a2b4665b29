"""Tests of the norm of gradients and of clipping, on every backend."""

import math

import numpy as np
import pytest

from halograd.kernels import KernelError

FLOAT64 = np.dtype(np.float64)


@pytest.mark.parametrize("counts", [(0,), (1,), (7, 16), (3001, 0, 5)], ids=str)
def test_sum_of_squares(typed, counts):
    """The sum of squares over several arrays with divisors is right for long, misaligned and empty arrays."""
    arrays = [typed.draw(count + 1)[1:] for count in counts]
    divisors, out = [1, 2, 4][: len(counts)], typed.poisoned(1, dtype=FLOAT64)
    kernel = typed.backend.sum_of_squares(list(zip(arrays, divisors)), out)
    for _ in range(2):
        kernel()
        exact = math.fsum(math.fsum(a.astype(np.float64) ** 2) / d for a, d in zip(arrays, divisors))
        assert math.isclose(out[0], exact, rel_tol=1e-5 if typed.dtype == np.float32 else 1e-11)
        arrays[0][...] = 0
    kernel.close()


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) - 1, 5000, 1025, 1024, 1023])
def test_squares_of_many_equal_numbers(arrays, size):
    """The sum of many equal squares is accurate, so the norm does not depend on the cut of the parameters.

    Equal values are the worst case: all rounding errors have one sign.
    """
    x, out = arrays.draw(size), arrays.poisoned(1, dtype=FLOAT64)
    for value in (0.1, 0.7, 1 / 3):
        x[...] = value
        arrays.backend.sum_of_squares([(x, 1)], out)()
        assert math.isclose(out[0], x.size * float(x[0]) ** 2, rel_tol=2e-6)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("squares", [0.0, 25.0, np.inf, np.nan])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip(arrays, max_norm, squares, scaled):
    """Norm and factor are those of torch.nn.utils.clip_grad_norm_, also for gradients with a loss scale."""
    given, norm, factor = (arrays.poisoned(1, dtype=FLOAT64) for _ in range(3))
    given[...] = squares
    inverse = np.full_like(given, 1 / 1024) if scaled else None
    arrays.backend.clip(given, inverse, max_norm, norm, factor)()
    want = math.sqrt(squares) / (1024 if scaled else 1)
    assert np.array_equal(norm, [want], equal_nan=True)
    assert np.array_equal(factor, np.minimum(1, max_norm / (np.array([want]) + 1e-6)), equal_nan=True)


def test_numbers_of_another_kind_are_refused(arrays):
    x, out = arrays.draw(3), arrays.poisoned(1, dtype=FLOAT64)
    with pytest.raises(KernelError, match=r"sum_of_squares: expected out float64 \(1,\), got float32 \(3,\)"):
        arrays.backend.sum_of_squares([(x, 1)], x)
    with pytest.raises(KernelError, match="sum_of_squares: expected array 0 packed"):
        arrays.backend.sum_of_squares([(x[::2], 1)], out)
    with pytest.raises(KernelError, match=r"clip: expected inverse float64 \(1,\), got float32 \(3,\)"):
        arrays.backend.clip(out, x, 1.0, out, out)
