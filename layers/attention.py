"""Attention: outputs are means of values, with weights that depend on queries and keys.

A query reads the keys of its window, of its neighborhood, or of the whole sample. These are boxes of the inputs, and
their exchange is a halo exchange.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..dtensor import Blocks, Box, Interval, Layout
from ..kernels import DropoutMask
from ..kernels.access import reads, writes
from ..kernels.attention import AttentionGeometry, Everywhere, Neighborhood, Reach, Windows
from ..lowering.context import Context, Lowered
from ..lowering.operations import ExchangeSpec, KernelSpec, Timing
from ..lowering.views import View
from .composed import Crop
from .convolution import Conv, zeroing
from .layer import Layer, Node, Passes, Shape
from .lowering import exchange_all
from .needs import check_spatial, spread
from .padding import Pad
from .parameter import Parameter

__all__ = ["Attention", "MultiHeadAttention"]

_PerAxis = int | Sequence[int]


class Attention(Layer):
    """Attention of several heads (Vaswani et al. 2017) on three inputs: queries, keys and values.

    ``y[p] = sum_t softmax_t(scale * q[p] . k[t] + bias[p - t]) v[t]`` for every head, over the positions `t` that query
    `p` reads. Queries ``(*S, H * d)``, keys ``(*T, G * d)``, values ``(*T, G * e)``, output ``(*S, H * e)`` with H
    heads of queries and G heads of keys and values; head h of the queries reads head ``h // (H / G)`` (grouped
    queries: Ainslie et al. 2023).

    Parameters
    ----------
    heads
        Number H of heads of the queries.
    window
        Extents of windows, one number for all axes or one per axis; a query reads its own window. Windows at the end
        of an axis may be smaller.
    shift
        Positions by which windows are shifted (Swin: Liu et al. 2021): a window begins at every ``shift + k * window``.
        The windows at both ends are smaller, as with the mask of Swin; along periodic axes they are one window.
    neighborhood
        Extents of the neighborhood that a query reads (Hassani et al. 2023), which is moved inwards at both ends.
    dilation
        Distance between successive positions of a neighborhood.
    periodic
        Whether windows and neighborhoods continue at the other end, as for longitudes; one value or one per axis.
    bias
        None, or ``"relative"``: a parameter per head and relative position.
    scale
        Factor of the scores; by default ``1 / sqrt(d)``.
    dropout
        Probability in ``[0, 1)`` with which a weight is zeroed in training; the others are scaled.

    Notes
    -----
    Parameter `bias` ``(H, *extents)``, whole on every rank: ``2 * E - 1`` entries per axis, with E the extent of the
    windows or neighborhoods, without either the larger of S and T; the index is ``(p - t) // dilation + E - 1``.
    Queries are cut in samples, space and heads (channels). Scores are never stored: kernels compute them in tiles with
    a running maximum and sum, and again in backward, from the log-sum-exp of each query and head (Milakov and
    Gimelshein 2018; Dao et al. 2022).
    Communication per process: the keys and values that its queries read and other ranks own, forward, and their
    gradients, backward. Without window and neighborhood these are all of the sample: with the option ``attention =
    "gather"`` they are gathered before the kernel and kept; with ``"ring"`` blocks of them arrive while the kernel
    computes with the previous block, in both passes (Liu et al. 2023). ``"auto"`` follows the option `halo`: a ring for
    ``"overlap"``, and for ``"auto"`` if messages cross a network.

    Raises
    ------
    ValueError
        For settings and inputs that do not match.
    """

    recomputation = "block"
    cuts_channels = "channelwise"
    exact_parameters = True
    inputs_taken = 3
    passes = Passes((1, 1), (2, 2))
    # Backward computes the scores again, and four more products; forward has two.
    backward_flops = 2.5
    lowers_each_halo = True

    def __init__(
        self,
        heads: int,
        window: _PerAxis | None = None,
        shift: _PerAxis = 0,
        neighborhood: _PerAxis | None = None,
        dilation: _PerAxis = 1,
        periodic: bool | Sequence[bool] = False,
        bias: str | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if heads < 1:
            raise ValueError(f"Attention: expected a number of heads >= 1, got {heads}")
        if window is not None and neighborhood is not None:
            raise ValueError("Attention: expected a window or a neighborhood, got both; leave one out")
        if bias not in (None, "relative"):
            raise ValueError(f"Attention: expected a bias 'relative' or None, got {bias!r}")
        if not 0 <= dropout < 1:
            raise ValueError(f"Attention: expected a rate of dropout in [0, 1), got {dropout}")
        self._check_local(window, shift, neighborhood, dilation, periodic)
        self.heads, self.bias, self.scale, self.dropout = heads, bias, scale, float(dropout)
        self.window, self.shift, self.neighborhood, self.dilation = window, shift, neighborhood, dilation
        self.periodic = periodic

    @staticmethod
    def _check_local(window: Any, shift: Any, neighborhood: Any, dilation: Any, periodic: Any) -> None:
        for what, value, owner in (("shift", shift, window), ("dilation", dilation, neighborhood)):
            # Only a shift other than 0, or a dilation other than 1, needs windows or neighborhoods.
            if owner is None and np.any(np.asarray(value) != (what == "dilation")):
                of = {"shift": "a window", "dilation": "a neighborhood"}[what]
                raise ValueError(f"Attention: expected {of} with a {what}, got none; set it, or leave the {what} out")
        for what, value in (("window", window), ("neighborhood", neighborhood), ("dilation", dilation)):
            if value is not None and np.min(value) < 1:
                raise ValueError(f"Attention: expected extents of at least 1 as {what}, got {value}")
        if window is None and neighborhood is None and np.any(periodic):
            raise ValueError(
                "Attention: expected a window or a neighborhood with periodic axes, got none; attention over the whole "
                "sample has no ends"
            )

    def __call__(self, *inputs: Node) -> Node:
        # The base class reports inputs that are not three nodes.
        if not np.any(self.periodic) or len(inputs) != 3 or not all(isinstance(node, Node) for node in inputs):
            return super().__call__(*inputs)
        space = inputs[0].shape[:-1]
        self._check_periodic(space)
        # Rows of the other end before and after: then all windows are whole, and need no wrapping in kernels.
        amounts = self._continued(len(space))
        longer = [Pad(amounts, "circular")(node) for node in inputs]
        return Crop(amounts)(super().__call__(*longer))

    def _continued(self, axes: int) -> list[tuple[int, int]]:
        """Return how many rows of the other end are added before and after each spatial axis; 0 if it is not periodic.
        """
        margins = [(0, 0)] * axes
        if self.window is not None:
            extents, shifts = spread("window", self.window, axes), spread("shift", self.shift, axes)
            # Windows begin at shift + k * extent: these rows complete the first and the last, which are one window.
            margins = [(-shift % extent, shift % extent) for extent, shift in zip(extents, shifts)]
        elif self.neighborhood is not None:
            extents = spread("neighborhood", self.neighborhood, axes)
            dilations = spread("dilation", self.dilation, axes)
            # With an even extent, a neighborhood has one more key before its query than after it.
            margins = [(n // 2 * by, (n - 1 - n // 2) * by) for n, by in zip(extents, dilations)]
        return [
            pair if continues else (0, 0) for pair, continues in zip(margins, spread("periodic", self.periodic, axes))
        ]

    def _check_periodic(self, space: Sequence[int]) -> None:
        """Raise ValueError if windows do not divide periodic axes of these extents (before rows are added), or if
        neighborhoods are longer.
        """
        periodic = spread("periodic", self.periodic, len(space))
        extents = spread("window", self.window or 1, len(space))
        for n, extent, pair, continues in zip(space, extents, self._continued(len(space)), periodic):
            if continues and n % extent:
                raise ValueError(
                    f"Attention: expected periodic windows that divide {n} positions, got an extent of {extent}; "
                    "choose another"
                )
            # The query and its margins are sum(pair) + 1 positions; more than n would include a key twice.
            if self.window is None and continues and sum(pair) >= n:
                raise ValueError(
                    f"Attention: expected a periodic neighborhood of at most {n} positions, got {sum(pair) + 1}"
                )

    def reaches(self, queries: Shape, keys: Shape) -> tuple[Reach, ...]:
        """Return the rule by which a query reads keys, per spatial axis, for samples of these shapes.

        The extents of periodic axes include the added rows, so that their windows are whole.
        """
        axes = len(queries) - 1
        if self.window is None and self.neighborhood is None:
            return tuple(Everywhere(*sizes) for sizes in zip(queries[:-1], keys[:-1]))
        if self.window is not None:
            extents, shifts = spread("window", self.window, axes), spread("shift", self.shift, axes)
            periodic = spread("periodic", self.periodic, axes)
            return tuple(
                # Along a periodic axis, `__call__` has added rows such that a window begins at the first one.
                Windows(n, extent, 0 if continues else shift)
                for n, extent, shift, continues in zip(queries, extents, shifts, periodic)
            )
        assert self.neighborhood is not None
        extents, dilations = spread("neighborhood", self.neighborhood, axes), spread("dilation", self.dilation, axes)
        return tuple(Neighborhood(n, extent, dilation) for n, extent, dilation in zip(queries, extents, dilations))

    def output_shape(self, *shapes: Shape) -> Shape:
        q, k, v = shapes
        check_spatial(q[:-1], "Attention")
        if len(q) != len(k) or k[:-1] != v[:-1]:
            raise ValueError(
                "Attention: expected keys and values of the same extents, with as many spatial axes as the queries, "
                f"got queries {q}, keys {k}, values {v}; reshape them before"
            )
        if (self.window or self.neighborhood) is not None and k[:-1] != q[:-1]:
            raise ValueError(
                f"Attention: expected queries and keys of the same extents with a window or neighborhood, got {q[:-1]} "
                f"and {k[:-1]}"
            )
        # Here the inputs have the added rows already.
        self._check_periodic([n - sum(pair) for n, pair in zip(q, self._continued(len(q) - 1))])
        if q[-1] % self.heads:
            raise ValueError(f"Attention: expected a number of heads that divides {q[-1]} channels, got {self.heads}")
        width = q[-1] // self.heads
        groups = k[-1] // width
        if k[-1] % width or not groups or self.heads % groups:
            raise ValueError(
                f"Attention: expected keys of {width} channels per head, and a number of their heads that divides "
                f"{self.heads}, got {k[-1]} channels"
            )
        if v[-1] % groups:
            raise ValueError(f"Attention: expected values of a multiple of {groups} channels, got {v[-1]}")
        self.reaches(q, k)
        return (*q[:-1], self.heads * (v[-1] // groups))

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        if self.bias is None:
            return {}
        extents = [reach.bias_extent for reach in self.reaches(shapes[0], shapes[1])]
        return {"bias": Parameter((self.heads, *extents), decay=False)}

    def flops(self, *shapes: Shape) -> int:
        q, k, v = shapes
        pairs = 1
        for reach in self.reaches(q, k):
            whole = (0, reach.queries), (0, reach.keys)
            pairs *= sum(len(queries) * len(keys) for queries, keys in reach.tiles(*whole))
        # Heads of keys are as wide as those of queries.
        width, groups = q[-1] // self.heads, k[-1] * self.heads // q[-1]
        # Two products, and about ten operations of the softmax per score.
        return pairs * self.heads * (2 * width + 2 * v[-1] // groups + 10)

    def of_filters(self, filters: int) -> Layer:
        """Return a copy of the layer with this number of heads."""
        return self.changed(heads=filters)

    def of_outputs(self, shape: Shape, outputs: tuple[int, ...]) -> tuple[Layer, Shape]:
        """Return the layer without periodic axes, because the block to be timed may have any extents, and `shape`."""
        ends = zip(spread("shift", self.shift, len(outputs)), spread("periodic", self.periodic, len(outputs)))
        shift = tuple(0 if continues else by for by, continues in ends)
        return self.changed(periodic=False, shift=shift) if np.any(self.periodic) else self, shape

    @property
    def everywhere(self) -> bool:
        """Whether every query reads all keys of its sample."""
        return self.window is None and self.neighborhood is None

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """Return, per rank, the box of the queries, keys or values that it needs. If queries read all keys, the result
        for keys and values is the owned box, because :meth:`lower` gathers them itself.
        """
        if i > 0 and self.everywhere:
            return inputs[i].boxes
        return self.read(i, [layout.shape[1:] for layout in inputs], output)

    def read(self, i: int, shapes: Sequence[Shape], output: Layout) -> Blocks:
        """Return, per rank, the box of input `i` that its output box depends on, with whole heads."""
        heads = _Heads(self.heads, shapes)
        along = [reach.keys_of if i else None for reach in self.reaches(shapes[0], shapes[1])]
        return output.boxes.map(None, *along, partial(heads.channels, i))

    def lower(self, context: Context) -> Lowered:
        # Without a cut in space, a rank owns all keys of its samples: there is nothing to wait for.
        split = any(context.parts[axis] > 1 for axis in ("depth", "height", "width"))
        travel = context.options.get("attention", "auto")
        rings = travel == "ring" or (travel == "auto" and context.overlaps_halo)
        return (_Ring if self.everywhere and split and rings else _Gathering)(self, context).lower()


class _Heads:
    """Conversion between heads and channels of queries, keys, values and outputs."""

    def __init__(self, heads: int, shapes: Sequence[Shape]) -> None:
        q, k, v = (shape[-1] for shape in shapes)
        # Heads of keys are as wide as those of queries: this is the number of heads of keys and values.
        self.groups = heads * k // q
        # Heads of queries that read one head of keys.
        self.each = heads // self.groups
        self.widths = (q // heads, q // heads, v // self.groups)

    def of(self, low: int, high: int) -> Interval:
        """Return the interval of the queries' heads that have channels in ``[low, high)`` of the output."""
        return low // self.widths[2], -(-high // self.widths[2])

    def whole(self, low: int, high: int) -> Interval:
        """Return the output channels of all heads that have channels in ``[low, high)``."""
        first, last = self.of(low, high)
        return first * self.widths[2], last * self.widths[2]

    def channels(self, i: int, low: int, high: int) -> Interval:
        """Return the channels of input `i`, of whole heads, that output channels ``[low, high)`` depend on."""
        first, last = self.of(low, high)
        if i:
            first, last = first // self.each, -(-last // self.each)
        return first * self.widths[i], last * self.widths[i]


class _Lowering:
    """Common part of both lowerings of attention: arrays for every head of which the output block has channels.

    If the boundaries of a block of channels lie within heads, every rank that has channels of such a head computes it,
    and keeps its channels. In backward, a rank begins with the gradient of its channels, and zero for the others.
    """

    def __init__(self, layer: Attention, context: Context) -> None:
        self.layer, self.context = layer, context
        self.shapes = context.shapes
        self.heads = _Heads(layer.heads, self.shapes)
        self.reaches = layer.reaches(self.shapes[0], self.shapes[1])
        box, axis = context.box, len(self.shapes[0])
        # A rank without output computes no heads.
        channels = box.ranges[-1] if box.size else (0, 0)
        self.channels = self.heads.whole(*channels)
        self.box = box.replace(axis, *self.channels) if box.size else box
        # Offset of the output block in the box of whole heads.
        self.own = tuple(a - b for a, b in zip(box.start, self.box.start))
        first, last = self.heads.of(*channels)
        self.range = first, last
        self.aligned = self.box.shape == box.shape
        self.y = context.y if self.aligned else context.scratch(self.box.shape)
        # Log-sum-exp of the scores per query and head, from which backward computes the weights again.
        self.lse = context.scratch((*self.box.shape[:-1], last - first), context.wide)
        self.bias = context.params.get("bias")
        self.q = context.gather(0, context.clipped(0))

    def kernel(self, make: Callable[..., Any], keys: Box, merge: bool, **views: View | None) -> KernelSpec:
        """Return a kernel for the keys in a box; with `merge` it adds to the results for other keys."""
        scale = self.layer.scale
        geometry = AttentionGeometry(
            reaches=self.reaches,
            queries=tuple(self.q.box.ranges[1:-1]),
            keys=tuple(keys.ranges[1:-1]),
            heads=self.range,
            groups=self.heads.each,
            scale=1 / math.sqrt(self.heads.widths[0]) if scale is None else scale,
            merge=merge,
        )
        # The mask follows from global positions, so ring steps and cuts drop the same weights.
        dropout = self._dropout(keys) if self.layer.dropout and self.box.size else None
        return self.context.kernel(partial(make, geometry, dropout), q=self.q.view, **views)

    def _dropout(self, k: Box) -> DropoutMask:
        """Return the dropout mask of the weights; :class:`_AttentionKernel` adds its salt and state."""
        positions = [(reach.queries for reach in self.reaches), (reach.keys for reach in self.reaches)]
        samples = self.context.output.layout.shape[0]
        starts = (self.box.start[0], self.range[0], *self.q.box.start[1:-1], *k.start[1:-1])
        shape = (samples, self.layer.heads, *(n for axis in positions for n in axis))
        return DropoutMask(self.layer.dropout, 0, shape, starts, None)

    def timing(self, phase: str, k: Blocks) -> Timing:
        """Return the timing of a kernel for the largest blocks of all ranks; `k` are the boxes of the keys."""
        blocks, (q, _, v) = self.context.output.layout.boxes, self.heads.widths
        heads = [self.heads.of(*channels) for channels in blocks.axes[-1]]
        most = max(last - first for first, last in heads)
        groups, block = -(-most // self.heads.each), blocks.longest
        # With windows and neighborhoods, keys have the extents of the queries (`output_shape`).
        space = k.longest[1:-1] if self.layer.everywhere else block[1:-1]
        inputs = ((*block[:-1], most * q), (block[0], *space, groups * q), (block[0], *space, groups * v))
        filters = most if most < self.layer.heads else None
        return self.context.timing(phase, inputs=inputs, filters=filters)

    def finish_output(self) -> None:
        """Copy the channels that this rank owns from the output of whole heads, unless both are one array."""
        if not self.aligned:
            self.context.copy((self.y.part(self.own, self.context.box.shape), self.context.y))

    def gradient(self) -> View:
        """Return the gradient of the output of whole heads: 0 in channels that other ranks own."""
        if self.aligned:
            return self.context.dy
        dy = self.context.scratch(self.box.shape)
        self.context.run(self.context.kernel(zeroing, array=dy))
        self.context.copy((self.context.dy, dy.part(self.own, self.context.box.shape)))
        return dy


class _Gathering(_Lowering):
    """Attention to keys and values that are gathered before the kernel."""

    def lower(self) -> Lowered:
        context, layer = self.context, self.layer
        # Not `context.needed`: if queries read all keys, it has only the owned boxes.
        boxes = [layer.read(i, self.shapes, context.output.layout) for i in range(3)]
        k, v = (context.gather(i, boxes[i]) for i in (1, 2))
        operands = (self.q, k, v)
        exchange_all(operands)
        views = {"k": k.view, "v": v.view, "bias": self.bias, "y": self.y, "lse": self.lse}
        kernel = self.kernel(_forward, k.box, False, **views)
        context.run(kernel, timing=self.timing("forward", boxes[1]))
        self.finish_output()

        def backward() -> None:
            dy = self.gradient()
            returned = [context.return_gradient(i, boxes[i]) if context.needs_gradient(i) else None for i in range(3)]
            # Kernels compute all three gradients; those that are not needed go to scratch memory.
            grads = [context.scratch(x.box.shape) if dx is None else dx.view for x, dx in zip(operands, returned)]
            arrays = dict(zip(_GRADIENTS, grads), dy=dy, dbias=context.grads.get("bias"), **views)
            kernel = self.kernel(_backward, k.box, False, **arrays)
            context.run(kernel, timing=self.timing("backward_data", boxes[1]))
            exchange_all([dx for dx in returned if dx is not None])

        return Lowered(backward)


class _Ring(_Lowering):
    """Attention to one block of keys and values after the other; the next block arrives during computation. ::

        step      rank 0        rank 1        rank 2
          0       keys of 0     keys of 1     keys of 2       own block
          1       keys of 1     keys of 2     keys of 0       arrives during step 0
          2       keys of 2     keys of 0     keys of 1       arrives during step 1

    Every block comes from its owner. Backward is the same, and returns the gradient of a block to its owner during the
    next step.
    """

    def lower(self) -> Lowered:
        context = self.context
        self.q.run()
        steps = self._steps()
        for number, ((k, v), box) in self._travelling(steps):
            arrays = {"k": k, "v": v, "bias": self.bias, "y": self.y, "lse": self.lse}
            kernel = self.kernel(_forward_more if number else _forward, box, number > 0, **arrays)
            context.run(kernel, timing=self.timing("forward", steps[number][0]))
        self.finish_output()

        def backward() -> None:
            dy, needed = self.gradient(), [context.needs_gradient(i) for i in range(3)]
            dq = context.return_gradient(0, context.clipped(0)) if needed[0] else None
            views = {"bias": self.bias, "y": self.y, "lse": self.lse, "dy": dy, "dbias": context.grads.get("bias")}
            views["dq"] = context.scratch(self.q.box.shape) if dq is None else dq.view
            sums = {i: _ReturnedSum(context, i) for i in (1, 2) if needed[i]}
            for number, ((k, v), box) in self._travelling(steps):
                # Kernels compute both; `sums` returns only those that are needed.
                grads = [context.scratch(view.shape, view.dtype) for view in (k, v)]
                arrays = {"k": k, "v": v, "dk": grads[0], "dv": grads[1], **views}
                kernel = self.kernel(_backward_more if number else _backward, box, number > 0, **arrays)
                context.run(kernel, timing=self.timing("backward_data", steps[number][0]))
                # The returns of the step before have travelled during this kernel.
                for total in sums.values():
                    total.finish()
                for i, total in sums.items():
                    total.start(steps[number][i - 1], grads[i - 1])
            # Not earlier: dq is a sum over all steps.
            if dq is not None:
                dq.start()
            for total in sums.values():
                total.finish()
            if dq is not None:
                dq.finish()

        return Lowered(backward)

    def _steps(self) -> list[tuple[Blocks, Blocks]]:
        """Return, per step, the boxes of keys and values that each rank reads: blocks at one distance in the grid."""
        context, output = self.context, self.context.output.layout.boxes
        # A ring along every axis: at each step, all ranks of a row read blocks of different owners.
        grid = context.inputs[1].layout.boxes.grid[1:-1]
        steps = []
        # The first shift is 0 along all axes: the rank's own block.
        for shifts in np.ndindex(*grid):
            pair = []
            for i in (1, 2):
                owned = context.inputs[i].layout.boxes
                channels = output.map(*(None for _ in output.axes[:-1]), partial(self.heads.channels, i)).axes[-1]
                axes = [output.axes[0]]
                for queries, keys, shift in zip(output.axes[1:-1], owned.axes[1:-1], shifts):
                    rolled = keys[shift:] + keys[:shift]
                    # A rank without queries reads no keys.
                    axes.append(tuple(key if b > a else (0, 0) for (a, b), key in zip(queries, rolled)))
                pair.append(Blocks([*axes, channels], output.size))
            steps.append((pair[0], pair[1]))
        return steps

    def _travelling(self, steps: Sequence[tuple[Blocks, Blocks]]) -> Iterator[tuple[int, tuple[list[View], Box]]]:
        """Yield, per step, its number, views of keys and values, and the box of the keys.

        The exchange of the next step is started before this one is yielded.
        """
        arriving = self._start(steps[0])
        for number in range(len(steps)):
            views, messages = arriving
            for message in messages:
                self.context.finish(message)
            if number + 1 < len(steps):
                arriving = self._start(steps[number + 1])
            yield number, (views, steps[number][0][self.context.rank])

    def _start(self, pair: tuple[Blocks, Blocks]) -> tuple[list[View], list[ExchangeSpec]]:
        """Start the exchange of a block of keys and values; return their views and the exchanges that were started.

        The ranks' own blocks, if these are whole heads, need no exchange.
        """
        context, views, messages = self.context, [], []
        for value, boxes in zip(context.inputs[1:], pair):
            # Every rank reads its own block, as in step 0: nothing travels.
            if boxes == value.layout.boxes and value.view.packed:
                views.append(value.view)
                continue
            view = context.scratch(boxes[context.rank].shape, value.dtype)
            views.append(view)
            if boxes == value.layout.boxes:
                context.copy((value.view, view))
                continue
            message = context.exchange(value.layout.boxes, boxes, value.view, view)
            context.start(message)
            messages.append(message)
        return views, messages


class _ReturnedSum:
    """Gradient of the keys or values of this rank: the sum of what ranks return in all steps."""

    def __init__(self, context: Context, i: int) -> None:
        self.context, self.value, self.target = context, context.inputs[i], context.gradient(i)
        self._arriving: tuple[View, ExchangeSpec] | None = None
        self._first = True

    def start(self, boxes: Blocks, gradient: View) -> None:
        """Start to send the gradient of a block back to its owners."""
        value = self.value
        # The first return is the gradient itself; further ones have arrays of their own, which a kernel adds.
        received = self.target if self._first else self.context.scratch(value.box.shape, value.dtype)
        # If heads are cut, several ranks may have read the same block in one step: their gradients are added.
        exchange = self.context.exchange(boxes, value.layout.boxes, gradient, received, combine="sum")
        self.context.start(exchange)
        self._arriving = received, exchange

    def finish(self) -> None:
        """Finish the last return, if one is under way, and add it to the sum."""
        if self._arriving is None:
            return
        received, exchange = self._arriving
        self.context.finish(exchange)
        if not self._first:
            self.context.run(self.context.kernel(_adding, x=received, y=self.target))
        self._first, self._arriving = False, None


@reads("x", "y")
@writes("y")
def _adding(environment: Any, x: Any, y: Any) -> Any:
    return environment.kernels.add([y, x], y)


class _AttentionKernel:
    """Kernel of attention with the dropout of the run: in evaluation, weights are not dropped."""

    def __init__(
        self,
        build: Callable[[AttentionGeometry], Any],
        geometry: AttentionGeometry,
        mask: DropoutMask | None,
        environment: Any,
    ) -> None:
        self.mode, device = environment.mode, environment.kernels.device
        # Two kernels, because a run alternates between training and evaluation.
        self.plain, self.dropping = build(geometry), None
        if mask is not None:
            if self.mode.state is None:  # the caller does not count steps
                self.mode.state = device.array([self.mode.seed, self.mode.step, 0], np.uint64)
            # So that layers drop different weights. Not hash(), which differs from process to process for strings.
            salt = zlib.crc32(environment.name.encode())
            self.dropping = build(replace(geometry, dropout=replace(mask, salt=salt, state=self.mode.state)))

    def __call__(self) -> None:
        (self.plain if self.dropping is None or not self.mode.training else self.dropping)()

    def close(self) -> None:
        """Free the kernels of the backend."""
        for kernel in (self.plain, self.dropping):
            if kernel is not None:
                kernel.close()


@reads("q", "k", "v", "bias")
@writes("y", "lse")
def _forward(geometry: AttentionGeometry, mask: DropoutMask | None, environment: Any, **a: Any) -> _AttentionKernel:
    arrays = [a[name] for name in ("q", "k", "v")], _held(a.get("bias")), a["y"], a["lse"]
    make = environment.kernels.attention_forward
    return _AttentionKernel(lambda g: make(*arrays[0], *arrays[1:], g), geometry, mask, environment)


# The same kernels, after the first step of a ring: they add to results, which are then read and must be kept.
@reads("q", "k", "v", "bias", "y", "lse")
@writes("y", "lse")
def _forward_more(geometry: AttentionGeometry, mask: DropoutMask | None, environment: Any, **a: Any) -> Any:
    return _forward(geometry, mask, environment, **a)


_GRADIENTS = ("dq", "dk", "dv")


@reads("q", "k", "v", "bias", "y", "lse", "dy")
@writes(*_GRADIENTS, "dbias")
def _backward(geometry: AttentionGeometry, mask: DropoutMask | None, environment: Any, **a: Any) -> _AttentionKernel:
    arrays = [a[name] for name in ("dy", "q", "k", "v")], [a["y"], a["lse"], *(a[name] for name in _GRADIENTS)]
    bias, make = _held(a.get("bias")), environment.kernels.attention_backward
    dbias = None if bias is None else _held(a.get("dbias"))
    return _AttentionKernel(lambda g: make(*arrays[0], bias, *arrays[1], dbias, g), geometry, mask, environment)


@reads("q", "k", "v", "bias", "y", "lse", "dy", "dq", "dbias")
@writes(*_GRADIENTS, "dbias")
def _backward_more(geometry: AttentionGeometry, mask: DropoutMask | None, environment: Any, **a: Any) -> Any:
    return _backward(geometry, mask, environment, **a)


def _held(array: Any) -> Any:
    """Return the array, or None if it is absent or empty, as on a rank that the layer does not use."""
    return array if array is not None and array.size else None


class MultiHeadAttention:
    """Attention with its projections: three convolutions of kernel 1, :class:`Attention`, and a fourth convolution.

    It is not a layer, but a function of nodes, whose calls share the layers; these are named ``name.query``,
    ``name.key``, ``name.value``, ``name.attention`` and ``name.out``. The first call sets their channels.

    Parameters
    ----------
    heads
        Number of heads of the queries.
    channels
        Channels of the output; None: those of the queries' input.
    width
        Channels per head; None: the channels of the queries' input, divided by `heads`.
    groups
        Number of heads of keys and values, which divides `heads`; None: `heads`.
    qkv_bias
        Whether the projections of queries, keys and values have a bias.
    settings
        Settings of :class:`Attention`: `window`, `shift`, `neighborhood`, `bias`, `dropout`, ...

    Examples
    --------
    >>> from halograd.layers import Input
    >>> MultiHeadAttention(4, window=7)(Input((28, 28, 32))).shape
    (28, 28, 32)
    """

    def __init__(
        self,
        heads: int,
        channels: int | None = None,
        width: int | None = None,
        groups: int | None = None,
        qkv_bias: bool = True,
        name: str | None = None,
        **settings: Any,
    ) -> None:
        self.heads, self.channels, self.width, self.groups = heads, channels, width, groups
        self.qkv_bias, self.name = qkv_bias, name
        self.attention = Attention(heads, name=self._named("attention"), **settings)
        self._projections: dict[str, Conv] = {}

    def __call__(self, queries: Node, keys: Node | None = None, values: Node | None = None) -> Node:
        """Return the attention of queries to keys and values; by default keys are the queries, and values the keys."""
        keys = queries if keys is None else keys
        values = keys if values is None else values
        if self.width is None and queries.shape[-1] % self.heads:
            raise ValueError(
                f"MultiHeadAttention: expected a number of heads that divides {queries.shape[-1]} channels, got "
                f"{self.heads}; or set width, the channels per head"
            )
        width = queries.shape[-1] // self.heads if self.width is None else self.width
        groups = self.heads if self.groups is None else self.groups
        counts = {"query": self.heads, "key": groups, "value": groups}
        nodes = {"query": queries, "key": keys, "value": values}
        projected = [self._projection(what, counts[what] * width, self.qkv_bias)(node) for what, node in nodes.items()]
        channels = queries.shape[-1] if self.channels is None else self.channels
        return self._projection("out", channels, True)(self.attention(*projected))

    def _projection(self, part: str, channels: int, bias: bool) -> Conv:
        """Return the projection to this number of channels; all calls share it."""
        projection = self._projections.setdefault(part, Conv(channels, 1, bias=bias, name=self._named(part)))
        if projection.filters != channels:
            raise ValueError(
                f"MultiHeadAttention: expected inputs whose {part} has {projection.filters} channels, as in an earlier "
                f"call, got {channels}; make another MultiHeadAttention, or set width and channels"
            )
        return projection

    def _named(self, part: str) -> str | None:
        return self.name and f"{self.name}.{part}"
