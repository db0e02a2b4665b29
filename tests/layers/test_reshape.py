"""Flatten, reshape, pixel and channel shuffle: exact under every cut, the order of torch, round trips, refusals."""

from __future__ import annotations

import numpy as np
import pytest

from halograd.layers import ChannelShuffle, Conv, Dense, Flatten, Input, PixelShuffle, PixelUnshuffle, Reshape
from halograd.testing import check_layer
from tests.layers.geometries import skew
from tests.layers.oracle import check_torch, torch
from tests.support.refusals import refusals

MAPS = [(4, 5, 3), (9, 2), (3, 4, 2, 2), (1, 1, 6)]
AXES = ("sample", "height", "width")


@pytest.mark.mpi
@pytest.mark.parametrize("shape", MAPS, ids=str)
@pytest.mark.parametrize("batch", [1, 5])
def test_exact_on_every_grid(shape, batch):
    (features,) = Flatten().output_shape(shape)
    axes = {2: ("sample", "width"), 3: AXES, 4: ("sample", "depth", "height", "width")}[len(shape)]
    check_layer(lambda: Reshape(shape), (features,), batch=batch, axes=axes, gradient=False)


@pytest.mark.many_ranks
def test_exact_on_uneven_and_empty_blocks_between_layers(monkeypatch):
    """As in a generator: a vector becomes a map."""
    skew(monkeypatch)

    def chain():
        dense, conv = Dense(6 * 7 * 2, name="d"), Conv(3, 3, padding=1, name="c")
        return lambda x: conv(Reshape((6, 7, 2))(dense(x)))

    check_layer(chain, (5,), axes=AXES, gradient=False, batch=3)


@pytest.mark.mpi
def test_maps_of_another_shape():
    check_layer(lambda: lambda x: Reshape((8, 3, 2))(Flatten()(x)), (4, 6, 2))


@pytest.mark.torch
@pytest.mark.ranks(1, 2)
def test_as_torch():
    check_torch(lambda: Reshape((3, 4, 2), "r"), [(24,)], lambda x: x.view(-1, 3, 4, 2).movedim(-1, 1))


test_refusals = refusals(
    (lambda: Reshape((4,)), r"expected \(\*spatial, C\), all at least 1, got \(4,\)"),
    (lambda: Reshape((4, 0)), r"all at least 1, got \(4, 0\)"),
    (lambda: Reshape((2, 3))(Input((7,))), r"expected 6 elements for \(2, 3\), got 7"),
    (lambda: Reshape((2, 3))(Input((3, 2))), r"expected samples of shape \(F,\), got \(3, 2\); put Flatten"),
)


#: Layer, shape of its input: cells that blocks cut, and those that fit.
CASES = {
    "shuffle": (lambda: PixelShuffle(2, "p"), (5, 4, 12)),
    "shuffle by 3": (lambda: PixelShuffle(3, "p"), (3, 5, 18)),
    "shuffle 1-D": (lambda: PixelShuffle(2, "p"), (7, 6)),
    "shuffle 3-D": (lambda: PixelShuffle(2, "p"), (3, 2, 3, 16)),
    "unshuffle": (lambda: PixelUnshuffle(2, "p"), (10, 6, 3)),
    "unshuffle by 3": (lambda: PixelUnshuffle(3, "p"), (9, 12, 2)),
    "unshuffle 1-D": (lambda: PixelUnshuffle(2, "p"), (14, 3)),
    "unshuffle 3-D": (lambda: PixelUnshuffle(2, "p"), (6, 4, 6, 2)),
    "of channels": (lambda: ChannelShuffle(3, "p"), (5, 4, 12)),
    "of channels 3-D": (lambda: ChannelShuffle(2, "p"), (3, 2, 3, 4)),
    "of one": (lambda: PixelShuffle(1, "p"), (5, 4, 3)),
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", CASES)
def test_shuffles_are_exact_on_every_grid(name):
    make, shape = CASES[name]
    check_layer(make, shape, gradient=len(shape) == 3)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["shuffle", "shuffle by 3", "unshuffle", "unshuffle by 3", "of channels"])
def test_exact_with_channels_cut(name):
    """Blocks of channels begin within a cell."""
    make, shape = CASES[name]
    check_layer(make, shape, axes=("height", "channel"), gradient=False)


@pytest.mark.many_ranks
@pytest.mark.parametrize("name", ["shuffle", "shuffle by 3", "unshuffle", "unshuffle by 3", "of channels"])
def test_exact_on_uneven_and_empty_blocks(name, monkeypatch):
    skew(monkeypatch)
    make, shape = CASES[name]
    check_layer(make, shape, gradient=False)


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
@pytest.mark.ranks(1, 2)
def test_shuffles_as_torch():
    f = torch().nn.functional
    for name, factor in (("shuffle", 2), ("shuffle by 3", 3)):
        make, shape = CASES[name]
        check_torch(make, [shape], lambda x, factor=factor: f.pixel_shuffle(x, factor))
        x = torch().arange(np.prod(shape)).reshape(1, shape[-1], *shape[:-1])
        assert torch().equal(torch_shuffle(x, factor), f.pixel_shuffle(x, factor))
    for name, factor in (("unshuffle", 2), ("unshuffle by 3", 3)):
        make, shape = CASES[name]
        check_torch(make, [shape], lambda x, factor=factor: f.pixel_unshuffle(x, factor))
    make, shape = CASES["of channels"]
    check_torch(make, [shape], lambda x: f.channel_shuffle(x, 3))
    for name in ("shuffle 1-D", "shuffle 3-D"):
        make, shape = CASES[name]
        check_torch(make, [shape], lambda x: torch_shuffle(x, 2))


@pytest.mark.mpi
@pytest.mark.parametrize("shape", [(6, 3), (4, 6, 3), (4, 2, 6, 3)], ids=str)
def test_the_one_is_the_inverse_of_the_other(shape):
    check_layer(lambda: lambda x: PixelShuffle(2)(PixelUnshuffle(2)(x)), shape, gradient=False)


test_refusals_of_shuffles = refusals(
    (lambda: PixelShuffle(0), "PixelShuffle: expected a factor of at least 1, got 0"),
    (lambda: PixelShuffle(2)(Input((4, 4, 6))), "expected channels that are a multiple of 4, got 6"),
    (lambda: PixelUnshuffle(2)(Input((4, 5, 6))), r"expected extents that are multiples of 2, got \(4, 5\)"),
    (lambda: PixelShuffle(2)(Input((4,))), r"expected samples with spatial axes .* got \(4,\)"),
)
