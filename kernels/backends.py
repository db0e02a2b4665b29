"""The backends by name: those of the library, of installed packages, and classes in files of the user."""

from __future__ import annotations

import logging

from halograd.errors import UserError
from halograd.registry import Registry
from halograd.schema import Threads, build

from .backend import Backend, BackendOptions
from .kernel import KernelError

__all__ = ["BACKENDS", "FastestOnHost", "get_backend"]

_log = logging.getLogger("halograd.kernels")
_warned = False

#: A class of the user derives from :class:`Backend`, or from a backend of which it changes some kernels.
BACKENDS: Registry[Backend] = Registry("backend", Backend, key="backend.kernels")


@BACKENDS.register
class FastestOnHost(Backend):
    """The fastest backend that can be loaded on a CPU. It has no instances: `open` returns another backend."""

    name = "auto"

    @classmethod
    def open(cls, options: BackendOptions) -> Backend:  # type: ignore[override]
        """Return oneDNN; if it cannot be loaded, NumPy, with one warning per process."""
        global _warned
        options.refuse_precision(cls.name)
        try:
            return _onednn().open(options)
        except KernelError as error:
            if not _warned:
                reason = " ".join(str(error).split())
                _log.warning("kernels: NumPy instead of oneDNN, which is 2-3 times faster: %s", reason)
                _warned = True
            return _numpy().open(options)


# Imported when first opened: a run on a CPU does not load the modules for GPUs.
def _numpy() -> type[Backend]:
    from .numpy import NumpyBackend

    return NumpyBackend


def _onednn() -> type[Backend]:
    from .onednn import OnednnBackend

    return OnednnBackend


def _cudnn() -> type[Backend]:
    from .cudnn import CudnnBackend

    return CudnnBackend


for _name, _load in {"numpy": _numpy, "onednn": _onednn, "cudnn": _cudnn}.items():
    BACKENDS.register_later(_name, _load)


def get_backend(
    name: str = "auto",
    threads: int = 1,
    autotune: bool = False,
    *,
    precision: str = "strict",
    deterministic: bool = False,
    device: int = 0,
) -> Backend:
    """Return the backend called `name`, with `threads` threads per kernel. Local.

    ``auto`` is oneDNN. If oneDNN cannot be loaded, it is NumPy, with one warning per process (logger
    ``halograd.kernels``). Of the library's backends only ``cudnn`` uses a GPU. ``"FILE.py:CLASS"`` is a class in a file
    of the user.

    Parameters
    ----------
    autotune
        Whether a backend that has several algorithms chooses by measurement when a kernel is built.
    precision
        Precision of float32 products: ``"strict"``, or on a GPU ``"tf32"``.
    deterministic
        Whether two runs must agree in every bit. On a CPU they do without `autotune`.
    device
        Index of the GPU among those visible; ignored on a CPU.

    Raises
    ------
    UserError
        If there is no such backend, or its class cannot be imported.
    KernelError
        If `threads` is below 1 or above 4096, the backend's library or device is missing (for ``auto`` NumPy is used
        instead), or the backend does not have the precision.
    """
    try:
        # The limits of a configuration; callers of kernels expect the error of kernels.
        build(Threads, threads)
    except UserError as error:
        raise KernelError(f"threads: {error}; pass threads=1 for one per rank") from None
    return BACKENDS.find(name, "backend").open(BackendOptions(threads, autotune, precision, deterministic, device))
