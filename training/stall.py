"""Where a rank stands, and which rank the others wait for, from where all of them are. Arithmetic, no MPI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Place", "Pulse", "describe_stall"]

SHOWN = 4  # ranks that are named one by one


class Pulse:
    """What the main thread is at; written by it, read by the watchdog's thread. Local.

    Writing is a store per attribute: no lock, no system call, no array. A reader may see a place and a phase that do
    not belong together, once.

    Attributes
    ----------
    step
        Updates done.
    count
        Forward and backward passes so far, validation included.
    phase
        ``"forward"``, ``"backward"``, ``"data"``, ``"checkpoint"``, ...
    place
        Name of the layer, or what else is being done.
    """

    __slots__ = ("count", "phase", "place", "step")

    def __init__(self) -> None:
        self.step = 0
        self.count = 0
        self.phase = "start"
        self.place = ""

    def at(self, phase: str, place: str) -> None:
        """The main thread begins something else than a layer."""
        self.phase, self.place = phase, place

    def state(self) -> tuple[int, int, str, str]:
        """Everything, to be compared with what it was before."""
        return self.step, self.count, self.phase, self.place


@dataclass(frozen=True)
class Place:
    """Where a rank is.

    Attributes
    ----------
    step, phase, layer
        Updates done; ``"forward"``, ``"backward"``, ``"data"``, ...; name of the layer, empty outside of them.
    waiting
        ``"kind: name"`` of the exchange or sum that it waits for; empty if it does not wait.
    line
        Line of code that its main thread is at.
    idle
        How long it has been there [s].
    """

    step: int
    phase: str
    layer: str
    waiting: str
    line: str
    idle: float

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for a message."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Place:
        """What `as_dict` made; other keys are ignored."""
        return cls(**{name: data[name] for name in cls.__dataclass_fields__})

    def text(self) -> str:
        """In words."""
        where = f"step {self.step + 1}, {self.phase}" + (f" of layer {self.layer!r}" if self.layer else "")
        waits = f", waiting for {self.waiting!r}" if self.waiting else ", not in an exchange"
        return f"{where}{waits} (at {self.line})"


def describe_stall(hosts: Sequence[str], places: Mapping[int, Place | None], patience: float) -> tuple[int, str]:
    """The rank that holds up the others, and what is the matter, in words.

    It is the first one that did not answer; else the one that is in no exchange; else the one that is behind.

    Parameters
    ----------
    hosts
        Per rank.
    places
        By rank; None for a rank that did not answer. Ranks that pass on messages stand before those that they reach.
    patience
        How long a rank may be at one place [s].
    """
    behind = [(rank, place) for rank, place in sorted(places.items()) if place is not None]
    mute = [rank for rank, place in places.items() if place is None]
    for_how_long = f"no progress for {patience / 60:.3g} min"
    if mute:
        culprit = mute[0]
        text = f"{for_how_long}: it does not answer (stopped, in a call that locks the interpreter, or its node hangs)"
    else:
        culprit, place = min(behind, key=lambda item: (bool(item[1].waiting), item[1].step, -item[1].idle))
        text = f"{for_how_long}: {place.text()}"
    others = [f"rank {r} on {hosts[r]}: {p.text()}" for r, p in behind if r != culprit]
    if others:
        more = f"; and {len(others) - SHOWN} more" if len(others) > SHOWN else ""
        text += f". The others: {'; '.join(others[:SHOWN])}{more}"
    return culprit, text
