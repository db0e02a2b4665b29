"""Direct loops in float64, with which every backend is compared. They share no code with the backends."""

from __future__ import annotations

import itertools
import math

import numpy as np

from halograd.kernels import FusedActivation, Geometry

from .saturation import EXACT, Long


def windows(spatial, geometry: Geometry):
    """Yield all triples (output index, tap index, input index) whose input is inside an array of extents `spatial`."""
    outputs = []
    for n, (lo, hi), k, s, d in zip(spatial, geometry.padding, geometry.kernel, geometry.stride, geometry.dilation):
        count = 0
        while count * s + d * (k - 1) < n + lo + hi:
            count += 1
        outputs.append(count)
    for o in itertools.product(*map(range, outputs)):
        for t in itertools.product(*map(range, geometry.kernel)):
            i = tuple(
                a * s - lo + b * d
                for a, b, s, d, (lo, _) in zip(o, t, geometry.stride, geometry.dilation, geometry.padding)
            )
            if all(0 <= a < n for a, n in zip(i, spatial)):
                yield o, t, i


def conv(x, w, b, geometry: Geometry, y_shape):
    """Return a convolution, computed tap by tap."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    y = np.zeros(y_shape)
    groups = geometry.groups
    c, k = x.shape[-1] // groups, w.shape[0] // groups
    for o, t, i in windows(x.shape[1:-1], geometry):
        for g in range(groups):
            part = x[(slice(None), *i, slice(g * c, (g + 1) * c))]
            y[(slice(None), *o, slice(g * k, (g + 1) * k))] += part @ w[(slice(g * k, (g + 1) * k), *t)].T
    return y if b is None else y + b.astype(np.float64)


def conv_data(dy, w, geometry: Geometry, x_shape):
    """Return the gradient of a convolution with respect to its input."""
    dy, w = dy.astype(np.float64), w.astype(np.float64)
    dx = np.zeros(x_shape)
    groups = geometry.groups
    c, k = x_shape[-1] // groups, w.shape[0] // groups
    for o, t, i in windows(x_shape[1:-1], geometry):
        for g in range(groups):
            part = dy[(slice(None), *o, slice(g * k, (g + 1) * k))]
            dx[(slice(None), *i, slice(g * c, (g + 1) * c))] += part @ w[(slice(g * k, (g + 1) * k), *t)]
    return dx


def conv_filter(x, dy, geometry: Geometry, w_shape):
    """Return the gradient of a convolution with respect to its weights."""
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    dw = np.zeros(w_shape)
    groups = geometry.groups
    c, k = x.shape[-1] // groups, w_shape[0] // groups
    for o, t, i in windows(x.shape[1:-1], geometry):
        for g in range(groups):
            part = dy[(slice(None), *o, slice(g * k, (g + 1) * k))]
            dw[(slice(g * k, (g + 1) * k), *t)] += part.T @ x[(slice(None), *i, slice(g * c, (g + 1) * c))]
    return dw


def max_pool(x, dy, geometry: Geometry, y_shape):
    """Return max pooling and its gradient, which goes to the first of equal elements, also of -inf."""
    y = np.full(y_shape, -np.inf)
    chosen = np.empty(y_shape, object)
    for o, _, i in windows(x.shape[1:-1], geometry):
        for n in range(x.shape[0]):
            for c in range(x.shape[-1]):
                if chosen[(n, *o, c)] is None or x[(n, *i, c)] > y[(n, *o, c)]:
                    y[(n, *o, c)] = x[(n, *i, c)]
                    chosen[(n, *o, c)] = i
    dx = np.zeros(x.shape)
    for index in np.ndindex(*y_shape):
        if chosen[index] is not None:
            dx[(index[0], *chosen[index], index[-1])] += dy[index]
    return y, dx


def average_pool(x, dy, geometry: Geometry, y_shape, include: bool):
    """Return average pooling and its gradient."""
    total, count = np.zeros(y_shape), np.zeros(y_shape)
    for o, _, i in windows(x.shape[1:-1], geometry):
        total[(slice(None), *o)] += x[(slice(None), *i)]
        count[(slice(None), *o)] += 1
    divisor = np.full(y_shape, float(math.prod(geometry.kernel))) if include else np.maximum(count, 1)
    dx = np.zeros(x.shape)
    for o, _, i in windows(x.shape[1:-1], geometry):
        dx[(slice(None), *i)] += dy[(slice(None), *o)] / divisor[(slice(None), *o)]
    return total / divisor, dx


#: No activation; one that oneDNN fuses into norms; one differentiated by its output; one by its input.
FUSED = [None, FusedActivation("relu"), FusedActivation("leaky_relu", 0.1), FusedActivation("silu")]
RELU = FUSED[1]


def activated(f: FusedActivation | None, z):
    """Return value and derivative of a fused activation; of the identity for None."""
    return (z, np.ones(z.shape)) if f is None else activation(f.kind, z, f.alpha)


def batch_norm(x, dy, gamma, beta, eps: float, f: FusedActivation | None):
    """Return all results of a batch norm with the statistics of `x`."""
    x, dy, gamma, beta = (a.astype(np.float64) for a in (x, dy, gamma, beta))
    axes = tuple(range(x.ndim - 1))
    mean, var = x.mean(axis=axes), x.var(axis=axes)
    xhat = (x - mean) / np.sqrt(var + eps)
    y, slope = activated(f, gamma * xhat + beta)
    masked = slope * dy
    sums = np.stack([masked.sum(axis=axes), (masked * xhat).sum(axis=axes)])
    count = x.size // x.shape[-1]
    dx = gamma / np.sqrt(var + eps) * (masked - sums[0] / count - xhat * sums[1] / count)
    return {"mean": mean, "var": var, "y": y, "sums": sums, "dx": dx}


def activation(kind: str, x, alpha: float):
    """Return value and derivative of an activation, by the closed forms of `saturation.py`."""
    with np.errstate(all="ignore"):
        value, slope = EXACT[kind](x.astype(Long), Long(alpha))
    return value.astype(np.float64), slope.astype(np.float64)
