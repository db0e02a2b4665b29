"""Boundary strips: the outputs that a kernel which ran before the halos arrived got wrong.

::

    +---------------+
    |     top       |      interior: outputs whose inputs this rank owns
    +---+-------+---+      strips: the others, computed again once the halo is there
    |lef|interio|rig|
    +---+-------+---+
    |    bottom     |
    +---------------+
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..dtensor import Box, Window, input_box

if TYPE_CHECKING:
    from ..program.context import Context, Gathered

__all__ = ["boundary_boxes", "lower_strips"]


def boundary_boxes(windows: Sequence[Window], out: Box, owned: Box, shape: Sequence[int]) -> list[Box]:
    """Disjoint boxes of the outputs in `out` that need inputs outside `owned`.

    `shape` is the input's global shape: elements outside of it are padding, which no halo brings.
    """
    boxes = []
    rest = out
    for axis, w in enumerate(windows, start=1):
        start, stop = rest.ranges[axis]
        first, last = start, stop
        size, (a, b) = shape[axis], owned.ranges[axis]
        while first < stop and max(0, w.input_range(first, first + 1)[0]) < a:
            first += 1
        while last > first and min(size, w.input_range(last - 1, last)[1]) > b:
            last -= 1
        boxes += [rest.replace(axis, start, first), rest.replace(axis, last, stop)]
        rest = rest.replace(axis, first, last)
    return [box for box in boxes if box.size]


def lower_strips(context: Context, windows: Sequence[Window], x: Gathered, groups: int, relu: bool) -> None:
    """Compute the boundary strips of a convolution. Local."""
    from .convolution import conv_forward, local_geometry

    value = context.inputs[0]
    shape, y, origin = value.layout.shape, context.y, context.box.start
    before, kernels, behind = [], [], []
    for box in boundary_boxes(windows, context.box, value.box, shape):
        need = input_box(windows, box, shape[-1]) & Box.of_shape(shape)
        source = x.view.part([a - o for a, o in zip(need.start, x.box.start)], need.shape)
        target = y.part([a - o for a, o in zip(box.start, origin)], box.shape)
        xs = source if source.packed else context.scratch(need.shape, value.dtype)
        ys = target if target.packed else context.scratch(box.shape)
        before += [] if xs is source else [(source, xs)]
        behind += [] if ys is target else [(ys, target)]
        geometry = local_geometry(windows, need, box, groups)
        w, b = context.params["w"], context.params.get("b")
        timing = context.timing("forward", inputs=(need.shape,), outputs=box.shape[1:-1])
        kernels.append((context.kernel(partial(conv_forward, geometry, relu), x=xs, w=w, b=b, y=ys), timing))
    # All strips in one copy: each has arrays of its own.
    context.copy(*before)
    for kernel, timing in kernels:
        context.run(kernel, timing=timing)
    context.copy(*behind)
