"""Tests of connections between ranks in addition to MPI: how they are made, their messages, and their end.

All ranks are in this process, over real sockets, except in the last tests. Time limits are as long as that of a test,
so that waiting for one fails, unless a test shortens it.
"""

import asyncio
import contextlib
import os
import random
import resource
import select
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from halograd.comm import Communicator
from halograd.training import peers as module
from halograd.training.checkpoints import CheckpointFolder
from halograd.training.peers import LONGEST, STRANGERS, Peers, join
from halograd.training.watch import ANSWERS, FANOUT, INTERVAL, TURN, Place, Tree, Watch
from halograd.training.watchdog import Watchdog, unwatched
from tests.harness.limits import LIMIT

#: Byte strings that are sent to a listener; HALOGRAD_FUZZ=100000 for more of them.
STRINGS = int(os.environ.get("HALOGRAD_FUZZ", "2000"))


class Party:
    """Several ranks in one event loop."""

    def __init__(self):
        self.loop, self.peers, self.tasks = asyncio.new_event_loop(), {}, []

    def listen(self, rank, downs=(1,), everywhere=False):
        self.peers[rank] = Peers(rank, downs, self.loop)
        return self.peers[rank].listen(everywhere)

    def add(self, rank, calls):
        """Start to connect a rank, which calls the ranks in `calls`; return its peers."""
        self.peers.setdefault(rank, Peers(rank, (), self.loop))
        self.tasks.append(self.loop.create_task(self.peers[rank].meet(calls)))
        return self.peers[rank]

    def run(self, coroutine):
        return self.loop.run_until_complete(coroutine)

    def drive(self, until=None):
        """Run the event loop until all ranks are connected, or until a condition is true."""

        async def run():
            while not (until() if until else all(task.done() for task in self.tasks)):
                await asyncio.sleep(1e-3)
            for task in self.tasks:
                if task.done():
                    task.result()

        self.run(run())

    def close(self):
        for task in self.tasks:
            task.cancel()
        self.run(asyncio.gather(*self.tasks, return_exceptions=True))
        for found in self.peers.values():
            self.run(found.close())
        self.loop.close()


@pytest.fixture
def party(monkeypatch):
    for name in ("PATIENCE", "ATTEMPT"):
        monkeypatch.setattr(module, name, LIMIT)
    found = Party()
    yield found
    found.close()


def call(where):
    return socket.create_connection(("127.0.0.1", where.port))


def events(party, rank, count=1):
    """Wait for a number of events of a rank, and return them."""

    async def run():
        found = []
        while len(found) < count:
            found += await party.peers[rank].wait(LIMIT)
        return found

    return party.run(run())


def exchange(party, one, other):
    """Send a message from one rank to another, and check that it arrives."""
    party.peers[one].send(other, {"kind": "hello", "from": one})
    assert events(party, other) == [(one, {"kind": "hello", "from": one})]


def pair(party):
    """Connect ranks 1 and 2 with rank 0; return the peers of rank 0."""
    where = party.listen(0, (1, 2))
    for rank, calls in enumerate([{}, {0: where}, {0: where}]):
        party.add(rank, calls)
    party.drive()
    return party.peers[0]


def whole_tree(party, tree):
    """Make all connections of a tree of ranks."""
    ranks = range(len(tree.hosts))
    where = {rank: party.listen(rank, tree.downs(rank)) for rank in ranks if tree.downs(rank)}
    for rank in ranks:
        party.add(rank, {up: where[up] for up in tree.ups(rank)})
    party.drive()


# -- set-up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, FANOUT + 1, 40])
def test_all_ranks_meet(party, size):
    tree = Tree(["n"] * size)
    whole_tree(party, tree)
    for rank in range(size):
        assert set(party.peers[rank].lines) == {*tree.ups(rank), *tree.downs(rank)}
        for up in tree.ups(rank):
            exchange(party, rank, up)
            exchange(party, up, rank)


def test_a_listener_for_all_hosts(party):
    where = party.listen(0, everywhere=True)
    assert where.addresses[0] == socket.gethostname()
    party.add(0, {})
    party.add(1, {0: replace(where, addresses=("127.0.0.1",))})
    party.drive()
    exchange(party, 1, 0)


def strings(where):
    """Yield data that other programs may send, and damaged messages."""
    yield from (b"1\n", b"null\n", b"[]\n", b'{"word": "\xc3\xa9"}\n', b"[" * 60_000, b"GET / HTTP/1.0\r\n\r\n", b"")
    yield from (where.password, where.password + b"\xff" * 8 + b"+", where.password + b"00000007+")
    yield from (where.password + b"-0000001", where.password[:-1] + b"x00000001+", b"\0" * 41, where.countersign * 2)
    rng = random.Random(8)
    while True:
        head = where.password[: rng.choice([0, 0, 1, 31, 32])]
        yield head + rng.randbytes(rng.choice([1, 7, 8, 9, 33, 40, 41, 42, 300]))


def test_random_strings_do_no_harm(party):
    """Ranks connect although random data arrive on other connections; these never count as ranks or raise errors."""
    where = party.listen(0, (1, 2))
    hub = party.add(0, {})
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
            party.run(asyncio.sleep(0))
        if number % 5 == 0:
            opened.pop(0).close()
        if len(opened) > 2 * STRANGERS:
            opened.pop(0).close()
    party.drive(lambda: 1 in hub.lines)
    for stranger in opened:
        stranger.close()
    party.drive(lambda: not hub._guests)
    assert list(hub.lines) == [1]
    party.add(2, {0: where})
    party.drive()
    exchange(party, 1, 0)
    exchange(party, 2, 0)
    assert sorted(hub.lines) == [1, 2]


def test_silent_connections_hold_up_no_rank(party, monkeypatch):
    """Silent connections do not delay ranks, and are closed after a while."""
    where = party.listen(0, (1, 2, 3))
    hub = party.add(0, {})
    silent = [call(where) for _ in range(3)]
    party.drive(lambda: len(hub._guests) == 3)
    for rank in (1, 2):
        party.add(rank, {0: where})
    party.drive(lambda: {*hub.lines} == {1, 2})
    assert len(hub._guests) == 3
    monkeypatch.setattr(module, "ATTEMPT", 0.01)
    late = call(where)
    party.drive(lambda: len(hub._guests) == 4)
    party.drive(lambda: len(hub._guests) == 3)
    assert late.recv(1) == b""
    monkeypatch.setattr(module, "ATTEMPT", LIMIT)
    party.add(3, {0: where})
    party.drive()
    assert not hub._guests and [s.recv(1) for s in silent] == [b""] * 3
    for stranger in (late, *silent):
        stranger.close()


def test_few_files_for_strangers(party):
    where = party.listen(0)
    hub = party.add(0, {})
    silent = [call(where) for _ in range(3 * STRANGERS)]
    oldest = silent[: 2 * STRANGERS]
    party.drive(lambda: select.select(oldest, [], [], 0)[0] == oldest)
    assert len(hub._guests) == STRANGERS and {stranger.recv(1) for stranger in oldest} == {b""}
    party.add(1, {0: where})
    party.drive()
    for stranger in silent:
        stranger.close()


def test_connected_only_when_answered(party, monkeypatch):
    """A connection counts only after an answer, because the kernel accepts connections for an idle listener."""
    where = party.listen(0)
    monkeypatch.setattr(module, "ATTEMPT", 0.05)
    attempts, connect = [], asyncio.open_connection

    async def counted(*arguments, **options):
        attempts.append(await connect(*arguments, **options))
        return attempts[-1]

    monkeypatch.setattr(module.asyncio, "open_connection", counted)
    caller = party.add(1, {0: where})
    party.drive(lambda: len(attempts) == 3)
    assert not caller.lines and all(writer.is_closing() for _, writer in attempts[:2])
    monkeypatch.setattr(module, "ATTEMPT", LIMIT)
    hub = party.add(0, {})
    party.drive()
    assert list(hub.lines) == [1] and list(caller.lines) == [0]
    exchange(party, 1, 0)
    exchange(party, 0, 1)


def test_an_impostor_is_not_believed(party, monkeypatch):
    """If another program at the first address gives a wrong answer, the caller tries the next address."""
    where, impostor = party.listen(0), socket.create_server(("127.0.0.1", 0))
    ports, connect = [impostor.getsockname()[1]], asyncio.open_connection

    async def misled(address, port, **options):
        return await connect(address, ports.pop() if ports else port, **options)

    monkeypatch.setattr(module.asyncio, "open_connection", misled)
    caller = party.add(1, {0: where})
    party.drive(lambda: not ports)
    guest, _ = impostor.accept()
    assert not caller.lines
    guest.sendall(b"x" * 32)
    party.add(0, {})
    party.drive()
    exchange(party, 0, 1)
    hello = b"".join(iter(lambda: guest.recv(64), b""))
    assert hello == where.password + b"00000001"  # without a confirmation
    guest.close()
    impostor.close()


@pytest.mark.parametrize("wrong", ["password", "rank"])
def test_strangers_are_not_let_in(party, monkeypatch, wrong):
    where, attempts, connect = party.listen(0), [], asyncio.open_connection

    async def counted(*arguments, **options):
        attempts.append(1)
        return await connect(*arguments, **options)

    monkeypatch.setattr(module.asyncio, "open_connection", counted)
    hub = party.add(0, {})
    guess = replace(where, password=b"0" * 32) if wrong == "password" else where
    stranger = party.add(1 if wrong == "password" else 5, {0: guess})
    party.drive(lambda: len(attempts) == 4)
    assert not hub.lines and not stranger.lines


def test_no_more_open_files(party, caplog):
    """A connection that cannot be accepted, because too many files are open, is accepted later."""
    where = party.listen(0)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    party.add(0, {})
    party.run(asyncio.sleep(0.01))
    waiting = call(where)
    resource.setrlimit(resource.RLIMIT_NOFILE, (waiting.fileno() + 1, before[1]))
    try:
        party.drive(lambda: "out of system resource" in caplog.text)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    party.add(1, {0: where})
    party.drive()
    exchange(party, 1, 0)
    waiting.close()


def test_unknown_names(party):
    """An address with an unknown name is skipped, and the next one is used."""
    where = replace(party.listen(0), addresses=("unknown.invalid", "127.0.0.1"))
    party.add(0, {})
    party.add(1, {0: where})
    party.drive()
    exchange(party, 1, 0)


# -- messages -------------------------------------------------------------------------------------


def test_messages_both_ways(party):
    hub = pair(party)
    party.peers[2].send(0, {"kind": "place", "step": 3})
    party.peers[2].send(0, {"kind": "stalled"})
    assert events(party, 0, 2) == [(2, {"kind": "place", "step": 3}), (2, {"kind": "stalled"})]
    hub.send(1, {"kind": "where"})
    hub.send(7, {"kind": "where"})  # no connection
    assert events(party, 1) == [(0, {"kind": "where"})]


def test_a_rank_that_does_not_read_holds_up_no_other(party):
    """Messages to a rank that does not read are kept, and sent in order later; other ranks are not delayed."""
    hub, count = pair(party), 0
    transport = hub.lines[1].transport
    while not transport.get_write_buffer_size():
        hub.send(1, {"kind": "place", "number": count, "text": "x" * (LONGEST // 2)})
        count += 1
    hub.send(2, {"kind": "where"})
    assert transport.get_write_buffer_size()
    assert events(party, 2) == [(0, {"kind": "where"})]
    assert [message["number"] for _, message in events(party, 1, count)] == list(range(count))
    assert not transport.get_write_buffer_size()


def test_an_end_without_a_word(party):
    hub = pair(party)
    party.peers[1].lines[0].close()  # as the kernel does for a process that was killed
    assert events(party, 0) == [(1, "ended")] and list(hub.lines) == [2]
    hub.send(1, {"kind": "where"})


def test_taking_leave(party):
    hub = pair(party)
    party.run(party.peers[1].close())
    assert events(party, 0) == [(1, "left")] and list(hub.lines) == [2]
    party.run(hub.close())
    assert events(party, 2) == [(0, "left")] and not hub.lines


@pytest.mark.parametrize(
    ("error", "how"),
    [(TimeoutError(110, ""), "lost"), (OSError(113, "No route to host"), "lost"), (ConnectionResetError(), "ended")],
)
def test_a_node_that_does_not_answer(party, error, how):
    """A connection ends with the error with which the kernel has closed it."""
    hub = pair(party)
    hub.lines[2].transport._fatal_error(error)  # as asyncio does when recv raises it
    assert events(party, 0) == [(2, how)]


def test_keep_alive_is_on(party):
    line = pair(party).lines[1].get_extra_info("socket")
    assert line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    idle, every, times = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    seconds = [line.getsockopt(socket.IPPROTO_TCP, name) for name in (idle, every, times)]
    assert seconds[0] + seconds[1] * seconds[2] <= 8  # within ten seconds, with the end of the job


def test_waking_up(party):
    hub = party.add(0, {})
    hub.wake()
    assert party.run(hub.wait(1e6)) == []


# -- many ranks -----------------------------------------------------------------------------------


@pytest.fixture
def files():
    """Raise the limit of open files to the number for both ends of all connections of 2,048 ranks."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] != resource.RLIM_INFINITY and before[1] < 6000:
        pytest.skip(f"needs 6000 open files, the hard limit is {before[1]}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 6000), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Post:
    """Stub of a rank that makes no progress and records the end of the job."""

    def __init__(self, rank, peers, ends):
        self.rank, self.send, self.ends = rank, peers.send, ends

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
    """2,048 ranks connect with few connections each, and a head finds in one round that rank 0 does not respond."""
    tree = Tree([f"n{rank // 32}" for rank in range(2048)])
    whole_tree(party, tree)
    lines = [set(party.peers[rank].lines) for rank in range(2048)]
    assert lines == [{*tree.ups(r), *tree.downs(r)} for r in range(2048)]
    assert max(map(len, lines)) == len(lines[0]) == 2 * FANOUT

    ends, now = [], 0.0
    posts = [Post(rank, party.peers[rank], ends) for rank in range(2048)]
    watches = [Watch(tree, rank, lines, 5.0, posts[rank], lambda: now) for rank in range(2048)]

    async def deliver():
        """Deliver messages until none arrive any more; rank 0 is frozen."""
        busy = True
        while busy:
            busy = False
            for _ in range(3):
                await asyncio.sleep(0)
            for rank in range(1, 2048):
                if party.peers[rank]._events:
                    busy = True
                    for sender, message in await party.peers[rank].wait(LIMIT):
                        watches[rank].heard(sender, message)

    while not ends:
        now += INTERVAL / 2
        for watch in watches[1:]:
            watch.tick()
        party.run(deliver())
    ((speaker, culprit, text),) = ends
    assert (speaker, culprit) == (32, 0) == (tree.order[1], tree.order[0]) and "does not respond" in text
    assert now <= 5.0 + TURN + ANSWERS + 2 * INTERVAL
    below = {rank for rank in tree.order if rank and not set(above(tree, rank)) & {0}}
    assert {rank for rank in range(2048) if watches[rank].over} == below and len(below) == 2048 - 1 - 16 - 256


def above(tree, rank):
    """Return the ancestors of a rank, up to and including a head."""
    found = []
    while not tree.is_head(rank):
        (rank,) = tree.ups(rank)
        found.append(rank)
    return found


# -- under MPI ------------------------------------------------------------------------------------


def close(peers):
    peers.run(peers.close())


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("hosts", ["one", "many"])
def test_ranks_of_a_job(comm, hosts, monkeypatch):
    with Communicator(comm) as ranks:
        tree = Tree(["n"] * ranks.size if hosts == "one" else [f"n{rank}" for rank in range(ranks.size)])
        monkeypatch.setattr(module, "PATIENCE", LIMIT)
        if hosts == "many":  # which all have one address
            monkeypatch.setattr(module, "_own_addresses", lambda: ("127.0.0.1",))
        peers, joined = join(ranks, tree)
        everyone = set(range(ranks.size))
        assert set(peers.lines) == everyone - {ranks.rank}
        assert joined == [everyone - {rank} for rank in range(ranks.size)]
        assert unwatched(tree, joined) == ""
        ranks.barrier()
        close(peers)


@pytest.mark.ranks(2)
def test_ranks_whose_main_thread_runs_a_loop(comm):
    """Ranks can connect while an event loop runs in the main thread, as in a notebook."""

    async def cell():
        with Communicator(comm) as ranks:
            peers, joined = join(ranks, Tree(["n", "n"]))
            assert joined == [{1}, {0}]
            threads = ThreadPoolExecutor(1)
            threads.submit(close, peers).result()

    asyncio.run(cell())


@pytest.mark.ranks(2, 4)
def test_a_rank_that_reaches_no_other(comm, monkeypatch):
    """If the last rank reaches no other, as behind a firewall, all ranks detect this, and rank 0 can report it."""
    last = comm.size - 1
    monkeypatch.setattr(module, "PATIENCE", 1.0)

    async def fails(*arguments, **options):
        raise OSError(113, "No route to host")

    if comm.rank == last:
        monkeypatch.setattr(module.asyncio, "open_connection", fails)
    with Communicator(comm) as ranks:
        tree = Tree(["n"] * ranks.size)
        peers, joined = join(ranks, tree)
        assert joined[last] == set() and all(last not in others for others in joined)
        assert set(peers.lines) == joined[ranks.rank]
        without_last = [set(range(last)) - {rank} for rank in range(last)] + [set()]
        expected = f"rank {last} on n (1 in all) cannot reach rank 0 on n and is not watched"
        assert unwatched(tree, without_last) == expected and unwatched(tree, joined) != ""
        ranks.barrier()
        close(peers)


@pytest.mark.ranks(2, 4)
def test_a_rank_that_cannot_listen(comm, monkeypatch):
    def fails(peers, everywhere):
        raise OSError(24, "Too many open files")

    if comm.rank == 0:
        monkeypatch.setattr(Peers, "listen", fails)
    with Communicator(comm) as ranks:
        tree = Tree(["n"] * ranks.size)
        peers, joined = join(ranks, tree)
        assert joined[0] == set() and joined[1] == set(range(2, ranks.size))
        missing = f"rank 1 on n ({ranks.size - 1} in all) cannot reach rank 0 on n and is not watched"
        assert unwatched(tree, joined) == missing
        ranks.barrier()
        close(peers)


@pytest.mark.ranks(1, 2)
def test_closing_when_the_thread_has_seen_it(comm, tmp_path, monkeypatch):
    """A watchdog can be closed if its thread ends before it is woken."""
    with Communicator(comm) as ranks:
        watchdog = Watchdog(ranks, 0.0, tmp_path / "log.jsonl", CheckpointFolder(tmp_path))
        wake = watchdog._peers.wake
        monkeypatch.setattr(watchdog._peers, "wake", lambda: (watchdog._thread.join(), wake()))
        watchdog.close()
        assert not watchdog._peers.lines


@pytest.mark.parametrize("sent", [b"", b'{"kind": "pla', b'{"kind": "place", "x": "' + b"a" * 70000 + b'"}\n'])
def test_a_connection_that_ends_within_a_message_has_ended(sent):
    async def run():
        peers = Peers(0, [1], asyncio.get_running_loop())

        async def serve(reader, writer):
            peers._expected = 1
            peers._add(1, reader, writer)

        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 16)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.write(sent)
        await writer.drain()
        writer.close()
        events = await peers.wait(LIMIT)
        server.close()
        return events, dict(peers.lines)

    events, lines = asyncio.run(run())
    assert [(rank, event) for rank, event in events] == [(1, "ended")] and not lines
