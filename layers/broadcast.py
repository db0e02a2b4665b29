"""Small operands of an elementwise operation: arrays with 1 for any extent of the other one, or a vector per sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..dtensor import Blocks, Interval
from .global_pooling import without_space
from .layer import Shape

if TYPE_CHECKING:
    from ..program.views import View

__all__ = ["is_broadcast", "operand_blocks", "with_axes"]


def is_broadcast(small: Shape, whole: Shape) -> bool:
    """Whether a sample shape goes with that of another operand: of as many axes, each 1 or as long. Pure arithmetic.

    >>> is_broadcast((1, 6, 1), (7, 6, 3)), is_broadcast((2, 6, 1), (7, 6, 3))
    (True, False)
    """
    return len(small) == len(whole) and all(n in (1, full) for n, full in zip(small, whole))


def operand_blocks(shape: Shape, boxes: Blocks) -> Blocks:
    """Per rank, what goes with its box of the larger operand. Pure arithmetic.

    Parameters
    ----------
    shape
        Of the small operand, ``(N, *spatial, C)`` with 1 for any extent, or ``(N, C)``.
    boxes
        Of the larger one. A rank with an empty box needs nothing.
    """
    if len(shape) < len(boxes.axes):
        boxes = without_space(boxes)

    def of_one(low: int, high: int) -> Interval:
        return (0, min(1, high - low))

    def same(low: int, high: int) -> Interval:
        return low, high

    return boxes.map(same, *(of_one if n == 1 else same for n in shape[1:]))


def with_axes(view: View, axes: int) -> View:
    """A vector per sample as an array with so many axes."""
    shape = view.shape
    return view if len(shape) == axes else view.reshape(shape[0], *(1,) * (axes - len(shape)), *shape[1:])
