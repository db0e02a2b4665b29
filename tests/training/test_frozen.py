"""Frozen layers keep their parameters; all others train as without a word of it, under every cut."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.training import train as train_run
from halograd.training.executor import Executor
from tests.layers.cuts import random_strategy
from tests.models.gated import gated
from tests.training.runs import write_shared
from tests.training.test_exactness import NETWORKS, fill
from tests.training.test_strategies import train

FROZEN = {"unet": ("down0*", "up1", "bottom_*_a"), "lenet": ("conv1", "dense4"), "gated": ("gate", "conv", "coarse")}


def network(name):
    return (gated(12, 3, 4) if name == "gated" else NETWORKS[name]()).freeze(*FROZEN[name])


def gradients(made):
    """Of the first step, whole, in one process."""
    with (
        Communicator(MPI.COMM_SELF) as alone,
        Executor(made, alone, get_backend("numpy"), 4, None, "float64", seed=3) as e,
    ):
        fill(e, 0)
        e.forward()
        e.backward()
        e.reducer.finish()
        return {key: array.copy() for key, array in e.store.grads.items()}


@pytest.mark.parametrize("name", FROZEN)
def test_gradients_of_the_others_are_as_before(name):
    made = network(name)
    assert {"unet": 6, "lenet": 2, "gated": 3}[name] <= len(made.frozen) and not made.frozen & made.trained
    whole, found = gradients(NETWORKS[name]() if name != "gated" else gated(12, 3, 4)), gradients(made)
    for key, want in whole.items():
        if key.partition("/")[0] in made.frozen:
            assert not found[key].any() and (want.any() or "bias" in key or key.endswith("/b"))
        else:
            np.testing.assert_array_equal(found[key], want, err_msg=key)


def test_what_lies_before_all_that_is_trained_has_no_backward_pass():
    made = NETWORKS["lenet"]().freeze("conv1", "conv2")
    with Communicator(MPI.COMM_SELF) as alone, Executor(made, alone, get_backend("numpy"), 4, None, "float64") as e:
        reached = {segment.name for segment in e.program.backward}
    assert "dense3" in reached and not reached & {"conv1", "conv2", "pool1", "pool2", "maxpool1", "flatten"}


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", FROZEN)
def test_under_random_strategies(name):
    with Communicator(MPI.COMM_SELF) as alone:
        losses, want = train(network(name), alone, Strategy())
        untouched = train(network(name), alone, Strategy(), rate=0.0)[1]
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        for seed in range(4):
            made = network(name)
            found, ours = train(made, comm, random_strategy(made, comm.size, seed))
            fault = None
            try:
                np.testing.assert_allclose(found, losses, rtol=1e-9)
                for key, array in ours.items():  # on rank 0
                    np.testing.assert_allclose(array, want[key], rtol=0, atol=1e-9, err_msg=key)
                    same = (array == untouched[key]).all()
                    assert same or key.partition("/")[0] not in made.frozen, key
            except AssertionError as error:
                fault = error
            comm.agree(fault)
        assert any((want[key] != untouched[key]).any() for key in want)


@pytest.mark.ranks(1, 2)
def test_runs(comm, shared):
    """By the configuration; resumed with other layers frozen; mistakes are named."""
    config = write_shared(comm, shared)
    train_run(config, ["training.epochs=1", 'training.freeze=["conv1_1", "bn*"]'], comm=comm)
    found = train_run(
        config, ["training.epochs=2", 'training.freeze=["predict"]', "training.clip_norm=1.0"], True, comm=comm
    )
    assert np.isfinite(found["loss"])
    for value, message in (
        ('["stem*"]', r"expected names or patterns of layers .*conv1_1.*, got 'stem\*'"),
        ('["*"]', "got all of them"),
    ):
        with pytest.raises(UserError, match=rf"training\.freeze: .*{message}"):
            train_run(config, [f"training.freeze={value}", f"output.directory={shared / 'x'}"], comm=comm)
