"""Numbers of ranks that tests are to be run under, as marks say: of a test, and of a file without importing it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

__all__ = ["files_for", "sizes_in", "sizes_of"]

FEW, MANY = (1, 2, 3, 4), (1, 2, 3, 4, 6, 8)
_MARK = re.compile(r"mark\.(mpi|many_ranks|ranks)\b(?:\(([^)]*)\))?")


def sizes_of(item: pytest.Item) -> tuple[int, ...]:
    """Numbers of ranks a test is to be run under; empty for a serial test."""
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


def sizes_in(text: str) -> set[int]:
    """Numbers of ranks that the marks in the text of a file name; all where one is no plain number.

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
    """Test files with tests for so many ranks: to collect the others takes every rank longer than to run some."""
    return sorted(str(p) for p in folder.rglob("test_*.py") if size in sizes_in(p.read_text(encoding="utf-8")))
