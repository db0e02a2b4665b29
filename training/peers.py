"""A line from every rank to rank 0, beside MPI: the kernel closes it when a process dies, and tells when a node does.

Nothing travels on it while all is well, but for the kernel's own keep-alive packets, which it answers however busy the
process is; a node that does not is given up after `LOST` seconds. Plain sockets, no MPI: it works when MPI does not.

::

    rank 1 ----.
    rank 2 ----- rank 0       messages: one JSON object per line
    rank 3 ----'
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["LOST", "Line", "Listener", "Peers", "connect"]

#: After how long a node that answers nothing is given up [s].
LOST = 6.0
PATIENCE = 5.0  # for a connection to be made [s]
LONGEST = 1 << 16  # of a message [B]: whoever sends more is none of us


class Line:
    """One end of a connection. Local.

    Attributes
    ----------
    rank
        At the other end; -1 as long as it has not said so.
    closing
        The other end has said that it is leaving.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        self.socket, self.rank, self.closing = connection, rank, False
        self._received = b""
        connection.settimeout(PATIENCE)
        _keep_alive(connection)

    def send(self, **message: Any) -> None:
        """Send one message; to nobody, if the other end is gone."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """What has come, None at the end; waits if nothing has.

        Raises
        ------
        OSError
            If the connection broke (the node does not answer).
        """
        data = self.socket.recv(LONGEST)
        if not data:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        if len(self._received) > LONGEST:
            return None
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Say that this end is leaving, and leave; idempotent."""
        self.send(kind="bye")
        self.socket.close()


def _keep_alive(connection: socket.socket) -> None:
    """Have the kernel ask every second, after two of silence, whether the other one still answers."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": round(LOST) - 2, "TCP_USER_TIMEOUT": 1000 * LOST}
    for name, value in wanted.items():
        if hasattr(socket, name):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), int(value))


class Listener:
    """Where rank 0 waits for the lines of the others.

    Parameters
    ----------
    everywhere
        False if all ranks are on this machine: then nobody else can reach it.

    Attributes
    ----------
    where
        ``(addresses, port, word)`` for :func:`connect`; who does not know the word is not let in.
    """

    def __init__(self, everywhere: bool) -> None:
        word = secrets.token_hex(16)
        if not everywhere:
            self._socket = socket.create_server(("127.0.0.1", 0), backlog=1024)
            addresses = ["127.0.0.1"]
        elif socket.has_dualstack_ipv6():
            self._socket = socket.create_server(("", 0), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
            addresses = _own_addresses()
        else:
            self._socket = socket.create_server(("", 0), backlog=1024)
            addresses = _own_addresses()
        self.where = (addresses, int(self._socket.getsockname()[1]), word)

    def accept(self, ranks: set[int]) -> dict[int, Line]:
        """The lines of these ranks, as far as they come within `PATIENCE`."""
        lines: dict[int, Line] = {}
        deadline = time.monotonic() + PATIENCE
        while ranks - lines.keys() and (left := deadline - time.monotonic()) > 0:
            self._socket.settimeout(left)
            try:
                connection, _ = self._socket.accept()
            except OSError:
                break
            line = self._welcome(connection)
            if line is not None and line.rank in ranks:
                lines[line.rank] = line
        return lines

    def _welcome(self, connection: socket.socket) -> Line | None:
        """The line, if the other end knows the word."""
        line = Line(connection, -1)
        try:
            first = line.receive() or [{}]
        except (OSError, ValueError):
            first = [{}]
        if not hmac.compare_digest(str(first[0].get("word")), self.where[2]):
            connection.close()
            return None
        line.rank = int(first[0]["rank"])
        return line

    def close(self) -> None:
        """Let nobody in any more."""
        self._socket.close()


def _own_addresses() -> list[str]:
    """Names and addresses under which other nodes may reach this one, the likeliest first."""
    names = [socket.gethostname(), socket.getfqdn()]
    with contextlib.suppress(OSError):
        names += [str(info[4][0]) for info in socket.getaddrinfo(names[0], None, type=socket.SOCK_STREAM)]
    return list(dict.fromkeys(names))


def connect(where: tuple[list[str], int, str], rank: int) -> Line | None:
    """The line of this rank to rank 0; None if none of the addresses can be reached."""
    addresses, port, word = where
    for address in addresses:
        try:
            line = Line(socket.create_connection((address, port), PATIENCE / len(addresses)), 0)
        except OSError:
            continue
        line.send(rank=rank, word=word)
        return line
    return None


@dataclass
class Peers:
    """The lines of this rank, and who is told what happens on them. Local; `wait` is for one thread.

    Attributes
    ----------
    lines
        By rank: those of all others on rank 0, the one to rank 0 elsewhere.
    on_message
        Called with rank and message.
    on_end
        Called with a rank whose line ended without a word, and with how it ended: ``"ended"`` (the process is gone)
        or ``"lost"`` (its node does not answer).
    """

    lines: dict[int, Line]
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
        """Sleep for at most `seconds`, less if something comes, and tell of that."""
        for key, _ in self._selector.select(max(0.0, seconds)):
            if key.data is None:
                self._inner.recv(64)
            else:
                self._attend(key.data)

    def wake(self) -> None:
        """End the `wait` of the other thread."""
        self._outer.send(b".")

    def send(self, **message: Any) -> None:
        """Send one message on every line."""
        for line in list(self.lines.values()):
            line.send(**message)

    def _attend(self, line: Line) -> None:
        how = "ended"
        try:
            messages = line.receive()
        except TimeoutError:  # raised for a connection that the kernel has given up, too
            messages, how = None, "lost"
        except OSError as error:
            messages = None
            how = "ended" if isinstance(error, ConnectionError) else "lost"
        except ValueError:
            messages = None
        for message in messages or ():
            if message.get("kind") == "bye":
                line.closing = True
            else:
                self.on_message(line.rank, message)
        if messages is None:
            self._drop(line)
            if not line.closing:
                self.on_end(line.rank, how)

    def _drop(self, line: Line) -> None:
        self._selector.unregister(line.socket)
        line.socket.close()
        self.lines.pop(line.rank, None)

    def close(self) -> None:
        """Take leave on every line."""
        self._selector.close()
        for line in self.lines.values():
            line.close()
        self.lines.clear()
        self._inner.close()
        self._outer.close()
