"""Driver, CuPy, cuDNN and NCCL, and whether the GPU computes what the processor does."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from halograd.cli.doctor.compute import convolve
from halograd.cli.doctor.finding import Finding

__all__ = ["probe_gpu"]

NOT_NEEDED = "not needed on a CPU"
#: The last NumPy that CuPy 14.2 lists as tested; its metadata allows later ones.
NUMPY = (2, 4)
INSTALL = "pip install 'halograd[gpu]'; training on the processor needs none of it"


def probe_gpu() -> Iterator[Finding]:
    """Driver, CuPy, cuDNN and NCCL, or why not, and the backend cudnn. Local.

    Nothing of it is needed on a CPU: what is missing is a note there, and a warning only where there is a GPU.
    """
    driver, devices = _driver()
    yield Finding("CUDA driver", "ok" if devices else "note", driver)
    cupy = _load("cupy")
    yield _found("CuPy", cupy, devices, lambda: str(cupy.__version__))
    if devices and not isinstance(cupy, str):
        yield from _numpy(np.__version__)
    cudnn = _load("cudnn")
    yield _found("cuDNN", cudnn, devices, lambda: f"{cudnn.backend_version()} (frontend {cudnn.__version__})")
    nccl: Any = cupy if isinstance(cupy, str) else _load("cupy.cuda.nccl")
    yield _found("NCCL", nccl, devices, lambda: str(nccl.get_version()))
    yield from _backend(devices)


def _numpy(version: str) -> Iterator[Finding]:
    """A warning where CuPy was not tested with this NumPy."""
    if tuple(int(part) for part in version.split(".")[:2]) > NUMPY:
        last = ".".join(map(str, NUMPY))
        value = f"{version}: CuPy is tested with NumPy up to {last}"
        yield Finding("NumPy for CuPy", "warn", value, f"pip install 'numpy<{NUMPY[0]}.{NUMPY[1] + 1}'")


def _load(name: str) -> Any:
    """The module, or in words why it cannot be had."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed"
    except Exception as error:  # a broken CUDA installation raises what it likes
        return " ".join(f"{type(error).__name__}: {error}".split())


def _found(name: str, module: Any, devices: int, version: Any) -> Finding:
    if isinstance(module, str):
        return _missing(name, module, devices)
    try:
        return Finding(name, "ok", version())
    except Exception as error:  # the module is there, its library is not
        return _missing(name, " ".join(f"{type(error).__name__}: {error}".split()), devices)


def _missing(name: str, why: str, devices: int) -> Finding:
    if devices:
        return Finding(name, "warn", why, INSTALL)
    return Finding(name, "note", f"{why}; {NOT_NEEDED}")


def _backend(devices: int) -> Iterator[Finding]:
    """The backend cudnn, and one convolution with it checked against NumPy's."""
    from halograd.kernels import KernelError, get_backend

    try:
        backend = get_backend("cudnn")
    except KernelError as error:
        yield _missing("GPU kernels", " ".join(str(error).split()), devices)
        return
    with backend, get_backend("numpy") as reference:
        yield Finding("GPU kernels", "ok", backend.describe())
        implementation, difference = convolve(backend, reference)
        # The same sums of 144 products in another order, in float32.
        right = difference < 1e-4
        value = f"{implementation}, differs from NumPy by {difference:.0e}"
        remedy = "" if right else "do not train on this GPU: its convolution is wrong; try another cuDNN 9"
        yield Finding("GPU convolution", "ok" if right else "warn", value, remedy)


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
