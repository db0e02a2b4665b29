"""Max and average pooling over windows, cut along samples and space: with a fixed stride, or adaptive.

Adaptive windows cover the input, and follow from the number of outputs. They may overlap.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..dtensor import Window
from ..kernels.access import Access, makes, reads, writes
from ..lowering.context import Context, Lowered
from ..lowering.views import Region, View
from .convolution import LocalGeometry, local_geometry, zeroing
from .global_pooling import GlobalAveragePool, GlobalMaxPool, Search, in_wide, number_dtype
from .layer import Layer, Node, Passes, Shape
from .lowering import Pair
from .needs import Stencil
from .padding import Pad
from .reshape import Reshape
from .resize import Resize

__all__ = ["AdaptiveAveragePool", "AdaptiveMaxPool", "AveragePool", "MaxPool", "SearchStage"]


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

    @abstractmethod
    def kernels(self, backend: Any, x: Any, y: Any, dy: Any, dx: Any, geometry: Any) -> tuple[Any, Any]:
        """Return the forward and the backward kernel of the backend."""

    def lower(self, context: Context) -> Lowered:
        """Add the halo exchange of `x` and one kernel; backward, one kernel and the adjoint of the exchange.

        The gathered box ends at the border of the global array, so the padding of the kernel is the padding of the
        global array, and the counts of average pooling are right.
        """
        windows = self.windows(context.shapes[0])
        # Boxes are clipped at the border of the array, so no fill value is needed.
        slack = [0, *(w.stride - 1 for w in windows), 0]
        boxes = context.clipped(0, slack)
        x = context.gather(0, boxes).run()
        geometry = local_geometry(windows, x.box, context.box)
        # Forward and backward are created together: backward uses what forward stores.
        kernel = context.kernel(partial(_pool, self, geometry), x=x.view, y=context.y)
        context.run(kernel, "forward", timing=context.timing("forward"))

        def backward() -> None:
            own = context.clipped(0, slack, own=True)
            returned = context.return_gradient(0, boxes, own)
            kernel.add(dy=self._own_gradient(context), dx=returned.view)
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

    ``y[n, o, c] = max_j x[n, o * stride - pad_lo + dilation * j, c]``; padding never is the maximum. Of several equal
    maxima, the first in row-major order of the window receives the gradient.

    Output size per axis: ``floor((n + pad_lo + pad_hi - dilation * (kernel - 1) - 1) / stride) + 1``.

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
    Input and output are cut in samples and space. Communication per process: the halo of `x` forward; as much
    backward, added to the gradients of its owners.
    """

    # The position of each maximum is stored.
    passes = Passes((1, 1.25), (1, 1.25))

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
        any, and padding counts, a :class:`Pad` before this layer does the padding.
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
        self._refuse_others(inputs)
        if len(inputs) != 1 or not self.count_include_pad:
            return super().__call__(*inputs)
        (node,) = inputs
        windows = self.windows(node.shape)
        inside = [(w.pad_lo, w.pad_hi) for w in replace(self.stencil, rounding="floor").windows(node.shape[:-1])]
        beyond = [(0, w.pad_hi - hi) for w, (_, hi) in zip(windows, inside)]
        if not any(more for _, more in beyond):
            return super().__call__(node)
        if any(lo or hi for lo, hi in inside):
            node = Pad(inside, name=self.name and f"{self.name}_pad")(node)
        return self.changed(count_include_pad=False, stencil=replace(self.stencil, padding=beyond, rounding="floor"))(
            node
        )

    def kernels(self, backend: Any, x: Any, y: Any, dy: Any, dx: Any, geometry: Any) -> tuple[Any, Any]:
        include = self.count_include_pad
        return backend.average_pool(x, y, dy, dx, geometry, count_include_pad=include)


def _only_padding(w: Window, size: int, outputs: int) -> int | None:
    """Return the first of `outputs` windows that has no tap inside ``[0, size)``, or None."""
    for o in range(outputs):
        first = o * w.stride - w.pad_lo
        # The first tap at or after 0 is the only candidate: later taps are further away.
        inside = first if first >= 0 else first + -(first // w.dilation) * w.dilation
        if inside >= size or inside >= first + w.extent:
            return o
    return None


class _Adaptive(Resize):
    """Pooling whose output `o` reads the inputs from ``floor(o * n / size)`` to ``ceil((o + 1) * n / size) - 1``."""

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
        """Lower to searches along one axis after another, the last axis first, so that the lowest row of equal maxima
        is found.
        """
        resamplings = self.resamplings(context.shapes[0])
        boxes = context.clipped(0, [0, *(math.ceil(r.ratio) for r in resamplings), 0])
        x = context.gather(0, boxes).run()
        if not context.box.size:
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
            for stage in stages[:0:-1]:
                gradient = stage.lower_backward(context, gradient, context.scratch(stage.x.shape, context.wide))
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
    """Return the kernel that sums, per element, the gradients of the windows whose first maximum it is."""
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
