"""Our own CUDA kernels: all kernels but convolutions and matrix products."""

from __future__ import annotations

from ..backend import Backend
from .attention import CudaAttention
from .boxes import Boxes
from .columns import CudaBias
from .launch import CupyLauncher, Launcher
from .losses import CudaLosses
from .norms import CudaNorms
from .pointwise import CudaPointwise
from .updates import CudaUpdates

__all__ = ["Boxes", "CudaKernels", "CupyLauncher", "Launcher"]


class CudaKernels(CudaBias, CudaAttention, CudaPointwise, CudaNorms, CudaLosses, CudaUpdates, Backend):
    """All kernels of a GPU backend except convolutions and matrix products.

    A call enqueues its work on the current stream; it neither synchronizes with the host nor allocates.

    Arrays are float32, float64, float16 or bfloat16. Arithmetic on the 16-bit types is done in float32. Sums over many
    elements are finished in float64, always in the same order. Kernels that sum share `scratch`: kernels of one backend
    must not run at the same time on two streams.

    Attributes
    ----------
    launcher : Launcher
        The device interface that compiles and launches the kernels.
    scratch : Scratch
        Device memory that kernels share, for partial sums and other temporary arrays.
    """
