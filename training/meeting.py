"""Set-up of connections between ranks in addition to MPI: each connection is requested, answered and confirmed.

::

    up (listens)                          down (calls)
       <------ password, rank (40 B) ------
       ------- countersign (32 B) -------->     wrong, or too late: call again
       <------ "+" ------------------------
       line                               line

Ranks exchange addresses, passwords and countersigns over MPI. A listener reads 41 bytes of fixed format and parses
nothing else, so data from strangers (port scanners, other jobs) do no harm. All connections are made concurrently, so a
stranger does not make a rank wait.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial

from ..comm import Communicator
from .peers import Connection, Tree

__all__ = ["Listener", "Meeting", "Where", "join"]

PATIENCE = 10.0  # time limit for all connections of a rank [s]
ATTEMPT = 2.0  # time limit for one connection to be requested, answered and confirmed [s]
RETRY = 0.1  # time between two attempts [s]
STRANGERS = 64  # maximum number of unconfirmed connections; the oldest is closed for a new one
WORD = 32  # characters of a password, and of a countersign
HELLO = WORD + 8  # password and rank
CONFIRMED = b"+"

Clock = Callable[[], float]


@dataclass(frozen=True)
class Where:
    """Addresses at which a rank listens, and the words by which both ends prove that they belong to the job."""

    addresses: tuple[str, ...]
    port: int
    password: bytes
    countersign: bytes


class Listener:
    """Socket on which a rank accepts connections of other ranks. Local.

    Parameters
    ----------
    everywhere
        Whether other hosts can reach it; False if all ranks are on this host.

    Raises
    ------
    OSError
        If no socket can be created.
    """

    def __init__(self, everywhere: bool) -> None:
        if not everywhere:
            self.socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
        elif socket.has_dualstack_ipv6():
            self.socket = socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
        else:
            self.socket = socket.create_server(("", 0), backlog=1024)
        self.socket.setblocking(False)
        words = [secrets.token_hex(WORD // 2).encode() for _ in range(2)]
        addresses = _own_addresses() if everywhere else ()
        self.where = Where(("127.0.0.1", *addresses), int(self.socket.getsockname()[1]), *words)

    def close(self) -> None:
        """Close the socket, so that it accepts no more connections."""
        self.socket.close()


def _own_addresses() -> tuple[str, ...]:
    """List names and addresses by which other nodes may reach this one, the most probable first."""
    names = [socket.gethostname(), socket.getfqdn()]
    with contextlib.suppress(OSError):
        names += [str(info[4][0]) for info in socket.getaddrinfo(names[0], None, type=socket.SOCK_STREAM)]
    return tuple(dict.fromkeys(names))


@lru_cache(maxsize=1024)
def _resolve(address: str) -> tuple[tuple[int, str], ...]:
    """Return families and numeric addresses of a name; none if it is unknown. Waits for the name service."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple((int(info[0]), str(info[4][0])) for info in found)


@dataclass(eq=False)
class _Guest:
    """Accepted connection that is not confirmed yet."""

    socket: socket.socket
    since: float
    received: bytes = b""


@dataclass(eq=False)
class _Call:
    """Connection to a rank that listens; `socket` is None between two attempts."""

    rank: int
    where: Where
    targets: Iterator[tuple[int, str] | None]
    since: float = 0.0
    socket: socket.socket | None = None
    received: bytes = b""


@dataclass
class Meeting:
    """Set-up of the connections of one rank. Local.

    Call the data of every key that `selector` returns, and `expire` from time to time, until `done`.

    Attributes
    ----------
    rank
        Rank of this process.
    calls
        Addresses of the ranks that this rank calls.
    listener, downs
        Socket of this rank (None if it does not listen), and the ranks that call it.
    near
        Ranks on the host of this rank.
    lines
        Complete connections, by rank.
    """

    rank: int
    calls: Mapping[int, Where]
    listener: Listener | None
    downs: Collection[int]
    near: Collection[int] = ()
    clock: Clock = time.monotonic
    selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)
    lines: dict[int, Connection] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._guests: dict[socket.socket, _Guest] = {}
        self._names = {_name(down): down for down in self.downs}
        self._calls = [_Call(up, where, _targets(where, up in self.near)) for up, where in self.calls.items()]
        if self.listener is not None:
            self.selector.register(self.listener.socket, selectors.EVENT_READ, self._accept)
        for call in self._calls:
            self._attempt(call)

    @property
    def done(self) -> bool:
        """Whether all connections are made."""
        return len(self.lines) == len(self.calls) + len(self.downs)

    def expire(self) -> None:
        """Drop connections that take too long, and retry calls."""
        now = self.clock()
        for guest in [g for g in self._guests.values() if now - g.since > ATTEMPT]:
            self._send_away(guest)
        for call in self._calls:
            if call.socket is not None and now - call.since > ATTEMPT:
                self._hang_up(call)
            elif call.socket is None and call.rank not in self.lines and now - call.since > RETRY:
                self._attempt(call)

    def close(self) -> None:
        """Drop all incomplete connections. The lines stay open."""
        for guest in list(self._guests.values()):
            self._send_away(guest)
        for call in self._calls:
            if call.socket is not None:
                self._hang_up(call)
        if self.listener is not None:
            self.selector.unregister(self.listener.socket)
            self.listener.close()

    # -- the rank that listens -----------------------------------------------------------------

    def _accept(self) -> None:
        assert self.listener is not None
        for _ in range(STRANGERS):  # not more at once, so that other events are processed too
            try:
                connection, _ = self.listener.socket.accept()
            except BlockingIOError:
                return
            except OSError:  # a caller that has gone, or no more open files
                time.sleep(0.1 * RETRY)
                return
            connection.setblocking(False)
            guest = self._guests[connection] = _Guest(connection, self.clock())
            self.selector.register(connection, selectors.EVENT_READ, partial(self._listen, guest))
            if len(self._guests) > STRANGERS:
                self._send_away(next(iter(self._guests.values())))

    def _listen(self, guest: _Guest) -> None:
        if guest.socket not in self._guests:  # dropped after the selector returned it
            return
        data = _read(guest.socket, HELLO + len(CONFIRMED) - len(guest.received))
        greeted = len(guest.received) == HELLO
        guest.received += data or b""
        rank = self._names.get(guest.received[WORD:HELLO])
        if data == b"" or (len(guest.received) >= HELLO and not self._admit(guest, rank, greeted)):
            self._send_away(guest)
        elif rank is not None and guest.received[HELLO:] == CONFIRMED:
            self._forget(guest)
            self.lines[rank] = Connection(guest.socket, rank)

    def _admit(self, guest: _Guest, rank: int | None, greeted: bool) -> bool:
        """Return whether password and rank are right; send the countersign once."""
        assert self.listener is not None
        where = self.listener.where
        if not hmac.compare_digest(guest.received[:WORD], where.password) or rank is None or rank in self.lines:
            return False
        return greeted or _write(guest.socket, where.countersign)

    def _send_away(self, guest: _Guest) -> None:
        self._forget(guest)
        guest.socket.close()

    def _forget(self, guest: _Guest) -> None:
        self.selector.unregister(guest.socket)
        del self._guests[guest.socket]

    # -- the rank that calls -------------------------------------------------------------------

    def _attempt(self, call: _Call) -> None:
        call.since, target = self.clock(), next(call.targets)
        if target is None:
            return
        family, address = target
        try:
            call.socket = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            return
        call.socket.setblocking(False)
        call.received = b""
        self.selector.register(call.socket, selectors.EVENT_WRITE, partial(self._greet, call))
        call.socket.connect_ex((address, call.where.port))  # `_greet` handles the result

    def _greet(self, call: _Call) -> None:
        if call.socket is None:  # dropped after the selector returned it
            return
        hello = call.where.password + _name(self.rank)
        if call.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) or not _write(call.socket, hello):
            self._hang_up(call)
        else:
            self.selector.modify(call.socket, selectors.EVENT_READ, partial(self._confirm, call))

    def _confirm(self, call: _Call) -> None:
        if call.socket is None:
            return
        data = _read(call.socket, WORD - len(call.received))
        call.received += data or b""
        if data == b"":
            self._hang_up(call)
        elif len(call.received) == WORD:
            right = hmac.compare_digest(call.received, call.where.countersign)
            if right and _write(call.socket, CONFIRMED):
                self.selector.unregister(call.socket)
                self.lines[call.rank], call.socket = Connection(call.socket, call.rank), None
            else:
                self._hang_up(call)

    def _hang_up(self, call: _Call) -> None:
        assert call.socket is not None
        self.selector.unregister(call.socket)
        call.socket.close()
        call.socket, call.since = None, self.clock()


def _name(rank: int) -> bytes:
    return b"%08x" % rank


def _read(connection: socket.socket, most: int) -> bytes | None:
    """Return the bytes that have arrived, ``b""`` at the end or after a fault, None if there are none yet."""
    try:
        return connection.recv(most)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def _write(connection: socket.socket, data: bytes) -> bool:
    """Send `data`; return whether the kernel accepted all of it. A new connection has enough space for it."""
    try:
        return connection.send(data) == len(data)
    except OSError:
        return False


def _targets(where: Where, near: bool) -> Iterator[tuple[int, str] | None]:
    """Yield addresses to call, in an endless cycle, and None after each address that the name service does not know."""
    while True:
        for address in where.addresses if near else where.addresses[1:]:
            yield from _resolve(address) or (None,)


def join(comm: Communicator, tree: Tree) -> tuple[dict[int, Connection], list[set[int]]]:
    """Make the connections of a tree. Collective over `comm`.

    Returns
    -------
    lines
        Connections of this rank, by rank at the other end.
    joined
        Per rank, the ranks that it has a connection with; the same list on all ranks.
    """
    rank, hosts = comm.rank, tree.hosts
    listener = _listener(len(set(hosts)) > 1) if tree.downs(rank) else None
    where = comm.allgather_objects(None if listener is None else listener.where)
    calls = {up: where[up] for up in tree.ups(rank) if where[up] is not None}
    near = [up for up in calls if hosts[up] == hosts[rank]]
    meeting = Meeting(rank, calls, listener, tree.downs(rank) if listener else (), near)
    with contextlib.closing(meeting.selector), contextlib.closing(meeting):
        until = time.monotonic() + PATIENCE
        while not meeting.done and time.monotonic() < until:
            for key, _ in meeting.selector.select(RETRY):
                key.data()
            meeting.expire()
    known = comm.allgather_objects(sorted(meeting.lines))
    joined = [{other for other in others if one in known[other]} for one, others in enumerate(known)]
    for other in meeting.lines.keys() - joined[rank]:  # the other end has dropped this connection
        meeting.lines.pop(other).socket.close()
    return meeting.lines, joined


def _listener(everywhere: bool) -> Listener | None:
    try:
        return Listener(everywhere)
    except OSError:  # the ranks that would call are then not watched; rank 0 prints this
        return None
