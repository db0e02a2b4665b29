"""Tests of `on_rank_0`: result, skip and failure of rank 0's work are those of all ranks."""

import pytest

from tests.support.on_rank_0 import on_rank_0


@pytest.mark.ranks(1, 3)
def test_all_ranks_have_what_rank_0_returns(comm):
    assert on_rank_0(comm, lambda: (comm.rank, "moon")) == (0, "moon")


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("skips", [True, False])
def test_all_ranks_end_as_rank_0_does(comm, skips):
    def work():
        assert comm.rank == 0
        pytest.skip("needs a moon") if skips else 1 / 0

    expected = pytest.skip.Exception if skips else ZeroDivisionError if comm.rank == 0 else AssertionError
    with pytest.raises(expected, match="needs a moon" if skips else "division"):
        on_rank_0(comm, work)
