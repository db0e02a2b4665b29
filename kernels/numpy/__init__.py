"""The reference backend: NumPy, everywhere, in float32 and float64."""

from halograd.kernels.numpy.backend import NumpyBackend

__all__ = ["NumpyBackend"]
