"""Numbers of ranks on which tests run, from the marks of a test, or of a file without an import of it."""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

__all__ = ["daily", "files_for", "sizes_in", "sizes_of"]

FEW, MANY = (1, 2, 3, 4), (1, 2, 3, 4, 6, 8)
_MARK = re.compile(r"mark\.(mpi|many_ranks|ranks)\b(?:\(([^)]*)\))?")


def sizes_of(item: pytest.Item) -> tuple[int, ...]:
    """Return the numbers of ranks on which a test runs; empty for a serial test."""
    exact = item.get_closest_marker("ranks")
    if exact is not None:
        if not exact.args or not all(isinstance(n, int) and n > 0 for n in exact.args):
            raise pytest.UsageError(f"{item.nodeid}: expected @pytest.mark.ranks(2, 6), got ranks{exact.args}")
        return exact.args
    mpi = item.get_closest_marker("mpi")
    if mpi is None and item.get_closest_marker("many_ranks") is None:
        return ()
    smallest = mpi.kwargs.get("min_size", 1) if mpi else 1
    every = MANY if item.get_closest_marker("many_ranks") else FEW
    return tuple(n for n in every if n >= smallest)


def daily(items: Iterable[pytest.Item]) -> Iterator[tuple[pytest.Item, set[int]]]:
    """Yield each test with the numbers of ranks under which it runs in a run without nightly tests.

    The cases of a test function take 4, 3 and 2 ranks in turn, so that each case and each of these numbers is run, but
    not each pair of them. Every third case runs on one rank too. A function with a single case runs on the most ranks.
    """
    cases: Counter[str] = Counter()
    for item in items:
        sizes = [size for size in sizes_of(item) if size <= max(FEW)]
        several = [size for size in reversed(sizes) if size > 1]
        function = item.nodeid.partition("[")[0]
        number = cases[function] + (zlib.crc32(function.encode()) if hasattr(item, "callspec") else 0)
        turns = {several[number % len(several)]} if several else set(sizes)
        cases[function] += 1
        yield item, turns | ({1} & set(sizes) if number % 3 == 0 else set())


def sizes_in(text: str) -> set[int]:
    """Return the numbers of ranks that the marks in a file's text name; all numbers if one is not a literal.

    >>> sorted(sizes_in("@pytest.mark.ranks(2, 6)")), sizes_in("def test_serial(): pass")
    ([2, 6], set())
    """
    found: set[int] = set()
    for kind, given in _MARK.findall(text):
        if kind == "ranks":
            plain = re.fullmatch(r"[\d,\s]+", given)
            found.update(map(int, re.findall(r"\d+", given)) if plain else MANY)
        else:
            found.update(MANY if kind == "many_ranks" else FEW)
    return found


def files_for(size: int, folder: Path) -> list[str]:
    """Return the test files with tests for this number of ranks; collecting all other files would take long."""
    return sorted(str(p) for p in folder.rglob("test_*.py") if size in sizes_in(p.read_text(encoding="utf-8")))
