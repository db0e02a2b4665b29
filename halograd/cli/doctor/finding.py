"""One line of the doctor's report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["STATUSES", "Finding", "careful"]

STATUSES = ("ok", "note", "warn", "fail")
"""From good to bad. ``note``: not there, and not needed here. ``warn``: training runs, but slower or at risk.
``fail``: training cannot run."""


@dataclass(frozen=True)
class Finding:
    """What was found, how good that is, and what to do about it."""

    name: str
    status: str
    value: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.status not in STATUSES:
            raise ValueError(f"expected a status out of {STATUSES}, got {self.status!r}")

    @property
    def severity(self) -> int:
        """0 for ``ok`` to 3 for ``fail``."""
        return STATUSES.index(self.status)


def careful(name: str, probe: Callable[[], Iterator[Finding]], status: str = "fail") -> list[Finding]:
    """What a probe finds; a probe that breaks is a finding of this status: the doctor is called when things break."""
    found: list[Finding] = []
    try:
        found.extend(probe())
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        found.append(Finding(name, status, text, f"its installation is broken: pip install --force-reinstall {name}"))
    return found
