"""What was sent, by kind, and the recorder of how long it took."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

__all__ = ["Counters", "Instruments", "Meter", "Recorder", "Traffic"]


@dataclass
class Traffic:
    """Messages and bytes [B] that this process has sent."""

    messages: int = 0
    bytes: int = 0


class Counters:
    """Traffic of this process by kind (``"halo"``, ``"allreduce"``, ...). Local.

    A channel books one message per peer it sends to and the bytes of the payload: synchronization
    tokens and the headers of the emulated network are not booked, so that all transports count alike.
    A reduction books one message and the bytes of its buffer per call, whatever algorithm MPI takes.

    >>> counters = Counters()
    >>> counters.add("halo", messages=2, nbytes=64)
    >>> counters["halo"], counters["allreduce"]
    (Traffic(messages=2, bytes=64), Traffic(messages=0, bytes=0))
    """

    def __init__(self) -> None:
        self._traffic: dict[str, Traffic] = {}

    def add(self, kind: str, messages: int, nbytes: int) -> None:
        """Book `messages` that carry `nbytes` [B] in all."""
        traffic = self._traffic.get(kind)
        if traffic is None:
            traffic = self._traffic[kind] = Traffic()
        traffic.messages += messages
        traffic.bytes += nbytes

    def __getitem__(self, kind: str) -> Traffic:
        return replace(self._traffic.get(kind, Traffic()))

    def snapshot(self) -> dict[str, Traffic]:
        """Return a copy of all counters."""
        return {kind: replace(traffic) for kind, traffic in self._traffic.items()}

    def reset(self) -> None:
        """Forget everything booked so far."""
        self._traffic.clear()


class Recorder(Protocol):
    """Gets spans of time, always from the thread that calls `finish()`."""

    def span(self, name: str, category: str, t0: float, t1: float) -> None:
        """Category ``"communication"`` (from start to arrival) or ``"wait"``; `time.perf_counter` [s].

        `name` is ``"kind: name"`` of the channel or reduction, or its kind alone if it has no name.
        """


@dataclass
class Instruments:
    """Counters and recorder that a root communicator shares with those split from it.

    `waiting` is the label of the exchange or sum that the main thread waits for now.
    """

    counters: Counters = field(default_factory=Counters)
    recorder: Recorder | None = None
    waiting: str | None = None


class Meter:
    """Books the traffic and the times of one channel or reduction.

    Parameters
    ----------
    kind
        Name under which the counters book.
    name
        Name of the channel or reduction; with the kind, what the recorder is given.
    messages, nbytes
        Traffic per exchange [B].
    """

    def __init__(self, instruments: Instruments, kind: str, name: str, messages: int, nbytes: int) -> None:
        self._instruments = instruments
        self.kind = kind
        self.name = name
        self.label = name if name == kind else f"{kind}: {name}"
        self.messages = messages
        self.nbytes = nbytes

    def sent(self) -> None:
        """Book one exchange."""
        if self.messages:
            self._instruments.counters.add(self.kind, self.messages, self.nbytes)

    def waits(self) -> None:
        """Note that the caller waits for this exchange, until :meth:`took` is called."""
        self._instruments.waiting = self.label

    def took(self, started: float, waited_from: float, arrived: float, waited_to: float) -> None:
        """Record one exchange: when it travelled and when a rank waited for it [s]."""
        self._instruments.waiting = None
        recorder = self._instruments.recorder
        if recorder is not None:
            recorder.span(self.label, "communication", started, max(started, arrived))
            recorder.span(self.label, "wait", waited_from, waited_to)
