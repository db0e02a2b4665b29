"""The CPU backend: oneDNN 3 through its C interface, in float32, convolutions also in bfloat16."""

from halograd.kernels.onednn.backend import DELEGATED, OnednnBackend

__all__ = ["DELEGATED", "OnednnBackend"]
