"""What was checked and found: lines while it runs, a short table last, one JSON file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Report", "Result"]


@dataclass
class Result:
    """One check.

    Attributes
    ----------
    status
        ``"ok"``, ``"failed"`` or ``"skipped"``.
    detail
        What was found, or why not, in a line.
    numbers
        Errors, times [s], bytes [B], rates.
    """

    group: str
    name: str
    status: str
    detail: str = ""
    seconds: float = 0.0
    numbers: Mapping[str, float] = field(default_factory=dict)


class Report:
    """Results by group, within a budget of time.

    Parameters
    ----------
    budget
        Checks that begin later than this are skipped [s].
    say
        Is told every line.
    """

    def __init__(self, budget: float = 500.0, say: Callable[[str], object] = print) -> None:
        self.results: list[Result] = []
        self.facts: dict[str, Any] = {}
        self._say, self._budget = say, budget
        self._until = time.perf_counter() + budget

    @property
    def seconds_left(self) -> float:
        """Of the budget, and of that of the part that is under way [s]."""
        return self._until - time.perf_counter()

    @contextmanager
    def part(self, seconds: float) -> Iterator[None]:
        """What begins in here has so many seconds, if as many are left."""
        until, budget = self._until, self._budget
        self._until, self._budget = min(until, time.perf_counter() + seconds), min(budget, seconds)
        try:
            yield
        finally:
            self._until, self._budget = until, budget

    def check(self, group: str, name: str, run: Callable[[], tuple[str, Mapping[str, float]]]) -> Result:
        """Run one check: it returns a detail and numbers, and raises if what it found is wrong."""
        begin = time.perf_counter()
        if self.seconds_left <= 0:
            return self.add(Result(group, name, "skipped", f"the budget of {self._budget:.0f} s is used up"))
        try:
            detail, numbers = run()
            result = Result(group, name, "ok", detail, numbers=numbers)
        except Exception as error:
            text = " ".join(f"{type(error).__name__}: {error}".split())
            result = Result(group, name, "failed", text)
        result.seconds = time.perf_counter() - begin
        return self.add(result)

    def add(self, result: Result) -> Result:
        """Keep a result and say so; what is ok only in the table, unless it has numbers of its own."""
        self.results.append(result)
        if result.status != "ok" or result.numbers:
            self._say(f"{result.status:8}{result.group}: {result.name}: {result.detail}")
        return result

    @property
    def failed(self) -> bool:
        return any(r.status == "failed" for r in self.results)

    def table(self) -> str:
        """What was measured, and counts per group."""
        lines = [f"{r.name}: {r.detail}" for r in self.results if r.group == "benchmarks"]
        lines += [f"{'group':24}{'ok':>6}{'failed':>8}{'skipped':>9}{'seconds':>9}"]
        for group in dict.fromkeys(r.group for r in self.results):
            some = [r for r in self.results if r.group == group]
            counts = [sum(r.status == s for r in some) for s in ("ok", "failed", "skipped")]
            seconds = sum(r.seconds for r in some)
            lines.append(f"{group:24}{counts[0]:>6}{counts[1]:>8}{counts[2]:>9}{seconds:>9.1f}")
        return "\n".join(lines)

    def write(self, path: Path) -> None:
        """Everything as JSON."""
        data = {"facts": self.facts, "results": [asdict(r) for r in self.results]}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data, indent=1, default=str) + "\n", encoding="utf-8")
