"""Layer normalisation over the channels of each position: pointwise, in chunks that stay in the cache."""

from __future__ import annotations

from typing import Any

import numpy as np

from halograd.layers.binding import Binding
from halograd.layers.chunks import Work, buffer, chunks, widened
from halograd.layers.operator import Operator

__all__ = ["ChannelNormOperator"]


class ChannelNormOperator(Operator):
    """``y = gamma * (x - mean) / sqrt(var + eps) + beta`` with statistics over channels. No communication.

    Backward computes mean and variance again, which costs less than to store and load them.
    """

    def __init__(self, b: Binding, eps: float, relu: bool) -> None:
        self.b, self.eps, self.relu = b, eps, relu
        self.x = b.gather(0, b.clipped(0))
        self._work = Work(b.kernels.device)
        channels = b.output.layout.shape[-1]
        self.rows = self.x.array.reshape(-1, channels)
        self.y = b.output.array.reshape(-1, channels)
        self.sums = b.kernels.zeros((2, channels), np.dtype("float64"))
        self.gamma, self.beta = b.params.get("gamma"), b.params.get("beta")
        self.dx: Any = None
        self.kernel: Any = None
        self.adjoint: Any = None
        if b.kernels.cuda is not None and self.rows.size:
            self.kernel, _ = self._fuse(None, None)

    def _fuse(self, dy: Any, dx: Any) -> tuple[Any, Any]:
        """The backend's kernels."""
        grads = (None, None)
        if dy is not None and self.gamma is not None:
            grads = (self.b.grads["gamma"], self.b.grads["beta"])
        arrays = (self.rows, self.y, dy, dx, self.gamma, self.beta, *grads)
        return self.b.kernels.cuda.channel_norm(*arrays, self.eps, self.relu)

    def forward(self) -> None:
        self.x.start()
        self.x.finish()
        if self.kernel is not None:
            self.kernel()
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

    def bind_backward(self) -> None:
        b = self.b
        shape = self.rows.shape
        self.dy = b.output.dy.reshape(shape)
        if b.needs_gradient(0):
            self.dx = b.gradient(0).reshape(shape)
        if self.kernel is not None:
            self.kernel.close()
            self.kernel, self.adjoint = self._fuse(self.dy, self.dx)

    def backward(self) -> None:
        if self.adjoint is not None:
            self.adjoint()
            return
        self.sums.fill(0)
        for part in chunks(self.rows.shape[0], self.rows.shape[1], self._work):
            self._backward_chunk(part)
        if self.gamma is not None and self.gamma.size:  # a rank that the layer does without holds none
            np.copyto(self.b.grads["beta"], self.sums[0], casting="same_kind")
            np.copyto(self.b.grads["gamma"], self.sums[1], casting="same_kind")

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
        self.x.close()
        self._work.clear()
        for kernel in (self.kernel, self.adjoint):
            if kernel is not None:
                kernel.close()
