"""Tests of predicted messages, bytes and memory against those of training steps, rank by rank."""

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers.strategy import parameter_blocks
from halograd.perfmodel.cost import count_program, count_step, memory_of, program_of
from halograd.program.program import Target
from halograd.training.executor import Executor
from tests.layers.norms import step
from tests.perfmodel.counted import BATCH, CASES, differing, differing_layers, strategies
from tests.training.steps import fill


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("name", CASES)
def test_messages_bytes_and_memory(name):
    """Predicted messages, bytes and memory are exact for every strategy, except for workspaces of kernels."""
    with Communicator(MPI.COMM_WORLD, "mpi") as comm:
        network = CASES[name]()
        faults = []
        for strategy in strategies(network, comm.size):
            with Executor(CASES[name](), comm, get_backend("numpy"), BATCH, strategy) as executor:
                fill(executor, 0)
                step(executor)
                comm.counters.reset()
                step(executor)
                counted = comm.counters.snapshot()
                faults += differing(counted, count_step(network, strategy, BATCH), comm.rank)
                held = {k: v for k, v in executor.predicted_bytes.items() if k != "kernel workspace"}
            target = Target(BATCH, comm.size, comm.rank, overlaps=comm.waits_for_network)
            program = program_of(network, strategy, target)
            blocks = parameter_blocks(network, strategy, comm.size)
            faults += differing_layers(counted, count_program(program), comm.rank)
            want = memory_of(program, blocks, workspace=0)
            if {k: v for k, v in want.items() if v} != {k: v for k, v in held.items() if v}:
                faults.append(f"memory: predicted {want}, found {held} under {strategy}")
        comm.agree(AssertionError(f"rank {comm.rank}: " + "; ".join(faults[:4])) if faults else None)
