"""A progress bar as a callback, for functions that report ``progress(done, total)``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

__all__ = ["progress_bar"]


@contextlib.contextmanager
def progress_bar(title: str, console: Console | None = None) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while the block runs; gives the callback ``(done, total)`` that moves it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console or Console(stderr=True)) as progress:
        task = progress.add_task(title, total=None)

        def update(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield update
