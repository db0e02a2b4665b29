"""Tests of dense layers whose gradient every rank computes from the whole batch: exact, same bits, no allocation."""

import functools

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers import Dense, Flatten, Input, Network, SoftmaxCrossEntropy
from halograd.layers.dense import padded_rows
from halograd.layers.strategy import Strategy
from halograd.models import lenet5
from halograd.testing import grids
from halograd.training.executor import Executor
from halograd.training.optimizers import LARS, SGD, Adam
from halograd.training.schedules import Cosine
from halograd.training.timeline import Timeline, kind_of
from halograd.training.trainer import Diverged, Trainer
from tests.support.lean import check_allocations
from tests.training.device_steps import both
from tests.training.steps import advance, assert_arrays, bound, check_losses, copied, fill

STEPS, RATE = 10, 0.01
OPTIMIZERS = {
    "momentum": lambda store: SGD(store, momentum=0.9, weight_decay=1e-3),
    "adam": lambda store: Adam(store),
    "lars": lambda store: LARS(store, momentum=0.9, weight_decay=1e-3),
}


def network():
    return lenet5(classes=4, resolution=28)


def build(comm, parts, scheme, dtype="float64", batch=4, layers=None, backend="numpy", model=network):
    strategy = Strategy(parts, layers or {}, bucket_bytes=4096, reduction=scheme)
    return Executor(model(), comm, get_backend(backend), batch, strategy, dtype, seed=3)


class Nothing:
    """Gradient check without computation; it makes all gradients complete at the end of backward."""

    over_ranks = False

    def measure(self):
        pass


def train(executor, optimizer="momentum", steps=STEPS, clip=None, synchronize=False, delayed=True):
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
        found = train(build(comm, {}, {}, dtype, batch), optimizer, clip=clip)
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
    expected, allowed = alone(dtype), bound(network(), dtype)
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in grids(comm.size, ("sample", "height", "width")):
            found, where = train(build(comm, parts, scheme, dtype)), f"{scheme} under {parts}"
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
    expected, allowed, training = alone(**options), bound(network(), "float64"), dict(options)
    with Communicator(MPI.COMM_WORLD) as comm:
        executor = build(
            comm, {axis: comm.size}, {"name": name, "replicated_dense": 2}, "float64", training.pop("batch", 4), layers
        )
        found = train(executor, **training)
        check_losses(comm, found[0], expected[0], allowed, options)
        if axis == "width" and not layers:
            check_arrays(comm, found[1], expected[1], allowed[-1], options)


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("transport", ["auto", "emulated:alpha=1e-3,beta=1e-9"])
@pytest.mark.parametrize("optimizer, clip", [("momentum", None), ("adam", 0.5)])
def test_the_delayed_schedule_has_the_bits_of_the_undelayed_one(optimizer, clip, transport):
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        scheme = {"name": "two_chunks", "first_layers": 3, "replicated_dense": 2}
        delayed = train(build(comm, {"sample": comm.size}, scheme, "float32"), optimizer, clip=clip)
        at_once = train(
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


def wide():
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
        executor = build(comm, {"sample": comm.size}, scheme, "float32", 128, backend=backend, model=wide)
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
