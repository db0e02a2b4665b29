"""Tests that layers lowered one by one have the same costs as in the program of the network."""

from __future__ import annotations

import pytest

from halograd.layers import Add, Conv, Input, Layer, MeanSquaredError, Network
from halograd.lowering.context import Lowered
from halograd.perfmodel.cost import LayerCost, NetworkModel, Pricing, price_layer
from halograd.perfmodel.cost.steps import price_steps
from halograd.perfmodel.cuts import BASELINES, baseline
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.program.compiler import compile_program, outline
from halograd.program.program import Target
from tests.layers.cuts import random_strategy
from tests.layers.graphs import Gate, Graphs
from tests.perfmodel.counted import BATCH, strategies
from tests.perfmodel.counted import CASES as OTHERS

SIZE = 4
#: Machines, and whether the cheaper halo algorithm is taken. Ranks share the memory of the second.
PRICED = {
    "plan": (Machine.load("lassen"), True),
    "run": (Machine.load("cori-haswell"), False),
    "emulated": (Machine.load("lassen").emulated(1e-3, 1e-9), False),
}


class Late(Layer):
    """Layer that reads its own block forward, and a halo only in the backward pass."""

    def input_boxes(self, box, *shapes):
        return (box,)

    def lower(self, context):
        forward = context.kernel(as_it_is, x=context.inputs[0].view, y=context.y)
        context.run(forward, timing=context.timing("forward"))

        def backward():
            layout = context.inputs[0].layout
            needed = Conv(1, 3, padding=1).needed_blocks(0, [layout], context.output.layout)
            context.gather(0, needed.clipped(layout.shape)).run()
            context.run(context.kernel(as_it_is, x=context.dy, y=context.gradient(0)))

        return Lowered(backward)


class Reaching(Gate):
    """Custom layer with a function as a setting: the width of its window."""

    def __init__(self, far):
        Layer.__init__(self)
        self.far = far

    reach = property(lambda self: self.far())


def as_it_is(environment, x, y):
    """Kernel whose cost is computed, but that is never executed."""
    raise NotImplementedError


def alike():
    """Return a network of layers with equal settings, some of which are frozen, shared, or read twice."""
    x = Input((12, 12, 4), name="x")
    twice = Conv(4, 3, padding=1, name="twice")
    y = Conv(4, 3, padding=1, name="frozen first")(x)
    y = Add(name="side by side")(
        Conv(4, 3, padding=1, name="behind")(y), Conv(4, 3, padding=1, name="first")(Input((12, 12, 4), name="other"))
    )
    y = Conv(4, 3, padding=1, name="frozen between")(y)
    y = twice(twice(y))
    y = Add(name="two")(Late(name="late")(y), Conv(4, 3, padding=1, name="with a halo")(y))
    y = Add(name="one")(y, y)
    for reach in (1, 3):
        y = Reaching(lambda reach=reach: reach)(y, y)
    y = Add(name="again")(y, Conv(4, 3, padding=1, name="last")(y))
    loss = MeanSquaredError(name="loss")(y, Input(y.shape, name="target"))
    return Network({"aside": Conv(4, 3, padding=1, name="aside")(y), "loss": loss}, frozen=("frozen *",))


CASES = {**OTHERS, "alike": alike}


def of_program(program, pricing):
    """Return the costs of a program's layers, from the operations of the whole program."""
    forward, backward = (
        [operation for segment in segments for operation in segment.operations]
        for segments in (program.forward, program.backward)
    )
    found = {}
    for step in program.steps:
        own = [[operation for operation in some if operation.layer == step.name] for some in (forward, backward)]
        found[step.name] = price_layer(step, *own, pricing)
        for added in (operation for operation in backward if operation.layer == f"{step.name} (sum)"):
            seconds = pricing.times.time(Add(), added.timing.inputs, pricing.dtype, False).forward
            assert len(added.timing.inputs) == len(added.kernel.views) - 1 > 1
            assert set(added.timing.inputs) == {step.output.layout.boxes.longest}
            found[added.layer] = LayerCost(0.0, seconds, {"sum": seconds})
    return found


def differences(network, strategy, pricing, rank):
    """Return the names of layers whose cost or gathered boxes differ from those in the program."""
    target = Target(BATCH, SIZE, rank, overlaps=pricing.overlaps)
    made = outline(network, strategy, target)
    priced = price_steps(network, made, pricing)
    program = compile_program(network, strategy, target)
    want = of_program(program, pricing)
    assert set(priced.costs) == set(want)
    order = [segment.name for segment in priced.backward if segment.name in {s.name for s in program.backward}]
    assert order == [s.name for s in program.backward if not s.name.endswith("(moved)")]
    values = zip((*made.inputs.values(), *(s.output for s in made.steps)), _values(program), strict=True)
    others = [value.name for value, other in values if set(priced.gathered.get(value, ())) != set(other.gathered)]
    return [name for name in want if priced.costs[name] != want[name]] + others


def _values(program):
    return (*program.inputs.values(), *(step.output for step in program.steps))


@pytest.mark.parametrize("on", PRICED)
@pytest.mark.parametrize("case", CASES)
def test_costs_are_those_of_the_program(case, on):
    """Costs of layers equal those in the program for every strategy and rank, and are cached between them."""
    machine, best_halo = PRICED[on]
    network, pricing = CASES[case](), Pricing(NetworkModel(machine), RooflineTimes(machine), best_halo=best_halo)
    tried = [*strategies(network, SIZE), *(baseline(name, network, BATCH, SIZE) for name in BASELINES)]
    for strategy in tried:
        for rank in (0, SIZE - 1):
            assert not differences(network, strategy, pricing, rank), (strategy, rank)
    assert len(pricing.known) < 2 * len(tried) * len(network.layers), "nothing was remembered"


@pytest.mark.parametrize("seed", range(8))
def test_costs_are_those_of_the_program_of_random_graphs(seed):
    drawn, pricing = (
        Graphs(seed),
        Pricing(NetworkModel(PRICED["plan"][0]), RooflineTimes(PRICED["plan"][0]), best_halo=True),
    )
    network = drawn.network()
    for strategy in [drawn.strategy(network, SIZE) for _ in range(3)] + [random_strategy(network, SIZE, seed)]:
        assert not differences(network, strategy, pricing, seed % SIZE), strategy
