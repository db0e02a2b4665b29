"""The interface of local compute.

A factory takes arrays and returns a :class:`Kernel` that is bound to them. The factory checks the arrays, once for all
backends, and then calls the backend's own method: the same name with an underscore. ::

    convolution.py  attention.py  pointwise.py  norms.py  summed.py  losses.py  updates.py
                    the factories and their checks; references that need only functions of arrays (`_group_norm`)
    numpy/          the reference: all kernels, on the CPU
    onednn/         NumPy's kernels, replaced by oneDNN's where these are fast
    cudnn/          convolutions, dense layers and attention by cuDNN and cuBLAS, on a GPU
    cuda/           all other kernels on a GPU, and attention that cuDNN does not compute
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from .attention import Attentions
from .kernel import KernelError
from .losses import Losses
from .pointwise import Pointwise
from .summed import SummedConvolutions
from .updates import Updates

__all__ = ["Backend", "BackendOptions"]

AnyBackend = TypeVar("AnyBackend", bound="Backend")


@dataclass(frozen=True)
class BackendOptions:
    """Options of a backend for a run.

    Attributes
    ----------
    threads
        Threads per kernel on a CPU.
    autotune
        Whether a backend that has several algorithms chooses by measurement when a kernel is built.
    precision
        Precision of float32 products: ``"strict"``, or on a GPU ``"tf32"``.
    deterministic
        Whether two runs must agree in every bit. On a CPU they do without `autotune`.
    device
        Index of the GPU among those visible.
    """

    threads: int = 1
    autotune: bool = False
    precision: str = "strict"
    deterministic: bool = False
    device: int = 0

    def refuse_precision(self, name: str) -> None:
        """Raise KernelError unless the precision is strict; for a backend `name` that has no other precision."""
        if self.precision != "strict":
            raise KernelError(
                f"expected precision strict for the backend {name}, got {self.precision!r}; choose the backend cudnn "
                "for tf32"
            )


class Backend(Attentions, Pointwise, SummedConvolutions, Losses, Updates):
    """Local compute on plain arrays ``(N, *spatial, C)`` on one device. All methods are local.

    Arrays are packed, and kernels overwrite their outputs entirely, unless a factory documents otherwise. Arrays may
    have no elements (a rank that owns nothing); empty sums are zero. Kernels of one backend share scratch memory and
    must not run at the same time in several threads. Build and run them in the same thread.

    Attributes
    ----------
    name, version : str
    threads : int
        Threads per kernel on a CPU.
    xp : module
        The array namespace of the device (``numpy``, ``cupy``).
    dtypes : tuple of str
        Element types of the arrays of layers that all kernels take; ``conv_dtypes``: that convolutions take.
    device : Device
        Device of the arrays. On a GPU kernels are enqueued: a call returns before they have run.
    """

    #: Whether arrays live on a GPU: then each rank computes on one GPU, and job scripts reserve GPUs.
    on_device: ClassVar[bool] = False
    #: Whether the gradient of a convolution's weights has 16 bits if its images have; else it is float32.
    rounds_gradients: ClassVar[bool] = False

    @classmethod
    def open(cls: type[AnyBackend], options: BackendOptions) -> AnyBackend:
        """Return a backend for one rank. A subclass whose constructor takes more than `threads` overrides this. Local.

        Raises
        ------
        KernelError
            If the library or the device is missing, or does not support an option.
        """
        options.refuse_precision(cls.name)
        return cls(options.threads)  # type: ignore[call-arg]
