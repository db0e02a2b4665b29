"""Our own CUDA kernels: everything but convolutions and matrix products, bound to arrays once and then launched."""

from __future__ import annotations

from ..backend import Backend
from .boxes import Boxes
from .columns import CudaBias
from .launch import CupyLauncher, Launcher
from .losses import CudaLosses
from .norms import CudaNorms
from .pointwise import CudaPointwise
from .updates import CudaUpdates

__all__ = ["Boxes", "CudaKernels", "CupyLauncher", "Launcher"]


class CudaKernels(CudaBias, CudaPointwise, CudaNorms, CudaLosses, CudaUpdates, Backend):
    """All of a backend but its products. What its factories return runs on the current stream, without a host
    synchronization and without allocating.

    Arrays are float32, float64, float16 or bfloat16. Arithmetic on the last two is done in float32; sums over many
    elements are finished in float64, always in the same order. Kernels that sum share `scratch`: those of one
    backend must not run at the same time on two streams.

    Attributes
    ----------
    launcher : Launcher
        Where the kernels run.
    scratch : Scratch
        Shared memory for partial sums.
    """
