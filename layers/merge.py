"""Layers that join branches: sums, products and concatenation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..dtensor import Blocks, Box, Interval, Layout, axis_names
from ..kernels.access import reads, writes
from ..kernels.kernel import FusedActivation
from ..lowering.context import Context, Lowered
from ..lowering.views import View
from .activation import activated, fused
from .layer import Layer, Passes, Shape
from .lowering import exchange_all, gradient_of
from .needs import is_broadcast, operand_blocks, with_axes

__all__ = ["Add", "BroadcastAdd", "Concat", "Multiply", "added", "product", "summing"]


class Add(Layer):
    """Sum of any number of inputs of one shape, ``y = x0 + x1 + ...``.

    Parameters
    ----------
    activation
        As in :class:`Conv`.

    Notes
    -----
    Without an activation, the gradient of every input is that of the output, without a copy. Communication: none.
    """

    recomputation = "pointwise"
    # The gradient of every summand is that of the sum: backward moves no data.
    passes = Passes((1, 1), (0, 0))
    cuts_channels = "channelwise"
    widens = True

    def __init__(self, activation: str | Layer | None = None, name: str | None = None) -> None:
        super().__init__(name)
        self.activation = activated(self, activation, by_input=False)

    def output_shape(self, *shapes: Shape) -> Shape:
        if not shapes or any(s != shapes[0] for s in shapes):
            raise ValueError(f"Add: expected inputs of one shape, got {_list(shapes)}; crop, pad or resize them first")
        return shapes[0]

    def flops(self, *shapes: Shape) -> int:
        return (len(shapes) - 1) * math.prod(shapes[0])

    def lower(self, context: Context) -> Lowered:
        f = fused(self)
        views = {f"x{i}": context.read(i) for i in range(len(context.inputs))}
        kernel = context.kernel(partial(_add, f), y=context.y, **views)
        # Called with an activation, it returns the factory of the kernel: partial(_add, f).
        kernel.fuse = partial(partial, _add) if f is None else None
        context.run(kernel, timing=context.timing("forward"))

        def backward() -> None:
            masked = None
            if f is not None:
                # A separate array: in the storage of one input, another gradient of that input would be added to it.
                masked = context.scratch(context.dy.shape)
                views = {"y": context.y_of_gradient(), "dy": context.dy, "dx": masked}
                context.run(context.kernel(partial(gradient_of, f), **views))
            for i in range(len(context.inputs)):
                if context.needs_gradient(i):
                    context.pass_gradient(i, context.gradient_for(i, masked))

        return Lowered(backward)


@reads("x*")
@writes("y")
def _add(f: FusedActivation | None, environment: Any, y: Any, **summands: Any) -> Any:
    return environment.kernels.add(list(summands.values()), y, f)


class _OfTwo(Layer):
    """Elementwise operation of two inputs, of which the second may have smaller extents.

    Notes
    -----
    Communication per process: the needed part of a smaller `g` that other ranks own; backward, the adjoint: the partial
    sums over this rank's positions and channels that share an element of `g`.
    """

    recomputation = "pointwise"
    cuts_channels = "channelwise"
    #: The kernel, on arrays x, g and y.
    combine: Callable[..., Callable[[], None]]

    def output_shape(self, *shapes: Shape) -> Shape:
        if len(shapes) != 2:
            raise ValueError(f"{self.kind}: expected two inputs, got {len(shapes)}; combine more step by step")
        x, g = shapes
        if not is_broadcast(g, x) and g not in ((x[-1],), (1,)):
            raise ValueError(
                f"{self.kind}: expected a second input of the shape {x}, with 1 for any of its extents, or "
                f"{(x[-1],)}, got {g}; crop, pad or resize one of them"
            )
        return x

    def flops(self, *shapes: Shape) -> int:
        return math.prod(shapes[0])

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        return operand_blocks(inputs[i].shape, output.boxes)

    def error(self, context: Context, x: View) -> View:
        """Return the array, of the extents of the output, whose sums over broadcast axes are the gradient of `g`."""
        raise TypeError(f"{self.kind} must override error()")

    def pass_on(self, context: Context, g: View, dx: View) -> None:
        """Add the operation that writes the gradient of `x` to `dx`; `g` has as many axes as `x`."""
        raise TypeError(f"{self.kind} must override pass_on()")

    def lower(self, context: Context) -> Lowered:
        boxes = [context.needed(i) for i in range(2)]
        x, g = (context.gather(i, blocks) for i, blocks in enumerate(boxes))
        exchange_all((x, g))
        # A vector per sample gets axes of one element, so that it is broadcast.
        small = with_axes(g.view, len(context.box.shape))
        kernel = context.kernel(type(self).combine, x=x.view, g=small, y=context.y)
        context.run(kernel, timing=context.timing("forward"))

        def backward() -> None:
            if context.needs_gradient(1):
                # Summed in float64 before it is rounded: the smaller g is, the more elements each sum has.
                returned = context.return_gradient(1, boxes[1])
                sums = context.scratch(small.shape, "float64")
                context.run(context.kernel(summing, x=self.error(context, x.view), y=sums))
                context.copy((sums, with_axes(returned.view, len(small.shape))))
                returned.start()  # travels while the gradient of x is computed
            if context.needs_gradient(0):
                own = context.return_gradient(0, boxes[0])
                self.pass_on(context, small, own.view)
                own.start()
                own.finish()
            if context.needs_gradient(1):
                returned.finish()

        return Lowered(backward)


@reads("x", "g")
@writes("y")
def product(environment: Any, x: Any, g: Any, y: Any) -> Callable[[], None]:
    """Return the kernel ``y = x * g``."""

    def run() -> None:
        if y.size:
            np.multiply(x, g, out=y)

    return run


@reads("x", "g")
@writes("y")
def added(environment: Any, x: Any, g: Any, y: Any) -> Callable[[], None]:
    """Return the kernel ``y = x + g``."""

    def run() -> None:
        if y.size:
            np.add(x, g, out=y)

    return run


class Multiply(_OfTwo):
    """Product ``y = x * g`` of two inputs, of which the second may have smaller extents: a gate, or a mask.

    `g` has the shape of `x`, with 1 for any of its extents, or is a vector ``(C,)`` or ``(1,)`` per sample. The product
    ``x * g`` of two nodes creates this layer. Uses: squeeze-and-excitation, attention gates, a scale per layer.

    Notes
    -----
    Communication per process: the needed part of a smaller `g` that other ranks own; backward, the adjoint: the partial
    sums over this rank's positions and channels that share an element of `g`.
    """

    combine = staticmethod(product)

    def error(self, context: Context, x: View) -> View:
        products = context.scratch(context.box.shape)
        context.run(context.kernel(product, x=x, g=context.dy, y=products))
        return products

    def pass_on(self, context: Context, g: View, dx: View) -> None:
        kernel = context.kernel(product, x=context.dy, g=g, y=dx)
        context.run(kernel, timing=context.timing("backward_data"))


class BroadcastAdd(_OfTwo):
    """Sum ``y = x + g`` of two inputs, of which the second has smaller extents, such as parameters per sample or an
    embedding.

    `g` has the shape of `x`, with 1 for any of its extents, or is a vector ``(C,)`` or ``(1,)`` per sample. The sum ``x
    + g`` of two nodes creates this layer. With :class:`Multiply` it makes a network depend on parameters per sample, as
    ``y * Dense(C)(numbers) + Dense(C)(numbers)`` (Perez et al. 2018).

    Notes
    -----
    Communication per process: as for :class:`Multiply`.
    """

    combine = staticmethod(added)

    def error(self, context: Context, x: View) -> View:
        return context.dy

    def pass_on(self, context: Context, g: View, dx: View) -> None:
        # Empty boxes may have different shapes.
        copied = [(context.dy, dx)] if context.box.size else []
        context.copy(*copied, timing=context.timing("backward_data"))


@reads("x")
@writes("y")
def summing(environment: Any, x: Any, y: Any) -> Callable[[], None]:
    """Return the kernel that sums x over the axes along which y has one element."""
    axes = tuple(axis for axis, n in enumerate(y.shape) if n == 1)

    def run() -> None:
        if x.size:
            np.add.reduce(x, axis=axes, dtype=np.float64, out=y, keepdims=True)
        else:  # a rank without elements still adds to the sum over ranks
            y.fill(0)

    return run


class Concat(Layer):
    """Concatenation along the channels: inputs ``(N, *spatial, C_i)`` -> ``(N, *spatial, sum C_i)``; or along a spatial
    axis: ``(N, L_i, C)`` -> ``(N, sum L_i, C)``.

    Parameters
    ----------
    axis
        ``"channel"``, or ``"depth"``, ``"height"``, ``"width"`` (the axis of samples ``(L, C)``).

    Notes
    -----
    Inputs and output have the same parts of each axis. Communication per process: the elements of its output that other
    ranks own in an input, if the axis is cut; else none. Backward, the adjoint.
    """

    recomputation = "pointwise"
    passes = Passes()
    cuts_channels = "channelwise"

    def __init__(self, name: str | None = None, *, axis: str = "channel") -> None:
        super().__init__(name)
        self.axis = axis

    def along(self, shape: Shape) -> int:
        """Return the index of the axis in samples of this shape. Raises ValueError if they lack it."""
        names = axis_names(len(shape) + 1)[1:]
        if self.axis not in names:
            raise ValueError(f"Concat: axis: expected one of {', '.join(names)} for {shape}, got {self.axis!r}")
        return names.index(self.axis)

    def output_shape(self, *shapes: Shape) -> Shape:
        # Without inputs there is no axis: the check below reports them.
        axis = self.along(shapes[0]) if shapes else -1
        if not shapes or any(_without(s, axis) != _without(shapes[0], axis) for s in shapes):
            same = "spatial shape" if self.axis == "channel" else f"shape but for their {self.axis}"
            raise ValueError(
                f"Concat: expected inputs of one {same}, got {_list(shapes)}; crop, pad or resize them first"
            )
        return (*shapes[0][:axis], sum(s[axis] for s in shapes), *shapes[0][axis + 1 :])

    def input_boxes(self, box: Box, *shapes: Shape) -> tuple[Box, ...]:
        axis = self.along(shapes[0])
        parts = self._parts([shape[axis] for shape in shapes])
        return tuple(box.replace(axis + 1, *part(*box.ranges[axis + 1])) for part in parts)

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        """Return the boxes of `input_boxes` for one input, computed per axis."""
        axis = self.along(output.shape[1:]) + 1
        changes: list[Callable[[int, int], Interval] | None] = [None] * len(output.shape)
        changes[axis] = self._parts([layout.shape[axis] for layout in inputs])[i]
        return output.boxes.map(*changes)

    @staticmethod
    def _parts(extents: Sequence[int]) -> list[Callable[[int, int], Interval]]:
        """Return, per input, a function from an interval of the output to the part of it that the input holds, in
        indices of the input.
        """

        def part(first: int, own: int, low: int, high: int) -> Interval:
            # Clipped to the input: an interval that contains nothing of it becomes an empty one.
            start = min(max(low - first, 0), own)
            return start, min(max(high - first, start), own)

        firsts = itertools.accumulate(extents[:-1], initial=0)
        return [partial(part, first, own) for first, own in zip(firsts, extents)]

    def lower(self, context: Context) -> Lowered:
        """Lower to copies between packed arrays and ranges of the output along the axis.

        If the axis is cut, the blocks of inputs and output differ: the inputs are gathered.
        """
        # Without a cut of the axis nothing is sent: needed boxes are the owned ones.
        axis = self.along(context.shapes[0]) + 1
        boxes = [context.needed(i) for i in range(len(context.inputs))]
        inputs = [context.gather(i, blocks) for i, blocks in enumerate(boxes)]
        firsts = list(itertools.accumulate((shape[axis - 1] for shape in context.shapes[:-1]), initial=0))

        def own(i: int, view: View) -> View:
            """Return the part of this rank's output that comes from input `i`."""
            box, start = inputs[i].box, [0] * len(view.shape)
            # Where this part of the input begins in the block of the output.
            start[axis] = firsts[i] + box.start[axis] - context.box.start[axis]
            return view.part(start, (*view.shape[:axis], box.shape[axis], *view.shape[axis + 1 :]))

        exchange_all(inputs)
        pairs = [(x.view, own(i, context.y)) for i, x in enumerate(inputs) if x.box.size]
        context.copy(*pairs, timing=context.timing("forward"))

        def backward() -> None:
            returned = {i: context.return_gradient(i, b) for i, b in enumerate(boxes) if context.needs_gradient(i)}
            pairs = [(own(i, context.dy), gradient.view) for i, gradient in returned.items() if inputs[i].box.size]
            context.copy(*pairs, timing=context.timing("backward_data"))
            exchange_all(list(returned.values()))

        return Lowered(backward)


def _without(shape: Shape, axis: int) -> Shape:
    return (*shape[:axis], *shape[axis + 1 :])


def _list(shapes: tuple[Shape, ...]) -> str:
    return ", ".join(map(str, shapes)) or "no input"
