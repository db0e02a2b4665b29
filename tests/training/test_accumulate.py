"""Tests of gradients of batches in parts, of class weights, and of dense layers on whole batches: exact, every cut."""

from __future__ import annotations

import functools
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers import Dense, Flatten, Input, Network, SoftmaxCrossEntropy
from halograd.layers.dense import padded_rows
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.models import lenet5
from halograd.perfmodel.cost import memory_of, program_of
from halograd.program.program import Target
from halograd.testing import grids, random_array
from halograd.training import train
from halograd.training import trainer as trainer_module
from halograd.training.auto_reduction import Tuning
from halograd.training.executor import Executor
from halograd.training.optimizers import LARS, SGD, Adam
from halograd.training.schedules import Constant, Cosine
from halograd.training.timeline import Timeline, kind_of
from halograd.training.trainer import Diverged, Trainer
from tests.layers.cuts import random_strategy
from tests.support.clock import TICK, DrivenClock
from tests.support.lean import check_allocations
from tests.training.cuts import CUTS, check_resumed, overrides_of
from tests.training.device_steps import both
from tests.training.runs import write_config, write_own
from tests.training.steps import advance, assert_arrays, bound, check_losses, copied, fill

BATCH, PARTS_STEPS, SEED = 8, 3, 3
SCHEMES = {
    **{name: Scheme(name) for name in ("blocking", "per_layer", "hierarchical", "host_accumulate", "sharded")},
    "two_chunks": Scheme("two_chunks", first_layers=2),
    "replicated": Scheme(replicated_dense=2),
}


def parts_network() -> hg.Network:
    """Return a network with dropout, stochastic depth and sums over positions, but none over samples."""
    x, t = hg.Input((8, 6, 2), "x"), hg.Input((1,), "target", "int32")
    y = hg.Conv(6, 3, padding=1, activation="relu", name="conv1")(x)
    y = y + hg.StochasticDepth(0.4, name="depth")(
        hg.Conv(6, 3, padding=1, name="conv2")(hg.GroupNorm(3, name="norm")(y))
    )
    y = hg.Dense(12, name="dense1")(hg.GlobalAveragePool()(hg.Dropout(0.3, name="dropout")(y)))
    y = hg.Dense(4, name="dense2")(hg.Dropout(0.2, name="dropout2")(y))
    return hg.Network({"prediction": y, "loss": hg.SoftmaxCrossEntropy(name="ce")(y, t)}, name="parts")


def fill_parts(executor: Executor, step: int, part: int) -> None:
    """Fill the inputs with the samples of one part of this step's batch."""
    some = slice(part * executor.batch, (part + 1) * executor.batch)
    executor.set_input("x", random_array((BATCH, 8, 6, 2), "x", step)[some])
    classes = (np.abs(random_array((BATCH, 1), "t", step)) * 10).astype(int) % 4
    executor.set_input("target", classes[some])


def run(comm, strategy, parts, clip=None, dtype="float64", make=parts_network, **tried):
    """Return losses, norms and parameters (this rank's blocks) of `STEPS` steps in parts. Collective."""
    kernels = get_backend("numpy")
    with Executor(make(), comm, kernels, BATCH // parts, strategy, dtype, seed=SEED, parts=parts) as executor:
        optimizer = SGD(executor.store, momentum=0.5, weight_decay=1e-3)
        trainer = Trainer(executor, optimizer, Constant(0.3), clip, **tried)
        losses, norms = [], []
        for step in range(PARTS_STEPS):
            for part in range(parts - 1):
                fill_parts(executor, step, part)
                trainer.add()
            fill_parts(executor, step, parts - 1)
            losses.append(trainer.step())
            norms.append(trainer.gradient_norm or 0.0)
        trainer.synchronize()
        blocks = {name: executor.store.box(name).slices() for name in executor.store.params}
        params = copied(executor.store.params)
        trials = [] if trainer.auto is None else trainer.auto.tuner.trials
    return SimpleNamespace(losses=losses, norms=norms, params=params, blocks=blocks, trials=trials)


@functools.cache
def whole(clip=None):
    """Return the outcome of one process that computes each batch as a whole."""
    with Communicator(MPI.COMM_SELF) as comm:
        found = run(comm, Strategy(), 1, clip)
    assert found.losses[-1] < found.losses[0]
    return found


def check(comm, found, want):
    """Fail on all ranks unless losses, norms and parameters are those of one process."""
    with comm.agreement():
        np.testing.assert_allclose(found.losses, want.losses, rtol=1e-12)
        np.testing.assert_allclose(found.norms, want.norms, rtol=1e-11)
        for name, array in found.params.items():
            np.testing.assert_allclose(array, want.params[name][found.blocks[name]], rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("parts", [2, 4, 8])
def test_one_process(parts, clip):
    with Communicator(MPI.COMM_SELF) as comm:
        check(comm, run(comm, Strategy(), parts, clip), whole(clip))


@pytest.mark.nightly
@pytest.mark.ranks(2, 3, 4)
def test_all_grids(subtests):
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        for grid in grids(comm.size, ("sample", "height", "width")):
            with subtests.test(grid=grid):
                check(comm, run(comm, Strategy(grid), 2 if grid["sample"] > 2 else 4), whole())


@pytest.mark.nightly
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("seed", range(3))
def test_random_strategies(seed):
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        check(comm, run(comm, random_strategy(parts_network(), comm.size, seed), 2, 0.1), whole(0.1))


@pytest.mark.nightly
@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("name", SCHEMES)
def test_schemes(name):
    with Communicator(MPI.COMM_WORLD, "shared") as comm:
        strategy = Strategy({"sample": comm.size}, bucket_bytes=512, reduction=SCHEMES[name])
        check(comm, run(comm, strategy, 2), whole())


def parts_wide() -> hg.Network:
    """Return a network of dense layers with more weights than activations of a part."""
    x, t = hg.Input((8, 6, 2), "x"), hg.Input((1,), "target", "int32")
    y = hg.Dense(40, name="dense1", activation="tanh")(hg.Flatten()(x))
    y = hg.Dense(4, name="out")(hg.Dense(40, name="dense2", activation="tanh")(y))
    return hg.Network({"prediction": y, "loss": hg.SoftmaxCrossEntropy(name="ce")(y, t)}, name="wide")


@pytest.mark.ranks(2, 3)
def test_schemes_change_between_batches(monkeypatch):
    """With accumulation, reduction schemes change only between batches; the timed steps include all parts."""
    DrivenClock().drive(monkeypatch, trainer_module)
    ranked = (Scheme(replicated_dense=2), Scheme("bucketed"))
    with Communicator(MPI.COMM_SELF) as alone:
        want = run(alone, Strategy(), 1, make=parts_wide)
    with Communicator(MPI.COMM_WORLD) as comm:
        strategy = Strategy({"sample": comm.size}, reduction=Scheme("auto"))
        found = run(comm, strategy, 2, make=parts_wide, ranked=ranked, tuning=Tuning(interval=2, step=0))
        check(comm, found, want)
    assert [(trial.scheme, trial.seconds) for trial in found.trials] == [(ranked[0], 2 * TICK)]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("parts", [(1, 2), (2, 1)])
def test_stores_of_other_parts_are_refused(parts):
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        Executor(parts_network(), comm, get_backend("numpy"), 4, parts=parts[0]) as first,
    ):
        with pytest.raises(ValueError, match=f"{parts[1]} parts .*, got .* {parts[0]}"):
            Executor(parts_network(), comm, get_backend("numpy"), 4, store=first.store, parts=parts[1])
        Executor(parts_network(), comm, get_backend("numpy"), 4, store=first.store, trainable=False).close()


@pytest.mark.ranks(2)
def test_gradients_are_summed_once():
    """A step in parts sends as many bytes for gradients as a step without parts."""
    sent = []
    for parts in (1, 4):
        with Communicator(MPI.COMM_WORLD, "mpi") as comm:
            run(comm, Strategy({"height": 2}), parts)
            sent.append(comm.counters["allreduce"])
    assert sent[0] == sent[1] and sent[0].bytes


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("scheme", ["bucketed", "sharded"])
def test_memory_is_as_predicted(scheme):
    made, size = parts_network(), MPI.COMM_WORLD.size
    strategy = Strategy({"sample": size}, reduction=Scheme(scheme))
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        with Executor(made, comm, get_backend("numpy"), 4, strategy, "float64", parts=2) as executor:
            SGD(executor.store, momentum=0.5)
            found = dict(executor.predicted_bytes)
        blocks = parameter_blocks(made, strategy, size)
        program = program_of(made, strategy, Target(4, size, comm.rank, np.dtype("float64")), blocks, 2)
        want = memory_of(program, blocks, 1)
        with comm.agreement():
            for use in ("parameter", "parameter gradient", "gradient sum", "optimizer state"):
                assert found[use] == want[use] > 0, use
            assert found["gradient sum"] == found["parameter gradient"]


def test_calls_in_another_order():
    with (
        Communicator(MPI.COMM_SELF) as comm,
        Executor(parts_network(), comm, get_backend("numpy"), 4, dtype="float64", parts=2) as executor,
    ):
        trainer = Trainer(executor, SGD(executor.store), Constant(0.1))
        fill_parts(executor, 0, 0)
        with pytest.raises(ValueError, match=r"1 calls of add\(\) .* 2 parts, got 0"):
            trainer.step()
        trainer.add()
        with pytest.raises(ValueError, match=r"add\(\): .*1 calls .*step\(\)"):
            trainer.add()
        trainer.step()


def test_a_part_that_diverges_leaves_parameters_as_they_are():
    """A part whose gradients are not finite does not affect the next step."""
    with Communicator(MPI.COMM_SELF) as comm:
        results = []
        for broken in (False, True):
            with Executor(
                parts_network(), comm, get_backend("numpy"), 4, dtype="float64", seed=SEED, parts=2
            ) as executor:
                trainer = Trainer(executor, SGD(executor.store), Constant(0.1))
                if broken:
                    before = copied(executor.store.params)
                    fill_parts(executor, 0, 0)
                    trainer.add()
                    executor.input("x").array.fill(np.inf)
                    with np.errstate(all="ignore"), pytest.raises(Diverged):
                        trainer.step()
                    trainer.synchronize()
                    assert all((array == before[name]).all() for name, array in executor.store.params.items())
                for part in range(2):
                    fill_parts(executor, 1, part)
                    (trainer.step if part else trainer.add)()
                trainer.synchronize()
                results.append(copied(executor.store.params))
        assert_arrays(results[1], results[0])


# -- whole runs ------------------------------------------------------------------------------------


OWN = """
from halograd.layers import *

def build():
    x, t = Input((16, 16, 3), "x"), Input((16, 16, 1), "mask")
    y = GroupNorm(3, activation="relu")(Conv(6, 3, padding=1)(x))
    y = Conv(1, 3, padding=1)(Dropout(0.2)(y))
    return Network({"prediction": y, "loss": BinaryCrossEntropyWithLogits()(y, t)}, name="own")
"""


def write(folder):
    """Write the configuration of a network without batch norm."""
    write_own(folder, OWN)


AUGMENTED = "data.augment={flips = ['width'], noise = 0.05}"


@pytest.mark.mpi
@pytest.mark.parametrize("loss", ["BinaryCrossEntropyWithLogits()", "SoftmaxCrossEntropy([1.0, 9.0])"])
def test_a_run_in_parts_is_that_of_whole_batches(comm, config, loss):
    """A run in parts, stopped and resumed, has the losses and the evaluation of a run of whole batches."""
    if comm.rank == 0:
        channels = 1 if "Binary" in loss else 2
        text = OWN.replace("BinaryCrossEntropyWithLogits()", loss).replace("Conv(1, 3", f"Conv({channels}, 3")
        (config.parent / "net.py").write_text(text)
    comm.barrier()
    files = [f"model.file='{config.parent / 'net.py'}:build'", f"data.path='{config.parent / 'data.h5'}'"]
    parts = [(cut, 2 if "sample" in cut else 4) for cut in CUTS[comm.size]]
    cuts = [[*overrides_of(cut), f"training.accumulate={number}"] for cut, number in parts]
    check_resumed(comm, config, [*files, AUGMENTED], cuts)


@pytest.mark.ranks(1)
def test_what_is_said_and_refused(comm, shared, caplog):
    config = write_config(shared)  # with batch norm
    with pytest.raises(UserError, match=r"training\.accumulate: .* 4, got 3"):
        train(config, ["training.accumulate=3"], comm=comm)
    train(config, ["training.accumulate=2", "training.epochs=1"], comm=comm)
    (said,) = [r.getMessage() for r in caplog.records if "training.accumulate" in r.getMessage()]
    assert "over the 2 samples of each part, not over the batch: " in said and ": its statistics" in said


def test_what_depends_on_the_batch():
    assert hg.BatchNorm().of_batch and not hg.GroupNorm(1).of_batch
    assert hg.Dice().of_batch and not hg.Dice(reduction="sample").of_batch
    x, t = hg.Input((4, 4, 2), "x"), hg.Input((4, 4, 1), "t", "int32")
    both = hg.SoftmaxCrossEntropy()(x, t) + hg.SoftmaxCrossEntropy(ignore_index=0)(x, t) + hg.Dice("softmax")(x, t)
    assert both.layer.of_batch == "its sums over samples"
    assert not hg.SoftmaxCrossEntropy().of_batch


# -- losses that are divided by their weights ------------------------------------------------------


def divided() -> hg.Network:
    """Return a network with losses at two scales, with ignored positions and weights, some of them for training only.

    The weights of the small scale are computed from those of the other one by a layer.
    """
    x, w = hg.Input((8, 6, 2), "x"), hg.Input((8, 6, 1), "w")
    t, few = hg.Input((8, 6, 1), "target", "int32"), hg.Input((4, 3, 1), "few", "int32")
    y = hg.GroupNorm(3, name="norm", activation="relu")(hg.Conv(6, 3, padding=1, name="conv1")(x))
    z = hg.Conv(3, 1, name="fine")(hg.Dropout(0.2, name="dropout")(y))
    small = hg.Conv(3, 2, stride=2, name="coarse")(y)
    loss = hg.SoftmaxCrossEntropy(ignore_index=2, name="ce")(z, t)
    loss = loss + 0.5 * hg.SoftmaxCrossEntropy([1.0, 2.0, 0.5], ignore_index=1)(small, few)
    size, few_weights = hg.Conv(1, 1, name="size")(y), hg.MaxPool(2)(w)
    loss = loss + 2.0 * hg.AbsoluteError(normalization="weights")(size, hg.Input((8, 6, 1), "s"), w)
    squares = hg.MeanSquaredError(normalization="weights")(small, hg.Input((4, 3, 3), "m"), few_weights)
    loss = loss + hg.training_only(squares)
    return hg.Network({"prediction": z, "loss": loss}, name="divided")


def unequal(executor: Executor, step: int, part: int) -> None:
    """Fill the inputs with a part of a batch whose samples have very different weights; one part may have none."""
    some = slice(part * executor.batch, (part + 1) * executor.batch)
    share = np.linspace(0, 1, BATCH) ** 2
    for name, node in executor.network.inputs.items():
        array = random_array((BATCH, *node.shape), name, step)
        if name in ("target", "few"):
            keep = np.abs(array) % 1 < share.reshape(-1, 1, 1, 1)
            array = np.where(keep, np.abs(array * 10).astype(int) % 3, 2 if name == "target" else 1)
        elif name == "w":
            array = np.maximum(array, 0) * share.reshape(-1, 1, 1, 1)
        executor.set_input(name, array[some])


def run_divided(comm, strategy, parts, scheme=None):
    """Return losses, parameters and their blocks of steps with :func:`divided`. Collective."""
    strategy = Strategy(strategy, reduction=Scheme(scheme)) if scheme else Strategy(strategy)
    with Executor(divided(), comm, get_backend("numpy"), BATCH // parts, strategy, "float64", parts=parts) as executor:
        trainer = Trainer(executor, SGD(executor.store, momentum=0.5), Constant(0.3), 1.0)
        losses = []
        for step in range(PARTS_STEPS):
            for part in range(parts if executor.counted else 0):
                unequal(executor, step, part)
                executor.count()
            for part in range(parts):
                unequal(executor, step, part)
                if part + 1 < parts:
                    trainer.add()
            losses.append(float(trainer.step()))
        trainer.synchronize()
        blocks = {name: executor.store.box(name).slices() for name in executor.store.params}
        params, read = copied(executor.store.params), executor.counted
    return SimpleNamespace(losses=losses, params=params, blocks=blocks, read=read)


@functools.cache
def whole_divided():
    with Communicator(MPI.COMM_SELF) as comm:
        return run_divided(comm, {}, 1)


def check_divided(comm, found):
    with comm.agreement():
        want = whole_divided()
        np.testing.assert_allclose(found.losses, want.losses, rtol=1e-11)
        for name, array in found.params.items():
            np.testing.assert_allclose(array, want.params[name][found.blocks[name]], rtol=0, atol=1e-11, err_msg=name)


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_divided_losses_of_one_process(parts):
    """A step in parts with very different weights, some of them 0, is the step of the whole batch."""
    with Communicator(MPI.COMM_SELF) as comm:
        found = run_divided(comm, {}, parts)
        check_divided(comm, found)
    assert found.read == {"target", "few", "w"} and not whole_divided().read


@pytest.mark.nightly
@pytest.mark.ranks(2, 3, 4)
def test_divided_losses_under_all_grids(subtests):
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        for grid in grids(comm.size, ("sample", "height", "width")):
            with subtests.test(grid=grid):
                check_divided(comm, run_divided(comm, grid, 2 if grid["sample"] > 2 else 4))


@pytest.mark.nightly
@pytest.mark.ranks(2)
def test_divided_losses_with_sharded_sums():
    with Communicator(MPI.COMM_WORLD) as comm:
        check_divided(comm, run_divided(comm, {"height": 2}, 4, "sharded"))


def test_a_count_that_ends_in_an_error_restarts():
    """After an invalid class in the second part, the parts of the next batch are counted from the first."""
    x, target = Input((4, 4, 2), "x"), Input((4, 4, 1), "target", "int32")
    network = Network({"loss": SoftmaxCrossEntropy([1.0, 3.0, 2.0])(hg.Conv(3, 1)(x), target)})
    classes = [np.arange(2 * 16).reshape(2, 4, 4, 1) % (3 - part) for part in range(2)]
    with (
        Communicator(MPI.COMM_SELF) as comm,
        Executor(network, comm, get_backend("numpy"), 2, None, "float64", parts=2) as executor,
    ):
        executor.set_input("x", random_array((2, 4, 4, 2), "x"))

        def batch():
            for targets in classes:
                executor.set_input("target", targets)
                executor.count()
            losses = []
            for executor.mode.part, targets in enumerate(classes):
                executor.set_input("target", targets)
                executor.forward(training=True)
                losses.append(executor.loss_value())
            executor.mode.part = 0
            return losses

        losses = batch()
        executor.set_input("target", classes[0])
        executor.count()
        executor.set_input("target", classes[1] + 3)
        with pytest.raises(ValueError, match=r"expected targets in \[0, 3\)"):
            executor.count()
        assert batch() == losses


def test_parts_that_are_not_counted_are_refused():
    with (
        Communicator(MPI.COMM_SELF) as comm,
        Executor(divided(), comm, get_backend("numpy"), 4, dtype="float64", parts=2) as executor,
    ):
        trainer = Trainer(executor, SGD(executor.store), Constant(0.1))
        unequal(executor, 0, 0)
        executor.count()
        with pytest.raises(ValueError, match=r"forward\(\): .*2 .*count\(\) .*, got 1"):
            trainer.add()
        executor.forward(training=False)  # an evaluation is of one part


@pytest.mark.parametrize("call", ["count", "forward", "backward"])
def test_a_batch_begins_anew_after_an_error(call):
    """A batch that an error ended, while parts are counted or computed, does not affect the next one."""
    results = []
    with Communicator(MPI.COMM_SELF) as comm:
        for broken in (False, True):
            with Executor(divided(), comm, get_backend("numpy"), BATCH // 2, dtype="float64", parts=2) as executor:
                trainer = Trainer(executor, SGD(executor.store, momentum=0.5), Constant(0.3))

                def step(number, executor=executor, trainer=trainer):
                    for part in range(2):
                        unequal(executor, number, part)
                        executor.count()
                    unequal(executor, number, 0)
                    trainer.add()
                    unequal(executor, number, 1)
                    return float(trainer.step())

                losses = [step(0)]
                if broken:
                    calls = {
                        "count": executor._counting,
                        "forward": executor._forward["training"],
                        "backward": executor._backward,
                    }[call]
                    last, calls[-1] = calls[-1], interrupted(calls[-1])
                    with pytest.raises(KeyboardInterrupt):
                        step(1)
                    calls[-1] = last
                results.append(([*losses, step(2)], copied(executor.store.params)))
    assert results[0][0] == results[1][0]
    assert_arrays(results[1][1], results[0][1])


def interrupted(call):
    """Return a call that the user interrupts the second time."""
    passes = count()

    def interrupt():
        if next(passes) == 1:
            raise KeyboardInterrupt
        return call()

    return interrupt


DENSE_STEPS, RATE = 10, 0.01
OPTIMIZERS = {
    "momentum": lambda store: SGD(store, momentum=0.9, weight_decay=1e-3),
    "adam": lambda store: Adam(store),
    "lars": lambda store: LARS(store, momentum=0.9, weight_decay=1e-3),
}


def dense_network():
    return lenet5(classes=4, resolution=28)


def build(comm, parts, scheme, dtype="float64", batch=4, layers=None, backend="numpy", model=dense_network):
    strategy = Strategy(parts, layers or {}, bucket_bytes=4096, reduction=scheme)
    return Executor(model(), comm, get_backend(backend), batch, strategy, dtype, seed=3)


class Nothing:
    """Gradient check without computation; it makes all gradients complete at the end of backward."""

    over_ranks = False

    def measure(self):
        pass

    def close(self):
        pass


def train_dense(executor, optimizer="momentum", steps=DENSE_STEPS, clip=None, synchronize=False, delayed=True):
    """Train; return losses, parameters and optimizer state after all updates. Collective."""
    with executor:
        trainer = Trainer(executor, OPTIMIZERS[optimizer](executor.store), Cosine(RATE, 2 * steps), clip)
        if not delayed:
            executor.check_gradients({**executor.checks, "nothing": Nothing()})
        losses = []
        for step in range(steps):
            fill(executor, step)
            losses.append(trainer.step())
            if synchronize:
                trainer.synchronize()
        trainer.synchronize()
        state = {
            f"{k}/{n}": a
            for k, arrays in trainer.optimizer.named_state(executor.comm).items()
            for n, a in arrays.items()
        }
        return np.array(losses), copied({**executor.store.params, **state})


@functools.cache
def alone(dtype="float64", batch=4, optimizer="momentum", clip=None):
    """Return the outcome of training in one process."""
    with Communicator(MPI.COMM_SELF) as comm:
        found = train_dense(build(comm, {}, {}, dtype, batch), optimizer, clip=clip)
    assert found[0][-1] < found[0][0], "the network must learn something"
    return found


def check_arrays(comm, found, expected, allowed, where):
    worst = np.max([np.max(np.abs(found[k] - v)) / max(1.0, np.max(np.abs(v))) for k, v in expected.items()])
    with comm.agreement():
        assert worst <= 10 * allowed, f"{where}: arrays differ by {worst}"


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(
    "scheme, dtype",
    [
        ({"replicated_dense": 1}, "float32"),
        ({"name": "two_chunks", "first_layers": 3, "replicated_dense": 2}, "float64"),
        ({"name": "host_accumulate", "chunk": 2, "replicated_dense": 3}, "float64"),
    ],
)
def test_ten_steps_are_those_of_one_process(scheme, dtype):
    expected, allowed = alone(dtype), bound(dense_network(), dtype)
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in grids(comm.size, ("sample", "height", "width")):
            found, where = train_dense(build(comm, parts, scheme, dtype)), f"{scheme} under {parts}"
            check_losses(comm, found[0], expected[0], allowed, where)
            check_arrays(comm, found[1], expected[1], allowed[-1], where)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "axis, name, layers, options",
    [
        ("width", "bucketed", {}, {"batch": 2}),  # ranks with few samples or none
        ("width", "bucketed", {}, {"batch": 5}),
        ("width", "bucketed", {"dense3": {"sample": 1}, "relu3": {"sample": 1}}, {}),  # a layer on one rank
        ("width", "bucketed", {"dense4": {"sample": 2}, "relu4": {"sample": 2}}, {}),  # on two
        ("width", "bucketed", {"dense5": {"channel": 2}}, {}),  # a layer in blocks behind them
        ("sample", "bucketed", {}, {"optimizer": "lars"}),
        ("sample", "sharded", {}, {"optimizer": "adam"}),
        ("sample", "sharded", {}, {"optimizer": "adam", "clip": 0.5}),
        ("sample", "hierarchical", {}, {"clip": 0.5}),
    ],
)
def test_beside_other_cuts_schemes_and_optimizers(axis, name, layers, options):
    expected, allowed, training = alone(**options), bound(dense_network(), "float64"), dict(options)
    with Communicator(MPI.COMM_WORLD) as comm:
        executor = build(
            comm, {axis: comm.size}, {"name": name, "replicated_dense": 2}, "float64", training.pop("batch", 4), layers
        )
        found = train_dense(executor, **training)
        check_losses(comm, found[0], expected[0], allowed, options)
        if axis == "width" and not layers:
            check_arrays(comm, found[1], expected[1], allowed[-1], options)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("transport", ["auto", "emulated:alpha=1e-3,beta=1e-9"])
@pytest.mark.parametrize("optimizer, clip", [("momentum", None), ("adam", 0.5)])
def test_the_delayed_schedule_has_the_bits_of_the_undelayed_one(optimizer, clip, transport):
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        scheme = {"name": "two_chunks", "first_layers": 3, "replicated_dense": 2}
        delayed = train_dense(build(comm, {"sample": comm.size}, scheme, "float32"), optimizer, clip=clip)
        at_once = train_dense(
            build(comm, {"sample": comm.size}, scheme, "float32"), optimizer, clip=clip, synchronize=True, delayed=False
        )
        np.testing.assert_array_equal(delayed[0], at_once[0])
        assert_arrays(at_once[1], delayed[1])
        # All ranks have the same bits, though each computed its own.
        told = comm.allgather_objects({name: array.tobytes() for name, array in delayed[1].items()})
        assert all(other == told[0] for other in told)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("batch", [4, 7])
def test_messages_and_bytes_are_those_of_the_formula(batch):
    """Messages and bytes are those of the formula: rows of `x` and `dy` for replicated layers, sums for others."""
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        build(comm, {"sample": comm.size}, {"replicated_dense": 2}, "float32", batch) as executor,
    ):
        trainer = Trainer(executor, SGD(executor.store), Cosine(RATE, 9))
        for _ in range(2):
            fill(executor, 0)
            trainer.step()
        trainer.synchronize()
        comm.counters.reset()
        trainer.step()
        trainer.synchronize()
        several, most, expected = int(comm.size > 1), -(-batch // comm.size), 0
        for name in executor.replicable:
            units, features = executor.store.shapes[f"{name}/w"]
            boxes = executor.program.values[name].layout.boxes
            rows = padded_rows(max(b.shape[0] for b in boxes), (features, units), 4)
            assert most <= rows < most + 16
            expected += rows * (features + units) * 4
        found, sums = comm.counters["replicated_dense"], comm.counters["allreduce"]
        assert (found.messages, found.bytes) == (4 * several, expected * several)
        summed = [b for b in executor.store.buckets if not b.replicated]
        assert len(summed) == len(executor.store.buckets) - 2
        assert (sums.messages, sums.bytes) == (len(summed) * several, sum(b.grads.nbytes for b in summed) * several)


def dense_wide():
    """Return a network whose dense layers all have arrays of at least 256 KiB."""
    x, t = Input((16, 16, 8), "x"), Input((1,), "target", "int32")
    y = Dense(1024, name="dense2")(Dense(1024, name="dense1")(Flatten(name="flat")(x)))
    y = Dense(4, name="dense3")(y)
    return Network({"prediction": y, "loss": SoftmaxCrossEntropy(name="ce")(y, t)}, name="wide")


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("backend", ["numpy", "onednn"])
def test_a_step_allocates_no_array(backend):
    """A step allocates no array; a temporary of the size of a gathered array would be detected."""
    with Communicator(MPI.COMM_WORLD) as comm:
        scheme = {"replicated_dense": 2}
        executor = build(comm, {"sample": comm.size}, scheme, "float32", 128, backend=backend, model=dense_wide)
        with executor:
            trainer = Trainer(executor, SGD(executor.store, momentum=0.9), Cosine(1e-4, 99))
            fill(executor, 0)
            for _ in range(3):
                trainer.step()
            check_allocations(comm, lambda: [trainer.step() for _ in range(2)], 192 * 1024)


@pytest.mark.mpi(min_size=2)
def test_evaluation_and_passes_without_backward_do_not_disturb_the_step():
    """Forward passes of evaluation and training between steps do not change the parameters in any bit."""
    with Communicator(MPI.COMM_WORLD) as comm:
        found = []
        for disturbed in (False, True):
            with build(comm, {"sample": comm.size}, {"replicated_dense": 2}, "float32") as executor:
                trainer = Trainer(executor, SGD(executor.store, momentum=0.9), Cosine(RATE, 9))
                for step in range(4):
                    fill(executor, step)
                    if disturbed:
                        trainer.synchronize()
                        executor.forward(training=False)
                        executor.forward(training=True)
                    trainer.step()
                executor.forward(training=False)
                executor.backward()
                executor.reducer.finish()
                found.append(copied(executor.store.params))
        assert_arrays(found[1], found[0])


@pytest.mark.mpi(min_size=1)
def test_a_step_that_went_wrong_leaves_the_parameters():
    with Communicator(MPI.COMM_WORLD) as comm, build(comm, {"sample": comm.size}, {"replicated_dense": 3}) as executor:
        trainer = Trainer(executor, SGD(executor.store), Cosine(RATE, 9))
        fill(executor, 0)
        trainer.step()
        trainer.synchronize()
        before = copied(executor.store.params)
        executor.input("x").array.fill(np.nan)
        with np.errstate(invalid="ignore"), pytest.raises(Diverged):
            trainer.step()
        trainer.synchronize()
        assert_arrays(executor.store.params, before)
        fill(executor, 1)
        assert np.isfinite(trainer.step())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("clip", [None, 0.5])
def test_on_the_double_of_a_device(clip):
    with Communicator(MPI.COMM_WORLD) as comm:
        reduction = {"reduction": {"name": "two_chunks", "first_layers": 3, "replicated_dense": 2}}
        assert both("lenet", comm, {"sample": comm.size}, clip=clip, reduction=reduction)["syncs"] == 0


@pytest.mark.ranks(2)
def test_timeline_shows_gathers_and_gradients_of_the_whole_batch():
    with Communicator(MPI.COMM_WORLD, "emulated:alpha=2e-3,beta=1e-9") as comm:
        timeline = comm.instruments.recorder = Timeline(comm.rank)
        with build(comm, {"sample": comm.size}, {"replicated_dense": 2}) as executor:
            trainer = Trainer(executor, SGD(executor.store), Cosine(RATE, 9))
            advance(trainer, range(4))
            trainer.synchronize()
        gathers = {name for name, _ in timeline.phases if kind_of(name) == "replicated_dense"}
        assert gathers == {
            f"replicated_dense: {layer} {what}" for layer in ("dense3", "dense4") for what in ("x", "dy")
        }
        assert timeline.phases["dense3", "backward"].count == 8, "of the own samples, and of all"
        assert timeline.overlap("replicated_dense") > 0


@pytest.mark.mpi(min_size=2)
def test_a_model_parallel_layer_is_refused_on_all_ranks():
    layers = {"dense3": {"channel": MPI.COMM_WORLD.size}}
    with Communicator(MPI.COMM_WORLD) as comm, pytest.raises(UserError, match="use no replicated_dense"):
        build(comm, {"sample": comm.size}, {"replicated_dense": 1}, layers=layers)
