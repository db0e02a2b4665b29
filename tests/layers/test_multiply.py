"""Tests of products and sums of two nodes, one of them broadcast: shared inputs, rejected inputs."""

import math

import numpy as np
import pytest

from halograd.dtensor import Box, Layout
from halograd.layers import Add, Affine, BroadcastAdd, Input, Multiply, Sigmoid
from tests.layers.cases import GATES
from tests.support.refusals import refusals

SHAPE = (7, 6, 3)


KINDS = pytest.mark.parametrize("kind", [Multiply, BroadcastAdd])


def test_needed_blocks_are_what_is_multiplied():
    """`needed_blocks` gives the elements of a broadcast factor that a block of the product reads."""
    for gate in GATES.values():
        for parts in ({"sample": 2, "height": 3}, {"height": 2, "width": 2}, {"channel": 3}, {"sample": 5}):
            size = math.prod(parts.values())
            output = Layout.blocks((3, *SHAPE), parts, size)
            read = Multiply().needed_blocks(1, [output, Layout.blocks((3, *gate), {}, size)], output)
            number = np.arange(3 * math.prod(gate)).reshape(3, *(1,) * (4 - 1 - len(gate)), *gate)
            spread = np.broadcast_to(number, (3, *SHAPE))
            for rank in range(size):
                box: Box = output.boxes[rank]
                want = set(spread[box.slices()].ravel().tolist())
                have = number.reshape(3, *gate)[read[rank].slices()] if read[rank].size else np.empty(0, int)
                assert set(have.ravel().tolist()) == want, (gate, parts, rank)


def test_operators_are_layers():
    x, gate = Input(SHAPE, "x"), Input((3,), "gate")
    assert isinstance((x * gate).layer, Multiply) and isinstance((x + x).layer, Add)
    assert isinstance((x + gate).layer, BroadcastAdd)
    assert (gate * x).inputs == (gate + x).inputs == (x, gate), "the larger one first, whatever the order"


def test_numbers_are_layers():
    x = Input(SHAPE, "x")
    cases = {
        (2.0, 0.0): [2 * x, x * 2, np.float32(2) * x, x / 0.5],
        (1.0, -3.0): [x - 3, x + -3, -3 + x],
        (-1.0, 3.0): [3 - x],
        (-1.0, 0.0): [-x],
    }
    for numbers, nodes in cases.items():
        for node in nodes:
            assert isinstance(node.layer, Affine) and (node.layer.factor, node.layer.shift) == numbers
    assert x + 0 is x and 1 * x is x and x / 1 is x, "what does nothing is no layer"
    added = sum([x, x])
    assert isinstance(added.layer, Add) and added.inputs == (x, x)
    difference = x - Sigmoid()(x)
    assert isinstance(difference.layer, Add) and isinstance(difference.inputs[1].layer, Affine)


test_refusals = refusals(
    (lambda x: Multiply()(x), "expected two inputs, got 1"),
    (lambda x: Multiply()(x, Input((7, 5, 3))), r"with 1 for any of its extents, or \(3,\), got \(7, 5, 3\)"),
    (lambda x: Multiply()(x, Input((7,))), r"got \(7,\)"),
    (lambda x: x + Input((7, 5, 3)), r"BroadcastAdd: expected a second input of the shape \(7, 6, 3\)"),
    (lambda x: x * float("nan"), "Affine: expected two finite numbers, got nan, 0.0"),
    call=lambda make: make(Input(SHAPE)),
)
test_refusals_of_other_types = refusals(
    (lambda x: x * "2", "product: expected .* got str"),
    (lambda x: x * True, "product: expected .* got bool"),
    (lambda x: x + "1", "Add: expected the outputs of other layers, got str"),
    (lambda x: x / 0, "quotient: expected a number other than 0 as divisor, got 0"),
    (lambda x: x / x, "quotient: expected a number other than 0 as divisor, got <"),
    (lambda x: 1 / x, "unsupported operand"),
    call=lambda make: make(Input(SHAPE)),
    error=TypeError,
)
