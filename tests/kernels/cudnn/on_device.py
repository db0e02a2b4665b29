"""Convolutions and dense layers on the device of a backend, compared with direct loops in float64."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from halograd.kernels import Backend, BatchNormArrays
from halograd.kernels.cudnn import sums
from halograd.kernels.kernel import BatchNormTraining
from tests.kernels import reference
from tests.kernels.geometries import Case
from tests.kernels.reference import RELU
from tests.kernels.test_attention import Case as AttentionCase
from tests.kernels.test_attention import expected

DTYPES = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
#: Largest error relative to the largest element, by the precision of factors and results.
BOUNDS = {"float64": 1e-12, "strict": 1e-5, "tf32": 2e-3, "float16": 2e-3, "bfloat16": 1e-2}


class OnDevice:
    """Factory of device arrays whose values are drawn on the host."""

    def __init__(self, backend: Backend, dtype: str, seed: int = 0) -> None:
        self.backend, self.dtype = backend, DTYPES[dtype]
        self._random = np.random.default_rng(seed)

    def draw(self, *shape: int):
        """Return standard normal values on the device, and the same values in float64 on the host."""
        host = self._random.standard_normal(shape).astype(self.dtype)
        return self.backend.xp.asarray(host), host.astype(np.float64)

    def poisoned(self, *shape: int):
        """Return an output array filled with NaN, which remains where a kernel does not write."""
        return self.backend.xp.asarray(np.full(shape, np.nan, self.dtype))


def to_host(array) -> np.ndarray:
    """Return a device or host array as float64 on the host; waits for the device."""
    return (array.get() if hasattr(array, "get") else np.asarray(array)).astype(np.float64)


def error(got, expected: np.ndarray) -> float:
    """Return the largest error relative to the largest element; NaN counts as infinite."""
    difference = np.abs(to_host(got) - expected)
    largest = max(float(np.abs(expected).max(initial=0)), 1e-30)
    return float("inf") if np.isnan(difference).any() else float(difference.max(initial=0)) / largest


def convolution_errors(backend: Backend, case: Case, dtype: str) -> dict[str, float]:
    """Return relative errors of a forward kernel with bias and ReLU, and of both gradients."""
    a, g, (xs, ws, bs, ys) = OnDevice(backend, dtype), case.geometry, case.shapes
    (x, x64), (w, w64), (b, b64), (dy, dy64) = a.draw(*xs), a.draw(*ws), a.draw(*bs), a.draw(*ys)
    y, dx, dw, db = a.poisoned(*ys), a.poisoned(*xs), a.poisoned(*ws), a.poisoned(*bs)
    kernels = [
        backend.conv_forward(x, w, b, y, g, RELU),
        backend.conv_backward_data(dy, w, dx, g),
        backend.conv_backward_filter(x, dy, dw, db, g),
    ]
    for kernel in kernels:
        kernel()
    found = {
        "y": error(y, np.maximum(reference.conv(x64, w64, b64, g, ys), 0)),
        "dx": error(dx, reference.conv_data(dy64, w64, g, xs)),
        "dw": error(dw, reference.conv_filter(x64, dy64, g, ws)),
        "db": error(db, dy64.sum(axis=tuple(range(dy64.ndim - 1)))),
    }
    for kernel in kernels:
        kernel.close()
    return found


def sums_errors(backend: Backend, case: Case, dtype: str) -> dict[str, float]:
    """Return relative errors of convolutions with the sums of a norm, in one plan, after two runs."""
    a, g, (xs, ws, bs, ys) = OnDevice(backend, dtype), case.geometry, case.shapes
    (x, x64), (w, w64), (b, b64), (dy, dy64), (z, z64) = (a.draw(*shape) for shape in (xs, ws, bs, ys, xs))
    y, dx, channels = a.poisoned(*ys), a.poisoned(*xs), xs[-1]
    totals, both = (backend.zeros((2, n), "float64") for n in (ys[-1], channels))
    flat = z64.reshape(-1, channels)
    numbers = {"gamma": np.linspace(0.5, 2, channels), "beta": np.linspace(-1, 1, channels)}
    numbers |= {"mean": flat.mean(0), "var": flat.var(0)}
    vectors = {name: backend.xp.asarray(array.astype(np.float32)) for name, array in numbers.items()}
    gradients = {name: backend.zeros((channels,), "float32") for name in ("dgamma", "dbeta")}
    training = BatchNormTraining(len(flat), **gradients)
    norm = BatchNormArrays(z, z, dx, None, **vectors, sums=both, means=both, eps=1e-5)
    norm = replace(norm, activation=RELU, training=training)
    engine = backend._engine
    kernels = [sums.forward(engine, x, w, b, y, totals, g)[1](), sums.backward_data(engine, dy, w, g, norm)[1]()]
    for kernel in kernels * 2:
        kernel()
    xhat = (flat - numbers["mean"]) / np.sqrt(numbers["var"] + 1e-5)
    image = reference.conv(x64, w64, b64, g, ys)
    masked = reference.conv_data(dy64, w64, g, xs).reshape(-1, channels)
    masked *= xhat * numbers["gamma"] + numbers["beta"] > 0
    rows = image.reshape(-1, ys[-1])
    expected = np.stack([masked.sum(0), (masked * xhat).sum(0)])
    found = {
        "y": error(y, image),
        "sums": error(totals, np.stack([rows.sum(0), (rows**2).sum(0)])),
        # An element at which the ReLU begins is on either side of it.
        "dx": float(np.mean(np.abs(to_host(dx).reshape(masked.shape) - masked)) / np.abs(masked).max()),
        "gradient sums": error(both, expected),
        "dgamma": error(gradients["dgamma"], expected[1]),
        "dbeta": error(gradients["dbeta"], expected[0]),
    }
    for kernel in kernels:
        kernel.close()
    return found


def attention_errors(backend: Backend, case: AttentionCase, dtype: str) -> tuple[dict[str, float], list[str]]:
    """Return relative errors of an attention and its gradients, and the implementations of both kernels.

    The keys come in two blocks if there is one axis without bias: the second one is merged.
    """
    a = OnDevice(backend, dtype)
    shapes = {name: array.shape for name, array in case.draw(_Shapes()).items() if array is not None}
    drawn = {name: a.draw(*shape) for name, shape in shapes.items()}
    x = {name: drawn.get(name, (None, None))[0] for name in ("q", "k", "v", "dy", "bias")}
    want = expected(case, {name: drawn.get(name, (None, None))[1] for name in x})
    wide = "float64" if dtype == "float64" else "float32"
    y, dq = a.poisoned(*x["dy"].shape), a.poisoned(*x["q"].shape)
    lse = backend.xp.asarray(np.full(want["lse"].shape, np.nan, wide))
    dbias = a.poisoned(*x["bias"].shape) if case.bias else None
    blocks, forward, backward = [((0, case.keys[0]), slice(None))], [], []
    if len(case.keys) == 1 and not case.bias and case.keys == case.queries:
        half = case.keys[0] // 2
        blocks = [((0, half), slice(0, half)), ((half, case.keys[0]), slice(half, None))]
    parts = []
    for i, (interval, rows) in enumerate(blocks):
        k, v = (x[name][:, rows].copy() for name in "kv")
        dk, dv = a.poisoned(*k.shape), a.poisoned(*v.shape)
        g = case.geometry(keys=(interval, *((0, n) for n in case.keys[1:])), merge=i > 0)
        forward.append(backend.attention_forward(x["q"], k, v, x["bias"], y, lse, g))
        arrays = (x["dy"], x["q"], k, v, x["bias"], y, lse, dq, dk, dv, dbias)
        backward.append(backend.attention_backward(*arrays, g))
        parts.append((dk, dv))
    for kernel in (*forward, *backward):
        kernel()
    found = {"y": error(y, want["y"]), "lse": error(lse, want["lse"]), "dq": error(dq, want["dq"])}
    for i, name in enumerate(("dk", "dv")):
        found[name] = error(np.concatenate([to_host(part[i]) for part in parts], axis=1), want[name])
    if case.bias:
        found["dbias"] = error(dbias, want["dbias"])
    impls = [kernel.impl for kernel in (*forward, *backward)]
    for kernel in (*forward, *backward):
        kernel.close()
    return found, impls


class _Shapes:
    """Source of arrays of which only the shapes are used."""

    def draw(self, *shape: int) -> np.ndarray:
        return np.empty(shape, np.bool_)


def dense_errors(backend: Backend, dtype: str) -> dict[str, float]:
    """Return relative errors of a dense layer and its gradients."""
    a = OnDevice(backend, dtype)
    (x, x64), (w, w64), (b, b64), (dy, dy64) = a.draw(33, 70), a.draw(45, 70), a.draw(45), a.draw(33, 45)
    y, dx, dw, db = a.poisoned(33, 45), a.poisoned(33, 70), a.poisoned(45, 70), a.poisoned(45)
    backend.dense_forward(x, w, b, y)()
    backend.dense_backward_data(dy, w, dx)()
    backend.dense_backward_filter(x, dy, dw, db)()
    return {
        "y": error(y, x64 @ w64.T + b64),
        "dx": error(dx, dy64 @ w64),
        "dw": error(dw, dy64.T @ x64),
        "db": error(db, dy64.sum(axis=0)),
    }
