"""Tests of compiled programs and the memory of every rank, computed in one process for all ranks."""

import dataclasses
import math
from functools import partial

import pytest

import halograd as hg
from halograd.dtensor import Box
from halograd.layers.strategy import Strategy
from halograd.lowering.context import Context, Lowered
from halograd.lowering.views import is_packed
from halograd.program.compiler import compile_program
from halograd.program.program import Target


def compiled(network, strategy, rank, size, batch=1):
    program = compile_program(network, strategy, Target(batch, size, rank))
    return {step.name: step for step in program.steps}, program.values


def fork():
    """Return a network whose input has two readers."""
    x = hg.Input((8, 8, 2), "x")
    y = hg.Add(name="sum")(hg.Conv(2, 3, padding=1, name="a")(x), hg.Conv(2, 3, padding=1, name="b")(x))
    return hg.Network({"loss": hg.MeanSquaredError(name="mse")(y, hg.Input((8, 8, 2), "target"))})


def test_an_input_holds_the_halo_of_its_first_cut_only():
    """An input has the halo of its first reader's cut only; for another cut it is redistributed."""
    strategy = Strategy({"height": 2}, {"b": {"width": 2}})
    for rank, rows in enumerate([(0, 5), (3, 8)]):
        steps, values = compiled(fork(), strategy, rank, 2)
        assert values["x"].region.box == Box((0, rows[0], 0, 0), (1, rows[1], 8, 2))
        assert steps["x->width=2"].output.box == Box((0, 0, 4 * rank, 0), (1, 8, 4 * rank + 4, 2))


def test_what_is_flattened_gets_no_margins():
    """The input of Flatten has no margins; the owner of a sample receives it already flattened."""
    y = hg.Conv(2, 3, padding=1, name="a")(hg.Input((8, 8, 2), "x"))
    network = hg.Network({"loss": hg.MeanSquaredError()(hg.Dense(3)(hg.Flatten()(y)), hg.Input((3,), "target"))})
    steps, _ = compiled(network, Strategy({"height": 4}), 0, 4)
    assert steps["a"].output.region.box == Box((0, 0, 0, 0), (1, 2, 8, 2))


def test_halos_are_received_in_place_where_the_block_stays_packed():
    y = hg.Conv(2, 3, padding=1, name="b")(hg.Conv(2, 3, padding=1, name="a")(hg.Input((8, 8, 2), "x")))
    network = hg.Network({"loss": hg.MeanSquaredError()(y, hg.Input((8, 8, 2), "target"))})
    for parts, box in {"height": Box((0, 1, 0, 0), (1, 5, 8, 2)), "width": Box((0, 0, 2, 0), (1, 8, 4, 2))}.items():
        steps, _ = compiled(network, Strategy({parts: 4}), 1, 4)
        assert steps["a"].output.region.box == box


def test_packed_boxes():
    storage = Box((0, 2, 0, 0), (1, 8, 4, 3))
    assert is_packed(storage, Box((0, 3, 0, 0), (1, 5, 4, 3)))
    assert not is_packed(storage, Box((0, 3, 1, 0), (1, 5, 4, 3)))
    assert is_packed(storage, Box((0, 3, 1, 0), (1, 4, 4, 3))), "one row may be narrower"
    assert not is_packed(storage, Box((0, 0, 0, 0), (1, 5, 4, 3)))
    assert is_packed(storage, Box((0, 9, 0, 0), (1, 9, 4, 3))), "nothing is packed anywhere"


def arrays_per_block(*makers, parts=None):
    """Return the number of arrays that a block of these layers adds to the memory of a rank."""
    parts = parts or {"height": 2}

    def stored(blocks):
        y = hg.Input((32, 32, 64), "x")
        for _ in range(blocks):
            for make in (lambda: hg.Conv(64, 3, padding=1, bias=False), *makers):
                y = make()(y)
        network = hg.Network({"loss": hg.MeanSquaredError()(y, hg.Input((32, 32, 64), "target"))})
        size = math.prod(parts.values())
        return compile_program(network, Strategy(parts), Target(1, size, 0)).placement.size * size

    return (stored(9) - stored(5)) / 4 / (32 * 32 * 64 * 4)


@pytest.mark.parametrize(
    "norm", [hg.BatchNorm, lambda: hg.GroupNorm(4), lambda: hg.LayerNorm()], ids=["batch", "group", "layer"]
)
@pytest.mark.parametrize("activation", [hg.ReLU, hg.LeakyReLU, hg.Clamp])
def test_the_input_of_an_activation_is_not_kept(activation, norm):
    """The input of an activation is not kept: backward needs the input of the norm and the output of the activation."""
    assert arrays_per_block(norm, activation) == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize(
    "activation",
    [
        *(hg.ELU, hg.Sigmoid, hg.Tanh, hg.HardSigmoid, hg.GELU, hg.SiLU, hg.HardSwish, hg.Softplus, hg.Mish),
        lambda: hg.LeakyReLU(-0.1),
    ],
)
def test_it_is_kept_where_the_gradient_is_formed_from_it(activation):
    assert arrays_per_block(hg.BatchNorm, activation) == pytest.approx(3, abs=0.1)


BLOCKS = {
    "batch norm, fused relu": [partial(hg.BatchNorm, activation="relu")],
    "group norm, fused relu": [partial(hg.GroupNorm, 4, activation="relu")],
    "layer norm, fused relu": [partial(hg.LayerNorm, activation="relu")],
    "convolution, fused relu": [partial(hg.Conv, 64, 1, activation="relu")],
    **{kind.__name__: [hg.BatchNorm, kind] for kind in (hg.ReLU, hg.ELU, hg.LeakyReLU, hg.Clamp)},
}


@pytest.mark.parametrize("parts", [{"width": 4}, {"height": 2, "width": 2}], ids=["columns", "both"])
@pytest.mark.parametrize("block", BLOCKS)
def test_an_output_is_not_kept_beside_its_copy_with_halos(block, parts):
    """With cut columns an output is not kept in addition to its copy with halos, so memory is as with cut rows.

    The sign before a ReLU follows from the input of the norm; other activations read that copy.
    """
    rows = arrays_per_block(*BLOCKS[block], parts={"height": 4})
    assert arrays_per_block(*BLOCKS[block], parts=parts) == pytest.approx(rows, rel=0.1)


def test_an_output_is_kept_where_its_copy_with_halos_is_not():
    """An output is kept if its copy with halos is not, because the frozen next convolution reads no input."""
    x, parts = hg.Input((32, 32, 64), "x"), {"height": 2, "width": 2}
    y = hg.Conv(64, 3, padding=1, activation="relu", name="first")(x)
    y = hg.Conv(64, 3, padding=1, name="second")(y)
    network = hg.Network({"loss": hg.MeanSquaredError()(y, hg.Input((32, 32, 64), "target"))}).freeze("second")
    program = compile_program(network, Strategy(parts), Target(1, 4, 0))
    read = {
        view.buffer for segment in program.backward for operation in segment.operations for view in operation.views()
    }
    value = program.values["first"]
    copies = {view.buffer for view in value.gathered.values()}
    assert value.view.buffer in read and not read & copies


@pytest.mark.parametrize("pool", [hg.MaxPool, hg.AveragePool])
def test_what_is_pooled_is_not_kept(pool):
    assert arrays_per_block(lambda: pool(3, stride=1, padding=1)) == pytest.approx(1, abs=0.1)


class Old(hg.Layer):
    """Layer whose `lower` returns a function that adds its backward pass, in place of a description."""

    def lower(self, context):
        context.copy((context.inputs[0].view, context.y))
        return lambda: context.copy((context.dy, context.gradient(0)))


def test_what_lower_returns_is_checked():
    y = Old(name="old")(hg.Input((4, 4, 2), "x"))
    network = hg.Network({"loss": hg.MeanSquaredError()(y, hg.Input((4, 4, 2), "target"))})
    with pytest.raises(TypeError, match=r"layer 'old'.*expected a Lowered, got function; return Lowered\(backward\)"):
        compile_program(network, Strategy({}), Target(1))


def test_what_a_layer_lowers_itself_to_is_frozen():
    """A layer describes its lowering in one immutable object; it sets nothing on its context."""
    lowered = Lowered()
    with pytest.raises(dataclasses.FrozenInstanceError):
        lowered.backward = lambda: None
    assert not {"finishing", "settling", "loss", "terms", "exposed", "reread"} & set(dir(Context))
