"""The choice of a backend by name."""

from __future__ import annotations

import logging
from collections.abc import Callable

from halograd.errors import UserError
from halograd.kernels.backend import Backend
from halograd.kernels.errors import KernelError
from halograd.schema import Threads, build

__all__ = ["get_backend"]

_log = logging.getLogger("halograd.kernels")


def _numpy(threads: int, autotune: bool) -> Backend:
    from halograd.kernels.numpy import NumpyBackend

    return NumpyBackend(threads)


def _onednn(threads: int, autotune: bool) -> Backend:
    from halograd.kernels.onednn import OnednnBackend

    return OnednnBackend(threads, autotune)


def _cudnn(threads: int, autotune: bool, precision: str, deterministic: bool, device: int) -> Backend:
    from halograd.kernels.cudnn import CudnnBackend

    return CudnnBackend(threads, autotune, precision, deterministic, device)


# A further backend gets its line here or in `get_backend`, and "auto" its place below.
_ON_CPU: dict[str, Callable[[int, bool], Backend]] = {"numpy": _numpy, "onednn": _onednn}
_NAMES = ("auto", *_ON_CPU, "cudnn")
_warned = False


def get_backend(
    name: str = "auto",
    threads: int = 1,
    autotune: bool = False,
    *,
    precision: str = "strict",
    deterministic: bool = False,
    device: int = 0,
) -> Backend:
    """The backend called `name`, with `threads` threads per kernel.

    ``auto`` is oneDNN, or NumPy after one warning line per process (logger ``halograd.kernels``) where
    oneDNN cannot be loaded; a GPU is used only if asked for, by ``cudnn``.

    Parameters
    ----------
    autotune
        Lets a backend that has several algorithms choose by measurement when a kernel is built.
    precision
        How float32 is computed: ``"strict"``, or on a GPU ``"tf32"``.
    deterministic
        Two runs must agree in every bit. Kernels on the CPU always do.
    device
        Number of the GPU among those visible; means nothing on a CPU.

    Raises
    ------
    KernelError
        If there is no such backend, `threads` is below 1 or above 4096, the library was named and cannot be loaded, or
        the backend does not have the precision.
    """
    try:
        build(Threads, threads)
    except UserError as error:
        raise KernelError(f"threads: {error}; pass threads=1 for one per rank") from None
    if name not in _NAMES:
        raise KernelError(f"expected a backend out of {', '.join(_NAMES)}, got {name!r}; choose one of them")
    if name == "cudnn":
        return _cudnn(threads, autotune, precision, deterministic, device)
    if precision != "strict":
        raise KernelError(
            f"expected precision strict for the backend {name}, got {precision!r}; choose the backend cudnn for tf32"
        )
    return _auto(threads, autotune) if name == "auto" else _ON_CPU[name](threads, autotune)


def _auto(threads: int, autotune: bool) -> Backend:
    global _warned
    try:
        return _onednn(threads, autotune)
    except KernelError as error:
        if not _warned:
            reason = " ".join(str(error).split())
            _log.warning("kernels: NumPy instead of oneDNN, which is 2-3 times faster: %s", reason)
            _warned = True
        return _numpy(threads, autotune)
