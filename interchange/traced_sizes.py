"""Sizes that an exporter wrote as numbers, which are correct only for the extents of its example.

A file that is read at other extents is processed twice, at its own extents and at the requested ones. A number that
stays the same although its extents change was computed at export. Pure arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .graph import OnnxNode, Shape

__all__ = ["SizedOperation", "frozen_size", "stride_of"]

#: Slice ends of at least this value mean the end of the axis.
_LAST = 2**31 - 1


@dataclass(frozen=True)
class SizedOperation:
    """An operation at given extents of the network's inputs.

    Attributes
    ----------
    x, y
        Extents of its first input and of its first output, ``(N, C, *spatial)``.
    numbers
        Integer constants among its inputs, by position.
    """

    x: Shape
    y: Shape
    numbers: dict[int, list[int]]

    def moved(self, other: SizedOperation) -> list[int]:
        """Return the axes of the first input whose extents differ from those of `other`."""
        return [axis for axis, (a, b) in enumerate(zip(self.x, other.x)) if a != b]


def stride_of(op: OnnxNode, x: Shape, y: Shape) -> float:
    """Return how many rows of its input ``x (N, C, *spatial)`` correspond to a row of an operation's output ``y``.

    >>> stride_of(OnnxNode("pool", "MaxPool", ("x",), ("y",), {"strides": [2, 2]}), (1, 3, 9, 9), (1, 3, 4, 4))
    2
    """
    if op.kind == "Resize" and len(x) == len(y) > 2:
        return x[2] / y[2]
    # The largest one: it only serves to describe extents that every stride divides.
    step = max(op.attributes.get("strides", ()), default=1)
    return 1 / step if op.kind == "ConvTranspose" and step else step


def frozen_size(op: OnnxNode, traced: SizedOperation, requested: SizedOperation, moved: Sequence[int]) -> str:
    """Return a description of the sizes of an operation that do not follow the inputs; empty if all do.

    Parameters
    ----------
    traced, requested
        The operation at the extents of the file, and at the requested extents.
    moved
        Axes of the network's inputs whose extents differ.
    """
    check = _CHECKS.get(op.kind)
    return "" if check is None else check(op, traced, requested, moved)


def _resized(op: OnnxNode, traced: SizedOperation, requested: SizedOperation, moved: Sequence[int]) -> str:
    """Return the fixed output size of a Resize or Expand along an axis of the inputs that changes; else ""."""
    # Input 3 of a Resize has sizes (its input 2 has scales, which follow the extents); input 1 of an Expand a shape.
    if (3 if op.kind == "Resize" else 1) not in requested.numbers or len(requested.x) != len(requested.y):
        return ""
    for axis in {*moved, *traced.moved(requested)} & set(range(len(requested.x))):
        resized = axis in traced.moved(requested) or requested.x[axis] != requested.y[axis]
        if requested.y[axis] == traced.y[axis] and resized:
            return f"the size {requested.y[2:]}"
    return ""


def _reshaped(op: OnnxNode, traced: SizedOperation, requested: SizedOperation, moved: Sequence[int]) -> str:
    # Sizes of the example give another number of elements than the input has at other extents.
    return f"the shape {requested.y}" if math.prod(requested.x) != math.prod(requested.y) else ""


def _cut(op: OnnxNode, traced: SizedOperation, requested: SizedOperation, moved: Sequence[int]) -> str:
    """Return the rows of a slice whose bounds were computed from the extents of the example; else "".

    This is assumed of an end that does not change with the extents, and of a start that does not change either and is
    in the second half of the axis.
    """
    ranges, before = (list(zip(run.numbers.get(1, []), run.numbers.get(2, []))) for run in (requested, traced))
    for axis, (start, end), own in zip(requested.numbers.get(3, range(len(ranges))), ranges, before):
        axis %= len(requested.x)
        frozen = (0 < end == own[1] and end < _LAST) or (start == own[0] and 2 * start >= traced.x[axis])
        if axis in traced.moved(requested) and frozen:
            return f"rows {start} to {min(end, traced.x[axis])}"
    return ""


def _pooled(op: OnnxNode, traced: SizedOperation, requested: SizedOperation, moved: Sequence[int]) -> str:
    """Return the window of a pooling that covers the traced extents, but not the requested ones; else ""."""
    kernel = tuple(op.attributes.get("kernel_shape", ()))
    whole = kernel == traced.x[2:] and math.prod(traced.y[2:]) == 1
    return f"a window of {kernel}, all of the example" if whole and traced.moved(requested) else ""


_CHECKS: dict[str, Callable[[OnnxNode, SizedOperation, SizedOperation, Sequence[int]], str]] = {
    "Resize": _resized,
    "Expand": _resized,
    "Reshape": _reshaped,
    "Slice": _cut,
    "MaxPool": _pooled,
    "AveragePool": _pooled,
}
