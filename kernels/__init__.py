"""Local compute on plain arrays: the same kernels by NumPy, by oneDNN, and by cuDNN and our own on a GPU."""

from halograd.kernels.backend import Backend, get_backend
from halograd.kernels.errors import KernelError
from halograd.kernels.geometry import Geometry
from halograd.kernels.group_norm import GroupNormArrays
from halograd.kernels.kernel import BatchNormKernels, BatchNormTraining, Kernel, Substitute
from halograd.kernels.losses import ClassTargets, LossArrays, LossKernel
from halograd.kernels.norms import ChannelNormArrays
from halograd.kernels.pointwise import ACTIVATIONS, DropoutMask
from halograd.kernels.resample import Resampled, Resampling
from halograd.kernels.updates import UpdateArrays

__all__ = [
    "ACTIVATIONS",
    "Backend",
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
