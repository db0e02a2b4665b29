"""Tests of declared reads and writes of kernels, and of kernels without declarations."""

from functools import partial

import pytest

import halograd as hg
from halograd.kernels.access import ANY, Access, access_of, makes, reads, writes
from halograd.layers.strategy import Strategy
from halograd.lowering.operations import Run
from halograd.program.compiler import compile_program
from halograd.program.program import Target
from tests.layers.graphs import Graphs


@reads("x", "w")
@writes("y")
def function(environment, x, w, y):
    return lambda: None


class Kernel:
    @writes("sums")
    @reads("x*")
    def statistics(self):
        pass

    def nothing_declared(self):
        pass


class Overridden(Kernel):
    def statistics(self):
        pass


@makes(forward=Access(("x",), ("y",)))
def pair(environment, x, y):
    return None


@makes(Kernel)
def kernel(environment, **arrays):
    return Kernel()


@pytest.mark.parametrize(
    ("make", "method", "expected"),
    [
        (function, None, Access(("x", "w"), ("y",))),
        (partial(partial(function, 1), 2), None, Access(("x", "w"), ("y",))),
        (Kernel, "statistics", Access(("x*",), ("sums",))),
        (partial(Kernel), "statistics", Access(("x*",), ("sums",))),
        (kernel, "statistics", Access(("x*",), ("sums",))),
        (pair, "forward", Access(("x",), ("y",))),
        (Kernel, "nothing_declared", ANY),
        (Overridden, "statistics", ANY),
        (pair, "backward", ANY),
        (lambda environment: None, None, ANY),
        (function, "forward", ANY),
    ],
)
def test_declarations(make, method, expected):
    assert access_of(make, method) == expected


def test_names_with_a_common_prefix():
    access = Access(("x*", "param *"), ("dx*",))
    names = ["y", "x0", "x1", "dx0", "dx1", "param w", "w"]
    assert access.read(names) == ["x0", "x1", "param w"]
    assert access.written(names) == ["dx0", "dx1"]
    assert access.used(names) == ["x0", "x1", "dx0", "dx1", "param w"]
    assert ANY.used(names) == names


def operations_of(program):
    for operation in program:
        if isinstance(operation, Run):
            yield from (operation, *operation.guarded)


@pytest.mark.parametrize("group", range(4))
def test_all_kernels_of_layers_declare_what_they_use(group):
    for seed in range(16 * group, 16 * group + 16):
        graphs = Graphs(seed)
        network = graphs.network()
        program = compile_program(network, graphs.strategy(network, 4), Target(graphs.batch, 4))
        for operation in operations_of(program):
            if isinstance(operation, Run):
                names = operation.kernel.views
                assert operation.access is not ANY, operation
                assert operation.method == "begin" or operation.access.used(names), operation


def norm(activation):
    x = hg.Input((8, 8, 4), "x")
    y = hg.Conv(4, 3, padding=1, name="conv")(x)
    z = hg.Conv(4, 3, padding=1, name="other")(hg.BatchNorm(activation=activation, name="norm")(y, x))
    network = hg.Network({"loss": hg.MeanSquaredError()(z, hg.Input((8, 8, 4), "target"))})
    program = compile_program(network, Strategy({}), Target(2))
    (segment,) = (segment for segment in program.backward if segment.name == "norm")
    return {name for operation in segment.operations for name in operation.arrays}


def test_what_backward_reads_depends_on_what_is_added():
    """Backward of a norm with a second input reads its output only if it has an activation, never the second input."""
    assert "y" in norm("relu") and "y" not in norm(None)
    assert not {"residual"} & (norm("relu") | norm(None))
