"""Collectives of set-ups against what every rank can compute alone."""

from __future__ import annotations

import numpy as np
import pytest

from halograd.comm import collectives


def value_of(rank: int) -> dict[str, object]:
    """An object whose size differs from rank to rank."""
    return {"rank": rank, "text": "é" * 1000 * rank, "array": np.arange(rank), "nothing": None}


@pytest.mark.many_ranks
@pytest.mark.parametrize("n", [0, 1, 5])
def test_allgather_has_the_values_of_all_ranks(comm, n):
    found = collectives.allgather(comm, np.arange(n, dtype=np.int64) + 10 * comm.rank)
    expected = np.arange(n) + 10 * np.arange(comm.size)[:, None]
    assert found.shape == (comm.size, n)
    assert np.array_equal(found, expected)


@pytest.mark.many_ranks
def test_alltoall_has_what_each_rank_sends_to_this_one(comm):
    found = collectives.alltoall(comm, 100 * comm.rank + np.arange(comm.size))
    assert np.array_equal(found, 100 * np.arange(comm.size) + comm.rank)


@pytest.mark.many_ranks
def test_objects_of_any_size_come_from_all_ranks(comm):
    found = collectives.allgather_objects(comm, value_of(comm.rank))
    assert [str(one) for one in found] == [str(value_of(rank)) for rank in range(comm.size)]


@pytest.mark.many_ranks
def test_every_rank_may_be_the_root(comm):
    for root in range(comm.size):
        found = collectives.broadcast_object(comm, value_of(root) if comm.rank == root else "unread", root)
        assert str(found) == str(value_of(root))


@pytest.mark.many_ranks
def test_a_barrier_is_behind_what_all_ranks_did_before_it(comm, shared):
    (shared / f"{comm.rank}").touch()
    collectives.barrier(comm)
    assert len(list(shared.iterdir())) == comm.size
    collectives.barrier(comm)  # no rank leaves, and has its folder removed, before all have looked
