"""Tests of layers on the double of a device: results equal those of the host, without a synchronization."""

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.dtensor import axis_names
from halograd.layers.strategy import Strategy
from halograd.testing import random_array, run_layer
from halograd.training.executor import Executor
from tests.kernels.cuda.host import HostBackend, HostLauncher, compiler
from tests.layers.cases import LAYERS
from tests.support.fake_device import FakeBackend


class Sharpen(hg.Layer):
    """Custom layer that uses only NumPy functions, which device arrays implement."""

    stencil = hg.Stencil(kernel=3, padding=1)

    def parameters(self, shape):
        return {"amount": hg.Parameter((shape[-1],), init="ones", decay=False)}

    def forward(self, inputs, params, box):
        (x,) = inputs
        return x[:, 1:-1, 1:-1] - params["amount"] * laplacian(x)

    def backward(self, dy, inputs, params, box):
        (x,) = inputs
        dx = np.zeros_like(x)
        dx[:, 1:-1, 1:-1] = dy
        weighted = params["amount"] * dy
        for part in (dx[:, :-2, 1:-1], dx[:, 2:, 1:-1], dx[:, 1:-1, :-2], dx[:, 1:-1, 2:]):
            part -= weighted
        dx[:, 1:-1, 1:-1] += 4 * weighted
        return [dx], {"amount": -np.sum(dy * laplacian(x), axis=(0, 1, 2))}


class OnTheHost(Sharpen):
    """Custom layer that wrongly creates host arrays on a device."""

    def forward(self, inputs, params, box):
        return np.zeros(box.shape)


def laplacian(x):
    around = x[:, :-2, 1:-1] + x[:, 2:, 1:-1] + x[:, 1:-1, :-2] + x[:, 1:-1, 2:]
    return around - 4 * x[:, 1:-1, 1:-1]


SPATIAL = [(7, 6, 4)]
OF_DEVICES = {**LAYERS, "custom": (lambda: Sharpen("l"), SPATIAL)}


def same(found, expected):
    for key, want in expected.items():
        bound = 1000 * np.finfo("float64").eps * max(1.0, np.abs(want).max(initial=0))
        np.testing.assert_allclose(found[key], want, rtol=0, atol=bound, err_msg=key)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", OF_DEVICES)
def test_layers_compute_what_they_compute_on_the_host(turn, name):
    make, shapes = OF_DEVICES[name]
    with Communicator(MPI.COMM_WORLD) as comm:
        axes = axis_names(len(shapes[0]) + 1)[1:-1] or ("sample",)
        axis = axes[(turn + comm.size) % len(axes)]
        kernels = FakeBackend()
        expected = run_layer(make, shapes, comm, {axis: comm.size}, steps=2)
        found = run_layer(make, shapes, comm, {axis: comm.size}, steps=2, backend=kernels)
        with comm.agreement():
            same(found or {}, expected or {})
        assert set(kernels.device.synchronizations) <= {"get()"}, "only to look at the results"
        kernels.close()


NEEDS_COMPILER = pytest.mark.skipif(compiler() is None, reason="needs g++ to run CUDA kernels on the CPU")


def several(x, t):
    """Return a weighted sum of losses, one of them for training only."""
    return (
        hg.SoftmaxCrossEntropy()(x, t)
        + 0.5 * hg.Dice("softmax")(x, t)
        + hg.training_only(2 * hg.Tversky(0.2, 1, "softmax")(x, t))
    )


LOSSES = {
    "mean squared": (lambda: hg.MeanSquaredError("loss"), (6, 5, 3), (6, 5, 3)),
    "mean absolute": (lambda: hg.AbsoluteError("loss"), (6, 5, 3), (6, 5, 3)),
    "huber": (lambda: hg.Huber(0.3, name="loss"), (6, 5, 3), (6, 5, 3)),
    "similarity": (lambda: hg.StructuralSimilarity(2.0, 3, name="loss"), (6, 5, 3), (6, 5, 3)),
    "gradients": (lambda: hg.GradientError("sobel", name="loss"), (6, 5, 3), (6, 5, 3)),
    "ensemble": (lambda: hg.CRPS(3, name="loss"), (6, 5, 3), (6, 5, 1)),
    "focal": (lambda: hg.Focal(name="loss"), (6, 5, 3), (6, 5, 3)),
    "binary": (lambda: hg.BinaryCrossEntropyWithLogits(name="loss"), (6, 5, 3), (6, 5, 3)),
    "tversky": (lambda: hg.Tversky(0.3, 0.7, "softmax", name="loss"), (6, 5, 3), (6, 5, 1)),
    "several": (lambda: several, (6, 5, 3), (6, 5, 1)),
    "dice": (lambda: hg.Dice("softmax", name="loss"), (6, 5, 3), (6, 5, 1)),
    "dice per sample": (lambda: hg.Dice("sigmoid", "sample", name="loss"), (6, 5, 3), (6, 5, 3)),
    "cross-entropy": (lambda: hg.SoftmaxCrossEntropy(name="loss"), (6, 5, 3), (6, 5, 1)),
    "weighted": (
        lambda: hg.SoftmaxCrossEntropy([1.0, 2.0, 0.5], "weights", 0.1, ignore_index=2, name="loss"),
        (6, 5, 3),
        (6, 5, 1),
    ),
}


def loss_and_gradient(make, shape, target, comm, kernels, parts, wrong=False, weights=None):
    nodes = [hg.Input(shape, "x"), hg.Input(target, "t", "compute" if target == shape else "int64")]
    nodes += [] if weights is None else [hg.Input(weights, "w")]
    network = hg.Network({"loss": make()(*nodes)})
    with Executor(network, comm, kernels, 2, Strategy(parts), "float64", probed=["x"]) as executor:
        executor.set_input("x", random_array((2, *shape), "x"))
        targets = np.floor(np.abs(random_array((2, *target), "t")) * 100) % shape[-1]
        targets = targets / 2 if target == shape else targets
        executor.set_input("t", targets + 7 if wrong else targets)
        if weights is not None:
            executor.set_input("w", np.maximum(random_array((2, *weights), "w"), 0))
        executor.forward()
        loss = executor.loss_value()
        executor.backward()
        return loss, executor.gather("x", gradient=True)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_compute_what_they_compute_on_the_host(name):
    from halograd.kernels.numpy import NumpyBackend

    make, shape, target = LOSSES[name]
    with Communicator(MPI.COMM_WORLD) as comm:
        kernels, parts = FakeBackend(), {"height": comm.size}
        expected, gradient = loss_and_gradient(make, shape, target, comm, NumpyBackend(), parts)
        found, ours = loss_and_gradient(make, shape, target, comm, kernels, parts)
        assert found == pytest.approx(expected, rel=1e-13)
        if comm.rank == 0:
            np.testing.assert_allclose(ours, gradient, rtol=0, atol=1e-14)
        assert set(kernels.device.synchronizations) <= {"get()"}
        kernels.close()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("weights", [(6, 5, 1), (1, 1, 1), (1,)], ids=str)
@pytest.mark.parametrize("cuda", [False, pytest.param(True, marks=NEEDS_COMPILER)])
def test_weighted_losses_compute_what_they_compute_on_the_host(cuda, weights):
    """Weighted losses on a device equal those on the host, by device kernels or by functions of its arrays."""
    from halograd.kernels.numpy import NumpyBackend

    with Communicator(MPI.COMM_WORLD) as comm:
        kernels = FakeBackend(HostBackend(HostLauncher()) if cuda else None)
        for name, (make, shape, target) in LOSSES.items():
            if name == "several":
                continue
            for normalization in ("count", "weights"):

                def made(make=make, normalization=normalization):
                    return make().changed(normalization=normalization)

                given = shape, target, comm
                parts = {"width": comm.size}
                expected, gradient = loss_and_gradient(made, *given, NumpyBackend(), parts, weights=weights)
                found, ours = loss_and_gradient(made, *given, kernels, parts, weights=weights)
                assert found == pytest.approx(expected, rel=1e-13), name
                if comm.rank == 0:
                    np.testing.assert_allclose(ours, gradient, rtol=0, atol=1e-14, err_msg=name)
        assert set(kernels.device.synchronizations) <= {"get()"}
        kernels.close()


@pytest.mark.ranks(1)
@NEEDS_COMPILER
def test_a_target_that_is_no_class_makes_the_loss_undefined():
    """A target that is no class makes the loss NaN on a device, where the host does not read targets."""
    make, shape, target = LOSSES["cross-entropy"]
    kernels = FakeBackend(HostBackend(HostLauncher()))
    with Communicator(MPI.COMM_WORLD) as comm:
        loss, _ = loss_and_gradient(make, shape, target, comm, kernels, {}, wrong=True)
    kernels.close()
    assert np.isnan(loss)


@pytest.mark.ranks(1)
def test_a_custom_layer_that_returns_an_array_of_the_host_is_refused():
    kernels = FakeBackend()
    with Communicator(MPI.COMM_WORLD) as comm, pytest.raises(ValueError, match="expected an array on fake:0"):
        run_layer(lambda: OnTheHost("l"), SPATIAL, comm, {}, backend=kernels)
    kernels.close()
