"""Tests of groups of ranks by color: each is created once; a group of all ranks is the communicator itself."""

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.comm.errors import is_agreed
from halograd.dtensor import Groups, group_of, in_group


@pytest.fixture
def ranks(comm):
    """Return a `Communicator` of all ranks of the test."""
    with Communicator(comm) as made:
        yield made


def alternating(size):
    """Return two groups of even and odd ranks, sometimes with one rank left over."""
    return Groups.agreeing((max(1, size // 2), min(2, size)), (1,), size)


@pytest.mark.mpi
def test_a_group_of_all_is_the_communicator_itself(ranks):
    assert group_of(ranks, Groups.agreeing((1, ranks.size), (0,), ranks.size)) is ranks


@pytest.mark.many_ranks
def test_ranks_of_one_group_add_up(ranks):
    groups = alternating(ranks.size)
    group, color = group_of(ranks, groups), groups.color(ranks.rank)
    if color is None:
        assert group is None
    else:
        members = list(groups.members(color))
        assert (group.size, group.rank) == (len(members), members.index(ranks.rank))
        assert group.allreduce_scalar(float(ranks.rank)) == sum(members)


@pytest.mark.mpi(min_size=2)
def test_made_once_per_grouping_and_communicator(ranks):
    alone = Groups.agreeing((ranks.size,), (0,), ranks.size)
    group = group_of(ranks, alone)
    assert group_of(ranks, Groups.agreeing((1, ranks.size, 1), (0, 1), ranks.size)) is group
    assert group_of(ranks, Groups.agreeing((ranks.size - 1,), (0,), ranks.size)) is not group
    with Communicator(MPI.COMM_WORLD) as other:
        assert group_of(other, alone) is not group


@pytest.mark.mpi(min_size=2)
def test_closed_with_the_communicator():
    with Communicator(MPI.COMM_WORLD) as comm:
        group = group_of(comm, Groups.agreeing((comm.size,), (0,), comm.size))
        assert not group.closed
    assert group.closed


@pytest.mark.many_ranks
def test_what_groups_make(ranks):
    groups = alternating(ranks.size)
    made = in_group(ranks, groups, lambda group: group.size)
    assert made == (None if groups.color(ranks.rank) is None else groups.members_each)


@pytest.mark.many_ranks
def test_a_fault_within_a_group_is_raised_on_all(ranks):
    """An error within one group is raised on all ranks, including those of other groups and of none."""
    groups = alternating(ranks.size)
    last = groups.placed - 1

    def make(group):
        if ranks.rank == last:
            raise ValueError("no room")
        return group.split(0)  # begins with an agreement, where the others of the group meet the fault

    where = f"rank {last}: " if ranks.size > 1 else ""
    with pytest.raises(ValueError, match=f"^{where}no room$") as caught:
        in_group(ranks, groups, make)
    assert ranks.size == 1 or is_agreed(caught.value, ranks.size)
    assert in_group(ranks, groups, lambda group: 7) == (None if groups.color(ranks.rank) is None else 7)
