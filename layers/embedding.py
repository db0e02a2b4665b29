"""Embeddings: learned arrays that are added to samples, learned tokens before them, and sinusoids of a number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ..device import wide
from ..dtensor import Blocks, Layout
from ..kernels.access import reads, writes
from ..lowering.context import Context, Lowered
from .layer import ElementwiseLayer, Layer, Passes, Shape
from .merge import added
from .padding import Shifted
from .parameter import Parameter
from .scale import extents_along, sum_into

__all__ = ["Embedding", "SinusoidalEmbedding", "Token"]


class Embedding(ElementwiseLayer):
    """Learned array that is added to every sample: an embedding of positions, or a bias per cell, ``y = x + w``.

    Parameters
    ----------
    axes
        Axes along which the array varies: some of ``"depth"``, ``"height"``, ``"width"`` (the axis of samples ``(L,
        C)``) and ``"channel"``; ``()``: one number. None: all axes of the sample.
    std
        Standard deviation of the initial values, which are normal; 0: zeros.
    trained
        Whether the array is a parameter. False: it is a constant (a buffer in torch), given by :meth:`initialized`.

    Notes
    -----
    Parameter (or state) `w`, with the extents of the sample along `axes` and 1 along the others, without weight decay:
    ``(H, W, C)``, or ``(H, W, 1)`` for ``("height", "width")``. A rank holds the box of its block, so the network takes
    samples of other sizes only along axes that are not named. Communication: only the sum of the gradient, over the
    ranks that hold the same elements of `w`.
    """

    # The gradient of the input is that of the output: backward reads it once.
    passes = Passes((1, 1), (0, 1))
    exact_parameters = True

    def __init__(
        self,
        axes: Sequence[str] | None = None,
        std: float = 0.02,
        name: str | None = None,
        *,
        trained: bool = True,
    ) -> None:
        super().__init__(name)
        self.axes, self.std = None if axes is None else tuple(axes), _deviation("Embedding", std)
        self.trained = trained

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        return self._arrays(shapes[0]) if self.trained else {}

    def state(self, *shapes: Shape) -> Mapping[str, Parameter]:
        return {} if self.trained else self._arrays(shapes[0])

    def _arrays(self, shape: Shape) -> Mapping[str, Parameter]:
        extents = extents_along(self.kind, shape, self.axes)
        return {"w": Parameter(init="normal", std=self.std, decay=False, **extents)}

    def lower(self, context: Context) -> Lowered:
        w = (context.params if self.trained else context.state)["w"]
        kernel = context.kernel(added, x=context.inputs[0].view, g=w.reshape(1, *w.shape), y=context.y)
        context.run(kernel, timing=context.timing("forward"))

        def backward() -> None:
            if self.trained and not context.frozen:
                sum_into(context, context.dy, context.grads["w"], context.timing("backward_data"))
            if context.needs_gradient(0):
                context.pass_gradient(0)

        return Lowered(backward)


class Token(Shifted):
    """Learned tokens prepended to a sequence, such as the class token of a vision transformer: ``(L, C)`` -> ``(count +
    L, C)``.

    ``Slice(0, count, axis="width")`` selects the tokens again.

    Parameters
    ----------
    count
        Number of tokens.
    std
        Standard deviation of the initial values, which are normal; 0: zeros.

    Notes
    -----
    Parameter `w` ``(count, C)``, without weight decay; a rank holds the part of its channels. Communication per
    process: the positions of its output that other ranks own in the input; backward, the adjoint, and the sum of the
    gradient of `w`.
    """

    exact_parameters = True

    def __init__(self, count: int = 1, std: float = 0.02, name: str | None = None) -> None:
        super().__init__(name)
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"Token: count: expected a whole number of at least 1, got {count!r}")
        self.count, self.std = count, _deviation("Token", std)

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        if len(shape) != 2:
            raise ValueError(f"Token: expected samples (L, C), got {shape}; put Reshape(L, C) before it")
        return (self.count + shape[0], shape[1])

    def shifts(self, shape: Shape) -> Sequence[int]:
        return [self.count, 0]

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        shape = (self.count, shapes[0][-1])
        return {"w": Parameter(shape, "normal", std=self.std, decay=False, channel_axis=1)}

    def lower(self, context: Context) -> Lowered:
        moved, w = super().lower(context), context.params["w"]
        n, length, channels = context.box.shape
        # Tokens in this block: none if it begins after them.
        first, own = context.box.start[1], max(0, min(length, self.count - context.box.start[1]))
        # The copy before has written zeros, the value of rows without a source, where the tokens belong.
        rows = (n, own if context.box.size else 0, channels)
        context.run(context.kernel(partial(_begin, first), w=w, y=context.y.part((0, 0, 0), rows)))

        def backward() -> None:
            if not context.frozen:
                views = {"dy": context.dy.part((0, 0, 0), rows), "dw": context.grads["w"]}
                sums = context.scratch(rows[1:], "float64")
                context.run(context.kernel(partial(_sum_rows, first), sums=sums, **views))
            if moved.backward is not None and context.needs_gradient(0):
                moved.backward()

        return Lowered(backward)


class SinusoidalEmbedding(Layer):
    """Embedding of a number per sample by sines and cosines (Vaswani et al. 2017): ``(1,)`` -> ``(C,)``.

    ``y = [cos(x * w_i) ..., sin(x * w_i) ...]`` with ``w_i = period ** (-i / (C / 2))``, ``i = 0 ... C / 2 - 1``.
    Communication: none.

    Parameters
    ----------
    channels
        Number C of channels, even.
    period
        Base of the frequencies `w_i`; with many channels, the longest period is close to ``2 pi * period``.
    """

    recomputation = "pointwise"
    inputs_taken = 1
    # bfloat16 would round step 999 to 1000, whose sines are those of another phase.
    exact_inputs = True

    def __init__(self, channels: int, period: float = 10_000.0, name: str | None = None) -> None:
        super().__init__(name)
        if channels < 2 or channels % 2:
            raise ValueError(f"SinusoidalEmbedding: expected an even number of channels >= 2, got {channels}")
        if not 0 < period < math.inf:
            raise ValueError(f"SinusoidalEmbedding: period: expected a number > 0, got {period!r}")
        self.channels, self.period = channels, float(period)

    def output_shape(self, *shapes: Shape) -> Shape:
        if shapes[0] != (1,):
            raise ValueError(f"SinusoidalEmbedding: expected one number per sample, (1,), got {shapes[0]}")
        return (self.channels,)

    def flops(self, *shapes: Shape) -> int:
        # About 20 operations for a sine or a cosine.
        return 20 * self.channels

    def needed_blocks(self, i: int, inputs: Sequence[Layout], output: Layout) -> Blocks:
        return output.boxes.map(None, lambda low, high: (0, 1))

    def lower(self, context: Context) -> Lowered:
        x = context.gather(0, context.needed(0)).run()
        # One phase per frequency: half of the channels are its cosines, half its sines.
        shape = context.box.shape[0], context.box.shape[1] // 2
        phase, waves = (context.scratch(shape, context.wide) for _ in range(2))
        kernel = context.kernel(partial(_waves, self.period), x=x.view, y=context.y, phase=phase, waves=waves)
        context.run(kernel, timing=context.timing("forward"))

        def backward() -> None:
            if context.needs_gradient(0):
                returned = context.return_gradient(0, context.needed(0))
                work = {name: context.scratch(shape, context.wide) for name in ("phase", "waves", "slopes")}
                work["sums"] = context.scratch(returned.view.shape, context.wide)
                views = {"x": x.view, "dy": context.dy, "dx": returned.view, **work}
                kernel = context.kernel(partial(_waves_back, self.period), **views)
                context.run(kernel, timing=context.timing("backward_data"))
                returned.run()

        return Lowered(backward)


def _frequencies(period: float, channels: int, array: Any, environment: Any) -> Any:
    """Return the frequencies ``(C / 2,)`` in the wide dtype of an array, on its device."""
    rates = period ** (-np.arange(channels // 2) / (channels // 2))
    return environment.kernels.device.array(rates, wide(array.dtype))


@reads("x")
@writes("y", "phase", "waves")
def _waves(period: float, environment: Any, x: Any, y: Any, phase: Any, waves: Any) -> Callable[[], None]:
    half, rates = y.shape[-1] // 2, _frequencies(period, y.shape[-1], y, environment)

    def run() -> None:
        if y.size:
            # In the wide dtype: 16 bits would round large phases by a large part of a period.
            np.multiply(x, rates, out=phase)
            np.copyto(y[:, :half], np.cos(phase, out=waves), casting="same_kind")
            np.copyto(y[:, half:], np.sin(phase, out=waves), casting="same_kind")

    return run


@reads("x", "dy")
@writes("dx", "phase", "waves", "slopes", "sums")
def _waves_back(
    period: float, environment: Any, x: Any, dy: Any, dx: Any, phase: Any, waves: Any, slopes: Any, sums: Any
) -> Callable[[], None]:
    half, rates = dy.shape[-1] // 2, _frequencies(period, dy.shape[-1], dy, environment)

    def run() -> None:
        if dx.size:
            np.multiply(x, rates, out=phase)
            # dx = sum_i w_i (cos(x w_i) dy[sin, i] - sin(x w_i) dy[cos, i])
            np.multiply(np.cos(phase, out=waves), dy[:, half:], out=slopes)
            np.multiply(np.sin(phase, out=phase), dy[:, :half], out=waves)
            np.subtract(slopes, waves, out=slopes)
            np.multiply(rates, slopes, out=slopes)
            np.copyto(dx, np.add.reduce(slopes, axis=1, keepdims=True, out=sums), casting="same_kind")

    return run


def _deviation(what: str, std: float) -> float:
    if not 0 <= std < math.inf:
        raise ValueError(f"{what}: std: expected a finite number >= 0, got {std!r}")
    return float(std)


@reads("w")
@writes("y")
def _begin(first: int, environment: Any, w: Any, y: Any) -> Callable[[], None]:
    """Return the kernel that writes the rows ``first, first + 1, ...`` of `w` to the rows of `y`."""
    rows = w[first : first + y.shape[1]] if y.size else w[:0]

    def run() -> None:
        if y.size:
            np.copyto(y, rows, casting="same_kind")

    return run


@reads("dy")
@writes("sums", "dw")
def _sum_rows(first: int, environment: Any, dy: Any, sums: Any, dw: Any) -> Callable[[], None]:
    """Return the kernel that writes the sums of the rows of `dy` over samples to `dw` from `first` on, else 0."""
    # The gradient covers the whole parameter; this rank adds only the tokens that its block holds.
    rows = dw[first : first + dy.shape[1]] if dy.size else dw[:0]

    def run() -> None:
        dw.fill(0)
        if dy.size:
            np.add.reduce(dy, axis=0, dtype=np.float64, out=sums)
            np.copyto(rows, sums, casting="same_kind")

    return run
