"""Tests of training with our own CUDA kernels, executed by the CPU: losses, dropout, optimizers and messages."""

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.kernels.numpy import NumpyBackend
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.testing import grids, random_array, run_layer
from halograd.training.executor import Executor
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.kernels.cuda.host import HostBackend, HostLauncher, compiler
from tests.layers.test_low_precision import near
from tests.support.fake_device import FakeBackend
from tests.training.device_steps import NETWORKS, OPTIMIZERS, assert_near, train
from tests.training.steps import fill


def dropping():
    """Return a network whose only difference between ranks are its dropout masks."""
    x, target = hg.Input((6, 5, 3), "x"), hg.Input((1,), "target", "int64")
    y = hg.Dense(4, name="last")(hg.Dropout(0.4, "drop")(hg.Dense(12, name="first")(hg.Flatten("flat")(x))))
    return hg.Network({"prediction": y, "loss": hg.SoftmaxCrossEntropy(label_smoothing=0.1, name="loss")(y, target)})


def regression():
    x, target = hg.Input((6, 5, 3), "x"), hg.Input((4,), "target")
    y = hg.Dense(4, name="last")(hg.Flatten("flat")(x))
    return hg.Network({"prediction": y, "loss": hg.MeanSquaredError("loss")(y, target)})


CASES = {"dropping": dropping, "regression": regression, "mesh": NETWORKS["mesh"]}


@pytest.fixture(scope="module")
def cuda():
    """Return the CUDA kernels, compiled for the CPU, each once."""
    if compiler() is None:
        pytest.skip("needs g++ to run CUDA kernels on the CPU")
    return HostBackend(HostLauncher())


def compare(name, parts, cuda, optimizer="sgd", clip=None, bound=1e-11):
    network = CASES[name]()
    with Communicator(MPI.COMM_WORLD) as comm:
        expected, params, _ = train(network, comm, NumpyBackend(), parts, optimizer, clip)
        kernels = FakeBackend(cuda)
        found, ours, counts = train(network, comm, kernels, parts, optimizer, clip)
        kernels.close()
    assert_near(found, ours, expected, params, bound)
    assert counts["syncs"] == 0


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", CASES)
def test_losses_dropout_and_messages(name, cuda):
    size = MPI.COMM_WORLD.size
    compare(name, {"height": size} if name == "mesh" else {"sample": size}, cuda)
    launched = set(cuda.launcher.launched)
    assert {"dropping": {"softmax_cross_entropy"}, "regression": {"mean_squared_error"}}.get(name, set()) <= launched


@pytest.mark.ranks(1)
@pytest.mark.parametrize("clip", [None, 1e-3], ids=["unclipped", "clipped"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(optimizer, clip, cuda):
    compare("regression", {}, cuda, optimizer, clip)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("scheme", ["bucketed", "sharded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_prepares_nothing(dtype, scheme, cuda, monkeypatch):
    """After two steps, a step creates no tables of pieces, programs or scratch, also with clipping."""
    network, kernels = NETWORKS["unet"](), FakeBackend(cuda)
    with Communicator(MPI.COMM_WORLD) as comm:
        strategy = Strategy({"height": comm.size}, bucket_bytes=4096, reduction=Scheme(scheme))
        with Executor(network, comm, kernels, 4, strategy, dtype, seed=3) as executor:
            trainer = Trainer(executor, OPTIMIZERS["sgd"](executor.store), Constant(0.01), clip_norm=1.0)
            for step in range(3):
                fill(executor, step)
                if step == 2:
                    for name in ("upload", "empty", "function", "bind"):
                        monkeypatch.setattr(cuda.launcher, name, None)
                trainer.step()
            trainer.synchronize()
    kernels.close()


def agree_on(comm, found, expected, atol, what):
    """Fail on all ranks if the results of any rank differ from the expected ones."""
    wrong = [k for k in expected or () if not np.allclose(found[k], expected[k], rtol=0, atol=atol)]
    comm.agree(AssertionError(f"{what}: {wrong} differ") if wrong else None)


LAYERS = {
    "resize": lambda: hg.Resize(2, mode="bilinear", name="l"),
    "resize down": lambda: hg.Resize(size=[4, 9], mode="linear", name="l"),
    "nearest": lambda: hg.Resize(3, name="l"),
    "layer norm": lambda: hg.LayerNorm("channels", activation="relu", name="l"),
    "layer norm, plain": lambda: hg.LayerNorm("channels", affine=False, name="l"),
    "dropout": lambda: hg.Dropout(0.4, name="l"),
}


NORMS = {
    "group norm": lambda: hg.GroupNorm(2, activation="relu", name="l"),
    "group norm, plain": lambda: hg.GroupNorm(2, affine=False, name="l"),
    "instance norm": lambda: hg.InstanceNorm(name="l"),
    "layer norm of samples": lambda: hg.LayerNorm(activation="relu", name="l"),
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_all_samples_at_once(name, cuda):
    """Norms in float32 equal NumPy's, also with ranks without samples and blocks that do not divide."""
    kernels = FakeBackend(cuda)
    cuda.launcher.launched.clear()
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in grids(comm.size, ("sample", "height", "width")):
            expected = run_layer(NORMS[name], [(7, 6, 4)], comm, parts, steps=2)
            found = run_layer(NORMS[name], [(7, 6, 4)], comm, parts, steps=2, backend=kernels, dtype="float32")
            agree_on(comm, found, expected, 2e-5, parts)
            single = run_layer(NORMS[name], [(7, 6, 4)], comm, parts, backend=kernels, dtype="bfloat16")
            wrong = [k for k in expected or () if k != "loss" and not near(single[k], expected[k])]
            comm.agree(AssertionError(f"{parts}: {wrong} differ in bfloat16") if wrong else None)
    assert {"group_totals", "group_moments", "group_spread"} <= set(cuda.launcher.launched)
    kernels.close()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
@pytest.mark.parametrize("options", [{"activation": "relu"}, {"affine": False}, {"statistics": "sample"}], ids=str)
def test_batch_norm_in_training(options, residual, cuda):
    """Batch norm kernels compute means, running statistics and gradients in float32, also for odd channels."""
    kernels, shapes = FakeBackend(cuda), [(7, 6, 5)] * (1 + residual)

    def make():
        return hg.BatchNorm(name="l", **options)

    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in grids(comm.size, ("sample", "height", "width")):
            expected = run_layer(make, shapes, comm, parts, steps=2, batch=3)
            found = run_layer(make, shapes, comm, parts, steps=2, batch=3, backend=kernels, dtype="float32")
            agree_on(comm, found, expected, 3e-5, parts)
            state = [running(backend, make, shapes, comm, parts) for backend in (NumpyBackend(), kernels)]
            for ours, theirs in zip(*state):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    kernels.close()


def running(backend, make, shapes, comm, parts):
    """Return the running statistics of a layer after two steps."""
    nodes = [hg.Input(s, name=f"x{i}") for i, s in enumerate(shapes)]
    target = hg.Input(shapes[0], name="target")
    network = hg.Network({"loss": hg.MeanSquaredError("loss")(make()(*nodes), target)})
    with Executor(network, comm, backend, 3, Strategy(parts), "float32") as executor:
        for _ in range(2):
            for name in network.inputs:
                executor.set_input(name, random_array((3, *shapes[0]), name))
            executor.forward(training=True)
            executor.backward()
        executor.reducer.finish()
        return [executor.device.to_host(array).copy() for array in executor.store.state.values()]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name, cuda):
    kernels = FakeBackend(cuda)
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in grids(comm.size, ("height", "width")):
            expected = run_layer(LAYERS[name], [(7, 6, 4)], comm, parts, steps=2)
            found = run_layer(LAYERS[name], [(7, 6, 4)], comm, parts, steps=2, backend=kernels)
            agree_on(comm, found, expected, 1e-12, parts)
    kernels.close()
