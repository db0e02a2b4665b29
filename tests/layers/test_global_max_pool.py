"""Tests of global max pooling: the gradient of equal elements, torch, rejected inputs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.dtensor import Layout
from halograd.layers import AdaptiveMaxPool, GlobalMaxPool, Input, Pad, ReLU, pooling
from halograd.layers.pooling import _candidates
from halograd.testing import check_layer
from tests.layers.oracle import check_torch, torch

SHAPES = [(7, 6, 2), (9, 3), (6, 7, 6, 2)]


@pytest.mark.mpi
@pytest.mark.parametrize("axes", [("height", "width"), ("sample", "height"), ("width",)], ids=str)
def test_the_first_of_equal_elements_wins_on_every_grid(axes):
    """The first of equal maxima gets the gradient on every grid, also if they are in blocks of several ranks."""

    def repeated():
        again, zeros = Pad(((2, 3), (2, 2)), "circular", name="p"), ReLU()
        return lambda x: GlobalMaxPool()(zeros(again(x)))

    check_layer(repeated, (5, 4, 3), axes=axes, gradient=False)


@pytest.mark.mpi
def test_exact_where_float32_does_not_hold_the_numbers(monkeypatch):
    """Global max pooling is exact when float32 cannot represent positions, as for 2**24 elements (here: 8)."""
    monkeypatch.setattr(pooling, "_FLOAT32", 8)
    check_layer(GlobalMaxPool, (9, 3), dtype="float32")
    check_layer(lambda: AdaptiveMaxPool(2), (19, 3), dtype="float32")


@pytest.mark.torch
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_torch(shape):
    pool = getattr(torch().nn.functional, f"adaptive_max_pool{len(shape) - 1}d")
    check_torch(lambda: GlobalMaxPool("p"), [shape], lambda x: pool(x, 1).flatten(1))
    doubled = lambda x: x.repeat(1, 1, *(2 for _ in shape[:-1]))  # noqa: E731
    amounts = [(0, n) for n in shape[:-1]]
    named = lambda: Named(lambda x: GlobalMaxPool("p")(Pad(amounts, "circular", name="c")(x)))  # noqa: E731
    check_torch(named, [shape], lambda x: pool(doubled(x), 1).flatten(1))


class Named:
    """Layers without parameters, with names, as `check_torch` needs them."""

    name = "p"

    def __init__(self, call):
        self.call = call

    def __call__(self, x):
        return self.call(x)

    def parameters(self, *shapes):
        return {}


@given(
    parts=st.fixed_dictionaries({"sample": st.integers(1, 3), "height": st.integers(1, 9), "width": st.integers(1, 3)})
)
def test_every_block_that_holds_something_has_a_place(parts):
    size = int(np.prod(list(parts.values()))) + 1
    inputs, outputs = Layout.blocks((2, 6, 5, 3), parts, size), Layout.blocks((2, 3), (1, 1), size)
    found, wanted = _candidates(inputs.boxes, outputs.boxes)
    places = {}
    for rank in range(size):
        if inputs.boxes[rank].size:
            places.setdefault(inputs.boxes[rank].ranges[1:3], set()).add(found[rank].ranges[1])
            assert found[rank].shape == (inputs.boxes[rank].shape[0], 1, 2, 3)
        else:
            assert not found[rank].size
    numbers = sorted(first for some in places.values() for first, _ in some)
    assert numbers == list(range(len(places))) and wanted[0].ranges[1] == (0, len(places))


def test_refuses_samples_without_space():
    with pytest.raises(ValueError, match=r"GlobalMaxPool: expected .* got \(4,\)"):
        GlobalMaxPool()(Input((4,)))
