"""Local response normalization across channels, as in AlexNet and GoogLeNet."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from ..kernels.access import reads, writes
from ..kernels.memory import Workspace, buffer, chunks, widened
from ..lowering.context import Context, Lowered
from .layer import Layer, Passes, Shape

__all__ = ["LocalResponseNorm"]


class LocalResponseNorm(Layer):
    """Local response normalization: divide each element by a power of `d`, which grows with the squares around it.

    ``y[c] = x[c] * d[c] ** -beta`` with ``d[c] = k + alpha / size * sum_j x[j]**2``, `j` from
    ``max(0, c - size // 2)`` to ``min(C - 1, c + (size - 1) // 2)``, at every sample and position. Backward::

        dx[c] = dy[c] * d[c] ** -beta - 2 * beta * alpha / size * x[c] * sum_i dy[i] * x[i] * d[i] ** (-beta - 1)

    with `i` over the channels whose window holds `c`.

    Parameters
    ----------
    size
        Channels of a window, at least 1.
    alpha, beta, k
        See above. As in Caffe and torch `alpha` is divided by `size`; Krizhevsky et al. do not divide, so that
        their ``1e-4`` over 5 channels is ``5e-4`` here.

    Raises
    ------
    ValueError
        For a size below 1, a negative `alpha`, or `beta` or `k` that are not positive.

    Notes
    -----
    Input and output ``(N, *spatial, C)`` have the same cut in samples and space; every rank has all channels.
    Communication: none. Only the input is stored: backward computes `d` again.

    References
    ----------
    Krizhevsky, Sutskever and Hinton, "ImageNet classification with deep convolutional neural networks", 2012,
    Section 3.3. Their window reaches ``size / 2`` channels to both sides. Ours is torch's: for even sizes it has one
    channel less on the upper side.
    """

    recomputation = "pointwise"
    # The squares of neighboring channels are in the cache.
    passes = Passes((1, 1), (2, 2))
    inputs_taken = 1

    def __init__(
        self, size: int = 5, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0, name: str | None = None
    ) -> None:
        super().__init__(name)
        if size < 1:
            raise ValueError(f"size: expected at least 1 channel, got {size!r}")
        if not alpha >= 0:
            raise ValueError(f"alpha: expected a number >= 0, got {alpha!r}")
        if not (beta > 0 and k > 0):
            raise ValueError(f"beta, k: expected numbers > 0, got {beta!r}, {k!r}")
        self.size, self.alpha, self.beta, self.k = size, alpha, beta, k

    def flops(self, *shapes: Shape) -> int:
        # The squares, their sum, one multiply-add, the power (as one), the product.
        return (self.size + 4) * math.prod(shapes[0])

    def lower(self, context: Context) -> Lowered:
        # No communication: the input is copied if it is not packed.
        x = context.gather(0, context.needed(0)).run()
        kernel = context.kernel(partial(_LocalResponseNorm, self), x=x.view, y=context.y)
        context.run(kernel, "forward", timing=context.timing("forward"))

        def backward() -> None:
            kernel.add(dy=context.dy, dx=context.gradient(0))
            context.run(kernel, "backward", timing=context.timing("backward_data"))

        return Lowered(backward)


class _LocalResponseNorm:
    """Kernels that work in chunks ``(positions, C)``, with buffers that stay in the cache and are created at first use.
    """

    def __init__(
        self, layer: LocalResponseNorm, environment: Any, x: Any, y: Any, dy: Any = None, dx: Any = None
    ) -> None:
        self.layer, channels = layer, x.shape[-1]
        rows: list[Any] = [None if a is None else a.reshape(-1, channels) for a in (x, y, dy, dx)]
        self.x, self.y, self.dy, self.dx = rows
        self._work = Workspace(environment.kernels.device)

    @reads("x")
    @writes("y")
    def forward(self) -> None:
        for part in chunks(self.x.shape[0], self.x.shape[1], self._work):
            piece = widened(self.x[part], self._work, "x")
            d = self._denominator(piece)
            np.power(d, -self.layer.beta, out=d)
            np.multiply(piece, d, out=self.y[part])

    def _denominator(self, x: Any) -> Any:
        """Return ``d`` of the formula, in a buffer."""
        d, squares = (buffer(self._work, k, x.shape, x.dtype) for k in ("d", "squares"))
        np.multiply(x, x, out=squares)
        add_windows(squares, self.layer.size // 2, (self.layer.size - 1) // 2, out=d)
        d *= self.layer.alpha / self.layer.size
        d += self.layer.k
        return d

    @reads("x", "dy")
    @writes("dx")
    def backward(self) -> None:
        for part in chunks(self.x.shape[0], self.x.shape[1], self._work):
            x, dy, dx = (widened(a[part], self._work, n) for a, n in ((self.x, "x"), (self.dy, "dy"), (self.dx, "dx")))
            self._backward(x, dy, dx, self.dx[part])

    def _backward(self, x: Any, dy: Any, dx: Any, out: Any) -> None:
        layer = self.layer
        d = self._denominator(x)
        power, sums = (buffer(self._work, k, x.shape, x.dtype) for k in ("power", "sums"))
        np.power(d, -layer.beta, out=power)
        np.multiply(dy, power, out=dx)
        # dy * x * d ** (-beta - 1), summed over the windows that hold a channel: the reversed windows.
        np.divide(dx, d, out=power)
        power *= x
        add_windows(power, (layer.size - 1) // 2, layer.size // 2, out=sums)
        sums *= x
        sums *= 2 * layer.beta * layer.alpha / layer.size
        np.subtract(dx, sums, out=out)

    def close(self) -> None:
        self._work.clear()


def add_windows(array: Any, before: int, after: int, out: Any) -> None:
    """Compute ``out[:, c] = sum(array[:, c - before : c + after + 1])``, truncated at the first and the last channel.

    >>> out = np.empty((1, 4))
    >>> add_windows(np.array([[1.0, 2.0, 3.0, 4.0]]), 1, 0, out)
    >>> out
    array([[1., 3., 5., 7.]])
    """
    channels = array.shape[1]
    np.copyto(out, array)
    for shift in range(1, min(before, channels - 1) + 1):
        out[:, shift:] += array[:, :-shift]
    for shift in range(1, min(after, channels - 1) + 1):
        out[:, :-shift] += array[:, shift:]
