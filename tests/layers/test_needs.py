"""Tests of the needs of layers as products of intervals, against the boxes that the layers return."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import halograd as hg
from halograd.dtensor import Box
from halograd.errors import UserError
from halograd.layers.strategy import AXES, layout_of
from tests.layers.geometries import NASTY
from tests.layers.graphs import Centre, Gate

RANKS = 8


class Window(hg.Layer):
    """Custom layer that declares only a stencil."""

    def __init__(self):
        super().__init__()
        self.stencil = hg.Stencil(3, 2, ((2, 0), (0, 1)), 2)


class Diagonal(hg.Layer):
    """Custom layer whose needs along the width depend on the height, so that they are no product of intervals."""

    def input_boxes(self, box, *shapes):
        return (box.replace(2, box.start[2] + box.start[1], box.stop[2] + box.start[1]),)


LAYERS = {
    "relu": (hg.ReLU, 1),
    "conv": (lambda: hg.Conv(6, 3, padding=1), 1),
    "conv, stride 2": (lambda: hg.Conv(6, (5, 2), 2, ((1, 2), (0, 1))), 1),
    "conv, dilated": (lambda: hg.Conv(6, 3, 1, "same", dilation=2), 1),
    "transposed": (lambda: hg.ConvTranspose(4, 3, 2, 1, 1), 1),
    "max pool": (lambda: hg.MaxPool(3, 2, 1), 1),
    "average pool": (lambda: hg.AveragePool(2, 2), 1),
    "bilinear": (lambda: hg.Resize(2, mode="bilinear"), 1),
    "nearest, any ratio": (lambda: hg.Resize(size=(13, 7)), 1),
    "own stencil": (Window, 1),
    "two reaches": (lambda: Gate(2), 2),
    "whole samples": (Centre, 1),
    "concat": (hg.Concat, 3),
}
CUTS = [(1, 1, 4, 2, 1, 1), (2, 1, 3, 1, 1, 1), (3, 1, 1, 2, 1, 1), (8, 1, 1, 1, 1, 1), (1, 1, 1, 1, 1, 1)]


def check(layer, shapes, some):
    parts, samples = dict(zip(AXES, some)), [shape[1:] for shape in shapes]
    output = layout_of((shapes[0][0], *layer.output_shape(*samples)), parts, RANKS)
    inputs = [layout_of(shape, parts, RANKS) for shape in shapes]
    for i, shape in enumerate(shapes):
        found = layer.needed_blocks(i, inputs, output).clipped(shape)
        for made, have in zip(output.boxes, found):
            want = layer.input_boxes(made, *samples)[i] & Box.of_shape(shape) if made.size else made
            assert have == want or not (want.size or have.size), (made, want)
    found = layer.gradient_blocks(inputs[0], output)
    for owned, have in zip(inputs[0].boxes, found or ()):
        want = layer.gradient_box(owned, samples[0], output.shape[1:])
        assert have == want or not (have.size or want.size)


@pytest.mark.parametrize("some", CUTS)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_need_what_they_say(name, some):
    make, inputs = LAYERS[name]
    check(make(), [(3, 12, 9, 4)] * inputs, some)


@pytest.mark.parametrize("name", NASTY)
@pytest.mark.parametrize("kind", [hg.Conv, hg.MaxPool])
def test_nasty_geometries(name, kind):
    shape, kernel, stride, padding, dilation = NASTY[name]
    layer = (
        hg.Conv(3, kernel, stride, padding, dilation)
        if kind is hg.Conv
        else hg.MaxPool(kernel, stride, padding, dilation)
    )
    for some in CUTS:
        check(layer, [(2, *shape, 2)], some)


@given(st.integers(1, 7), st.integers(1, 3), st.integers(0, 3), st.integers(1, 3), st.integers(1, 8))
def test_any_window(kernel, stride, padding, dilation, blocks):
    layer = hg.Conv(2, kernel, stride, padding, dilation)
    try:
        layer.output_shape((11, 10, 2))
    except ValueError:
        assume(False)  # it reads only padding somewhere
    check(layer, [(1, 11, 10, 2)], (1, 1, blocks, 1, 1, 1))


@pytest.mark.parametrize("some", [(1, 1, 1, 1, 4, 1), (2, 1, 2, 1, 2, 1)])
def test_channels(some):
    for layer in (hg.ReLU(), hg.MaxPool(3, 2, 1), hg.Concat()):
        check(layer, [(3, 12, 9, 6)] * (2 if isinstance(layer, hg.Concat) else 1), some)
    check(hg.Dense(9), [(5, 7)], (2, 1, 1, 1, 1, 1))


def test_what_is_no_product_is_refused():
    with pytest.raises(UserError, match=r"Diagonal: expected the box needed of its inputs to be a product"):
        layout = layout_of((1, 8, 8, 2), {"height": 4}, 4)
        Diagonal().needed_blocks(0, [layout], layout)
