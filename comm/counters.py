"""Traffic counters by kind, and the recorder of communication times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

__all__ = ["Counters", "Instruments", "Meter", "Recorder", "Traffic"]


@dataclass
class Traffic:
    """Numbers of messages and of bytes [B] that this process has sent."""

    messages: int = 0
    bytes: int = 0


class Counters:
    """Traffic of this process by kind (``"halo"``, ``"allreduce"``, ...). Local.

    A channel counts one message per peer that it sends to, and the bytes of the payload. Synchronization tokens and the
    headers of the emulated network are not counted, so that all transports give the same counts. A reduction counts one
    message with this rank's contribution per run, whatever algorithm MPI uses; for hierarchical sums see
    `Communicator.reduction`.

    >>> counters = Counters()
    >>> counters.add("halo", messages=2, nbytes=64)
    >>> counters["halo"], counters["allreduce"]
    (Traffic(messages=2, bytes=64), Traffic(messages=0, bytes=0))
    """

    def __init__(self) -> None:
        self._traffic: dict[str, Traffic] = {}

    def add(self, kind: str, messages: int, nbytes: int) -> None:
        """Count `messages` that carry `nbytes` [B] in total."""
        traffic = self._traffic.get(kind)
        if traffic is None:
            traffic = self._traffic[kind] = Traffic()
        traffic.messages += messages
        traffic.bytes += nbytes

    def __getitem__(self, kind: str) -> Traffic:
        # A copy, which later traffic does not change.
        return replace(self._traffic.get(kind, Traffic()))

    def snapshot(self) -> dict[str, Traffic]:
        """Return a copy of all counters."""
        return {kind: replace(traffic) for kind, traffic in self._traffic.items()}

    def reset(self) -> None:
        """Set all counters to zero."""
        self._traffic.clear()


class Recorder(Protocol):
    """Receiver of time spans, always called by the thread that calls `finish()`."""

    def span(self, name: str, category: str, t0: float, t1: float) -> None:
        """Record a span from `t0` to `t1` (`time.perf_counter` [s]).

        The category is ``"communication"`` (from start to arrival) or ``"wait"``. `name` is ``"kind: name"`` of
        the channel or reduction, or only its kind if it has no name.
        """


@dataclass
class Instruments:
    """Counters and recorder that a root communicator shares with the communicators split from it.

    `waiting` is the meter of the exchange or sum that the main thread waits for now; another thread may read it.
    """

    counters: Counters = field(default_factory=Counters)
    recorder: Recorder | None = None
    waiting: Meter | None = None


class Meter:
    """Traffic and times of one channel or reduction.

    Parameters
    ----------
    kind
        Kind for the traffic counters.
    name
        Name of the channel or reduction; the recorder gets it together with the kind.
    messages, nbytes
        Traffic per exchange: number of messages, and bytes [B].
    ranks
        Ranks of the root communicator that take part, with or without this one.
    """

    def __init__(
        self, instruments: Instruments, kind: str, name: str, messages: int, nbytes: int, ranks: Sequence[int] = ()
    ) -> None:
        self._instruments = instruments
        self.kind = kind
        self.name = name
        self.label = name if name == kind else f"{kind}: {name}"
        self.messages = messages
        self.nbytes = nbytes
        self.ranks = ranks

    def sent(self) -> None:
        """Count one exchange."""
        if self.messages:  # a rank that only receives gets no entry
            self._instruments.counters.add(self.kind, self.messages, self.nbytes)

    def waits(self) -> None:
        """Mark that the caller waits for this exchange, until :meth:`waited` is called."""
        self._instruments.waiting = self

    def waited(self) -> None:
        """Mark that the caller waits no longer, also if the exchange has failed."""
        self._instruments.waiting = None

    def took(self, started: float, waited_from: float, arrived: float, waited_to: float) -> None:
        """Record one exchange: when it travelled, and when this rank waited for it [s]."""
        recorder = self._instruments.recorder
        if recorder is not None:
            # The data of a peer may have arrived before this rank started.
            recorder.span(self.label, "communication", started, max(started, arrived))
            recorder.span(self.label, "wait", waited_from, waited_to)
