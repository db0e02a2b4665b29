"""Tests of connections between ranks in addition to MPI: their tree, their messages, and their end."""

import socket

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halograd.training.peers import FANOUT, LONGEST, Connection, Peers, Tree


def joined(tree):
    """Return every connection of a tree, by rank."""
    return [{*tree.ups(rank), *tree.downs(rank)} for rank in range(len(tree.hosts))]


@pytest.mark.parametrize("fanout", [1, 2, 3, FANOUT])
@settings(max_examples=20)
@given(per_node=st.integers(1, 9), size=st.integers(1, 100))
def test_connections(fanout, per_node, size):
    """Both ends know of each connection; there are few of them; every rank reaches every other."""
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
    """With 16,000 ranks each rank needs few files, and none is far from a head."""
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
    """Ranks behind a rank that has left, or without a connection, are not reached."""
    tree = Tree(["n"] * 11, fanout=2)
    connections = joined(tree)
    assert (tree.children(0), tree.children(3), tree.ups(9), tree.downs(1)) == ([3, 4], [9, 10], [3], [2, 5, 6])
    assert tree.reached(0, connections, without=[3]) == [0, 1, 2, 4, 5, 6, 7, 8]
    assert tree.reached(9, connections, without=[3]) == [9]
    assert tree.reached(8, connections, without=[0, 1]) == [2, 7, 8]
    lonely = [set() if rank == 4 else others - {4} for rank, others in enumerate(connections)]
    assert (tree.reached(0, lonely), tree.reached(4, lonely)) == ([0, 1, 2, 3, 5, 6, 7, 8, 9, 10], [4])


def pair():
    """Return both ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


class Hub:
    """Rank 0 with two other ranks in this process."""

    def __init__(self):
        self.messages, self.ends, self.others, lines = [], [], {}, {}
        for rank in (1, 2):
            one, other = pair()
            lines[rank], self.others[rank] = Connection(one, rank), Connection(other, 0)
        self.peers = Peers(lines, lambda *m: self.messages.append(m), lambda *e: self.ends.append(e))

    def wait(self, until):
        while not until():
            self.peers.wait(0.1)


@pytest.fixture
def hub():
    found = Hub()
    yield found
    found.peers.close()
    for line in found.others.values():
        line.socket.close()


def received(line, count=1):
    line.socket.setblocking(True)
    found = []
    while len(found) < count:
        found += line.receive()
    return found


def test_messages_both_ways(hub):
    hub.others[2].send({"kind": "place", "step": 3})
    hub.others[2].send({"kind": "stalled"})
    hub.wait(lambda: len(hub.messages) == 2)
    assert hub.messages == [(2, {"kind": "place", "step": 3}), (2, {"kind": "stalled"})]
    hub.peers.send(1, {"kind": "where"})
    hub.peers.send(7, {"kind": "where"})  # no connection
    assert received(hub.others[1]) == [{"kind": "where"}]


def test_a_rank_that_does_not_read_holds_up_no_other(hub):
    """Data that the kernel does not accept are sent in order when the other end reads again."""
    count = 0
    while not hub.peers.lines[1].unsent:
        hub.peers.send(1, {"kind": "place", "number": count, "text": "x" * LONGEST})
        count += 1
    hub.peers.send(2, {"kind": "where"})
    assert received(hub.others[2]) == [{"kind": "where"}]
    numbers = []
    hub.others[1].socket.settimeout(None)
    while len(numbers) < count:
        hub.peers.wait(0.0)
        hub.others[1].socket.setblocking(False)
        numbers += [message["number"] for message in hub.others[1].receive()]
    assert numbers == list(range(count)) and not hub.peers.lines[1].unsent


def test_an_end_without_a_word(hub):
    hub.others[1].socket.close()  # as the kernel does for a process that was killed
    hub.wait(lambda: hub.ends)
    assert hub.ends == [(1, "ended")] and list(hub.peers.lines) == [2]
    hub.peers.send(1, {"kind": "where"})


def test_taking_leave():
    hub = Hub()
    theirs = []
    other = Peers({0: hub.others[1]}, lambda *m: None, lambda *e: theirs.append(e))
    other.close()
    hub.wait(lambda: 1 not in hub.peers.lines)
    assert hub.ends == [(1, "left")]
    hub.peers.close()
    assert received(hub.others[2]) == [{"kind": "bye"}]
    hub.others[2].socket.close()


@pytest.mark.parametrize(
    ("error", "how"),
    [(TimeoutError(110, ""), "lost"), (OSError(113, "No route to host"), "lost"), (ConnectionResetError(), "ended")],
)
def test_a_node_that_does_not_answer(hub, monkeypatch, error, how):
    """A connection ends with the error that recv raises after the kernel has given it up."""

    def fails(self):
        raise error

    hub.others[2].send({"kind": "anything"})  # so that there is something to attend to
    monkeypatch.setattr(Connection, "receive", fails)
    hub.wait(lambda: hub.ends)
    assert hub.ends == [(2, how)]


def test_keep_alive_is_on(hub):
    line = hub.peers.lines[1].socket
    assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    idle, every, times = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    seconds = [line.getsockopt(socket.IPPROTO_TCP, name) for name in (idle, every, times)]
    assert seconds[0] + seconds[1] * seconds[2] <= 8  # within ten seconds, with the end of the job


def test_waking_up(hub):
    hub.peers.wake()
    hub.peers.wait(1e6)  # returns
