"""Tests of the score of an ensemble: its integral, every cut, weights, and the scores of an evaluation."""

import numpy as np
import pytest

import halograd as hg
from halograd.testing import grids, random_array
from tests.layers.losses import AXES, check, make_executor, run_loss, scores_of
from tests.layers.test_losses import numeric_gradient

MEMBERS, GRID, BATCH = 3, (5, 3), 2


def integral(x, t):
    """Return ``integral (F(y) - [y >= t])^2 dy`` of members ``(M,)`` and a number."""
    ends = np.sort(np.append(x, t))
    middle = (ends[1:] + ends[:-1]) / 2
    share = (x[:, None] <= middle).mean(0)
    return np.sum(np.diff(ends) * (share - (middle >= t)) ** 2)


def score(fair, normalization="count"):
    def found(x, t, w=None):
        members = x.reshape(*t.shape[:-1], MEMBERS, -1)
        values = np.zeros(t.shape)
        for at in np.ndindex(*t.shape):
            own = members[(*at[:-1], slice(None), at[-1])]
            # The integral has f = 1 / M^2.
            pairs = np.abs(own[:, None] - own).sum() / 2
            plain = integral(own, t[at])
            values[at] = plain - fair * pairs * (1 / (MEMBERS * (MEMBERS - 1)) - 1 / MEMBERS**2)
        w = np.ones(t.shape) if w is None else np.broadcast_to(w, t.shape)
        return np.sum(w * values) / (w.sum() if normalization == "weights" else w.size)

    return found


CASES = {
    "fair": (lambda: hg.CRPS(MEMBERS), score(1.0)),
    "plain": (lambda: hg.CRPS(MEMBERS, 0.0), score(0.0)),
    "both, weights": (lambda: hg.CRPS(MEMBERS, 0.9, normalization="weights"), score(0.9, "weights")),
}


def arrays(weighted=False):
    x, t = random_array((BATCH, *GRID, MEMBERS * 2), "x"), random_array((BATCH, *GRID, 2), "t")
    w = 2 * np.random.default_rng(5).random((BATCH, *GRID, 1))
    w[0, 0] = 0
    return (x, t, w) if weighted else (x, t)


@pytest.mark.mpi
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_is_its_integral_on_every_grid(ranks, name, weighted):
    make, function = CASES[name]
    x, t, *w = arrays(weighted)
    at = (1, 2, 1, slice(None))
    gradient = np.zeros(x.shape)
    gradient[at] = numeric_gradient(lambda a, _: function(np.concatenate([x[:1], _put(x[1:], a)]), t, *w), x[at], t)
    for parts in grids(ranks.size, AXES):
        loss, dx = run_loss(make, (x, t, *w), ranks, parts)
        assert abs(loss - function(x, t, *w)) <= 1e-13
        assert np.abs(dx[at] - gradient[at]).max() <= 2e-9


def _put(x, values):
    x = x.copy()
    x[0, 2, 1] = values
    return x


@pytest.mark.mpi
@pytest.mark.parametrize("garbage", [1e6, np.nan])
def test_nothing_comes_of_a_position_without_weight(ranks, garbage):
    x, t, w = arrays(True)
    want = run_loss(CASES["fair"][0], (x, t, w), ranks, {"height": ranks.size}, "float32")
    x[0, 0], t[0, 0] = garbage, garbage
    loss, dx = run_loss(CASES["fair"][0], (x, t, w), ranks, {"height": ranks.size}, "float32")
    assert loss == want[0] and np.array_equal(dx, want[1]) and not dx[0, 0].any()


@pytest.mark.ranks(1)
def test_equal_members_have_the_error_of_one(ranks):
    x, t = random_array((BATCH, *GRID, 2), "x"), random_array((BATCH, *GRID, 2), "t")
    loss, dx = run_loss(CASES["fair"][0], (np.tile(x, MEMBERS), t), ranks, {})
    error, slope = run_loss(hg.AbsoluteError, (x, t), ranks, {})
    check((loss, dx), (error, np.tile(slope / MEMBERS, MEMBERS)))


@pytest.mark.ranks(1, 2)
def test_scores_of_an_evaluation(ranks):
    x, t, w = arrays(True)
    with make_executor(CASES["fair"][0], x.shape[1:], (t, w), ranks, {"height": ranks.size}) as executor:
        executor.set_input("x", x)
        found = scores_of(executor, ["weighted"])
    members, some = x.reshape(BATCH, *GRID, MEMBERS, 2), w > 0
    error = (members.mean(-2) - t)[some[..., 0]]
    assert found["mae"] == pytest.approx(np.abs(error).mean())
    assert found["rmse"] == pytest.approx(np.sqrt(np.square(error).mean()))
    assert found["spread"] == pytest.approx(np.sqrt(members.var(-2, ddof=1)[some[..., 0]].mean()))
    assert found["crps"] == pytest.approx(score(1.0, "weights")(x, t, some.astype(float)))
    assert found["loss"] == pytest.approx(score(1.0)(x, t, w))
    assert found["weighted_mae"] == pytest.approx((w * np.abs(members.mean(-2) - t)).sum() / w.sum() / 2)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: hg.CRPS(1), r"members: expected a whole number of at least 2, got 1"),
        (lambda: hg.CRPS(2, 1.5), r"fair: expected a number from 0 to 1, got 1\.5"),
        (lambda: hg.CRPS(2)(hg.Input((4, 3)), hg.Input((4, 2), "t")), r"2 members of 2 channels .* got \(4, 3\)"),
    ],
)
def test_refusals(make, text):
    with pytest.raises(ValueError, match=text):
        make()
