"""Training under a scheme of gradient reduction, held against one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.testing import grids
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.training.test_exactness import NETWORKS, RATE, STEPS, fill

BATCH, BUCKET = 4, 4096
NODES_OF_TWO = "emulated:alpha=1e-5,beta=1e-11,node=2"
AXES = ("sample", "height", "width")


def build(name: str, comm: Communicator, strategy: Strategy, dtype: str = "float32") -> Executor:
    """One of `NETWORKS`, its parameters the same in every test. Collective."""
    return Executor(NETWORKS[name](), comm, get_backend("numpy"), BATCH, strategy, dtype, seed=3)


def trainer_of(executor: Executor, rate: float = RATE) -> Trainer:
    """Momentum and weight decay: what is updated twice, late or not at all shows in later steps."""
    return Trainer(executor, SGD(executor.store, momentum=0.5, weight_decay=1e-3), Constant(rate))


def advance(trainer: Trainer, numbers: Sequence[int]) -> list[float]:
    """Losses of the steps with these numbers. Collective."""
    losses = []
    for number in numbers:
        fill(trainer.executor, number)
        losses.append(trainer.step())
    return losses


def train(
    name: str, comm: Communicator, strategy: Strategy, dtype: str, rate: float = RATE
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, tuple[slice, ...]]]:
    """Losses, this rank's blocks of the parameters afterwards, and their places. Collective."""
    with build(name, comm, strategy, dtype) as executor:
        trainer = trainer_of(executor, rate)
        losses = advance(trainer, range(STEPS))
        trainer.settle()
        params = {k: v.copy() for k, v in executor.store.params.items()}
        return np.array(losses), params, {k: executor.store.box(k).slices() for k in params}


@functools.cache
def alone(name: str, dtype: str, rate: float = RATE) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
    """The same of one process, whole. Local."""
    with Communicator(MPI.COMM_SELF) as comm:
        losses, params, _ = train(name, comm, Strategy(bucket_bytes=BUCKET), dtype, rate)
    assert np.isfinite(losses).all() and losses[-1] < losses[0], "the network must learn something"
    return losses, params


def bound(name: str, dtype: str) -> np.ndarray:
    """Allowed per step, as in `test_exactness`: it grows with the steps, as rounding does in training."""
    longest = max(math.prod(n.shape) for n in NETWORKS[name]().layers.values()) * BATCH
    return float(np.finfo(dtype).eps) * math.sqrt(longest) * 20 * (1 + np.arange(STEPS)) ** 2


def check_strategy(
    name: str, comm: Communicator, strategy: Strategy, dtype: str, allowed: np.ndarray | None = None
) -> None:
    """Fail on all ranks unless `STEPS` steps give the losses and parameters of one process. Collective."""
    expected, whole = alone(name, dtype)
    allowed = bound(name, dtype) if allowed is None else allowed
    losses, params, places = train(name, comm, strategy, dtype)
    error = np.abs(losses - expected) / np.maximum(1.0, np.abs(expected))
    worst = float(np.max([np.max(np.abs(params[k] - whole[k][places[k]]), initial=0.0) for k in params]))
    fault = None
    if not (error <= allowed).all() or not worst <= 10 * allowed[-1]:
        fault = AssertionError(
            f"{name} under {strategy.parts} {strategy.layers}, {strategy.reduction}: losses differ by {error}, "
            f"parameters by {worst}; allowed are {allowed}"
        )
    comm.agree(fault)


def check_grids(name: str, comm: Communicator, scheme: Scheme, dtype: str) -> None:
    """`check_strategy` under every cut of samples, height and width that uses all ranks. Collective."""
    for parts in grids(comm.size, AXES):
        check_strategy(name, comm, Strategy(parts, bucket_bytes=BUCKET, reduction=scheme), dtype)
