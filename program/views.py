"""Buffers and views of them: the memory of a step before there is any. Pure data."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..dtensor import Box

__all__ = ["Buffer", "Region", "View"]


@dataclass(eq=False)
class Buffer:
    """Memory of one packed array on one rank.

    Attributes
    ----------
    shape, dtype
        Of the array.
    use
        What it is for, as memory is accounted: ``"activation"``, ``"transient"``, ``"statistics"``, ...
    kept
        It holds its contents from step to step; else only between the first and the last
        operation of a step that use it, and others may lie there before and after.
    fill
        What a kept buffer begins with.
    place
        ``(kind, name)`` of an array that lies elsewhere, such as ``("params", "conv/w")``; None: in the arena.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    use: str
    kept: bool = False
    fill: float = 0.0
    place: tuple[str, str] | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def view(self) -> View:
        """All of it."""
        return View(self, (0,) * len(self.shape), self.shape)


@dataclass(frozen=True)
class View:
    """A rectangle of a buffer, with a form of its own if that is packed.

    Attributes
    ----------
    buffer
        Where it lies.
    start, extent
        First index and extent per axis of the buffer.
    form
        Another shape of the same elements; None: `extent`.
    """

    buffer: Buffer
    start: tuple[int, ...]
    extent: tuple[int, ...]
    form: tuple[int, ...] | None = field(default=None)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.extent if self.form is None else self.form

    @property
    def dtype(self) -> np.dtype:
        return self.buffer.dtype

    @property
    def size(self) -> int:
        return math.prod(self.extent)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def packed(self) -> bool:
        """Whether its elements follow one another in memory."""
        if not self.size:
            return True
        full = True
        for have, want in zip(reversed(self.buffer.shape), reversed(self.extent)):
            if not full and want > 1:
                return False
            full = full and have == want
        return True

    @property
    def packed_but_for_channels(self) -> bool:
        """Whether it would be packed with all channels of the buffer; these may be more than its own."""
        channels = self.buffer.shape[-1]
        return self.form is None and View(self.buffer, self.start, (*self.extent[:-1], channels)).packed

    def reshape(self, *shape: int) -> View:
        """The same elements in another shape; of a packed view."""
        if math.prod(shape) != self.size or not self.packed:
            raise ValueError(f"expected a packed view of {shape}, got {self.extent} in {self.buffer}")
        return View(self.buffer, self.start, self.extent, tuple(shape))

    def part(self, start: Sequence[int], extent: Sequence[int]) -> View:
        """A rectangle within."""
        if self.form is not None:
            raise ValueError(f"expected a view in the shape of its buffer, got one in shape {self.form}")
        first = tuple(a + b for a, b in zip(self.start, start, strict=True))
        return View(self.buffer, first, tuple(extent))

    def resolve(self, array: np.ndarray) -> np.ndarray:
        """The view of the buffer's array."""
        if not self.size:
            return array.reshape(-1)[:0].reshape(self.shape)
        found = array[tuple(slice(a, a + n) for a, n in zip(self.start, self.extent))]
        return found if self.form is None else found.reshape(self.form)


@dataclass(frozen=True)
class Region:
    """A view and the global box that it holds."""

    view: View
    box: Box

    def part(self, box: Box) -> View:
        """View of a box within; empty boxes lie anywhere."""
        if not box.size:
            return View(self.view.buffer, (0,) * box.ndim, box.shape)
        return self.view.part([a - o for a, o in zip(box.start, self.box.start)], box.shape)
