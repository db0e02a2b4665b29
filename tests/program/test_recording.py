"""Tests of the recorded graphs of a pass: their contents, and that no call changes its position."""

from hypothesis import given
from hypothesis import strategies as st

from halograd.program.recording import Item, sections, separate_pairs


@st.composite
def passes(draw):
    """Draw a pass of kernels and messages with paired starts and finishes, some of which a graph cannot contain."""
    items, open_pairs, number = [], [0], 1
    for at in range(draw(st.integers(0, 14))):
        what = draw(st.sampled_from(["kernel", "kernel", "start", "finish", "again"]))
        held = draw(st.integers(0, 4)) > 0
        if what == "start":
            open_pairs.append(number)
            number += 1
            items.append(Item(print, str(at), held, number - 1, True))
        elif what == "again" and 0 not in open_pairs:
            open_pairs.append(0)
            items.append(Item(print, str(at), held, 0, True))
        elif what == "finish" and open_pairs:
            pair = open_pairs.pop(draw(st.integers(0, len(open_pairs) - 1)))
            items.append(Item(print, str(at), held, pair))
        else:
            items.append(Item(print, str(at), held))
    return items


@given(passes(), st.sets(st.integers(0, 5)))
def test_graphs_hold_whole_pairs_and_only_what_they_may(items, elsewhere):
    out = separate_pairs(items, elsewhere)
    found = sections(items, out)
    assert [item for section in found for item in section.items] == items
    for section in found:
        if section.graph:
            assert all(item.held and item.pair not in elsewhere for item in section.items) and len(section.items) > 1
            pairs = {item.pair for item in section.items if item.pair is not None}
            for pair in pairs:
                assert [item.starts for item in section.items if item.pair == pair] == [True, False]
    assert separate_pairs(items, out) == out, "what another rank found changes nothing any more"


@given(passes())
def test_graphs_are_as_long_as_they_can_be(items):
    """Graphs are as long as possible: a pair is excluded only if a call of it, or one between, is not recordable."""
    out = separate_pairs(items)
    for pair in out:
        ends = [at for at, item in enumerate(items) if item.pair == pair]
        between = items[ends[0] : ends[-1] + 1]
        whole = [items[at].starts for at in ends] == [True, False]
        assert not whole or any(not item.held or (item.pair in out and item.pair != pair) for item in between)
    kinds = [(item.held and item.pair not in out) for item in items]
    assert len(sections(items, out)) == sum(a != b for a, b in zip([None, *kinds], kinds))


def test_a_sum_of_the_pass_before_is_in_no_graph():
    """A sum that the previous pass has started is in no graph, because no graph would wait for it."""
    items = [Item(print, "bn", pair=0), Item(print, "bn"), Item(print, "bn"), Item(print, "bn", pair=0, starts=True)]
    assert separate_pairs(items) == {0}
    assert [section.graph for section in sections(items, {0})] == [False, True, False]
