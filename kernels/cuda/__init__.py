"""Our own CUDA kernels: everything but convolutions and matrix products, bound to arrays once and then launched."""

from __future__ import annotations

from halograd.kernels.backend import Backend
from halograd.kernels.cuda.boxes import Boxes
from halograd.kernels.cuda.columns import CudaBias
from halograd.kernels.cuda.launch import CupyLauncher, Launcher
from halograd.kernels.cuda.losses import CudaLosses
from halograd.kernels.cuda.norms import CudaNorms
from halograd.kernels.cuda.pointwise import CudaPointwise
from halograd.kernels.cuda.updates import CudaUpdates

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
