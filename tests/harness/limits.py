"""Limits against deadlock: generous, and longer on a machine that is slow or busy. No verdict depends on them.

A short calibration at the start of the suite finds how much slower than nominal this machine runs; the factor goes to
all processes of the suite by the environment, so that every limit grows by it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from typing import TypeVar

__all__ = ["GRACE_VARIABLE", "LIMIT", "SLOWNESS_VARIABLE", "TEST_LIMIT", "grace", "scaled", "slowness", "wait_until"]

T = TypeVar("T")

SLOWNESS_VARIABLE = "HALOGRAD_TEST_SLOWNESS"
# Fixed work of one process, and its time on an idle core, start of the interpreter included [s].
WORK, NOMINAL = "sum(i * i for i in range(4_000_000))", 0.3
MOST_RANKS = 8  # no run of the suite has more
GRACE_VARIABLE = "HALOGRAD_TEST_GRACE"


def measure() -> float:
    """How many times longer than nominal fixed work takes, in as many processes as cores; 1 or more."""
    processes = min(_cores(), MOST_RANKS)
    begin = time.monotonic()
    started = [subprocess.Popen([sys.executable, "-S", "-c", WORK]) for _ in range(processes)]
    for process in started:
        process.wait()
    return max(1.0, (time.monotonic() - begin) / NOMINAL)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def slowness() -> float:
    """The factor that the first process of the suite has measured."""
    if SLOWNESS_VARIABLE not in os.environ:
        os.environ[SLOWNESS_VARIABLE] = f"{measure():.2f}"
    return float(os.environ[SLOWNESS_VARIABLE])


def scaled(seconds: float) -> float:
    """A limit for an idle machine of nominal speed [s], as long as this machine needs it."""
    return seconds * slowness()


#: How long a test waits for anything: another process, a thread, a file [s].
LIMIT = scaled(240)
#: How long a test may take on a machine of nominal speed [s]; more than `LIMIT`, whose message says more.
TEST_LIMIT = 600.0


def grace() -> float:
    """How long after a first sign of trouble a harder measure follows [s]."""
    return float(os.environ.get(GRACE_VARIABLE, scaled(20)))


def wait_until(condition: Callable[[], T], what: str | Callable[[], str], limit: float | None = None) -> T:
    """Return what `condition` gives as soon as that is true.

    Asking takes at most a fifth of the time, so that what is waited for has the cores: a condition may start a program.

    Parameters
    ----------
    what
        Completes "expected ... within n s"; a function, where it is known in the end only.
    limit
        Other than `LIMIT` [s], as it is.

    Raises
    ------
    AssertionError
        After the limit.
    """
    limit = LIMIT if limit is None else limit
    deadline = time.monotonic() + limit
    begin = time.monotonic()
    while not (found := condition()):
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"expected {what if isinstance(what, str) else what()} within {limit:g} s")
        time.sleep(min(max(5e-3, 4 * (now - begin)), 0.5))
        begin = time.monotonic()
    return found
