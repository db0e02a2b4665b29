"""Add and Concat: exact under every cut, gradients that are shared and summed, refusals, torch."""

import pytest

from halograd.layers import Add, Concat, Conv, Input, ReLU
from halograd.testing import check_layer
from tests.layers.geometries import skew
from tests.layers.oracle import check_torch, torch

SHAPE = (7, 6, 3)


@pytest.mark.mpi
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_add_exact_on_every_grid(count, activation):
    check_layer(lambda: Add(activation), [SHAPE] * count, gradient=False)


@pytest.mark.mpi
@pytest.mark.parametrize("channels", [(3,), (1, 4), (2, 1, 3)])
def test_concat_exact_on_every_grid(channels):
    check_layer(Concat, [(7, 6, c) for c in channels], gradient=False)


@pytest.mark.mpi
@pytest.mark.parametrize("layer", [Add, Concat])
@pytest.mark.parametrize("shape", [(9, 2), (6, 7, 6, 2), (5,)])
def test_exact_in_other_dimensions(layer, shape):
    check_layer(layer, [shape, shape], gradient=False, batch=3)


@pytest.mark.mpi
def test_exact_on_uneven_and_empty_blocks(monkeypatch):
    skew(monkeypatch)
    check_layer(lambda: lambda a, b: Concat()(Add("relu")(a, b), a), [SHAPE, SHAPE], gradient=False)


def residual(x):
    """Both inputs of the sum have another reader, whose gradient must not leak into the other's."""
    a = Conv(3, 3, padding=1, name="a")(x)
    b = Conv(3, 3, padding=1, name="b")(x)
    s = Add("relu")(a, b)
    t = Add()(s, a, b, s)
    return Concat()(t, a, Add()(t, b))


@pytest.mark.mpi
@pytest.mark.parametrize("backend, dtype", [("numpy", "float64"), ("onednn", "float32")])
def test_exact_where_gradients_meet(backend, dtype):
    check_layer(lambda: residual, SHAPE, gradient=False, backend=backend, dtype=dtype)


def test_gradients_that_meet_are_the_derivative():
    check_layer(lambda: residual, SHAPE)


@pytest.mark.mpi
def test_one_value_added_to_itself():
    check_layer(lambda: lambda x: Add()(x, x), SHAPE)
    check_layer(lambda: lambda x: Add("relu")(*[ReLU()(x)] * 2), SHAPE, gradient=False)


@pytest.mark.torch
def test_as_torch():
    lib = torch()
    check_torch(lambda: Add(name="a"), [SHAPE] * 3, lambda a, b, c: a + b + c)
    check_torch(lambda: Add("relu", name="a"), [SHAPE] * 2, lambda a, b: (a + b).relu())
    check_torch(lambda: Concat("c"), [(5, 4, 2), (5, 4, 3)], lambda a, b: lib.cat((a, b), 1))


def test_shapes_and_flops():
    assert Concat().output_shape((4, 5, 2), (4, 5, 3)) == (4, 5, 5)
    assert Add().output_shape((4, 5, 2), (4, 5, 2)) == (4, 5, 2)
    assert Add().flops((4, 5, 2), (4, 5, 2), (4, 5, 2)) == 80


def test_errors_name_what_is_wrong():
    a, b = Input((4, 4, 2), "a"), Input((5, 4, 2), "b")
    with pytest.raises(ValueError, match=r"Add: expected inputs of one shape, got \(4, 4, 2\), \(5, 4, 2\); crop"):
        Add()(a, b)
    with pytest.raises(ValueError, match=r"Concat: expected inputs of one spatial shape, got \(4, 4, 2\), \(5, 4, 2\)"):
        Concat()(a, b)
    with pytest.raises(ValueError, match=r"Concat: .* got no input"):
        Concat()()
    with pytest.raises(ValueError, match="activation: expected None or 'relu', got 'tanh'"):
        Add("tanh")
