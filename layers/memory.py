"""Memory of one rank: arrays that stay, and an arena for those that live for part of a step.

The order in which layers run is fixed, so which arrays may share memory is decided once, while
binding: an array is acquired when the first layer writes it and released after the last one that
reads it has been bound; what is released is handed out again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from halograd.device import HOST, Device

__all__ = ["Memory"]

_ALIGNMENT = 64


class Memory:
    """Allocates and counts the arrays of one rank. Local.

    Parameters
    ----------
    kernels
        Backend, whose `empty` gives aligned arrays where the kernels run (host or device).

    Attributes
    ----------
    kernels
        As given.
    device
        Where the arrays live.
    cuda
        Fused kernels of the backend, see :class:`Backend`.
    bytes
        Bytes by what they are for: ``activation``, ``parameter``, ``gradient``, ``transient``, ...
    """

    def __init__(self, kernels: Any) -> None:
        self.kernels = kernels
        self.device: Device = getattr(kernels, "device", HOST)
        self.cuda: Any = getattr(kernels, "cuda", None)
        self.bytes: dict[str, int] = {}
        self._free: list[Any] = []
        self._held: dict[int, tuple[Any, int]] = {}

    def keep(self, shape: Sequence[int], dtype: np.dtype, use: str) -> Any:
        """An array for the whole life of the network, zeroed, counted under `use`."""
        array = self.kernels.zeros(tuple(shape), dtype)
        self.count(array.nbytes, use)
        return array

    def count(self, nbytes: int, use: str) -> None:
        """Book bytes that somebody else holds (kernel workspaces, message buffers)."""
        self.bytes[use] = self.bytes.get(use, 0) + nbytes

    def acquire(self, shape: Sequence[int], dtype: np.dtype) -> Any:
        """A transient array; its contents are undefined. Give it back with `release`."""
        count = math.prod(shape)
        nbytes = count * np.dtype(dtype).itemsize
        padded = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        block = self._best_fit(padded)
        if block is None:
            block = self.kernels.zeros((padded,), np.dtype("uint8"))
            self.count(padded, "transient")
        array = block[:nbytes].view(dtype).reshape(tuple(shape))
        self._held[self._key(array)] = (block, 1)
        return array

    def share(self, array: Any) -> None:
        """One more user of a transient array: it stays until each has released it. Others are ignored."""
        key = self._key(array)
        if key in self._held:
            block, users = self._held[key]
            self._held[key] = (block, users + 1)

    def release(self, array: Any) -> None:
        """A user of a transient array needs it no more. Arrays that are not transient are ignored."""
        key = self._key(array)
        if key not in self._held:
            return
        block, users = self._held.pop(key)
        if users > 1:
            self._held[key] = (block, users - 1)
        else:
            self._free.append(block)

    def _best_fit(self, nbytes: int) -> Any | None:
        fitting = [b for b in self._free if b.nbytes >= nbytes]
        if not fitting:
            return None
        best = min(fitting, key=lambda b: b.nbytes)
        self._free = [b for b in self._free if b is not best]
        return best

    @staticmethod
    def _key(array: Any) -> int:
        """Identity of the block: arrays are handed out from the first byte of a block."""
        base = array
        while hasattr(base.base, "dtype"):
            base = base.base
        return id(base)
