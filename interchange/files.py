"""Import of the libraries for files of other frameworks, and the check of the numbers in these files."""

from __future__ import annotations

import importlib
import mmap
from types import ModuleType

import numpy as np

from halograd.errors import UserError

__all__ = [
    "Buffer",
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
