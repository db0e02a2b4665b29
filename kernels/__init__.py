"""Local compute on plain arrays: the same kernels by NumPy, by oneDNN, and by cuDNN and our own on a GPU."""

from halograd.kernels.backend import Backend, get_backend
from halograd.kernels.geometry import Geometry, Resampled, Resampling
from halograd.kernels.kernel import BatchNormKernels, BatchNormTraining, Kernel, KernelError, Substitute
from halograd.kernels.losses import ClassTargets, LossArrays, LossKernel
from halograd.kernels.norm_parts import GroupNormArrays
from halograd.kernels.norms import ChannelNormArrays
from halograd.kernels.pointwise import ACTIVATIONS, DropoutMask
from halograd.kernels.updates import UpdateArrays

__all__ = [
    "ACTIVATIONS",
    "Backend",
    "BatchNormArrays",
    "BatchNormKernels",
    "BatchNormTraining",
    "ChannelNormArrays",
    "ClassTargets",
    "DropoutMask",
    "Geometry",
    "GroupNormArrays",
    "Kernel",
    "KernelError",
    "LossArrays",
    "LossKernel",
    "Resampled",
    "Resampling",
    "Substitute",
    "UpdateArrays",
    "get_backend",
]
