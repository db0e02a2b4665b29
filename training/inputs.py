"""Whole arrays that a script puts into the inputs of an executor: checked, then cut."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np

from halograd.dtensor import Box
from halograd.errors import UserError

__all__ = ["block_of", "check_name"]


def check_name(name: str, known: Collection[str]) -> None:
    """Refuse what is no input of the network. Local.

    Raises
    ------
    UserError
        Naming those that there are.
    """
    if name not in known:
        raise UserError(f"input: expected one of {', '.join(map(repr, known))}, got {name!r}")


def block_of(name: str, array: Any, shape: tuple[int, ...], box: Box, dtype: np.dtype) -> np.ndarray:
    """The block of a whole array that this rank stores: a view, on the host. Local.

    Parameters
    ----------
    name
        Of the input.
    array
        ``(N, *spatial, C)``, what `numpy.asarray` takes: of any layout in memory, and not modified.
    shape
        The global shape that is wanted.
    box
        Of the block.
    dtype
        Of the storage. A floating-point one rounds; an integer one must hold every value of the block exactly.

    Raises
    ------
    UserError
        Another shape, no real numbers, masked elements, or values that the storage does not hold.
    """
    if np.ma.is_masked(array):
        raise UserError(f"input {name!r}: expected an array without masked elements, got some; fill them first")
    values = np.asarray(array)
    if values.dtype.kind not in "biuf" and values.dtype.name != "bfloat16":
        raise UserError(f"input {name!r}: expected an array of real numbers, got one of {values.dtype}")
    if values.shape != shape:
        raise UserError(
            f"input {name!r}: expected the whole array of shape {shape}, samples first and channels last, got "
            f"{values.shape}"
        )
    block = values[box.slices()]
    with np.errstate(invalid="ignore"):
        if dtype.kind in "iu" and not np.array_equal(block.astype(dtype), block):
            raise UserError(f"input {name!r}: expected whole numbers that {dtype} holds, got others in {values.dtype}")
    return block
