"""Arrays that live as long as a network, counted by use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from halograd.documents import bytes_text
from halograd.errors import OutOfMemory

from ..device import Device
from ..kernels import Backend

__all__ = ["Memory", "memory_errors"]

REMEDIES = {
    True: 'set strategy.recompute = "pointwise" or "block", raise training.accumulate, or use more ranks',
    False: "use a smaller batch, or more ranks",
}


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
        """Add `nbytes` [B] that were allocated elsewhere to the count of `use`."""
        self.bytes[use] = self.bytes.get(use, 0) + nbytes


@contextmanager
def memory_errors(
    trainable: bool,
    predicted: Callable[[], Mapping[str, int]] | None = None,
    held: Callable[[], Mapping[str, int]] | None = None,
) -> Iterator[None]:
    """Convert the error of an allocation that fails in the ``with`` block to a one-line error. Local.

    Parameters
    ----------
    trainable
        Whether parameters are trained; it decides which remedies the message names.
    predicted, held
        Functions that return the memory that this rank needs, and what it holds, by use [B]; None: unknown yet.

    Raises
    ------
    OutOfMemory
        In place of a MemoryError, such as those of NumPy and CuPy, whose texts contain the requested size.
    """
    try:
        yield
    # A context within this one has converted the error already.
    except OutOfMemory:
        raise
    except MemoryError as error:
        need = "enough" if predicted is None else bytes_text(sum(predicted().values()))
        have = "" if held is None else f" with {bytes_text(sum(held().values()))} held"
        # A message has one line, and a MemoryError of Python has no text.
        text = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise OutOfMemory(
            f"memory: expected {need} for the arrays of this rank, got an error{have}: {text}; {REMEDIES[trainable]}"
        ) from error
