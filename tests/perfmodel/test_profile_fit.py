"""Lines through measured times."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.perfmodel.profile.messages import SIZES
from halograd.perfmodel.profile.record import Fit, fit_line
from halograd.schema import build

ALPHAS, BETAS = st.floats(1e-7, 1e-2), st.floats(1e-12, 1e-7)


@given(alpha=ALPHAS, beta=BETAS)
def test_exact_lines_are_found(alpha, beta):
    times = [alpha + beta * n for n in SIZES]
    fit = fit_line(SIZES, times)
    assert fit.error < 1e-6
    for n, t in zip(SIZES, times):
        assert math.isclose(fit.at(n), t, rel_tol=1e-6)


@given(alpha=st.floats(1e-6, 1e-3), beta=st.floats(1e-10, 1e-8), seed=st.integers(0, 100))
def test_noise_of_five_percent_is_survived(alpha, beta, seed):
    sizes = np.array([8, 64, 512, 4096, 32768, 2**18, 2**21, 2**23, 2**24, 2**25])
    noise = 1 + 0.05 * np.random.default_rng(seed).uniform(-1, 1, len(sizes))
    fit = fit_line(sizes, (alpha + beta * sizes) * noise)
    assert fit.error < 0.06
    # Where a number decides the times at all, it is found.
    if beta * sizes[0] < 0.01 * alpha:
        assert fit.alpha == pytest.approx(alpha, rel=0.1)
    if beta * sizes[-1] > 30 * alpha:
        assert fit.beta == pytest.approx(beta, rel=0.1)


def test_one_disturbed_size_does_not_bend_the_line():
    alpha, beta = 2e-4, 1e-9
    times = [alpha + beta * n for n in SIZES]
    times[3] *= 10
    fit = fit_line(SIZES, times)
    assert fit.alpha == pytest.approx(alpha, rel=0.05)
    assert fit.beta == pytest.approx(beta, rel=0.05)
    assert fit.error > 0.1, "and the error says that something was wrong"


def test_neither_number_is_negative():
    falling = fit_line([1, 1000, 100_000], [3e-6, 2e-6, 1e-6])
    assert falling.beta == 0 and falling.alpha > 0
    steep = fit_line([1000, 2000, 4000], [1e-6, 3e-6, 9e-6])
    assert steep.alpha == 0 and steep.beta > 0


@pytest.mark.parametrize(("sizes", "times"), [([8], [1.0]), ([8, 8], [1.0, 2.0]), ([8, 9], [1.0, 0.0])])
def test_what_makes_no_line_is_refused(sizes, times):
    with pytest.raises(ValueError, match="expected positive times of at least two sizes"):
        fit_line(sizes, times)


def test_a_fit_is_read_back_and_becomes_a_link():
    fit = fit_line(SIZES, [1e-6 + 1e-9 * n for n in SIZES])
    assert build(Fit, fit.to_dict()) == fit
    link = fit.link("auto")
    assert (link.alpha, link.beta) == (fit.alpha, fit.beta)
    assert link.note == "auto; fit within 0%"
