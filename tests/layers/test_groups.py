"""Groups of ranks by color: made once, the communicator itself where all are of one color."""

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.layers.groups import group_of


@pytest.fixture
def ranks():
    with Communicator(MPI.COMM_WORLD) as comm:
        yield comm


@pytest.mark.mpi
def test_one_color_is_the_communicator_itself(ranks):
    assert group_of(ranks, [7] * ranks.size) is ranks
    assert group_of(ranks, [None] * ranks.size) is None


@pytest.mark.many_ranks
def test_ranks_of_one_color_add_up(ranks):
    colors = [rank % 2 if rank < 5 else None for rank in range(ranks.size)]
    group = group_of(ranks, colors)
    if colors[ranks.rank] is None:
        assert group is None
    else:
        members = [r for r, c in enumerate(colors) if c == colors[ranks.rank]]
        assert (group.size, group.rank) == (len(members), members.index(ranks.rank))
        assert group.allreduce_scalar(float(ranks.rank)) == sum(members)


@pytest.mark.mpi(min_size=2)
def test_made_once_per_coloring_and_communicator(ranks):
    colors = [0] + [1] * (ranks.size - 1)
    group = group_of(ranks, colors)
    assert group_of(ranks, tuple(colors)) is group
    assert group_of(ranks, [None] + [1] * (ranks.size - 1)) is not group
    with Communicator(MPI.COMM_WORLD) as other:
        assert group_of(other, colors) is not group


@pytest.mark.mpi(min_size=2)
def test_closed_with_the_communicator():
    with Communicator(MPI.COMM_WORLD) as comm:
        group = group_of(comm, [0] + [1] * (comm.size - 1))
        assert not group.closed
    assert group.closed
