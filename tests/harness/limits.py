"""Time limits against deadlock: generous, and longer on a slow or busy machine. No verdict depends on them.

A short calibration at the start of the suite measures how much slower than nominal this machine is. All processes of
the suite get the factor from the environment and multiply every limit by it.
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
    """Return the measured time of fixed work, in one process per core, relative to the nominal time; at least 1."""
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
    """Return the factor that the first process of the suite measures and all others read from the environment."""
    if SLOWNESS_VARIABLE not in os.environ:
        os.environ[SLOWNESS_VARIABLE] = f"{measure():.2f}"
    return float(os.environ[SLOWNESS_VARIABLE])


def scaled(seconds: float) -> float:
    """Return the limit [s] on this machine for a limit on an idle machine of nominal speed."""
    return seconds * slowness()


#: How long a test waits for anything: another process, a thread, a file [s].
LIMIT = scaled(240)
#: How long a test may take on a machine of nominal speed [s]; more than `LIMIT`, whose message says more.
TEST_LIMIT = 600.0


def grace() -> float:
    """Return the time [s] between the first sign of a failure and stronger measures, such as a kill."""
    return float(os.environ.get(GRACE_VARIABLE, scaled(20)))


def wait_until(condition: Callable[[], T], what: str | Callable[[], str], limit: float | None = None) -> T:
    """Return the value of `condition` as soon as it is true.

    Calls of `condition`, which may start a program, take at most a fifth of the time, and leave the cores to other
    work.

    Parameters
    ----------
    what
        Completes "expected ... within n s"; a function if the text is known only at the end.
    limit
        Limit in place of `LIMIT` [s]; it is not scaled.

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
