"""Tests of training with parameters that have spatial extents: sums, memory, restart, under every cut."""

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.training.checkpoint import Snapshot, TrainingProgress, read_checkpoint, write_checkpoint
from halograd.training.executor import Executor
from halograd.training.optimizers import LAMB, LARS, AdamW
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.models.embedded import embedded
from tests.perfmodel.test_cost_reductions import MPI_ALONE, SHARED, TWO_PER_NODE, faults_of
from tests.training.reductions import BUCKET, check_strategy
from tests.training.steps import NETWORKS, copied, fill

#: Scheme, transport with ranks that share memory by it, options of all layers.
CASES = [
    (Scheme("blocking"), MPI_ALONE, {}),
    (Scheme("per_layer", deterministic=True), SHARED, {"recompute": "block"}),
    (Scheme("two_chunks", first_layers=2), SHARED, {}),
    (Scheme("bucketed"), TWO_PER_NODE, {"recompute": "pointwise"}),
    (Scheme("hierarchical"), TWO_PER_NODE, {}),
    (Scheme("host_accumulate"), SHARED, {}),
    (Scheme("sharded"), MPI_ALONE, {}),
    (Scheme("sharded", replicated_dense=1), TWO_PER_NODE, {}),
]


@pytest.fixture(autouse=True)
def network(monkeypatch):
    monkeypatch.setitem(NETWORKS, "embedded", embedded)


def cuts(size):
    """Return cuts of all layers by the axes of extents, and one with other cuts of some layers and unequal blocks."""
    if size == 1:
        return [Strategy()]
    halves = {"sample": size // 2, "width": 2} if size % 2 == 0 else {"width": size}
    layers = {"positions": {"channel": size}, "rows": {"height": [1, 2, *[1] * (size - 2)]}, "columns": {"sample": 1}}
    return [Strategy(halves), Strategy({"height": size}), Strategy({"width": size}, layers)]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: f"{CASES[i][0]} {CASES[i][1][0][:8]}")
def test_steps_are_those_of_one_process_and_traffic_and_memory_as_predicted(number):
    scheme, (transport, per_node), options = CASES[number]
    if transport == TWO_PER_NODE[0] and MPI.COMM_WORLD.size % 2:
        transport, per_node = SHARED
    given = cuts(MPI.COMM_WORLD.size)[number % 3]
    strategy = Strategy(given.parts, given.layers, options, BUCKET, scheme)
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        check_strategy("embedded", comm, strategy, "float64")
        faults = faults_of("embedded", comm, strategy, per_node)
        comm.agree(AssertionError(f"rank {comm.rank}: " + "; ".join(faults[:4])) if faults else None)


def run(comm, strategy, body, network):
    with Executor(network(), comm, get_backend("numpy"), 4, strategy, "float64", seed=2, parts=2) as executor:
        optimizer = AdamW(executor.store, weight_decay=0.01, average=0.9, factors={"rows": 0.5})
        return body(Trainer(executor, optimizer, Constant(0.01), 0.5))


def steps(trainer, numbers):
    losses = []
    for number in numbers:
        fill(trainer.executor, 2 * number)
        trainer.add()
        fill(trainer.executor, 2 * number + 1)
        losses.append(trainer.step())
    trainer.synchronize()
    return losses


def arrays_of(trainer):
    snapshot = Snapshot.of(trainer.executor.store, trainer.optimizer, trainer.executor.comm)
    if snapshot is None:
        return None, None
    return snapshot, copied({f"{kind} {k}": v for kind, group in snapshot.groups.items() for k, v in group.items()})


def frozen():
    return embedded().freeze("positions", "conv1")


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize(("network", "scheme"), [(embedded, "bucketed"), (frozen, "sharded")])
def test_restart_under_other_cuts_and_ranks(shared, network, scheme):
    """Clipped steps of parts of batches with averages go on under other cuts, from a file of equal bits."""
    path = shared / "step.h5"

    def write(trainer):
        losses = steps(trainer, range(2))
        snapshot, arrays = arrays_of(trainer)
        if snapshot is not None:
            write_checkpoint(path, snapshot, TrainingProgress(step=2))
        trainer.executor.comm.barrier()
        return losses, arrays, trainer.gradient_norm

    def resume(trainer):
        read_checkpoint(path, trainer.executor.store, trainer.optimizer)
        _, arrays = arrays_of(trainer)
        losses = steps(trainer, range(2, 4))
        return arrays, losses, trainer.gradient_norm

    def whole(trainer):
        losses = steps(trainer, range(2))
        norm = trainer.gradient_norm
        return losses + steps(trainer, range(2, 4)), norm, trainer.gradient_norm

    with Communicator(MPI.COMM_SELF) as alone:
        expected, norm, last = run(alone, Strategy(), whole, network)
    assert norm > 0.5, "the test must clip"
    with Communicator(MPI.COMM_WORLD) as comm:
        every = [Strategy(s.parts, s.layers, reduction=Scheme(scheme)) for s in cuts(comm.size)]
        losses, written, found = run(comm, every[-1], write, network)
        assert losses == pytest.approx(expected[:2], rel=1e-11) and found == pytest.approx(norm, rel=1e-9)
        resumed = [run(comm, strategy, resume, network) for strategy in every]
        with Communicator(MPI.COMM_SELF) as alone:
            resumed.append(run(alone, Strategy(), resume, network))
    for arrays, losses, found in resumed:
        assert losses == pytest.approx(expected[2:], rel=1e-9) and found == pytest.approx(last, rel=1e-9)
        if written is not None:
            assert set(arrays) == set(written) and all(np.array_equal(arrays[k], written[k]) for k in written)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_optimizers_of_whole_parameters_refuse_boxes(kind):
    with Communicator(MPI.COMM_WORLD) as comm:
        with (
            Executor(embedded(), comm, get_backend("numpy"), 4, Strategy({"height": 2})) as executor,
            pytest.raises(UserError, match=rf"{kind.__name__} .* spatial extents"),
        ):
            kind(executor.store)
        with Executor(embedded(), comm, get_backend("numpy"), 4, Strategy({"sample": 2})) as executor:
            kind(executor.store)
