"""Adaptive pooling: windows that cover the input, to a number of outputs per axis."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .global_pooling import GlobalAveragePool, GlobalMaxPool, Search, in_wide, number_dtype
from .layer import Layer, Node, Passes
from .reshape import Reshape
from .resize import Resize

if TYPE_CHECKING:
    from ..program.context import Context
    from ..program.views import View

__all__ = ["AdaptiveAveragePool", "AdaptiveMaxPool"]


class _Adaptive(Resize):
    """Output `o` of an axis is of the inputs from ``floor(o * n / size)`` to ``ceil((o + 1) * n / size) - 1``."""

    #: What one output per sample and channel is made by.
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
    """Mean over windows that cover the input, of any extent: ``(*spatial, C)`` -> ``(*size, C)``, as torch has it.

    Output `o` of an axis is the mean of the inputs from ``floor(o * n / size)`` to ``ceil((o + 1) * n / size) - 1``:
    :class:`Resize` in the mode ``"area"``. One output in all is made by :class:`GlobalAveragePool` and
    :class:`Reshape`: no rank needs a whole sample.

    Parameters
    ----------
    size
        Outputs per spatial axis: one number for all or one per axis.

    Notes
    -----
    Communication per process: the inputs of its windows that another rank owns; as much backward.
    """

    whole = GlobalAveragePool


class AdaptiveMaxPool(_Adaptive):
    """The largest element of windows that cover the input: ``(*spatial, C)`` -> ``(*size, C)``, as torch has it.

    Windows, arguments and communication as of :class:`AdaptiveAveragePool`. Of equal elements the first in row-major
    order receives the gradient; a NaN is larger than all, and has none.
    """

    whole = GlobalMaxPool
    passes = Passes((8, 1), (5, 1))

    def lower(self, context: Context) -> Callable[[], None]:
        """One axis after another, the last first: so the first of equal elements is that of the lowest row."""
        resamplings = self.resamplings(context.shapes[0])
        boxes = context.clipped(0, [0, *(math.ceil(r.ratio) for r in resamplings), 0])
        x = context.gather(0, boxes)
        x.start()
        x.finish()
        if not context.box.size:
            return lambda: _return_nothing(context, boxes)
        searches = []
        for axis, r in enumerate(resamplings, start=1):
            first = x.box.start[axis]
            ranges = [r.input_range(o, o + 1) for o in range(*context.box.ranges[axis])]
            searches.append(Search(axis, [(a - first, b - first) for a, b in ranges]))
        stages: list[_Stage] = []
        source = in_wide(context, x.view)
        for search in reversed(searches):
            stages.append(_Stage(context, search, source, "forward" if not stages else None))
            source = stages[-1].y
        context.copy((source, context.y))

        def backward() -> None:
            returned = context.return_gradient(0, boxes)
            gradient = in_wide(context, context.dy)
            for stage in stages[:0:-1]:
                gradient = stage.lower_backward(context, gradient, context.scratch(stage.x.shape, context.wide))
            direct = returned.view.dtype == context.wide
            dx = returned.view if direct else context.scratch(returned.view.shape, context.wide)
            stages[0].lower_backward(context, gradient, dx, "backward_data")
            context.copy(*([] if direct else [(dx, returned.view)]))
            returned.start()
            returned.finish()

        return backward


def _return_nothing(context: Context, boxes: Any) -> None:
    returned = context.return_gradient(0, boxes)
    returned.start()
    returned.finish()


class _Stage:
    """The search along one axis, and the way back."""

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
        """The gradient of what was searched, in `dx`."""
        views = {"dy": dy, "number": self.number, "dx": dx, "work": self._work(context)}
        kernel = context.kernel(partial(_to_first, self.search), **views)
        context.run(kernel, timing=context.timing(phase) if phase else None)
        return dx


def _to_first(search: Search, environment: Any, dy: Any, number: Any, dx: Any, work: Any) -> Callable[[], None]:
    """dx = the sum of the gradients of the windows in which an element was the first of the largest."""
    numbers = np.arange(dx.shape[search.axis]).reshape(-1, *(1 for _ in dx.shape[search.axis + 1 :]))
    ramp, steps = environment.kernels.device.array(numbers, number.dtype), []
    for o, (a, b) in enumerate(search.windows):
        made = [search.part(o, o + 1, array) for array in (dy, number)]
        steps.append((*made, ramp[a:b], search.part(0, b - a, work), search.part(a, b, dx)))

    def run() -> None:
        dx.fill(0)
        for gradient, lowest, own, here, target in steps:
            np.equal(own, lowest, out=here)
            np.multiply(here, gradient, out=here)
            np.add(target, here, out=target)

    return run
