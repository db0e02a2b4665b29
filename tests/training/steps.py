"""Training steps for several tests: networks, inputs, plain gradient descent, and a comparison with one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers import Network
from halograd.layers.strategy import Strategy
from halograd.models import lenet5, mesh, resnet, unet
from halograd.testing import random_array
from halograd.training.executor import Executor
from halograd.training.trainer import Trainer
from tests.models.gated import gated

STEPS, BATCH = 10, 4
# Small enough that one process whose parameters start an eps apart keeps its losses: at 0.02 and 0.05 the small
# ResNet meets a kink (a ReLU or a maximum that ties) and two single processes part by 0.1 within ten steps.
RATE = 0.01

NETWORKS: dict[str, Callable[[], Network]] = {
    "mesh": lambda: mesh(resolution=(40, 36), channels=5, widths=(6, 8, 8), convs=2, name="small mesh"),
    "mesh_decoder": lambda: mesh(resolution=16, channels=3, widths=(4, 6), convs=1, decoder=True, pos_weight=3.0),
    "resnet": lambda: resnet((1, 1, 1, 1), classes=5, resolution=36, width=4, name="small resnet"),
    "unet": lambda: unet((16, 24), channels=2, classes=3, width=4, levels=2, name="small unet"),
    "lenet": lambda: lenet5(classes=4, resolution=28),
    "gated": gated,
}


class Outcome(NamedTuple):
    """Outcome of some steps: losses, this rank's blocks of the parameters, and the slices of these blocks."""

    losses: np.ndarray
    params: dict[str, np.ndarray]
    places: dict[str, tuple[slice, ...]]


def copied(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in arrays.items()}


def outcome(executor: Executor, losses: Sequence[float]) -> Outcome:
    """Return the outcome of training after the last update."""
    store = executor.store
    return Outcome(np.array(losses), copied(store.params), {k: store.box(k).slices() for k in store.params})


def descend(
    network: Network,
    comm: Communicator,
    strategy: Strategy,
    dtype: str = "float64",
    backend: str = "numpy",
    steps: int = STEPS,
    rate: float = RATE,
) -> Outcome:
    """Train by plain gradient descent; return the outcome. Collective."""
    losses = []
    with Executor(network, comm, get_backend(backend), BATCH, strategy, dtype, seed=3) as executor:

        def update(bucket):
            bucket.params -= rate * bucket.grads

        executor.reducer.update = update
        for step in range(steps):
            executor.mode.step = step
            fill(executor, step)
            executor.forward()
            losses.append(executor.loss_value())
            executor.backward()
        executor.reducer.finish()
        return outcome(executor, losses)


def fill(executor: Executor, step: int) -> None:
    """Fill inputs with values drawn by global index, the same under every cut."""
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


def advance(trainer: Trainer, numbers: Iterable[int]) -> list[float]:
    """Train the steps with these numbers; return their losses. Collective."""
    losses = []
    for number in numbers:
        fill(trainer.executor, number)
        losses.append(trainer.step())
    return losses


def learned(found: Outcome) -> Outcome:
    """Check that the losses of a reference fall, and return it."""
    assert np.isfinite(found.losses).all() and found.losses[-1] < found.losses[0], "the network must learn something"
    return found


def bound(network: Network, dtype: str, steps: int = STEPS) -> np.ndarray:
    """Return the allowed difference of losses in each step, which grows with the steps, as rounding errors do."""
    longest = max(math.prod(n.shape) for n in network.layers.values()) * BATCH
    return float(np.finfo(dtype).eps) * math.sqrt(longest) * 20 * (1 + np.arange(steps)) ** 2


def check_losses(comm: Communicator, found: np.ndarray, want: np.ndarray, allowed: np.ndarray, what: object) -> None:
    """Fail on all ranks unless losses are within the bound of those of one process. Collective."""
    error = np.abs(found - want) / np.maximum(1.0, np.abs(want))
    with comm.agreement():
        assert (error <= allowed).all(), f"{what}: losses differ by {error}, allowed are {allowed}"


def check_outcome(comm: Communicator, found: Outcome, want: Outcome, allowed: np.ndarray, what: object) -> None:
    """Fail on all ranks unless losses, and parameters with ten times the bound, are those of one process. Collective.

    The arrays of the process are whole.
    """
    check_losses(comm, found.losses, want.losses, allowed, what)
    blocks = {name: array[found.places[name]] for name, array in want.params.items()}
    worst = float(np.max([np.max(np.abs(found.params[k] - array), initial=0.0) for k, array in blocks.items()]))
    with comm.agreement():
        assert worst <= 10 * allowed[-1], f"{what}: parameters differ by {worst}, allowed are {10 * allowed[-1]}"


def assert_arrays(
    found: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray], atol: float = 0.0, what: str = ""
) -> None:
    """Check that every expected array was found, by default with the same bits."""
    for name, array in want.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=atol, err_msg=f"{what} {name}")
