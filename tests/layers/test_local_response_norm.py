"""Tests of local response normalization: its definition, and rejected settings."""

import doctest

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.layers import Input, LocalResponseNorm, local_response_norm
from halograd.layers.local_response_norm import add_windows
from halograd.testing import random_array, run_layer
from tests.support.refusals import refusals

#: Large enough alpha that the gradient's second term matters.
SETTINGS = {"size": 5, "alpha": 0.7, "beta": 0.75, "k": 2.0}


def test_definition_over_several_chunks():
    """Single elements equal the formula of the docstring, for more positions than one chunk."""
    shape, size = (80, 70, 11), 4
    layer = LocalResponseNorm(size, 0.5, 0.6, 1.5)
    with Communicator(MPI.COMM_SELF) as alone:
        y = run_layer(lambda: layer, [shape], alone, {})["y"]
    x = random_array((2, *shape), "x0")
    for n, i, j in ((0, 0, 0), (1, 79, 69), (1, 20, 33)):
        for c in range(shape[-1]):
            window = x[n, i, j, max(0, c - size // 2) : c + (size - 1) // 2 + 1]
            want = x[n, i, j, c] * (1.5 + 0.5 / size * np.sum(window**2)) ** -0.6
            assert y[n, i, j, c] == pytest.approx(want, rel=1e-13)


def test_example_of_the_docstring():
    result = doctest.testmod(local_response_norm)
    assert result.attempted and not result.failed


@pytest.mark.parametrize("before, behind", [(0, 0), (1, 2), (3, 0), (9, 9)])
def test_windows_are_those_of_a_loop(before, behind):
    x = random_array((3, 6), "x")
    out = np.empty_like(x)
    add_windows(x, before, behind, out)
    for c in range(6):
        assert np.allclose(out[:, c], x[:, max(0, c - before) : c + behind + 1].sum(1), rtol=1e-14, atol=1e-14)


def test_shape_and_flops():
    assert LocalResponseNorm()(Input((4, 5, 2))).shape == (4, 5, 2)
    assert LocalResponseNorm(5).flops((4, 5, 2)) == 9 * 40


test_refusals = refusals(
    ({"size": 0}, "size: expected at least 1 channel, got 0"),
    ({"alpha": -1.0}, r"alpha: expected a number >= 0, got -1\.0"),
    ({"beta": 0.0}, "beta, k: expected numbers > 0"),
    ({"k": -1.0}, "beta, k: expected numbers > 0"),
    ({"k": float("nan")}, "beta, k: expected numbers > 0"),
    call=lambda wrong: LocalResponseNorm(**wrong),
)
