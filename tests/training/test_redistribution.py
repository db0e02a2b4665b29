"""Tests that redistributions overlap with the computation of other branches in both passes, with the same results."""

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers import Add, Conv, Input, MeanSquaredError, Network, Strategy
from halograd.lowering.operations import Run, Transfer
from halograd.program.compiler import compile_program
from halograd.program.program import Target
from halograd.testing import random_array
from halograd.training.executor import Executor

BATCH = 2


def branches() -> Network:
    """Return a network with a left branch of two layers, cut along height, and a right one, cut along width."""
    x, target = Input((8, 8, 2), name="x"), Input((8, 8, 3), name="target")
    stem = Conv(3, 3, padding=1, name="stem")(x)
    left = Conv(3, 3, padding=1, name="left2")(Conv(3, 3, padding=1, name="left1")(stem))
    right = Conv(3, 3, padding=1, name="right")(stem)
    y = Add(name="add")(left, right)
    return Network({"prediction": y, "loss": MeanSquaredError(name="mse")(y, target)})


def build(comm, strategy):
    executor = Executor(branches(), comm, get_backend("numpy"), BATCH, strategy, "float64", seed=1, probed=["x"])
    for name, node in executor.network.inputs.items():
        executor.set_input(name, random_array((BATCH, *node.shape), name))
    return executor


def test_redistributions_travel_behind_other_branches():
    strategy = Strategy({"height": 2}, {"right": {"height": 1, "width": 2}})
    program = compile_program(branches(), strategy, Target(BATCH, 2, 0))
    moved = "stem->width=2"

    def order(segments):
        found = []
        for operation in (o for segment in segments for o in segment.operations):
            if isinstance(operation, Transfer) and operation.exchange.kind == "redistribute":
                found.append(f"{operation.layer} {operation.end}")
            elif isinstance(operation, Run):
                found.append(operation.layer)
        return found

    log = order(program.forward)
    start, end = log.index(f"{moved} start"), log.index(f"{moved} finish")
    assert log.index("stem") < start < log.index("left1") < log.index("left2") < end < log.index("right")
    # Backward: the right branch first, whose gradient travels while the left one computes.
    log = order(program.backward)
    start, end = log.index(f"{moved} start"), log.index(f"{moved} finish")
    assert log.index("right") < start < log.index("left1") < end < log.index("stem")


class Spans:
    def __init__(self):
        self.seen = []

    def span(self, name, category, t0, t1):
        self.seen.append((name, category))


@pytest.mark.ranks(2)
def test_both_parts_of_a_redistribution_are_timed():
    strategy, spans = Strategy({"height": 2}, {"right": {"height": 1, "width": 2}}), Spans()
    with Communicator(MPI.COMM_WORLD) as comm:
        comm.instruments.recorder = spans
        with build(comm, strategy) as executor:
            executor.forward()
            executor.loss_value()
        (moved,) = (step.name for step in executor.program.steps if step.name.startswith("stem->"))
    stem, left = (spans.seen.index((name, "forward")) for name in ("stem", "left1"))
    assert spans.seen.count((moved, "forward")) == 2 and stem < spans.seen.index((moved, "forward")) < left


@pytest.mark.mpi(min_size=1)
@pytest.mark.parametrize("transport", ["auto", "emulated:alpha=1e-4,beta=1e-9"])
def test_the_result_is_that_of_one_process(transport):
    with Communicator(MPI.COMM_SELF) as alone, build(alone, Strategy()) as executor:
        executor.forward()
        loss = executor.loss_value()
        executor.backward()
        executor.reducer.finish()
        expected = executor.gather("x", gradient=True)
    with Communicator(MPI.COMM_WORLD, transport) as comm:
        parts = {"height": comm.size}
        strategy = Strategy(parts, {"right": {"height": 1, "width": comm.size}, "left2": {"height": 1, "sample": 1}})
        with build(comm, strategy) as executor:
            for _ in range(2):  # both slots of the channels
                executor.forward()
                assert executor.loss_value() == pytest.approx(loss, rel=1e-12)
                executor.backward()
                executor.reducer.finish()
            found = executor.gather("x", gradient=True)
            if comm.rank == 0:
                np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-14)
