"""Versions and devices as one JSON object, from a program of its own: the import of a library may end the process.

``python -m tests.gpu.facts``. Local.
"""

from __future__ import annotations

import importlib
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["commit", "facts", "missing"]


def facts() -> dict[str, Any]:
    """Return the versions of everything that results depend on; None for what is missing."""
    cupy, cudnn = _module("cupy"), _module("cudnn")
    return {
        "commit": commit(),
        "python": platform.python_version(),
        **{name: getattr(_module(name), "__version__", None) for name in ("halograd", "numpy", "mpi4py", "h5py")},
        "cupy": getattr(cupy, "__version__", None),
        "cudnn frontend": getattr(cudnn, "__version__", None),
        "cudnn": _call(lambda: cudnn.backend_version()),
        "nccl": _call(lambda: importlib.import_module("cupy.cuda.nccl").get_version()),
        "driver": _call(lambda: cupy.cuda.runtime.driverGetVersion()) or None,
        "runtime": _call(lambda: cupy.cuda.runtime.runtimeGetVersion()),
        "devices": _call(lambda: [_device(cupy, i) for i in range(cupy.cuda.runtime.getDeviceCount())]) or [],
    }


def missing(found: dict[str, Any]) -> list[str]:
    """Return the requirements of a GPU check that are missing."""
    lacks = []
    if found.get("cupy") is None:
        lacks.append("CuPy (pip install 'halograd[gpu]')")
    if found.get("cudnn frontend") is None:
        lacks.append("nvidia-cudnn-frontend (pip install 'halograd[gpu]')")
    elif found.get("cudnn") is None:
        lacks.append("the library of cuDNN (pip install nvidia-cudnn-cu13)")
    if not found.get("devices"):
        lacks.append("a CUDA device with its driver")
    return lacks


def commit() -> str:
    """Return the commit of this repository, with a mark if files differ from it; empty without git."""
    git = ["git", "-C", str(Path(__file__).resolve().parents[2])]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        state = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
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


if __name__ == "__main__":
    print(json.dumps(facts()))
