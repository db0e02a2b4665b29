"""The search for a chunk size while training: Algorithm 1 of Le et al. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ChunkSearch"]


@dataclass
class ChunkSearch:
    """Which chunk size to train the next interval with, of the times that intervals took.

    Sizes rise by 1 up to `step` and by `step` from there, until `range` of them in a row beyond the best were no
    better. ::

        while not search.done:
            train some steps in chunks of search.chunk layers
            search.observe(seconds)
        train on in chunks of search.chunk layers

    Attributes
    ----------
    layers
        How many layers there are to make chunks of; larger chunks do not exist.
    step, range
        As in the paper: of what size the jumps are, and how many are made beyond the best.
    chunk
        To train with now.
    best, least
        The best size so far, and the time of its interval [s].
    done
        Whether `chunk` is the answer.
    times
        Size -> time of its interval [s].

    Notes
    -----
    At most ``step + range + 1`` intervals beyond the last improvement below `step`; 15 for the paper's
    ``(step, range, best) = (10, 5, 9)``, 21 for ``(10, 10, 20)``.

    References
    ----------
    Le et al. 2018, Algorithm 1. There, the last interval is trained and its time not looked at; here it ends the
    search in the same place. What is added is the end at `layers`: the paper's rule for layers that fill no chunk
    makes a longer chunk the same as chunks of one layer.
    """

    layers: int
    step: int = 10
    range: int = 5
    chunk: int = 1
    best: int = 1
    least: float = math.inf
    done: bool = False
    times: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("layers", "step", "range"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")

    def observe(self, seconds: float) -> None:
        """An interval of training in chunks of `chunk` layers took so long [s], on all ranks the same number."""
        if self.done:
            raise ValueError("observe(): expected a search that goes on, got one that is done")
        if self.chunk >= self.best + self.step * self.range:
            self._end()
            return
        self.times[self.chunk] = seconds
        if seconds < self.least:
            self.least, self.best = seconds, self.chunk
        self.chunk += 1 if self.chunk < self.step else self.step
        if self.chunk > self.layers:
            self._end()

    def _end(self) -> None:
        self.chunk, self.done = self.best, True

    def state_dict(self) -> dict[str, Any]:
        """Where the search stands, for a checkpoint: plain data."""
        return {"chunk": self.chunk, "done": self.done, "times": {str(k): v for k, v in self.times.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.times = {int(k): float(v) for k, v in state["times"].items()}
        self.best = min(self.times, key=lambda k: (self.times[k], k), default=1)
        self.least = self.times.get(self.best, math.inf)
        self.chunk, self.done = int(state["chunk"]), bool(state["done"])
