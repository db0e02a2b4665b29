"""Tests of parameters that the loss does not depend on, and of gradient arrays with arbitrary initial values."""

import contextlib

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.testing import grids, random_array
from halograd.training.checkpoint import Snapshot, read_checkpoint, write_checkpoint
from halograd.training.clipping import Clip
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.training.steps import assert_arrays, copied

SHAPE, BATCH, STEPS = (5, 4, 2), 3, 3
LEFT_OUT = ("norm", "aside", "dense2")
SCHEMES = [
    {"name": "blocking"},
    {"name": "per_layer"},
    {"name": "bucketed", "deterministic": True},
    {"name": "bucketed", "payload": "bfloat16"},
    {"name": "two_chunks", "first_layers": 2},
    {"name": "hierarchical"},
    {"name": "host_accumulate", "chunk": 2},
    {"name": "sharded"},
    {"name": "bucketed", "replicated_dense": 1},
    {"name": "bucketed", "replicated_dense": 2},
]


def network():
    """Return a network with a branch outside of the loss that has parameters of all kinds."""
    x = hg.Input(SHAPE, "x")
    y = hg.Conv(3, 3, padding=1, name="conv")(x)
    dense2 = hg.Dense(6, name="dense2")(hg.Flatten(name="flat")(x))
    aside = hg.Conv(2, 1, name="aside")(hg.BatchNorm(name="norm")(y))
    sum_ = hg.Add(name="add")(
        hg.Dense(6, name="dense1")(hg.Flatten(name="flat1")(y)), hg.Dense(6, name="last")(_pooled(y))
    )
    loss = hg.MeanSquaredError(name="mse")(sum_, hg.Input((6,), "target"))
    return hg.Network({"aside": aside, "vector": dense2, "loss": loss})


def _pooled(y):
    return hg.GlobalAveragePool(name="pool")(y)


@contextlib.contextmanager
def training(comm, strategy, dtype="float32"):
    with Executor(network(), comm, get_backend("numpy"), BATCH, strategy, dtype, seed=2) as executor:
        yield Trainer(executor, SGD(executor.store, momentum=0.5, weight_decay=0.1), Constant(0.05))


def train(trainer, litter):
    """Return this rank's parameters after some steps; before each step gradients are set to `litter`. Collective."""
    executor = trainer.executor
    for step in range(STEPS):
        trainer.synchronize()
        for array in executor.store.grads.values():
            array.fill(litter)
        for name, node in executor.network.inputs.items():
            executor.set_input(name, random_array((BATCH, *node.shape), name, step))
        trainer.step()
    trainer.synchronize()
    return copied(executor.store.params)


def is_left_out(name):
    return name.rpartition("/")[0] in LEFT_OUT


@pytest.mark.mpi
@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: "-".join(map(str, s.values())))
def test_what_was_in_the_gradients_before_has_no_part(scheme):
    """Steps do not depend on the gradients' initial values, under every cut, also on ranks without elements."""
    with Communicator(MPI.COMM_SELF) as alone, training(alone, Strategy()) as trainer:
        whole = train(trainer, 0.0)
    # A sum in bfloat16 has 8 bits.
    allowed = 2e-2 if scheme.get("payload") else 2e-5
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in [*grids(comm.size, ("sample", "height")), {"height": comm.size}]:
            with training(comm, Strategy(parts, bucket_bytes=100, reduction=scheme)) as trainer:
                store = trainer.executor.store
                initial = copied(store.params)
                found = train(trainer, 7.0)
                for name, array in found.items():
                    if is_left_out(name):
                        assert not store.grads[name].any(), (parts, name)
                        np.testing.assert_array_equal(array, initial[name], err_msg=f"{parts} {name}")
                    else:
                        want = whole[name][store.box(name).slices()]
                        np.testing.assert_allclose(array, want, rtol=0, atol=allowed, err_msg=f"{parts} {name}")


@pytest.mark.mpi
def test_they_are_in_no_sum():
    with Communicator(MPI.COMM_WORLD) as comm, training(comm, Strategy({"sample": comm.size})) as trainer:
        store = trainer.executor.store
        summed = {name for bucket in store.buckets for name in bucket.names}
        assert summed == {name for name in store.params if not is_left_out(name)}
        train(trainer, 7.0)
        used = np.concatenate([store.grads[name].reshape(-1) for name in summed])
        clip = Clip(store, comm, 1.0)
        clip.measure()
        np.testing.assert_allclose(float(clip.norm), np.linalg.norm(used), rtol=1e-5)


@pytest.mark.mpi(min_size=2)
def test_they_are_in_checkpoints(shared):
    with Communicator(MPI.COMM_WORLD) as comm:
        path = shared / "checkpoint.h5"
        with training(comm, Strategy({"height": comm.size})) as trainer:
            saved = train(trainer, 0.0)
            whole = Snapshot.of(trainer.executor.store, trainer.optimizer, comm)
            if whole is not None:
                write_checkpoint(path, whole)
        comm.barrier()
        with training(comm, Strategy({"sample": comm.size}, reduction={"name": "sharded"})) as trainer:
            with comm.agreement():
                read_checkpoint(path, trainer.executor.store, trainer.optimizer)
            assert_arrays(saved, trainer.executor.store.params)
