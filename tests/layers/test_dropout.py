"""Tests of dropout and stochastic depth: the mask is the same under every cut, and differs in every step."""

from functools import partial

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.dtensor import Box
from halograd.kernels import get_backend
from halograd.kernels.numpy.pointwise import global_counters, mix64, mix64_inplace
from halograd.layers import ChannelDropout, Dropout, Input, Network, StochasticDepth
from halograd.training.executor import Executor
from tests.support.refusals import refusals

GOLDEN = 0x9E3779B97F4A7C15


def masks(step=0, seed=0, rate=0.3, training=True, shape=(20, 20, 5)):
    """Return the output of dropout for an input of ones."""
    network = Network(Dropout(rate, "drop")(Input(shape)))
    with (
        Communicator(MPI.COMM_SELF) as alone,
        get_backend("numpy") as kernels,
        Executor(network, alone, kernels, 2, dtype="float64", seed=seed, trainable=False) as executor,
    ):
        executor.mode.step = step
        executor.set_input("x", np.ones((2, *shape)))
        executor.forward(training=training)
        return executor.gather("drop")


def test_rate_and_scale():
    y = masks()
    assert set(np.unique(y)) == {0.0, 1 / 0.7}
    # Binomial with 4000 draws: five standard deviations are 0.036.
    assert abs(np.mean(y == 0) - 0.3) < 0.036
    # Neighbors are independent: both dropped with probability 0.09, five standard deviations are 0.023.
    for axis in range(4):
        both = (np.delete(y, 0, axis) == 0) & (np.delete(y, -1, axis) == 0)
        assert abs(np.mean(both) - 0.09) < 5 * np.sqrt(0.09 * 0.91 / both.size) * 1.5


def test_mask_depends_on_step_and_seed():
    assert np.array_equal(masks(), masks())
    assert not np.array_equal(masks(), masks(step=1))
    assert not np.array_equal(masks(), masks(seed=1))


def test_identity_in_evaluation_and_for_rate_zero():
    assert np.array_equal(masks(training=False), np.ones((2, 20, 20, 5)))
    assert np.array_equal(masks(rate=0.0), np.ones((2, 20, 20, 5)))


@pytest.mark.parametrize("shape", [(3, 4), (2, 5, 3), (2, 5, 4, 3), (2, 3, 4, 2, 3)])
def test_counters_are_those_of_the_global_index(shape):
    index = np.arange(np.prod(shape), dtype=np.uint64).reshape(shape)
    box = Box(tuple(n // 3 for n in shape), tuple(n - n // 4 for n in shape))
    outer, inner = global_counters(shape, box.start, box.shape)
    with np.errstate(over="ignore"):
        want = index[box.slices()] * np.uint64(GOLDEN)
    assert np.array_equal((outer[:, None] + inner).reshape(box.shape), want)


def test_hash_is_splitmix64():
    """The hash gives the first values of the published splitmix64 generator for seed 0."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [mix64(k * GOLDEN) for k in range(3)] == published
    z = np.array([(k + 1) * GOLDEN % 2**64 for k in range(3)], np.uint64)
    mix64_inplace(z, np.empty_like(z))
    assert [int(v) for v in z] == published


test_refuses_rates_outside = refusals(
    *((partial(Dropout, rate), r"Dropout: expected a rate in \[0, 1\), got") for rate in (-0.1, 1.0, 1.5)),
    *((partial(StochasticDepth, rate), r"StochasticDepth: expected a rate in \[0, 1\), got") for rate in (-0.1, 1.0)),
    (partial(ChannelDropout, 1.0), r"ChannelDropout: expected a rate in \[0, 1\), got"),
)


DEPTH_SHAPES = [(7, 6, 3), (9, 2), (5, 4, 3, 2), (4,)]


def dropped(step=0, seed=0, rate=0.4, training=True, name="drop", samples=400, kind=StochasticDepth):
    """Return the factor by which the layer multiplies each sample, or each of its two channels."""
    network = Network(kind(rate, name)(Input((2, 3, 2))))
    with (
        Communicator(MPI.COMM_SELF) as alone,
        get_backend("numpy") as kernels,
        Executor(network, alone, kernels, samples, dtype="float64", seed=seed, trainable=False) as executor,
    ):
        executor.mode.step = step
        executor.set_input("x", np.ones((samples, 2, 3, 2)))
        executor.forward(training=training)
        y = executor.gather(name).reshape(samples, 6, 2)
    assert (y == y[:, :1]).all(), "a channel is dropped whole"
    if kind is ChannelDropout:
        return y[:, 0]
    assert (y == y[..., :1]).all(), "a sample is dropped whole"
    return y[:, 0, 0]


def test_channels_are_dropped_independently():
    factors = dropped(samples=200, kind=ChannelDropout)
    first, second = factors.T == 0
    # Five standard deviations: 0.122 of 400 draws at 0.4, 0.13 of 200 at 0.16.
    assert set(factors.ravel()) == {0.0, 1 / 0.6} and abs(np.mean(factors == 0) - 0.4) < 0.122
    assert abs(np.mean(first & second) - 0.16) < 0.13
    assert (dropped(training=False, kind=ChannelDropout) == 1).all()


def test_rate_and_scale_of_depth():
    factors = dropped()
    assert set(factors) == {0.0, 1 / 0.6}
    # Binomial with 400 draws: five standard deviations are 0.122.
    assert abs(np.mean(factors == 0) - 0.4) < 0.122


def test_what_is_dropped_depends_on_step_seed_and_name_but_not_on_the_batch():
    assert np.array_equal(dropped(), dropped())
    assert np.array_equal(dropped()[:10], dropped(samples=10))
    for other in ({"step": 1}, {"seed": 1}, {"name": "other"}):
        assert not np.array_equal(dropped(), dropped(**other))


def test_depth_is_identity_in_evaluation_and_for_rate_zero():
    assert (dropped(training=False) == 1).all() and (dropped(rate=0.0) == 1).all()
