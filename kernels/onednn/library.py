"""Where oneDNN's shared library is, and whether it is one we can use."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from halograd.kernels.errors import KernelError

__all__ = ["NAME", "candidates", "open_library"]

NAME = "libdnnl.so.3"
ENVIRONMENT = "DNNL_LIB"
_REMEDY = f"pip install onednn-cpu-gomp (x86-64 Linux), or set {ENVIRONMENT} to a {NAME} of oneDNN 3"


def candidates() -> list[str]:
    """Paths to try, in order: the environment variable alone if it is set; else this Python, conda, the system."""
    named = os.environ.get(ENVIRONMENT)
    if named:
        return [named]
    prefixes = [sys.prefix, os.environ.get("CONDA_PREFIX", "")]
    return [*(str(Path(p) / "lib" / NAME) for p in prefixes if p), NAME]


def open_library() -> tuple[ctypes.CDLL, str]:
    """The library and the path it was found under.

    Raises
    ------
    KernelError
        If none can be loaded, with the reason for each path.
    """
    reasons = []
    for path in candidates():
        try:
            return ctypes.CDLL(path), path
        except OSError as error:
            reasons.append(f"{path}: {' '.join(str(error).split())}")
    raise KernelError(f"expected oneDNN's library, got none ({'; '.join(reasons)}); {_REMEDY}")
