"""Training under every sample x height x width cut gives the losses of one process."""

import functools
import math

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.models import lenet5, mesh, resnet, unet
from halograd.testing import grids, random_array
from halograd.training.executor import Executor
from tests.models.gated import gated

STEPS = 10
# Small enough that one process whose parameters start an eps apart keeps its losses: at 0.02 and 0.05 the small
# ResNet meets a kink (a ReLU or a maximum that ties) and two single processes part by 0.1 within ten steps.
RATE = 0.01

NETWORKS = {
    "mesh": lambda: mesh(resolution=(40, 36), channels=5, widths=(6, 8, 8), convs=2, name="small mesh"),
    "mesh_decoder": lambda: mesh(resolution=16, channels=3, widths=(4, 6), convs=1, decoder=True, pos_weight=3.0),
    "resnet": lambda: resnet((1, 1, 1, 1), classes=5, resolution=36, width=4, name="small resnet"),
    "unet": lambda: unet((16, 24), channels=2, classes=3, width=4, levels=2, name="small unet"),
    "lenet": lambda: lenet5(classes=4, resolution=28),
    "gated": gated,
}


def train(network, comm, parts, dtype, backend="numpy", batch=4, options=None, steps=STEPS):
    """Losses of `steps` steps of plain gradient descent, and the parameters afterwards. Collective."""
    strategy = Strategy(parts, options=options or {}, bucket_bytes=4096)
    losses = []
    with Executor(network, comm, get_backend(backend), batch, strategy, dtype, seed=3) as executor:

        def update(bucket):
            bucket.params -= RATE * bucket.grads

        executor.reducer.update = update
        for step in range(steps):
            executor.mode.step = step
            fill(executor, step)
            executor.forward()
            losses.append(executor.loss_value())
            executor.backward()
        executor.reducer.finish()
        return np.array(losses), {k: v.copy() for k, v in executor.store.params.items()}


def fill(executor, step):
    """Inputs drawn by global index: the same whatever the cut."""
    for name, node in executor.network.inputs.items():
        shape = (executor.batch, *node.shape)
        array = random_array(shape, name, seed=step % 3)
        if node.dtype != "compute":
            classes = executor.network.outputs["kind" if name == "kind" else "prediction"].shape[-1]
            array = np.floor((array * 1000) % classes)
        elif name == "target":
            array = (array > 0.5).astype(float)
        elif name in executor.network.targets:  # weights
            array = np.maximum(array, 0)
        executor.set_input(name, array)


@functools.cache
def alone(name, dtype, backend):
    """What one process computes."""
    with Communicator(MPI.COMM_SELF) as comm:
        losses, parameters = train(NETWORKS[name](), comm, {}, dtype, backend)
    assert np.isfinite(losses).all() and losses[-1] < losses[0], "the network must learn something"
    return losses, parameters


def check(name, comm, dtype, backend="numpy", options=None):
    """Compare with one process; the bound grows with the steps, as rounding does in training."""
    network = NETWORKS[name]()
    expected, parameters = alone(name, dtype, backend)
    eps = float(np.finfo(dtype).eps)
    reduction = max(math.prod(n.shape) for n in network.layers.values()) * 4
    bound = eps * math.sqrt(reduction) * 20 * (1 + np.arange(STEPS)) ** 2
    for parts in grids(comm.size, ("sample", "height", "width")):
        found, ours = train(network, comm, parts, dtype, backend, options=options)
        error = np.abs(found - expected) / np.maximum(1.0, np.abs(expected))
        fault = None
        if not (error <= bound).all():
            fault = AssertionError(f"{name} under {parts}: losses differ by {error}, allowed are {bound}")
        worst = float(np.max([np.max(np.abs(ours[k] - parameters[k])) for k in parameters]))
        if not worst <= bound[-1] * 10:
            fault = AssertionError(f"{name} under {parts}: parameters differ by {worst}")
        comm.agree(fault)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", NETWORKS)
def test_losses_of_ten_steps_are_those_of_one_process(name, dtype):
    with Communicator(MPI.COMM_WORLD) as comm:
        check(name, comm, dtype)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["mesh", "unet"])
def test_overlapped_halos_give_the_same_losses(name):
    with Communicator(MPI.COMM_WORLD) as comm:
        check(name, comm, "float64", options={"halo": "overlap"})


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["mesh", "resnet"])
def test_onednn_gives_the_losses_of_one_process(name):
    with Communicator(MPI.COMM_WORLD) as comm:
        check(name, comm, "float32", backend="onednn")


@pytest.mark.ranks(6)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["mesh", "resnet", "unet"])
def test_losses_on_every_grid_of_six_ranks(name, dtype):
    with Communicator(MPI.COMM_WORLD) as comm:
        check(name, comm, dtype)
