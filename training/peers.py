"""Connections between ranks, beside MPI: the kernel closes one when a process dies, and says when a node does.

While all is well nothing travels on them but the kernel's own keep-alive packets, which it answers however busy the
process is; a node that does not is given up after `LOST` seconds. Plain sockets, no MPI: they work when MPI does not.
A message is one JSON object per line. :mod:`halograd.training.meeting` makes the connections.
"""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["LOST", "Connection", "Peers"]

#: After how long a node that answers nothing is given up [s].
LOST = 6.0
LONGEST = 1 << 16  # of a message [B]
FLUSH = 1.0  # for the last messages of a rank that leaves [s]


class Connection:
    """One end of a connection to another rank. Local; never blocks.

    Attributes
    ----------
    rank
        At the other end.
    leaving
        The other end has said that it leaves.
    unsent
        What the kernel has not taken yet.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.socket, self.rank, self.leaving = connection, rank, False
        self.unsent = b""
        self._received = b""
        connection.setblocking(False)
        _keep_alive(connection)

    def send(self, message: dict[str, Any]) -> None:
        """Send one message; it is dropped if the other end is gone."""
        self.unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Pass to the kernel what it takes."""
        try:
            self.unsent = self.unsent[self.socket.send(self.unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # `receive` finds out why
            self.unsent = b""

    def receive(self) -> list[dict[str, Any]] | None:
        """Messages that have come, None at the end.

        Raises
        ------
        OSError
            If the connection broke (the node does not answer).
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
    """Have the kernel ask every second, after two of silence, whether the other one still answers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": round(LOST) - 2, "TCP_USER_TIMEOUT": 1000 * LOST}
    for name, value in wanted.items():
        if hasattr(socket, name):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), int(value))


@dataclass
class Peers:
    """Connections of this rank, and callbacks for what happens on them. Local; for one thread, but for `wake`.

    Attributes
    ----------
    lines
        By rank.
    on_message
        Called with rank and message.
    on_end
        Called with a rank whose connection ended, and how: ``"left"`` (it said so), ``"ended"`` (the process is gone)
        or ``"lost"`` (its node does not answer).
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
        """Sleep for at most `seconds`, less if something comes, and call back."""
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
        """End the `wait` of the other thread."""
        self._outer.send(b".")

    def send(self, rank: int, message: dict[str, Any]) -> None:
        """Send one message to a rank; it is dropped if there is no connection."""
        if rank in self.lines:
            self.lines[rank].send(message)

    def _attend(self, line: Connection) -> None:
        how = "ended"
        try:
            messages = line.receive()
        except OSError as error:  # TimeoutError, too: the kernel has given up
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
        """Take leave on every connection."""
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
