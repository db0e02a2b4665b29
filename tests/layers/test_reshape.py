"""Reshape: exact under every cut of the map behind it; the inverse of Flatten; torch; refusals."""

import pytest

from halograd.layers import Conv, Dense, Flatten, Input, Reshape
from halograd.testing import check_layer
from tests.layers.geometries import skew
from tests.layers.oracle import check_torch

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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Reshape((4,)), r"expected \(\*spatial, C\), all at least 1, got \(4,\)"),
        (lambda: Reshape((4, 0)), r"all at least 1, got \(4, 0\)"),
        (lambda: Reshape((2, 3))(Input((7,))), r"expected 6 elements for \(2, 3\), got 7"),
        (lambda: Reshape((2, 3))(Input((3, 2))), r"expected samples of shape \(F,\), got \(3, 2\); put Flatten"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ValueError, match=message):
        make()
