"""Files of other frameworks: their libraries, and the check before writing."""

from __future__ import annotations

import importlib
import mmap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import numpy as np

from halograd.errors import UserError

from ..data.disk import DataError, check_writable

__all__ = [
    "Buffer",
    "check_place",
    "finite",
    "library",
]


#: Content of a file, in memory or mapped.
Buffer = bytes | mmap.mmap


def library(name: str, source: str = "'halograd[interchange]'") -> ModuleType:
    """Import the module `name`, which only the exchange with other frameworks needs; pip installs it from `source`.

    Raises
    ------
    UserError
        If it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise UserError(
            f"expected the library {package}, got none ({error}); install it by: pip install {source}"
        ) from error


def finite(array: np.ndarray, what: str) -> np.ndarray:
    """Return an array of weights. Raises UserError if one of its elements is infinite or NaN."""
    bad = array.size - int(np.count_nonzero(np.isfinite(array)))
    if bad:
        raise UserError(
            f"{what}: expected finite numbers, got {bad} of {array.size} that are infinite or NaN; write the weights "
            "of an earlier step of that training"
        )
    return array


def check_place(path: Path, ours: str, is_ours: Callable[[], bool]) -> None:
    """Check early that a file can be written, and replaces only a file of this library. Local.

    Parameters
    ----------
    path
        File that will be written.
    ours
        Description of the file that may be replaced, for the message.
    is_ours
        Function that returns whether the existing file may be replaced. Any error in it means that it may not.

    Raises
    ------
    DataError
        If the path cannot be written, or another file exists there.
    """
    check_writable(path)
    if not path.exists():
        return
    with suppress(Exception):  # an unreadable file is a foreign file
        if is_ours():
            return
    raise DataError(f"cannot write {path}: expected no file there, or {ours}, got another; give another path")
