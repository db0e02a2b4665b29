"""The choice of a backend by name."""

from __future__ import annotations

import logging
from collections.abc import Callable

from halograd.kernels.backend import Backend
from halograd.kernels.errors import KernelError

__all__ = ["get_backend"]

_log = logging.getLogger("halograd.kernels")


def _numpy(threads: int, autotune: bool) -> Backend:
    from halograd.kernels.numpy import NumpyBackend

    return NumpyBackend(threads)


def _onednn(threads: int, autotune: bool) -> Backend:
    from halograd.kernels.onednn import OnednnBackend

    return OnednnBackend(threads, autotune)


# A further backend gets its line here, and "auto" its place below.
_BACKENDS: dict[str, Callable[[int, bool], Backend]] = {"numpy": _numpy, "onednn": _onednn}
_warned = False


def get_backend(name: str = "auto", threads: int = 1, autotune: bool = False) -> Backend:
    """The backend called `name`, with `threads` threads per kernel.

    `autotune` lets a backend that has several algorithms choose by measurement when a kernel is built.

    ``auto`` is oneDNN, or NumPy after one warning line per process (logger ``halograd.kernels``) where
    oneDNN cannot be loaded.

    Raises
    ------
    KernelError
        If there is no such backend, `threads` is below 1, or the library was named and cannot be loaded.
    """
    if threads < 1:
        raise KernelError(f"expected at least 1 thread, got {threads}; pass threads=1 for one per rank")
    if name == "auto":
        return _auto(threads, autotune)
    if name not in _BACKENDS:
        raise KernelError(f"expected a backend out of auto, {', '.join(_BACKENDS)}, got {name!r}; choose one of them")
    return _BACKENDS[name](threads, autotune)


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
