"""Tests of convolutions with the sums of a batch norm in their epilogue, on doubles; plans: test_planning.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halograd.device import as_dtype
from halograd.kernels import BatchNormArrays, FusedActivation, Geometry
from halograd.kernels.cuda import Boxes
from halograd.kernels.kernel import BatchNormTraining
from halograd.kernels.summed import SummedConvolution
from tests.kernels.conftest import Arrays
from tests.kernels.cuda.host import HostLauncher, compiler

from .fake_cudnn import EngineDouble
from .fake_runtime import device_empty

RELU = FusedActivation("relu")
EPS = 1e-5
#: Geometry, spatial extents of the image, samples, channels of image and output.
CASES = [
    (Geometry.of((3, 3), 1, 1), (5, 4), 2, 16, 8),
    (Geometry.of((3, 3), 1, ((0, -2), (1, 1))), (8, 5), 1, 8, 16),  # rows that no output reads
    (Geometry.of((3, 3, 3), 1, 1), (3, 4, 2), 1, 8, 8),
    (Geometry.of((1,), 1, 0), (6,), 3, 8, 24),
]
FUSED = [EngineDouble("eng7_k24=21", compiled=True), EngineDouble("eng2", builds=False), EngineDouble("eng7")]


@pytest.fixture(scope="module")
def host():
    """Return a launcher that compiles each program once for this file."""
    if compiler() is None:
        pytest.skip("needs g++ to run CUDA kernels on the CPU")
    return HostLauncher()


def engines(machine, seconds):
    """Let graphs with sums have engines of their own, which take `seconds`."""
    plain, found = machine.cudnn.engines, [replace(e, seconds=seconds) for e in FUSED]
    machine.cudnn.engines = lambda: found if machine.cudnn.graphs[-1].sums else plain()


def norm_of(a, x, dy, relu, wide=np.float64):
    """Return the arrays of a norm of `x` with statistics of `x`, and its sums and gradients in NumPy, float64."""
    channels = x.shape[-1]
    flat, gradient = x.astype(np.float64).reshape(-1, channels), dy.astype(np.float64).reshape(-1, channels)
    vectors = {name: a.draw(channels, dtype=np.float32) for name in ("gamma", "beta", "mean", "var")}
    vectors["mean"][...], vectors["var"][...] = flat.mean(0), flat.var(0)
    sums, means = (a.poisoned(2, channels, dtype=wide) for _ in range(2))
    training = BatchNormTraining(len(flat), **{k: a.poisoned(channels, dtype=np.float32) for k in ("dgamma", "dbeta")})
    arrays = BatchNormArrays(x, x, dy, a.poisoned(*x.shape), **vectors, sums=sums, means=means, eps=EPS)
    xhat = (flat - vectors["mean"]) / np.sqrt(vectors["var"].astype(np.float64) + EPS)
    masked = gradient * (xhat * vectors["gamma"] + vectors["beta"] > 0) if relu else gradient
    arrays = replace(arrays, activation=RELU if relu else None, training=training)
    return arrays, np.stack([masked.sum(0), (masked * xhat).sum(0)]), xhat, masked


@pytest.mark.parametrize("seconds", [9e-4, 2e-3], ids=["faster", "slower"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sums_are_those_of_separate_kernels(machine, host, case, dtype, seconds):
    """One plan is taken where it is faster, and gives the sums, the gradients and the output of our two kernels."""
    geometry, extents, samples, channels, outputs = case
    host.empty, machine.boxes, machine.cudnn.accumulates = device_empty, Boxes(host), dtype == "float16"
    engines(machine, seconds)
    with machine.open(autotune=True) as backend:
        a = Arrays(backend, as_dtype(dtype))
        x, w, b = a.draw(samples, *extents, channels), a.draw(outputs, *geometry.kernel, channels), a.draw(outputs)
        shape = (samples, *geometry.output_shape(extents), outputs)
        # Sums that no other rank adds to are float32.
        wide = np.float64 if seconds > 1e-3 or dtype == "float16" else np.float32
        y, plain, sums = a.poisoned(*shape), a.poisoned(*shape), a.poisoned(2, outputs, dtype=wide)
        kernel = backend.conv_forward_sums(x, w, b, y, sums, geometry)
        backend.conv_forward(x, w, b, plain, geometry)()
        for _ in range(2):  # sums of a run do not reach the next one
            kernel()
        assert ("eng7" in kernel.impl) == (seconds < 1e-3) and np.array_equal(y, plain)
        assert ("convert" in kernel.impl) == (seconds < 1e-3 and wide == np.float64), kernel.impl
        assert ("fill" in kernel.impl) == (seconds < 1e-3 and machine.cudnn.accumulates)
        flat = y.astype(np.float64).reshape(-1, outputs)
        scale = np.stack([np.abs(flat).sum(0), (flat**2).sum(0)])
        # The plan adds up results before they are rounded.
        assert (
            np.abs(sums - np.stack([flat.sum(0), (flat**2).sum(0)])) <= np.finfo(as_dtype("float16")).eps * 16 * scale
        ).all()

        dy, dx, plain = a.draw(*shape), a.poisoned(*x.shape), a.poisoned(*x.shape)
        backend.conv_backward_data(dy, w, plain, geometry)()
        for relu in (True, False):
            norm, expected, xhat, masked = norm_of(a, x, plain, relu, wide)
            norm = replace(norm, dy=dx)
            kernel = backend.conv_backward_data_sums(dy, w, geometry, norm)
            for _ in range(2):
                kernel()
            assert ("eng7" in kernel.impl) == (seconds < 1e-3)
            bound = 2**-6 * np.stack([np.abs(masked).sum(0), np.abs(masked * xhat).sum(0)])
            assert (np.abs(norm.sums - expected) <= bound).all()
            for name, row in (("dbeta", 0), ("dgamma", 1)):
                np.testing.assert_array_equal(getattr(norm.training, name), norm.sums[row].astype(np.float32))
            # The rest of the norm multiplies by the derivative, which changes no gradient that is multiplied already.
            made = backend.batch_norm(replace(norm, summed=True))
            made.backward_data()
            scale = norm.gamma / np.sqrt(norm.var.astype(np.float64) + EPS)
            rest = scale * (masked - expected[0] / len(masked) - xhat * expected[1] / len(masked))
            limit = 2**-5 * np.abs(scale) * (1 + np.abs(masked).max() + np.abs(xhat) * np.abs(masked).max())
            assert (np.abs(norm.dx.reshape(rest.shape).astype(np.float64) - rest) <= limit).all()
        stored = machine.store.read_text()
    with machine.open(autotune=True) as backend:
        known = len(machine.cudnn.graphs)
        a = Arrays(backend, as_dtype(dtype))
        arrays = a.draw(*x.shape), a.draw(*w.shape), a.draw(outputs), a.poisoned(*shape)
        again = backend.conv_forward_sums(*arrays, a.poisoned(2, outputs, dtype=np.float64), geometry)
        assert ("eng7" in again.impl) == (seconds < 1e-3) and machine.store.read_text() == stored, "not measured again"
        assert any(graph.sums for graph in machine.cudnn.graphs[known:]) == (seconds < 1e-3), "nor planned, if slower"


@pytest.mark.parametrize("refused", [[], [EngineDouble("eng7", launches=False)]], ids=["no plan", "no launch"])
def test_without_a_plan_there_are_two_kernels(machine, refused):
    """A plan that is missing, or that the device refuses, leaves two kernels, and no memory of its own."""
    plain = machine.cudnn.engines
    machine.cudnn.engines = lambda: refused if machine.cudnn.graphs[-1].sums else plain()
    geometry = CASES[0][0]
    with machine.open(autotune=True) as backend:
        a = Arrays(backend, as_dtype("bfloat16"))
        x, w, y, sums = (
            a.draw(2, 5, 4, 8),
            a.draw(8, 3, 3, 8),
            a.poisoned(2, 5, 4, 8),
            a.poisoned(2, 8, dtype=np.float64),
        )
        kernel = backend.conv_forward_sums(x, w, None, y, sums, geometry)
        kernel()
        assert kernel.impl == "two kernels" and np.isfinite(sums).all()
        assert backend.held_bytes == backend.workspaces.nbytes + backend.scratch.held_bytes


@pytest.mark.parametrize(("ratio", "dtype"), [(0, "bfloat16"), (4096, "bfloat16"), (256, "float16")])
def test_cancellation_changes_the_variance_less_than_rounding(machine, ratio, dtype):
    """Sums in float32 change a variance by less than the rounding of the output to 16 bits may.

    Rounding to p digits moves x by up to ``2^-p |x|``, and the deviation by up to ``2^-p mean / deviation`` of itself.
    """
    engines(machine, 9e-4)
    rows, channels, digits = 1 << 14, 8, {"bfloat16": 8, "float16": 11}[dtype]
    with machine.open(autotune=True) as backend:
        a = Arrays(backend, as_dtype(dtype), seed=1)
        x, w, y = a.draw(1, rows, 8), a.draw(channels, 1, 8), a.poisoned(1, rows, channels)
        w[...] = np.eye(channels).reshape(channels, 1, 8)
        b, sums = a.draw(channels), a.poisoned(2, channels, dtype=np.float64)
        b[...] = np.sqrt(ratio)
        kernel = backend.conv_forward_sums(x, w, b, y, sums, Geometry.of((1,), 1, 0))
        kernel()
        assert "eng7" in kernel.impl
    mean, square = sums / rows
    exact = x.astype(np.float64).reshape(-1, channels) + b.astype(np.float64)
    error = np.abs(square - mean**2 - exact.var(0)) / exact.var(0)
    assert error.max() <= 2.0**-19 * (1 + ratio), "the bound in the documentation"
    assert error.max() <= 2 * 2.0**-digits * np.sqrt(1 + ratio), error


def test_what_is_fused(machine):
    """Only what autotune compares: 16 bits, whole tensor cores, one group, gradients without stride."""
    conv = SummedConvolution(
        (1, 64, 64, 8), (16, 3, 3, 8), (1, 64, 64, 16), "bfloat16", Geometry.of((3, 3), 1, 1), False
    )
    other = {
        "float32": replace(conv, dtype="float32"),
        "channels": replace(conv, y=(1, 64, 64, 12)),
        "groups": replace(conv, geometry=replace(conv.geometry, groups=2)),
        "few rows": replace(conv, y=(1, 16, 16, 16), local=True),
        "many channels": replace(conv, y=(1, 32, 64, 2048), local=True),
        "stride": replace(conv, backward=True, geometry=Geometry.of((3, 3), 2, 1)),
        "activation": replace(conv, backward=True, activation=FusedActivation("silu")),
    }
    taken = [conv, replace(conv, geometry=Geometry.of((3, 3), 2, 1)), replace(conv, backward=True, activation=RELU)]
    taken += [replace(other["few rows"], local=False), replace(conv, local=True)]
    with machine.open(autotune=True) as backend:
        assert all(map(backend.fuses_sums, taken)) and not any(map(backend.fuses_sums, other.values()))
        assert not backend.fuses_sums(replace(taken[2], dtype="float32"))
    with machine.open(autotune=True, precision="tf32") as backend:
        assert backend.fuses_sums(replace(taken[2], dtype="float32")) and not backend.fuses_sums(other["float32"])
    with machine.open() as backend:
        assert not any(map(backend.fuses_sums, taken))
