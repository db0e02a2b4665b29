"""Resize: exact arithmetic against brute force, exact under every cut, torch."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.kernels.geometry import MODES, Resampling
from halograd.layers import Input, MaxPool, Resize
from halograd.testing import check_layer
from tests.layers.geometries import skew
from tests.layers.oracle import check_torch, torch

#: spatial shape -> scale or size
CASES = {
    "double": ((6, 7), {"scale": 2}),
    "triple and double": ((6, 7), {"scale": (3, 2)}),
    "one and a half": ((7, 6), {"scale": 1.5}),
    "half": ((9, 8), {"scale": 0.5}),
    "a third": ((13, 9), {"scale": 1 / 3}),
    "to a size": ((7, 9), {"size": (11, 6)}),
    "to one": ((7, 9), {"size": 1}),
    "1-D": ((9,), {"scale": 2.5}),
    "3-D": ((6, 7, 6), {"size": (12, 3, 7)}),
}


@pytest.mark.mpi
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_exact_on_every_grid(name, mode):
    spatial, how = CASES[name]
    check_layer(lambda: Resize(**how, mode=mode), (*spatial, 2), gradient=False)


@pytest.mark.ranks(6, 8)
@pytest.mark.parametrize("name", ["double", "half", "to one"])
def test_exact_with_many_ranks(name):
    spatial, how = CASES[name]
    check_layer(lambda: Resize(**how, mode="linear"), (*spatial, 2), gradient=False)


@pytest.mark.mpi
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", [{"scale": 2}, {"size": (9, 5)}], ids=str)
def test_exact_on_uneven_and_empty_blocks(how, mode, monkeypatch):
    skew(monkeypatch)
    check_layer(lambda: Resize(**how, mode=mode), (7, 6, 2), gradient=False)


@pytest.mark.mpi
def test_exact_between_other_layers_on_onednn():
    def chain():
        return lambda x: MaxPool(3, 1, 1)(Resize(2, mode="bilinear")(MaxPool(2)(x)))

    check_layer(chain, (9, 8, 3), dtype="float32", backend="onednn")


@pytest.mark.parametrize("mode", MODES)
def test_gradient_is_the_derivative(mode):
    check_layer(lambda: Resize(1.5, mode=mode), (5, 4, 2))


@pytest.mark.torch
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [n for n in CASES if n != "a third"])
def test_as_torch(name, mode):
    spatial, how = CASES[name]
    theirs = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(spatial)] if mode == "linear" else mode
    given = {"scale_factor": how["scale"]} if "scale" in how else {"size": how["size"]}
    more = {"align_corners": False} if mode == "linear" else {}
    interpolate = torch().nn.functional.interpolate
    check_torch(
        lambda: Resize(**how, mode=mode, name="r"),
        [(*spatial, 2)],
        lambda x: interpolate(x, mode=theirs, **given, **more),
    )


# -- arithmetic --------------------------------------------------------------------------------------


@st.composite
def resamplings(draw):
    size, mode = draw(st.integers(1, 9)), draw(st.sampled_from(MODES))
    if draw(st.booleans()):
        outputs = draw(st.integers(1, 20))
        return Resampling(size, outputs, Fraction(size, outputs), mode)
    scale = Fraction(draw(st.integers(1, 7)), draw(st.integers(1, 4)))
    return Resampling(size, max(1, int(size * scale)), 1 / scale, mode)


def row(r, o):
    """Weights of all inputs in output `o`, by the formulas."""
    position = (o + 0.5) * float(r.ratio) - 0.5
    weights = np.zeros(r.size)
    if r.mode == "nearest":
        weights[min(int(Fraction(o) * r.ratio), r.size - 1)] = 1
    elif r.mode == "nearest-exact":
        weights[min(int((o + Fraction(1, 2)) * r.ratio), r.size - 1)] = 1
    else:
        position = min(max(position, 0.0), r.size - 1.0)
        weights = np.maximum(0.0, 1 - np.abs(np.arange(r.size) - position))
    return weights


@given(r=resamplings())
def test_taps_follow_the_formulas(r):
    for o in range(r.outputs):
        weights = np.zeros(r.size)
        for i, weight in r.taps(o):
            weights[i] += weight
        assert np.allclose(weights, row(r, o), atol=1e-12)


@given(r=resamplings(), data=st.data())
def test_runs_cover_each_output_once_with_its_taps(r, data):
    start = data.draw(st.integers(0, r.outputs))
    stop = data.draw(st.integers(start, r.outputs))
    lo, hi = r.input_range(start, stop)
    seen = []
    for run in r.runs(start, stop):
        outputs = range(r.outputs)[run.outputs()]
        inputs = [range(r.size)[run.inputs(k)] for k in range(len(run.taps))]
        assert len(outputs) == run.count and all(len(i) == run.count for i in inputs)
        for k, o in enumerate(outputs):
            assert r.taps(o) == tuple((i[k], weight) for i, (_, weight) in zip(inputs, run.taps))
            assert all(lo <= i[k] < hi for i in inputs)
        seen += outputs
    assert sorted(seen) == list(range(start, stop))
    assert 0 <= lo <= hi <= r.size


def test_integer_scales_are_few_runs():
    assert len(Resampling(64, 128, Fraction(1, 2), "nearest").runs(0, 128)) == 2
    assert len(Resampling(64, 128, Fraction(1, 2), "linear").runs(0, 128)) == 4


# -- description -------------------------------------------------------------------------------------


def test_shapes_and_flops():
    assert Resize(2)(Input((5, 4, 3))).shape == (10, 8, 3)
    assert Resize(1.5)(Input((5, 4, 3))).shape == (7, 6, 3)
    assert Resize(size=(3, 9))(Input((5, 4, 3))).shape == (3, 9, 3)
    assert Resize(2).flops((5, 4, 3)) == 0
    assert Resize(2, mode="linear").flops((5, 4, 3)) == 3 * (10 * 4 * 3 + 10 * 8 * 3)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Resize(), "expected either a scale or a size, got scale=None and size=None"),
        (lambda: Resize(2, 4), "expected either a scale or a size, got scale=2 and size=4"),
        (lambda: Resize(2, mode="cubic"), "mode: expected one of nearest, .* got 'cubic'"),
        (lambda: Resize(2, mode="bilinear")(Input((4, 2))), "mode 'bilinear' does not fit 1 spatial axes"),
        (lambda: Resize((2, 2, 2))(Input((4, 4, 2))), r"expected one number or 2, got \(2, 2, 2\)"),
        (lambda: Resize(-1)(Input((4, 4, 2))), "a scale must be positive, got -1"),
        (lambda: Resize(0.1)(Input((4, 4, 2))), r"nothing would be left of \(4, 4\): \(0, 0\)"),
        (lambda: Resize(2)(Input((4,))), "does not fit 0 spatial axes"),
    ],
)
def test_errors_name_what_is_wrong(make, message):
    with pytest.raises(ValueError, match=message):
        make()
