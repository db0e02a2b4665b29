"""Collectives over nodes and switches against values composed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.perfmodel import collectives
from halograd.perfmodel.hierarchy import GROUP_COLLECTIVES, group_seconds
from halograd.perfmodel.machine import MACHINES, Link, Machine, Stage

IN, OUT, FAR = Link(1.0, 0.1), Link(10.0, 1.0), Link(20.0, 2.0)
NODE, SWITCH, ACROSS = Stage("node", 4, IN, 4), Stage("switch", 8, OUT), Stage("across", 2, FAR)


@pytest.mark.parametrize("name", GROUP_COLLECTIVES)
def test_one_stage_is_the_flat_collective(name: str) -> None:
    flat = getattr(collectives, name)
    for nbytes in (1.0, 1e3, 1e6):
        assert group_seconds(name, nbytes, [SWITCH]) == flat(nbytes, 8, OUT)
    assert group_seconds(name, 100, []) == group_seconds(name, 0, [NODE, SWITCH]) == 0


def test_allreduce_by_hand() -> None:
    # 1 byte is latency alone: reduce-scatter and all-gather on 4, recursive doubling on 8
    small = 2 * (2 * 1 + 0.1 * 0.75) + 3 * (10 + 1)
    assert group_seconds("allreduce", 1, [NODE, SWITCH]) == pytest.approx(small)
    # the node's one adapter carries the whole vector, so the outer all-reduce is of all of it
    large = 2 * (2 * 1 + 0.1 * 0.75e6) + 6 * 10 + 2 * 1e6 * 7 / 8
    ring = 2 * 31 * 10 + 2 * 1e6 * 31 / 32
    assert group_seconds("allreduce", 1e6, [NODE, SWITCH]) == pytest.approx(min(large, ring))
    # with an adapter per device, a quarter of it
    rails = [NODE._replace(sharing=1), SWITCH]
    assert group_seconds("allreduce", 1e6, rails) == pytest.approx(2 * (2 + 0.75e5) + 60 + 2 * 0.25e6 * 7 / 8)


def test_three_stages_by_hand() -> None:
    """Nodes of a switch have adapters of their own: an eighth of the vector goes on from each."""
    within = 2 * (2 * 1 + 0.1 * 0.75 * 8) + 2 * (3 * 10 + 8 * 7 / 8)
    assert group_seconds("allreduce", 8, [NODE, SWITCH, ACROSS]) == pytest.approx(within + 20 + 2 * 1)
    gather = (2 + 0.1 * 0.75 * 8) + (30 + 7) + (20 + 2 * 0.5)
    assert group_seconds("all_gather", 8, [NODE, SWITCH, ACROSS]) == pytest.approx(gather)
    assert group_seconds("reduce_scatter", 8, [NODE, SWITCH, ACROSS]) == pytest.approx(gather)


def test_trees_and_all_to_all_by_hand() -> None:
    assert group_seconds("broadcast", 1, [NODE, SWITCH]) == pytest.approx(2 * 1.1 + 3 * 11)
    assert group_seconds("reduce", 1, [NODE, SWITCH], gamma=0.5) == pytest.approx(2 * 1.6 + 3 * 11.5)
    # everybody on the node sends through one adapter: four times the bytes
    inside, outside = 3 * 1 + 0.1 * 0.75e6, 7 * 10 + 4e6 * 7 / 8
    assert group_seconds("all_to_all", 1e6, [NODE, SWITCH]) == pytest.approx(inside + outside)


@pytest.mark.parametrize("name", GROUP_COLLECTIVES)
@given(nbytes=st.floats(0, 1e9), factor=st.floats(1, 10), ranks=st.integers(1, 600), machine=st.sampled_from(MACHINES))
def test_monotonic_in_bytes(name: str, nbytes: float, factor: float, ranks: int, machine: str) -> None:
    stages = Machine.load(machine).stages(range(ranks))
    less = group_seconds(name, nbytes, stages)
    assert 0 <= less <= group_seconds(name, nbytes * factor, stages) * (1 + 1e-12)
    assert (less == 0) == (ranks == 1 or nbytes == 0)


def test_unknown_collective() -> None:
    with pytest.raises(ValueError, match=r"expected a collective of allreduce, .*, got 'scan'"):
        group_seconds("scan", 1, [NODE])
