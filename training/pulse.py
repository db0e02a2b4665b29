"""Where a rank stands, for whoever wants to know why it does not move."""

from __future__ import annotations

__all__ = ["Pulse"]


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
