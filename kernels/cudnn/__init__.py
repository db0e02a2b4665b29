"""The GPU backend: cuDNN 9 through `nvidia-cudnn-frontend`, cuBLAS, and our own kernels, on CuPy arrays."""

from halograd.kernels.cudnn.backend import CudnnBackend
from halograd.kernels.cudnn.precision import PRECISIONS

__all__ = ["PRECISIONS", "CudnnBackend"]
