"""Small files that are seen whole or not at all, by every process on every node."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8: it appears under its name when it is complete, in place of one that was there. Local.

    What is no ordinary file (a pipe, ``/dev/stdout``) is written to as it is.

    Raises
    ------
    OSError
        If it cannot be written; what was there before stays, and nothing else.
    """
    final = Path(os.path.realpath(path))
    if final.exists() and not final.is_file():
        final.write_text(text, encoding="utf-8")
        return
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    try:
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())  # a rename may overtake the data otherwise; some disks say only here they are full
        os.replace(partial, final)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
