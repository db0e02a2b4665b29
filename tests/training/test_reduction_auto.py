"""Tests of the scheme ``auto``: all ranks try and choose the same schemes, results are exact, the choice is stored."""

import json
import math

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers import Conv, Dense, Flatten, Input, MaxPool, Network, ReLU, SoftmaxCrossEntropy
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.perfmodel.cost import program_of
from halograd.program.program import Target
from halograd.testing import grids
from halograd.training import trainer as trainer_module
from halograd.training.auto_reduction import Tuning
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD, Adam
from halograd.training.schedules import Cosine
from halograd.training.trainer import Trainer
from tests.support.clock import TICK, DrivenClock
from tests.training.steps import advance, copied

RATE, STEPS = 0.01, 26
TUNING = Tuning(interval=2, step=2, range=2, candidates=5)
RANKED = [
    Scheme("two_chunks", first_layers=3, replicated_dense=1),
    Scheme("bucketed"),
    Scheme("two_chunks", first_layers=2, replicated_dense=2),
    Scheme("blocking", replicated_dense=2),
]


def network():
    """Return a network of four convolutions, and two dense layers with more weights than activations and errors."""
    x, t = Input((12, 12, 2), "x"), Input((1,), "target", "int32")
    y = Conv(6, 3, padding=1, activation="relu", name="conv1")(x)
    y = MaxPool(2, 2, name="pool1")(Conv(8, 3, padding=1, activation="relu", name="conv2")(y))
    y = Conv(8, 3, padding=1, activation="relu", name="conv4")(Conv(8, 3, padding=1, name="conv3")(y))
    y = ReLU(name="relu1")(Dense(40, name="dense1")(Flatten(name="flatten")(y)))
    y = Dense(4, name="dense3")(ReLU(name="relu2")(Dense(30, name="dense2")(y)))
    return Network({"prediction": y, "loss": SoftmaxCrossEntropy(name="ce")(y, t)}, name="small vgg")


def build(comm, parts, reduction, dtype="float64"):
    strategy = Strategy(parts, bucket_bytes=4096, reduction=reduction)
    return Executor(network(), comm, get_backend("numpy"), 4, strategy, dtype, seed=5)


def seconds(scheme, rank=0):
    """Return the artificial time of a step: 3 layers per chunk and two replicated layers are best."""
    base = {"two_chunks": 5.0, "bucketed": 6.0, "blocking": 9.0, "host_accumulate": 4.0}[scheme.name]
    chunked = 0.5 * abs(scheme.chunk - 3) if scheme.name == "host_accumulate" else 0.0
    return base - scheme.replicated_dense + chunked + 0.01 * rank


def feign(auto, comm):
    """Replace measured times by artificial ones; the search must use those of the slowest rank."""
    real = auto.after_step
    auto.after_step = lambda measured: real(seconds(auto.scheme, comm.rank))


def momentum(store):
    return SGD(store, momentum=0.9, weight_decay=1e-3)


def train(executor, make=momentum, steps=STEPS, comm=None, state=None):
    """Return losses, arrays, measured times, and the search. Collective."""
    measured = []
    with executor:
        trainer = Trainer(executor, make(executor.store), Cosine(RATE, 2 * STEPS), None, RANKED, TUNING)
        if trainer.auto is not None:
            if state is not None:
                trainer.auto.load_state_dict(state)
            feign(trainer.auto, comm)
            trainer.auto.on_measured = lambda *what: measured.append(what)
        losses = advance(trainer, range(steps))
        trainer.synchronize()
        params = copied(executor.store.params)
        return np.array(losses), params, measured, trainer.auto


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("make, axes", [(momentum, ("sample", "height")), (Adam, ("width",))])
def test_changing_schemes_keeps_the_losses_of_one_process(make, axes):
    with Communicator(MPI.COMM_SELF) as alone:
        expected, _, _, _ = train(build(alone, {}, {}), make)
    assert expected[-3:].mean() < expected[:3].mean(), "the network must learn something"
    eps = float(np.finfo(np.float64).eps)
    bound = eps * math.sqrt(12 * 12 * 8 * 4) * 20 * (1 + np.arange(STEPS)) ** 2
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in grids(comm.size, axes):
            found, _, measured, auto = train(build(comm, parts, {"name": "auto"}), make, comm=comm)
            error = np.abs(found - expected) / np.maximum(1.0, np.abs(expected))
            comm.agree(None if (error <= bound).all() else AssertionError(f"{parts}: {error}, allowed {bound}"))
            # Four candidates, then chunks of 1, 2, 4 and 6 layers: of those that are tried, 2 and 4 are best.
            assert [str(s) for s, _, _ in measured[:4]] == [str(s) for s in RANKED]
            assert [s.chunk for s, _, _ in measured[4:]] == [1, 2, 4, 6]
            assert all(t == seconds(s, comm.size - 1) for s, t, _ in measured), "the slowest rank counts"
            assert [done for _, _, done in measured] == [False] * 7 + [True]
            assert auto.done and auto.scheme == Scheme("host_accumulate", chunk=2, replicated_dense=2)
            assert auto.executor.store.scheme == auto.scheme
            everyone = comm.allgather_objects([(str(s), t) for s, t, _ in measured])
            assert all(other == everyone[0] for other in everyone)


@pytest.mark.ranks(2)
def test_a_run_goes_on_with_what_was_measured():
    with Communicator(MPI.COMM_WORLD) as comm:
        parts, auto = {"sample": comm.size}, {"name": "auto"}
        _, _, whole, last = train(build(comm, parts, auto), comm=comm)
        for stop in (1, 12, 20):  # within the first interval, the search, and afterwards
            _, _, first, half = train(build(comm, parts, auto), steps=stop, comm=comm)
            state = json.loads(json.dumps(half.state_dict()))
            _, _, second, other = train(build(comm, parts, auto), comm=comm, state=state)
            assert first + second == whole and other.scheme == other.executor.store.scheme == last.scheme
        state["ranks"] += 1
        _, _, again, _ = train(build(comm, parts, auto), comm=comm, state=state)
        assert again == whole, "what another number of ranks measured is forgotten"


@pytest.mark.ranks(2)
def test_what_another_transport_measured_is_forgotten():
    """Measurements over one transport are not used for another, which may lack the best scheme."""
    parts, auto = {"sample": 2}, {"name": "auto"}
    with Communicator(MPI.COMM_WORLD) as comm:
        _, _, _, before = train(build(comm, parts, auto), comm=comm)
        assert before.scheme.name == "host_accumulate"
        state = json.loads(json.dumps(before.state_dict()))
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        _, _, measured, after = train(build(comm, parts, auto), comm=comm, state=state)
        assert [s for s, _, _ in measured] == RANKED and after.done


@pytest.mark.mpi(min_size=1)
def test_the_memory_of_a_search_is_that_of_the_program():
    """Predicted memory of a search is that of the executor: all dense layers that it may replicate are prepared."""
    with Communicator(MPI.COMM_WORLD) as comm, build(comm, {"sample": comm.size}, {"name": "auto"}) as executor:
        target = Target(executor.batch, comm.size, comm.rank, executor.dtype, overlaps=comm.waits_for_network)
        program = program_of(executor.network, executor.strategy, target)
        assert program.placement.size == executor.program.placement.size
        assert [bucket.layers for bucket in program.buckets] == [bucket.layers for bucket in executor.program.buckets]
        assert bool(program.exposed) == (comm.size > 1)


@pytest.mark.mpi(min_size=1)
def test_schemes_are_tried_without_a_cost_model_and_by_the_clock(monkeypatch):
    """Without a cost model a search measures schemes with the clock of the trainer."""
    DrivenClock().drive(monkeypatch, trainer_module)
    with Communicator(MPI.COMM_WORLD) as comm, build(comm, {"sample": comm.size}, {"name": "auto"}) as executor:
        trainer = Trainer(executor, SGD(executor.store), Cosine(RATE, 99), tuning=Tuning(2, 1, 1))
        several = comm.size > 1
        assert executor.replicable == (["dense1", "dense2"] if several else [])
        advance(trainer, range(40))
        trainer.synchronize()
        assert trainer.auto.finished and all(t.seconds == TICK for t in trainer.auto.tuner.trials)
        tried = {t.scheme.name for t in trainer.auto.tuner.trials}
        assert tried == {"bucketed", "two_chunks"} | ({"host_accumulate"} if several else set())
        chosen = comm.allgather_objects(str(trainer.auto.scheme))
        assert len(set(chosen)) == 1 and str(executor.store.scheme) == chosen[0]


@pytest.mark.mpi(min_size=2)
def test_more_replicated_layers_than_there_is_room_for_are_no_candidates():
    with Communicator(MPI.COMM_WORLD) as comm, build(comm, {"sample": comm.size}, {"name": "auto"}) as executor:
        ranked = [Scheme("bucketed", replicated_dense=3), Scheme("sharded"), Scheme("bucketed", replicated_dense=1)]
        trainer = Trainer(executor, SGD(executor.store), Cosine(RATE, 99), ranked=ranked, tuning=Tuning(step=0))
        assert trainer.auto.tuner.candidates == ranked[2:] and trainer.auto.tuner.search is None
        with pytest.raises(ValueError, match=r"replicated .*\['dense1', 'dense2'\]"):
            trainer.reduce_by(ranked[0])
        with pytest.raises(ValueError, match="expected 'auto' to stay"):
            trainer.reduce_by(ranked[1])


@pytest.mark.parametrize("wrong", [{"interval": 1}, {"step": -1}, {"range": 0}, {"candidates": 0}])
def test_tuning_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected at least"):
        Tuning(**wrong)
