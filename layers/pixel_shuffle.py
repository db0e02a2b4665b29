"""Pixel shuffle: channels become positions, and back. Channel shuffle: channels in another order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ..dtensor import Blocks, Box, Interval, Layout
from .layer import Layer, Shape
from .padding import Copied

if TYPE_CHECKING:
    from ..program.context import Context
    from ..program.views import View

__all__ = ["ChannelShuffle", "PixelShuffle", "PixelUnshuffle"]

Slices = tuple[slice, ...]


class _Pixels(Copied):
    """Between a coarse map and a fine one, which has ``factor ** d`` positions for each of the coarse one's."""

    #: What input and output are.
    names = ("coarse", "fine")

    def __init__(self, factor: int, name: str | None = None) -> None:
        super().__init__(name)
        if factor < 1:
            raise ValueError(f"{self.kind}: expected a factor of at least 1, got {factor!r}")
        self.factor = int(factor)

    def cell(self, shape: Shape) -> int:
        """Fine positions per coarse one."""
        if len(shape) < 2:
            raise ValueError(f"{self.kind}: expected samples with spatial axes (*spatial, C), got {shape}")
        return int(self.factor ** (len(shape) - 1))

    def lower(self, context: Context) -> Callable[[], None]:
        boxes, (read, made) = context.needed(0), self.names
        x = context.gather(0, boxes)
        x.start()
        x.finish()
        places = _places(**{read: x.box, made: context.box}, factor=self.factor) if context.box.size else []
        kernel = context.kernel(partial(_moving, places, made), **{read: x.view, made: context.y})
        context.run(kernel, timing=self.timing(context, "forward"))

        def backward() -> None:
            returned = context.return_gradient(0, boxes)
            kernel = context.kernel(partial(_moving, places, read), **{read: returned.view, made: context.dy})
            context.run(kernel, timing=self.timing(context, "backward_data"))
            returned.start()
            returned.finish()

        return backward


class PixelShuffle(_Pixels):
    """Channels become positions, ``(*spatial, C * factor ** d)`` -> ``(*(n * factor), C)`` with d spatial axes
    (Shi et al. 2016), as torch's ``pixel_shuffle``, for any number of axes::

        y[.., h * factor + i, w * factor + j, c] = x[.., h, w, (c * factor + i) * factor + j]

    Notes
    -----
    Communication per process: where a block ends within the positions of one coarse position, that one; none where
    blocks fit. Backward the adjoint.
    """

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        cell = self.cell(shape)
        if shape[-1] % cell:
            raise ValueError(f"{self.kind}: expected channels that are a multiple of {cell}, got {shape[-1]}")
        return (*(n * self.factor for n in shape[:-1]), shape[-1] // cell)

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        axes = len(output.shape) - 2
        coarse, channels = partial(_coarse, self.factor), partial(_fine, self.factor**axes)
        return output.boxes.map(partial(_fine, 1), *[coarse] * axes, channels)


class PixelUnshuffle(_Pixels):
    """Positions become channels, ``(*(n * factor), C)`` -> ``(*spatial, C * factor ** d)``: the inverse of
    :class:`PixelShuffle`, as torch's ``pixel_unshuffle``, for any number of axes.

    Notes
    -----
    Communication per process: the positions of its coarse positions that another rank owns; none where blocks fit.
    Backward the adjoint.
    """

    names = ("fine", "coarse")

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        cell = self.cell(shape)
        if any(n % self.factor for n in shape[:-1]):
            raise ValueError(f"{self.kind}: expected extents that are multiples of {self.factor}, got {shape[:-1]}")
        return (*(n // self.factor for n in shape[:-1]), shape[-1] * cell)

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        axes = len(output.shape) - 2
        fine, channels = partial(_fine, self.factor), partial(_coarse, self.factor**axes)
        return output.boxes.map(partial(_fine, 1), *[fine] * axes, channels)


class ChannelShuffle(Layer):
    """Channels of `groups` groups in turn (Zhang et al. 2018, ShuffleNet), as torch's ``channel_shuffle``::

        y[.., c * groups + g] = x[.., g * (C // groups) + c]

    Notes
    -----
    Shape is kept; `groups` divides the number of channels. Communication: none.
    """

    def __init__(self, groups: int, name: str | None = None) -> None:
        super().__init__(name)
        if groups < 1:
            raise ValueError(f"ChannelShuffle: expected at least 1 group, got {groups!r}")
        self.groups = int(groups)

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        if len(shape) < 2:
            raise ValueError(f"ChannelShuffle: expected samples with spatial axes (*spatial, C), got {shape}")
        if shape[-1] % self.groups:
            raise ValueError(f"ChannelShuffle: expected channels in {self.groups} equal groups, got {shape[-1]}")
        return shape

    def lower(self, context: Context) -> Callable[[], None]:
        def moved(source: View, target: View, groups: int, phase: str) -> None:
            kernel = context.kernel(partial(_shuffle, groups), x=source, y=target)
            context.run(kernel, timing=context.timing(phase))

        moved(context.inputs[0].view, context.y, self.groups, "forward")
        back = context.shapes[0][-1] // self.groups
        return lambda: moved(context.dy, context.gradient(0), back, "backward_data")


def _shuffle(groups: int, environment: Any, x: Any, y: Any) -> Callable[[], None]:
    *outside, channels = x.shape
    source = x.reshape(*outside, groups, channels // groups)
    apart = y.reshape(*outside, channels // groups, groups)
    target = apart.transpose(*range(len(outside)), -1, -2)

    def run() -> None:
        if y.size:
            np.copyto(target, source)

    return run


def _coarse(factor: int, low: int, high: int) -> Interval:
    """What the fine ones are of."""
    return (low // factor, -(-high // factor)) if high > low else (0, 0)


def _fine(factor: int, low: int, high: int) -> Interval:
    """What the coarse ones have."""
    return (low * factor, high * factor) if high > low else (0, 0)


def _places(fine: Box, coarse: Box, factor: int) -> list[tuple[Slices, Slices]]:
    """Where the same elements lie in arrays that hold a fine and a coarse box, for each position in a cell.

    Pure arithmetic.
    """
    axes, found = fine.ndim - 2, []
    for number, at in enumerate(itertools.product(range(factor), repeat=axes)):
        pairs = [(slice(None), slice(None))]
        for axis, phase in enumerate(at, start=1):
            pairs.append(_along(fine.ranges[axis], coarse.ranges[axis], factor, phase))
        # Along the channels it is the other way round: the coarse map has more.
        pairs.append(_along(coarse.ranges[-1], fine.ranges[-1], factor**axes, number)[::-1])
        found.append((tuple(a for a, _ in pairs), tuple(b for _, b in pairs)))
    return found


def _along(fine: Interval, coarse: Interval, factor: int, phase: int) -> tuple[slice, slice]:
    """The fine ones ``q * factor + phase`` and the coarse ones `q`, those that both have, as slices of each.

    >>> _along((3, 8), (1, 4), 2, 0), _along((3, 8), (1, 4), 2, 1)
    ((slice(1, 5, 2), slice(1, 3, None)), (slice(0, 6, 2), slice(0, 3, None)))
    """
    first = max(coarse[0], -(-(fine[0] - phase) // factor))
    stop = max(first, min(coarse[1], -(-(fine[1] - phase) // factor)))
    start = first * factor + phase - fine[0]
    return slice(start, start + (stop - first) * factor, factor), slice(first - coarse[0], stop - coarse[0])


def _moving(
    places: Sequence[tuple[Slices, Slices]], target: str, environment: Any, fine: Any, coarse: Any
) -> Callable[[], None]:
    """Copies into the target; zeros where that has elements that the other has not."""
    pairs = [(fine[a], coarse[b]) for a, b in places]
    pairs = pairs if target == "fine" else [(b, a) for a, b in pairs]
    whole = fine if target == "fine" else coarse

    def run() -> None:
        if sum(to.size for to, _ in pairs) < whole.size:
            whole.fill(0)
        for to, source in pairs:
            np.copyto(to, source)

    return run
