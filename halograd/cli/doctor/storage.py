"""HDF5, and the accelerators that are there or not."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
from collections.abc import Iterator
from typing import Any

from halograd.cli.doctor.finding import Finding

__all__ = ["probe_cuda", "probe_hdf5"]

NOT_NEEDED = "not needed on a CPU"


def probe_hdf5() -> Iterator[Finding]:
    """h5py, HDF5, and whether it writes from several ranks at once. Local."""
    import h5py

    parallel = "parallel" if h5py.get_config().mpi else "serial (each rank reads its own blocks)"
    yield Finding("h5py", "ok", f"{h5py.__version__}, HDF5 {h5py.version.hdf5_version}, {parallel}")


def probe_cuda() -> Iterator[Finding]:
    """Driver, CuPy, cuDNN and NCCL, or why not. Local. Nothing of it is needed on a CPU."""
    driver, devices = _driver()
    yield Finding("CUDA driver", "ok" if devices else "note", driver)
    cupy = _load("cupy")
    if isinstance(cupy, str):
        yield Finding("CuPy", "note", f"{cupy}; {NOT_NEEDED}")
    else:
        yield Finding("CuPy", "ok", str(cupy.__version__))
    cudnn = _load("cudnn")
    yield Finding("cuDNN", *(("note", f"{cudnn}; {NOT_NEEDED}") if isinstance(cudnn, str) else _cudnn(cudnn)))
    nccl = cupy if isinstance(cupy, str) else _load("cupy.cuda.nccl")
    if isinstance(nccl, str):
        yield Finding("NCCL", "note", f"{nccl}; {NOT_NEEDED}")
    else:
        yield Finding("NCCL", "ok", str(nccl.get_version()))


def _load(name: str) -> Any:
    """The module, or in words why it cannot be had."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # a broken CUDA installation raises what it likes
        return " ".join(f"{type(error).__name__}: {error}".split())


def _cudnn(module: Any) -> tuple[str, str]:
    try:
        return "ok", f"{module.backend_version()} (frontend {module.__version__})"
    except Exception as error:  # the frontend is there, its library is not
        return "note", f"{type(error).__name__}: {error}; {NOT_NEEDED}"


def _driver() -> tuple[str, int]:
    """What the CUDA driver says, and its number of devices."""
    path = ctypes.util.find_library("cuda")
    if path is None:
        return f"no libcuda; {NOT_NEEDED}", 0
    try:
        library = ctypes.CDLL(path)
        code = library.cuInit(0)
        count, version = ctypes.c_int(), ctypes.c_int()
        if code == 0:
            library.cuDeviceGetCount(ctypes.byref(count))
        library.cuDriverGetVersion(ctypes.byref(version))
    except OSError as error:
        return str(error), 0
    name = f"{version.value // 1000}.{version.value % 1000 // 10}"
    return f"CUDA {name}, {count.value} devices" + (f" (error {code})" if code else ""), count.value
