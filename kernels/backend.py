"""The interface of local compute, and the choice of a backend by name.

A factory takes arrays and returns a :class:`Kernel` that is bound to them. The factory checks the arrays, once for all
backends, and then calls the backend's own method: the same name with an underscore. ::

    convolution.py  pointwise.py  norms.py  losses.py  updates.py     the factories and their checks
    numpy/          the reference: all kernels, on the CPU
    onednn/         NumPy's kernels, replaced by oneDNN's where these are fast
    cudnn/          convolutions and products by cuDNN and cuBLAS, on a GPU
    cuda/           all other kernels on a GPU
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from halograd.errors import UserError
from halograd.schema import Threads, build

from .convolution import Convolutions
from .kernel import KernelError
from .losses import Losses
from .norms import Norms
from .pointwise import Pointwise
from .updates import Updates

__all__ = ["Backend", "get_backend"]

_log = logging.getLogger("halograd.kernels")


class Backend(Convolutions, Pointwise, Norms, Losses, Updates):
    """Local compute on plain arrays ``(N, *spatial, C)``, packed, on one device. All methods are local.

    Kernels overwrite their outputs entirely. Arrays may have no elements (a rank that owns nothing);
    sums over nothing are zero. Kernels of one backend share scratch memory and must not run at the same
    time in several threads. Build and run them in the same thread.

    Attributes
    ----------
    name, version : str
    threads : int
        Threads per kernel on a CPU.
    xp : module
        The array namespace of the device (``numpy``, ``cupy``).
    dtypes : tuple of str
        Element types that every kernel takes. ``conv_dtypes`` are those of the convolutions.
    device : Device
        Where the arrays live. On a device kernels are enqueued: a call returns before they have run.
    """


def _numpy(threads: int, autotune: bool) -> Backend:
    from .numpy import NumpyBackend

    return NumpyBackend(threads)


def _onednn(threads: int, autotune: bool) -> Backend:
    from .onednn import OnednnBackend

    return OnednnBackend(threads, autotune)


def _cudnn(threads: int, autotune: bool, precision: str, deterministic: bool, device: int) -> Backend:
    from .cudnn import CudnnBackend

    return CudnnBackend(threads, autotune, precision, deterministic, device)


# Register a further backend here or in `get_backend`, and set its order for "auto" below.
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
    """Return the backend called `name`, with `threads` threads per kernel.

    ``auto`` is oneDNN. If oneDNN cannot be loaded, it is NumPy, with one warning per process (logger
    ``halograd.kernels``). A GPU is used only by ``cudnn``.

    Parameters
    ----------
    autotune
        Lets a backend that has several algorithms choose by measurement when a kernel is built.
    precision
        How float32 is computed: ``"strict"``, or on a GPU ``"tf32"``.
    deterministic
        Two runs must agree in every bit. Kernels on the CPU always do.
    device
        Number of the GPU among those visible; ignored on a CPU.

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
