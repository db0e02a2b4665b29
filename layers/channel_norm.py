"""Layer normalisation over the channels of each position: pointwise, in chunks that stay in the cache."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from halograd.layers.chunks import Work, buffer, chunks, widened

if TYPE_CHECKING:
    from halograd.program.context import Context

__all__ = ["lower_channel_norm"]


def lower_channel_norm(context: Context, eps: float, relu: bool) -> Callable[[], None]:
    """``y = gamma * (x - mean) / sqrt(var + eps) + beta`` with statistics over channels. No communication."""
    x = context.gather(0, context.clipped(0))
    sums = context.keep((2, context.output.layout.shape[-1]), "float64", "statistics")
    views = {"x": x.view, "y": context.y, "sums": sums, **context.params}
    kernel = context.kernel(partial(_ChannelNorm, eps, relu), **views)
    x.start()
    x.finish()
    context.run(kernel, "forward", uses=tuple(views), timing=context.timing("forward"))

    def backward() -> None:
        kernel.add(dy=context.dy, dx=context.gradient(0) if context.needs_gradient(0) else None)
        kernel.add(**{f"d{key}": view for key, view in context.grads.items()})
        context.run(kernel, "backward", timing=context.timing("backward_data"))

    return backward


class _ChannelNorm:
    """Chunk by chunk, or the backend's kernels.

    Backward computes mean and variance again, which costs less than to store and load them.
    """

    def __init__(self, eps: float, relu: bool, environment: Any, **arrays: Any) -> None:
        self.eps, self.relu = eps, relu
        get, channels = arrays.get, arrays["sums"].shape[-1]
        rows: dict[str, Any] = dict.fromkeys(("x", "y", "dy", "dx"))
        rows |= {k: a.reshape(-1, channels) for k, a in arrays.items() if k in rows and a is not None}
        self.rows, self.y, self.dy, self.dx = rows.values()
        self.sums: Any = arrays["sums"]
        self.gamma: Any = get("gamma")
        self.beta: Any = get("beta")
        self.dgamma: Any = get("dgamma")
        self.dbeta: Any = get("dbeta")
        self._work = Work(environment.kernels.device)
        self.kernels: tuple[Any, Any] = (None, None)
        if environment.kernels.cuda is not None and self.rows.size:
            grads = (self.dgamma, self.dbeta) if self.gamma is not None else (None, None)
            some = (self.rows, self.y, self.dy, self.dx, self.gamma, self.beta, *grads)
            self.kernels = environment.kernels.cuda.channel_norm(*some, eps, relu)

    def forward(self) -> None:
        if self.kernels[0] is not None:
            self.kernels[0]()
            return
        for part in chunks(self.rows.shape[0], self.rows.shape[1], self._work):
            x, y = widened(self.rows[part], self._work, "x"), widened(self.y[part], self._work, "y")
            self._normalize(x, y)
            if self.gamma is not None:
                y *= self.gamma
                y += self.beta
            if self.relu:
                np.maximum(y, 0, out=y)
            if y.dtype != self.y.dtype:
                np.copyto(self.y[part], y)

    def _normalize(self, x: Any, out: Any) -> Any:
        """`out` = xhat; returns 1 / std per position."""
        mean, std = (buffer(self._work, k, (len(x), 1), x.dtype) for k in ("mean", "std"))
        square = buffer(self._work, "square", x.shape, x.dtype)
        np.mean(x, axis=1, keepdims=True, out=mean)
        np.subtract(x, mean, out=out)
        np.multiply(out, out, out=square)
        np.mean(square, axis=1, keepdims=True, out=std)
        std += self.eps
        np.sqrt(std, out=std)
        np.reciprocal(std, out=std)
        out *= std
        return std

    def backward(self) -> None:
        if self.kernels[1] is not None:
            self.kernels[1]()
            return
        self.sums.fill(0)
        for part in chunks(self.rows.shape[0], self.rows.shape[1], self._work):
            self._backward_chunk(part)
        if self.dgamma is not None and self.dgamma.size:  # a rank that the layer does without holds none
            np.copyto(self.dbeta, self.sums[0], casting="same_kind")
            np.copyto(self.dgamma, self.sums[1], casting="same_kind")

    def _backward_chunk(self, part: slice) -> None:
        x = widened(self.rows[part], self._work, "x")
        xhat, dy, product = (buffer(self._work, k, x.shape, x.dtype) for k in ("xhat", "dy", "product"))
        column = buffer(self._work, "column", x.shape[1:], np.float64)
        mean = buffer(self._work, "mean", (len(x), 1), x.dtype)
        inverse = self._normalize(x, xhat)
        np.copyto(dy, self.dy[part])
        if self.relu:
            dy *= np.greater(self.y[part], 0, out=buffer(self._work, "mask", x.shape, np.bool_))
        self.sums[0] += np.sum(dy, axis=0, dtype=np.float64, out=column)
        np.multiply(dy, xhat, out=product)
        self.sums[1] += np.sum(product, axis=0, dtype=np.float64, out=column)
        if self.dx is None:
            return
        if self.gamma is not None:
            dy *= self.gamma
            product *= self.gamma
        xhat *= np.mean(product, axis=1, keepdims=True, out=mean)
        dy -= np.mean(dy, axis=1, keepdims=True, out=mean)
        dy -= xhat
        np.multiply(dy, inverse, out=self.dx[part])

    def close(self) -> None:
        """Free the backend's kernels."""
        self._work.clear()
        for kernel in self.kernels:
            if kernel is not None:
                kernel.close()
