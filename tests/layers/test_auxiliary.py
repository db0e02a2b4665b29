"""Cross-entropy with auxiliary predictions: the weighted sum in training, the prediction alone in evaluation."""

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.dtensor import axis_names
from halograd.kernels import get_backend
from halograd.layers import AuxiliaryCrossEntropy, Input, Network, SoftmaxCrossEntropy
from halograd.layers.strategy import Strategy
from halograd.testing import grids, random_array
from halograd.training.executor import Executor

CLASSES, BATCH, WEIGHT = 4, 5, 0.3
SETTINGS = {"class_weights": (0.5, 2.0, 0.0, 1.5), "label_smoothing": 0.1}


def target(shape):
    return np.floor(np.abs(random_array((BATCH, *shape[:-1], 1), "t") * 1000) % CLASSES)


def run(layer, shape, heads, comm, parts=None, training=True, valid=BATCH, steps=2):
    """Loss, and on rank 0 the gradient of every prediction; random predictions of one seed each. Collective."""
    names = [f"x{i}" for i in heads]
    first, *others = (Input(shape, name) for name in names)
    loss = layer(first, Input((*shape[:-1], 1), "t", "int32"), *others)
    strategy, numpy = Strategy(parts or {}), get_backend("numpy")
    with Executor(Network({"loss": loss}), comm, numpy, BATCH, strategy, "float64", probed=names) as executor:
        executor.mode.valid = valid
        executor.set_input("t", target(shape))
        for name in names:
            executor.set_input(name, random_array((BATCH, *shape), name))
        for _ in range(steps):
            executor.forward(training=training)
            value = executor.loss_value()
            executor.backward()
        return value, [executor.gather(name, gradient=True) for name in names]


@pytest.mark.parametrize("shape", [(CLASSES,), (3, 2, CLASSES)])
@pytest.mark.parametrize("valid", [BATCH, 3])
@pytest.mark.parametrize("normalization", ["count", "weights"])
def test_is_the_weighted_sum_of_cross_entropies(shape, valid, normalization):
    """Also when the step is repeated: the gradient is scaled once per forward."""
    settings = {**SETTINGS, "normalization": normalization}
    with Communicator(MPI.COMM_SELF) as alone:
        value, found = run(AuxiliaryCrossEntropy(WEIGHT, **settings), shape, (0, 1, 2), alone, valid=valid)
        single = [run(SoftmaxCrossEntropy(**settings), shape, (i,), alone, valid=valid) for i in range(3)]
    factors = (1.0, WEIGHT, WEIGHT)
    assert value == pytest.approx(sum(f * v for f, (v, _) in zip(factors, single)), rel=1e-14)
    for have, f, (_, (want,)) in zip(found, factors, single):
        np.testing.assert_allclose(have, f * want, rtol=1e-14, atol=1e-300)


def test_evaluation_judges_the_prediction_alone():
    with Communicator(MPI.COMM_SELF) as alone:
        value, found = run(AuxiliaryCrossEntropy(WEIGHT), (CLASSES,), (0, 1), alone, training=False)
        want, (gradient,) = run(SoftmaxCrossEntropy(), (CLASSES,), (0,), alone, training=False)
    assert value == want
    assert np.array_equal(found[0], gradient) and not found[1].any()


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [(CLASSES,), (3, 4, CLASSES)])
@pytest.mark.parametrize("normalization", ["count", "weights"])
def test_exact_on_every_grid(shape, normalization):
    settings = {**SETTINGS, "normalization": normalization}

    def make():
        return AuxiliaryCrossEntropy(WEIGHT, **settings)

    with Communicator(MPI.COMM_SELF) as alone:
        want, gradients = run(make(), shape, (0, 1, 2), alone)
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in grids(comm.size, ("sample", *axis_names(len(shape) + 1)[1:-1])):
            value, found = run(make(), shape, (0, 1, 2), comm, parts)
            assert value == pytest.approx(want, rel=1e-14)
            if comm.rank == 0:
                for have, expected in zip(found, gradients):
                    np.testing.assert_allclose(have, expected, rtol=1e-14, atol=1e-300)


def test_refusals():
    x, t = Input((CLASSES,)), Input((1,))
    with pytest.raises(ValueError, match=r"weight: expected a number > 0, got 0"):
        AuxiliaryCrossEntropy(0)
    with pytest.raises(ValueError, match="at least one auxiliary prediction, got 2 inputs; use SoftmaxCrossEntropy"):
        AuxiliaryCrossEntropy()(x, t)
    with pytest.raises(ValueError, match=r"expected a target of shape \(2, 1\), got \(1,\)"):
        AuxiliaryCrossEntropy()(x, t, Input((2, CLASSES)))


def test_the_target_alone_is_compared_with():
    """In 16 bits it keeps its digits; auxiliary predictions have the dtype of the other."""
    assert [AuxiliaryCrossEntropy().compares(i) for i in range(4)] == [False, True, False, False]
