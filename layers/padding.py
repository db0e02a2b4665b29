"""Padding of samples with constant, mirrored, repeated or circular rows; cropping of rows and channels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..dtensor import Blocks, Interval, Layout, axis_names
from ..kernels.access import reads, writes
from ..lowering.context import Context, Lowered
from ..lowering.operations import Timing
from ..lowering.views import View
from .layer import Layer, Node, Passes, Shape
from .merge import summing
from .needs import check_spatial

__all__ = ["MODES", "Copied", "Pad", "Shifted", "Slice"]

MODES = ("constant", "reflect", "replicate", "circular")
Amounts = tuple[tuple[int, int], ...]


class Copied(Layer):
    """Layer that copies elements of its input to other positions; its time is that of one copy of the output."""

    recomputation = "pointwise"

    passes = Passes((1, 1), (1, 1))
    cuts_channels = "channelwise"
    inputs_taken = 1

    def of_outputs(self, shape: Shape, outputs: tuple[int, ...]) -> tuple[Layer, Shape]:
        return Pad(0), shape

    @staticmethod
    def timing(context: Context, phase: str) -> Timing:
        """Return the timing of a copy of the output's block."""
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
    """Selection of the channels ``first .. last - 1``; ``(*spatial, C)`` -> ``(*spatial, last - first)``.

    :class:`Pad` with negative amounts removes rows.

    Notes
    -----
    Communication per process: none, unless channels are cut.
    """

    def __init__(self, first: int, last: int, name: str | None = None) -> None:
        super().__init__(name)
        if not 0 <= first < last:
            raise ValueError(f"Slice: expected first < last, both >= 0, got {first}, {last}")
        self.first, self.last = first, last

    def shifts(self, shape: Shape) -> Sequence[int]:
        return [0] * (len(shape) - 1) + [-self.first]

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        if self.last > shape[-1]:
            raise ValueError(f"Slice: expected at most {shape[-1]}, the channels of the input, got {self.last}")
        return (*shape[:-1], self.last - self.first)


class Pad(Shifted):
    """Padding of the spatial axes, as in torch's ``pad``; the mode ``"constant"`` can also remove rows.

    Parameters
    ----------
    amounts
        Rows before and after, per spatial axis; one number or pair for all axes. Negative numbers remove rows.
    mode
        ``"constant"``: rows hold `value`. ``"reflect"``: rows are mirrored at the first and last row, which are not
        repeated. ``"replicate"``: the first and last row are repeated. ``"circular"``: rows come from the other end,
        as for longitudes. All modes except the first create one layer per axis.
    value
        Value of constant rows.

    Notes
    -----
    Communication per process: the rows of its output that other ranks own in the input; backward, the adjoint.
    """

    def __init__(
        self,
        amounts: int | Sequence[int] | Sequence[tuple[int, int]],
        mode: str = "constant",
        value: float = 0.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if mode not in MODES:
            raise ValueError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
        self.amounts, self.mode, self.value = amounts, mode, float(value)

    def __call__(self, *inputs: Node) -> Node:
        if self.mode == "constant" or len(inputs) != 1 or not isinstance(inputs[0], Node):
            return super().__call__(*inputs)
        (node,) = inputs
        for axis, (low, high) in enumerate(self.pairs(node.shape)):
            if low or high:
                name = self.name and f"{self.name}_{axis_names(len(node.shape) + 1)[axis + 1]}"
                node = PadAxis(axis, low, high, self.mode, name)(node)
        return node

    def pairs(self, shape: Shape) -> Amounts:
        """Return the numbers of rows before and after, per spatial axis."""
        check_spatial(shape[:-1], "Pad")
        axes = len(shape) - 1
        given = np.asarray(self.amounts)
        if given.dtype.kind != "i" or given.shape not in ((), (2,), (axes, 2)):
            raise ValueError(
                f"Pad: expected a number, a pair, or a pair for each of {axes} spatial axes, got {self.amounts}"
            )
        return tuple((int(low), int(high)) for low, high in np.broadcast_to(given, (axes, 2)))

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        found = tuple(low + n + high for n, (low, high) in zip(shape, self.pairs(shape)))
        if min(found, default=1) < 1:
            raise ValueError(f"Pad: expected at least one row of {shape[:-1]} to remain, got {found}; remove fewer")
        return (*found, shape[-1])

    def shifts(self, shape: Shape) -> Sequence[int]:
        return [*(low for low, _ in self.pairs(shape)), 0]


class PadAxis(Copied):
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

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        n = shape[self.axis]
        most = {"reflect": n - 1, "circular": n}.get(self.mode, math.inf)
        if max(self.low, self.high) > most:
            raise ValueError(
                f"Pad: expected at most {most} rows of {n} in the mode {self.mode}, got {(self.low, self.high)}"
            )
        return (*shape[: self.axis], self.low + n + self.high, *shape[self.axis + 1 :])

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """Return the owned boxes: the pieces are gathered separately."""
        return inputs[i].boxes

    def pieces(self, extent: int) -> list[tuple[Interval, Callable[[int, int], Interval]]]:
        """Return the output rows before, within and after the array, each with the function to the input rows.

        >>> [(rows, source(*rows)) for rows, source in PadAxis(0, 2, 1, "reflect").pieces(4)]
        [((0, 2), (1, 3)), ((2, 6), (0, 4)), ((6, 7), (2, 3))]
        """
        low, n = self.low, extent
        before: dict[str, Callable[[int, int], Interval]] = {
            "reflect": lambda a, b: (low - b + 1, low - a + 1),
            "circular": lambda a, b: (a - low + n, b - low + n),
            "replicate": lambda a, b: (0, 1),
        }
        behind: dict[str, Callable[[int, int], Interval]] = {
            "reflect": lambda a, b: (2 * n + low - 1 - b, 2 * n + low - 1 - a),
            "circular": lambda a, b: (a - low - n, b - low - n),
            "replicate": lambda a, b: (n - 1, n),
        }
        within = low, low + n
        return [
            ((0, low), before[self.mode]),
            (within, partial(_shifted, low)),
            ((low + n, low + n + self.high), behind[self.mode]),
        ]

    def lower(self, context: Context) -> Lowered:
        axis, parts = self.axis + 1, self.pieces(context.shapes[0][self.axis])
        boxes = [self._sources(context.output.layout.boxes, *part) for part in parts]
        gathered = [context.gather(0, blocks) for blocks in boxes]
        for x in gathered:
            x.start()
        for x in gathered:
            x.finish()

        def shown(view: View, rows: Interval) -> View | None:
            """Return the part of the own output block that lies in one of the pieces; None if there is none."""
            a, b = context.box.ranges[axis]
            first, last = max(a, rows[0]), min(b, rows[1])
            if last <= first or not context.box.size:
                return None
            start = [0] * len(view.shape)
            start[axis] = first - a
            return view.part(tuple(start), (*view.shape[:axis], last - first, *view.shape[axis + 1 :]))

        for number, ((rows, _), x) in enumerate(zip(parts, gathered)):
            y = shown(context.y, rows)
            if y is not None:
                timing = self.timing(context, "forward") if number == 1 else None
                context.run(context.kernel(partial(_show, axis, self._flips(number)), x=x.view, y=y), timing=timing)

        def backward() -> None:
            for number, ((rows, _), blocks) in enumerate(zip(parts, boxes)):
                returned = context.return_gradient(0, blocks)
                dy = shown(context.dy, rows)
                if dy is not None and dy.shape != returned.view.shape:  # gradients of repeated rows are added up
                    sums = context.scratch(returned.view.shape, "float64")
                    context.run(context.kernel(summing, x=dy, y=sums))
                    context.copy((sums, returned.view))
                elif dy is not None:
                    timing = self.timing(context, "backward_data") if number == 1 else None
                    kernel = context.kernel(partial(_show, axis, self._flips(number)), x=dy, y=returned.view)
                    context.run(kernel, timing=timing)
                returned.run()

        return Lowered(backward)

    def _flips(self, number: int) -> bool:
        return self.mode == "reflect" and number != 1

    def _sources(self, output: Blocks, rows: Interval, source: Callable[[int, int], Interval]) -> Blocks:
        """Return, per rank, the part of the input that one piece needs."""

        def along(a: int, b: int) -> Interval:
            first, last = max(a, rows[0]), min(b, rows[1])
            return source(first, last) if last > first else (0, 0)

        same: list[Callable[[int, int], Interval]] = [partial(_shifted, 0)] * len(output.axes)
        same[self.axis + 1] = along
        return output.map(*same)


def _shifted(shift: int, low: int, high: int) -> Interval:
    return low - shift, high - shift


@reads("x")
@writes("y")
def _show(axis: int, flips: bool, environment: Any, x: Any, y: Any) -> Callable[[], None]:
    """Return the kernel ``y = x``, mirrored along an axis, or repeated along it where x has one row."""
    source = x[(slice(None),) * axis + (slice(None, None, -1),)] if flips else x
    return lambda: np.copyto(y, source)
