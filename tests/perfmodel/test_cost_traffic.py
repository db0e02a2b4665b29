"""Tests of traffic computed axis by axis against plans of every message, for products of intervals and layouts."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from halograd.dtensor import Blocks, plan_exchange
from halograd.layers.strategy import AXES
from halograd.program.traffic import Move
from tests.perfmodel.pricing import cut

RANKS = 12


@st.composite
def parts(draw, ranks=RANKS):
    """Draw parts per axis whose product is at most `ranks`."""
    found, left = [], ranks
    for _ in AXES:
        found.append(draw(st.integers(1, left)))
        left //= found[-1]
    return tuple(found)


@st.composite
def shapes(draw):
    spatial = draw(st.integers(0, 3))
    return tuple(draw(st.integers(1, 9)) for _ in range(spatial + 2))


def on_all(blocks: Blocks) -> Blocks:
    return Blocks(blocks.axes, RANKS)


def brute_force(source: Blocks, target: Blocks, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
    """Return messages and bytes per rank, counted piece by piece."""
    messages, nbytes = np.zeros(RANKS, int), np.zeros(RANKS, int)
    for rank in range(RANKS):
        pieces = plan_exchange(on_all(source), on_all(target), rank, summed=True)
        sent = [p for p in pieces if p.source == rank and p.target != rank]
        messages[rank] = len({p.target for p in sent})
        nbytes[rank] = sum(p.box.size for p in sent) * itemsize
    return messages, nbytes


@given(shapes(), parts(), parts())
def test_redistribution(shape, before, after):
    source, target = cut(shape, before), cut(shape, after)
    sent = Move(source, target, 4, "redistribute").sent(RANKS)
    messages, nbytes = brute_force(source, target, 4)
    assert list(sent.messages) == list(messages)
    assert list(sent.bytes) == list(nbytes)


@st.composite
def grown(draw, ranks=RANKS):
    """Draw a cut, and boxes that reach beyond it, overlap or are empty."""
    shape, some = draw(shapes()), draw(parts(ranks))
    blocks = cut(shape, some)
    reach = st.integers(0, 4)
    axes = tuple(
        tuple((a - draw(reach), b + draw(reach)) if draw(st.booleans()) else (a, a) for a, b in axis)
        for axis in blocks.axes
    )
    return blocks, Blocks(axes)


@given(grown())
def test_halos_and_what_every_rank_sends_to_whom(pair):
    owned, needed = pair
    move = Move(owned, needed, 8)
    for way, source, target in ((move, owned, needed), (move.adjoint, needed, owned)):
        messages, nbytes = brute_force(source, target, 8)
        sent = way.sent(RANKS)
        assert list(sent.messages) == list(messages)
        assert list(sent.bytes) == list(nbytes)
        for rank in range(RANKS):
            peers, sizes = way.peers(rank)
            assert rank not in peers
            assert len(peers) == messages[rank] and sizes.sum() == nbytes[rank]
            common = {p: math.prod((source.box(rank) & target.box(int(p))).shape) * 8 for p in peers}
            assert dict(zip(peers.tolist(), sizes.tolist())) == common
        senders, _, sizes = way.messages([3, 0])
        assert [sizes[senders == i].tolist() for i in (0, 1)] == [way.peers(rank)[1].tolist() for rank in (3, 0)]


@given(grown())
def test_all_that_is_sent_is_received(pair):
    move = Move(*pair, 4)
    assert move.sent(RANKS).bytes.sum() == move.adjoint.sent(RANKS).bytes.sum()
    assert move.sent(RANKS).messages.sum() == move.adjoint.sent(RANKS).messages.sum()


def test_a_thousand_ranks_are_as_exact():
    """Traffic of 32 x 32 blocks of 4 x 4, which exchange halos of width 1 with edges and corners, is exact."""
    shape = (1, 128, 128, 3)
    blocks = cut(shape, (1, 1, 32, 32, 1, 1))
    needed = blocks.map(None, lambda a, b: (max(0, a - 1), min(128, b + 1)), lambda a, b: (a - 1, b + 1), None)
    sent = Move(blocks, needed, 4).sent(1024)
    assert sent.messages[33] == 8 and sent.bytes[33] == (4 * 4 + 4) * 3 * 4
    assert sent.messages[0] == 3 and sent.bytes[0] == (2 * 4 + 1) * 3 * 4
