"""Tests of powers, exp, log, |x|, means and maxima over channels, and flips: exact under cuts, and their gradients."""

import numpy as np
import pytest

import halograd as hg
from halograd.device import as_dtype
from halograd.layers.resized import resized
from halograd.testing import check_layer
from tests.support.grids import axes_in_turn

SHAPE = (7, 6, 4)


def _functions(x):
    """Return a node that depends on every function, with inputs far from their singularities."""
    positive = hg.Affine(1, 0.5)(hg.Power(2)(x))
    found = [hg.Exp()(x), hg.Log()(positive), hg.Abs()(hg.Affine(1, 3.0)(x))]
    return hg.Add()(*found, *(hg.Power(p)(positive) for p in (0.5, -0.5, -1, 3, 1.7)))


CASES = {
    "functions": _functions,
    "flips": lambda x: hg.Add()(hg.Flip("height")(x), hg.Flip("width", "channel")(x)),
    "rows": lambda x: hg.Slice(2, 5, axis="height")(x),
    "channels": lambda x: hg.Concat()(hg.ChannelMax()(x), hg.ChannelMean()(x)),
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", CASES)
def test_exact(comm, turn, name):
    """Between convolutions; channels are cut where the layer allows it."""

    def chain():
        return lambda x: hg.Conv(2, 1, name="behind")(CASES[name](hg.Conv(4, 1, name="before")(x)))

    cut = ("sample", "height", "width") if name == "channels" else ("height", "width", "channel")
    check_layer(chain, SHAPE, batch=2, gradient=comm.size == 1, axes=axes_in_turn(comm.size, cut, turn))


def test_the_first_token_is_selected_at_other_extents():
    tokens = hg.Conv(3, 1, name="c")(hg.Input((8, 3), name="x"))
    network = hg.Network(hg.Slice(0, 1, axis="width")(hg.Token(1, name="t")(tokens)))
    assert resized(network, (12,)).outputs["output"].shape == (1, 3)


def test_the_first_of_equal_maxima_receives_the_gradient():
    from mpi4py import MPI

    from halograd.comm import Communicator
    from halograd.testing import random_array, run_layer

    x = np.array([[[1.0, 2.0, 2.0]], [[-1.0, -1.0, -1.0]]])
    with Communicator(MPI.COMM_SELF) as alone:
        found = run_layer(hg.ChannelMax, [(1, 3)], alone, {}, shift={"x0": x - random_array(x.shape, "x0")})
    np.testing.assert_allclose(found["y"], [[[2.0]], [[-1.0]]])
    np.testing.assert_array_equal(found["dx0"] != 0, [[[False, True, False]], [[True, False, False]]])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda x: hg.Power(0)(x), r"Power: expected a finite exponent other than 0, got 0"),
        (lambda x: hg.Flip("depth")(x), r"Flip: expected some of height, width, channel, the axes of .*'depth'"),
        (lambda x: hg.Slice(0, 1, axis="depth")(x), r"Slice: axis: expected one of height, width, channel, .*'depth'"),
        (lambda x: hg.Slice(0, 8, axis="height")(x), r"Slice: expected at most 7, the rows of the input, got 8"),
        (lambda x: hg.Flip()(x), r"Flip: expected some of height, width, channel"),
    ],
)
def test_settings_that_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(hg.Input(SHAPE))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_the_slope_of_a_root_is_limited_only_below_the_smallest_normal_number(dtype):
    """bfloat16 has the exponents of float32: small numbers keep their slopes."""
    dtype = as_dtype(dtype)
    smallest = 2.0**-14 if dtype.name == "float16" else 1e-30
    x = np.array([0, smallest, 4 * smallest], dtype)
    slopes = np.empty_like(x)
    hg.Power(0.5).slopes(x, slopes)
    assert np.isfinite(slopes).all()
    np.testing.assert_allclose(slopes[1:].astype(float), 0.5 / np.sqrt(x[1:].astype(float)), rtol=0.02)
