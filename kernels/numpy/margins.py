"""Padded copies of an array: where the array lies in them, and which rows are padding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["Margins"]


class Margins:
    """Margins of a packed array ``(N, *spatial, C)``; negative padding adds none, as its rows are not read.

    Attributes
    ----------
    shape
        Shape with margins.
    none
        Whether there are no margins.
    """

    def __init__(self, shape: Sequence[int], padding: Sequence[tuple[int, int]]) -> None:
        self._lo = [lo for lo, _ in padding]
        self._inner = list(shape[1:-1])
        sizes = [lo + n + max(0, hi) for n, (lo, hi) in zip(self._inner, padding)]
        self.shape = (shape[0], *sizes, shape[-1])
        self.none = self.shape == tuple(shape)

    def interior(self, padded: Any) -> Any:
        """View of the array proper."""
        return padded[(slice(None), *(slice(lo, lo + n) for lo, n in zip(self._lo, self._inner)))]

    def edges(self, padded: Any) -> list[Any]:
        """Views that cover all margins; corners belong to the earlier axis."""
        views = []
        at: list[slice] = [slice(None)]
        for lo, n in zip(self._lo, self._inner):
            views += [padded[(*at, slice(0, lo))], padded[(*at, slice(lo + n, None))]]
            at.append(slice(lo, lo + n))
        return [view for view in views if view.size]
