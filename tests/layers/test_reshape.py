"""Flatten, reshape, pixel and channel shuffle: the order of torch, refusals."""

import numpy as np
import pytest

from halograd.layers import Conv, Dense, Input, PixelShuffle, PixelUnshuffle, Reshape
from halograd.testing import check_layer
from tests.layers.cases import SHUFFLES
from tests.layers.geometries import skew
from tests.layers.oracle import check_torch, torch
from tests.support.refusals import refusals

AXES = ("sample", "height", "width")


@pytest.mark.many_ranks
def test_exact_on_uneven_and_empty_blocks_between_layers(monkeypatch):
    """As in a generator: a vector becomes a map."""
    skew(monkeypatch)

    def chain():
        dense, conv = Dense(6 * 7 * 2, name="d"), Conv(3, 3, padding=1, name="c")
        return lambda x: conv(Reshape((6, 7, 2))(dense(x)))

    check_layer(chain, (5,), axes=AXES, gradient=False, batch=3)


@pytest.mark.torch
def test_as_torch():
    check_torch(lambda: Reshape((3, 4, 2), "r"), [(24,)], lambda x: x.view(-1, 3, 4, 2).movedim(-1, 1))


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


def torch_shuffle(x, factor):
    """Any number of axes, by reshaping and permuting."""
    axes, (n, channels, *spatial) = x.dim() - 2, x.shape
    cells = x.reshape(n, channels // factor**axes, *[factor] * axes, *spatial)
    order = [0, 1, *(i for axis in range(axes) for i in (2 + axes + axis, 2 + axis))]
    return cells.permute(order).reshape(n, -1, *(m * factor for m in spatial))


@pytest.mark.torch
def test_shuffles_as_torch():
    f = torch().nn.functional
    for name, factor in (("shuffle", 2), ("shuffle by 3", 3)):
        make, shape = SHUFFLES[name]
        check_torch(make, [shape], lambda x, factor=factor: f.pixel_shuffle(x, factor))
        x = torch().arange(np.prod(shape)).reshape(1, shape[-1], *shape[:-1])
        assert torch().equal(torch_shuffle(x, factor), f.pixel_shuffle(x, factor))
    for name, factor in (("unshuffle", 2), ("unshuffle by 3", 3)):
        make, shape = SHUFFLES[name]
        check_torch(make, [shape], lambda x, factor=factor: f.pixel_unshuffle(x, factor))
    make, shape = SHUFFLES["of channels"]
    check_torch(make, [shape], lambda x: f.channel_shuffle(x, 3))
    for name in ("shuffle 1-D", "shuffle 3-D"):
        make, shape = SHUFFLES[name]
        check_torch(make, [shape], lambda x: torch_shuffle(x, 2))


test_refusals_of_shuffles = refusals(
    (lambda: PixelShuffle(0), "PixelShuffle: expected a factor of at least 1, got 0"),
    (lambda: PixelShuffle(2)(Input((4, 4, 6))), "expected channels that are a multiple of 4, got 6"),
    (lambda: PixelUnshuffle(2)(Input((4, 5, 6))), r"expected extents that are multiples of 2, got \(4, 5\)"),
    (lambda: PixelShuffle(2)(Input((4,))), r"expected samples with spatial axes .* got \(4,\)"),
)
