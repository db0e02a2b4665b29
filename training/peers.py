"""Connections between ranks in addition to MPI: plain sockets, which work even if MPI does not.

The kernel closes a connection when a process ends, and reports it when a node does not respond. In normal operation
only the kernel's own keep-alive packets travel on a connection. The kernel responds to them even if the process is
busy. A node that does not respond for `LOST` seconds counts as lost. A message is one JSON object per line.

Each connection takes a request, a response and a confirmation::

    up (listens)                          down (calls)
       <------ password, rank (40 B) ------
       ------- countersign (32 B) -------->     wrong, or too late: call again
       <------ "+" ------------------------
       messages                           messages

Ranks exchange addresses, passwords and countersigns over MPI. A rank that listens reads only 41 bytes of fixed format
from a foreign client (port scanner, other job). All connections are made concurrently, so a foreign client does not
delay a rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import itertools
import json
import secrets
import socket
from collections.abc import Collection, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from ..comm import Communicator
from .watch import Message, Tree

__all__ = ["LOST", "Peers", "Where", "join"]

#: Time after which a node that does not respond is given up [s].
LOST = 6.0
LONGEST = 1 << 16  # maximum size of a message [B]
FLUSH = 1.0  # time limit for the last messages of a rank that leaves [s]
PATIENCE = 10.0  # time limit for all connections of a rank [s]
ATTEMPT = 2.0  # time limit for one connection to be requested, answered and confirmed [s]
RETRY = 0.1  # time between two attempts [s]
BACKLOG = 1024  # connections that the kernel accepts for a rank that is busy
STRANGERS = 64  # maximum number of unconfirmed connections; the oldest is closed for a new one
HERE = "127.0.0.1"
WORD = 32  # characters of a password, and of a countersign
HELLO = WORD + 8  # password and rank
CONFIRMED = b"+"
_FAULTS = (OSError, EOFError, asyncio.TimeoutError)


@dataclass(frozen=True)
class Where:
    """Addresses at which a rank listens, and the secrets by which both ends prove that they belong to the job."""

    addresses: tuple[str, ...]
    port: int
    password: bytes
    countersign: bytes


class Peers:
    """Connections of this rank with other ranks. Local. Other threads than that of the loop may call only `wake`.

    Parameters
    ----------
    rank
        Rank of this process.
    downs
        Ranks that call this one, if it listens.
    loop
        Event loop for all coroutines.

    Attributes
    ----------
    lines
        Complete connections, by the rank at the other end.
    """

    def __init__(self, rank: int, downs: Collection[int], loop: asyncio.AbstractEventLoop) -> None:
        self.lines: dict[int, asyncio.StreamWriter] = {}
        self._rank, self._downs, self._loop = rank, downs, loop
        self._socket: socket.socket | None = None
        self._guests: list[asyncio.Task[None]] = []  # unconfirmed connections, the oldest first
        self._readers: set[asyncio.Task[None]] = set()
        self._expected = -1
        self._complete, self._woken = asyncio.Event(), asyncio.Event()
        self._events: list[tuple[int, Message | str]] = []

    def listen(self, everywhere: bool) -> Where:
        """Create the socket on which this rank accepts connections; return the address for the ranks that call.

        Other hosts can reach it if `everywhere`. Raises OSError if no socket can be created.
        """
        if not everywhere:
            self._socket = socket.create_server((HERE, 0), backlog=BACKLOG)
        elif socket.has_dualstack_ipv6():
            self._socket = socket.create_server(("", 0), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
        else:
            self._socket = socket.create_server(("", 0), backlog=BACKLOG)
        words = [secrets.token_hex(WORD // 2).encode() for _ in range(2)]
        addresses = _own_addresses() if everywhere else (HERE,)
        self._where = Where(addresses, int(self._socket.getsockname()[1]), *words)
        return self._where

    # -- set-up ---------------------------------------------------------------------------------

    async def meet(self, calls: Mapping[int, Where]) -> None:
        """Make all connections, within at most `PATIENCE`; `calls` has the addresses of the ranks that this rank
        calls.
        """
        self._expected = len(calls) + (0 if self._socket is None else len(self._downs))
        server = None
        if self._socket is not None:
            server = await asyncio.start_server(self._admit, sock=self._socket, limit=LONGEST, backlog=BACKLOG)
        tasks = [asyncio.create_task(self._call(up, where)) for up, where in calls.items()]
        with contextlib.suppress(asyncio.TimeoutError):
            if self._expected:
                await asyncio.wait_for(self._complete.wait(), PATIENCE)
        if server is not None:
            server.close()
        unfinished = [*tasks, *self._guests]
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*unfinished, return_exceptions=True)

    async def _call(self, rank: int, where: Where) -> None:
        """Call a rank at its addresses in turn, until it responds."""
        for address in itertools.cycle(where.addresses):
            with contextlib.suppress(*_FAULTS):
                if await asyncio.wait_for(self._greet(rank, where, address), ATTEMPT):
                    return
            await asyncio.sleep(RETRY)

    async def _greet(self, rank: int, where: Where, address: str) -> bool:
        reader, writer = await asyncio.open_connection(address, where.port, limit=LONGEST)
        answer = b""
        try:
            writer.write(where.password + _name(self._rank))
            answer = await reader.readexactly(WORD)
        finally:
            right = hmac.compare_digest(answer, where.countersign)
            if right:
                writer.write(CONFIRMED)
            self._add(rank if right else None, reader, writer)
        return right

    async def _admit(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Add the connection of a rank that calls; close that of a foreign client."""
        task, rank = asyncio.current_task(), None
        assert task is not None
        self._guests.append(task)
        if len(self._guests) > STRANGERS:
            self._guests.pop(0).cancel()
        try:
            with contextlib.suppress(*_FAULTS):
                rank = await asyncio.wait_for(self._answer(reader, writer), ATTEMPT)
        finally:
            if task in self._guests:
                self._guests.remove(task)
            self._add(rank, reader, writer)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        """Return the rank that calls; None if password, rank or confirmation are wrong."""
        hello = await reader.readexactly(HELLO)
        rank = {_name(down): down for down in self._downs if down not in self.lines}.get(hello[WORD:])
        if rank is None or not hmac.compare_digest(hello[:WORD], self._where.password):
            return None
        writer.write(self._where.countersign)
        return rank if await reader.readexactly(len(CONFIRMED)) == CONFIRMED else None

    def _add(self, rank: int | None, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Add the complete connection to `rank`; close it if `rank` is None or connected already."""
        if rank is None or rank in self.lines:
            writer.close()
            return
        _keep_alive(writer.get_extra_info("socket"))
        self.lines[rank] = writer
        self._readers.add(asyncio.create_task(self._read(rank, reader, writer)))
        if len(self.lines) == self._expected:
            self._complete.set()

    # -- messages -------------------------------------------------------------------------------

    async def _read(self, rank: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        how = "ended"
        try:
            async for line in reader:
                message = json.loads(line)
                if message["kind"] == "bye":
                    how = "left"
                else:
                    self._note(rank, message)
        except (ConnectionError, ValueError):  # ValueError: half a message, or one that is too long
            pass
        except OSError:  # the kernel has given up: TimeoutError, no route to the host
            how = "left" if how == "left" else "lost"
        writer.close()
        if self.lines.pop(rank, None) is not None:
            self._note(rank, how)

    def _note(self, rank: int, event: Message | str) -> None:
        self._events.append((rank, event))
        self._woken.set()

    async def wait(self, seconds: float) -> list[tuple[int, Message | str]]:
        """Wait for events for at most `seconds`; return ranks, each with its message or the end of its connection.

        The end is ``"left"`` (announced), ``"ended"`` (its process ended) or ``"lost"`` (its node does not respond).
        """
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)
        self._woken.clear()
        events, self._events = self._events, []
        return events

    def wake(self) -> None:
        """End the `wait` of the other thread. Any thread may call it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._woken.set)

    def send(self, rank: int, message: Message) -> None:
        """Send one message to a rank. It is dropped if there is no connection. Never blocks."""
        if rank in self.lines:
            self.lines[rank].write(json.dumps(message).encode() + b"\n")

    async def close(self) -> None:
        """Announce the end on every connection, and close all."""
        for rank in self.lines:
            self.send(rank, {"kind": "bye"})
        writers = list(self.lines.values())
        self.lines.clear()
        for writer in writers:
            writer.close()  # after the unsent bytes
        with contextlib.suppress(asyncio.TimeoutError):
            closed = asyncio.gather(*(writer.wait_closed() for writer in writers), return_exceptions=True)
            await asyncio.wait_for(closed, FLUSH)
        for writer in writers:
            writer.transport.abort()
        for task in self._readers:
            task.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    def run(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end in this thread, and close the loop."""
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(coroutine)


def _own_addresses() -> tuple[str, ...]:
    """List names and addresses by which other nodes may reach this one, the most probable first."""
    names = [socket.gethostname(), socket.getfqdn()]
    with contextlib.suppress(OSError):
        names += [str(info[4][0]) for info in socket.getaddrinfo(names[0], None, type=socket.SOCK_STREAM)]
    return tuple(dict.fromkeys(names))


def _name(rank: int) -> bytes:
    return b"%08x" % rank


def _keep_alive(connection: socket.socket) -> None:
    """Enable keep-alive packets of the kernel: one per second after two seconds without traffic."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": round(LOST) - 2, "TCP_USER_TIMEOUT": 1000 * LOST}
    for name, value in wanted.items():
        if hasattr(socket, name):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), int(value))


def join(comm: Communicator, tree: Tree) -> tuple[Peers, list[set[int]]]:
    """Make the connections of a tree between all ranks. Collective over `comm`.

    Returns
    -------
    peers
        Connections of this rank.
    joined
        Per rank, the ranks that it has a connection with; the same list on all ranks.
    """
    rank, hosts = comm.rank, tree.hosts
    loop, own = asyncio.new_event_loop(), None
    peers = Peers(rank, tree.downs(rank), loop)
    if tree.downs(rank):
        with contextlib.suppress(OSError):  # the ranks that would call are then not watched; rank 0 prints this
            own = peers.listen(len(set(hosts)) > 1)
    listening = comm.allgather_objects(own)
    calls = {up: listening[up] for up in tree.ups(rank) if listening[up] is not None}
    for up in calls:
        if hosts[up] == hosts[rank]:
            calls[up] = replace(calls[up], addresses=(HERE,))
    with ThreadPoolExecutor(1) as pool:  # the main thread may run a loop of its own, such as that of Jupyter
        pool.submit(loop.run_until_complete, peers.meet(calls)).result()
    known = comm.allgather_objects(sorted(peers.lines))
    joined = [{other for other in others if one in known[other]} for one, others in enumerate(known)]
    for other in peers.lines.keys() - joined[rank]:  # the other end has dropped this connection
        peers.lines.pop(other).close()
    return peers, joined
