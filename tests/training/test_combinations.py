"""Tests of random combinations of features under random cuts against one process."""

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.layers.strategy import Strategy
from tests.training.combinations import Case, differences, trained

#: The oracle of batches in parts, averages, factors, schemes and weights of losses under other cuts.
CASES = 18


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("seed", range(CASES))
def test_as_one_process(seed):
    case = Case(seed)
    with Communicator(MPI.COMM_SELF) as alone:
        want = trained(case, alone, Strategy())
    with Communicator(MPI.COMM_WORLD) as comm:
        wrong = differences(trained(case, comm, case.strategy(comm.size)), want)
        comm.agree(AssertionError(f"{case}: {', '.join(wrong)}") if wrong else None)
