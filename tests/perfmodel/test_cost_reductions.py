"""Tests of predicted messages, bytes and memory of every reduction scheme against those of training steps."""

import pytest
from mpi4py import MPI

from halograd.comm import Communicator, sums
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.perfmodel.cost import count_step, memory_of, program_of
from halograd.program.program import Target
from tests.perfmodel.counted import differing
from tests.training.reductions import BATCH, BUCKET, advance, build, trainer_of
from tests.training.steps import NETWORKS

SCHEMES = [
    Scheme("blocking"),
    Scheme("per_layer"),
    Scheme("bucketed"),
    Scheme("two_chunks", first_layers=3),
    Scheme("host_accumulate", chunk=2),
    Scheme("hierarchical"),
    Scheme("sharded"),
    Scheme("bucketed", payload="bfloat16"),
    Scheme("two_chunks", first_layers=2, payload="bfloat16", error_feedback=False),
    Scheme("bucketed", deterministic=True),
    Scheme("two_chunks", first_layers=3, replicated_dense=2),
    Scheme("host_accumulate", chunk=2, replicated_dense=1),
    Scheme("sharded", replicated_dense=1),
]
#: Transport, and ranks that share memory by it.
MPI_ALONE, SHARED, TWO_PER_NODE = ("mpi", 1), ("auto", 4), ("emulated:alpha=1e-6,beta=1e-12,node=2", 2)
CASES = [
    (scheme, where)
    for scheme in SCHEMES
    for where in (MPI_ALONE, SHARED, TWO_PER_NODE)
    if where is not MPI_ALONE or scheme.name not in ("host_accumulate", "hierarchical")
]


def faults_of(name, comm, strategy, per_node):
    """Return the differences between prediction and a training step on this rank. Collective."""
    network = NETWORKS[name]()
    with build(name, comm, strategy) as executor:
        trainer = trainer_of(executor)
        advance(trainer, [0])
        trainer.synchronize()
        comm.counters.reset()
        advance(trainer, [1])
        trainer.synchronize()
        found = {kind: count for kind, count in comm.counters.snapshot().items() if kind != "errors"}
        held = {k: v for k, v in executor.predicted_bytes.items() if k != "kernel workspace"}
    faults = differing(found, count_step(network, strategy, BATCH, comm.size, per_node=per_node), comm.rank)
    scheme, blocks = strategy.reduction, parameter_blocks(network, strategy, comm.size)
    program = program_of(network, strategy, Target(BATCH, comm.size, comm.rank, overlaps=comm.waits_for_network))
    want = memory_of(program, blocks, 1, per_node)
    return [f"{fault} under {strategy}" for fault in faults] + memory_faults(held, want, comm, scheme)


def memory_faults(held, want, comm, scheme):
    """Return differences in memory: arrays of the scheme are exact; with MPI messages are too."""
    uses = ["parameter", "parameter gradient", "optimizer state", "gradient error", "replicated gradient"]
    if comm.transport == "mpi":
        uses.append("messages")
    return [
        f"{use}: predicted {want.get(use, 0)}, held {held.get(use, 0)} with {scheme}"
        for use in uses
        if held.get(use, 0) != want.get(use, 0)
    ]


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize(("scheme", "where"), CASES, ids=lambda x: str(x) if isinstance(x, Scheme) else x[0][:8])
def test_messages_bytes_and_memory_of_every_scheme(scheme, where):
    transport, per_node = where
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        parts = {"sample": 2, "height": 2} if comm.size == 4 else {"sample": comm.size}
        faults = faults_of("lenet", comm, Strategy(parts, bucket_bytes=BUCKET, reduction=scheme), per_node)
        comm.agree(AssertionError(f"rank {comm.rank}: " + "; ".join(faults[:4])) if faults else None)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("scheme", [scheme for scheme, where in CASES if where is MPI_ALONE], ids=str)
def test_messages_and_memory_if_sums_wait_for_a_place(scheme, monkeypatch):
    """Large sums that share a ring hold what was predicted, less than all of them together."""
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        strategy = Strategy({"sample": comm.size}, bucket_bytes=BUCKET, reduction=scheme)
        whole = messages_of("lenet", comm, strategy)
        monkeypatch.setattr(sums, "LARGEST_AT_ONCE", 64)
        monkeypatch.setattr(sums, "RING_BYTES", 1024)
        faults = faults_of("lenet", comm, strategy, 1)
        if scheme.name != "blocking" and messages_of("lenet", comm, strategy) >= whole:
            faults.append("as much memory as without a ring")
        comm.agree(AssertionError(f"rank {comm.rank}: " + "; ".join(faults[:4])) if faults else None)


def messages_of(name, comm, strategy):
    """Return the predicted memory of messages on this rank."""
    network, target = NETWORKS[name](), Target(BATCH, comm.size, comm.rank, overlaps=comm.waits_for_network)
    program = program_of(network, strategy, target)
    return memory_of(program, parameter_blocks(network, strategy, comm.size), 1, 1)["messages"]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where", [SHARED, TWO_PER_NODE], ids=["shared", "nodes of two"])
@pytest.mark.parametrize("name", ["hierarchical", "sharded", "host_accumulate"])
def test_blocks_of_channels_are_summed_by_those_who_hold_them(name, where):
    transport, per_node = where
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        size = comm.size
        layers = {"conv2": {"channel": size}, "dense3": {"input_channel": 2}, "dense5": {"sample": 1}}
        strategy = Strategy({"sample": size}, layers, bucket_bytes=BUCKET, reduction=Scheme(name))
        faults = faults_of("lenet", comm, strategy, per_node)
        comm.agree(AssertionError(f"rank {comm.rank}: " + "; ".join(faults[:4])) if faults else None)
