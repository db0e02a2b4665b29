"""Learned factors per channel: torch; what they begin with; refusals."""

import numpy as np
import pytest

from halograd.layers import PReLU, Scale
from halograd.layers.parameter import Parameter
from tests.layers.cases import SCALES
from tests.layers.oracle import check_torch, torch
from tests.support.refusals import refusals

SHAPE = (7, 6, 5)


@pytest.mark.torch
@pytest.mark.parametrize("shape", [SHAPE, (9, 2), (5, 4, 3, 2)], ids=str)
def test_as_torch(shape):
    axes = (-1, *(1 for _ in shape[:-1]))
    check_torch(SCALES["scale"], [shape], lambda x, gamma: x * gamma.view(axes))
    shifted = lambda x, gamma, beta: x * gamma.view(axes) + beta.view(axes)  # noqa: E731
    check_torch(SCALES["scale and shift"], [shape], shifted)
    prelu = torch().nn.functional.prelu
    for name in ("one slope", "slopes"):
        check_torch(SCALES[name], [shape], lambda x, slope: prelu(x, slope))


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
