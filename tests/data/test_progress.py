"""The progress bar follows its callback."""

from __future__ import annotations

import io

from rich.console import Console

from halograd.data.progress import progress_bar


def test_the_bar_shows_what_was_reported() -> None:
    out = io.StringIO()
    with progress_bar("generating", Console(file=out, force_terminal=True, width=100)) as update:
        update(3, 7)
    assert "generating" in out.getvalue() and "3/7" in out.getvalue()
