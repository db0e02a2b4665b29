"""Padding with constant, mirrored, repeated or circular rows, or across poles; circular shifts; cropping."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..dtensor import Blocks, Box, Interval, Layout, axis_names
from ..kernels.access import reads, writes
from ..lowering.context import Context, Lowered
from ..lowering.operations import Timing
from ..lowering.views import View
from .layer import Layer, Node, Passes, Shape
from .lowering import exchange_all
from .merge import summing
from .needs import Stencil, check_spatial

__all__ = [
    "MODES",
    "ChannelPad",
    "Copied",
    "Flip",
    "Mode",
    "Pad",
    "Pieced",
    "Roll",
    "Shifted",
    "Slice",
    "Sphere",
    "WindowPadding",
    "rolled",
]

MODES = ("constant", "reflect", "replicate", "circular")
Amounts = tuple[tuple[int, int], ...]


class Copied(Layer):
    """Layer that copies elements of its input to other positions; its time is that of one copy of the output."""

    recomputation = "pointwise"
    passes = Passes((1, 1), (1, 1))
    cuts_channels = "channelwise"
    inputs_taken = 1

    def of_outputs(self, shape: Shape, outputs: tuple[int, ...]) -> tuple[Layer, Shape]:
        # Stands for the layer when times are measured: it copies a block of the output once.
        return Pad(0), shape

    @staticmethod
    def timing(context: Context, phase: str) -> Timing:
        """Return the timing of a copy of the largest block of the output."""
        return context.timing(phase, inputs=(context.output.layout.boxes.longest,))


class Shifted(Copied):
    """Layer that moves every element by the same shift; elements without a source become `value`."""

    value = 0.0

    def shifts(self, shape: Shape) -> Sequence[int]:
        """Return the output index minus the input index, per axis of a sample."""
        raise TypeError(f"{self.kind} must override shifts()")

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """Return the shifted boxes; they may reach outside the array."""
        shifts = [0, *self.shifts(inputs[i].shape[1:])]
        return output.boxes.map(*(partial(_shifted, shift) for shift in shifts))

    def lower(self, context: Context) -> Lowered:
        boxes = context.needed(0)
        x = context.gather(0, boxes, self.value).run()
        copied = [(x.view, context.y)] if context.box.size else []  # empty boxes may have different shapes
        context.copy(*copied, timing=self.timing(context, "forward"))

        def backward() -> None:
            returned = context.return_gradient(0, boxes)
            copied = [(context.dy, returned.view)] if context.box.size else []
            context.copy(*copied, timing=self.timing(context, "backward_data"))
            returned.run()

        return Lowered(backward)


class Slice(Shifted):
    """Selection of the elements ``first .. last - 1`` along an axis, by default of channels: ``(*spatial, C)`` ->
    ``(*spatial, last - first)``.

    :class:`Pad` with negative amounts removes rows.

    Parameters
    ----------
    first, last
        The half-open interval ``[first, last)``.
    axis
        Axis of a sample along which elements are selected; ``Slice(0, 1, axis="width")`` selects the first token.

    Notes
    -----
    Communication per process: the elements of its output that other ranks own in the input; none if the axis is not
    cut. Backward, the adjoint.
    """

    def __init__(self, first: int, last: int, name: str | None = None, *, axis: str = "channel") -> None:
        super().__init__(name)
        if not 0 <= first < last:
            raise ValueError(f"Slice: expected first < last, both >= 0, got {first}, {last}")
        self.first, self.last, self.axis = first, last, axis

    def along(self, shape: Shape) -> int:
        """Return the index of `axis` in samples of this shape. Raises ValueError if they lack it."""
        names = axis_names(len(shape) + 1)[1:]
        if self.axis not in names:
            raise ValueError(f"Slice: axis: expected one of {', '.join(names)}, the axes of {shape}, got {self.axis!r}")
        return names.index(self.axis)

    def shifts(self, shape: Shape) -> Sequence[int]:
        along = self.along(shape)
        return [-self.first if axis == along else 0 for axis in range(len(shape))]

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,), along = shapes, self.along(shapes[0])
        if self.last > shape[along]:
            what = "channels" if along == len(shape) - 1 else "rows"
            raise ValueError(f"Slice: expected at most {shape[along]}, the {what} of the input, got {self.last}")
        return (*shape[:along], self.last - self.first, *shape[along + 1 :])


class ChannelPad(Shifted):
    """Channels of zeros before and after those of the input: ``(*spatial, C)`` -> ``(*spatial, low + C + high)``.

    The shortcut of a residual block with more channels may be padded in this way (He et al. 2016, option A).

    Parameters
    ----------
    low, high
        Numbers of channels before and after.

    Notes
    -----
    Communication per process: the elements of its output that other ranks own in the input; none if the channels are
    not cut. Backward, the adjoint.
    """

    def __init__(self, low: int, high: int, name: str | None = None) -> None:
        super().__init__(name)
        if low < 0 or high < 0:
            raise ValueError(f"ChannelPad: expected numbers >= 0, got {low}, {high}; a Slice removes channels")
        self.low, self.high = low, high

    def shifts(self, shape: Shape) -> Sequence[int]:
        return [*(0 for _ in shape[:-1]), self.low]

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        check_spatial(shape[:-1], "ChannelPad")
        return (*shape[:-1], self.low + shape[-1] + self.high)


class Flip(Copied):
    """Reversed order of elements along some axes, as torch's ``flip``: the row `i` becomes the row ``n - 1 - i``.

    Parameters
    ----------
    axes
        Names of axes of a sample: ``"depth"``, ``"height"``, ``"width"``, ``"channel"``; one or several.

    Notes
    -----
    Communication per process: the rows of its output's mirror image that other ranks own; as much backward.
    """

    def __init__(self, *axes: str, name: str | None = None) -> None:
        super().__init__(name)
        self.axes = axes

    def flipped_axes(self, shape: Shape) -> tuple[int, ...]:
        """Return the indices of the flipped axes in samples of this shape. Raises ValueError if they lack one."""
        names = axis_names(len(shape) + 1)[1:]
        if not self.axes or set(self.axes) - set(names):
            raise ValueError(f"Flip: expected some of {', '.join(names)}, the axes of {shape}, got {self.axes}")
        return tuple(names.index(axis) for axis in dict.fromkeys(self.axes))

    def output_shape(self, *shapes: Shape) -> Shape:
        self.flipped_axes(shapes[0])
        return shapes[0]

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        shape = inputs[i].shape[1:]
        flipped = self.flipped_axes(shape)
        return output.boxes.map(None, *(partial(_mirrored, n) if a in flipped else None for a, n in enumerate(shape)))

    def lower(self, context: Context) -> Lowered:
        boxes, flipped = context.needed(0), self.flipped_axes(context.shapes[0])
        x = context.gather(0, boxes).run()
        kernel = context.kernel(partial(_flipping, flipped), source=x.view, target=context.y)
        context.run(kernel, timing=self.timing(context, "forward"))

        def backward() -> None:
            returned = context.return_gradient(0, boxes)
            # A reversal is its own adjoint.
            kernel = context.kernel(partial(_flipping, flipped), source=context.dy, target=returned.view)
            context.run(kernel, timing=self.timing(context, "backward_data"))
            returned.run()

        return Lowered(backward)


def _mirrored(extent: int, low: int, high: int) -> Interval:
    return extent - high, extent - low


@reads("source")
@writes("target")
def _flipping(axes: Sequence[int], environment: Any, source: Any, target: Any) -> Callable[[], None]:
    """Return the kernel that copies an array with the order along these axes of a sample reversed."""
    ends = (slice(None), *(slice(None, None, -1 if a in axes else 1) for a in range(source.ndim - 1)))

    def run() -> None:
        if target.size:  # empty boxes may have different shapes
            np.copyto(target, source[ends])

    return run


@dataclass(frozen=True)
class Sphere:
    """Mode of padding of latitudes: across a pole, the rows continue at the longitudes half a circle away.

    Without rows at the poles, the row ``-1 - i`` at the longitude ``j`` is the row ``i`` at ``(j + W / 2) mod W``::

        longitude   0 1 2 3
        row -1      c d a b     <- across the pole
        row  0      a b c d

    Attributes
    ----------
    longitude
        Spatial axis of the longitudes, of even extent `W`; None: the axis after the latitudes. Its mode must be
        ``"circular"``.
    poles
        Whether the first and the last row are at the poles: the row ``-1 - i`` is then the row ``1 + i``.
    sign
        Factor of the rows across a pole, one number or one per channel: -1 for components of vectors, because both
        directions are reversed there.
    """

    longitude: int | None = None
    poles: bool = False
    sign: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        sign = np.asarray(self.sign, np.float64)
        if sign.ndim > 1 or not np.isin(sign, (-1, 1)).all():
            raise ValueError(f"Sphere: sign: expected 1 or -1, or one of them per channel, got {self.sign!r}")
        # Hashable, because `Pad` looks up the layer of an axis by its mode.
        object.__setattr__(self, "sign", tuple(sign.tolist()) if sign.ndim else float(sign))


#: Mode of padding of one axis.
Mode = str | Sphere


def modes_of(mode: Mode | Sequence[Mode], axes: int, first: str = "constant") -> tuple[Mode, ...]:
    """Return the mode of each spatial axis; `first` is the name of the mode with constant rows.

    A sphere for all axes means the last two: latitudes and longitudes.

    >>> modes_of("reflect", 2), modes_of(("circular", "zeros"), 2, "zeros")
    (('reflect', 'reflect'), ('circular', 'zeros'))
    >>> modes_of("sphere", 3)
    ('constant', Sphere(longitude=2, poles=False, sign=1.0), 'circular')
    """
    if mode == "sphere":
        mode = Sphere()
    if isinstance(mode, Sphere):
        longitude = axes - 1 if mode.longitude is None else mode.longitude
        # Axes before the latitudes, such as levels, get constant rows.
        mode = (*(first,) * (axes - 2), replace(mode, longitude=longitude), "circular")
        if longitude != axes - 1 or axes < 2:
            raise ValueError(
                f"mode: expected latitudes and longitudes as the last two of {axes} spatial axes; give one mode per "
                'axis for others, such as ("circular", Sphere(longitude=0))'
            )
    every = (mode,) * axes if isinstance(mode, str) else tuple(mode)
    if len(every) != axes:
        raise ValueError(f"mode: expected one, or one for each of {axes} spatial axes, got {every}")
    every = tuple(Sphere() if axis_mode == "sphere" else axis_mode for axis_mode in every)
    for axis, axis_mode in enumerate(every):
        if isinstance(axis_mode, Sphere):
            longitude = axis + 1 if axis_mode.longitude is None else axis_mode.longitude
            if not 0 <= longitude < axes or every[longitude] != "circular":
                raise ValueError(
                    f'mode: expected "circular" along the longitudes, axis {longitude} of {axes}, got {every}'
                )
        elif axis_mode not in (first, *MODES[1:]):
            raise ValueError(f"mode: expected one of {', '.join((first, *MODES[1:], 'sphere'))}, got {axis_mode!r}")
    return every


class Pad(Shifted):
    """Padding of the spatial axes, as in torch's ``pad``; the mode ``"constant"`` can also remove rows.

    Parameters
    ----------
    amounts
        Rows before and after, per spatial axis; one number or pair for all axes. Negative numbers remove rows.
    mode
        ``"constant"``: rows hold `value`. ``"reflect"``: rows are mirrored at the first and last row, which are not
        repeated. ``"replicate"``: the first and last row are repeated. ``"circular"``: rows come from the other end,
        as for longitudes. ``"sphere"`` or a :class:`Sphere`: the last two axes are latitudes and longitudes. Or a
        sequence with one mode per spatial axis. All modes except the first create one layer per axis.
    value
        Value of constant rows.

    Notes
    -----
    Communication per process: the rows of its output that other ranks own in the input; backward, the adjoint.
    """

    def __init__(
        self,
        amounts: int | Sequence[int] | Sequence[tuple[int, int]],
        mode: Mode | Sequence[Mode] = "constant",
        value: float = 0.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if not isinstance(mode, Sphere):
            modes_of(mode, 2 if isinstance(mode, str) else len(mode))  # refuses unknown ones
        self.amounts, self.mode, self.value = amounts, mode, float(value)
        self._layers: dict[Any, Layer] = {}

    def __call__(self, *inputs: Node) -> Node:
        # The base class reports wrong inputs.
        if self.mode == "constant" or len(inputs) != 1 or not isinstance(inputs[0], Node):
            return super().__call__(*inputs)
        (node,) = inputs
        pairs, modes = self.pairs(node.shape), modes_of(self.mode, len(node.shape) - 1)
        constant = tuple(pair if mode == "constant" else (0, 0) for pair, mode in zip(pairs, modes))
        # Rows across a pole first: half a circle is whole columns there.
        for axis in sorted(range(len(modes)), key=lambda axis: not isinstance(modes[axis], Sphere)):
            if modes[axis] != "constant" and any(pairs[axis]):
                node = self._once(PadPole if isinstance(modes[axis], Sphere) else PadAxis, axis, node, modes, pairs)
        if any(map(any, constant)):
            # Equal calls share a layer, because names are unique in a network.
            node = self._layers.setdefault(constant, Pad(constant, value=self.value, name=self.name))(node)
        return node

    def _once(self, kind: Any, axis: int, node: Node, modes: Sequence[Mode], pairs: Amounts) -> Node:
        """Return the output of a layer of class `kind` that pads one axis; calls with the same padding share the layer.
        """
        key = axis, pairs[axis], modes[axis], len(modes)
        if key not in self._layers:
            name = self.name and f"{self.name}_{axis_names(len(node.shape) + 1)[axis + 1]}"
            self._layers[key] = kind(axis, *pairs[axis], modes[axis], name)
        return self._layers[key](node)

    def pairs(self, shape: Shape) -> Amounts:
        """Return the numbers of rows before and after, per spatial axis."""
        check_spatial(shape[:-1], "Pad")
        axes = len(shape) - 1
        amounts = np.asarray(self.amounts)
        if amounts.dtype.kind != "i" or amounts.shape not in ((), (2,), (axes, 2)):
            raise ValueError(
                f"Pad: expected a number, a pair, or a pair for each of {axes} spatial axes, got {self.amounts}"
            )
        return tuple((int(low), int(high)) for low, high in np.broadcast_to(amounts, (axes, 2)))

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        padded = tuple(low + n + high for n, (low, high) in zip(shape, self.pairs(shape)))
        if min(padded, default=1) < 1:
            raise ValueError(f"Pad: expected at least one row of {shape[:-1]} to remain, got {padded}; remove fewer")
        return (*padded, shape[-1])

    def shifts(self, shape: Shape) -> Sequence[int]:
        return [*(low for low, _ in self.pairs(shape)), 0]


@dataclass(frozen=True)
class Span:
    """Rows of an output along one axis, and the rows of the input of which they are copies.

    Attributes
    ----------
    rows
        Interval of the output.
    source
        Function from an interval of the output within `rows` to the interval of the input. If that is a single row, it
        is repeated.
    flips
        Whether the rows appear in reverse order.
    """

    rows: Interval
    source: Callable[[int, int], Interval]
    flips: bool = False


@dataclass(frozen=True)
class ShownBox:
    """Box of an output that is a copy of a box of the input.

    Attributes
    ----------
    spans
        Spans by spatial axis; along the other axes, both boxes have the same interval.
    sign
        Factor: a number, or one per channel.
    """

    spans: Mapping[int, Span]
    sign: float | tuple[float, ...] = 1.0

    def shown_in(self, box: Box) -> Box:
        """Return the part of an output box that lies in this one."""
        for axis, span in self.spans.items():
            box = box.replace(axis + 1, *_common(box.ranges[axis + 1], span.rows))
        return box


class Pieced(Copied):
    """Layer whose output consists of boxes that are copies of boxes of the input, possibly mirrored or repeated.

    Communication per process: the elements of its output that other ranks own in the input; backward, the adjoint.
    """

    @abstractmethod
    def pieces(self, shape: Shape) -> list[ShownBox]:
        """Return the pieces of the output, for inputs of this shape; they cover it, and do not overlap."""

    def closed_axes(self, axes: int) -> tuple[int, ...]:
        """Return those of `axes` spatial axes that are circular, or that continue across poles.

        Samples cannot be padded at an end of such an axis, where the layer takes further rows from the sample itself.
        """
        return ()

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """Return the owned boxes: the pieces are gathered separately."""
        return inputs[i].boxes

    def lower(self, context: Context) -> Lowered:
        parts = self.pieces(context.shapes[0])
        boxes = [_sources(context.output.layout.boxes, part) for part in parts]
        gathered = [context.gather(0, blocks) for blocks in boxes]
        exchange_all(gathered)
        shown = [part.shown_in(context.box) for part in parts]
        # Rank-local: only the price of a kernel depends on it, not the order of messages.
        largest = max(range(len(parts)), key=lambda i: shown[i].size)
        first, last = context.box.ranges[-1]
        # Signs of this rank's channels.
        signs = [part.sign[first:last] if isinstance(part.sign, tuple) else part.sign for part in parts]
        flips = [tuple(axis + 1 for axis, span in part.spans.items() if span.flips) for part in parts]

        def part_of(view: View, box: Box) -> View:
            return view.part([a - o for a, o in zip(box.start, context.box.start)], box.shape)

        # The largest piece is most of the output, so it has the measured time of the whole.
        for i, (box, x) in enumerate(zip(shown, gathered)):
            if box.size:
                kernel = context.kernel(partial(_show, flips[i], signs[i]), x=x.view, y=part_of(context.y, box))
                context.run(kernel, timing=self.timing(context, "forward") if i == largest else None)

        def backward() -> None:
            # Every rank returns every piece, if only nothing, so that all ranks exchange in the same order.
            for i, (box, blocks) in enumerate(zip(shown, boxes)):
                returned = context.return_gradient(0, blocks)
                dy = part_of(context.dy, box) if box.size else None
                if dy is not None and dy.shape != returned.view.shape:  # gradients of repeated rows are added up
                    sums = context.scratch(returned.view.shape, "float64")
                    context.run(context.kernel(summing, x=dy, y=sums))
                    context.copy((sums, returned.view))
                elif dy is not None:
                    timing = self.timing(context, "backward_data") if i == largest else None
                    kernel = context.kernel(partial(_show, flips[i], signs[i]), x=dy, y=returned.view)
                    context.run(kernel, timing=timing)
                returned.run()

        return Lowered(backward)


class WindowPadding:
    """Function that pads the input of a layer with windows, in modes other than zeros.

    Parameters
    ----------
    stencil
        Windows of the layer, with the padding.
    mode
        As for :class:`Pad`, with ``"zeros"`` for constant rows.
    name
        Name of the :class:`Pad`; None: a default name.

    Attributes
    ----------
    stencil : Stencil
        Windows of the layer after the padding. With one mode per axis, the layer itself still pads with zeros the axes
        whose mode is ``"zeros"``, unless the padding is ``"same"``.
    """

    def __init__(self, stencil: Stencil, mode: Mode | Sequence[Mode], name: str | None) -> None:
        self._whole, self._mode, self._name = stencil, mode, name
        # Calls with the same amounts share a layer: a network refuses two layers of one name.
        self._pads: dict[Amounts, Pad] = {}
        several = not isinstance(mode, (str, Sphere))
        # One mode for all axes is only checked here: with 2 axes every mode is possible.
        modes = () if isinstance(mode, Sphere) else modes_of(mode, len(mode) if several else 2, "zeros")
        self._keeps_zeros = several and stencil.padding != "same"
        own: Any = 0
        if self._keeps_zeros:
            # Only "same" depends on the extents; other paddings are those for any extent, here 1.
            pads = [(w.pad_lo, w.pad_hi) for w in stencil.windows((1,) * len(modes))]
            own = [pair if axis_mode == "zeros" else 0 for pair, axis_mode in zip(pads, modes)]
        self.stencil = replace(stencil, padding=own)

    def __call__(self, node: Node) -> Node:
        spatial = node.shape[:-1]
        check_spatial(spatial, "padding_mode")
        modes = modes_of(self._mode, len(spatial), "zeros")
        amounts = tuple(
            (0, 0) if axis_mode == "zeros" and self._keeps_zeros else (w.pad_lo, w.pad_hi)
            for w, axis_mode in zip(self._whole.windows(spatial), modes)
        )
        named = ["constant" if axis_mode == "zeros" else axis_mode for axis_mode in modes]
        return self._pads.setdefault(amounts, Pad(amounts, named, name=self._name))(node)

    def source(self, node: Node) -> Node:
        """Return the node from which a call made `node`."""
        # A Pad with one layer per axis is itself in no node.
        made = [layer for pad in self._pads.values() for layer in (pad, *pad._layers.values())]
        while any(node.layer is layer for layer in made):
            (node,) = node.inputs
        return node


class PadAxis(Pieced):
    """Padding of one spatial axis, at both ends, with rows of the array itself."""

    def __init__(self, axis: int, low: int, high: int, mode: str, name: str | None = None) -> None:
        super().__init__(name)
        if min(low, high) < 0:
            raise ValueError(
                f"Pad: expected numbers of rows >= 0 in the mode {mode}, got {(low, high)}; use constant to remove rows"
            )
        self.axis, self.low, self.high, self.mode = axis, low, high, mode

    @property
    def kind(self) -> str:
        return "Pad"

    @property
    def rule(self) -> str:
        """Name of the rule that selects the source rows: a mode, or ``"symmetric"``, which also repeats the end row."""
        return self.mode

    def closed_axes(self, axes: int) -> tuple[int, ...]:
        return (self.axis,) if self.mode == "circular" else ()

    def most(self, extent: int) -> float:
        """Return the largest number of rows that can be added at one end of an axis of this extent."""
        # A mirrored axis does not repeat its end row, so one row fewer is available.
        return {"reflect": extent - 1, "circular": extent}.get(self.mode, math.inf)

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        n = shape[self.axis]
        if max(self.low, self.high) > self.most(n):
            raise ValueError(
                f"Pad: expected at most {self.most(n)} rows of {n} in the mode {self.mode}, got {(self.low, self.high)}"
            )
        return (*shape[: self.axis], self.low + n + self.high, *shape[self.axis + 1 :])

    def spans(self, extent: int) -> tuple[Span, Span, Span]:
        """Return the spans of output rows before, within and after the array.

        >>> [(span.rows, span.source(*span.rows)) for span in PadAxis(0, 2, 1, "reflect").spans(4)]
        [((0, 2), (1, 3)), ((2, 6), (0, 4)), ((6, 7), (2, 3))]
        """
        low, n = self.low, extent
        # Rows [a, b) of the output -> rows of the input. By "reflect", the output's row r is a copy of the input's row
        # low - r before the array, and 2 n + low - 2 - r after it.
        before: dict[str, Callable[[int, int], Interval]] = {
            "reflect": lambda a, b: (low - b + 1, low - a + 1),
            # Unlike "reflect", "symmetric" repeats the end row itself: there is no row at the pole.
            "symmetric": lambda a, b: (low - b, low - a),
            "circular": lambda a, b: (a - low + n, b - low + n),
            "replicate": lambda a, b: (0, 1),
        }
        after: dict[str, Callable[[int, int], Interval]] = {
            "reflect": lambda a, b: (2 * n + low - 1 - b, 2 * n + low - 1 - a),
            "symmetric": lambda a, b: (2 * n + low - b, 2 * n + low - a),
            "circular": lambda a, b: (a - low - n, b - low - n),
            "replicate": lambda a, b: (n - 1, n),
        }
        flips = self.rule in ("reflect", "symmetric")
        return (
            Span((0, low), before[self.rule], flips),
            Span((low, low + n), partial(_shifted, low)),
            Span((low + n, low + n + self.high), after[self.rule], flips),
        )

    def pieces(self, shape: Shape) -> list[ShownBox]:
        return [ShownBox({self.axis: span}) for span in self.spans(shape[self.axis])]


class PadPole(PadAxis):
    """Padding of latitudes across both poles: rows beyond a pole come from the longitudes half a circle away."""

    def __init__(self, axis: int, low: int, high: int, sphere: Sphere, name: str | None = None) -> None:
        super().__init__(axis, low, high, "sphere", name)
        self.longitude = axis + 1 if sphere.longitude is None else sphere.longitude
        self.sphere = sphere
        self.sign: Any = sphere.sign

    @property
    def rule(self) -> str:
        return "reflect" if self.sphere.poles else "symmetric"

    def closed_axes(self, axes: int) -> tuple[int, ...]:
        return self.axis, self.longitude

    def most(self, extent: int) -> float:
        # The row of a pole itself is not repeated, so one row fewer is available.
        return extent - self.sphere.poles

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        if shape[self.longitude] % 2:
            raise ValueError(
                f"Pad: expected an even number of longitudes, so that half a circle is whole columns, got "
                f"{shape[self.longitude]} along axis {self.longitude}"
            )
        if isinstance(self.sign, tuple) and len(self.sign) != shape[-1]:
            raise ValueError(f"Sphere: sign: expected one per channel, {shape[-1]}, got {len(self.sign)}")
        return super().output_shape(*shapes)

    def pieces(self, shape: Shape) -> list[ShownBox]:
        north, within, south = self.spans(shape[self.axis])
        # Beyond each pole two pieces, the halves of the circle, which exchange their longitudes.
        across = [
            ShownBox({self.axis: row, self.longitude: column}, self.sign)
            for row in (north, south)
            for column in rolled(shape[self.longitude], shape[self.longitude] // 2)
        ]
        return [ShownBox({self.axis: within}), *across]


class Roll(Pieced):
    """Circular shift of the spatial axes, as torch's ``roll``: the row `i` becomes the row ``(i + shift) mod n``.

    Parameters
    ----------
    shift
        Rows, per spatial axis or for all of them; negative numbers shift to the front.
    """

    def __init__(self, shift: int | Sequence[int], name: str | None = None) -> None:
        super().__init__(name)
        self.shift = shift

    def shifts(self, shape: Shape) -> tuple[int, ...]:
        """Return the shift of each spatial axis, modulo its extent."""
        check_spatial(shape[:-1], "Roll")
        shifts = np.asarray(self.shift)
        if shifts.dtype.kind != "i" or shifts.shape not in ((), (len(shape) - 1,)):
            raise ValueError(
                f"Roll: expected a number of rows, or one for each of {len(shape) - 1} spatial axes, got {self.shift!r}"
            )
        return tuple(int(by) % n for by, n in zip(np.broadcast_to(shifts, len(shape) - 1), shape))

    def output_shape(self, *shapes: Shape) -> Shape:
        self.shifts(shapes[0])
        return shapes[0]

    def closed_axes(self, axes: int) -> tuple[int, ...]:
        return tuple(np.flatnonzero(np.broadcast_to(self.shift, axes)).tolist())

    def pieces(self, shape: Shape) -> list[ShownBox]:
        # One or two spans per axis; each combination is a piece.
        axes = [rolled(n, by) for n, by in zip(shape, self.shifts(shape))]
        return [ShownBox(dict(enumerate(spans))) for spans in itertools.product(*axes)]


def rolled(extent: int, shift: int) -> tuple[Span, ...]:
    """Return the spans of a circular shift by ``0 <= shift < extent``.

    >>> [(span.rows, span.source(*span.rows)) for span in rolled(5, 2)]
    [((0, 2), (3, 5)), ((2, 5), (0, 3))]
    """
    after = Span((shift, extent), partial(_shifted, shift))
    return (Span((0, shift), partial(_shifted, shift - extent)), after) if shift else (after,)


def _common(interval: Interval, rows: Interval) -> Interval:
    """Return the common part of two intervals; (0, 0) if it is empty."""
    first, last = max(interval[0], rows[0]), min(interval[1], rows[1])
    return (first, last) if last > first else (0, 0)


def _sources(output: Blocks, part: ShownBox) -> Blocks:
    """Return, per rank, the box of the input of which its box of the output shows a copy in the piece `part`."""

    def along(span: Span, a: int, b: int) -> Interval:
        first, last = _common((a, b), span.rows)
        # Some sources of an empty interval are not empty: that of "replicate" is always one row.
        return span.source(first, last) if last > first else (0, 0)

    functions: list[Callable[[int, int], Interval] | None] = [None] * len(output.axes)
    for axis, span in part.spans.items():
        functions[axis + 1] = partial(along, span)
    return output.map(*functions)


def _shifted(shift: int, low: int, high: int) -> Interval:
    return low - shift, high - shift


@reads("x")
@writes("y")
def _show(
    flips: tuple[int, ...], sign: float | tuple[float, ...], environment: Any, x: Any, y: Any
) -> Callable[[], None]:
    """Return the kernel ``y = sign * x``, mirrored along the axes `flips`; a single row of x is repeated."""
    source = x[tuple(slice(None, None, -1 if axis in flips else 1) for axis in range(x.ndim))]
    if sign == 1.0:
        return lambda: np.copyto(y, source)
    factor = environment.kernels.device.array(np.asarray(sign), x.dtype) if isinstance(sign, tuple) else sign
    return lambda: np.multiply(source, factor, out=y)
