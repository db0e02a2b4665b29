"""Our own CUDA kernels: everything but convolutions and matrix products, bound to arrays once and then launched."""

from halograd.kernels.cuda.cupy_device import CupyDevice
from halograd.kernels.cuda.device import Device
from halograd.kernels.cuda.kernels import CudaKernels
from halograd.kernels.cuda.losses import LossKernel

__all__ = ["CudaKernels", "CupyDevice", "Device", "LossKernel"]
