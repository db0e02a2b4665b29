"""Times of the stages of a demonstration."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Clock", "Stage"]


@dataclass(frozen=True)
class Stage:
    """Wall-clock time, and CPU time of this process and the jobs it started [s]."""

    name: str
    seconds: float
    cpu: float


@dataclass
class Clock:
    """Stages in the order in which they ended."""

    stages: list[Stage] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Book what runs inside."""
        begin, cpu = time.perf_counter(), _cpu()
        yield
        self.stages.append(Stage(name, time.perf_counter() - begin, _cpu() - cpu))

    @property
    def total(self) -> Stage:
        return Stage("total", sum(s.seconds for s in self.stages), sum(s.cpu for s in self.stages))


def _cpu() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
