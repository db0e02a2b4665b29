"""Tests of the rules of attention along one axis against their definition."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halograd.kernels.attention import Everywhere, Neighborhood, Windows, runs


@st.composite
def rules(draw):
    kind = draw(st.sampled_from(["everywhere", "windows", "neighborhood"]))
    size = draw(st.integers(1, 14))
    if kind == "everywhere":
        return Everywhere(size, draw(st.integers(1, 9)))
    if kind == "windows":
        return Windows(size, draw(st.integers(1, 6)), draw(st.integers(-7, 7)))
    return Neighborhood(size, draw(st.integers(1, 6)), draw(st.integers(1, 4)))


@st.composite
def intervals(draw, size):
    a, b = (draw(st.integers(0, size)) for _ in range(2))
    return min(a, b), max(a, b)


def reads(reach, query, key):
    """Return whether a query reads a key, by the definition in words."""
    if isinstance(reach, Everywhere):
        return True
    if isinstance(reach, Windows):
        return (query - reach.shift) // reach.extent == (key - reach.shift) // reach.extent
    same = [p for p in range(reach.size) if p % reach.dilation == query % reach.dilation]
    first = same.index(query) - reach.extent // 2
    first = max(0, min(first, len(same) - reach.extent))
    return key in same[first : first + reach.extent]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_rules_by_brute_force(data):
    reach = data.draw(rules())
    queries, keys = data.draw(intervals(reach.queries)), data.draw(intervals(reach.keys))
    whole = np.array([[reads(reach, q, k) for k in range(reach.keys)] for q in range(reach.queries)])
    assert (reach.allowed(range(reach.queries), range(reach.keys)) == whole).all()
    rows = whole[slice(*queries)]
    columns = np.flatnonzero(rows.any(axis=0))
    assert reach.keys_of(*queries) == ((columns[0], columns[-1] + 1) if len(columns) else (0, 0))
    # Every pair of the intervals occurs in exactly one tile.
    count = np.zeros(whole.shape, int)
    for run in runs(reach, queries, keys):
        for i in range(run.count):
            q, k = (np.array(p) + i * run.step for p in (run.queries, run.keys))
            assert q[0] >= queries[0] and q[-1] < queries[1] and k[0] >= keys[0] and k[-1] < keys[1]
            allowed = np.ones((len(q), len(k)), bool) if run.allowed is None else run.allowed
            assert (allowed == reach.allowed(q, k)).all()
            count[np.ix_(q, k)] += allowed
            distance = (q[:, None] - k[None, :])[allowed]
            assert (distance % reach.dilation == 0).all() and (abs(distance) // reach.dilation < reach.extent).all()
    inside = np.zeros_like(count)
    inside[slice(*queries), slice(*keys)] = 1
    assert (count == whole * inside).all()


def test_windows_of_swin():
    """A shifted window equals a window of the rolled image with Swin's mask."""
    size, extent, shift = 14, 7, 3
    rolled = (np.arange(size) - shift) % size
    region = np.where(rolled < size - extent, 0, np.where(rolled < size - shift, 1, 2))
    same = (rolled[:, None] // extent == rolled[None] // extent) & (region[:, None] == region[None])
    assert (Windows(size, extent, shift).allowed(range(size), range(size)) == same).all()


def test_regular_tiles_are_one_run():
    assert [(r.count, len(r.queries)) for r in runs(Windows(20, 4, 2), (0, 20), (0, 20))] == [(1, 2), (4, 4), (1, 2)]
    assert [r.count for r in runs(Neighborhood(40, 5), (0, 40), (0, 40))] == [1, 6, 1]
    assert Windows(8, 4).bias_extent == 7 and Everywhere(3, 5).bias_extent == 9


@pytest.mark.parametrize("make", [lambda: Windows(4, 0), lambda: Neighborhood(4, 2, 0), lambda: Everywhere(-1, 2)])
def test_refused(make):
    with pytest.raises(ValueError, match=r"expected sizes >= 0, extents and dilations >= 1, got "):
        make()
