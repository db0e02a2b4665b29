"""Max and average pooling, cut along samples and space, overlapping windows included."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..dtensor import Window
from .convolution import local_geometry
from .layer import Layer, Node, Passes, Shape
from .needs import Stencil
from .padding import Pad
from .pair import Pair

if TYPE_CHECKING:
    from ..program.context import Context

__all__ = ["AveragePool", "MaxPool"]


class _Pool(Layer, ABC):
    """What both kinds of pooling share: the window, and the refusal of windows that hold only padding."""

    cuts_channels = "channelwise"

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
        """Forward and backward kernel of the backend."""

    def lower(self, context: Context) -> Callable[[], None]:
        """Halo of `x`, one kernel; backward one kernel, then the adjoint of the halo exchange.

        The gathered box ends at the border of the global array, so what the kernel takes for padding is padding of the
        global array: counts are right without any care.
        """
        windows = self.windows(context.shapes[0])
        # A fill value would only be needed for boxes that reach outside the array; these are clipped.
        boxes = context.clipped(0, [0, *(w.stride - 1 for w in windows), 0])
        x = context.gather(0, boxes)
        geometry = local_geometry(windows, x.box, context.box)
        # Forward and backward are made together: they share what forward remembers.
        kernel = context.kernel(partial(_pool, self, geometry), x=x.view, y=context.y)
        x.start()
        x.finish()
        context.run(kernel, "forward", uses=("x", "y"), timing=context.timing("forward"))

        def backward() -> None:
            returned = context.return_gradient(0, boxes)
            kernel.add(dy=context.dy, dx=returned.view)
            # Of the maxima forward has remembered the places.
            context.run(kernel, "backward", uses=("dy", "dx"), timing=context.timing("backward_data"))
            returned.start()
            returned.finish()

        return backward


def _pool(layer: _Pool, geometry: Any, environment: Any, x: Any, y: Any, dy: Any = None, dx: Any = None) -> Pair:
    return Pair(*layer.kernels(environment.kernels, x, y, dy, dx, geometry))


class MaxPool(_Pool):
    """The largest element of each window, channel by channel.

    ``y[n, o, c] = max_j x[n, o * stride - pad_lo + dilation * j, c]``; padding never wins. Of equal elements the
    first in row-major order of the window receives the gradient.

    Output size per axis: ``floor((n + pad_lo + pad_hi - dilation * (kernel - 1) - 1) / stride) + 1``.

    Parameters
    ----------
    kernel, stride, padding, dilation
        See :class:`Stencil`; the stride is the kernel where it is not given. Backends that cannot dilate
        refuse a dilation when the network is compiled.
    ceil_mode
        Round the output size up: a last window that begins before the padding behind may reach beyond its end.

    Raises
    ------
    ValueError
        If a window would read nothing but padding.

    Notes
    -----
    Input and output are cut in samples and space. Communication per process: the halo of `x` forward; as much
    backward, added to the gradients of its owners.
    """

    # The place of each maximum is kept.
    passes = Passes((1, 1.25), (1, 1.25))

    def kernels(self, backend: Any, x: Any, y: Any, dy: Any, dx: Any, geometry: Any) -> tuple[Any, Any]:
        return backend.max_pool(x, y, dy, dx, geometry)


class AveragePool(_Pool):
    """The mean of each window, channel by channel.

    ``y[n, o, c] = (1 / count) * sum_j x[n, o * stride - pad_lo + dilation * j, c]``

    Output size, arguments and communication as for :class:`MaxPool`.

    Parameters
    ----------
    count_include_pad
        True: `count` is the number of taps of the kernel, padding counts as zeros. False: `count` is the number
        of taps inside the (global) array. What `ceil_mode` reads beyond the padding never counts: where it does and
        there is padding that counts, that is made of :class:`Pad` before.
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
    """The first of `outputs` windows that has no tap inside ``[0, size)``, or None."""
    for o in range(outputs):
        first = o * w.stride - w.pad_lo
        # The first tap at or behind 0 is the only candidate: later ones lie further behind.
        inside = first if first >= 0 else first + -(first // w.dilation) * w.dilation
        if inside >= size or inside >= first + w.extent:
            return o
    return None
