"""Tests of the sum of a rank's memory: plans and runs count the same uses, workspaces of kernels among them."""

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import get_backend
from halograd.layers import Conv, Input, MeanSquaredError, Network
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.perfmodel.cost import NetworkModel, Pricing, Training, memory_of, program_of, simulate
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.program.program import Target
from halograd.training import build, train
from halograd.training.executor import Executor
from tests.training.steps import NETWORKS


def test_plans_count_what_runs_count():
    network, strategy, machine = NETWORKS["mesh"](), Strategy(), Machine.load("lassen")
    pricing = Pricing(NetworkModel(machine), RooflineTimes(machine))
    plan = simulate(network, strategy, 4, pricing, Training(slots=2, ahead=3), 1).memory
    blocks = parameter_blocks(network, strategy, 1)
    program = program_of(network, strategy, Target(4, 1), blocks)
    assert plan == memory_of(program, blocks, 2, ahead=3)
    assert plan["batches read ahead"] == 3 * plan["input"] > 0
    assert plan["kernel workspace"] > 0
    assert plan["optimizer state"] == 2 * plan["parameter gradient"]
    made = memory_of(program, blocks, 2, ahead=3, workspace=12345)
    assert made == {**plan, "kernel workspace": 12345}


@pytest.mark.parametrize("extents", [(24, 24), (16, 16, 16)], ids=str)
def test_the_estimate_is_close_to_what_kernels_reserve(extents):
    """Convolutions of oneDNN: exact for AVX2, where 3-D ones copy their input; elsewhere these are at most so large."""
    backend = get_backend("onednn")
    x, target = Input((*extents, 64), "x"), Input((*extents, 32), "target")
    network = Network({"loss": MeanSquaredError()(Conv(32, 3, padding=1)(Conv(64, 3, padding=1)(x)), target)})
    with backend, Communicator(MPI.COMM_SELF) as comm, Executor(network, comm, backend, 1, Strategy()):
        held = backend.held_bytes
        blocks = parameter_blocks(network, Strategy(), 1)
        estimate = memory_of(program_of(network, Strategy(), Target(1, 1), blocks), blocks)["kernel workspace"]
        assert held < 1.2 * estimate
        if backend.instruction_set == "AVX2":
            assert held > 0.8 * estimate


@pytest.mark.ranks(1, 2)
def test_workspaces_of_kernels_count_for_the_limit(config, shared, monkeypatch):
    """A run whose arrays fit only without the workspaces of its kernels is refused when the kernels are made."""
    found, by_node = [], build._memory_by_node

    def record(*args):
        nodes = by_node(*args)
        found.append(sum(sum(needs.values()) for _, mine in nodes for needs in mine))
        return nodes

    monkeypatch.setattr(build, "_memory_by_node", record)
    train(config, [f"output.directory={shared / 'fits'}"], comm=MPI.COMM_WORLD)
    before, made = found[:2]
    assert before < made
    monkeypatch.setattr(build, "memory_size", lambda ranks: made - 1)
    with pytest.raises(UserError, match="a network and a batch within"):
        train(config, [f"output.directory={shared / 'not'}"], comm=MPI.COMM_WORLD)
