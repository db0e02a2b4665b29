"""Versions and devices, for the report; and what is missing, in a line each. Local."""

from __future__ import annotations

import importlib
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

from halograd import __version__

__all__ = ["facts", "missing"]


def facts() -> dict[str, Any]:
    """Versions of everything that results depend on; None for what is not there."""
    cupy, cudnn = _module("cupy"), _module("cudnn")
    found: dict[str, Any] = {
        "halograd": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cupy": getattr(cupy, "__version__", None),
        "cudnn frontend": getattr(cudnn, "__version__", None),
        "cudnn": _call(lambda: cudnn.backend_version()),
        "nccl": _call(lambda: importlib.import_module("cupy.cuda.nccl").get_version()),
        "driver": _call(lambda: cupy.cuda.runtime.driverGetVersion()) or None,
        "runtime": _call(lambda: cupy.cuda.runtime.runtimeGetVersion()),
        "devices": _call(lambda: [_device(cupy, i) for i in range(cupy.cuda.runtime.getDeviceCount())]) or [],
    }
    return found


def missing(found: dict[str, Any]) -> list[str]:
    """What a check on a GPU needs and does not find."""
    lacks = []
    if found["cupy"] is None:
        lacks.append("CuPy (pip install 'halograd[gpu]')")
    if found["cudnn frontend"] is None:
        lacks.append("nvidia-cudnn-frontend (pip install 'halograd[gpu]')")
    elif found["cudnn"] is None:
        lacks.append("the library of cuDNN (pip install nvidia-cudnn-cu13)")
    if not found["devices"]:
        lacks.append("a CUDA device with its driver")
    return lacks


def _commit() -> str | None:
    """Of the repository that this runs in, with a mark where files differ from it."""
    root = Path(__file__).resolve().parents[2]
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True)
        state = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return head.stdout.strip() + ("+" if state.stdout.strip() else "")


def _device(cupy: Any, ordinal: int) -> dict[str, Any]:
    found = cupy.cuda.runtime.getDeviceProperties(ordinal)
    name = found["name"].decode() if isinstance(found["name"], bytes) else str(found["name"])
    return {"name": name, "bytes": int(found["totalGlobalMem"]), "capability": f"{found['major']}.{found['minor']}"}


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception:  # a CuPy for another CUDA fails in many ways
        return None


def _call(read: Any) -> Any:
    try:
        return read()
    except Exception:  # no driver, no library
        return None
