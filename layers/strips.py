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

from halograd.dtensor import Box, Window, input_box
from halograd.kernels import Kernel
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
        self._kernels: list[Kernel] = []
        before: list[tuple[Any, Any]] = []
        behind: list[tuple[Any, Any]] = []
        y, origin = b.output.array, b.box.start
        for box in boundary_boxes(windows, b.box, value.box, shape):
            need = input_box(windows, box, shape[-1]) & Box.of_shape(shape)
            source = x.array[need.slices(x.box.start)]
            target = y[box.slices(origin)]
            xs = source if source.flags.c_contiguous else b.scratch(need.shape, value.dtype)
            ys = target if target.flags.c_contiguous else b.scratch(box.shape)
            before += [] if xs is source else [(xs, source)]
            behind += [] if ys is target else [(target, ys)]
            geometry = local_geometry(windows, need, box, getattr(b.layer, "groups", 1))
            self._kernels.append(b.kernels.conv_forward(xs, b.params["w"], b.params.get("b"), ys, geometry, relu=relu))
        # All strips in one copy: each has arrays of its own.
        self._before, self._behind = (b.kernels.device.copies(pairs) for pairs in (before, behind))

    def __call__(self) -> None:
        self._before()
        for kernel in self._kernels:
            kernel()
        self._behind()

    def close(self) -> None:
        for kernel in self._kernels:
            kernel.close()
