"""Datasets read by blocks, prefetch, augmentation, normalization, and the mesh-tangling generator."""

from .augment import AUGMENTATIONS, Augmentation, AugmentationSettings, Elastic, Rules, StandardAugmentation
from .dataset import Hdf5Dataset
from .disk import DataError
from .files import FileSet, find_files, open_dataset
from .formats import FORMATS, Format, StoredArray, StoredFile
from .loader import LoadedBatch, Loader
from .mesh_tangling import generate
from .normalize import ChannelStatistics, channel_statistics, check_transforms
from .sampler import Batch, Sampler, split
from .source import ArrayDataset, Dataset
from .targets import LabelMap, TargetReduction
from .verdict import quad_metrics
from .writers import WRITERS, Predictions, Writer

__all__ = [
    "AUGMENTATIONS",
    "FORMATS",
    "WRITERS",
    "ArrayDataset",
    "Augmentation",
    "AugmentationSettings",
    "Batch",
    "ChannelStatistics",
    "DataError",
    "Dataset",
    "Elastic",
    "FileSet",
    "Format",
    "Hdf5Dataset",
    "LabelMap",
    "LoadedBatch",
    "Loader",
    "Predictions",
    "Rules",
    "Sampler",
    "StandardAugmentation",
    "StoredArray",
    "StoredFile",
    "TargetReduction",
    "Writer",
    "channel_statistics",
    "check_transforms",
    "find_files",
    "generate",
    "open_dataset",
    "quad_metrics",
    "split",
]
