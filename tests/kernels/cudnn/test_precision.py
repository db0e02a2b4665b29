"""Tests of the engines that each precision permits."""

import numpy as np
import pytest

from halograd.kernels import KernelError, get_backend
from halograd.kernels.cudnn.graphs import Arithmetic
from tests.kernels.geometries import CASES

from .on_device import BOUNDS


def test_strict_float32_refuses_rounded_factors():
    notes = Arithmetic().refused("float32")
    assert {"TENSOR_CORE", "DOWN_CONVERT_INPUTS", "FFT", "WINOGRAD"} <= set(notes) and "NONDETERMINISTIC" not in notes
    assert Arithmetic("tf32").refused("float32") == ()


def test_sixteen_bits_are_summed_in_float32():
    for dtype in ("float16", "bfloat16"):
        assert Arithmetic().refused(dtype) == ("REDUCED_PRECISION_REDUCTION",)
        assert Arithmetic("tf32").compute_type(dtype) == 68
    assert Arithmetic().refused("float64") == ()


def test_deterministic_mode_refuses_atomic_sums_of_every_dtype():
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        assert Arithmetic("strict", True).refused(dtype)[-1] == "NONDETERMINISTIC"


def test_arithmetic_of_matrix_products():
    assert Arithmetic().compute_type("float32") == 68 and Arithmetic("tf32").compute_type("float32") == 77
    assert Arithmetic("tf32").compute_type("float64") == 70


def truncated(a):
    """Return values that are truncated from float32 to TF32, without rounding."""
    return (a.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def test_the_bound_of_tf32_is_that_of_an_engine_that_truncates():
    """The error of engines that truncate to TF32 is within the bound, but above 1e-3; rounding would halve it."""
    worst, (case,) = 0.0, (c for c in CASES if c.name == "depthwise x2")
    xs, ws, _, ys = case.shapes
    with get_backend("numpy") as numpy:
        for seed in range(10):
            random = np.random.default_rng(seed)
            x, w = (random.standard_normal(shape).astype(np.float32).astype(np.float64) for shape in (xs, ws))
            exact, found = np.empty(ys), np.empty(ys)
            numpy.conv_forward(x, w, None, exact, case.geometry)()
            numpy.conv_forward(truncated(x), truncated(w), None, found, case.geometry)()
            worst = np.maximum(worst, np.abs(found - exact).max() / np.abs(exact).max())  # NaN stays NaN
    assert 1e-3 < worst <= BOUNDS["tf32"]


def test_unknown_precision_is_refused():
    with pytest.raises(
        KernelError, match=r"^expected a precision out of strict, tf32, got 'bf16'; choose one \(float16"
    ):
        Arithmetic("bf16")


def test_what_the_log_says():
    strict, fast = Arithmetic().describe("float32"), Arithmetic("tf32").describe("float32")
    assert strict == 'float32 without tensor cores (backend.precision = "tf32" to use them: factors of 11 bits)'
    assert fast.startswith("float32 on tensor cores (TF32: ") and 'backend.precision = "strict"' in fast
    assert {Arithmetic(p).describe(d) for p in ("strict", "tf32") for d in ("float64", "bfloat16", "float16")} == {""}
