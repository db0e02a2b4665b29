"""Local compute on plain arrays: the same kernels by NumPy, by oneDNN, and by cuDNN on a GPU."""

from halograd.kernels.backend import ACTIVATIONS, Backend
from halograd.kernels.choice import get_backend
from halograd.kernels.errors import KernelError
from halograd.kernels.geometry import Geometry
from halograd.kernels.kernel import BatchNormKernels, Kernel, Substitute

__all__ = [
    "ACTIVATIONS",
    "Backend",
    "BatchNormKernels",
    "Geometry",
    "Kernel",
    "KernelError",
    "Substitute",
    "get_backend",
]
