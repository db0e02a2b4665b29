"""Boxes, windows, layouts and plans against brute force. No MPI."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.dtensor import (
    Box,
    Layout,
    Window,
    balanced_boundaries,
    hull,
    input_box,
    output_box,
    plan_exchange,
    subtract,
)

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
    rest = subtract(a, b)
    assert sum(p.size for p in rest) == len(set().union(*(points(p) for p in rest), set()))
    assert set().union(*(points(p) for p in rest), set()) == points(a) - points(b)
    assert hull([a, b]).contains(a) and hull([a, b]).contains(b)


def test_box_slices_select_the_box_from_an_array_that_begins_elsewhere():
    array = np.arange(12).reshape(3, 4)
    assert array[Box((6, 2), (8, 4)).slices((5, 0))].tolist() == [[6, 7], [10, 11]]


def test_box_and_hull_refuse_nonsense():
    with pytest.raises(ValueError, match="as many starts as stops"):
        Box((0,), (1, 2))
    with pytest.raises(ValueError, match="hull of no boxes"):
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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Layout.blocks((1, 8, 1), (1, 4, 1), 3), "parts need 4 ranks, there are 3"),
        (lambda: Layout.blocks((1, 8, 1), (1, 4), 4), "parts for the 3 axes"),
        (lambda: Layout.blocks((1, 8, 1), (1, 2, 1), 2, {1: (0, 9, 8)}), "3 rising boundaries from 0 to 8"),
        (lambda: Layout((4,), (Box((0,), (2,)),)), "2 of 4 elements"),
        (lambda: Layout((4,), (Box((0,), (5,)),)), "does not lie in an array"),
        (lambda: balanced_boundaries(3, 0), "at least one part"),
    ],
)
def test_layout_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def run_plan(sources, targets, shape, summed=False):
    """Run a plan in one process; the pieces of both ends must be the same."""
    whole = np.random.default_rng(0).standard_normal(shape)
    plans = [plan_exchange(sources, targets, r, summed=summed) for r in range(len(sources))]
    for r, plan in enumerate(plans):
        for piece in plan:
            assert piece in plans[piece.source] and piece in plans[piece.target] and r in (piece.source, piece.target)
    result = []
    for r, target in enumerate(targets):
        array = np.full(target.shape, np.nan)
        for piece in (p for p in plans[r] if p.target == r):
            view = array[piece.box.slices(target.start)]
            assert np.isnan(view).all() or summed, "an element arrives twice"
            view[...] = np.where(np.isnan(view), 0, view) + whole[piece.box.slices()]
        result.append(array)
    return whole, result


@given(st.integers(1, 5), st.integers(1, 5), st.integers(1, 12), st.integers(0, 7))
def test_plan_fills_halos_wider_than_blocks(parts, more, size, width):
    ranks = parts + more
    owned = Layout.blocks((1, size, 1), {"width": parts}, ranks).boxes
    held = tuple(b.replace(1, b.start[1] - width, b.stop[1] + width) if b.size else b for b in owned)
    whole, found = run_plan(owned, held, (1, size, 1))
    for box, array in zip(held, found):
        inside = box & Box.of_shape((1, size, 1))
        assert np.array_equal(array[inside.slices(box.start)], whole[inside.slices()])
        assert np.isnan(array).sum() == box.size - inside.size


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_plan_takes_replicas_once_and_from_itself_first(size, parts, replicas):
    ranks = max(parts, replicas)
    sources = Layout.replicated((size,), replicas).boxes + (Box((0,), (0,)),) * (ranks - replicas)
    cuts = balanced_boundaries(size, parts)
    targets = tuple(Box((a,), (b,)) for a, b in itertools.pairwise(cuts)) + (Box((0,), (0,)),) * (ranks - parts)
    whole, found = run_plan(sources, targets, (size,))
    for box, array in zip(targets, found):
        assert np.array_equal(array, whole[box.slices()])
    assert all(
        p.source == p.target for r in range(replicas) for p in plan_exchange(sources, targets, r) if p.target == r
    )


def test_plan_sums_all_summands():
    sources = Layout.replicated((6,), 3).summed().boxes
    targets = Layout.blocks((6, 1), (3, 1), 3).boxes
    targets = tuple(Box(b.start[:1], b.stop[:1]) for b in targets)
    whole, found = run_plan(sources, targets, (6,), summed=True)
    for box, array in zip(targets, found):
        assert np.allclose(array, 3 * whole[box.slices()])
