"""Tests of the connection of ranks: all in this process, over real sockets, with a clock that only the tests move."""

import contextlib
import os
import random
import resource
import selectors
import socket
from dataclasses import replace

import pytest

from halograd.comm import Communicator
from halograd.training import meeting as module
from halograd.training.meeting import ATTEMPT, STRANGERS, Listener, Meeting, join
from halograd.training.peers import FANOUT, Tree
from halograd.training.watch import ANSWERS, INTERVAL, TURN, Place, Watch
from halograd.training.watchdog import Watchdog, unwatched
from tests.harness.limits import LIMIT

#: Byte strings that are sent to a listener; HALOGRAD_FUZZ=100000 for more of them.
STRINGS = int(os.environ.get("HALOGRAD_FUZZ", "2000"))


class Party:
    """Several ranks that connect, driven by one selector."""

    def __init__(self):
        self.selector, self.meetings, self.listeners, self.now = selectors.DefaultSelector(), {}, {}, 0.0

    def listen(self, rank, everywhere=False):
        self.listeners[rank] = Listener(everywhere)
        return self.listeners[rank].where

    def add(self, rank, calls, downs=()):
        listener = self.listeners.get(rank)
        found = Meeting(rank, calls, listener, downs, list(calls), lambda: self.now, self.selector)
        self.meetings[rank] = found
        return found

    def step(self):
        """Process the ready sockets; return whether there were any."""
        events = self.selector.select(0.01)
        for key, _ in events:
            key.data()
        for found in self.meetings.values():
            found.expire()
        return bool(events)

    def drive(self, until=None):
        """Step until all are done. The clock stands still: no rank may have to wait for a limit."""
        while not (until() if until else all(found.done for found in self.meetings.values())):
            self.step()

    def settle(self):
        """Step until no data arrive any more."""
        while self.step():
            pass

    def close(self):
        for found in self.meetings.values():
            found.close()
            for line in found.lines.values():
                line.socket.close()
        self.selector.close()


@pytest.fixture
def party():
    found = Party()
    yield found
    found.close()


def call(where):
    return socket.create_connection(("127.0.0.1", where.port))


def exchange(party, one, other):
    """Send a message from one rank to another on their connection."""
    party.meetings[one].lines[other].send({"kind": "hello", "from": one})
    line, found = party.meetings[other].lines[one], []
    line.socket.setblocking(True)
    while not found:
        found = line.receive()
    assert found == [{"kind": "hello", "from": one}]


def whole_tree(party, tree):
    """Return all connections of a tree."""
    ranks = range(len(tree.hosts))
    where = {rank: party.listen(rank) for rank in ranks if tree.downs(rank)}
    for rank in ranks:
        party.add(rank, {up: where[up] for up in tree.ups(rank)}, tree.downs(rank))
    party.drive()


@pytest.mark.parametrize("size", [1, 2, 3, FANOUT + 1, 40])
def test_all_ranks_meet(party, size):
    tree = Tree(["n"] * size)
    whole_tree(party, tree)
    for rank in range(size):
        assert set(party.meetings[rank].lines) == {*tree.ups(rank), *tree.downs(rank)}
        for up in tree.ups(rank):
            exchange(party, rank, up)
            exchange(party, up, rank)


def test_a_listener_for_all_hosts(party):
    where = party.listen(0, everywhere=True)
    assert len(where.addresses) > 1 and where.addresses[0] == "127.0.0.1"
    party.add(0, {}, [1])
    party.add(1, {0: where})
    party.drive()
    exchange(party, 1, 0)


def strings(where):
    """Return data that other programs may send, or damaged messages."""
    yield from (b"1\n", b"null\n", b"[]\n", b'{"word": "\xc3\xa9"}\n', b"[" * 60_000, b"GET / HTTP/1.0\r\n\r\n", b"")
    yield from (where.password, where.password + b"\xff" * 8 + b"+", where.password + b"00000007+")
    yield from (where.password + b"-0000001", where.password[:-1] + b"x00000001+", b"\0" * 41, where.countersign * 2)
    rng = random.Random(8)
    while True:
        head = where.password[: rng.choice([0, 0, 1, 31, 32])]
        yield head + rng.randbytes(rng.choice([1, 7, 8, 9, 33, 40, 41, 42, 300]))


def test_random_strings_do_no_harm(party):
    """Ranks connect among random strings; no string counts as a rank, and none raises an error."""
    where = party.listen(0)
    hub = party.add(0, {}, [1, 2])
    source, opened = strings(where), []
    for number in range(STRINGS):
        stranger = call(where)
        with contextlib.suppress(OSError):  # sent away while sending
            stranger.setblocking(False)
            stranger.send(next(source))
        opened.append(stranger)
        if number == STRINGS // 2:
            party.add(1, {0: where})
        if number % 9 == 0:
            party.step()
        if number % 5 == 0:
            opened.pop(0).close()
        if len(opened) > 2 * STRANGERS:
            opened.pop(0).close()
    party.drive(lambda: 1 in hub.lines)
    party.add(2, {0: where})
    party.drive()
    exchange(party, 1, 0)
    exchange(party, 2, 0)
    for stranger in opened:
        stranger.close()
    party.settle()
    assert sorted(hub.lines) == [1, 2] and not hub._guests


def test_silent_connections_hold_up_no_rank(party):
    """Silent connections do not delay the ranks, and are closed later."""
    where = party.listen(0)
    hub = party.add(0, {}, [1, 2])
    silent = [call(where) for _ in range(3)]
    for rank in (1, 2):
        party.add(rank, {0: where})
    party.drive()
    party.settle()
    assert len(hub._guests) == 3
    party.now += ATTEMPT + 0.1
    party.step()
    assert len(hub._guests) == 0 and [s.recv(1) for s in silent] == [b""] * 3
    for stranger in silent:
        stranger.close()


def test_few_files_for_strangers(party):
    where = party.listen(0)
    hub = party.add(0, {}, [1])
    silent = [call(where) for _ in range(3 * STRANGERS)]
    party.settle()
    assert len(hub._guests) == STRANGERS
    party.add(1, {0: where})
    party.drive()
    for stranger in silent:
        stranger.close()


def test_connected_only_when_answered(party):
    """A connection counts only after an answer: the kernel accepts for a listener that does nothing."""
    where = party.listen(0)
    caller = party.add(1, {0: where})
    party.settle()
    (attempt,) = caller._calls
    assert attempt.socket is not None and not caller.lines
    first = attempt.socket
    for seconds in (ATTEMPT + 0.1, 1.0):
        party.now += seconds
        party.step()
    assert attempt.socket not in (first, None) and not caller.lines
    hub = party.add(0, {}, [1])
    party.drive()
    party.settle()
    assert len(hub.lines) == len(caller.lines) == 1 and not hub._guests
    exchange(party, 1, 0)
    exchange(party, 0, 1)


def test_an_impostor_is_not_believed(party):
    """If another program under the first address gives a wrong answer, the next address is tried."""
    where = party.listen(0)
    impostor = socket.create_server(("127.0.0.1", 0))
    caller = party.add(1, {0: replace(where, port=impostor.getsockname()[1])})
    guest, _ = impostor.accept()
    guest.sendall(b"x" * 32)
    party.drive(lambda: caller._calls[0].socket is None)
    assert not caller.lines
    guest.close()
    impostor.close()
    caller._calls[0].where = where
    party.add(0, {}, [1])
    party.now += 1.0
    party.drive()
    exchange(party, 0, 1)


@pytest.mark.parametrize("wrong", ["password", "rank"])
def test_strangers_are_not_let_in(party, wrong):
    where = party.listen(0)
    hub = party.add(0, {}, [1])
    guess = replace(where, password=b"0" * 32) if wrong == "password" else where
    stranger = party.add(1 if wrong == "password" else 5, {0: guess})
    for _ in range(10):
        party.settle()
        party.now += 1.0
    assert not hub.lines and not stranger.lines


def test_no_more_open_files(party, monkeypatch):
    """A rank that cannot accept a connection for lack of open files accepts it later."""
    where = party.listen(0)
    hub = party.add(0, {}, [1])
    listener = hub.listener.socket
    failures = []

    class Full:
        def accept(self):
            failures.append(1)
            raise OSError(24, "Too many open files")

    hub.listener.socket = Full()
    party.add(1, {0: where})
    party.drive(lambda: failures)
    hub.listener.socket = listener
    party.drive()
    exchange(party, 1, 0)


def test_unknown_names(party, monkeypatch):
    """The name service knows the second name only."""
    where = replace(party.listen(0), addresses=("unknown.invalid", "127.0.0.1"))
    known = module._resolve
    monkeypatch.setattr(module, "_resolve", lambda name: () if name == "unknown.invalid" else known(name))
    party.add(0, {}, [1])
    party.add(1, {0: where})
    party.now += 1.0
    party.drive()
    exchange(party, 1, 0)


# -- many ranks -----------------------------------------------------------------------------------


@pytest.fixture
def files():
    """Fixture: enough open files for both ends of all connections of 2,048 ranks."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 6000:
        pytest.skip(f"needs 6000 open files, the hard limit is {before[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 6000), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Post:
    """A rank of the job below, which makes no progress and records the end of the job."""

    def __init__(self, rank, lines, ends):
        self.rank, self.lines, self.ends = rank, lines, ends

    def send(self, rank, message):
        self.lines[rank].send(message)

    def state(self):
        return "here"

    def place(self, idle):
        return Place(7, "forward", "conv1", "halo: conv1", "flags.py:88", idle)

    def say(self, rank, cause):
        self.ends.append((self.rank, rank, cause))

    def log(self, rank, cause):
        pass

    def end(self):
        pass

    def leave(self):
        pass


def test_2048_ranks(party, files):
    """All connect, rank 0 holds few connections, a head finds in one round that rank 0 does not answer."""
    tree = Tree([f"n{rank // 32}" for rank in range(2048)])
    whole_tree(party, tree)
    lines = [party.meetings[rank].lines for rank in range(2048)]
    assert [set(lines[r]) for r in range(2048)] == [{*tree.ups(r), *tree.downs(r)} for r in range(2048)]
    assert max(map(len, lines)) == len(lines[0]) == 2 * FANOUT

    ends = []
    watches = [Watch(tree, r, lines, 5.0, Post(r, lines[r], ends), lambda: party.now) for r in range(2048)]
    ready = selectors.DefaultSelector()
    for rank in range(1, 2048):  # rank 0 is frozen
        for line in lines[rank].values():
            ready.register(line.socket, selectors.EVENT_READ, (rank, line))
    begin = party.now
    while not ends:
        party.now += INTERVAL / 2
        for watch in watches[1:]:
            watch.tick()
        while events := ready.select(0):
            for key, _ in events:
                rank, line = key.data
                for message in line.receive():
                    watches[rank].heard(line.rank, message)
    ((speaker, culprit, text),) = ends
    assert (speaker, culprit) == (32, 0) == (tree.order[1], tree.order[0]) and "does not respond" in text
    assert party.now - begin <= 5.0 + TURN + ANSWERS + 2 * INTERVAL
    below = {rank for rank in tree.order if rank and not set(above(tree, rank)) & {0}}
    assert {rank for rank in range(2048) if watches[rank].over} == below and len(below) == 2048 - 1 - 16 - 256
    ready.close()


def above(tree, rank):
    """Return the ancestors of a rank up to a head."""
    found = []
    while not tree.is_head(rank):
        (rank,) = tree.ups(rank)
        found.append(rank)
    return found


# -- under MPI ------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("hosts", ["one", "many"])
def test_ranks_of_a_job(comm, hosts, monkeypatch):
    with Communicator(comm) as ranks:
        tree = Tree(["n"] * ranks.size if hosts == "one" else [f"n{rank}" for rank in range(ranks.size)])
        monkeypatch.setattr(module, "PATIENCE", LIMIT)
        if hosts == "many":  # which all have one address
            monkeypatch.setattr(module, "_own_addresses", lambda: ("127.0.0.1",))
        lines, joined = join(ranks, tree)
        everyone = set(range(ranks.size))
        assert set(lines) == everyone - {ranks.rank}
        assert joined == [everyone - {rank} for rank in range(ranks.size)]
        assert unwatched(tree, joined) == ""
        ranks.barrier()
        for line in lines.values():
            line.socket.close()


@pytest.mark.ranks(2, 4)
def test_a_rank_that_reaches_no_other(comm, monkeypatch):
    """With a firewall around the last rank all ranks learn of it after a while, and rank 0 can report it."""
    last = comm.size - 1
    monkeypatch.setattr(module, "PATIENCE", 1.0)
    if comm.rank == last:
        monkeypatch.setattr(module, "_resolve", lambda name: ())
    with Communicator(comm) as ranks:
        tree = Tree(["n"] * ranks.size)
        lines, joined = join(ranks, tree)
        assert joined[last] == set() and all(last not in others for others in joined)
        assert set(lines) == joined[ranks.rank]
        without_last = [set(range(last)) - {rank} for rank in range(last)] + [set()]
        expected = f"rank {last} on n (1 in all) cannot reach rank 0 on n and is not watched"
        assert unwatched(tree, without_last) == expected and unwatched(tree, joined) != ""
        ranks.barrier()
        for line in lines.values():
            line.socket.close()


@pytest.mark.ranks(2, 4)
def test_a_rank_that_cannot_listen(comm, monkeypatch):
    def fails(everywhere):
        raise OSError(24, "Too many open files")

    if comm.rank == 0:
        monkeypatch.setattr(module, "Listener", fails)
    with Communicator(comm) as ranks:
        tree = Tree(["n"] * ranks.size)
        lines, joined = join(ranks, tree)
        assert joined[0] == set() and joined[1] == set(range(2, ranks.size))
        missing = f"rank 1 on n ({ranks.size - 1} in all) cannot reach rank 0 on n and is not watched"
        assert unwatched(tree, joined) == missing
        ranks.barrier()
        for line in lines.values():
            line.socket.close()


@pytest.mark.ranks(1, 2)
def test_closing_when_the_thread_has_seen_it(comm, tmp_path, monkeypatch):
    """The thread may end before it is woken."""
    with Communicator(comm) as ranks:
        watchdog = Watchdog(ranks, 0.0, tmp_path / "log.jsonl")
        wake = watchdog._peers.wake
        monkeypatch.setattr(watchdog._peers, "wake", lambda: (watchdog._thread.join(), wake()))
        watchdog.close()
        assert not watchdog._peers.lines
