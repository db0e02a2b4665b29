"""Arrays that live as long as a network, counted by use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..device import Device
from ..kernels import Backend

__all__ = ["Memory"]


class Memory:
    """Allocator of arrays that live as long as a network, with counts by use. Local.

    Parameters
    ----------
    kernels
        Backend whose `zeros` returns aligned arrays where the kernels run (host or device).

    Attributes
    ----------
    kernels
        The backend.
    device
        Device of the arrays.
    bytes
        Bytes by use: ``parameter``, ``parameter gradient``, ...
    """

    def __init__(self, kernels: Backend) -> None:
        self.kernels = kernels
        self.device: Device = kernels.device
        self.bytes: dict[str, int] = {}

    def keep(self, shape: Sequence[int], dtype: np.dtype, use: str) -> Any:
        """Allocate an array of zeros, counted under `use`."""
        array = self.kernels.zeros(tuple(shape), dtype)
        self.count(array.nbytes, use)
        return array

    def count(self, nbytes: int, use: str) -> None:
        """Count bytes that were allocated elsewhere."""
        self.bytes[use] = self.bytes.get(use, 0) + nbytes
