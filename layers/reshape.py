"""Layers that move elements without arithmetic: to another layout, shape, or order of channels.

`Redistribute` changes only the layout. `Flatten` and `Reshape` convert maps, tokens and vectors. `PixelShuffle` and
`PixelUnshuffle` exchange channels and positions. `ChannelShuffle` permutes channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..dtensor import Blocks, Box, Interval, Layout
from ..kernels.access import reads, writes
from ..lowering.context import Context, Lowered
from ..lowering.operations import ExchangeSpec
from ..lowering.views import View
from .layer import Layer, Node, Passes, Shape
from .padding import Copied

__all__ = ["ChannelShuffle", "Flatten", "PixelShuffle", "PixelUnshuffle", "Redistribute", "Reshape", "ReshapedMap"]


class Redistribute(Layer):
    """Identity with another layout; the compiler inserts it between layers whose parts differ.

    Communication per process: the elements that it owns after and not before; backward the same, reversed. They travel
    while other branches of the network compute.
    """

    passes = Passes()
    inputs_taken = 1

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """Return the owned boxes.

        The exchange writes straight into the output, so nothing is gathered.
        """
        return inputs[i].boxes

    def lower(self, context: Context) -> Lowered:
        value, output = context.inputs[0], context.output
        before, after = value.layout.boxes, output.layout.boxes
        move = context.exchange(before, after, value.view, context.y, kind="redistribute")
        context.start(move)
        back: ExchangeSpec | None = None

        def backward() -> None:
            # `finish_backward` reads it later; without a gradient it stays None, and nothing is finished.
            nonlocal back
            if not context.needs_gradient(0):
                return
            dx = context.gradient(0)
            # Every element of the output has one owner: nothing is added up.
            back = context.exchange(after, before, context.dy, dx, kind="redistribute")
            context.start(back)

        return Lowered(backward, lambda: context.finish(move), lambda: context.finish(back))


class _WholeSamples(Layer):
    """Conversion between vectors, each whole on one rank, and maps, cut into blocks; in channels-last order."""

    passes = Passes()
    inputs_taken = 1

    def input_boxes(self, box: Box, *shapes: Shape) -> tuple[Box, ...]:
        samples = box.ranges[0] if box.size else (0, 0)
        return (Box.of_ranges([samples, *((0, n) for n in shapes[0])]),)

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """Return the owned boxes.

        The exchange writes straight into the output, so nothing is gathered.
        """
        return inputs[i].boxes


class Flatten(_WholeSamples):
    """Flattening ``(N, *spatial, C)`` -> ``(N, prod(spatial) * C)``, in channels-last order: channels vary fastest.

    (Frameworks that store channels first flatten in another order; weights of a dense layer from such a framework must
    be permuted accordingly.)

    Notes
    -----
    Before: blocks cut in samples and space; after: whole samples, spread over all ranks.

    Communication per process: the elements that it owns after and not before; backward the same, reversed.
    """

    def output_shape(self, *shapes: Shape) -> Shape:
        return (math.prod(shapes[0]),)

    def lower(self, context: Context) -> Lowered:
        value = context.inputs[0]
        # Vectors are sent as maps (a view of the same memory), so that the exchange works on boxes of maps.
        boxes = _whole(context.output.layout, context.shapes[0])
        shape = boxes[context.rank].shape
        move = context.exchange(value.layout.boxes, boxes, value.view, context.y.reshape(*shape), kind="redistribute")
        context.move(move)

        def backward() -> None:
            dy, dx = context.dy.reshape(*shape), context.gradient(0)
            # Every sample of the output has one owner: the boxes are disjoint and every element arrives once.
            context.move(context.exchange(boxes, value.layout.boxes, dy, dx, kind="redistribute"))

        return Lowered(backward)


class Reshape(_WholeSamples):
    """Conversion of samples to another shape with as many elements, in channels-last order: channels vary fastest.

    A map ``(H, W, C)`` becomes tokens ``(H * W, C)`` by ``Reshape((-1, C))``, and tokens a map by ``Reshape((H, W,
    C))``; positions and channels may be joined or split, too. A vector ``(F,)`` becomes a map; the inverse is
    :class:`Flatten`.

    Parameters
    ----------
    shape
        Shape of one sample, ``(*spatial, C)``. One of the extents may be -1: it follows from the number of elements.

    Notes
    -----
    Communication per process: the rows, along the first axis that changes, that contain its elements, without those it
    owns; none if input and output are cut along that axis only, at the same elements. From vectors, which are whole
    samples spread over all ranks: the elements of its block of the map that it does not own. Backward, the adjoint.
    """

    def __init__(self, shape: Sequence[int], name: str | None = None) -> None:
        super().__init__(name)
        self.shape = tuple(int(n) for n in shape)
        if not 2 <= len(self.shape) <= 4 or any(n < 1 and n != -1 for n in self.shape) or self.shape.count(-1) > 1:
            raise ValueError(
                f"Reshape: expected (*spatial, C) with 1 to 3 spatial axes, all at least 1, but one may be -1, got "
                f"{self.shape}; for (F,) use Flatten"
            )

    def __call__(self, *inputs: Node) -> Node:
        # Between maps, another layer moves rows; from vectors, this one moves boxes of whole samples.
        if len(inputs) != 1 or not isinstance(inputs[0], Node) or len(inputs[0].shape) == 1:
            return super().__call__(*inputs)
        return ReshapedMap(self.shape, self.name)(*inputs)

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,), known = shapes, math.prod(n for n in self.shape if n > 0)
        outputs = tuple(n if n > 0 else math.prod(shape) // known for n in self.shape)
        if math.prod(outputs) != math.prod(shape):
            raise ValueError(
                f"Reshape: expected {'a multiple of ' * (-1 in self.shape)}{known} elements for {self.shape}, got "
                f"{' x '.join(map(str, shape))}"
            )
        return outputs

    def lower(self, context: Context) -> Lowered:
        value, blocks = context.inputs[0], context.output.layout.boxes
        boxes = _whole(value.layout, context.output.layout.shape[1:])
        shape = boxes[context.rank].shape
        # The owned box, copied if it is strided: such a view cannot be reshaped.
        x = context.gather(0, value.layout.boxes).run()
        context.move(context.exchange(boxes, blocks, x.view.reshape(*shape), context.y, kind="redistribute"))

        def backward() -> None:
            dx = context.gradient(0).reshape(*shape)
            context.move(context.exchange(blocks, boxes, context.dy, dx, kind="redistribute"))

        return Lowered(backward)


class ReshapedMap(Copied):
    """Conversion between maps of different shapes; leading and trailing axes with equal extents in both do not change.

    Between them, an output block reads an interval of elements in row-major order, and thus rows of the first changed
    axis.
    """

    def __init__(self, shape: Shape, name: str | None = None) -> None:
        super().__init__(name)
        self.shape = shape

    @property
    def kind(self) -> str:
        return "Reshape"

    def output_shape(self, *shapes: Shape) -> Shape:
        return Reshape(self.shape).output_shape(*shapes)

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        shape, blocks = inputs[i].shape, output.boxes
        first, last = _changed(shape, output.shape)
        # Elements per row of the input, among the axes that change; `within`: their extents in the output.
        row = math.prod(shape[first + 1 : len(shape) - last])
        within, end = output.shape[first : len(output.shape) - last], len(blocks.axes) - last
        rows = tuple(_rows(ranges, within, row) for ranges in itertools.product(*blocks.axes[first:end]))
        others = [((0, n),) for n in shape[first + 1 : len(shape) - last]]
        return Blocks((*blocks.axes[:first], rows, *others, *blocks.axes[end:]), blocks.size)

    def lower(self, context: Context) -> Lowered:
        boxes, outside = context.needed(0), _changed(context.inputs[0].layout.shape, context.output.layout.shape)
        x = context.gather(0, boxes).run()
        if context.box.size:
            moved = partial(_regrouped, outside, x.box, context.box, context.output.layout.shape)
            kernel = context.kernel(partial(moved, False), x=x.view, y=context.y)
            context.run(kernel, timing=self.timing(context, "forward"))

        def backward() -> None:
            # Also for an empty block: an exchange is collective.
            returned = context.return_gradient(0, boxes)
            if context.box.size:
                kernel = context.kernel(partial(moved, True), x=context.dy, y=returned.view)
                context.run(kernel, timing=self.timing(context, "backward_data"))
            returned.run()

        return Lowered(backward)


def _changed(before: Shape, after: Shape) -> tuple[int, int]:
    """Return the numbers of equal axes at the beginning and at the end; at least one axis of each lies between them.

    >>> _changed((2, 6, 4, 3), (2, 24, 3)), _changed((2, 8, 3), (2, 8, 3)), _changed((2, 8, 3), (2, 4, 6))
    ((1, 1), (2, 0), (1, 0))
    """
    most = min(len(before), len(after)) - 1
    first = next((i for i in range(most) if before[i] != after[i]), most)
    last = next((i for i in range(most - first) if before[-1 - i] != after[-1 - i]), most - first)
    return first, last


def _span(ranges: Sequence[Interval], extents: Shape) -> tuple[int, Interval]:
    """Return the first axis along which a box has several elements (else the last one), and the row-major interval
    that its rows along this axis span.

    >>> _span([(2, 3), (1, 3), (0, 1)], (4, 5, 2)), _span([(0, 2), (1, 3), (0, 1)], (4, 5, 2))
    ((1, (22, 26)), (0, (0, 20)))
    """
    start, axis = 0, 0
    for axis, (low, high) in enumerate(ranges):
        inner = math.prod(extents[axis + 1 :])
        if high - low > 1 or axis == len(ranges) - 1:
            return axis, (start + low * inner, start + high * inner)
        start += low * inner
    raise AssertionError("a box has at least one axis")


def _rows(ranges: Sequence[Interval], extents: Shape, row: int) -> Interval:
    """Return the interval of rows, of `row` elements each, that contain elements of a box; empty if the box is empty.
    """
    if any(high <= low for low, high in ranges):
        return 0, 0
    _, (low, high) = _span(ranges, extents)
    return low // row, -(-high // row)


@reads("x")
@writes("y")
def _regrouped(
    outside: tuple[int, int],
    read: Box,
    target_box: Box,
    shape: Shape,
    back: bool,
    environment: Any,
    x: Any,
    y: Any,
) -> Callable[[], None]:
    """Return the kernel that copies the elements of the box `target_box` from the input box `read` (`x`) to `y`.

    With `back`, it copies them from `x` to `y`, the box `read`, whose other elements become 0. `shape` is the global
    shape of the array of `target_box`, and `outside` the numbers of equal axes at the beginning and at the end.
    """
    whole, block = (y, x) if back else (x, y)
    (first, last), end = outside, len(shape) - outside[1]
    ranges, extents = target_box.ranges[first:end], shape[first:end]
    axis, (low, high) = _span(ranges, extents)
    inner = extents[axis + 1 :]
    # Row-major number of the first gathered element, within the axes that change.
    origin = read.start[first] * math.prod(read.shape[first + 1 : len(read.shape) - last])
    before, after = block.shape[:first], block.shape[end:]
    flat = whole.reshape(*before, -1, *after)
    # `rows`: the gathered elements from the first to the last row of the box; `part`: the box in them.
    rows = flat[(slice(None),) * first + (slice(low - origin, high - origin),)]
    rows = rows.reshape(*before, -1, *inner, *after)
    part = rows[(slice(None),) * (first + 1) + tuple(slice(a, b) for a, b in ranges[axis + 1 :])]
    # The changed axes before `axis` have one element each, so they are left out.
    own = block.reshape(*before, *block.shape[first + axis :])

    def run() -> None:
        if not back:
            np.copyto(own, part)
            return
        if part.size < whole.size:  # the gathered rows hold elements of other ranks' outputs
            whole.fill(0)
        np.copyto(part, own)

    return run


def _whole(vectors: Layout, shape: Shape) -> Blocks:
    """Return, per rank, the boxes of its whole samples as maps of this shape."""
    return Blocks((vectors.boxes.axes[0], *(((0, n),) for n in shape)), vectors.size)


Slices = tuple[slice, ...]


class _Pixels(Copied):
    """Conversion between a coarse map and a fine map, which has ``factor ** d`` positions per coarse position, with d
    spatial axes.
    """

    #: Names of input and output.
    names = ("coarse", "fine")
    #: Whether coarse channels are ordered by fine channel, or by position in the cell.
    order = "channel"

    def __init__(self, factor: int, name: str | None = None) -> None:
        super().__init__(name)
        if factor < 1:
            raise ValueError(f"{self.kind}: expected a factor of at least 1, got {factor!r}")
        self.factor = int(factor)

    def cell(self, shape: Shape) -> int:
        """Return the number of fine positions per coarse position."""
        if len(shape) < 2:
            raise ValueError(f"{self.kind}: expected samples with spatial axes (*spatial, C), got {shape}")
        return int(self.factor ** (len(shape) - 1))

    def lower(self, context: Context) -> Lowered:
        boxes, (read, written) = context.needed(0), self.names
        x = context.gather(0, boxes).run()
        sizes = {read: context.shapes[0][-1], written: context.output.layout.shape[-1]}
        blocks = sizes["fine"] if self.order == "position" else None
        boxes_of = {read: x.box, written: context.box}
        copies = _copies(**boxes_of, factor=self.factor, blocks=blocks) if context.box.size else []
        # Pairs (target, source).
        pairs = copies if written == "fine" else _turned(copies)
        kernel = context.kernel(partial(_moving, pairs), x=x.view, y=context.y)
        context.run(kernel, timing=self.timing(context, "forward"))

        def backward() -> None:
            returned = context.return_gradient(0, boxes)
            kernel = context.kernel(partial(_moving, _turned(pairs)), x=context.dy, y=returned.view)
            context.run(kernel, timing=self.timing(context, "backward_data"))
            returned.run()

        return Lowered(backward)


class PixelShuffle(_Pixels):
    """Rearrangement of channels into positions, ``(*spatial, C * factor ** d)`` -> ``(*(n * factor), C)``.

    There are d spatial axes (Shi et al. 2016). The layer is torch's ``pixel_shuffle`` for any number of axes::

        y[.., h * factor + i, w * factor + j, c] = x[.., h, w, (c * factor + i) * factor + j]

    Notes
    -----
    Communication per process: if a block ends within a coarse position, that position; none otherwise. Backward, the
    adjoint.
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
        # `_fine` by 1 keeps the samples, but makes empty intervals (0, 0).
        return output.boxes.map(partial(_fine, 1), *[coarse] * axes, channels)


class PixelUnshuffle(_Pixels):
    """Rearrangement of positions into channels, ``(*(factor * n), C)`` -> ``(*n, C * factor ** d)`` for d extents n.

    In the order ``"channel"`` it is the inverse of :class:`PixelShuffle`: torch's ``pixel_unshuffle`` for any number of
    axes.

    Parameters
    ----------
    factor
        Positions per coarse position, along each axis.
    order
        ``"channel"``: the order of torch, the positions of one channel after the other. ``"position"``: all channels of
        one position after the other, the position along the first axis fastest, as in Swin's patch merging::

            y[.., h, w, (j * factor + i) * C + c] = x[.., h * factor + i, w * factor + j, c]

    Notes
    -----
    Communication per process: the fine positions of its coarse positions that another rank owns; none if the blocks
    match. Backward, the adjoint.
    """

    names = ("fine", "coarse")

    def __init__(self, factor: int, name: str | None = None, *, order: str = "channel") -> None:
        super().__init__(factor, name)
        if order not in ("channel", "position"):
            raise ValueError(f"{self.kind}: order: expected 'channel' or 'position', got {order!r}")
        self.order = order

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        cell = self.cell(shape)
        if any(n % self.factor for n in shape[:-1]):
            raise ValueError(f"{self.kind}: expected extents that are multiples of {self.factor}, got {shape[:-1]}")
        return (*(n // self.factor for n in shape[:-1]), shape[-1] * cell)

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        axes = len(output.shape) - 2
        fine = partial(_fine, self.factor)
        if self.order == "position":
            channels = partial(_within_block, inputs[i].shape[-1])
        else:
            channels = partial(_coarse, self.factor**axes)
        return output.boxes.map(partial(_fine, 1), *[fine] * axes, channels)


class ChannelShuffle(Layer):
    """Permutation that takes channels from `groups` groups in turn (ShuffleNet, Zhang et al. 2018).

    It is torch's ``channel_shuffle``::

        y[.., c * groups + g] = x[.., g * (C // groups) + c]

    Notes
    -----
    The shape does not change; `groups` divides the number of channels. Communication: none.
    """

    recomputation = "pointwise"
    inputs_taken = 1

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

    def lower(self, context: Context) -> Lowered:
        def moved(source: View, target: View, groups: int, phase: str) -> None:
            kernel = context.kernel(partial(_shuffle, groups), x=source, y=target)
            context.run(kernel, timing=context.timing(phase))

        moved(context.inputs[0].view, context.y, self.groups, "forward")
        # A shuffle of C / g groups is the inverse of one of g groups.
        back = context.shapes[0][-1] // self.groups
        return Lowered(lambda: moved(context.dy, context.gradient(0), back, "backward_data"))


@reads("x")
@writes("y")
def _shuffle(groups: int, environment: Any, x: Any, y: Any) -> Callable[[], None]:
    *outside, channels = x.shape
    # Both views have the shape (.., groups, C / groups), with equal elements at equal indices.
    source = x.reshape(*outside, groups, channels // groups)
    cells = y.reshape(*outside, channels // groups, groups)
    target = cells.transpose(*range(len(outside)), -1, -2)

    def run() -> None:
        if y.size:
            np.copyto(target, source)

    return run


def _coarse(factor: int, low: int, high: int) -> Interval:
    """Return the interval of coarse elements that covers these fine elements."""
    return (low // factor, -(-high // factor)) if high > low else (0, 0)


def _fine(factor: int, low: int, high: int) -> Interval:
    """Return the interval of fine elements of these coarse elements."""
    return (low * factor, high * factor) if high > low else (0, 0)


def _within_block(size: int, low: int, high: int) -> Interval:
    """Return the channels, within one block of `size` channels, that an interval of the channels of all blocks needs.

    >>> _within_block(4, 5, 7), _within_block(4, 5, 9)
    ((1, 3), (0, 4))
    """
    # Across two blocks, the channels may be those at both ends of a block: then the whole block is read.
    first, last = low // size, -(-high // size)
    return (low - first * size, high - first * size) if last - first == 1 else (0, size * (high > low))


def _copies(fine: Box, coarse: Box, factor: int, blocks: int | None = None) -> list[tuple[Slices, Slices]]:
    """Return the slices of equal elements in arrays of a fine and a coarse box, per position in a cell.

    With `blocks`, the number of fine channels, the coarse channels are ordered by position. Pure arithmetic.
    """
    axes, slices = fine.ndim - 2, []
    for number, at in enumerate(itertools.product(range(factor), repeat=axes)):
        pairs = [(slice(None), slice(None))]
        for axis, phase in enumerate(at, start=1):
            pairs.append(_along(fine.ranges[axis], coarse.ranges[axis], factor, phase))
        # Along the channels the roles are swapped: the coarse map has more channels.
        if blocks is None:
            pairs.append(_along(coarse.ranges[-1], fine.ranges[-1], factor**axes, number)[::-1])
        else:
            # The position along the first axis is the fastest here, unlike in `number`.
            block = sum(phase * factor**axis for axis, phase in enumerate(at))
            pairs.append(_block(fine.ranges[-1], coarse.ranges[-1], block * blocks))
        slices.append((tuple(a for a, _ in pairs), tuple(b for _, b in pairs)))
    return slices


def _block(fine: Interval, coarse: Interval, shift: int) -> tuple[slice, slice]:
    """Return slices of the fine channels `c` and the coarse channels ``shift + c``, for all `c` in both."""
    first = max(fine[0], coarse[0] - shift)
    # `max`: without common channels the stop could be negative, and a slice would count it from the end.
    stop = max(first, min(fine[1], coarse[1] - shift))
    return slice(first - fine[0], stop - fine[0]), slice(first + shift - coarse[0], stop + shift - coarse[0])


def _turned(copies: Sequence[tuple[Slices, Slices]]) -> list[tuple[Slices, Slices]]:
    return [(b, a) for a, b in copies]


def _along(fine: Interval, coarse: Interval, factor: int, phase: int) -> tuple[slice, slice]:
    """Return slices of the fine elements ``q * factor + phase`` and the coarse elements `q`, for all `q` in both.

    >>> _along((3, 8), (1, 4), 2, 0), _along((3, 8), (1, 4), 2, 1)
    ((slice(1, 5, 2), slice(1, 3, None)), (slice(0, 6, 2), slice(0, 3, None)))
    """
    first = max(coarse[0], -(-(fine[0] - phase) // factor))
    stop = max(first, min(coarse[1], -(-(fine[1] - phase) // factor)))
    start = first * factor + phase - fine[0]
    return slice(start, start + (stop - first) * factor, factor), slice(first - coarse[0], stop - coarse[0])


@reads("x")
@writes("y")
def _moving(copies: Sequence[tuple[Slices, Slices]], environment: Any, x: Any, y: Any) -> Callable[[], None]:
    """Return the kernel that copies ``y[a] = x[b]`` for all pairs ``(a, b)`` of slices; elements without a source
    become 0.
    """
    pairs = [(y[a], x[b]) for a, b in copies]

    def run() -> None:
        if sum(to.size for to, _ in pairs) < y.size:  # a cell that a block cuts has elements of other ranks
            y.fill(0)
        for to, source in pairs:
            np.copyto(to, source)

    return run
