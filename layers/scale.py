"""Learned factors per channel or position: scale, and the slope of a rectifier."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..dtensor import axis_names
from ..kernels.access import reads, writes
from ..lowering.context import Context, Lowered
from ..lowering.operations import Timing
from ..lowering.views import View
from .layer import ElementwiseLayer, Passes, Shape
from .merge import product, summing
from .parameter import Parameter

__all__ = ["PReLU", "Scale", "extents_along", "sum_into"]


class Scale(ElementwiseLayer):
    """Learned scale per channel: the layer scale of ConvNeXt and CaiT (Touvron et al. 2021); with `axes`, a learned
    mask or gain per position.

    ``y = gamma * x + beta``

    Parameters
    ----------
    init
        Initial value of every `gamma`.
    bias
        Whether there is a `beta`, with zeros as initial values.
    axes
        Axes along which `gamma` and `beta` vary: some of ``"depth"``, ``"height"``, ``"width"`` (the axis of samples
        ``(L, C)``) and ``"channel"``; ``()``: one number.
    trained
        False: the arrays are constants (buffers in torch): the initial values, or those given by :meth:`initialized`.

    Notes
    -----
    Parameters `gamma` and `beta`, without weight decay: ``(C,)``; with other `axes`, of the shape of `w` of an
    :class:`Embedding`. A rank holds those of its block. Communication: only the sum of their gradients.
    """

    passes = Passes((1, 1), (3, 2))
    exact_parameters = True

    def __init__(
        self,
        init: float = 1.0,
        bias: bool = False,
        name: str | None = None,
        *,
        axes: Sequence[str] = ("channel",),
        trained: bool = True,
    ) -> None:
        super().__init__(name)
        self.init, self.bias, self.axes, self.trained = _finite("Scale", init), bias, tuple(axes), trained

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        return self._arrays(shapes[0]) if self.trained else {}

    def state(self, *shapes: Shape) -> Mapping[str, Parameter]:
        return {} if self.trained else self._arrays(shapes[0])

    def _arrays(self, shape: Shape) -> Mapping[str, Parameter]:
        if self.axes == ("channel",):
            extents: dict[str, Any] = {"shape": shape[-1:], "channel_axis": 0}
        else:
            extents = extents_along(self.kind, shape, self.axes)
        gamma = Parameter(init=self.init, decay=False, **extents)
        return {"gamma": gamma, "beta": Parameter(decay=False, **extents)} if self.bias else {"gamma": gamma}

    def flops(self, *shapes: Shape) -> int:
        return (1 + self.bias) * math.prod(shapes[0])

    def lower(self, context: Context) -> Lowered:
        arrays, x = context.params if self.trained else context.state, context.inputs[0].view
        gamma, beta = arrays["gamma"], arrays.get("beta")
        context.run(context.kernel(product, x=x, g=_of_samples(gamma), y=context.y), timing=context.timing("forward"))
        if beta is not None:
            context.run(context.kernel(_shift, y=context.y, beta=_of_samples(beta)))

        def backward() -> None:
            if self.trained and not context.frozen:
                # In the wide dtype, so that products are not rounded to 16 bits before they are summed.
                products = context.scratch(context.box.shape, context.wide)
                context.run(context.kernel(product, x=x, g=context.dy, y=products))
                sum_into(context, products, context.grads["gamma"])
                if beta is not None:
                    sum_into(context, context.dy, context.grads["beta"])
            if context.needs_gradient(0):
                back = context.kernel(product, x=context.dy, g=_of_samples(gamma), y=context.gradient(0))
                context.run(back, timing=context.timing("backward_data"))

        return Lowered(backward)


def extents_along(what: str, shape: Shape, axes: Sequence[str] | None) -> dict[str, Any]:
    """Return the arguments `shape`, `spatial_axes` and `channel_axis` of a :class:`Parameter` that varies along `axes`
    of samples of this shape; None: along all axes.

    Raises ValueError, naming `what`, for an axis that a sample does not have, and for one that is given twice.
    """
    names = axis_names(len(shape) + 1)[1:]
    chosen = names if axes is None else axes
    strange = [axis for axis in chosen if axis not in names]
    if strange or len(set(chosen)) < len(chosen):
        raise ValueError(
            f"{what}: axes: expected some of {', '.join(names)}, the axes of {shape}, each once, got {tuple(chosen)}"
        )
    # With extent 1 along all other axes, the array broadcasts over them.
    extents = tuple(n if name in chosen else 1 for name, n in zip(names, shape))
    channel = len(shape) - 1 if "channel" in chosen else None
    return {"shape": extents, "spatial_axes": tuple(range(len(shape) - 1)), "channel_axis": channel}


def _of_samples(view: View) -> View:
    """Return the view, with a first axis of extent 1 if it has spatial extents: it broadcasts over samples."""
    return view if len(view.shape) == 1 else view.reshape(1, *view.shape)


class PReLU(ElementwiseLayer):
    """Parametric ReLU: ``y = x`` where x > 0, else ``slope * x`` with a learned slope (He et al. 2015).

    Parameters
    ----------
    slopes
        ``"one"``: one slope for all channels. ``"channel"``: one slope per channel.
    init
        Initial value of every slope.

    Notes
    -----
    Parameter `slope` ``(1,)`` or ``(C,)``, without weight decay. Communication: only the sum of its gradient.
    """

    passes = Passes((1, 1), (3, 2))
    exact_parameters = True

    def __init__(self, slopes: str = "one", init: float = 0.25, name: str | None = None) -> None:
        super().__init__(name)
        if slopes not in ("one", "channel"):
            raise ValueError(f"slopes: expected 'one' or 'channel', got {slopes!r}")
        self.slopes, self.init = slopes, _finite("PReLU", init)

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        if self.slopes == "one":
            return {"slope": Parameter((1,), self.init, decay=False)}
        return {"slope": Parameter(shapes[0][-1:], self.init, decay=False, channel_axis=0)}

    def flops(self, *shapes: Shape) -> int:
        return 2 * math.prod(shapes[0])

    def lower(self, context: Context) -> Lowered:
        views = {"x": context.inputs[0].view, "slope": context.params["slope"]}
        work = context.scratch(context.box.shape, context.wide)
        context.run(context.kernel(_rectify, y=context.y, work=work, **views), timing=context.timing("forward"))

        def backward() -> None:
            positive, products = (context.scratch(context.box.shape, dtype) for dtype in ("bool", context.wide))
            context.run(context.kernel(_below, x=views["x"], dy=context.dy, positive=positive, products=products))
            sum_into(context, products, context.grads["slope"])
            if context.needs_gradient(0):
                # `products` is free once its sum is formed.
                views_read = {"dy": context.dy, "positive": positive, "slope": views["slope"], "factors": products}
                kernel = context.kernel(_bent, dx=context.gradient(0), **views_read)
                context.run(kernel, timing=context.timing("backward_data"))

        return Lowered(backward)


def _finite(what: str, value: float) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{what}: init: expected a finite number, got {value!r}")
    return float(value)


def sum_into(context: Context, array: View, gradient: View, timing: Timing | None = None) -> None:
    """Add the operations that write the gradient of a parameter ``(C,)`` or ``(1,)``, or of one with the axes of a
    sample: the sum of `array`, in float64, over the axes that the parameter lacks or has with one element.
    """
    # `summing` adds over all axes along which `sums` has one element.
    ones = (1,) * (len(array.shape) - len(gradient.shape))
    sums = context.scratch((*ones, *gradient.shape), "float64")
    context.run(context.kernel(summing, x=array, y=sums), timing=timing)
    context.copy((sums.reshape(*gradient.shape), gradient))


@reads("y", "beta")
@writes("y")
def _shift(environment: Any, y: Any, beta: Any) -> Callable[[], None]:
    def run() -> None:
        if y.size:
            np.add(y, beta, out=y)

    return run


@reads("x", "slope")
@writes("y", "work")
def _rectify(environment: Any, x: Any, slope: Any, y: Any, work: Any) -> Callable[[], None]:
    def run() -> None:
        if y.size:
            # Not by a mask of 0 and 1, which would make NaN of an infinity.
            np.minimum(x, 0, out=work)
            np.multiply(work, slope, out=work)
            np.maximum(x, 0, out=y)
            np.add(y, work, out=y)

    return run


@reads("x", "dy")
@writes("positive", "products")
def _below(environment: Any, x: Any, dy: Any, positive: Any, products: Any) -> Callable[[], None]:
    """Return the kernel ``products = x * dy`` where ``x <= 0``, else 0.

    The kernel selects the elements, because infinity times 0 is NaN.
    """

    def run() -> None:
        if dy.size:
            np.greater(x, 0, out=positive)
            # Converted first, so that products of 16-bit arrays are formed in float32.
            np.copyto(products, dy)
            np.multiply(products, x, out=products)
            np.copyto(products, 0, where=positive)

    return run


@reads("dy", "positive", "slope")
@writes("factors", "dx")
def _bent(environment: Any, dy: Any, positive: Any, slope: Any, factors: Any, dx: Any) -> Callable[[], None]:
    """Return the kernel ``dx = dy`` where ``x > 0``, else ``slope * dy``; it overwrites `factors`."""

    def run() -> None:
        if dx.size:
            np.copyto(factors, slope)
            np.copyto(factors, 1, where=positive)
            np.multiply(dy, factors, out=dx)

    return run
