"""Storage of one node on one rank: views of empty blocks."""

import numpy as np

from halograd.dtensor import Box
from halograd.layers.value import Region


def test_a_view_of_an_empty_box_has_the_shape_of_the_box():
    """A rank without rows may hold the halo of a later layer, which begins anywhere."""
    halo = Region(np.zeros((1, 2, 1, 4)), Box((0, 0, 3, 0), (1, 2, 4, 4)))
    for empty in (Box((0, 5, 0, 0), (1, 5, 9, 4)), Box((0, 0, 0, 0), (0, 7, 9, 4)), Box((0, 5, 2, 0), (1, 5, 6, 4))):
        assert halo.view(empty).shape == empty.shape
        assert halo.view(empty).flags.c_contiguous


def test_a_view_of_a_box_is_the_part_of_the_array():
    region = Region(np.arange(12.0).reshape(1, 4, 3), Box((0, 2, 0), (1, 6, 3)))
    assert np.array_equal(region.view(Box((0, 3, 0), (1, 5, 3))), region.array[:, 1:3])
