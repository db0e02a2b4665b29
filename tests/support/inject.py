"""Injected faults of one rank: at a call of a given function, or at the n-th call of any function of the library."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import halograd

__all__ = ["AtCall", "Injected", "raising", "refusing"]

ROOT = Path(halograd.__file__).parent
#: Code that raises nothing by itself: the agreement, and arithmetic on a few numbers between two calls of MPI.
ATOMIC: dict[str, set[str] | None] = {
    "comm/errors.py": None,
    "comm/progress.py": {"rest"},
    "comm/transports/memory.py": None,
    "comm/communicator.py": {"agree", "agreement", "_meet"},
    "comm/channel.py": {"check_matching"},
    "comm/reduction.py": {"check_identical", "properties"},
    "comm/transports/base.py": {"split_node"},
    "comm/transports/shared.py": {"_open"},
}
#: What Python calls while it frees objects: an exception goes nowhere there.
FREEING = {"__del__", "close", "__exit__"}


class Injected(RuntimeError):
    """A fault that a test injects."""


@contextmanager
def raising(owner: Any, name: str, number: int = 1) -> Iterator[None]:
    """Make the `number`-th call of ``owner.name`` raise :class:`Injected`, once."""
    original: Callable[..., Any] = getattr(owner, name)
    calls = 0

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number:
            raise Injected(f"{name} failed")
        return original(*args, **options)

    setattr(owner, name, call)
    try:
        yield
    finally:
        setattr(owner, name, original)
    assert calls >= number, f"{name} was called {calls} times only"


@contextmanager
def refusing(name: str, number: int, part: str = "") -> Iterator[list[str]]:
    """Make every call of ``os.NAME`` whose first argument contains `part` fail with the system's error `number`.

    Yields the arguments of the calls that failed.
    """
    original: Callable[..., Any] = getattr(os, name)
    failed: list[str] = []

    def call(first: Any, *args: Any, **options: Any) -> Any:
        if part not in str(first):
            return original(first, *args, **options)
        failed.append(str(first))
        raise OSError(number, os.strerror(number), *([] if isinstance(first, int) else [str(first)]))

    setattr(os, name, call)
    try:
        yield failed
    finally:
        setattr(os, name, original)


class AtCall:
    """Tracer that raises :class:`Injected` at the n-th call of a library function on this thread, or only counts calls.

    Attributes
    ----------
    count
        Number of calls so far.
    where
        File, line and name of the function that raised.
    """

    def __init__(self, n: int | None = None) -> None:
        self._n, self.count, self.where = n, 0, ""
        self._lost = sys.unraisablehook

    def __enter__(self) -> AtCall:
        self._lost, sys.unraisablehook = sys.unraisablehook, self._on_lost
        sys.setprofile(self._event)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.setprofile(None)
        sys.unraisablehook = self._lost

    def _on_lost(self, lost: Any) -> None:
        """Raise the fault again at the next call if a freed generator has swallowed it."""
        if not isinstance(lost.exc_value, Injected):
            self._lost(lost)
            return
        self._n = self.count + 1
        sys.setprofile(self._event)

    def _event(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or not _counts(frame):
            return
        self.count += 1
        if self.count == self._n:
            sys.setprofile(None)
            self.where = f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno} {frame.f_code.co_name}"
            raise Injected("a call failed")


def _counts(frame: FrameType) -> bool:
    if not _may_fail(frame.f_code):
        return False
    caller: FrameType | None = frame
    for _ in range(4):
        if caller is None:
            break
        if caller.f_code.co_name in FREEING:
            return False
        caller = caller.f_back
    return True


@functools.cache
def _may_fail(code: CodeType) -> bool:
    path = Path(code.co_filename)
    if ROOT not in path.parents:
        return False
    file = path.relative_to(ROOT).as_posix()
    names = ATOMIC.get(file, set())
    return names is not None and code.co_name not in names
