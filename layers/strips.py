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
from typing import Any

import numpy as np

from halograd.dtensor import Box, Window, input_box
from halograd.layers.binding import Binding
from halograd.layers.value import Gathered

__all__ = ["Strips", "boundary_boxes"]


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


class Strips:
    """Computes the boundary strips of a convolution. Local; built within an operator's binding."""

    def __init__(self, b: Binding, windows: Sequence[Window], x: Gathered, relu: bool) -> None:
        from halograd.layers.convolution import local_geometry

        value = b.inputs[0]
        shape = value.layout.shape
        self._steps: list[tuple[Any, Any, Any, Any, Any]] = []
        y, origin = b.output.array, b.box.start
        for box in boundary_boxes(windows, b.box, value.box, shape):
            need = input_box(windows, box, shape[-1]) & Box.of_shape(shape)
            source = x.array[need.slices(x.box.start)]
            target = y[box.slices(origin)]
            xs = source if source.flags.c_contiguous else b.scratch(need.shape, value.dtype)
            ys = target if target.flags.c_contiguous else b.scratch(box.shape)
            geometry = local_geometry(windows, need, box, getattr(b.layer, "groups", 1))
            kernel = b.kernels.conv_forward(xs, b.params["w"], b.params.get("b"), ys, geometry, relu=relu)
            self._steps.append((source, xs, kernel, ys, target))

    def __call__(self) -> None:
        for source, xs, kernel, ys, target in self._steps:
            if xs is not source:
                np.copyto(xs, source)
            kernel()
            if ys is not target:
                np.copyto(target, ys)

    def close(self) -> None:
        for _, _, kernel, _, _ in self._steps:
            kernel.close()
