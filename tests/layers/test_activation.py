"""Tests of activations and softmax: before convolutions, at extremes, as logits."""

import numpy as np
import pytest

import halograd as hg
from halograd.comm import Communicator
from halograd.layers.strategy import Strategy
from halograd.testing import random_array, run_layer
from tests.layers.cases import ACTIVATIONS
from tests.layers.graphs import run


def test_softmax_of_large_values_is_finite():
    from mpi4py import MPI

    x = np.array([[[1e4, 1e4, -1e4]]]).repeat(2, axis=0)
    with Communicator(MPI.COMM_SELF) as alone:
        y = run_layer(hg.Softmax, [(1, 3)], alone, {}, shift={"x0": x - random_array(x.shape, "x0")})["y"]
    assert np.allclose(y, [0.5, 0.5, 0.0])


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_log_softmax_of_large_values_keeps_its_digits(dtype):
    from mpi4py import MPI

    x = np.array([[[1e4, 1e4 - 1, -1e4]]]).repeat(2, axis=0)
    with Communicator(MPI.COMM_SELF) as alone:
        drawn = random_array(x.shape, "x0")
        y = run_layer(hg.LogSoftmax, [(1, 3)], alone, {}, dtype=dtype, shift={"x0": x - drawn})["y"]
    small = np.log1p(np.exp(-1))
    np.testing.assert_allclose(y, [[[-small, -1 - small, -2e4 - small]]] * 2, rtol=1e-6)


def test_a_cross_entropy_takes_logarithms_of_probabilities_as_logits():
    from mpi4py import MPI

    def found(end):
        x, t = hg.Input((5, 3), "x"), hg.Input((5, 1), "t", "int32")
        loss = hg.SoftmaxCrossEntropy(name="ce")(end(hg.Conv(3, 1, name="c")(x)), t)
        with Communicator(MPI.COMM_SELF) as alone:
            return run(hg.Network({"loss": loss}), alone, 2, Strategy({}), [0])

    plain, behind = found(lambda y: y), found(hg.LogSoftmax())
    for key in ("loss", "dx", "dc/w", "dc/b"):
        np.testing.assert_allclose(behind[key], plain[key], rtol=1e-12, atol=1e-15)


def test_shape_is_kept():
    for make in ACTIVATIONS.values():
        assert make()(hg.Input((4, 5, 2))).shape == (4, 5, 2)
    assert hg.ReLU().flops((4, 5, 2)) == 40


def test_an_unknown_approximation_is_refused():
    with pytest.raises(ValueError, match=r"GELU: approximate: expected 'none' or 'tanh', got 'name'"):
        hg.GELU("name")


def test_a_clamp_without_room_is_refused():
    with pytest.raises(ValueError, match=r"Clamp: expected low < high, got 6, 0"):
        hg.Clamp(6, 0)
