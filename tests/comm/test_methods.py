"""Tests of every method of a sum, over every transport and every distribution over nodes."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import CommError, Communicator, shards
from halograd.comm.codec import UNCHANGED, BFloat16
from halograd.comm.sums import METHODS
from tests.harness.limits import wait_until

pytestmark = pytest.mark.mpi
FAST = "emulated:alpha=1e-5,beta=1e-11"
EVERY = ["mpi", "shared", "auto", FAST, f"{FAST},node=2", f"{FAST},node=3"]
SHARING = [text for text in EVERY if text != "mpi"]
# Below and above the limit between small and large sums; not a multiple of a line, of the ranks, of a piece.
SIZES = (5, 1000, 8193, 70_001)

transports = pytest.mark.parametrize("communicator", EVERY, indirect=True)
sharing = pytest.mark.parametrize("communicator", SHARING, indirect=True)


@pytest.fixture
def communicator(request, comm):
    with Communicator(comm, request.param) as made:
        yield made


def draw(rank, number, size, dtype="float64"):
    """Return integers of few bits, whose sums are the same in any order, and in bfloat16."""
    return np.random.default_rng([rank, number, size]).integers(-8, 8, size).astype(dtype)


def total(communicator, number, size, dtype="float64"):
    return sum(draw(rank, number, size, dtype) for rank in range(communicator.size))


def check_all(communicator, method, dtype="float64", order=(3, 1, 0, 2), steps=3):
    """Check sums of all sizes that are active at once, and finished in another order on every rank."""
    order = np.roll(order, communicator.rank)
    reductions = [communicator.reduction(np.zeros(size, dtype), method=method) for size in SIZES]
    for step in range(steps):
        for i, reduction in enumerate(reductions):
            reduction.buffer[:] = draw(communicator.rank, step + i, SIZES[i], dtype)
            reduction.start()
        for i in order:
            reductions[i].finish()
            check(communicator, method, reductions[i].buffer, step + i)
    for reduction in reductions:
        reduction.close()


def check(communicator, method, buffer, number):
    """Assert that the buffer holds the result of this method for the values from `draw`."""
    size, dtype = buffer.size, buffer.dtype
    parts = shards(size, communicator.size, buffer.itemsize)
    if method == "all_gather":
        for rank, part in enumerate(parts):
            np.testing.assert_array_equal(buffer[part], draw(rank, number, size, dtype)[part])
        return
    own = parts[communicator.rank] if method == "reduce_scatter" else slice(None)
    np.testing.assert_array_equal(buffer[own], total(communicator, number, size, dtype)[own])


@pytest.mark.parametrize("method", [name for name, method in METHODS.items() if not method.by_nodes])
@transports
def test_sums_of_every_method_finish_in_any_order(communicator, method):
    check_all(communicator, method, "float32")


@pytest.mark.parametrize("dtype", ["uint16", "float16", ml_dtypes.bfloat16, "complex128"])
@transports
def test_what_is_no_number_of_mpi_can_be_gathered(communicator, dtype):
    check_all(communicator, "all_gather", dtype, steps=1)


@pytest.mark.parametrize("method", ["hierarchical", "accumulate"])
@sharing
def test_sums_by_nodes(communicator, method):
    check_all(communicator, method, "float32")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("transport", ["auto", "shared"])
def test_every_method_with_mpi_between_nodes(comm, nodes_of_two, transport, method):
    with Communicator(comm, transport) as communicator:
        assert communicator.nodes == (0, 0, 1, 1)[: comm.size]
        check_all(communicator, method, "float32")


@transports
def test_both_halves_are_an_all_reduce(communicator):
    buffer = np.zeros((100, 50))
    scatter = communicator.reduction(buffer, method="reduce_scatter")
    gather = communicator.reduction(buffer, method="all_gather")
    for step in range(3):
        buffer.reshape(-1)[:] = draw(communicator.rank, step, buffer.size)
        scatter.run()
        gather.run()
        np.testing.assert_array_equal(buffer.reshape(-1), total(communicator, step, buffer.size))


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("communicator", ["auto", f"{FAST},node=2"], indirect=True)
@pytest.mark.parametrize("method", ["reduce_scatter", "hierarchical", "accumulate"])
def test_groups_sum_among_themselves(communicator, method):
    """Groups (ranks 0 and 2, on two emulated nodes, and the others) sum independently during a sum of all ranks."""
    color = communicator.rank % 2
    group = communicator.split(color)
    assert group.nodes == tuple(range(group.size)) if "node" in communicator.transport else (0,) * group.size
    ours, all_ranks = np.zeros(3000), np.zeros(3000)
    of_group = group.reduction(ours, method=method)
    of_all = communicator.reduction(all_ranks, method=method)
    for _ in range(3):
        ours[:], all_ranks[:] = communicator.rank + 1, communicator.rank + 1
        of_all.start()
        of_group.start()
        of_group.finish()
        of_all.finish()
        own = shards(3000, group.size, 8)[group.rank] if method == "reduce_scatter" else slice(None)
        assert (ours[own] == sum(rank + 1 for rank in group.ranks)).all()
        own = shards(3000, communicator.size, 8)[communicator.rank] if method == "reduce_scatter" else slice(None)
        assert (all_ranks[own] == sum(range(communicator.size + 1))).all()


@sharing
def test_other_sums_and_channels_go_on_beside_sums_by_nodes(communicator):
    far = communicator.reduction(np.zeros(100_000), method="accumulate")
    near = communicator.reduction(np.zeros(100_000))
    small = communicator.reduction(np.zeros(3))
    for step in range(3):
        for reduction in (far, near, small):
            reduction.buffer[:] = communicator.rank + step
        far.start()
        near.start()
        small.run()
        near.finish()
        far.finish()
        for reduction in (far, near, small):
            assert (reduction.buffer == sum(range(communicator.size)) + step * communicator.size).all()


@transports
def test_what_is_counted(communicator):
    """Each sum counts one contribution under every transport; between nodes, only those of first ranks count."""
    size, rank, nodes = communicator.size, communicator.rank, communicator.nodes
    own = shards(1001, size, 4)[rank]
    messages = communicator.transport == "mpi"
    methods = [name for name, method in METHODS.items() if not (method.by_nodes and messages)]
    rounded = [("ordered", BFloat16(), "rounded in order"), ("allreduce", BFloat16(), "rounded")]
    for method, codec, kind in [*((name, UNCHANGED, name) for name in methods), *rounded]:
        reduction = communicator.reduction(np.zeros(1001, np.float32), method=method, codec=codec, kind=kind)
        reduction.run()
        reduction.start()
        reduction.finish()
    expected = {}
    if size > 1:
        expected = dict.fromkeys(("allreduce", "ordered", "reduce_scatter"), (2, 8008))
        expected |= dict.fromkeys(("rounded", "rounded in order"), (2, 4004))
        expected["all_gather"] = (2, 2 * 4 * (own.stop - own.start))
    if len(set(nodes)) > 1 and nodes.index(nodes[rank]) == rank:
        expected |= dict.fromkeys(set(methods) & {"hierarchical", "accumulate"}, (2, 8008))
    if nodes.count(nodes[rank]) > 1 and not messages:
        expected["node"] = (4, 16_016)
    assert {kind: (t.messages, t.bytes) for kind, t in communicator.counters.snapshot().items()} == expected


@transports
def test_nothing_and_one_element(communicator):
    """Sums of no or one element work; closing an active sum finishes it, and empty sums count no traffic."""
    for method, codec in [*((name, UNCHANGED) for name in METHODS), ("allreduce", BFloat16())]:
        if METHODS[method].by_nodes and communicator.transport == "mpi":
            continue
        for shape in ((0, 3), (1,), (100_000,)):
            communicator.counters.reset()
            reduction = communicator.reduction(np.ones(shape, np.float32), method=method, codec=codec)
            reduction.run()
            assert shape[0] or communicator.counters.snapshot() == {}
            reduction.buffer.fill(1)
            reduction.start()
            reduction.close()
            reduction.close()
            if METHODS[method].adds and METHODS[method].gathers:
                assert (reduction.buffer == communicator.size).all()


@pytest.mark.parametrize("communicator", ["auto"], indirect=True)
def test_unknown_methods_are_refused(communicator):
    with pytest.raises(CommError, match=r"method: expected one of allreduce, .*, got 'tree'"):
        communicator.reduction(np.zeros(3), method="tree")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("method", ["hierarchical", "accumulate"])
@pytest.mark.parametrize("communicator", ["mpi"], indirect=True)
def test_messages_alone_share_no_memory(communicator, method):
    with pytest.raises(CommError, match=r"reduction bucket: expected a transport by which .*, got 'mpi'; choose"):
        communicator.reduction(np.zeros(3), method=method, name="bucket")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("communicator", ["auto", f"{FAST},node=2"], indirect=True)
def test_the_thread_brings_the_sum_back_while_the_main_thread_computes(communicator):
    reduction = communicator.reduction(np.ones(100_000, np.float32), method="accumulate")
    for _ in range(3):
        reduction.buffer.fill(1)
        communicator.barrier()
        reduction.start()
        wait_until(lambda: reduction.buffer[-1] == communicator.size, "the sum in the buffer before it is finished")
        assert (reduction.buffer == communicator.size).all()
        reduction.finish()


@pytest.mark.parametrize(("itemsize", "ranks", "size"), [(4, 3, 1000), (8, 4, 5), (4, 1, 17), (2, 8, 0), (8, 7, 57)])
def test_shards_are_about_equal_and_cover_everything(itemsize, ranks, size):
    parts = shards(size, ranks, itemsize)
    assert parts[0].start == 0 and parts[-1].stop == size
    assert all(a.stop == b.start for a, b in pairwise(parts))
    assert all(part.start * itemsize % 64 == 0 or part.start == size for part in parts)
    lengths = [part.stop - part.start for part in parts]
    assert max(lengths) - min(lengths) <= 2 * 64 // itemsize


@pytest.mark.mpi(min_size=2)
def test_ranks_of_an_emulated_node_have_no_network_between_them(network_clock):
    alpha, beta, count = 0.05, 1e-7, 50_000
    with Communicator(MPI.COMM_WORLD, f"emulated:alpha={alpha},beta={beta},node=2") as network:
        size, rank = network.size, network.rank
        assert network.nodes == tuple(r // 2 for r in range(size))
        assert network.waits_for_network == (size > 2)
        left, right = (rank - 1) % size, (rank + 1) % size
        exchange = network.channel({right: count}, {left: count}, np.float32)
        travel = alpha + beta * 4 * count if left // 2 != rank // 2 else 0.0
        for step in range(3):
            network_clock.seconds = begin = 10.0 * step
            exchange.start()
            exchange.finish()
            exchange.release()
            assert travel <= network_clock.seconds - begin < travel + 1e-4


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("method", ["allreduce", "reduce_scatter", "all_gather", "hierarchical", "accumulate"])
def test_how_long_a_collective_takes_on_an_emulated_network(method, network_clock):
    """On an emulated network a sum takes the time of the faster algorithm over its ranks, hierarchical ones over nodes,
    and half a sum half the time of a ring."""
    alpha, beta, count, clock = 0.02, 1e-7, 50_000, network_clock
    by_nodes = method in ("hierarchical", "accumulate")
    if by_nodes:
        clock.tick = 0.0  # the thread that polls for the totals of other nodes must not advance it
    with Communicator(MPI.COMM_WORLD, f"emulated:alpha={alpha},beta={beta},node=2") as network:
        ranks = len(set(network.nodes)) if by_nodes else network.size
        ring = 2 * (ranks - 1) * alpha + 2 * (ranks - 1) / ranks * beta * 8 * count
        doubling = {2: 1, 3: 3, 4: 2}[ranks] * (alpha + beta * 8 * count)
        expected = min(ring, doubling) if by_nodes or method == "allreduce" else ring / 2
        total, late = network.reduction(np.ones(count), method=method), 0.05
        ends = []
        network.instruments.recorder = SpanEnds(ends)
        for step in range(3):
            begin = 10.0 * step
            clock.seconds = begin + late * (network.rank == 0)
            total.start()
            if by_nodes:
                wait_until(lambda step=step: all_sent(network, total, step), "all nodes' totals to be sent")
                assert not total.summed, "the network takes its time"
                network.barrier()
                clock.seconds = begin + 1.0
            total.finish()
            assert by_nodes or clock.seconds - begin == pytest.approx(late + expected, abs=1e-4)
            assert ends.pop() - begin == pytest.approx(late + expected, abs=1e-4)
            network.barrier()


def all_sent(network, total, step):
    """Return whether the first ranks of all nodes have sent their totals (the third of four signals of a run)."""
    flags = total._plan.arrival.flags
    heads = {network.nodes.index(node) for node in network.nodes}
    sent = 4 * step + 3
    return flags.reached(sent, flags.others(heads)) and (network.rank not in heads or flags.count >= sent)


class SpanEnds:
    """Recorder of the times at which messages and sums end."""

    def __init__(self, ends):
        self.ends = ends

    def span(self, name, category, t0, t1):
        if category == "communication":
            self.ends.append(t1)
