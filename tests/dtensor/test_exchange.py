"""Tests of exchanges and distributed tensors under MPI: equality, round trips, adjoints in float64."""

import math

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.dtensor import Blocks, DistTensor, End, Exchange, Halo, Layout
from halograd.testing import grids, random_array

pytestmark = pytest.mark.mpi(min_size=1)
AXES = ("sample", "height", "width")
SHAPE = (3, 7, 5, 2)


@pytest.fixture(params=["mpi", "shared"])
def comm(request):
    with Communicator(MPI.COMM_WORLD, request.param) as c:
        yield c


def layouts(size):
    found = [Layout.blocks(SHAPE, parts, size) for parts in grids(size, AXES)]
    found += [Layout.on_rank(SHAPE, size - 1, size), Layout.blocks(SHAPE, {"height": max(1, size - 1)}, size)]
    return found


def whole(name="a"):
    return random_array(SHAPE, name)


def filled(comm, layout, margin=None, name="a"):
    tensor = DistTensor(comm, layout, "float64", margin)
    tensor.owned[...] = whole(name)[tensor.box.slices()]
    return tensor


def test_redistribution_between_any_two_layouts_and_back(comm):
    for a in layouts(comm.size):
        for b in layouts(comm.size):
            tensor = filled(comm, a).redistribute(b)
            assert np.array_equal(tensor.owned, whole()[tensor.box.slices()])


def test_replicas_and_pending_sums(comm):
    blocks = Layout.blocks(SHAPE, {"height": comm.size}, comm.size)
    replicated = filled(comm, blocks).redistribute(Layout.replicated(SHAPE, comm.size))
    assert np.array_equal(replicated.local, whole())
    summands = DistTensor(comm, Layout.replicated(SHAPE, comm.size).summed(), "float64")
    summands.local[...] = whole() * (comm.rank + 1)
    total = summands.redistribute(blocks)
    assert np.allclose(total.owned, whole()[total.box.slices()] * comm.size * (comm.size + 1) / 2, rtol=1e-14)


@pytest.mark.parametrize("in_place", [False, True])
def test_replicas_of_a_sum_have_equal_bits(comm, in_place):
    """Every rank adds the summands of all ranks, its own one among them, in the order of the ranks."""
    blocks = Layout.replicated(SHAPE, comm.size).boxes
    summands = np.random.default_rng(1).standard_normal((comm.size, *SHAPE)).astype("float32")
    source = summands[comm.rank].copy()
    target = source if in_place else np.full(SHAPE, np.nan, "float32")
    exchange = Exchange(comm, End(blocks, source), End(blocks, target), combine="sum")
    for _ in range(3):  # both slots of the channel, and again
        source[...] = summands[comm.rank]
        exchange.run()
        expected = np.zeros(SHAPE, "float32")
        for summand in summands:
            expected += summand
        assert np.array_equal(target, expected)
    exchange.close()


def test_gather_and_scatter(comm):
    for layout in layouts(comm.size):
        root = comm.size - 1
        given = whole() if comm.rank == root else None
        tensor = DistTensor.scatter(comm, given, layout, root=root, dtype="float64")
        assert np.array_equal(tensor.owned, whole()[tensor.box.slices()])
        back = tensor.gather(root)
        assert (back is None) == (comm.rank != root)
        assert back is None or np.array_equal(back, whole())


@pytest.mark.parametrize("widths", [(1, 1), (2, 0), (0, 3), (9, 4)])
def test_halo_with_corners_and_wider_than_a_block(comm, widths):
    for layout in layouts(comm.size):
        tensor = filled(comm, layout, ((0, 0), widths, widths[::-1], (0, 0)))
        halo = Halo(tensor)
        for step in range(3):  # both slots of the channel, and again
            tensor.owned[...] = (step + 1) * whole()[tensor.box.slices()]
            halo.start()
            halo.finish()
            held = tensor.held[comm.rank]
            assert np.array_equal(tensor.local, (step + 1) * whole()[held.slices()])
        halo.close()


def dot(comm, a, b):
    return comm.allreduce_scalar(float(np.sum(a * b)))


def test_halo_and_its_adjoint(comm):
    """The halo exchange F satisfies <F x, y> = <x, F* y>, with x on owned boxes and y on boxes with margins."""
    for layout in layouts(comm.size):
        margin = ((0, 0), (1, 2), (2, 1), (0, 0))
        x = filled(comm, layout, margin)
        halo = Halo(x)
        halo.run()
        y = DistTensor(comm, layout, "float64", margin)
        y.local[...] = np.random.default_rng(comm.rank).standard_normal(y.local.shape)
        left = dot(comm, x.local, y.local)
        back = Halo(y)
        back.add_back()
        right = dot(comm, x.owned, y.owned)
        assert math.isclose(left, right, rel_tol=1e-12, abs_tol=1e-12)
        halo.close()
        back.close()


def test_redistribution_and_its_adjoint(comm):
    for a in layouts(comm.size):
        for b in layouts(comm.size):
            x, y = filled(comm, a), filled(comm, b, name="b")
            left = dot(comm, x.redistribute(b).owned, y.owned)
            right = dot(comm, x.owned, y.redistribute(a).owned)
            assert math.isclose(left, right, rel_tol=1e-12, abs_tol=1e-12)


def test_one_message_per_neighbor_and_no_more_bytes_than_needed(comm):
    layout = Layout.blocks((1, 4 * comm.size, 6, 3), {"height": comm.size}, comm.size)
    tensor = DistTensor(comm, layout, "float32", ((0, 0), (1, 1), (0, 0), (0, 0)))
    halo = Halo(tensor)
    comm.counters.reset()
    halo.run()
    neighbors = (comm.rank > 0) + (comm.rank < comm.size - 1)
    found = comm.counters["halo"]
    assert (found.messages, found.bytes) == (neighbors, neighbors * 6 * 3 * 4)
    halo.close()


def test_bad_calls_are_refused_on_all_ranks(comm):
    layout = Layout.blocks(SHAPE, {"height": comm.size}, comm.size)
    with pytest.raises(ValueError, match=r"expected an array that holds Box.*, got None"):
        Exchange(comm, End(layout.boxes, None), End(layout.boxes, np.zeros(layout.boxes[comm.rank].shape)))
    with pytest.raises(ValueError, match=r"margin: expected one pair"):
        DistTensor(comm, layout, margin=((1, 1),))
    with pytest.raises(ValueError, match="the layout is for"):
        DistTensor(comm, Layout.on_rank(SHAPE, 0, comm.size + 1))
    with pytest.raises(ValueError, match="owns every element once") as _:
        Halo(DistTensor(comm, Layout.replicated(SHAPE, comm.size).summed()))
    with pytest.raises(ValueError, match="expected a tensor of shape"):
        filled(comm, layout).exchange_to(DistTensor(comm, Layout.replicated((2, 2), comm.size)))
    with pytest.raises(Exception, match=r"expected an array of shape \(3, 7, 5, 2\)"):
        DistTensor.scatter(comm, np.zeros((2, 2)), layout)
    with pytest.raises(Exception, match="could not convert string to float"):
        DistTensor.scatter(comm, np.full(SHAPE, "text") if comm.rank == 0 else None, layout)
    boxes = Blocks([((0, 1),) * comm.size])
    with pytest.raises(ValueError, match="'assign' or 'sum'"):
        Exchange(comm, End(boxes, np.zeros(1)), End(boxes, np.zeros(1)), combine="mean")


@pytest.mark.mpi(min_size=2)
def test_an_array_that_does_not_fit_on_one_rank_is_raised_on_all(comm):
    """The others would wait for that rank forever; afterwards the communicator is usable."""
    blocks = Layout.blocks((6, 4), (comm.size, 1), comm.size).boxes
    array = np.zeros(blocks[comm.rank].shape)
    source = End(blocks, array.astype("float32") if comm.rank == comm.size - 1 else array)
    with pytest.raises(ValueError, match="one dtype") as caught:
        Exchange(comm, source, End(blocks, array))
    assert caught.value.agreed == comm.size
    comm.barrier()
