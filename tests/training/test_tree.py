"""Which ranks are connected beside MPI: arithmetic."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halograd.training.peers import FANOUT, Tree


def joined(tree):
    """Every connection of a tree, per rank."""
    return [{*tree.ups(rank), *tree.downs(rank)} for rank in range(len(tree.hosts))]


@pytest.mark.parametrize("fanout", [1, 2, 3, FANOUT])
@settings(max_examples=20)
@given(per_node=st.integers(1, 9), size=st.integers(1, 100))
def test_connections(fanout, per_node, size):
    """Both ends know of a connection; there are few of them; every rank reaches every other."""
    tree = Tree([f"n{rank // per_node}" for rank in range(size)], fanout)
    assert sorted(tree.order) == list(range(size)) and tree.order[0] == 0
    heads = [rank for rank in range(size) if tree.is_head(rank)]
    assert len(heads) == min(size, fanout + 1) == len({*heads}) and tree.ups(0) == []
    downs = [tree.downs(rank) for rank in range(size)]
    for rank in range(size):
        assert [up for up in range(size) if rank in downs[up]] == sorted(tree.ups(rank))
        assert len(tree.ups(rank)) + len(tree.downs(rank)) <= 2 * fanout
        assert set(tree.children(rank)) <= set(tree.downs(rank))
        if rank in heads:
            assert {*tree.ups(rank), *tree.downs(rank)} >= {*heads} - {rank}
        else:
            assert len(tree.ups(rank)) == 1 and rank in tree.children(tree.ups(rank)[0])
    assert tree.reached(size - 1, joined(tree)) == tree.order


@settings(max_examples=20)
@given(per_node=st.integers(1, 40), size=st.integers(1, 300))
def test_heads_are_on_many_hosts(per_node, size):
    hosts = [f"n{rank // per_node}" for rank in range(size)]
    tree = Tree(hosts)
    heads = [hosts[rank] for rank in range(size) if tree.is_head(rank)]
    assert len(set(heads)) == min(len(set(hosts)), FANOUT + 1)


def test_sixteen_thousand_ranks():
    """However many ranks there are, each needs few files; none is far from a head."""
    tree = Tree([f"n{rank // 64}" for rank in range(16_384)])
    connections = joined(tree)
    assert max(map(len, connections)) == 2 * FANOUT < 1024 // 8
    assert tree.reached(0, connections) == tree.order
    depths = []
    for rank in range(0, 16_384, 100):
        depth = 0
        while not tree.is_head(rank):
            (rank,), depth = tree.ups(rank), depth + 1
        depths.append(depth)
    assert max(depths) == 3


def test_what_is_reached():
    """Not what lies behind a rank that has left, nor what was never connected."""
    tree = Tree(["n"] * 11, fanout=2)
    connections = joined(tree)
    assert (tree.children(0), tree.children(3), tree.ups(9), tree.downs(1)) == ([3, 4], [9, 10], [3], [2, 5, 6])
    assert tree.reached(0, connections, without=[3]) == [0, 1, 2, 4, 5, 6, 7, 8]
    assert tree.reached(9, connections, without=[3]) == [9]
    assert tree.reached(8, connections, without=[0, 1]) == [2, 7, 8]
    lonely = [set() if rank == 4 else others - {4} for rank, others in enumerate(connections)]
    assert (tree.reached(0, lonely), tree.reached(4, lonely)) == ([0, 1, 2, 3, 5, 6, 7, 8, 9, 10], [4])
