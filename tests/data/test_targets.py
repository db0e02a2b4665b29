"""Rules that reduce cells to patches."""

from __future__ import annotations

import numpy as np
import pytest

from halograd.data.errors import DataError
from halograd.data.targets import RULES, TargetReduction
from halograd.dtensor.box import Box


def brute_force(rule: str, patch: np.ndarray) -> float:
    cells = patch.ravel()
    middle = patch[tuple((n - 1) // 2 for n in patch.shape)]
    return {
        "any": float(any(c == 1 for c in cells)),
        "all": float(all(c == 1 for c in cells)),
        "majority": float(sum(cells) > len(cells) / 2),
        "fraction": sum(cells) / len(cells),
        "max": max(cells),
        "center": middle,
    }[rule]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("factors", [(4,), (2, 3), (2, 2, 3)])
def test_rules_against_a_loop(rule: str, factors: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    patches = (3, 2, 2)[: len(factors)]
    cells = rng.integers(0, 2, (2, *(p * f for p, f in zip(patches, factors)), 2)).astype(np.float32)
    out = np.empty((2, *patches, 2), np.float32)
    TargetReduction(rule, factors).apply(cells, out)
    for at in np.ndindex(*out.shape):
        n, *where, c = at
        patch = cells[(n, *(slice(w * f, (w + 1) * f) for w, f in zip(where, factors)), c)]
        assert out[at] == pytest.approx(brute_force(rule, patch)), (rule, at)


def test_boxes_and_shapes() -> None:
    reduction = TargetReduction("any", (4, 2))
    assert reduction.coarse_shape((8, 6, 1)) == (2, 3, 1)
    assert reduction.fine_box(Box((1, 1, 0, 0), (2, 2, 3, 1))) == Box((1, 4, 0, 0), (2, 8, 6, 1))
    reduction.apply(np.empty((1, 0, 6, 1)), np.empty((1, 0, 3, 1)))


def test_wrong_arguments() -> None:
    with pytest.raises(DataError, match=r"target rule: expected one of any, all, .* got 'most'"):
        TargetReduction("most", (2,))
    with pytest.raises(DataError, match=r"expected 1 or more on every spatial axis, got \(0, 2\)"):
        TargetReduction("any", (0, 2))
    with pytest.raises(DataError, match=r"divisible into patches of \(4, 2\), got \(6, 6\)"):
        TargetReduction("any", (4, 2)).coarse_shape((6, 6, 1))
    with pytest.raises(DataError, match=r"expected cells for patches \(1, 2, 1\) of \(2,\), got shape \(1, 5, 1\)"):
        TargetReduction("any", (2,)).apply(np.zeros((1, 5, 1)), np.zeros((1, 2, 1)))
