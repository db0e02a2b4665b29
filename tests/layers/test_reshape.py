"""Tests of flatten, reshape, pixel and channel shuffle: within networks, and rejected inputs."""

import pytest

from halograd.layers import Conv, Dense, Input, PixelShuffle, PixelUnshuffle, Reshape
from halograd.testing import check_layer
from tests.layers.geometries import skew
from tests.support.refusals import refusals

AXES = ("sample", "height", "width")


@pytest.mark.many_ranks
def test_exact_on_uneven_and_empty_blocks_between_layers(monkeypatch):
    """A vector that is reshaped to a map, as in a generator, is exact on uneven and empty blocks."""
    skew(monkeypatch)

    def chain():
        dense, conv = Dense(6 * 7 * 2, name="d"), Conv(3, 3, padding=1, name="c")
        return lambda x: conv(Reshape((6, 7, 2))(dense(x)))

    check_layer(chain, (5,), axes=AXES, gradient=False, batch=3)


test_refusals = refusals(
    (lambda: Reshape((4,)), r"expected \(\*spatial, C\), all at least 1, got \(4,\)"),
    (lambda: Reshape((4, 0)), r"all at least 1, got \(4, 0\)"),
    (lambda: Reshape((2, 3))(Input((7,))), r"expected 6 elements for \(2, 3\), got 7"),
    (lambda: Reshape((2, 3))(Input((3, 2))), r"expected samples of shape \(F,\), got \(3, 2\); put Flatten"),
)


@pytest.mark.mpi
def test_exact_as_the_end_of_a_network_for_super_resolution():
    def chain():
        before, behind = Conv(8, 3, padding=1, name="b"), Conv(2, 3, padding=1, name="c")
        return lambda x: behind(PixelShuffle(2)(before(PixelUnshuffle(2)(x))))

    check_layer(chain, (10, 6, 2), gradient=False)


test_refusals_of_shuffles = refusals(
    (lambda: PixelShuffle(0), "PixelShuffle: expected a factor of at least 1, got 0"),
    (lambda: PixelShuffle(2)(Input((4, 4, 6))), "expected channels that are a multiple of 4, got 6"),
    (lambda: PixelUnshuffle(2)(Input((4, 5, 6))), r"expected extents that are multiples of 2, got \(4, 5\)"),
    (lambda: PixelShuffle(2)(Input((4,))), r"expected samples with spatial axes .* got \(4,\)"),
)
