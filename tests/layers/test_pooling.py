"""Tests of pooling and adaptive pooling: rounding up, windows with padding only, rejected settings."""

import pytest
from hypothesis import given, settings

import halograd as hg
from halograd.dtensor import Window
from halograd.layers.pooling import _only_padding
from halograd.testing import check_layer
from tests.layers.cases import ADAPTIVE, CEIL, POOLS
from tests.layers.geometries import brute_force_taps, drawn
from tests.support.refusals import refusals


def fits(make, spatial, geometry):
    try:
        hg.Input((*spatial, 2), "x")
        make(*geometry)(hg.Input((*spatial, 2), "x"))
    except ValueError as error:
        assert "only padding" in str(error)
        return False
    return True


@pytest.mark.mpi
@pytest.mark.parametrize("kind", POOLS)
@settings(max_examples=8)
@given(geometry=drawn())
def test_exact_on_drawn_geometries(kind, geometry):
    spatial, *rest = geometry
    if fits(POOLS[kind], spatial, rest):
        check_layer(lambda: POOLS[kind](*rest), (*spatial, 2), gradient=False, batch=1)


def test_ceil_mode_is_made_of_padding_only_where_that_counts():
    def kinds(name, **options):
        spatial, *geometry = CEIL[name]
        network = hg.Network(hg.AveragePool(*geometry, ceil_mode=True, name="p", **options)(hg.Input((*spatial, 2))))
        return [node.layer.kind for node in network.layers.values()]

    assert kinds("beyond padding") == ["Pad", "AveragePool"]
    assert kinds("beyond") == kinds("nothing to round") == ["AveragePool"]
    assert kinds("beyond padding", count_include_pad=False) == ["AveragePool"]


def test_windows_of_padding_only_are_found():
    for kernel in range(1, 4):
        for stride in range(1, 4):
            for dilation in range(1, 4):
                for lo in range(5):
                    w = Window(kernel, stride, lo, 4, dilation)
                    for size in range(1, 5):
                        outputs = w.output_size(size)
                        bad = [
                            o
                            for o in range(outputs)
                            if not any(0 <= i < size for i in brute_force_taps(kernel, stride, lo, dilation, o))
                        ]
                        assert _only_padding(w, size, outputs) == (bad[0] if bad else None)


@pytest.mark.parametrize("kind", POOLS)
def test_refuses_windows_of_padding_only(kind):
    with pytest.raises(ValueError, match=r"window 0 on spatial axis 1 reads only padding .* make the padding smaller"):
        POOLS[kind](2, 1, (0, 2))(hg.Input((4, 4, 1)))


def test_refuses_windows_that_do_not_fit():
    with pytest.raises(ValueError, match=r"MaxPool: a window of extent \[5, 5\] does not fit .* enlarge the input"):
        hg.MaxPool(5)(hg.Input((4, 4, 1)))


def test_global_average_pool_refuses_samples_without_space():
    with pytest.raises(ValueError, match="expected samples with spatial axes"):
        hg.GlobalAveragePool()(hg.Input((4,)))


def test_shapes_and_flops():
    assert hg.MaxPool(3, 2, 1)(hg.Input((9, 8, 5))).shape == (5, 4, 5)
    assert hg.AveragePool(2)(hg.Input((9, 8, 5))).shape == (4, 4, 5)
    assert hg.MaxPool(3, 2, "same").output_shape((9, 8, 5)) == (5, 4, 5)
    assert hg.AveragePool(2).flops((8, 8, 3)) == 4 * 4 * 4 * 3
    assert hg.GlobalAveragePool().output_shape((4, 5, 6, 7)) == (7,)
    assert hg.GlobalAveragePool().flops((4, 5, 7)) == 140


@pytest.mark.parametrize("kind", ADAPTIVE)
def test_one_output_is_made_where_the_input_is(kind):
    layers = hg.Network(ADAPTIVE[kind](1, "p")(hg.Input((4, 6, 3)))).layers
    kinds = {"average": "GlobalAveragePool", "max": "GlobalMaxPool"}
    assert [(name, node.layer.kind, node.shape) for name, node in layers.items()] == [
        ("p_global", kinds[kind], (3,)),
        ("p", "Reshape", (1, 1, 3)),
    ]


test_refusals = refusals(
    (lambda: hg.AdaptiveMaxPool((2, 2, 2))(hg.Input((4, 4, 2))), r"AdaptiveMaxPool: expected one number or 2, got"),
    (
        lambda: hg.AdaptiveMaxPool(0)(hg.Input((4, 4, 2))),
        r"AdaptiveMaxPool: nothing would be left of \(4, 4\): \(0, 0\)",
    ),
    (lambda: hg.AdaptiveAveragePool(2)(hg.Input((4,))), "AdaptiveAveragePool: .* does not fit 0 spatial axes"),
)
