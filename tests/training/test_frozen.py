"""Tests of frozen layers: they keep their parameters, and others train as without frozen layers, under every cut."""

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.reduction_chunks import dense_layers
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.lowering.operations import Run
from halograd.perfmodel.cost.account import layers_memory
from halograd.program.compiler import compile_program
from halograd.program.program import Target
from halograd.training import train as train_run
from halograd.training.executor import Executor
from tests.layers.cuts import random_strategy
from tests.models.gated import gated
from tests.training.steps import NETWORKS, copied, descend, fill

FROZEN = {
    "unet": ("down0*", "up1", "bottom_*_a"),
    "lenet": ("conv1", "dense4"),
    "gated": ("gate", "conv", "coarse"),
    "between": ("normed", "frozen_up", "wide"),
}


def between():
    """Return a network with frozen layers of every kind after a trained one, and a trained layer on the same value."""
    x, target = hg.Input((12, 10, 3), name="x"), hg.Input((4,), name="target")
    h = hg.Conv(4, 3, weight_norm=True, name="normed")(hg.Conv(4, 3, name="first")(x))
    up = [hg.ConvTranspose(3, 3, stride=2, padding=1, name=name)(h) for name in ("trained_up", "frozen_up")]
    h = hg.GlobalAveragePool()(hg.BatchNorm(name="norm")(hg.Add()(*up)))
    prediction = hg.Dense(4, name="last")(hg.Dense(6, weight_norm=True, name="wide")(h))
    return hg.Network({"loss": hg.MeanSquaredError()(prediction, target), "prediction": prediction}, "between")


def whole(name):
    made = {"gated": lambda: gated(12, 3, 4), "between": between}
    return made.get(name, NETWORKS.get(name))()


def network(name):
    return whole(name).freeze(*FROZEN[name])


def gradients(made):
    """Return the whole gradients of the first step in one process."""
    with (
        Communicator(MPI.COMM_SELF) as alone,
        Executor(made, alone, get_backend("numpy"), 4, None, "float64", seed=3) as e,
    ):
        fill(e, 0)
        e.forward()
        e.backward()
        e.reducer.finish()
        return copied(e.store.grads)


@pytest.mark.parametrize("name", FROZEN)
def test_gradients_of_the_others_are_as_before(name):
    made = network(name)
    assert {"unet": 6, "lenet": 2, "gated": 3, "between": 3}[name] <= len(
        made.frozen
    ) and not made.frozen & made.trained
    of_all, found = gradients(whole(name)), gradients(made)
    for key, want in of_all.items():
        if key.partition("/")[0] in made.frozen:
            assert not found[key].any() and (want.any() or "bias" in key or key.endswith("/b"))
        else:
            np.testing.assert_array_equal(found[key], want, err_msg=key)


def test_what_lies_before_all_that_is_trained_has_no_backward_pass():
    made = NETWORKS["lenet"]().freeze("conv1", "conv2")
    with Communicator(MPI.COMM_SELF) as alone, Executor(made, alone, get_backend("numpy"), 4, None, "float64") as e:
        reached = {segment.name for segment in e.program.backward}
    assert "dense3" in reached and not reached & {"conv1", "conv2", "pool1", "pool2", "maxpool1", "flatten"}


def filters(program):
    """Return the layers that have a separate kernel for the gradients of their parameters."""
    runs = [one for segment in program.backward for one in segment.operations if isinstance(one, Run)]
    return {one.layer for one in runs if one.timing is not None and one.timing.phase == "backward_filter"}


@pytest.mark.parametrize("name", FROZEN)
def test_nothing_is_computed_or_kept_for_gradients_that_nobody_reads(name):
    made, frozen = whole(name), network(name)
    programs = [compile_program(one, Strategy(), Target(batch=4)) for one in (made, frozen)]
    every, left = map(filters, programs)
    reached = {segment.name for segment in programs[1].backward}
    assert left == (every & reached) - frozen.frozen and every & reached & frozen.frozen
    blocks = parameter_blocks(made, Strategy(), 1)
    kept = [sum(layers_memory(program, blocks).values()) for program in programs]
    assert kept[1] < kept[0]


def test_only_norms_are_trained():
    """If only norms are trained, frozen layers between them propagate errors and compute no gradient of weights."""
    made = NETWORKS["resnet"]()
    trained = {name for name in made.layers if "norm" in name or "bn" in name}
    assert trained
    weights = [name for name in made.layers if name not in trained and made.own_parameters(name)]
    program = compile_program(made.freeze(*weights), Strategy(), Target(batch=4))
    assert not filters(program) and trained <= {segment.name for segment in program.backward}


def test_no_frozen_layer_is_replicated():
    dense = list(dense_layers(NETWORKS["lenet"]()))
    assert "dense4" in dense
    assert list(dense_layers(network("lenet"))) == [name for name in dense if name != "dense4"]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("seeds", [(0, 1), pytest.param((2, 3), marks=pytest.mark.nightly)], ids=str)
@pytest.mark.parametrize("name", FROZEN)
def test_under_random_strategies(name, seeds):
    with Communicator(MPI.COMM_SELF) as alone:
        losses, want, _ = descend(network(name), alone, Strategy(), steps=3)
        untouched = descend(network(name), alone, Strategy(), steps=3, rate=0.0).params
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        for seed in seeds:
            made = network(name)
            found, ours, places = descend(made, comm, random_strategy(made, comm.size, seed), steps=3)
            with comm.agreement():
                np.testing.assert_allclose(found, losses, rtol=1e-9)
                for key, array in ours.items():
                    np.testing.assert_allclose(array, want[key][places[key]], rtol=0, atol=1e-9, err_msg=key)
                    same = (array == untouched[key][places[key]]).all()
                    assert same or key.partition("/")[0] not in made.frozen, key
        assert any((want[key] != untouched[key]).any() for key in want)


@pytest.mark.ranks(1, 2)
def test_runs(comm, shared, config):
    """A configuration can freeze layers, and other ones when it is resumed; unknown names are an error."""
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
