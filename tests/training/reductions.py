"""Comparison of training under a scheme of gradient reduction with training in one process."""

from __future__ import annotations

import functools

import numpy as np
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.support.grids import grids_in_turn
from tests.training.steps import BATCH, NETWORKS, RATE, STEPS, Outcome, advance, bound, check_outcome, learned, outcome

BUCKET = 4096
NODES_OF_TWO = "emulated:alpha=1e-5,beta=1e-11,node=2"
AXES = ("sample", "height", "width")


def build(name: str, comm: Communicator, strategy: Strategy, dtype: str = "float32") -> Executor:
    """Build one of `NETWORKS`, with the same parameters in every test. Collective."""
    return Executor(NETWORKS[name](), comm, get_backend("numpy"), BATCH, strategy, dtype, seed=3)


def trainer_of(executor: Executor, rate: float = RATE) -> Trainer:
    """Return a trainer with momentum and weight decay, so that a repeated, missing or late update changes losses."""
    return Trainer(executor, SGD(executor.store, momentum=0.5, weight_decay=1e-3), Constant(rate))


def train(name: str, comm: Communicator, strategy: Strategy, dtype: str, rate: float = RATE) -> Outcome:
    """Train `STEPS` steps; return losses and parameters. Collective."""
    with build(name, comm, strategy, dtype) as executor:
        trainer = trainer_of(executor, rate)
        losses = advance(trainer, range(STEPS))
        trainer.synchronize()
        return outcome(executor, losses)


@functools.cache
def alone(name: str, dtype: str, rate: float = RATE) -> Outcome:
    """Return the outcome of training in one process. Local."""
    with Communicator(MPI.COMM_SELF) as comm:
        return learned(train(name, comm, Strategy(bucket_bytes=BUCKET), dtype, rate))


def check_strategy(
    name: str, comm: Communicator, strategy: Strategy, dtype: str, allowed: np.ndarray | None = None
) -> None:
    """Fail on all ranks unless `STEPS` steps give the losses and parameters of one process. Collective."""
    allowed = bound(NETWORKS[name](), dtype) if allowed is None else allowed
    what = f"{name} under {strategy.parts} {strategy.layers}, {strategy.reduction}"
    check_outcome(comm, train(name, comm, strategy, dtype), alone(name, dtype), allowed, what)


def check_grids(name: str, comm: Communicator, turn: int, scheme: Scheme, dtype: str) -> None:
    """Apply `check_strategy` to the cuts of samples, height and width of this turn, by all ranks. Collective."""
    for parts in grids_in_turn(comm.size, AXES, turn):
        check_strategy(name, comm, Strategy(parts, bucket_bytes=BUCKET, reduction=scheme), dtype)
