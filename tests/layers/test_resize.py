"""Tests of resizing: arithmetic against brute force."""

from fractions import Fraction

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from halograd.kernels.geometry import MODES, Resampling
from halograd.layers import Input, Resize
from tests.support.refusals import refusals

# -- arithmetic --------------------------------------------------------------------------------------


@st.composite
def resamplings(draw):
    size, mode = draw(st.integers(1, 9)), draw(st.sampled_from(MODES))
    outputs = draw(st.integers(1, 20))
    if mode in ("linear", "cubic") and draw(st.booleans()):
        return Resampling(size, outputs, Fraction(size - 1, max(1, outputs - 1)), mode, True)
    if mode == "area" or draw(st.booleans()):
        return Resampling(size, outputs, Fraction(size, outputs), mode)
    scale = Fraction(draw(st.integers(1, 7)), draw(st.integers(1, 4)))
    return Resampling(size, max(1, int(size * scale)), 1 / scale, mode)


def row(r, o):
    """Return the weights of all inputs in output `o`, by the definition of the mode."""
    position = o * float(r.ratio) if r.aligned else (o + 0.5) * float(r.ratio) - 0.5
    weights = np.zeros(r.size)
    if r.mode == "nearest":
        weights[min(int(Fraction(o) * r.ratio), r.size - 1)] = 1
    elif r.mode == "nearest-exact":
        weights[min(int((o + Fraction(1, 2)) * r.ratio), r.size - 1)] = 1
    elif r.mode == "area":
        window = slice(o * r.size // r.outputs, -(-(o + 1) * r.size // r.outputs))
        weights[window] = 1 / len(weights[window])
    elif r.mode == "cubic":
        for i in range(int(np.floor(position)) - 2, int(np.floor(position)) + 4):
            weights[min(max(i, 0), r.size - 1)] += keys(abs(position - i))
    else:
        position = min(max(position, 0.0), r.size - 1.0)
        weights = np.maximum(0.0, 1 - np.abs(np.arange(r.size) - position))
    return weights


def keys(x, a=-0.75):
    """Return the cubic convolution kernel of Keys (1981), equation 4 with 3/4 instead of 1/2."""
    if x <= 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * x**3 - 5 * a * x**2 + 8 * a * x - 4 * a if x < 2 else 0.0


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
    assert Resize(2, mode="cubic").flops((5, 4, 3)) == 7 * (10 * 4 * 3 + 10 * 8 * 3)
    assert Resize(2, mode="linear").flops((5, 4, 3)) == 3 * (10 * 4 * 3 + 10 * 8 * 3)


test_errors_name_what_is_wrong = refusals(
    (lambda: Resize(), "expected .* got scale=None and size=None"),
    (lambda: Resize(2, 4), "expected .* got scale=2 and size=4"),
    (lambda: Resize(2, mode="lanczos"), "mode: expected one of nearest, .* got 'lanczos'"),
    (lambda: Resize(2, align_corners=True), "expected the mode linear or cubic, got 'nearest'"),
    (lambda: Resize(2, mode="bicubic")(Input((4, 4, 4, 2))), "mode 'bicubic' does not fit 3 spatial axes"),
    (lambda: Resize(2, mode="bilinear")(Input((4, 2))), "mode 'bilinear' does not fit 1 spatial axes"),
    (lambda: Resize((2, 2, 2))(Input((4, 4, 2))), r"expected one number or 2, got \(2, 2, 2\)"),
    (lambda: Resize(-1)(Input((4, 4, 2))), "a scale must be positive, got -1"),
    (lambda: Resize(0.1)(Input((4, 4, 2))), r"nothing would be left of \(4, 4\): \(0, 0\)"),
    (lambda: Resize(2)(Input((4,))), "does not fit 0 spatial axes"),
)
