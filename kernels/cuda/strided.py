"""Strided arrays of one shape as few joined axes, and how wide their accesses may be. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from halograd.kernels.cuda.device import address
from halograd.kernels.cuda.launch import ACCESS
from halograd.kernels.errors import KernelError

__all__ = ["AXES", "Joined", "join", "joined_bytes", "joined_elements"]

#: Axes that the kernels can tell apart.
AXES = 5


@dataclass(frozen=True)
class Joined:
    """Arrays over the same items.

    Attributes
    ----------
    shape
        Items per axis; an item is `lanes` elements (or bytes).
    strides
        Per array, the strides of the axes in its own unit.
    lanes
        Elements (or bytes) of an item.
    """

    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    lanes: int

    @property
    def items(self) -> int:
        """Number of items."""
        return math.prod(self.shape)

    @property
    def axes(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def in_words(self) -> Joined:
        """The same with strides in items, of arrays whose last axis is packed unless an item is one element."""
        strides = tuple((*(s // self.lanes for s in f[:-1]), f[-1]) for f in self.strides)
        return Joined(self.shape, strides, self.lanes)

    def padded(self, values: Sequence[int], fill: int) -> tuple[int, ...]:
        """`values`, one per axis, made up to :data:`AXES` with `fill`."""
        return (*values, *(fill,) * (AXES - len(values)))


def join(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Drop axes of extent 1 and join neighbors that every array runs through without a gap.

    >>> join((2, 3, 4), [(12, 4, 1), (24, 4, 1)])
    ([2, 12], [[12, 1], [24, 1]])
    """
    axes = [i for i, n in enumerate(shape) if n != 1]
    joined: list[int] = []
    found: list[list[int]] = [[] for _ in strides]
    for axis in axes:
        if joined and all(f[-1] == shape[axis] * s[axis] for f, s in zip(found, strides)):
            joined[-1] *= shape[axis]
            for f, s in zip(found, strides):
                f[-1] = s[axis]
            continue
        joined.append(shape[axis])
        for f, s in zip(found, strides):
            f.append(s[axis])
    if not joined:
        return [1], [[1] for _ in strides]
    return joined, found


def joined_elements(what: str, *arrays: Any, lanes: Sequence[int] | None = None) -> Joined:
    """Arrays of one shape, items as wide as alignment permits: the first of `lanes` elements that fits.

    By default 16 bytes of the first array or one element. Strides in elements.
    """
    sizes = [np.dtype(a.dtype).itemsize for a in arrays]
    strides = [[s // size for s in a.strides] for a, size in zip(arrays, sizes)]
    if any(s % size for a, size in zip(arrays, sizes) for s in a.strides):
        raise KernelError(f"{what}: expected strides of whole elements, got {[a.strides for a in arrays]}; copy them")
    shape, found = join(arrays[0].shape, strides)
    _check_axes(what, shape)
    packed, gaps = all(f[-1] == 1 for f in found), [s for f in found for s in f[:-1]]
    for wide in lanes or (ACCESS // sizes[0], 1):
        aligned = all(address(a) % (wide * size) == 0 for a, size in zip(arrays, sizes))
        if wide == 1 or (packed and aligned and not any(n % wide for n in (shape[-1], *gaps))):
            break
    shape[-1] //= wide
    return Joined(tuple(shape), tuple(map(tuple, found)), wide)


def joined_bytes(what: str, *arrays: Any, lanes: Sequence[int] = (16, 8, 4, 2, 1)) -> Joined:
    """Arrays of one shape and element size as words of bytes, the widest of `lanes` that fits; strides in words."""
    size = np.dtype(arrays[0].dtype).itemsize
    shape, found = join((*arrays[0].shape, size), [(*a.strides, 1) for a in arrays])
    if any(f[-1] != 1 for f in found):  # elements of one byte, apart from each other
        shape, found = [*shape, 1], [[*f, 1] for f in found]
    for word in lanes:
        gaps = [s for f in found for s in f[:-1]]
        if not any(n % word for n in (shape[-1], *gaps, *map(address, arrays))):
            break
    else:
        raise KernelError(f"{what}: expected elements aligned to their size, got {[a.strides for a in arrays]}; copy")
    words = [[*(s // word for s in f[:-1]), 1] for f in found]
    shape = [*shape[:-1], shape[-1] // word]
    if shape[-1] == 1 and len(shape) > 1:
        shape, words = shape[:-1], [w[:-1] for w in words]
    _check_axes(what, shape)
    return Joined(tuple(shape), tuple(map(tuple, words)), word)


def _check_axes(what: str, shape: Sequence[int]) -> None:
    if len(shape) > AXES:
        raise KernelError(f"{what}: expected at most {AXES} axes that cannot be joined, got {len(shape)}; copy first")
