"""Tests of layers that are called several times: one array of parameters, whose gradient is the sum over all calls."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.settings import fingerprint
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.perfmodel.cost import memory_of, program_of
from halograd.program.program import Target
from halograd.testing import grids, random_array
from halograd.training.auto_reduction import Tuning
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.layers.cuts import random_strategy

BATCH, STEPS, RATE = 4, 3, 0.2


def network() -> hg.Network:
    """Return a network of two images through one trunk with a shared head, and vectors through a dense layer twice."""
    trunk = hg.Sequential(
        hg.Conv(8, 3, padding=1, name="conv"), hg.GroupNorm(2, name="norm"), hg.PReLU("channel", name="slopes")
    )
    head = hg.Conv(8, 3, padding=1, activation="tanh", name="head")
    left, right = hg.Input((8, 6, 2), name="left"), hg.Input((8, 6, 2), name="right")
    some = []
    for x in (left, right):
        y = head(trunk(x))
        some += [hg.GlobalAveragePool()(y), hg.GlobalAveragePool()(head(hg.AveragePool(2)(y)))]
    mixed = hg.Dense(8, activation="relu", name="mix")
    both = hg.Concat()(mixed(some[0]), mixed(some[1]), mixed(mixed(some[2])), some[3])
    target = hg.Input((3,), "target")
    y = hg.Dense(3, name="last")(both)
    return hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, target)}, name="siamese")


def fill(executor, step):
    for name, node in executor.network.inputs.items():
        executor.set_input(name, random_array((executor.batch, *node.shape), name, step))


def run(comm, strategy, batch=BATCH):
    """Return the losses, this rank's parameters after `STEPS` steps, and the boxes of its blocks. Collective."""
    made = network()
    with Executor(made, comm, get_backend("numpy"), batch, strategy, "float64", seed=3) as executor:
        trainer, losses = Trainer(executor, SGD(executor.store, momentum=0.5), Constant(RATE)), []
        for step in range(STEPS):
            fill(executor, step)
            losses.append(trainer.step())
        trainer.synchronize()
        params = {name: array.copy() for name, array in executor.store.params.items()}
        boxes = {name: executor.store.box(name).slices() for name in params}
    return losses, params, boxes


@functools.cache
def alone(batch=BATCH):
    with Communicator(MPI.COMM_SELF) as comm:
        return run(comm, Strategy(), batch)


def check(comm, strategy, batch=BATCH):
    losses, params, boxes = run(comm, strategy, batch)
    with comm.agreement():
        np.testing.assert_allclose(losses, alone(batch)[0], rtol=1e-11)
        for name, array in params.items():
            np.testing.assert_allclose(array, alone(batch)[1][name][boxes[name]], rtol=0, atol=1e-11, err_msg=name)


@pytest.mark.torch
def test_as_torch():
    torch = pytest.importorskip("torch", reason="needs torch as oracle: pip install 'halograd[oracle]'")
    functional, initial = torch.nn.functional, network().initial_values(3)
    params = {name: torch.tensor(array, dtype=torch.float64, requires_grad=True) for name, array in initial.items()}

    def conv(name, x):
        return functional.conv2d(x, torch.movedim(params[f"{name}/w"], -1, 1), params[f"{name}/b"], padding=1)

    def mixed(x):
        return torch.relu(x @ params["mix/w"].T + params["mix/b"])

    def pooled(x):
        return x.mean((2, 3))

    def loss_of(step):
        arrays = {n: torch.tensor(random_array((BATCH, *i.shape), n, step)) for n, i in network().inputs.items()}
        some = []
        for side in ("left", "right"):
            x = conv("conv", torch.movedim(arrays[side], -1, 1))
            x = functional.group_norm(x, 2, params["norm/gamma"], params["norm/beta"], 1e-5)
            y = torch.tanh(conv("head", functional.prelu(x, params["slopes/slope"])))
            some += [pooled(y), pooled(torch.tanh(conv("head", functional.avg_pool2d(y, 2))))]
        both = torch.cat([mixed(some[0]), mixed(some[1]), mixed(mixed(some[2])), some[3]], 1)
        return functional.mse_loss(both @ params["last/w"].T + params["last/b"], arrays["target"])

    optimizer, losses = torch.optim.SGD(params.values(), RATE, 0.5), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(alone()[0], losses, rtol=1e-12)
    for name, array in alone()[1].items():
        np.testing.assert_allclose(array, params[name].detach().numpy(), rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.ranks(2, 3, 4)
def test_all_grids(subtests):
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        for grid in grids(comm.size, ("sample", "height", "width")):
            with subtests.test(grid=grid):
                check(comm, Strategy(grid, bucket_bytes=256))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "parts", [{"sample": 4}, {"sample": 2, "width": 2}, {"height": [1, 1, 1, 9]}, {"width": [9, 1, 1, 1]}], ids=str
)
def test_ranks_without_samples_or_rows(parts):
    """Ranks without samples or rows add zeros to the gradients of shared layers."""
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        check(comm, Strategy(parts), batch=1)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("seed", range(6))
def test_random_strategies(seed):
    made = network()
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        strategy = random_strategy(made, comm.size, seed)
        check(comm, strategy)
        blocks = parameter_blocks(made, strategy, comm.size)
        with Executor(made, comm, get_backend("numpy"), BATCH, strategy, "float64") as executor:
            found = dict(executor.memory.bytes)
        program = program_of(made, strategy, Target(BATCH, comm.size, comm.rank, np.dtype("float64")), blocks)
        want = memory_of(program, blocks)
        assert found == {use: n for use, n in want.items() if use in found}


def normed(shared=True):
    """Return a network of a weight-normalized convolution and dense layer, each called twice, or two of each."""
    x, t = hg.Input((6, 5, 3), "x"), hg.Input((3,), "target")
    convs = [hg.Conv(3, 3, padding=1, weight_norm=True, name=f"conv{k}") for k in range(2)]
    denses = [hg.Dense(3, weight_norm=True, name=f"dense{k}") for k in range(2)]
    first, second = (convs[0], convs[0]) if shared else convs
    y = hg.GlobalAveragePool()(second(hg.Tanh()(first(x))))
    first, second = (denses[0], denses[0]) if shared else denses
    y = second(hg.Tanh()(first(y)))
    return hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, t)}, name="normed")


@pytest.mark.ranks(1, 2)
def test_gradients_of_weight_norm_are_those_of_layers_of_one_s_own_added_up():
    gradients = {}
    with Communicator(MPI.COMM_WORLD) as comm:
        for shared in (True, False):
            made = normed(shared)
            if not shared:
                values = normed().initial_values(3)
                made.begin_with(values | {name.replace("0/", "1/"): array for name, array in values.items()})
            with Executor(
                made, comm, get_backend("numpy"), BATCH, Strategy({"sample": comm.size}), "float64", seed=3
            ) as e:
                fill(e, 0)
                e.forward()
                e.backward()
                e.reducer.finish()
                gradients[shared] = {name: array.copy() for name, array in e.store.grads.items()}
    assert set(gradients[True]) == {f"{layer}0/{key}" for layer in ("conv", "dense") for key in "wgb"}
    for name, array in gradients[True].items():
        want = gradients[False][name] + gradients[False][name.replace("0/", "1/")]
        np.testing.assert_allclose(array, want, rtol=0, atol=1e-13, err_msg=name)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("scheme", [Scheme(replicated_dense=1), Scheme(replicated_dense=2), Scheme("auto")], ids=str)
def test_gradients_of_shared_layers_are_not_replicated(scheme):
    """Gradients of a shared layer are not replicated: only a layer with one call may use the gathered batch."""

    def made():
        a, b, t = hg.Input((6,), "a"), hg.Input((6,), "b"), hg.Input((3,), "target")
        mix = hg.Dense(6, name="mix")
        y = hg.Dense(40, name="last")(hg.Dense(40, name="mid", activation="tanh")(hg.Concat()(mix(a), mix(b))))
        y = hg.Dense(3, name="out")(y)
        return hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, t)}, name="dense")

    def train(comm, strategy):
        with Executor(made(), comm, get_backend("numpy"), BATCH, strategy, "float64", seed=3) as executor:
            ranked = (Scheme(replicated_dense=2), Scheme(replicated_dense=1), Scheme("bucketed"))
            optimizer, tuning = SGD(executor.store, momentum=0.5), Tuning(interval=2, step=0)
            trainer = Trainer(executor, optimizer, Constant(0.01), ranked=ranked, tuning=tuning)
            for step in range(8):
                fill(executor, step)
                trainer.step()
            trainer.synchronize()
            return {name: array.copy() for name, array in executor.store.params.items()}

    with Communicator(MPI.COMM_SELF) as comm:
        want = train(comm, Strategy())
    with Communicator(MPI.COMM_WORLD) as comm:
        found = train(comm, Strategy({"sample": comm.size}, reduction=scheme))
        wrong = [name for name in want if not np.allclose(found[name], want[name], rtol=0, atol=1e-12)]
        comm.agree(AssertionError(f"{wrong} differ") if wrong else None)


@pytest.mark.ranks(2)
def test_more_replicated_layers_than_may_be_are_refused():
    x, t, mix = hg.Input((6,), "x"), hg.Input((6,), "target"), hg.Dense(6, name="mix")
    y = hg.Dense(6, name="out")(mix(mix(x)))
    made = hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, t)}, name="dense")
    with Communicator(MPI.COMM_WORLD) as comm, pytest.raises(UserError, match="at most the 1 dense layers of 'dense'"):
        Executor(made, comm, get_backend("numpy"), 2, Strategy({"sample": 2}, reduction=Scheme(replicated_dense=2)))


def test_names_and_counts():
    made = network()
    assert made.owners["head#4"] == "head" and made.owners["mix#4"] == "mix" and made.owners["last"] == "last"
    assert made.is_shared("head") and made.is_shared("norm#2") and not made.is_shared("last")
    sizes = {name: spec.size for name, spec in made.parameters().items()}
    assert not [name for name in sizes if "#" in name] and made.parameter_count == sum(sizes.values())
    assert {row[0]: row[3] for row in made.rows()}["head#2"] == 0
    assert made.freeze("head").trained.isdisjoint({"head", "head#2", "head#3", "head#4"})
    with pytest.raises(ValueError, match="got 'head#2'"):
        made.freeze("head#2")
    assert any(line.startswith("head#2: Conv") for line in fingerprint(made))


def test_layers_without_parameters_may_be_called_at_will():
    drop, pool, x = hg.Dropout(0.5, name="drop"), hg.GlobalAveragePool(), hg.Input((4, 4, 3))
    made = hg.Network(pool(drop(drop(x))) + pool(x), "drops")
    assert {"drop", "drop#2", "globalaveragepool1", "globalaveragepool1#2"} <= set(made.layers)


def test_a_frozen_layer_keeps_its_parameters():
    made = network().freeze("head")
    with (
        Communicator(MPI.COMM_SELF) as comm,
        Executor(made, comm, get_backend("numpy"), BATCH, None, "float64", seed=3) as executor,
    ):
        before = {name: array.copy() for name, array in executor.store.params.items()}
        trainer = Trainer(executor, SGD(executor.store), Constant(RATE))
        fill(executor, 0)
        trainer.step()
        trainer.synchronize()
        changed = {name for name, array in executor.store.params.items() if (array != before[name]).any()}
    assert {name for name in before if name not in changed} == {"head/w", "head/b"}


def test_refused():
    x, t = hg.Input((8, 6, 2), "x"), hg.Input((1,), "t", "int32")
    norm, conv = hg.BatchNorm(name="norm"), hg.Conv(3, 1, name="conv")
    with pytest.raises(ValueError, match=r"layers with running statistics to be called once, got 'norm'"):
        hg.Network(norm(norm(x)))
    with pytest.raises(ValueError, match=r"calls of 'conv' that have the same parameters, got .* 3\)"):
        hg.Network(conv(conv(x)))
    same = hg.Conv(2, 1, name="same")
    y = hg.GlobalAveragePool()(same(x))
    with pytest.raises(ValueError, match=r"on all calls of a layer or on none, got 'same"):
        hg.Network({"loss": hg.SoftmaxCrossEntropy()(y, t), "other": same(same(x))})
    made = network()
    strategy = Strategy({"sample": 2}, {"head#2": {"channel": 2}})
    with pytest.raises(UserError, match=r"expected 'head#2', which has the parameters of 'head', on as many ranks and"):
        strategy.validate(made, 2)
