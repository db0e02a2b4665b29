"""Local compute on plain arrays: the same kernels in NumPy, in oneDNN, and in cuDNN and our own CUDA code on a GPU."""

from .access import Access, makes, reads, writes
from .attention import AttentionGeometry, Everywhere, Neighborhood, Reach, Windows
from .backend import Backend, BackendOptions
from .backends import BACKENDS, get_backend
from .geometry import Geometry, Resampled, Resampling
from .kernel import (
    ACTIVATIONS,
    BatchNormArrays,
    BatchNormKernels,
    BatchNormTraining,
    FusedActivation,
    Kernel,
    KernelError,
    Substitute,
)
from .losses import ClassTargets, LossArrays, LossKernel
from .norm_parts import GroupNormArrays
from .norms import ChannelNormArrays
from .pointwise import DropoutMask
from .updates import StepNumbers, UpdateArrays, UpdatePiece

__all__ = [
    "ACTIVATIONS",
    "BACKENDS",
    "Access",
    "AttentionGeometry",
    "Backend",
    "BackendOptions",
    "BatchNormArrays",
    "BatchNormKernels",
    "BatchNormTraining",
    "ChannelNormArrays",
    "ClassTargets",
    "DropoutMask",
    "Everywhere",
    "FusedActivation",
    "Geometry",
    "GroupNormArrays",
    "Kernel",
    "KernelError",
    "LossArrays",
    "LossKernel",
    "Neighborhood",
    "Reach",
    "Resampled",
    "Resampling",
    "StepNumbers",
    "Substitute",
    "UpdateArrays",
    "UpdatePiece",
    "Windows",
    "get_backend",
    "makes",
    "reads",
    "writes",
]
