"""Max and average pooling: over windows, over all positions, and over the channels.

Adaptive windows cover the input, and follow from the number of outputs. They may overlap. Global pooling gives one
number per sample and channel, also of samples that are cut in space.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ..dtensor import Blocks, Interval, Layout, Window
from ..kernels.access import Access, makes, reads, writes
from ..lowering.context import Context, Lowered
from ..lowering.views import Region, View
from .convolution import LocalGeometry, local_geometry, zeroing
from .layer import Layer, Node, Passes, Shape
from .lowering import Pair
from .merge import summing
from .needs import Stencil, with_axes, without_space
from .padding import Pad
from .reshape import Reshape
from .resize import Resize

__all__ = [
    "AdaptiveAveragePool",
    "AdaptiveMaxPool",
    "AveragePool",
    "ChannelMax",
    "ChannelMean",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "MaxPool",
]


class _Pool(Layer, ABC):
    """Pooling with a stencil; windows that hold only padding are rejected."""

    widens = True
    recomputation = "pointwise"
    cuts_channels = "channelwise"
    inputs_taken = 1

    def __init__(
        self,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: str | int | Sequence = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        rounding = "ceil" if ceil_mode else "floor"
        self.stencil: Stencil = Stencil(kernel, kernel if stride is None else stride, padding, dilation, rounding)

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        sizes = self.stencil.output_spatial(shape[:-1], self.kind)
        for axis, (w, n, outputs) in enumerate(zip(self.windows(shape), shape, sizes)):
            bad = _only_padding(w, n, outputs)
            if bad is not None:
                raise ValueError(
                    f"{self.kind}: window {bad} on spatial axis {axis} reads only padding (kernel {w.kernel}, "
                    f"dilation {w.dilation}, padding {(w.pad_lo, w.pad_hi)}, extent {n}); make the padding smaller"
                )
        return (*sizes, shape[-1])

    def flops(self, *shapes: Shape) -> int:
        taps = math.prod(w.kernel for w in self.windows(shapes[0]))
        return taps * math.prod(self.output_shape(*shapes))

    def position_bytes(self, taps: int) -> int:
        """Return the memory per output that forward writes for backward [B], with windows of `taps` elements."""
        return 0

    @abstractmethod
    def kernels(self, backend: Any, x: Any, y: Any, dy: Any, dx: Any, geometry: Any) -> tuple[Any, Any]:
        """Return the forward and the backward kernel of the backend."""

    def lower(self, context: Context) -> Lowered:
        """Add the halo exchange of `x` and one kernel; backward, one kernel and the adjoint of the exchange.

        The gathered box ends at the border of the global array, so the padding of the kernel is the padding of the
        global array, and the counts of average pooling are right.
        """
        windows = self.windows(context.shapes[0])
        # Boxes are clipped at the border of the array, so no fill value is needed. A stride skips up to stride - 1
        # elements at the end of a block: a box may include them, so that the block itself serves without a copy.
        slack = [0, *(w.stride - 1 for w in windows), 0]
        boxes = context.clipped(0, slack)
        x = context.gather(0, boxes).run()
        geometry = local_geometry(windows, x.box, context.box)
        # Forward and backward are created together: backward uses what forward stores.
        kernel = context.kernel(partial(_pool, self, geometry), x=x.view, y=context.y)
        context.run(kernel, "forward", timing=context.timing("forward"))

        def backward() -> None:
            own = context.clipped(0, slack, own=True)
            # `own`: outside of what owned outputs read the gradient is zero, and is not sent.
            returned = context.return_gradient(0, boxes, own)
            kernel.add(dy=self._own_gradient(context), dx=returned.view)
            kernel.keeps = self.position_bytes(math.prod(geometry().kernel)) * math.prod(context.box.shape)
            # Forward has stored the positions of the maxima.
            context.run(kernel, "backward", timing=context.timing("backward_data"))
            returned.run()

        return Lowered(backward)

    @staticmethod
    def _own_gradient(context: Context) -> View:
        """Return the gradient of the output, with zeros in a margin, because the gradients of ranks are added up."""
        if not context.output.wide:
            return context.dy
        dy = context.scratch(context.box.shape)
        context.run(context.kernel(zeroing, array=dy))
        held = Region(context.dy, context.output.held_gradient[context.rank])
        context.copy((held.part(context.own), Region(dy, context.box).part(context.own)))
        return dy


@makes(forward=Access(("x",), ("y",)), backward=Access(("dy",), ("dx",)))
def _pool(
    layer: _Pool, geometry: LocalGeometry, environment: Any, x: Any, y: Any, dy: Any = None, dx: Any = None
) -> Pair:
    return Pair(*layer.kernels(environment.kernels, x, y, dy, dx, geometry()))


class MaxPool(_Pool):
    """Max pooling: the maximum of each window, channel by channel.

    ``y[n, o, c] = max_j x[n, o * stride - pad_lo + dilation * j, c]``; padding is never the maximum. Of several equal
    maxima, the first in row-major order of the window receives the gradient.

    Output size per axis: ``floor((n + pad_lo + pad_hi - extent) / stride) + 1`` with ``extent = dilation * (kernel - 1)
    + 1``, unless `ceil_mode` rounds up.

    Parameters
    ----------
    kernel, stride, padding, dilation
        See :class:`Stencil`; by default the stride is the kernel. Backends that cannot dilate reject a dilation when
        the network is compiled.
    ceil_mode
        Whether to round the output size up: a last window that begins before the padding at the end may reach beyond
        it.

    Raises
    ------
    ValueError
        If a window would read only padding.

    Notes
    -----
    Input and output may be cut in samples, space and channels. Communication per process: the halo of `x` forward;
    as much backward, added to the gradients of the owners.
    """

    # The position of each maximum is stored.
    passes = Passes((1, 1.25), (1, 1.25))

    def position_bytes(self, taps: int) -> int:
        return 1 if taps <= 255 else 4

    def kernels(self, backend: Any, x: Any, y: Any, dy: Any, dx: Any, geometry: Any) -> tuple[Any, Any]:
        return backend.max_pool(x, y, dy, dx, geometry)


class AveragePool(_Pool):
    """Average pooling: the mean of each window, channel by channel.

    ``y[n, o, c] = (1 / count) * sum_j x[n, o * stride - pad_lo + dilation * j, c]``

    Output size, arguments and communication as for :class:`MaxPool`.

    Parameters
    ----------
    count_include_pad
        True: `count` is the number of taps of the kernel, and padding counts as zeros. False: `count` is the number
        of taps inside the (global) array. Elements that `ceil_mode` reads beyond the padding never count. If there are
        such elements and padding counts, a :class:`Pad` before this layer does the padding.
    """

    passes = Passes()

    def __init__(
        self,
        kernel: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: str | int | Sequence = 0,
        dilation: int | Sequence[int] = 1,
        count_include_pad: bool = True,
        ceil_mode: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(kernel, stride, padding, dilation, ceil_mode, name)
        self.count_include_pad = count_include_pad

    def __call__(self, *inputs: Node) -> Node:
        # Backends count either all taps or those inside the array. Padding counts here, elements beyond it do not: so
        # padding becomes part of the array.
        self._refuse_others(inputs)
        if len(inputs) != 1 or not self.count_include_pad:
            return super().__call__(*inputs)
        (node,) = inputs
        inside, beyond = self._padding(node.shape)
        if not any(more for _, more in beyond):
            return super().__call__(node)
        # Without padding, the taps inside the array are those that count.
        if not any(map(any, inside)):
            return self.changed(count_include_pad=False)(node)
        node = Pad(inside, name=self.name and f"{self.name}_pad")(node)
        return self.changed(count_include_pad=False, stencil=replace(self.stencil, padding=beyond, rounding="floor"))(
            node
        )

    def _padding(self, shape: Shape) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Return, per spatial axis, the padding that counts, and the elements that `ceil_mode` reads beyond it."""
        inside = [(w.pad_lo, w.pad_hi) for w in replace(self.stencil, rounding="floor").windows(shape[:-1])]
        return inside, [(0, w.pad_hi - hi) for w, (_, hi) in zip(self.windows(shape), inside)]

    def output_shape(self, *shapes: Shape) -> Shape:
        inside, beyond = self._padding(shapes[0])
        # A copy of a network for samples of another size may reach beyond the padding; its layers stay the same.
        if self.count_include_pad and any(map(any, inside)) and any(more for _, more in beyond):
            raise ValueError(f"AveragePool: expected windows within the padding, got some beyond it, for {shapes[0]}")
        return super().output_shape(*shapes)

    @property
    def counts_all(self) -> bool:
        """Whether the divisor is the number of taps, also where a window reaches beyond the array."""
        # Without padding, elements beyond the array never count; with it, no window reaches beyond (`output_shape`).
        padded = self.stencil.padding == "same" or bool(np.any(self.stencil.padding))
        return self.count_include_pad and (padded or self.stencil.rounding == "floor")

    def kernels(self, backend: Any, x: Any, y: Any, dy: Any, dx: Any, geometry: Any) -> tuple[Any, Any]:
        return backend.average_pool(x, y, dy, dx, geometry, count_include_pad=self.counts_all)


def _only_padding(w: Window, size: int, outputs: int) -> int | None:
    """Return the index of the first of `outputs` windows that has no tap inside ``[0, size)``, or None."""
    for o in range(outputs):
        first = o * w.stride - w.pad_lo
        # The first tap at or after 0 is the only candidate: later taps are further away.
        inside = first if first >= 0 else first + -(first // w.dilation) * w.dilation
        if inside >= size or inside >= first + w.extent:
            return o
    return None


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
    Before: blocks cut in samples, space and channels; after: vectors, cut in samples and channels, over all ranks.
    Communication per process: one float64 per channel of each of its samples whose result another rank owns; backward,
    the adjoint, one number of the compute dtype (a broadcast to the ranks of the sample).
    """

    passes = Passes()

    def lower(self, context: Context) -> Lowered:
        value, boxes = context.inputs[0], context.output.layout.boxes
        scale = 1.0 / math.prod(context.shapes[0][:-1])
        summands = without_space(value.layout.boxes)  # of a rank without positions: no samples
        shape = summands[context.rank].shape
        partial_, total = context.scratch(shape, "float64"), context.scratch(context.box.shape, "float64")
        sums = with_axes(partial_, len(value.box.shape))
        context.run(context.kernel(summing, x=value.view, y=sums), timing=context.timing("forward"))
        context.move(context.exchange(summands, boxes, partial_, total, combine="sum", kind="redistribute"))
        # After the sum over ranks, so that the mean is rounded once.
        context.run(context.kernel(partial(_scale, scale), x=total, y=context.y))

        def backward() -> None:
            dx, dy = context.gradient(0), context.scratch(shape, value.dtype)
            context.move(context.exchange(boxes, summands, context.dy, dy, kind="redistribute"))
            kernel = context.kernel(partial(_scale, scale), x=with_axes(dy, len(value.box.shape)), y=dx)
            context.run(kernel, timing=context.timing("backward_data"))

        return Lowered(backward)


class GlobalMaxPool(_GlobalPool):
    """Maximum over all positions of each sample and channel: ``(N, *spatial, C)`` -> ``(N, C)``.

    Of several equal maxima, the first in row-major order receives the gradient. A NaN is larger than all numbers, and
    receives no gradient.

    Notes
    -----
    Before: blocks cut in samples, space and channels; after: vectors, cut in samples and channels, over all ranks.

    Communication per process: two float64 per channel of each of its samples whose result another rank owns (the
    maximum of its block and its position), and as many backward (the gradient and its position).
    """

    # A few passes over a second array find the position of the largest element.
    passes = Passes((8, 1), (3, 1))

    def lower(self, context: Context) -> Lowered:
        value, rank = context.inputs[0], context.rank
        candidates, needed = _candidates(value.layout.boxes, context.output.layout.boxes)
        own = context.scratch(candidates[rank].shape, "float64")
        _lower_largest(context, own)
        several = context.scratch(needed[rank].shape, "float64")
        context.move(context.exchange(candidates, needed, own, several, kind="redistribute"))
        samples, _, _, channels = several.shape
        # several (n, blocks, 2, C): maxima and their numbers; chosen (n, 2, C): the largest; worse (n, blocks, C).
        chosen, worse = (context.scratch((samples, n, channels), "float64") for n in (2, several.shape[1]))
        kernel = context.kernel(_choose, candidates=several, chosen=chosen, worse=worse, y=context.y)
        context.run(kernel)

        def backward() -> None:
            # The slot of the maximum, which the forward pass has copied to y, takes the gradient.
            gradient = chosen.part((0, 0, 0), (samples, 1, channels))
            context.copy(*([(context.dy.reshape(*gradient.shape), gradient)] if samples else []))
            # Pairs of gradient and position, as boxes (N, 2, C).
            vectors = context.output.layout.boxes, without_space(value.layout.boxes)
            owners, readers = (Blocks((b.axes[0], ((0, 2),), b.axes[1]), b.size) for b in vectors)
            brought = context.scratch(readers[rank].shape, "float64")
            context.move(context.exchange(owners, readers, chosen, brought, kind="redistribute"))
            spread = partial(_spread_to_first, value.box.ranges[1:-1], context.shapes[0][:-1])
            mask = context.scratch(value.box.shape, context.wide)
            dy = context.scratch((value.box.shape[0], 1, value.box.shape[-1]), context.wide)
            kernel = context.kernel(spread, chosen=brought, dy=dy, dx=context.gradient(0), mask=mask)
            context.run(kernel, timing=context.timing("backward_data"))

        return Lowered(backward)


def _candidates(inputs: Blocks, outputs: Blocks) -> tuple[Blocks, Blocks]:
    """Return, per rank, the box of its result and the box that it reads for its outputs.

    Both lie in an array ``(N, nonempty spatial parts, 2, C)``. Pure arithmetic.
    """
    samples, *spatial, channels = inputs.axes
    # Blocks without positions have no maximum, and must not have a slot: its contents would be compared.
    full = [all(b > a for a, b in intervals) for intervals in itertools.product(*spatial)]
    firsts = list(itertools.accumulate(full, initial=0))
    slots = tuple((first, first + whole) for first, whole in zip(firsts, full))
    candidates = Blocks((samples, slots, ((0, 2),), channels), inputs.size)
    return candidates, Blocks((outputs.axes[0], ((0, firsts[-1]),), ((0, 2),), outputs.axes[-1]), outputs.size)


def _lower_largest(context: Context, own: View) -> None:
    """Add the operations that write the maxima of this block, and the row-major numbers of their positions, to `own`
    ``(n, 1, 2, C)``; none for an empty block.
    """
    value = context.inputs[0]
    if not value.box.size:
        return
    x = context.gather(0, value.layout.boxes).run()
    source, number, shape = in_wide(context, x.view), None, list(value.box.shape)
    for axis in range(len(shape) - 2, 0, -1):
        # Numbers are those of the whole sample, so that candidates of all ranks can be compared.
        stride = math.prod(context.shapes[0][axis:-1])
        search = Search(axis, [(0, shape[axis])], value.box.start[axis] * stride, stride)
        # Numbers of the first search are below the extent of its axis; later ones count all positions.
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
    """Return the view; of a 16-bit view, add the copy to a float32 array, and return that array."""
    if view.dtype == context.wide:
        return view
    copy = context.scratch(view.shape, context.wide)
    context.copy((view, copy))
    return copy


@dataclass(frozen=True)
class Search:
    """Search for the maximum of each window along one axis, and for its element number; a call returns the kernel.

    Attributes
    ----------
    axis, windows
        The axis, and the half-open windows along it, one per output.
    first, stride
        Element ``i`` has the number ``first + i * stride``, plus its number in the array `before` if there is one.
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

        `work` has the dtype of `number` and the shape of `x`, but along the axis at least the longest window's length.
        """
        # With a dtype other than that of `work`, NumPy would allocate buffers for casts at every step.
        numbers = -(self.first + self.stride * np.arange(x.shape[self.axis], dtype=np.float64))
        ramp = environment.kernels.device.array(numbers.reshape(-1, *(1 for _ in x.shape[self.axis + 1 :])), work.dtype)
        beyond = _beyond(work)
        steps = []
        for o, (a, b) in enumerate(self.windows):
            parts = [self.part(a, b, array) for array in (x, before)]
            results = [self.part(o, o + 1, array) for array in (y, number)]
            steps.append((*parts, *results, ramp[a:b], self.part(0, b - a, work)))

        def run() -> None:
            for values, others, best, lowest, own, worse in steps:
                # Elements below the maximum get numbers beyond all others: the smallest is that of the first maximum.
                # Of negative numbers that is the largest: CuPy's minimum takes no `out` (amin, 14.2).
                np.amax(values, axis=self.axis, out=best, keepdims=True)
                np.not_equal(values, best, out=worse)
                np.multiply(worse, -beyond, out=worse)
                np.add(worse, own, out=worse)
                if others is not None:
                    np.subtract(worse, others, out=worse)
                np.amax(worse, axis=self.axis, out=lowest, keepdims=True)
                np.negative(lowest, out=lowest)

        return run

    def part(self, a: int, b: int, array: Any) -> Any:
        """Return the elements ``a .. b - 1`` along the axis; None stays None."""
        return None if array is None else array[(*(slice(None),) * self.axis, slice(a, b))]


#: Above this number float32 does not hold all integers.
_FLOAT32 = 2**24


def _beyond(array: Any) -> float:
    """Return a number larger than all element numbers in an array of this dtype; the dtype holds it exactly."""
    return float(_FLOAT32) if array.dtype == np.float32 else 2.0**53


@reads("candidates")
@writes("chosen", "worse", "y")
def _choose(environment: Any, candidates: Any, chosen: Any, worse: Any, y: Any) -> Callable[[], None]:
    """Return the kernel that finds the largest candidate of ``(n, blocks, 2, C)``, and the lowest number of equal ones.
    """
    beyond = _beyond(worse)

    def run() -> None:
        if not y.size:
            return
        best, numbers = chosen[:, :1], chosen[:, 1:]
        np.amax(candidates[:, :, 0], axis=1, out=best, keepdims=True)
        np.not_equal(candidates[:, :, 0], best, out=worse)
        # As in `Search`: the largest of the negative numbers is that of the first maximum.
        np.multiply(worse, -beyond, out=worse)
        np.subtract(worse, candidates[:, :, 1], out=worse)
        np.amax(worse, axis=1, out=numbers, keepdims=True)
        np.negative(numbers, out=numbers)
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
    # Row-major numbers, within the whole sample, of the positions of this block.
    numbers = np.zeros(1)
    for (a, b), extent in zip(ranges, extents):
        numbers = (numbers[:, None] * extent + np.arange(a, b)).reshape(-1)
    own = environment.kernels.device.array(numbers, np.float64)

    def run() -> None:
        if dx.size:
            rows, marks = (array.reshape(array.shape[0], -1, array.shape[-1]) for array in (dx, mask))
            # A NaN has chosen a number that no position has, so its gradient goes to none.
            np.equal(own[None, :, None], chosen[:, 1:], out=marks)
            np.copyto(dy, chosen[:, :1], casting="same_kind")
            np.multiply(marks, dy, out=rows)

    return run


@reads("x")
@writes("y")
def _scale(scale: float, environment: Any, x: Any, y: Any) -> Callable[[], None]:
    def run() -> None:
        if y.size:
            np.multiply(x, scale, out=y, casting="same_kind")

    return run


class _Adaptive(Resize):
    """Pooling whose output `o` reads, along each axis, the inputs from ``floor(o * n / size)`` to
    ``ceil((o + 1) * n / size) - 1``.
    """

    #: The layer that computes one output per sample and channel.
    whole: type[Layer]

    def __init__(self, size: int | Sequence[int], name: str | None = None) -> None:
        super().__init__(size=size, mode="area", name=name)

    def __call__(self, *inputs: Node) -> Node:
        self._refuse_others(inputs)
        sizes = self.output_shape(*(node.shape for node in inputs))[:-1]
        if max(sizes) > 1:
            return super().__call__(*inputs)
        pooled = self.whole(name=self.name and f"{self.name}_global")(*inputs)
        return Reshape((*sizes, pooled.shape[-1]), name=self.name)(pooled)


class AdaptiveAveragePool(_Adaptive):
    """Adaptive average pooling over windows that cover the input: ``(*spatial, C)`` -> ``(*size, C)``, as in torch.

    Output `o` of an axis is the mean of the inputs from ``floor(o * n / size)`` to ``ceil((o + 1) * n / size) - 1``:
    :class:`Resize` in the mode ``"area"``. A single output is computed by :class:`GlobalAveragePool` and
    :class:`Reshape`, so that no rank needs a whole sample.

    Parameters
    ----------
    size
        Outputs per spatial axis: one number for all or one per axis.

    Notes
    -----
    Communication per process: the inputs of its windows that other ranks own; as much backward.
    """

    whole = GlobalAveragePool


class AdaptiveMaxPool(_Adaptive):
    """Adaptive max pooling over windows that cover the input: ``(*spatial, C)`` -> ``(*size, C)``, as in torch.

    Windows, arguments and communication are as for :class:`AdaptiveAveragePool`. Of several equal maxima, the first in
    row-major order receives the gradient. A NaN is larger than all numbers, and receives no gradient.
    """

    whole = GlobalMaxPool
    passes = Passes((8, 1), (5, 1))

    def lower(self, context: Context) -> Lowered:
        """Lower to searches along one axis after another, the last axis first, so that of equal maxima the first in
        row-major order is found.
        """
        resamplings = self.resamplings(context.shapes[0])
        boxes = context.clipped(0, [0, *(math.ceil(r.ratio) for r in resamplings), 0])
        x = context.gather(0, boxes).run()
        if not context.box.size:  # still in all exchanges: other ranks send to their owners here
            return Lowered(lambda: context.return_gradient(0, boxes).run())
        searches = []
        for axis, r in enumerate(resamplings, start=1):
            first = x.box.start[axis]
            ranges = [r.input_range(o, o + 1) for o in range(*context.box.ranges[axis])]
            searches.append(Search(axis, [(a - first, b - first) for a, b in ranges]))
        stages: list[SearchStage] = []
        source = in_wide(context, x.view)
        for search in reversed(searches):
            stages.append(SearchStage(context, search, source, "forward" if not stages else None))
            source = stages[-1].y
        context.copy((source, context.y))

        def backward() -> None:
            returned = context.return_gradient(0, boxes)
            gradient = in_wide(context, context.dy)
            # All stages but the first, in reverse order: the first writes into the returned array.
            for stage in stages[:0:-1]:
                gradient = stage.lower_backward(context, gradient, context.scratch(stage.x.shape, context.wide))
            # 16-bit gradients are added up in float32 and rounded once.
            direct = returned.view.dtype == context.wide
            dx = returned.view if direct else context.scratch(returned.view.shape, context.wide)
            stages[0].lower_backward(context, gradient, dx, "backward_data")
            context.copy(*([] if direct else [(dx, returned.view)]))
            returned.run()

        return Lowered(backward)


class SearchStage:
    """Search along one axis, with its backward kernel."""

    def __init__(self, context: Context, search: Search, x: View, phase: str | None) -> None:
        self.search, self.x, axis = search, x, search.axis
        shape = (*x.shape[:axis], len(search.windows), *x.shape[axis + 1 :])
        numbers = number_dtype(context, x.shape[axis])
        self.y, self.number = context.scratch(shape, context.wide), context.scratch(shape, numbers)
        views = {"x": x, "y": self.y, "number": self.number, "before": None, "work": self._work(context)}
        context.run(context.kernel(search, **views), timing=context.timing(phase) if phase else None)

    def _work(self, context: Context) -> View:
        axis = self.search.axis
        return context.scratch(
            (*self.x.shape[:axis], self.search.longest, *self.x.shape[axis + 1 :]), self.number.dtype
        )

    def lower_backward(self, context: Context, dy: View, dx: View, phase: str | None = None) -> View:
        """Add the kernel that writes the gradient of the searched array to `dx`, and return `dx`."""
        views = {"dy": dy, "number": self.number, "dx": dx, "work": self._work(context)}
        kernel = context.kernel(partial(_to_first, self.search), **views)
        context.run(kernel, timing=context.timing(phase) if phase else None)
        return dx


@reads("dy", "number")
@writes("dx", "work")
def _to_first(search: Search, environment: Any, dy: Any, number: Any, dx: Any, work: Any) -> Callable[[], None]:
    """Return the kernel that sums, for each element, the gradients of the windows whose first maximum the element is.
    """
    numbers = np.arange(dx.shape[search.axis]).reshape(-1, *(1 for _ in dx.shape[search.axis + 1 :]))
    ramp, steps = environment.kernels.device.array(numbers, number.dtype), []
    for o, (a, b) in enumerate(search.windows):
        arrays = [search.part(o, o + 1, array) for array in (dy, number)]
        steps.append((*arrays, ramp[a:b], search.part(0, b - a, work), search.part(a, b, dx)))

    def run() -> None:
        dx.fill(0)
        for gradient, lowest, own, here, target in steps:
            np.equal(own, lowest, out=here)
            np.multiply(here, gradient, out=here)
            # Adaptive windows may overlap.
            np.add(target, here, out=target)

    return run


class _OverChannels(Layer):
    """Reduction ``(*spatial, C)`` -> ``(*spatial, 1)`` at every position. Communication: none."""

    recomputation = "pointwise"
    inputs_taken = 1

    def output_shape(self, *shapes: Shape) -> Shape:
        return (*shapes[0][:-1], 1)

    def flops(self, *shapes: Shape) -> int:
        return math.prod(shapes[0])


class ChannelMean(_OverChannels):
    """Mean over the channels, ``y[..., 0] = (1 / C) * sum_c x[..., c]``, at every position or of vectors.

    Spatial attention in CBAM reads it and :class:`ChannelMax` (Woo et al. 2018).
    """

    def lower(self, context: Context) -> Lowered:
        boxes = context.needed(0)
        x = context.gather(0, boxes).run()
        sums, scale = context.scratch(context.box.shape, "float64"), 1 / context.shapes[0][-1]
        context.run(context.kernel(summing, x=x.view, y=sums), timing=context.timing("forward"))
        context.run(context.kernel(partial(_scale, scale), x=sums, y=context.y))

        def backward() -> None:
            returned = context.return_gradient(0, boxes)
            kernel = context.kernel(partial(_scale, scale), x=context.dy, y=returned.view)
            context.run(kernel, timing=context.timing("backward_data"))
            returned.run()

        return Lowered(backward)


class ChannelMax(_OverChannels):
    """Maximum over the channels, at every position or of vectors.

    Of several equal maxima, the first receives the gradient. A NaN is larger than all numbers, and receives no
    gradient.
    """

    passes = Passes((8, 1), (5, 1))

    def lower(self, context: Context) -> Lowered:
        boxes = context.needed(0)
        x = context.gather(0, boxes).run()
        # A rank with an empty block still takes part in the exchange of gradients.
        if not context.box.size:
            return Lowered(lambda: context.return_gradient(0, boxes).run())
        search = Search(len(x.view.shape) - 1, [(0, context.shapes[0][-1])])
        stage = SearchStage(context, search, in_wide(context, x.view), "forward")
        context.copy((stage.y, context.y))

        def backward() -> None:
            returned = context.return_gradient(0, boxes)
            direct = returned.view.dtype == context.wide
            dx = returned.view if direct else context.scratch(returned.view.shape, context.wide)
            stage.lower_backward(context, in_wide(context, context.dy), dx, "backward_data")
            context.copy(*([] if direct else [(dx, returned.view)]))
            returned.run()

        return Lowered(backward)
