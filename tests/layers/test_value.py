"""Storage of one node on one rank: views of empty blocks, and where gradients are added up."""

import numpy as np
import pytest

from halograd.dtensor import Box, Layout
from halograd.kernels import get_backend
from halograd.layers.memory import Memory
from halograd.layers.value import Region, Value

FLOAT = np.dtype("float64")


@pytest.fixture
def memory():
    return Memory(get_backend("numpy"))


def test_a_view_of_an_empty_box_has_the_shape_of_the_box():
    """A rank without rows may hold the halo of a later layer, which begins anywhere."""
    halo = Region(np.zeros((1, 2, 1, 4)), Box((0, 0, 3, 0), (1, 2, 4, 4)))
    for empty in (Box((0, 5, 0, 0), (1, 5, 9, 4)), Box((0, 0, 0, 0), (0, 7, 9, 4)), Box((0, 5, 2, 0), (1, 5, 6, 4))):
        assert halo.view(empty).shape == empty.shape
        assert halo.view(empty).flags.c_contiguous


def test_a_view_of_a_box_is_the_part_of_the_array():
    region = Region(np.arange(12.0).reshape(1, 4, 3), Box((0, 2, 0), (1, 6, 3)))
    assert np.array_equal(region.view(Box((0, 3, 0), (1, 5, 3))), region.array[:, 1:3])


def value(rank, gradient_box):
    layout = Layout.blocks((1, 4, 3), {"width": 2}, 2, boundaries={1: (0, 4, 4)})
    return Value("v", layout, FLOAT, layout.boxes, rank, gradient_box=gradient_box)


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_of_a_sum_stays_until_its_maker_is_bound(memory, rank):
    """Also where the block is empty (rank 1): the margins of its gradient will hold a halo."""
    v = value(rank, Box((0, 2, 0), (1, 4, 3)) if rank else Box((0, 0, 0), (1, 4, 3)))
    v.new_contribution(memory)
    v.new_contribution(memory)
    v.close_gradient(memory, get_backend("numpy"))
    for _ in range(3):
        other = memory.acquire((1, 2, 3), FLOAT)
        assert not np.shares_memory(other, v.gradient.array)
    v.end_gradient(memory)
    assert np.shares_memory(memory.acquire(v.gradient.array.shape, FLOAT), v.gradient.array)


def test_gradients_are_added_where_they_belong(memory):
    """A shared one is not added into: another value's gradient is the same array."""
    v = value(0, None)
    shared = memory.acquire((1, 4, 3), FLOAT)
    memory.share(shared)
    v.contributions.append(shared)
    own = v.new_contribution(memory)
    v.contributions.append(shared)
    memory.share(shared)
    total = v.close_gradient(memory, get_backend("numpy"))
    shared.fill(1)
    own.fill(5)
    total()
    assert np.all(v.dy == 7) and np.all(shared == 1)


def test_shared_gradients_alone_get_an_array_of_their_own(memory):
    v = value(0, None)
    first, second = memory.acquire((1, 4, 3), FLOAT), memory.acquire((1, 4, 3), FLOAT)
    v.contributions += [first, second]
    first.fill(1)
    second.fill(2)
    v.close_gradient(memory, get_backend("numpy"))()
    assert np.all(v.dy == 3) and np.all(first == 1) and np.all(second == 2)
