"""Groups of ranks by color: made once, the communicator itself where all are of one color."""

import doctest

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.comm.errors import is_agreed
from halograd.layers import sample_group
from halograd.layers.groups import group_of, in_group


@pytest.fixture
def ranks():
    with Communicator(MPI.COMM_WORLD) as comm:
        yield comm


def test_examples():
    assert doctest.testmod(sample_group).failed == 0


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


@pytest.mark.many_ranks
def test_what_groups_make(ranks):
    colors = [rank % 2 if rank < 5 else None for rank in range(ranks.size)]
    made = in_group(ranks, colors, lambda group: group.size)
    assert made == (None if colors[ranks.rank] is None else colors.count(colors[ranks.rank]))


@pytest.mark.many_ranks
def test_a_fault_within_a_group_is_raised_on_all(ranks):
    """On the ranks of other groups, and of none, too."""
    colors = [rank % 2 if rank < 5 else None for rank in range(ranks.size)]
    last = max(rank for rank, color in enumerate(colors) if color is not None)

    def make(group):
        if ranks.rank == last:
            raise ValueError("no room")
        return group.split(0)  # begins with an agreement, where the others of the group meet the fault

    where = f"rank {last}: " if ranks.size > 1 else ""
    with pytest.raises(ValueError, match=f"^{where}no room$") as caught:
        in_group(ranks, colors, make)
    assert ranks.size == 1 or is_agreed(caught.value, ranks.size)
    assert in_group(ranks, colors, lambda group: 7) == (None if colors[ranks.rank] is None else 7)
