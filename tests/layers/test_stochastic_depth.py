"""Stochastic depth: the same samples dropped on every cut, others in every step, identity in evaluation."""

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers import Conv, Input, Network, StochasticDepth
from halograd.testing import check_layer
from halograd.training.executor import Executor
from tests.layers.geometries import skew

SHAPES = [(7, 6, 3), (9, 2), (5, 4, 3, 2), (4,)]


@pytest.mark.mpi
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_exact_on_every_grid(shape):
    check_layer(lambda: StochasticDepth(0.5), shape, batch=5)


@pytest.mark.ranks(2, 3, 4)
def test_exact_with_channels_cut():
    check_layer(lambda: StochasticDepth(0.5), SHAPES[0], batch=5, axes=("sample", "height", "channel"), gradient=False)


@pytest.mark.many_ranks
def test_exact_on_uneven_and_empty_blocks_of_a_residual(monkeypatch):
    skew(monkeypatch)

    def residual():
        conv, drop = Conv(3, 3, padding=1, name="c"), StochasticDepth(0.5, "d")
        return lambda x: x + drop(conv(x))

    check_layer(residual, SHAPES[0], batch=5, gradient=False)


def dropped(step=0, seed=0, rate=0.4, training=True, name="drop", samples=400):
    """Factor of each sample."""
    network = Network(StochasticDepth(rate, name)(Input((2, 3, 2))))
    with (
        Communicator(MPI.COMM_SELF) as alone,
        get_backend("numpy") as kernels,
        Executor(network, alone, kernels, samples, dtype="float64", seed=seed, trainable=False) as executor,
    ):
        executor.mode.step = step
        executor.set_input("x", np.ones((samples, 2, 3, 2)))
        executor.forward(training=training)
        y = executor.gather(name).reshape(samples, -1)
    assert (y == y[:, :1]).all(), "a sample is dropped whole"
    return y[:, 0]


def test_rate_and_scale():
    factors = dropped()
    assert set(factors) == {0.0, 1 / 0.6}
    # Binomial with 400 draws: five standard deviations are 0.122.
    assert abs(np.mean(factors == 0) - 0.4) < 0.122


def test_what_is_dropped_depends_on_step_seed_and_name_but_not_on_the_batch():
    assert np.array_equal(dropped(), dropped())
    assert np.array_equal(dropped()[:10], dropped(samples=10))
    for other in ({"step": 1}, {"seed": 1}, {"name": "other"}):
        assert not np.array_equal(dropped(), dropped(**other))


def test_identity_in_evaluation_and_for_rate_zero():
    assert (dropped(training=False) == 1).all() and (dropped(rate=0.0) == 1).all()


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_refuses_rates_outside(rate):
    with pytest.raises(ValueError, match=r"StochasticDepth: expected a rate in \[0, 1\), got"):
        StochasticDepth(rate)
