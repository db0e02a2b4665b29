"""Data: HDF5 datasets read by blocks, prefetch, normalisation, and the mesh-tangling generator."""

from .dataset import Hdf5Dataset
from .errors import DataError
from .loader import LoadedBatch, Loader
from .mesh_tangling import generate
from .normalize import ChannelStatistics, channel_statistics
from .sampler import Batch, Sampler, split
from .targets import TargetReduction
from .verdict import quad_metrics

__all__ = [
    "Batch",
    "ChannelStatistics",
    "DataError",
    "Hdf5Dataset",
    "LoadedBatch",
    "Loader",
    "Sampler",
    "TargetReduction",
    "channel_statistics",
    "generate",
    "quad_metrics",
    "split",
]
