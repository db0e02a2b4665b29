"""Logistic regression: the maximum of the likelihood, block by block."""

from __future__ import annotations

import numpy as np
import pytest

from halograd.data.logistic import best_threshold, fit, intersection_over_union, predict


def draw(count: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(0, 1, (count, 3))
    p = 1 / (1 + np.exp(-(x @ [2.0, -1.0, 0.0] - 0.5)))
    return x, (rng.uniform(size=count) < p).astype(np.uint8)


def test_the_gradient_vanishes_and_the_weights_are_found() -> None:
    x, y = draw()
    model = fit(lambda: [(x, y)], ridge=0.0)
    residual = predict(model, x) - y
    assert np.abs(residual @ x / len(x)).max() < 1e-6 and abs(residual.mean()) < 1e-6
    np.testing.assert_allclose(model.weights, [2, -1, 0], atol=0.25)
    assert model.iterations < 12


def test_blocks_and_shapes_do_not_matter() -> None:
    x, y = draw()
    one = fit(lambda: [(x, y)])
    many = fit(
        lambda: [
            (x[k : k + 1000].reshape(10, 100, 3), y[k : k + 1000].reshape(10, 100, 1)) for k in range(0, 4000, 1000)
        ]
    )
    np.testing.assert_allclose(many.weights, one.weights, rtol=1e-9)
    assert many.loss == pytest.approx(one.loss)


def test_collinear_and_separable_data_stay_finite() -> None:
    x = np.linspace(-1, 1, 50)[:, None]
    model = fit(lambda: [(np.hstack([x, x, 0 * x]), x[:, 0] > 0)])
    assert np.isfinite(model.weights).all()
    assert intersection_over_union(predict(model, np.hstack([x, x, 0 * x])), x[:, 0] > 0) == 1


def test_best_threshold_against_a_loop() -> None:
    x, y = draw()
    model = fit(lambda: [(x, y)])
    threshold, score = best_threshold(model, lambda: [(x[:1500], y[:1500]), (x[1500:], y[1500:])])
    scores = [intersection_over_union(predict(model, x), y, t / 100) for t in range(1, 100)]
    assert score == pytest.approx(max(scores))
    assert threshold == pytest.approx((int(np.argmax(scores)) + 1) / 100)


def test_intersection_over_union_by_hand() -> None:
    assert intersection_over_union([0.9, 0.8, 0.1, 0.2], [1, 0, 1, 0]) == pytest.approx(1 / 3)
    assert intersection_over_union([0.1], [0]) == 1


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="expected at least one block of data, got none"):
        fit(lambda: [])
    x, y = draw(50)
    with pytest.raises(ValueError, match=r"expected 3 channels last, got shape \(2, 4\)"):
        predict(fit(lambda: [(x, y)]), np.zeros((2, 4)))
