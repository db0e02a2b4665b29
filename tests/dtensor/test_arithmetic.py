"""Tests of boxes, windows, layouts and plans against brute force. No MPI."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.dtensor import (
    Blocks,
    Box,
    Groups,
    Layout,
    Window,
    balanced_boundaries,
    has_peers,
    hull,
    input_box,
    intervals,
    output_box,
    plan_exchange,
    shared_boundaries,
)
from halograd.dtensor.plan import owners
from tests.support.refusals import refusals

boxes = st.builds(
    lambda a, n: Box(tuple(a), tuple(i + j for i, j in zip(a, n))),
    st.lists(st.integers(-3, 6), min_size=2, max_size=2),
    st.lists(st.integers(0, 6), min_size=2, max_size=2),
)
windows = st.builds(
    Window, st.integers(1, 5), st.integers(1, 4), st.integers(0, 4), st.integers(0, 4), st.integers(1, 3)
)


def points(box: Box) -> set:
    return set(itertools.product(*(range(a, b) for a, b in box.ranges)))


@given(boxes, boxes)
def test_box_algebra_is_that_of_sets(a, b):
    assert points(a & b) == points(a) & points(b)
    assert a.contains(b) == (points(b) <= points(a))
    assert hull([a, b]).contains(a) and hull([a, b]).contains(b)


def test_box_slices_select_the_box_from_an_array_that_begins_elsewhere():
    array = np.arange(12).reshape(3, 4)
    assert array[Box((6, 2), (8, 4)).slices((5, 0))].tolist() == [[6, 7], [10, 11]]


def test_box_and_hull_refuse_nonsense():
    with pytest.raises(ValueError, match="as many starts as stops"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match="expected at least one box"):
        hull([])


def taps(w: Window, o: int) -> set[int]:
    return {o * w.stride - w.pad_lo + w.dilation * j for j in range(w.kernel)}


@given(windows, st.integers(1, 14), st.data())
def test_window_ranges_are_those_of_brute_force(w, size, data):
    outputs = 0
    while max(taps(w, outputs)) < size + w.pad_hi:
        outputs += 1
    assert w.output_size(size) == outputs
    a = data.draw(st.integers(0, outputs))
    b = data.draw(st.integers(a, outputs))
    if a < b:
        read = set().union(*(taps(w, o) for o in range(a, b)))
        assert w.input_range(a, b) == (min(read), max(read) + 1)
    c = data.draw(st.integers(0, size - 1))
    d = data.draw(st.integers(c + 1, size))
    first, last = w.output_range(c, d, outputs)
    reached = {o for o in range(outputs) if taps(w, o) & set(range(c, d))}
    assert reached <= set(range(first, last))
    spanned = [o for o in range(outputs) if min(taps(w, o)) < d and max(taps(w, o)) >= c]
    if spanned:
        assert last == max(spanned) + 1
        assert first >= min(spanned) - 1, "at most one output more than needed"
    if first < last:
        assert w.input_range(first, last)[0] <= c, "the padding on the left must not be negative"


def test_window_refuses_nonsense():
    with pytest.raises(ValueError, match="at least 1"):
        Window(0)
    with pytest.raises(ValueError, match=">= 0"):
        Window(3, pad_lo=-1)


@given(st.lists(windows, min_size=1, max_size=2), st.data())
def test_boxes_of_windows(ws, data):
    spatial = [data.draw(st.integers(6, 12)) for _ in ws]
    out = [w.output_size(n) for w, n in zip(ws, spatial)]
    whole = Box.of_shape((2, *out, 5))
    if not whole.size:
        return
    need = input_box(ws, whole, 3)
    assert need.ranges[0] == (0, 2) and need.ranges[-1] == (0, 3)
    back = output_box(ws, Box.of_shape((2, *spatial, 3)), (2, *out, 5))
    assert back.ranges[0] == (0, 2) and back.ranges[-1] == (0, 5)


@pytest.mark.parametrize(("size", "parts"), [(10, 3), (3, 5), (0, 2), (7, 1)])
def test_balanced_boundaries(size, parts):
    found = balanced_boundaries(size, parts)
    widths = np.diff(found)
    assert found[0] == 0 and found[-1] == size and len(found) == parts + 1
    assert widths.max() - widths.min() <= 1 and list(widths) == sorted(widths, reverse=True)


@given(st.integers(0, 300), st.lists(st.integers(1, 50), min_size=1, max_size=8))
def test_shared_boundaries(size, shares):
    """Boundaries are nearest to the exact shares; on an axis of twice the size they are twice these, within 1."""
    found = shared_boundaries(size, shares)
    exact = np.cumsum([0, *shares]) * size / sum(shares)
    assert found[0] == 0 and found[-1] == size and list(found) == sorted(found)
    assert np.abs(np.array(found) - exact).max() <= 0.5
    doubled = np.array(shared_boundaries(2 * size, shares))
    assert np.abs(doubled - 2 * np.array(found)).max() <= 1


def test_layout_blocks_cover_and_are_in_row_major_order():
    layout = Layout.blocks((2, 5, 3, 4), {"sample": 2, "height": 2}, 6)
    count = np.zeros(layout.shape, int)
    for box in layout.boxes:
        count[box.slices()] += 1
    assert (count == 1).all() and not layout.overlapping
    assert layout.boxes[1] == Box((0, 3, 0, 0), (1, 5, 3, 4))
    assert [b.shape for b in layout.boxes[4:]] == [(0, 5, 3, 4)] * 2, "samples of the usual shape, none of them"


def test_layouts_of_different_boundaries_are_different():
    even = Layout.blocks((1, 8, 1), {"width": 2}, 2)
    uneven = Layout.blocks((1, 8, 1), {"width": 2}, 2, boundaries={1: (0, 3, 8)})
    assert even != uneven and uneven.boxes[0].shape == (1, 3, 1)


test_layout_errors = refusals(
    (lambda: Layout.blocks((1, 8, 1), (1, 4, 1), 3), "parts need 4 ranks, there are 3"),
    (lambda: Layout.blocks((1, 8, 1), (1, 4), 4), "parts for the 3 axes"),
    (lambda: Layout.blocks((1, 8, 1), {"heigth": 2}, 2), "expected sample, width, channel for .*, got 'heigth'"),
    (lambda: Layout.blocks((1, 8, 1), (1, 2, 1), 2, {1: (0, 9, 8)}), "3 rising boundaries from 0 to 8"),
    (lambda: Layout((4,), Blocks([((0, 2),)])), r"expected intervals that cover \(4,\), got \(\(\(0, 2\),\),\)"),
    (lambda: Layout((4,), Blocks([((0, 5),)])), "must own every element and nothing else"),
    (lambda: Layout((4,), Blocks([((0, 2), (3, 4))])), "must own every element"),
    (lambda: Blocks([((0, 2), (2, 4))], 1), r"\(2,\) parts need 2 ranks, there are 1"),
    (lambda: balanced_boundaries(3, 0), "at least one part"),
)


def run_plan(sources, targets, shape, summed=False):
    """Run a plan in one process, and check that source and target of each piece agree on it."""
    whole = np.random.default_rng(0).standard_normal(shape)
    plans = [plan_exchange(sources, targets, r, summed=summed) for r in range(len(sources))]
    for r, plan in enumerate(plans):
        assert summed or has_peers(sources, targets, r) == any(piece.source != piece.target for piece in plan)
        assert plan == sorted(set(plan)), "every piece once, in an order that both ends share"
        for piece in plan:
            assert piece in plans[piece.source] and piece in plans[piece.target] and r in (piece.source, piece.target)
            assert sources[piece.source].contains(piece.box) and targets[piece.target].contains(piece.box)
    result = []
    for r, target in enumerate(targets):
        array = np.full(target.shape, np.nan)
        for piece in (p for p in plans[r] if p.target == r):
            view = array[piece.box.slices(target.start)]
            assert np.isnan(view).all() or summed, "an element arrives twice"
            view[...] = np.where(np.isnan(view), 0, view) + whole[piece.box.slices()]
        result.append(array)
    return whole, result


@st.composite
def arrays_in_blocks(draw):
    """Draw a shape, the blocks that own it on a number of ranks, and needed blocks with any cuts, such as halos."""
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    owned = [draw(uneven(n)) for n in shape]
    if draw(st.booleans()):  # replicas: an axis whose parts come several times
        axis = draw(st.integers(0, len(shape) - 1))
        owned[axis] = owned[axis] * draw(st.integers(2, 3))
    wanted = [draw(anything(n)) for n in shape]
    ranks = max(np.prod([len(axis) for axis in some]) for some in (owned, wanted))
    size = int(ranks) + draw(st.integers(0, 2))
    return shape, Blocks(owned, size), Blocks(wanted, size)


def uneven(size):
    cuts = st.lists(st.integers(0, size), max_size=2).map(sorted)
    return cuts.map(lambda c: tuple(itertools.pairwise((0, *c, size))))


def anything(size):
    interval = st.tuples(st.integers(-3, size), st.integers(0, size + 3)).map(lambda p: (p[0], p[0] + p[1]))
    return st.lists(interval, min_size=1, max_size=3).map(tuple)


@given(arrays_in_blocks())
def test_plans_bring_what_is_wanted_from_anywhere(case):
    shape, owned, wanted = case
    whole, found = run_plan(owned, wanted, shape)
    for box, array in zip(wanted, found):
        inside = box & Box.of_shape(shape)
        assert np.isnan(array).sum() == box.size - inside.size
        if inside.size:
            assert np.array_equal(array[inside.slices(box.start)], whole[inside.slices()])


@given(arrays_in_blocks())
def test_plans_sum_whatever_meets(case):
    shape, owned, wanted = case
    want = np.zeros(shape)
    for box in wanted.clipped(shape):
        want[box.slices()] += 1
    whole, found = run_plan(wanted.clipped(shape), owned, shape, summed=True)
    for box, array in zip(owned, found):
        assert np.allclose(np.nan_to_num(array), (want * whole)[box.slices()])


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_what_a_rank_owns_whole_it_does_not_ask_for(size, parts, more):
    targets = Blocks([intervals(size, parts)], parts + more)
    sources = Layout.replicated((size,), parts + more).boxes
    whole, found = run_plan(sources, targets, (size,))
    for box, array in zip(targets, found):
        assert np.array_equal(array, whole[box.slices()])
    assert all(p.source == p.target for r in range(parts + more) for p in plan_exchange(sources, targets, r))


def test_replicas_that_leave_gaps_between_them_are_refused():
    sources = Blocks([((2, 4), (0, 6))])
    with pytest.raises(ValueError, match="replicas: expected intervals that follow one another or are equal"):
        plan_exchange(sources, Blocks([((0, 1), (0, 5))]), 0)
    with pytest.raises(ValueError, match="got 2 and 3 ranks, 1 and 1 axes"):
        plan_exchange(sources, Blocks([((0, 1),)], 3), 0)


@given(arrays_in_blocks())
def test_blocks_are_a_sequence_of_boxes(case):
    shape, owned, wanted = case
    for blocks in (owned, wanted):
        boxes = [blocks[r] for r in range(len(blocks))]
        assert boxes == list(blocks) == list(blocks[:]) and blocks.box(len(blocks)) == blocks.nothing
        assert list(blocks.sizes()) == [box.size for box in boxes] and blocks.fullest == max(blocks.sizes())
        assert blocks == Blocks(blocks.axes, blocks.size) and hash(blocks) == hash(Blocks(blocks.axes, blocks.size))
        count = np.zeros([n + 9 for n in shape], int)
        for box in boxes:
            count[box.shift([3] * len(shape)).slices()] += 1
        assert blocks.overlapping == (count.max() > 1)
    assert owned.covers(shape)
    assert owned.contain(wanted) == all(a.contains(b) for a, b in zip(owned, wanted))
    both = owned.joined([owned.map(*[lambda a, b: (a - 1, b)] * len(shape))])
    assert all(a.contains(b) for a, b in zip(both, owned))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(-1, 5)), min_size=1, max_size=8))
def test_the_first_part_that_holds_an_element_owns_it(axis):
    parts = tuple((start, start + length) for start, length in axis)
    seen: set[int] = set()
    expected: list | None = []
    for start, stop in parts:
        own = sorted(set(range(start, stop)) - seen)
        seen.update(own)
        if own and own[-1] - own[0] + 1 != len(own):
            expected = None
            break
        expected.append((own[0], own[-1] + 1) if own else (start, start))
    if expected is None:
        with pytest.raises(ValueError, match="replicas: expected intervals that follow one another"):
            owners(Blocks((parts,)))
    else:
        assert [owners(Blocks((parts,)))[k].ranges[0] for k in range(len(parts))] == expected


@given(st.lists(st.tuples(st.integers(1, 3), st.sampled_from(["each", "all", "first"])), max_size=4), st.integers(0, 2))
def test_groups_are_those_of_coordinates(axes, more):
    grid = tuple(n for n, _ in axes)
    size = int(np.prod(grid, dtype=int)) + more
    agreeing = [d for d, (_, place) in enumerate(axes) if place == "each"]
    first = [d for d, (_, place) in enumerate(axes) if place == "first"]
    groups = Groups.agreeing(grid, agreeing, size, first)
    found: dict = {}
    for rank, at in enumerate(np.ndindex(*grid)):
        if any(at[d] for d in first):
            assert groups.color(rank) is None
        else:
            found.setdefault(tuple(at[d] for d in agreeing), []).append(rank)
    assert all(groups.color(rank) is None for rank in range(size - more, size))
    assert groups.count == len(found) and groups.is_whole == (list(found.values()) == [list(range(size))])
    for color, members in enumerate(found.values()):
        assert {groups.color(rank) for rank in members} == {color} and groups.members_each == len(members)
        assert list(groups.members(color)) == members
        assert [groups.leads(rank) for rank in members] == [True] + [False] * (len(members) - 1)
