"""Tests of learned factors per channel: initial values, rejected settings."""

import numpy as np

from halograd.layers import PReLU, Scale
from halograd.layers.parameter import Parameter
from tests.support.refusals import refusals

SHAPE = (7, 6, 5)


def test_initial_values():
    (gamma,) = Scale(1e-6).parameters((4, 4, 3)).values()
    assert np.array_equal(gamma.initial("l/gamma", 0), np.full(3, 1e-6)) and not gamma.decay
    assert list(Scale(bias=True).parameters((4, 4, 3))) == ["gamma", "beta"]
    assert PReLU().parameters((4, 4, 3))["slope"].initial("l/slope", 0).tolist() == [0.25]
    assert PReLU("channel", 0.5).parameters((4, 4, 3))["slope"].initial("l/slope", 0).tolist() == [0.5] * 3


test_refusals = refusals(
    (lambda: Scale(float("nan")), "Scale: init: expected a finite number, got nan"),
    (lambda: PReLU("all"), "slopes: expected 'one' or 'channel', got 'all'"),
    (lambda: PReLU(init=float("inf")), "PReLU: init: expected a finite number, got inf"),
    (lambda: Parameter((2,), "orthogonal"), "init: expected 'he', .* or a number, got 'orthogonal'"),
)
