"""Tests of cut parameters: checkpoints, clipping, divergence, and errors."""

import math

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.training.checkpoint import Snapshot, TrainingProgress, read_checkpoint, write_checkpoint
from halograd.training.clipping import Clip
from halograd.training.executor import Executor
from halograd.training.optimizers import LARS, SGD, AdamW
from halograd.training.schedules import Constant
from halograd.training.trainer import Diverged, Trainer
from tests.layers.cuts import random_strategy
from tests.training.steps import advance, copied

STEPS, HALF = 6, 3


def network(classes=4):
    x = hg.Input((8, 7, 3), "x")
    y = hg.BatchNorm(activation="relu", name="bn")(hg.Conv(6, 3, padding=1, name="conv1")(x))
    y = hg.MaxPool(2, name="pool")(hg.Conv(5, 3, 2, 1, activation="relu", name="conv2")(y))
    y = hg.Dense(classes, name="dense2")(hg.Dense(7, name="dense1")(hg.Flatten(name="flat")(y)))
    return hg.Network(
        {"prediction": y, "loss": hg.SoftmaxCrossEntropy(name="ce")(y, hg.Input((1,), "target", "int32"))}
    )


def cut(size):
    """Return a strategy with cuts of filters and of input channels, and one layer on a single rank."""
    if size == 1:
        return Strategy()
    layers = {
        "conv1": {"channel": size},
        "bn": {"channel": size},
        "conv2": {"sample": 1},
        "dense1": {"input_channel": 2},
        "dense2": {"channel": 2},
    }
    return Strategy({"sample": size}, layers, bucket_bytes=1)


def trainer_of(executor, clip_norm=None):
    optimizer = AdamW(executor.store, weight_decay=0.01)
    return Trainer(executor, optimizer, Constant(0.01), clip_norm)


def steps(trainer, numbers):
    losses = advance(trainer, numbers)
    trainer.synchronize()
    return losses


def run(comm, strategy, body):
    """Return the result of `body(trainer)` on a new executor."""
    with Executor(network(), comm, get_backend("numpy"), 4, strategy, "float64", seed=2) as executor:
        return body(trainer_of(executor))


def arrays_of(snapshot):
    """Return every array of a snapshot under a unique name."""
    if snapshot is None:
        return None
    groups = {"params": snapshot.params, "state": snapshot.state, **snapshot.optimizer}
    return copied({f"{kind} {k}": v for kind, group in groups.items() for k, v in group.items()})


@pytest.mark.ranks(1, 2, 3, 4)
def test_written_under_one_strategy_and_resumed_under_another(shared):
    """Training resumes under another strategy: arrays are equal in every bit, and losses continue as in one process."""
    path = shared / "step.h5"
    with Communicator(MPI.COMM_SELF) as alone:
        expected = run(alone, Strategy(), lambda trainer: steps(trainer, range(STEPS)))
    with Communicator(MPI.COMM_WORLD) as comm:

        def write(trainer):
            losses = steps(trainer, range(HALF))
            snapshot = Snapshot.of(trainer.executor.store, trainer.optimizer, comm)
            assert (snapshot is None) == (comm.rank > 0)
            if snapshot is not None:
                write_checkpoint(path, snapshot, TrainingProgress(step=HALF))
            comm.barrier()
            return losses, arrays_of(snapshot)

        def resume(trainer):
            assert read_checkpoint(path, trainer.executor.store, trainer.optimizer).step == HALF
            found = arrays_of(Snapshot.of(trainer.executor.store, trainer.optimizer, trainer.executor.comm))
            return found, steps(trainer, range(HALF, STEPS))

        losses, written = run(comm, cut(comm.size), write)
        assert losses == pytest.approx(expected[:HALF], rel=1e-11)
        others = [Strategy({"height": comm.size}), cut(comm.size), random_strategy(network(), comm.size, 5)]
        resumed = [run(comm, strategy, resume) for strategy in others]
        with Communicator(MPI.COMM_SELF) as alone:
            resumed.append(run(alone, Strategy(), resume))
        for found, losses in resumed:
            assert losses == pytest.approx(expected[HALF:], rel=1e-9)
            if written is not None:
                assert set(found) == set(written)
                assert all(np.array_equal(found[k], written[k]) for k in written)


@pytest.mark.ranks(2)
def test_a_snapshot_of_blocks_needs_the_communicator():
    with (
        Communicator(MPI.COMM_WORLD) as comm,
        Executor(network(), comm, get_backend("numpy"), 4, cut(comm.size), "float64") as executor,
        pytest.raises(ValueError, match="communicator of the ranks that share"),
    ):
        Snapshot.of(executor.store)


@pytest.mark.ranks(2, 3, 4)
def test_clipping_is_by_the_norm_of_everything():
    with Communicator(MPI.COMM_SELF) as alone, Communicator(MPI.COMM_WORLD) as comm:
        results = []
        for ranks, strategy in ((alone, Strategy()), (comm, cut(comm.size))):
            with Executor(network(), ranks, get_backend("numpy"), 4, strategy, "float64", seed=2) as executor:
                trainer = trainer_of(executor, clip_norm=0.1)
                losses = steps(trainer, range(STEPS))
                again = Clip(executor.store, ranks, 0.1)
                again.measure()
                results.append((losses, trainer.gradient_norm, float(again.norm)))
        (losses, norm, after), (found, ours, own) = results
        assert norm > 0.1, "the test must clip"
        assert found == pytest.approx(losses, rel=1e-10)
        assert (ours, own) == pytest.approx((norm, after), rel=1e-9)
        assert len(set(comm.allgather_objects(ours))) == 1, "all ranks scale alike"


@pytest.mark.ranks(2, 3)
def test_lars_refuses_cut_parameters():
    with Communicator(MPI.COMM_WORLD) as comm:
        fewer = Strategy({"sample": comm.size}, {"dense1": {"sample": 1}})
        for strategy in (cut(comm.size), fewer):
            with (
                Executor(network(), comm, get_backend("numpy"), 4, strategy) as executor,
                pytest.raises(UserError, match=r"LARS .* whole parameters: .*; choose sgd"),
            ):
                LARS(executor.store)
        with Executor(network(), comm, get_backend("numpy"), 4) as executor:
            LARS(executor.store)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["conv1/w", "conv2/w", "dense1/b"])
def test_a_bad_block_on_one_rank_is_seen_by_all(name):
    with Communicator(MPI.COMM_WORLD) as comm:

        def spoil(trainer):
            array = trainer.executor.store.params[name]
            holders = [rank for rank, size in enumerate(comm.allgather_objects(array.size)) if size]
            if comm.rank == holders[-1]:
                array.reshape(-1)[-1] = math.nan
            with pytest.raises(Diverged, match=f"parameter {name} .*; lower schedule"):
                trainer.synchronize()

        run(comm, cut(comm.size), spoil)


@pytest.mark.ranks(2, 4)
def test_ranks_hold_and_update_their_blocks_only():
    """Ranks hold and update only their blocks, so bytes of parameters, gradients and momentum fall with the ranks."""
    with Communicator(MPI.COMM_WORLD) as comm:
        with Executor(network(), comm, get_backend("numpy"), 4, cut(comm.size), "float64") as executor:
            SGD(executor.store, momentum=0.9)
            shapes = {name: array.shape for name, array in executor.store.params.items()}
            blocks = comm.allgather_objects(shapes)
        filters = [shapes["conv1/w"][0] for shapes in blocks]
        assert sum(filters) == 6 and max(filters) - min(filters) <= 1
        assert [shapes["conv2/w"][0] for shapes in blocks] == [5, *[0] * (comm.size - 1)]
        assert [shapes["dense1/w"][1] for shapes in blocks][:2] == [10, 10]
        assert executor.store.count == network().parameter_count
