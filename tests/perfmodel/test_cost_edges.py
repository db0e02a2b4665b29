"""Tests of redistribution tables against single exchanges, and of hand-computed link times of machines."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halograd.dtensor import Groups
from halograd.lowering.operations import Sum
from halograd.lowering.views import Buffer
from halograd.perfmodel.cost.network_costs import Grids, edge_seconds, redistributed_bytes
from halograd.perfmodel.cost.network_model import NetworkModel
from halograd.perfmodel.cuts import candidates
from halograd.perfmodel.machine import LEVELS, Efficiency, Link, Machine, Overheads
from halograd.program.traffic import Move
from tests.perfmodel.pricing import cut, priced
from tests.perfmodel.test_cost_traffic import RANKS, parts, shapes

#: One node, messages of 1 s and bytes of 1/8 s; nothing else costs anything.
LINK = Link(1.0, 0.125)
MACHINE = Machine(
    "one node", "made up", 16, 1, {"float32": 1e30}, 1e30, 2**40, 0.0, dict.fromkeys(LEVELS, LINK), Efficiency()
)


@given(shapes(), parts(), parts(), st.integers(0, RANKS - 1))
def test_boxes_overlaps_and_counts_of_a_rank(shape, before, after, rank):
    u, v = Grids.of(shape, (before,)), Grids.of(shape, (after,))
    start, stop = u.boxes(rank)
    box = cut(shape, before).box(rank)
    assert np.maximum(stop - start, 0).prod() == box.size
    if box.size:
        assert tuple(start[0]) == box.start and tuple(stop[0]) == box.stop
    peers, _ = Move(cut(shape, before), cut(shape, after), 1).peers(rank)
    kept = (box & cut(shape, after).box(rank)).size > 0
    assert v.count(start, stop)[0, 0] == len(peers) + kept
    assert u.fullest[0] == cut(shape, before).fullest


@given(shapes(), st.lists(parts(4), min_size=1, max_size=3), st.lists(parts(4), min_size=1, max_size=3))
def test_tables_are_single_exchanges_where_all_ranks_are_looked_at(shape, makers, readers):
    """With four ranks, all of which are examined, redistribution tables equal the costs of single exchanges."""
    found = edge_seconds(shape, makers, readers, NetworkModel(MACHINE), 4, 4)
    for i, before in enumerate(makers):
        for j, after in enumerate(readers):
            move = Move(cut(shape, before), cut(shape, after), 4, "redistribute")
            assert found[i, j] == pytest.approx(NetworkModel(MACHINE).exchange(move)[0])


SAMPLES, ROWS = (4, 1, 1, 1, 1, 1), (1, 1, 4, 1, 1, 1)


@pytest.mark.parametrize(("node", "seconds"), [(1, 33.0), (2, 33.0), (4, 0.0)])
def test_tables_know_the_nodes_of_an_emulated_network(node, seconds):
    """Redistribution tables count a message of 2 x 8 x 8 x 2 bytes between emulated nodes, and no delay within one."""
    shape, network_model = (4, 8, 8, 8), NetworkModel(MACHINE.emulated(1.0, 0.125, node=node))
    assert edge_seconds(shape, [SAMPLES], [ROWS], network_model, 2, 4) == pytest.approx(seconds)
    assert network_model.exchange(Move(cut(shape, SAMPLES), cut(shape, ROWS), 2))[0] == pytest.approx(seconds)


@pytest.mark.parametrize("packed", [False, True])
def test_tables_pack_where_links_do_not(packed):
    shape, runtime = (4, 8, 8, 8), Overheads(packed=packed)
    network_model = NetworkModel(dataclasses.replace(MACHINE, memory_bandwidth=16.0, launch=100.0, runtime=runtime))
    move = Move(cut(shape, SAMPLES), cut(shape, ROWS), 4)
    found = edge_seconds(shape, [SAMPLES], [ROWS], network_model, 4, 4)
    assert found == pytest.approx(sum(network_model.exchange(move)[:2]))
    assert (network_model.exchange(move)[1] == 0) is packed


def test_nothing_is_paid_between_equal_layouts():
    some = candidates_of((8, 32, 32, 16))
    seconds = edge_seconds((8, 32, 32, 16), some, some, NetworkModel(MACHINE), 4, 16)
    copies = redistributed_bytes((8, 32, 32, 16), some, some, 4)
    assert not np.diag(seconds).any() and not np.diag(copies).any()
    off = ~np.eye(len(some), dtype=bool)
    assert (seconds[off] > 0).all() and (copies[off] > 0).all()


def candidates_of(shape):
    from halograd.layers import Conv

    layer = Conv(shape[-1], 3, padding=1)
    return list({cut(shape, p): p for p in candidates(layer, [shape[1:]], shape[1:], shape[0], 16)}.values())


def test_messages_one_after_the_other_and_both_ways_at_once():
    """Messages in one direction are sequential, in both directions simultaneous: slabs send and receive two rows."""
    blocks = cut((1, 16, 8, 1), (1, 1, 4, 1, 1, 1))
    needed = blocks.map(None, lambda a, b: (max(0, a - 1), min(16, b + 1)), None, None)
    assert NetworkModel(MACHINE).exchange(Move(blocks, needed, 4))[0] == 2 * (1.0 + 8 * 4 / 8)


def test_devices_of_a_node_share_its_link():
    """Two devices of a node that send to the other node at once share its link."""
    links = {**MACHINE.links, "node": Link(0.0, 0.0)}
    machine = dataclasses.replace(MACHINE, devices_per_node=2, nodes_per_switch=8, links=links)
    blocks = cut((1, 8, 8, 1), (1, 1, 2, 2, 1, 1))
    needed = blocks.map(None, lambda a, b: (max(0, a - 1), min(8, b + 1)), None, None)
    assert NetworkModel(machine).exchange(Move(blocks, needed, 4))[0] == 1.0 + 2 * 4 * 4 / 8


@pytest.mark.parametrize("level", ["node", "across"])
def test_an_emulated_network_is_known_as_one_where_it_was_measured(level):
    """A network is known as emulated if the link within nodes or the link across nodes was measured on one."""
    links = {**MACHINE.links, level: Link(1.0, 0.125, "emulated:alpha=1,beta=0.125", emulated=True)}
    assert NetworkModel(dataclasses.replace(MACHINE, links=links)).emulated


def test_sums_that_were_measured_on_an_emulated_node_do_not_stand_for_sums_across():
    """Sums measured within an emulated node are not used for sums across nodes."""
    links = {**MACHINE.links, "across": Link(1.0, 0.125, "emulated:alpha=1,beta=0.125,node=2", emulated=True)}
    runtime = Overheads(sums={2: Link(0.001, 0.0), 4: Link(7.0, 0.0)}, work={2: Link(0.001, 0.0)})
    network_model = NetworkModel(dataclasses.replace(MACHINE, devices_per_node=2, links=links, runtime=runtime))
    assert network_model.sum(64, (2, 3)) == 0.001 and network_model.sum(64, range(4)) == 7.0
    assert network_model.sum(64, (0, 2)) == pytest.approx(1.0 + 64 / 8) and network_model.sum_work(64, (0, 2)) == 0.0
    assert network_model.sum_by_nodes(64, range(4)).across == pytest.approx(1.0 + 64 / 8)
    assert network_model.collective("all_gather", 64, range(4)) == pytest.approx(3 * 1.0 + 3 / 4 * 64 / 8), (
        "half of a ring"
    )


@pytest.mark.parametrize(("method", "part"), [("allreduce", 1.0), ("all_gather", 0.5)])
@pytest.mark.parametrize(("end", "expected"), [(3.0, 24.0), (0.5, 8.0)], ids=["in the wait", "in the background"])
def test_a_sum_takes_at_least_as_long_as_its_end_after_other_work(method, part, end, expected):
    """8 bytes take 8 s back to back; their end takes 24 s, or 4 s, after other work."""
    runtime = Overheads(sums={4: Link(0.0, 1.0)}, work={4: Link(0.0, end)})
    view = Buffer((2,), np.dtype("float32"), "").view
    total = Sum(Groups.whole(4), view, [8], "allreduce", None, method)
    price = priced(dataclasses.replace(MACHINE, runtime=runtime)).sum(total)
    assert (price.seconds, price.work) == (part * expected, part * 8 * end)


def test_the_shorter_of_two_measured_times_of_a_sum_is_taken():
    runtime = Overheads(sums={4: Link(6.0, 1.0)}, short_sums={4: Link(2.0, 3.0)})
    machine = dataclasses.replace(MACHINE, runtime=runtime)
    assert Machine.parse(machine.to_toml()) == machine
    network_model = NetworkModel(machine)
    assert network_model.sum(1, range(4)) == 2.0 + 3.0 and network_model.sum(8, range(4)) == 6.0 + 8.0
    assert network_model.collective("reduce_scatter", 1, range(4)) == 2.5


def test_the_emulated_network_has_no_contention_and_two_algorithms():
    emulated = NetworkModel(MACHINE.emulated(1.0, 0.125))
    assert emulated.emulated and not NetworkModel(MACHINE).emulated
    blocks = cut((1, 16, 8, 1), (1, 1, 4, 1, 1, 1))
    needed = blocks.map(None, lambda a, b: (max(0, a - 1), min(16, b + 1)), None, None)
    assert emulated.exchange(Move(blocks, needed, 4))[0] == 1.0 + 8 * 4 / 8
    assert emulated.sum(64, range(4)) == pytest.approx(2 * 3 * 1.0 + 2 * 3 / 4 * 64 / 8)  # a ring
    assert emulated.sum(8, range(4)) == pytest.approx(2 * (1.0 + 8 / 8))  # recursive doubling
    assert emulated.collective("all_gather", 8, range(4)) == pytest.approx(3 * 1.0 + 3 / 4 * 8 / 8)
    assert emulated.sum(64, range(1)) == 0.0
