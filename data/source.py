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
from .structure import Field

__all__ = ["Dataset"]


class Dataset(Protocol):
    """Samples with inputs and targets, read by boxes. Local; every rank has its own object, of the same samples.

    Attributes
    ----------
    path : Path
        For messages.
    fields : dict of Field
        By the name of the network's input: shape ``(*spatial, C)`` of one sample, names of channels, and whether it is
        a target. A number per sample has the shape ``(1,)``.
    groups : int64 array ``(N,)`` or None
        Samples of equal number belong together: they are held out together.
    lenient : frozenset of str
        Names of fields whose NaN, infinity and targets out of range are passed on; those of others raise `DataError`.
    """

    path: Path
    fields: dict[str, Field]
    groups: NDArray[np.int64] | None
    lenient: frozenset[str]

    @property
    def bytes_read(self) -> int:
        """Requested so far [B]."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def read(self, name: str, indices: Sequence[int], box: Box, out: NDArray[Any]) -> tuple[slice, ...]:
        """Read a box of one of the fields of a global batch, ``(len(indices), *fields[name].shape)``. Local.

        `box` may reach outside the batch's array: what lies there is left as it is in `out`, of shape ``box.shape``.
        Returns the part of `out` that was filled.
        """
        ...

    def place(self, index: int) -> str:
        """Where a sample lies, for messages."""
        ...

    def close(self) -> None:
        """Free what is open; what is read afterwards opens it again."""
