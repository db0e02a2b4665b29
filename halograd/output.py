"""Output of commands: text tables with aligned columns and units in the heading, and progress."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from .documents import bytes_text

if TYPE_CHECKING:
    from rich.console import Console

    from .perfmodel.plans import Plan

__all__ = [
    "bytes_text",
    "cut_text",
    "idle_text",
    "mebibytes",
    "milliseconds",
    "progress_bar",
    "split_text",
    "table",
    "time_text",
    "working",
]


def table(heading: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return lines of a table; the first `left` columns are aligned left, the others right.

    >>> table(["layer", "ms"], [["conv", "1.5"], ["bn", "0.25"]])
    ['layer    ms', 'conv    1.5', 'bn     0.25']
    """
    widths = [max(len(row[i]) for row in (heading, *rows)) for i in range(len(heading))]
    lines = []
    for row in (heading, *rows):
        cells = [cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        lines.append("  ".join(cells).rstrip())
    return lines


def milliseconds(seconds: float, digits: int = 3) -> str:
    """Return a time as a number of milliseconds with `digits` decimal places; "-" for zero.

    >>> milliseconds(0.0123), milliseconds(0)
    ('12.300', '-')
    """
    return f"{1e3 * seconds:.{digits}f}" if seconds else "-"


def time_text(seconds: float) -> str:
    """Return a time with a suitable unit and at most four significant digits.

    >>> time_text(0.01234), time_text(12.5), time_text(3.2e-6)
    ('12.34 ms', '12.5 s', '3.2 us')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us"


def mebibytes(nbytes: float) -> str:
    """Return a size as a number of MiB; "-" for zero."""
    return f"{nbytes / 2**20:.1f}" if nbytes else "-"


def cut_text(parts: Mapping[str, int]) -> str:
    """Return the parts of the axes that are cut, as a string.

    >>> cut_text({"sample": 2, "height": 4, "width": 1}), cut_text({})
    ('2 sample x 4 height', 'no cut')
    """
    return " x ".join(f"{n} {axis}" for axis, n in parts.items() if n > 1) or "no cut"


def idle_text(plan: Plan) -> list[str]:
    """Return a line about ranks that no layer of a plan uses; empty if all are used."""
    idle = plan.ranks - max((record.ranks for record in plan.prediction.layers), default=0)
    if not idle:
        return []
    return [f"idle        {idle} of {plan.ranks} ranks have nothing to compute: plan for fewer, or for a larger batch"]


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show activity on the terminal of stderr during a long task; yield a function that changes the text.

    Without a terminal, nothing is shown.
    """
    from .training.log import stderr_console

    console = stderr_console()
    if not console.is_terminal:
        yield lambda text: None
        return
    with console.status(text) as status:
        yield status.update


def split_text(ranks: int, threads: int) -> str:
    """Return numbers of ranks and threads as a string.

    >>> split_text(2, 1), split_text(1, 4)
    ('2 ranks x 1 thread', '1 rank x 4 threads')
    """
    return f"{ranks} rank{'s' * (ranks > 1)} x {threads} thread{'s' * (threads > 1)}"


@contextmanager
def progress_bar(
    unit: str, shown: bool = True, transient: bool = False, console: Console | None = None
) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on the terminal of stderr; yield a function that takes the number of completed items and of all.

    Parameters
    ----------
    unit
        Name of the items, shown after their numbers.
    shown
        Whether to show the bar; without a terminal it is never shown.
    transient
        Whether the bar disappears at the end, and stays below other output until then.
    console
        Console of the bar; None: stderr.
    """
    import sys

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from .training.log import stderr_console

    console = console or stderr_console()
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeRemainingColumn())
    both = not transient or sys.stdout.isatty()  # output to a file cannot be erased
    off = not (shown and console.is_terminal)
    with Progress(*columns, console=console, disable=off, transient=transient, redirect_stdout=both) as bar:
        # Until the first call gives the total, the bar shows only that something runs.
        task = bar.add_task("", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
