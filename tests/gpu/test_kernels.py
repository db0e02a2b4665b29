"""Tests of every kernel of a backend against NumPy's in float64: on the double, and on a GPU in every precision.

Convolutions of all geometries against direct loops: tests/kernels/cudnn/test_on_gpu.py. Our own kernels alone, losses
and optimizers among them: tests/kernels/cuda.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from halograd.device import is_low
from halograd.kernels import ACTIVATIONS, Backend, FusedActivation, Geometry, get_backend
from halograd.kernels.kernel import BatchNormArrays, Kernel, KernelError
from tests.gpu.place import gpu_count, only_gpu
from tests.kernels.cudnn.on_device import BOUNDS, DTYPES
from tests.kernels.geometries import CASES, Case
from tests.kernels.reference import FUSED
from tests.support.fake_device import FakeBackend

SAMPLES = 2
POOLINGS: dict[str, tuple[Geometry, tuple[int, ...]]] = {
    "2x2": (Geometry.of((2, 2), 2), (6, 8)),
    "3x3 stride 2": (Geometry.of((3, 3), 2, 1), (9, 8)),
    "3x3, asymmetric": (Geometry.of((3, 3), 2, ((1, 0), (0, 1))), (7, 8)),
    "dilation 2": (Geometry.of((3, 3), 1, 2, dilation=2), (7, 8)),
    "3-D": (Geometry.of((2, 3, 2), (2, 2, 2), ((0, 0), (1, 1), (0, 0))), (4, 7, 6)),
}
#: On the double, which computes float32 as NumPy does; on a GPU.
PRECISIONS = {"double": ("strict", "float16", "bfloat16"), "gpu": ("strict", "tf32", "float64", "float16", "bfloat16")}


class Pair:
    """The same kernels on the backend and in float64 on the host, with arrays by name on both sides.

    Inputs are rounded to the dtype first, so that all errors are the kernel's own.
    """

    def __init__(self, backend: Backend, reference: Backend, dtype: np.dtype, bound: float) -> None:
        self.backend, self.reference, self.dtype, self.bound = backend, reference, dtype, bound
        self._random = np.random.default_rng(0)
        self.here: dict[str, Any] = {}
        self.there: dict[str, Any] = {}

    def draw(self, name: str, shape: tuple[int, ...], dtype: Any = None, low: float | None = None) -> None:
        """Draw random values, normal or uniform from `low` on, and store them on both sides."""
        values = self._random.standard_normal(shape) if low is None else self._random.uniform(low, low + 1, shape)
        array = self.backend.empty(shape, dtype or self.dtype)
        self.backend.device.assign(array, values.astype(array.dtype))
        self.there[name], self.here[name] = array, values.astype(array.dtype).astype(np.float64)

    def room(self, name: str, shape: tuple[int, ...], dtype: Any = None) -> None:
        """Allocate an output filled with NaN on both sides."""
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

    def compare(self, *names: str) -> None:
        """Raise if the largest relative error of these outputs exceeds the bound."""
        for name in names:
            found = self.backend.device.to_host(self.there[name]).astype(np.float64)
            scale = max(1e-30, float(np.abs(self.here[name]).max(initial=0)))
            error = float(np.abs(found - self.here[name]).max(initial=0)) / scale
            assert error <= self.bound, f"{name} errs by {error:.2e}, allowed are {self.bound:.0e}"


def _convolution(p: Pair, case: Case, gradients: str | None = None) -> None:
    geometry, shapes = case.geometry, case.shapes
    for name, shape in zip(("x", "w", "b", "dy"), shapes):
        p.draw(name, shape)
    for name, like in (("y", "dy"), ("relu", "dy"), ("dx", "x")):
        p.room(name, p.here[like].shape)
    for name, like in (("dw", "w"), ("db", "b")):
        p.room(name, p.here[like].shape, gradients if is_low(p.dtype) else None)

    def build(k: Backend, a: dict[str, Any]) -> list[Any]:
        return [
            k.conv_forward(a["x"], a["w"], None, a["y"], geometry),
            k.conv_forward(a["x"], a["w"], a["b"], a["relu"], geometry, FUSED[1]),
            k.conv_backward_data(a["dy"], a["w"], a["dx"], geometry),
            k.conv_backward_filter(a["x"], a["dy"], a["dw"], a["db"], geometry),
        ]

    if p.dtype.name not in p.backend.conv_dtypes:
        with pytest.raises(KernelError, match=f"got {p.dtype.name}; use float32"):
            build(p.backend, p.there)
        return
    p.run(build)
    p.compare("y", "relu", "dx", "dw", "db")


def _pool(p: Pair, geometry: Geometry, spatial: tuple[int, ...], kind: str) -> None:
    outputs = geometry.output_shape(spatial)
    p.draw("x", (SAMPLES, *spatial, 6))
    p.draw("dy", (SAMPLES, *outputs, 6))
    p.room("y", p.here["dy"].shape)
    p.room("dx", p.here["x"].shape)

    def build(k: Backend, a: dict[str, Any]) -> tuple[Any, Any]:
        arrays = (a["x"], a["y"], a["dy"], a["dx"], geometry)
        return k.max_pool(*arrays) if kind == "max" else k.average_pool(*arrays, kind == "average of all")

    p.run(build)
    p.compare("y", "dx")


def _batch_norm(p: Pair, channels: int, local: bool, f: FusedActivation | None) -> None:
    shape, count = (SAMPLES, 9, 7, channels), SAMPLES * 63
    wide = "float64" if p.dtype == np.float64 else "float32"
    for name in ("x", "dy"):
        p.draw(name, shape)
    for name in ("gamma", "beta"):
        p.draw(name, (channels,), wide, low=0.5)
    # As they would be: near those of x.
    p.draw("mean", (channels,), wide, low=-0.5)
    p.draw("var", (channels,), wide, low=0.5)
    p.draw("means", (2, channels), "float64", low=-0.5)
    for name in ("y", "dx"):
        p.room(name, shape)
    p.room("sums", (2, channels), "float64")

    def build(k: Backend, a: dict[str, Any]) -> list[Any]:
        names = ("x", "y", "dy", "dx", "gamma", "beta", "mean", "var", "sums", "means")
        arguments: Any = (*(a[n] for n in names), 1e-5, f, local)
        made = k.batch_norm(BatchNormArrays(*arguments))
        return [made.forward, made.backward_sums, *([] if local else [made.backward_data])]

    p.run(build)
    for side in (p.here, p.there):
        side["sums"] = side["sums"] / count
    p.compare("y", "dx", *(("mean", "var") if local else ("sums",)))


def _activation(p: Pair, kind: str) -> None:
    for name in ("x", "dy"):
        p.draw(name, (SAMPLES, 6, 5, 7))
    for name in ("y", "dx"):
        p.room(name, (SAMPLES, 6, 5, 7))
    p.run(lambda k, a: k.activation(kind, a["x"], a["y"], a["dy"], a["dx"], 0.1))
    p.compare("y", "dx")


def _add(p: Pair, terms: int) -> None:
    for i in range(terms):
        p.draw(f"x{i}", (SAMPLES, 6, 5, 7))
    p.room("y", (SAMPLES, 6, 5, 7))
    p.run(lambda k, a: [k.add([a[f"x{i}"] for i in range(terms)], a["y"], FUSED[2])])
    p.compare("y")


def _dense(p: Pair, samples: int, features: int, units: int, gradients: str | None = None) -> None:
    p.draw("x", (samples, features))
    p.draw("w", (units, features))
    p.draw("b", (units,))
    p.draw("dy", (samples, units))
    for name, like in (("y", "dy"), ("dx", "x")):
        p.room(name, p.here[like].shape)
    for name, like in (("dw", "w"), ("db", "b")):
        p.room(name, p.here[like].shape, gradients if is_low(p.dtype) else None)

    def build(k: Backend, a: dict[str, Any]) -> list[Any]:
        return [
            k.dense_forward(a["x"], a["w"], a["b"], a["y"]),
            k.dense_backward_data(a["dy"], a["w"], a["dx"]),
            k.dense_backward_filter(a["x"], a["dy"], a["dw"], a["db"]),
        ]

    p.run(build)
    p.compare("y", "dx", "dw", "db")


def checks() -> Iterator[tuple[str, Callable[[Pair], None]]]:
    """Yield name and body of every check."""
    for case in CASES[::6]:
        yield f"convolution {case}", partial(_convolution, case=case)
        yield f"convolution {case}, dw float32", partial(_convolution, case=case, gradients="float32")
    for name, (geometry, spatial) in POOLINGS.items():
        for kind in ("max", "average", "average of all"):
            yield f"{kind} pool {name}", partial(_pool, geometry=geometry, spatial=spatial, kind=kind)
    for channels in (3, 5, 64):
        for local in (True, False):
            for f in FUSED:
                what = f"batch norm {channels}{' local' if local else ''}{f' {f.kind}' if f else ''}"
                yield what, partial(_batch_norm, channels=channels, local=local, f=f)
    for kind in ACTIVATIONS:
        yield kind, partial(_activation, kind=kind)
    for terms in (1, 2, 3):
        yield f"sum of {terms}", partial(_add, terms=terms)
    for shape in ((4, 7, 5), (64, 256, 100)):
        yield f"dense {shape}", partial(_dense, samples=shape[0], features=shape[1], units=shape[2])
    yield "dense, dw float32", partial(_dense, samples=64, features=256, units=100, gradients="float32")


CHECKS = dict(checks())


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((place, precision), marks=[pytest.mark.gpu] * (place == "gpu"), id=f"{place}-{precision}")
        for place in ("double", *["gpu"] * bool(gpu_count()))
        for precision in PRECISIONS[place]
    ],
)
def opened(request) -> Iterator[tuple[Backend, str]]:
    """Return a backend and its precision, opened once per file."""
    place, precision = request.param
    backend = FakeBackend() if place == "double" else get_backend("cudnn", precision=_mode(precision))
    with backend:
        yield backend, precision


def _mode(precision: str) -> str:
    return "tf32" if precision == "tf32" else "strict"


def pair(backend: Backend, precision: str, reference: Backend) -> Pair:
    dtype = DTYPES.get(precision, np.dtype(np.float32))
    return Pair(backend, reference, dtype, BOUNDS[precision])


@pytest.mark.parametrize("name", CHECKS)
def test_kernel(opened, name):
    backend, precision = opened
    with get_backend("numpy") as reference:
        CHECKS[name](pair(backend, precision, reference))


@only_gpu
def test_denormals_of_float32_are_zero():
    """Kernels flush denormals of float32 to zero, as documented in docs/gpu.md."""
    with get_backend("cudnn") as backend:
        small = backend.device.array([1e-40, -1e-40, 2e-38], "float32")
        y = backend.zeros((3,), "float32")
        backend.add([small, small], y)()
        assert backend.device.to_host(y).tolist() == [0, 0, float(np.float32(2e-38) * 2)]


def test_a_kernel_that_is_wrong_is_found():
    with FakeBackend() as backend, get_backend("numpy") as reference:
        right = backend._conv_backward_data

        def wrong(dy, w, dx, geometry):
            kernel = right(dy, w, dx, geometry)
            return Kernel(lambda: (kernel(), dx.__imul__(1 + 1e-4)), "wrong", close=kernel.close)

        backend._conv_backward_data = wrong
        for name in CHECKS:
            if "dw float32" not in name:
                check = pair(backend, "strict", reference)
                if "convolution" in name:
                    with pytest.raises(AssertionError, match="dx errs by"):
                        CHECKS[name](check)
                else:
                    CHECKS[name](check)
