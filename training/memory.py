"""Memory of one rank that is counted by what it is for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..device import Device
from ..kernels import Backend

__all__ = ["Memory"]


class Memory:
    """Allocates arrays for the whole life of a network, and counts them. Local.

    Parameters
    ----------
    kernels
        Backend, whose `zeros` gives aligned arrays where the kernels run (host or device).

    Attributes
    ----------
    kernels
        As given.
    device
        Where the arrays live.
    bytes
        Bytes by what they are for: ``parameter``, ``parameter gradient``, ...
    """

    def __init__(self, kernels: Backend) -> None:
        self.kernels = kernels
        self.device: Device = kernels.device
        self.bytes: dict[str, int] = {}

    def keep(self, shape: Sequence[int], dtype: np.dtype, use: str) -> Any:
        """An array, zeroed, counted under `use`."""
        array = self.kernels.zeros(tuple(shape), dtype)
        self.count(array.nbytes, use)
        return array

    def count(self, nbytes: int, use: str) -> None:
        """Book bytes that somebody else holds."""
        self.bytes[use] = self.bytes.get(use, 0) + nbytes
