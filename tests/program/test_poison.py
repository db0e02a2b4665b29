"""Tests that an executor with `debug` and `check_layer` find wrong declarations of reads and writes."""

import re

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.kernels import get_backend, reads, writes
from halograd.layers.strategy import Strategy
from halograd.lowering.context import Lowered
from halograd.program.compiler import compile_program
from halograd.program.poison import AccessError
from halograd.program.program import Target
from halograd.testing import check_layer, random_array
from halograd.training.executor import Executor
from tests.training.steps import fill


class Cube(hg.Layer):
    """Layer ``y = x ** 3``, whose backward pass reads x."""

    def forward(self, inputs, params, box):
        return inputs[0] ** 3

    def backward(self, dy, inputs, params, box):
        return [3 * inputs[0] ** 2 * dy], {}


class Declared(Cube):
    @reads("x0")
    def backward(self, dy, inputs, params, box):
        return super().backward(dy, inputs, params, box)


class Forgotten(Cube):
    @reads()
    def backward(self, dy, inputs, params, box):
        return super().backward(dy, inputs, params, box)


class Negative(hg.Layer):
    """Layer ``y = -x``, whose backward pass does not read x."""

    def forward(self, inputs, params, box):
        return -inputs[0]

    def backward(self, dy, inputs, params, box):
        return [-dy], {}


class Frugal(Negative):
    @reads()
    def backward(self, dy, inputs, params, box):
        return super().backward(dy, inputs, params, box)


class Scaled(hg.Layer):
    """Layer ``y = x`` with its own kernel and a work array."""

    inputs_taken = 1

    def __init__(self, kernel, name=None):
        super().__init__(name)
        self.made = kernel

    def lower(self, context):
        work = context.scratch(context.box.shape)
        kernel = context.kernel(self.made, x=context.inputs[0].view, y=context.y, work=work)
        context.run(kernel, "first")
        context.run(kernel, "second")
        return Lowered(lambda: context.copy((context.dy, context.gradient(0))))


class Right:
    def __init__(self, environment, x, y, work):
        self.x, self.y, self.work = x, y, work

    @reads("x")
    @writes("work")
    def first(self):
        np.multiply(self.x, 1, out=self.work)

    @reads("work")
    @writes("y")
    def second(self):
        np.copyto(self.y, self.work)


class ReadsMore(Right):
    @reads()
    @writes("y")
    def second(self):
        np.copyto(self.y, self.work)


class WritesMore(Right):
    @reads("x")
    @writes()
    def first(self):
        np.multiply(self.x, 1, out=self.work)


class WritesWhatItReads(Right):
    @reads("work")
    @writes("y")
    def second(self):
        np.copyto(self.y, self.work)
        self.work.fill(0)


class AddsUp(Right):
    """Layer that wrongly reads the previous contents of y."""

    @reads("work")
    @writes("y", "work")
    def second(self):
        np.add(self.y, self.work, out=self.work)
        np.copyto(self.y, self.work)


class Silent(Right):
    """Layer without a declaration, so that every array is used."""

    def first(self):
        super().first()

    def second(self):
        super().second()


def step(make, debug=True):
    """Train one step of a small network with a layer from `make`, on all ranks. Collective."""
    x, target = hg.Input((6, 5, 2), "x"), hg.Input((6, 5, 2), "target")
    y = hg.Conv(2, 3, padding=1, name="behind")(make(hg.Conv(2, 3, padding=1, name="before")(x)))
    network = hg.Network({"loss": hg.MeanSquaredError(name="loss")(y, target)})
    with Communicator(MPI.COMM_WORLD) as comm, get_backend("numpy") as kernels:
        strategy = Strategy({"height": comm.size})
        with Executor(network, comm, kernels, 2, strategy, "float64", debug=debug) as executor:
            for name, node in network.inputs.items():
                executor.set_input(name, random_array((2, *node.shape), name))
            for _ in range(2):
                executor.forward()
                loss = executor.loss_value()
                executor.backward()
                executor.reducer.finish()
    return loss


WRONG = {
    "reads what it does not declare": (ReadsMore, "ReadsMore.second: makes 'y' from 'work', which it does not declare"),
    "writes what it does not declare": (WritesMore, "WritesMore.first: writes 'work', which it does not declare"),
    "writes what it reads": (WritesWhatItReads, "WritesWhatItReads.second: writes 'work', which it declares to read"),
    "reads what it writes": (AddsUp, "AddsUp.second: makes 'work' from 'y', which it declares to write only"),
}


@pytest.mark.mpi
@pytest.mark.parametrize("fault", WRONG)
def test_a_wrong_declaration_of_a_kernel_is_found(fault):
    kernel, message = WRONG[fault]
    with pytest.raises(AccessError, match=re.escape(f"layer 'wrong', {message}")):
        step(lambda x: Scaled(kernel, name="wrong")(x))
    with pytest.raises(AccessError, match=re.escape(message)):
        check_layer(lambda: Scaled(kernel), (6, 5, 2), gradient=False)


@pytest.mark.mpi
@pytest.mark.parametrize("kernel", [Right, Silent])
def test_a_right_one_changes_nothing(kernel):
    check_layer(lambda: Scaled(kernel), (6, 5, 2))
    assert step(lambda x: Scaled(kernel)(x)) == step(lambda x: Scaled(kernel)(x), debug=False)


@pytest.mark.mpi
def test_a_layer_that_reads_an_input_that_it_does_not_declare():
    with pytest.raises(AccessError, match=re.escape("makes 'dx0' from 'x0', which it does not declare")):
        check_layer(Forgotten, (6, 5, 2))
    with pytest.raises(AccessError, match=r"layer 'cube', local_kernel\.backward: .*'x0'"):
        step(lambda x: Forgotten(name="cube")(x))
    for right in (Cube, Declared):
        check_layer(right, (6, 5, 2))


@pytest.mark.mpi
def test_inputs_that_backward_does_not_read_take_no_memory():
    check_layer(Frugal, (6, 5, 2))

    def stored(kind):
        y = hg.Conv(8, 3, padding=1)(hg.Input((64, 64, 8), "x"))
        for _ in range(6):
            y = kind()(y)
        network = hg.Network({"loss": hg.MeanSquaredError()(y, hg.Input((64, 64, 8), "target"))})
        return compile_program(network, Strategy({}), Target(1)).placement.size / (64 * 64 * 8 * 4)

    assert stored(Negative) - stored(Frugal) > 3


@pytest.mark.ranks(1)
def test_one_array_under_two_names_is_no_fault():
    x, target = hg.Input((6, 6, 2), name="x"), hg.Input((6, 6, 2), name="target")
    y = hg.Conv(2, 1)(x)
    network = hg.Network({"loss": hg.MeanSquaredError()(hg.BatchNorm(activation="relu")(y, y), target)})
    with Communicator(MPI.COMM_WORLD) as comm, Executor(network, comm, get_backend("numpy"), 2, debug=True) as executor:
        fill(executor, 0)
        executor.forward()
        executor.backward()
