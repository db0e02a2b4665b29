"""Global pooling: one number per sample and channel, for samples that are cut in space."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..dtensor import Blocks, Interval, Layout
from ..kernels.access import reads, writes
from ..lowering.context import Context, Lowered
from ..lowering.views import View
from .layer import Layer, Passes, Shape
from .needs import without_space

__all__ = ["GlobalAveragePool", "GlobalMaxPool", "Search", "in_wide", "number_dtype"]


class _GlobalPool(Layer):
    """Pooling ``(N, *spatial, C)`` -> ``(N, C)``; each rank computes the contribution of its input block."""

    cuts_channels = "channelwise"
    inputs_taken = 1

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        if len(shape) < 2:
            raise ValueError(
                f"{self.kind}: expected samples with spatial axes (*spatial, C), got {shape}; "
                "remove the layer: there is nothing to pool over"
            )
        return (shape[-1],)

    def flops(self, *shapes: Shape) -> int:
        return math.prod(shapes[0])

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        return inputs[i].boxes


class GlobalAveragePool(_GlobalPool):
    """Mean over all positions: ``(N, *spatial, C)`` -> ``(N, C)``.

    ``y[n, c] = (1 / positions) * sum_s x[n, s, c]``, accumulated in float64.

    Notes
    -----
    Before: blocks cut in samples and space; after: whole samples, spread over all ranks.
    Communication per process: one float64 per channel of each own sample whose result another rank owns; backward, the
    adjoint, one number of the compute dtype (a broadcast to the ranks of the sample).
    """

    passes = Passes()

    def lower(self, context: Context) -> Lowered:
        value, boxes = context.inputs[0], context.output.layout.boxes
        scale = 1.0 / math.prod(context.shapes[0][:-1])
        # Samples and channels of each rank's summands.
        summands = without_space(value.layout.boxes)
        shape = summands[context.rank].shape
        partial_, total = context.scratch(shape, "float64"), context.scratch(context.box.shape, "float64")
        context.run(context.kernel(_sum, x=value.view, y=partial_), timing=context.timing("forward"))
        context.move(context.exchange(summands, boxes, partial_, total, combine="sum", kind="redistribute"))
        context.run(context.kernel(partial(_scale, scale), x=total, y=context.y))

        def backward() -> None:
            dx, dy = context.gradient(0), context.scratch(shape, value.dtype)
            context.move(context.exchange(boxes, summands, context.dy, dy, kind="redistribute"))
            spread = dy.reshape(shape[0], *(1 for _ in context.shapes[0][:-1]), shape[1])
            context.run(context.kernel(partial(_scale, scale), x=spread, y=dx), timing=context.timing("backward_data"))

        return Lowered(backward)


class GlobalMaxPool(_GlobalPool):
    """Maximum over all positions of each sample and channel: ``(N, *spatial, C)`` -> ``(N, C)``.

    Of several equal maxima, the first in row-major order receives the gradient. A NaN is larger than all numbers, and
    receives no gradient.

    Notes
    -----
    Before: blocks cut in samples and space; after: whole samples, spread over all ranks.

    Communication per process: two float64 per channel of each own sample whose result another rank owns (the maximum of
    its block and its position), and as many backward (the gradient and its position).
    """

    # A few passes over a second array find the position of the largest element.
    passes = Passes((8, 1), (3, 1))

    def lower(self, context: Context) -> Lowered:
        value, rank = context.inputs[0], context.rank
        found, wanted = _candidates(value.layout.boxes, context.output.layout.boxes)
        own = context.scratch(found[rank].shape, "float64")
        _lower_largest(context, own)
        several = context.scratch(wanted[rank].shape, "float64")
        context.move(context.exchange(found, wanted, own, several, kind="redistribute"))
        samples, _, _, channels = several.shape
        chosen, worse = (context.scratch((samples, n, channels), "float64") for n in (2, several.shape[1]))
        kernel = context.kernel(_choose, candidates=several, chosen=chosen, worse=worse, y=context.y)
        context.run(kernel)

        def backward() -> None:
            gradient = chosen.part((0, 0, 0), (samples, 1, channels))
            context.copy(*([(context.dy.reshape(*gradient.shape), gradient)] if samples else []))
            owners, readers = (_in_pairs(b) for b in (context.output.layout.boxes, without_space(value.layout.boxes)))
            brought = context.scratch(readers[rank].shape, "float64")
            context.move(context.exchange(owners, readers, chosen, brought, kind="redistribute"))
            spread = partial(_spread_to_first, value.box.ranges[1:-1], context.shapes[0][:-1])
            mask = context.scratch(value.box.shape, context.wide)
            dy = context.scratch((value.box.shape[0], 1, value.box.shape[-1]), context.wide)
            kernel = context.kernel(spread, chosen=brought, dy=dy, dx=context.gradient(0), mask=mask)
            context.run(kernel, timing=context.timing("backward_data"))

        return Lowered(backward)


def _candidates(inputs: Blocks, outputs: Blocks) -> tuple[Blocks, Blocks]:
    """Return the boxes of ranks' results and of owners' inputs in an array (N, nonempty spatial parts, 2, C).

    Pure arithmetic.
    """
    samples, *spatial, channels = inputs.axes
    full = [all(b > a for a, b in place) for place in itertools.product(*spatial)]
    firsts = list(itertools.accumulate(full, initial=0))
    places = tuple((first, first + there) for first, there in zip(firsts, full))
    found = Blocks((samples, places, ((0, 2),), channels), inputs.size)
    return found, Blocks((outputs.axes[0], ((0, firsts[-1]),), ((0, 2),), outputs.axes[-1]), outputs.size)


def _in_pairs(vectors: Blocks) -> Blocks:
    """Return the boxes ``(N, 2, C)`` for boxes ``(N, C)``."""
    samples, channels = vectors.axes
    return Blocks((samples, ((0, 2),), channels), vectors.size)


def _lower_largest(context: Context, own: View) -> None:
    """Write the maxima of the own block, and their positions as numbers in row-major order, to `own` ``(n, 1, 2, C)``.
    """
    value = context.inputs[0]
    if not value.box.size:
        return
    x = context.gather(0, value.layout.boxes).run()
    source, number, shape = in_wide(context, x.view), None, list(value.box.shape)
    for axis in range(len(shape) - 2, 0, -1):
        stride = math.prod(context.shapes[0][axis:-1])
        search = Search(axis, [(0, shape[axis])], value.box.start[axis] * stride, stride)
        work = context.scratch(shape, number_dtype(context, value.layout.shape[axis]) if number is None else "float64")
        shape[axis] = 1
        y, lowest = (context.scratch(shape, dtype) for dtype in (context.wide, work.dtype))
        timing = context.timing("forward") if number is None else None
        context.run(context.kernel(search, x=source, y=y, number=lowest, before=number, work=work), timing=timing)
        source, number = y, lowest
    assert number is not None
    for i, view in enumerate((source, number)):
        context.copy((view.reshape(shape[0], 1, 1, shape[-1]), own.part((0, 0, i, 0), (shape[0], 1, 1, shape[-1]))))


def number_dtype(context: Context, extent: int) -> np.dtype:
    """Return a dtype that holds element numbers up to `extent` exactly, and one larger number (`_beyond`)."""
    return context.wide if extent < _FLOAT32 else np.dtype("float64")


def in_wide(context: Context, view: View) -> View:
    """Return the view, or a float32 copy of a 16-bit view."""
    if view.dtype == context.wide:
        return view
    copy = context.scratch(view.shape, context.wide)
    context.copy((view, copy))
    return copy


@dataclass(frozen=True)
class Search:
    """Kernel that finds the maximum of windows along one axis, and its element number.

    Attributes
    ----------
    axis, windows
        The axis, and the half-open windows along it, one per output.
    first, stride
        Element ``i`` has the number ``first + i * stride``, plus the number `before` if there is one.
    """

    axis: int
    windows: Sequence[Interval]
    first: int = 0
    stride: int = 1

    @property
    def longest(self) -> int:
        """Extent of the longest window."""
        return max((b - a for a, b in self.windows), default=0)

    @reads("x", "before")
    @writes("y", "number", "work")
    def __call__(self, environment: Any, x: Any, y: Any, number: Any, before: Any, work: Any) -> Callable[[], None]:
        """Return the kernel: `y` is the maximum of each window, and `number` the lowest number of equal maxima.

        `work` has the dtype of `number` and the shape of x, or the length of the longest window along the axis.
        """
        # With a dtype other than that of `work`, NumPy would allocate buffers for casts at every step.
        numbers = self.first + self.stride * np.arange(x.shape[self.axis], dtype=np.float64)
        ramp = environment.kernels.device.array(numbers.reshape(-1, *(1 for _ in x.shape[self.axis + 1 :])), work.dtype)
        beyond = _beyond(work)
        steps = []
        for o, (a, b) in enumerate(self.windows):
            parts = [self.part(a, b, array) for array in (x, before)]
            made = [self.part(o, o + 1, array) for array in (y, number)]
            steps.append((*parts, *made, ramp[a:b], self.part(0, b - a, work)))

        def run() -> None:
            for some, others, best, lowest, own, worse in steps:
                np.amax(some, axis=self.axis, out=best, keepdims=True)
                np.not_equal(some, best, out=worse)
                np.multiply(worse, beyond, out=worse)
                np.add(worse, own, out=worse)
                if others is not None:
                    np.add(worse, others, out=worse)
                np.amin(worse, axis=self.axis, out=lowest, keepdims=True)

        return run

    def part(self, a: int, b: int, array: Any) -> Any:
        """Return the elements ``a .. b - 1`` along the axis; None stays None."""
        return None if array is None else array[(*(slice(None),) * self.axis, slice(a, b))]


#: Above this number float32 does not hold all integers.
_FLOAT32 = 2**24


def _beyond(array: Any) -> float:
    """Return a number larger than every position number that the array's dtype holds exactly."""
    return float(_FLOAT32) if array.dtype == np.float32 else 2.0**53


@reads("candidates")
@writes("chosen", "worse", "y")
def _choose(environment: Any, candidates: Any, chosen: Any, worse: Any, y: Any) -> Callable[[], None]:
    """Return the kernel that finds the largest candidate of ``(n, places, 2, C)``, and the lowest number of equal ones.
    """
    beyond = _beyond(worse)

    def run() -> None:
        if not y.size:
            return
        best, numbers = chosen[:, :1], chosen[:, 1:]
        np.amax(candidates[:, :, 0], axis=1, out=best, keepdims=True)
        np.not_equal(candidates[:, :, 0], best, out=worse)
        np.multiply(worse, beyond, out=worse)
        np.add(worse, candidates[:, :, 1], out=worse)
        np.amin(worse, axis=1, out=numbers, keepdims=True)
        np.copyto(y, best[:, 0], casting="same_kind")

    return run


@reads("chosen")
@writes("dy", "dx", "mask")
def _spread_to_first(
    ranges: Sequence[Interval],
    extents: Sequence[int],
    environment: Any,
    chosen: Any,
    dy: Any,
    dx: Any,
    mask: Any,
) -> Callable[[], None]:
    """Return the kernel that sets `dx` to the gradient at the chosen position, and to 0 elsewhere."""
    numbers = np.zeros(1)
    for (a, b), extent in zip(ranges, extents):
        numbers = (numbers[:, None] * extent + np.arange(a, b)).reshape(-1)
    own = environment.kernels.device.array(numbers, np.float64)

    def run() -> None:
        if dx.size:
            rows, some = (array.reshape(array.shape[0], -1, array.shape[-1]) for array in (dx, mask))
            np.equal(own[None, :, None], chosen[:, 1:], out=some)
            np.copyto(dy, chosen[:, :1], casting="same_kind")
            np.multiply(some, dy, out=rows)

    return run


@reads("x")
@writes("y")
def _sum(environment: Any, x: Any, y: Any) -> Callable[[], None]:
    axes = tuple(range(1, x.ndim - 1))

    def run() -> None:
        if x.size:
            np.add.reduce(x, axis=axes, dtype=np.float64, out=y)

    return run


@reads("x")
@writes("y")
def _scale(scale: float, environment: Any, x: Any, y: Any) -> Callable[[], None]:
    def run() -> None:
        if y.size:
            np.multiply(x, scale, out=y, casting="same_kind")

    return run
