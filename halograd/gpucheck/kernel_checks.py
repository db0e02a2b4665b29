"""Every kernel of a backend against NumPy's in float64, on geometries that go wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from halograd.device import is_low
from halograd.gpucheck.cases import CONVOLUTIONS, POOLINGS
from halograd.gpucheck.report import Report
from halograd.kernels import ACTIVATIONS, Backend, Geometry, get_backend

__all__ = ["BOUNDS", "check_kernels"]

#: Largest error relative to the largest number, by how numbers are computed.
BOUNDS = {"float64": 1e-12, "strict": 1e-5, "tf32": 1e-3, "float16": 2e-3, "bfloat16": 1e-2}
SAMPLES = 2

Outcome = tuple[str, Mapping[str, float]]


class _Pair:
    """The same kernels on the backend and in float64 on the host: arrays by name on both sides.

    What goes in is rounded to the dtype first, so that errors are the kernel's own.
    """

    def __init__(self, backend: Backend, reference: Backend, dtype: np.dtype, bound: float) -> None:
        self.backend, self.reference, self.dtype, self.bound = backend, reference, dtype, bound
        self._random = np.random.default_rng(0)
        self.here: dict[str, Any] = {}
        self.there: dict[str, Any] = {}

    def draw(self, name: str, shape: tuple[int, ...], dtype: Any = None, low: float | None = None) -> None:
        """Random numbers, normal or uniform from `low` on."""
        values = self._random.standard_normal(shape) if low is None else self._random.uniform(low, low + 1, shape)
        array = self.backend.empty(shape, dtype or self.dtype)
        self.backend.device.assign(array, values.astype(array.dtype))
        self.there[name], self.here[name] = array, values.astype(array.dtype).astype(np.float64)

    def room(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> None:
        """An output, NaN until it is written."""
        array = self.backend.empty(shape, dtype or self.dtype)
        array.fill(np.nan)
        self.there[name], self.here[name] = array, np.full(shape, np.nan)

    def run(self, build: Callable[[Backend, dict[str, Any]], Any]) -> None:
        """Build and run the kernels on both sides."""
        for backend, arrays in ((self.reference, self.here), (self.backend, self.there)):
            kernels = build(backend, arrays)
            for kernel in kernels:
                kernel()
            backend.synchronize()
            for kernel in kernels:
                kernel.close()

    def compare(self, *names: str) -> Outcome:
        """The largest relative error of these outputs."""
        errors = {}
        for name in names:
            found = self.backend.device.to_host(self.there[name]).astype(np.float64)
            scale = max(1e-30, float(np.abs(self.here[name]).max(initial=0)))
            errors[name] = float(np.abs(found - self.here[name]).max(initial=0)) / scale
            if not errors[name] <= self.bound:
                raise AssertionError(f"{name} errs by {errors[name]:.2e}, allowed are {self.bound:.0e}")
        return f"{max(errors.values(), default=0.0):.1e}", {}


def check_kernels(backend: Backend, report: Report, precision: str, dtype: Any) -> None:
    """Check all kernels in one precision. Local.

    Parameters
    ----------
    precision
        A key of `BOUNDS`.
    dtype
        Of the arrays.
    """
    group = f"kernels {precision}"
    with get_backend("numpy") as reference:

        def check(name: str, run: Callable[..., Outcome], *arguments: Any) -> None:
            def fresh() -> Outcome:
                return run(_Pair(backend, reference, np.dtype(dtype), BOUNDS[precision]), *arguments)

            report.check(group, name, fresh)

        for name, geometry, spatial, channels, filters in CONVOLUTIONS:
            check(f"convolution {name}", _convolution, geometry, spatial, channels, filters)
        for name, geometry, spatial in POOLINGS:
            for kind in ("max", "average", "average of all"):
                check(f"{kind} pool {name}", _pool, geometry, spatial, kind)
        for channels in (3, 5, 64):
            for local in (True, False):
                for relu in (False, True):
                    what = f"batch norm {channels}{' local' if local else ''}{' relu' if relu else ''}"
                    check(what, _batch_norm, channels, local, relu)
        for kind in ACTIVATIONS:
            check(kind, _activation, kind)
        for terms in (1, 2, 3):
            check(f"sum of {terms}", _add, terms)
        for shape in ((4, 7, 5), (64, 256, 100)):
            check(f"dense {shape}", _dense, *shape)
        if is_low(dtype):  # as in training: gradients of parameters in float32
            for name, geometry, spatial, channels, filters in CONVOLUTIONS[::4]:
                check(f"convolution {name}, dw float32", _convolution, geometry, spatial, channels, filters, "float32")
            check("dense, dw float32", _dense, 64, 256, 100, "float32")


def _convolution(
    p: _Pair, geometry: Geometry, spatial: tuple[int, ...], channels: int, filters: int, gradients: str | None = None
) -> Outcome:
    outputs = geometry.output_shape(spatial)
    p.draw("x", (SAMPLES, *spatial, channels))
    p.draw("w", (filters, *geometry.kernel, channels // geometry.groups))
    p.draw("b", (filters,))
    p.draw("dy", (SAMPLES, *outputs, filters))
    for name, like in (("y", "dy"), ("relu", "dy"), ("dx", "x")):
        p.room(name, p.here[like].shape)
    for name, like in (("dw", "w"), ("db", "b")):
        p.room(name, p.here[like].shape, gradients)

    def build(k: Backend, a: dict[str, Any]) -> list[Any]:
        return [
            k.conv_forward(a["x"], a["w"], None, a["y"], geometry),
            k.conv_forward(a["x"], a["w"], a["b"], a["relu"], geometry, relu=True),
            k.conv_backward_data(a["dy"], a["w"], a["dx"], geometry),
            k.conv_backward_filter(a["x"], a["dy"], a["dw"], a["db"], geometry),
        ]

    p.run(build)
    return p.compare("y", "relu", "dx", "dw", "db")


def _pool(p: _Pair, geometry: Geometry, spatial: tuple[int, ...], kind: str) -> Outcome:
    outputs = geometry.output_shape(spatial)
    p.draw("x", (SAMPLES, *spatial, 6))
    p.draw("dy", (SAMPLES, *outputs, 6))
    p.room("y", p.here["dy"].shape)
    p.room("dx", p.here["x"].shape)

    def build(k: Backend, a: dict[str, Any]) -> tuple[Any, Any]:
        arrays = (a["x"], a["y"], a["dy"], a["dx"], geometry)
        return k.max_pool(*arrays) if kind == "max" else k.average_pool(*arrays, kind == "average of all")

    p.run(build)
    return p.compare("y", "dx")


def _batch_norm(p: _Pair, channels: int, local: bool, relu: bool) -> Outcome:
    shape, count = (SAMPLES, 9, 7, channels), SAMPLES * 63
    for name in ("x", "dy"):
        p.draw(name, shape)
    for name in ("gamma", "beta"):
        p.draw(name, (channels,), "float32", low=0.5)
    # As they would be: near those of x.
    p.draw("mean", (channels,), "float32", low=-0.5)
    p.draw("var", (channels,), "float32", low=0.5)
    p.draw("means", (2, channels), "float64", low=-0.5)
    for name in ("y", "dx"):
        p.room(name, shape)
    p.room("sums", (2, channels), "float64")

    def build(k: Backend, a: dict[str, Any]) -> list[Any]:
        names = ("x", "y", "dy", "dx", "gamma", "beta", "mean", "var", "sums", "means")
        arguments: Any = (*(a[n] for n in names), 1e-5, relu, local)
        made = k.batch_norm(*arguments)
        return [made.forward, made.backward_sums, *([] if local else [made.backward_data])]

    p.run(build)
    for side in (p.here, p.there):
        side["sums"] = side["sums"] / count
    return p.compare("y", "dx", *(("mean", "var") if local else ("sums",)))


def _activation(p: _Pair, kind: str) -> Outcome:
    for name in ("x", "dy"):
        p.draw(name, (SAMPLES, 6, 5, 7))
    for name in ("y", "dx"):
        p.room(name, (SAMPLES, 6, 5, 7))
    p.run(lambda k, a: k.activation(kind, a["x"], a["y"], a["dy"], a["dx"], 0.1))
    return p.compare("y", "dx")


def _add(p: _Pair, terms: int) -> Outcome:
    for i in range(terms):
        p.draw(f"x{i}", (SAMPLES, 6, 5, 7))
    p.room("y", (SAMPLES, 6, 5, 7))
    p.run(lambda k, a: [k.add([a[f"x{i}"] for i in range(terms)], a["y"], relu=True)])
    return p.compare("y")


def _dense(p: _Pair, samples: int, features: int, units: int, gradients: str | None = None) -> Outcome:
    p.draw("x", (samples, features))
    p.draw("w", (units, features))
    p.draw("b", (units,))
    p.draw("dy", (samples, units))
    for name, like in (("y", "dy"), ("dx", "x")):
        p.room(name, p.here[like].shape)
    for name, like in (("dw", "w"), ("db", "b")):
        p.room(name, p.here[like].shape, gradients)

    def build(k: Backend, a: dict[str, Any]) -> list[Any]:
        return [
            k.dense_forward(a["x"], a["w"], a["b"], a["y"]),
            k.dense_backward_data(a["dy"], a["w"], a["dx"]),
            k.dense_backward_filter(a["x"], a["dy"], a["dw"], a["db"]),
        ]

    p.run(build)
    return p.compare("y", "dx", "dw", "db")
