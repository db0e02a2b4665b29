"""Connections between ranks in addition to MPI, and their topology. They are plain sockets, which work when MPI does
not.

The kernel closes a connection when a process ends, and reports it when a node does not respond. In normal operation
only the kernel's own keep-alive packets travel on a connection. The kernel responds to them however busy the process
is; a node that does not respond is given up after `LOST` seconds. A message is one JSON object per line.
:mod:`halograd.training.meeting` makes the connections.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FANOUT", "LOST", "Connection", "Peers", "Tree"]

#: Time after which a node that does not respond is given up [s].
LOST = 6.0
LONGEST = 1 << 16  # maximum size of a message [B]
FLUSH = 1.0  # time limit for the last messages of a rank that leaves [s]


class Connection:
    """One end of a connection to another rank. Local; never blocks.

    Attributes
    ----------
    rank
        Rank at the other end.
    leaving
        Whether the other end has announced that it leaves.
    unsent
        Bytes that the kernel has not accepted yet.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.socket, self.rank, self.leaving = connection, rank, False
        self.unsent = b""
        self._received = b""
        connection.setblocking(False)
        _keep_alive(connection)

    def send(self, message: dict[str, Any]) -> None:
        """Send one message. It is dropped if the other end is closed."""
        self.unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Pass as many unsent bytes to the kernel as it accepts."""
        try:
            self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # `receive` will report the reason
            self.unsent = b""

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived, None at the end of the connection.

        Raises
        ------
        OSError
            If the connection is broken (the node does not respond).
        """
        try:
            data = self.socket.recv(LONGEST)
        except BlockingIOError:
            return []
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return [json.loads(line) for line in lines]


def _keep_alive(connection: socket.socket) -> None:
    """Enable keep-alive packets of the kernel: one per second after two seconds of silence."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": round(LOST) - 2, "TCP_USER_TIMEOUT": 1000 * LOST}
    for name, value in wanted.items():
        if hasattr(socket, name):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), int(value))


@dataclass
class Peers:
    """Connections of this rank, and callbacks for their events. Local; only `wake` may be called from other threads.

    Attributes
    ----------
    lines
        Connections by rank.
    on_message
        Function that is called with rank and message.
    on_end
        Function that is called with a rank whose connection ended, and the kind of end: ``"left"`` (announced),
        ``"ended"`` (its process ended) or ``"lost"`` (its node does not respond).
    """

    lines: dict[int, Connection]
    on_message: Callable[[int, dict[str, Any]], None]
    on_end: Callable[[int, str], None]

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        for line in self.lines.values():
            self._selector.register(line.socket, selectors.EVENT_READ, line)
        # So that `wake` can end a `wait`.
        self._inner, self._outer = socket.socketpair()
        self._selector.register(self._inner, selectors.EVENT_READ, None)

    def wait(self, seconds: float) -> None:
        """Wait for events for at most `seconds`, and call the callbacks."""
        for line in self.lines.values():
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.unsent else 0)
            if self._selector.get_key(line.socket).events != events:
                self._selector.modify(line.socket, events, line)
        for key, events in self._selector.select(max(0.0, seconds)):
            line = key.data
            if line is None:
                self._inner.recv(64)
                continue
            if events & selectors.EVENT_WRITE:
                line.flush()
            if events & selectors.EVENT_READ:
                self._attend(line)

    def wake(self) -> None:
        """End the `wait` of the other thread. Any thread may call it."""
        self._outer.send(b".")

    def send(self, rank: int, message: dict[str, Any]) -> None:
        """Send one message to a rank. It is dropped if there is no connection."""
        if rank in self.lines:
            self.lines[rank].send(message)

    def _attend(self, line: Connection) -> None:
        how = "ended"
        try:
            messages = line.receive()
        except OSError as error:  # includes TimeoutError: the kernel has given up
            messages, how = None, "ended" if isinstance(error, ConnectionError) else "lost"
        for message in messages or ():
            if message["kind"] == "bye":
                line.leaving = True
            else:
                self.on_message(line.rank, message)
        if messages is None:
            self._selector.unregister(line.socket)
            line.socket.close()
            del self.lines[line.rank]
            self.on_end(line.rank, "left" if line.leaving else how)

    def close(self) -> None:
        """Announce the end on every connection, and close all."""
        self._selector.close()
        for line in self.lines.values():
            line.send({"kind": "bye"})
            if line.unsent:
                with contextlib.suppress(OSError):
                    line.socket.settimeout(FLUSH)
                    line.socket.sendall(line.unsent)
            line.socket.close()
        self.lines.clear()
        self._inner.close()
        self._outer.close()


FANOUT = 16


class Tree:
    r"""Topology of the connections between the ranks of a job. Pure arithmetic.

    Ranks have positions: the first rank of every host, then all others. The first ``fanout + 1`` ranks are *heads*,
    each of which is connected with all other heads; every later rank is connected with its parent. With ``fanout =
    2``::

        position       0 ------ 1 ------ 2       heads: 0 and 2 are connected too
                      / \      / \      / \
                     3   4    5   6    7   8
                    / \  :
                   9  10

    A rank has at most ``2 * fanout`` connections, for any number of ranks. Rank 0 is the first head, and ends the job
    after a fault; if it cannot, the next head does.

    Parameters
    ----------
    hosts
        Name of the host of every rank.
    fanout
        Children per rank; the number of heads is one more.

    Attributes
    ----------
    order
        Ranks by position. Heads are on as many hosts as possible, so that the failure of a node ends few of them.
    """

    def __init__(self, hosts: Sequence[str], fanout: int = FANOUT) -> None:
        first: dict[str, int] = {}
        for rank, host in enumerate(hosts):
            first.setdefault(host, rank)
        self.hosts, self.fanout = hosts, fanout
        self.order = sorted(range(len(hosts)), key=lambda rank: first[hosts[rank]] != rank)
        self._positions = {rank: position for position, rank in enumerate(self.order)}

    def is_head(self, rank: int) -> bool:
        """Return whether a rank is connected with all heads."""
        return self._positions[rank] <= self.fanout

    def ups(self, rank: int) -> list[int]:
        """Return the ranks that a rank reports to: all heads before it, or its parent."""
        position = self._positions[rank]
        if position <= self.fanout:
            return self.order[:position]
        return [self.order[(position - 1) // self.fanout - 1]]

    def children(self, rank: int) -> list[int]:
        """Return the ranks whose parent is `rank`."""
        first = (self._positions[rank] + 1) * self.fanout + 1
        return self.order[first : first + self.fanout]

    def downs(self, rank: int) -> list[int]:
        """Return the ranks that report to a rank: all heads after it, and its children."""
        later = self.order[self._positions[rank] + 1 : self.fanout + 1]
        return [*later, *self.children(rank)]

    def reached(self, rank: int, joined: Sequence[Collection[int]], without: Collection[int] = ()) -> list[int]:
        """Return the ranks that messages of `rank` reach, itself included, by position.

        Parameters
        ----------
        joined
            Ranks that each rank has a connection with.
        without
            Ranks that forward no messages.
        """
        found, edge = {rank}, [rank]
        while edge:
            beyond = {other for one in edge for other in joined[one]}.difference(found, without)
            found |= beyond
            edge = list(beyond)
        return sorted(found, key=self._positions.__getitem__)
