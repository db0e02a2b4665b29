"""What samples are read from: the protocol that loader, statistics and training rely on.

Anything that reads a box of a batch will do: one HDF5 file (:class:`Hdf5Dataset`), many (:class:`FileSet`), or a class
of your own.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ..dtensor.box import Box

__all__ = ["Dataset"]


class Dataset(Protocol):
    """Samples with inputs and targets, read by boxes. Local; every rank has its own object, of the same samples.

    Attributes
    ----------
    path : Path
        For messages.
    sample_shape, target_shape : tuple
        ``(*spatial, C)`` of one sample; a label per sample is ``(1,)``.
    channel_names : list of str
        Of the inputs.
    groups : int64 array ``(N,)`` or None
        Samples of equal number belong together: they are held out together.
    """

    path: Path
    sample_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    channel_names: list[str]
    groups: NDArray[np.int64] | None

    @property
    def bytes_read(self) -> int:
        """Requested so far [B]."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def read(self, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read a box of the inputs of a global batch, ``(len(indices), *sample_shape)``. Local.

        `box` may reach outside the batch's array: what lies there is left as it is in `out`, of shape ``box.shape``.
        Returns the part of `out` that was filled.
        """
        ...

    def read_targets(self, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """The same of the targets, over `target_shape`."""
        ...

    def close(self) -> None:
        """Free what is open; what is read afterwards opens it again."""
