"""Tests of convolutions on the double of cuDNN, also with sums of a batch norm and our own kernels, against loops."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from halograd.device import as_dtype
from halograd.kernels import BatchNormArrays, FusedActivation, Geometry, KernelError
from halograd.kernels.cuda import Boxes
from halograd.kernels.cudnn import CudnnBackend
from halograd.kernels.cudnn.conv import outside
from halograd.kernels.kernel import BatchNormTraining
from halograd.kernels.summed import SummedConvolution
from tests.kernels import reference
from tests.kernels.conftest import Arrays, assert_close
from tests.kernels.every import every_kernel
from tests.kernels.geometries import CASES
from tests.kernels.reference import RELU
from tests.kernels.test_convolution import check

from .fake_cudnn import DataType, EngineDouble
from .fake_runtime import Machine, device_empty

G = Geometry.of((3, 3), 1, 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_direct_loops(arrays, case):
    check(arrays, case)


@pytest.mark.parametrize("case", [CASES[i] for i in (1, 15, 27)], ids=str)
def test_bfloat16(backend, case):
    check(Arrays(backend, ml_dtypes.bfloat16), case)


def test_float64_is_refused(backend):
    """On a device the results were wrong: the front end passes factors of another type."""
    a = Arrays(backend, np.float64)
    x, w, y = a.draw(1, 6, 6, 8), a.draw(4, 3, 3, 8), a.draw(1, 6, 6, 4)
    for build in (
        lambda: backend.conv_forward(x, w, None, y, G),
        lambda: backend.conv_backward_data(y, w, x, G),
        lambda: backend.conv_backward_filter(x, y, w, None, G),
    ):
        with pytest.raises(KernelError, match="got float64; use float32 or float16 or bfloat16, or a backend of the"):
            build()


@pytest.mark.parametrize("case", [CASES[i] for i in (0, 5, 25)], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_fused_relu(arrays, case, bias):
    check(arrays, case, bias=bias, f=RELU)


def test_sums_are_of_the_right_type(backend, machine):
    for dtype in (np.float32, np.float16):
        a = Arrays(backend, dtype)
        backend.conv_forward(a.draw(1, 4, 4, 8), a.draw(8, 3, 3, 8), None, a.draw(1, 4, 4, 8), G)
        settings = machine.cudnn.graphs[-1].settings
        assert settings["compute_data_type"] == settings["intermediate_data_type"] == DataType.FLOAT
        assert {t.data_type for t in machine.cudnn.graphs[-1].tensors} == {settings["io_data_type"]}


def test_a_relu_without_bias_adds_zeros(backend, machine):
    """ReLU without bias uses a bias of zeros, because cuDNN has compiled engines only for ReLU with bias."""
    a = Arrays(backend, np.float32)
    x, w, y = a.draw(1, 4, 4, 8), a.draw(6, 3, 3, 8), a.poisoned(1, 4, 4, 6)
    kernel = backend.conv_forward(x, w, None, y, G, RELU)
    bias = machine.cudnn.graphs[-1].tensors[-1]
    assert bias.dim == [1, 6, 1, 1] and kernel.workspace_bytes == 6 * 4
    kernel()
    assert_close(y, np.maximum(reference.conv(x, w, None, G, y.shape), 0), 72)


# ---------------------------------------------------------------------- arrays that do not suit
@pytest.mark.parametrize("direction", ["forward", "data", "filter"])
def test_arrays_that_begin_anywhere_are_copied(backend, direction):
    """Packed arrays whose address is not a multiple of 16 B, such as rows of a block, are copied."""
    a = Arrays(backend, np.float32)
    block, w = a.draw(1, 9, 5, 3), a.draw(7, 3, 3, 3)
    x = block[:, 1:8]
    assert x.flags.c_contiguous and x.data.ptr % 16
    outer = a.poisoned(1, 8, 5, 7)
    y = outer[:, 1:]
    if direction == "forward":
        kernel = backend.conv_forward(x, w, None, y, G)
        kernel()
        assert_close(y, reference.conv(x, w, None, G, y.shape), 27)
        assert np.isnan(outer[:, 0]).all()
        assert kernel.impl == "cuda:copy + cudnn:eng10_k1=3 + cuda:copy"
    elif direction == "data":
        y[...] = 1
        kernel = backend.conv_backward_data(y, w, x, G)
        kernel()
        assert_close(x, reference.conv_data(y, w, G, x.shape), 63)
    else:
        y[...] = 2
        dw = a.poisoned(*w.shape)
        kernel = backend.conv_backward_filter(x, y, dw, None, G)
        kernel()
        assert_close(dw, reference.conv_filter(x, y, G, w.shape), 35)
    held = (x.nbytes + 0) + y.nbytes
    assert kernel.workspace_bytes == held and backend.held_bytes >= held
    before = backend.held_bytes
    kernel.close()
    assert before - backend.held_bytes == held


@pytest.mark.parametrize("kind", ["float32", "as x"], ids=str)
@pytest.mark.parametrize("rows", [slice(None), slice(1, 5)], ids=["whole", "rows"])
def test_channels_that_lie_padded(machine, backend, rows, kind):
    """For 18 of 24 stored channels in bfloat16, cuDNN gets 24 channels and padded weights; gradients have 18."""
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    a = Arrays(backend, bfloat16)
    room = a.draw(1, 6, 5, 24)
    room[..., 18:] = 0
    x = room[:, rows, :, :18]
    y, dy = a.poisoned(1, *x.shape[1:3], 7), a.draw(1, *x.shape[1:3], 7)
    w = a.draw(7, 3, 3, 18, dtype=np.float32 if kind == "float32" else None)
    dw = a.poisoned(*w.shape, dtype=w.dtype)
    assert not x.flags.c_contiguous and backend.padded_channels(18, bfloat16) == 24
    forward, backward = backend.conv_forward(x, w, None, y, G), backend.conv_backward_filter(x, dy, dw, None, G)
    for _ in range(2):
        forward()
        backward()
        rounded = w.astype(bfloat16)
        assert_close(y, reference.conv(x, rounded, None, G, y.shape), 2)
        np.testing.assert_allclose(
            dw.astype(np.float64), reference.conv_filter(x, dy, G, w.shape), rtol=2**-7, atol=2**-7
        )
        w *= 2
    told = [tensor.dim for graph in machine.cudnn.graphs[-2:] for tensor in [*graph.tensors, *graph.outputs]]
    assert [1, 24, *x.shape[1:3]] in told and [7, 24, 3, 3] in told


def test_other_strides_are_refused(backend):
    a = Arrays(backend, np.dtype(ml_dtypes.bfloat16))
    w, y = a.draw(7, 3, 3, 18), a.draw(2, 6, 5, 7)
    for x in (a.draw(2, 6, 5, 32)[..., :18], a.draw(2, 7, 5, 24)[:, 1:, :, :18]):
        with pytest.raises(KernelError, match=r"expected input packed \(C-contiguous\), got shape \(2, 6, 5, 18\)"):
            backend.conv_forward(x, w, None, y, G)
    single = Arrays(backend, np.float32)
    with pytest.raises(KernelError, match="expected input packed"):
        backend.conv_forward(
            single.draw(2, 6, 5, 24)[..., :18], single.draw(7, 3, 3, 18), None, single.draw(2, 6, 5, 7), G
        )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_in_float32_beside_images_of_16_bits(backend, dtype):
    dtype = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    a, eps = Arrays(backend, dtype), float(ml_dtypes.finfo(dtype).eps)
    x, y, dx = a.draw(1, 5, 5, 8), a.poisoned(1, 5, 5, 16), a.poisoned(1, 5, 5, 8)
    w, b = a.draw(16, 3, 3, 8, dtype=np.float32), a.draw(16, dtype=np.float32)
    dw, db = a.poisoned(16, 3, 3, 8, dtype=np.float32), a.poisoned(16, dtype=np.float32)
    rounded = w.astype(dtype)
    forward = backend.conv_forward(x, w, b, y, G)
    forward()
    assert forward.impl.startswith("cuda:copy + cuda:copy + cudnn:")
    np.testing.assert_allclose(
        y.astype(np.float64), reference.conv(x, rounded, b.astype(dtype), G, y.shape), rtol=2 * eps, atol=2 * eps
    )
    dy = a.draw(1, 5, 5, 16)
    backend.conv_backward_data(dy, w, dx, G)()
    np.testing.assert_allclose(
        dx.astype(np.float64), reference.conv_data(dy, rounded, G, dx.shape), rtol=2 * eps, atol=2 * eps
    )
    backend.conv_backward_filter(x, dy, dw, db, G)()
    np.testing.assert_allclose(dw, reference.conv_filter(x, dy, G, w.shape), rtol=2 * eps, atol=2 * eps)
    np.testing.assert_allclose(db, dy.astype(np.float64).sum(axis=(0, 1, 2)), rtol=1e-6)
    w *= 2  # converted at every call
    forward()
    np.testing.assert_allclose(
        y.astype(np.float64), reference.conv(x, 2 * rounded, b.astype(dtype), G, y.shape), rtol=2 * eps, atol=2 * eps
    )


def test_other_dtypes_of_weights_are_refused(backend):
    a = Arrays(backend, np.float32)
    x, y = a.draw(1, 4, 4, 8), a.draw(1, 4, 4, 8)
    with pytest.raises(KernelError) as caught:
        backend.conv_forward(x, a.draw(8, 3, 3, 8, dtype=np.float16), None, y, G)
    assert str(caught.value) == (
        "conv_forward: expected weights of dtype float32 with arrays of float32, got float16; convert them"
    )
    half = a.draw(1, 4, 4, 8, dtype=np.float16)
    with pytest.raises(KernelError, match="expected bias of dtype float16 or float32 with arrays of float16, got f"):
        backend.conv_forward(half, a.draw(8, 3, 3, 8, dtype=np.float16), a.draw(8, dtype=np.float64), half, G)
    with pytest.raises(KernelError, match="expected dtype float32 or float16 or bfloat16, got int8; use "):
        backend.conv_forward(x.astype(np.int8), x.astype(np.int8), None, y.astype(np.int8), G)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("drop", [(-1, 0), (-2, 0), (0, -3), (-2, -1)], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_dropped_rows(arrays, backend, samples, drop, stride):
    """Rows that a negative padding removes are not read, and their gradient is zero."""
    geometry = Geometry.of((3, 3), stride, ((1, drop[0]), (0, drop[1])))
    a, spatial = arrays, (9, 10)
    ys = (samples, *geometry.output_shape(spatial), 8)
    x, w, dy = a.draw(samples, *spatial, 4), a.draw(8, 3, 3, 4), a.draw(*ys)
    y, dx, dw = a.poisoned(*ys), a.poisoned(*x.shape), a.poisoned(*w.shape)
    backend.conv_forward(x, w, None, y, geometry)()
    backend.conv_backward_data(dy, w, dx, geometry)()
    backend.conv_backward_filter(x, dy, dw, None, geometry)()
    assert_close(y, reference.conv(x, w, None, geometry, ys), 36)
    assert_close(dx, reference.conv_data(dy, w, geometry, x.shape), 72)
    assert_close(dw, reference.conv_filter(x, dy, geometry, w.shape), samples * 80)


def test_what_lies_outside_covers_the_rest_once():
    array = np.zeros((2, 4, 5, 6, 3), int)
    for view in outside(array, (3, 5, 4)):
        view += 1
    expected = np.ones_like(array)
    expected[:, :3, :5, :4] = 0
    assert (array == expected).all() and outside(array, (4, 5, 6)) == []


def test_arrays_live_as_long_as_their_kernel(backend):
    a = Arrays(backend, np.float32)
    y = a.poisoned(1, 4, 4, 8)
    kernel = backend.conv_forward(a.draw(1, 4, 4, 8), a.draw(8, 3, 3, 8), None, y, G)
    for _ in range(50):
        a.draw(64, 64)
    kernel()
    assert not np.isnan(y).any()
    kernel.close()
    kernel.close()
    with pytest.raises(KernelError, match="expected an open kernel, got one after close"):
        kernel()


SUMS_RELU = FusedActivation("relu")
EPS = 1e-5
#: Geometry, spatial extents of the image, samples, channels of image and output.
SUMS_CASES = [
    (Geometry.of((3, 3), 1, 1), (5, 4), 2, 16, 8),
    (Geometry.of((3, 3), 1, ((0, -2), (1, 1))), (8, 5), 1, 8, 16),  # rows that no output reads
    (Geometry.of((3, 3, 3), 1, 1), (3, 4, 2), 1, 8, 8),
    (Geometry.of((1,), 1, 0), (6,), 3, 8, 24),
]
FUSED = [EngineDouble("eng7_k24=21", compiled=True), EngineDouble("eng2", builds=False), EngineDouble("eng7")]


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
    arrays = replace(arrays, activation=SUMS_RELU if relu else None, training=training)
    return arrays, np.stack([masked.sum(0), (masked * xhat).sum(0)]), xhat, masked


@pytest.mark.parametrize("seconds", [9e-4, 2e-3], ids=["faster", "slower"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", SUMS_CASES, ids=str)
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
    geometry = SUMS_CASES[0][0]
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
    taken = [
        conv,
        replace(conv, geometry=Geometry.of((3, 3), 2, 1)),
        replace(conv, backward=True, activation=SUMS_RELU),
    ]
    taken += [replace(other["few rows"], local=False), replace(conv, local=True)]
    with machine.open(autotune=True) as backend:
        assert all(map(backend.fuses_sums, taken)) and not any(map(backend.fuses_sums, other.values()))
        assert not backend.fuses_sums(replace(taken[2], dtype="float32"))
    with machine.open(autotune=True, precision="tf32") as backend:
        assert backend.fuses_sums(replace(taken[2], dtype="float32")) and not backend.fuses_sums(other["float32"])
    with machine.open() as backend:
        assert not any(map(backend.fuses_sums, taken))


@pytest.fixture
def ours_backend(host, tmp_path) -> Iterator[CudnnBackend]:
    machine = Machine(tmp_path)
    host.empty = device_empty
    machine.boxes = Boxes(host)
    with machine.open() as opened:
        yield opened


def test_every_kernel_runs(arrays):
    for kernel in every_kernel(arrays):
        kernel()
        kernel.close()


@pytest.mark.parametrize("case", [CASES[i] for i in (1, 17, 25, 28)], ids=str)
def test_convolutions(arrays, case):
    check(arrays, case, f=RELU)


def test_copies_conversions_and_zeroed_rows(ours_backend):
    """Convolutions are right with float32 weights for bfloat16, a misaligned array, and rows that no output reads."""
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    a = Arrays(ours_backend, bfloat16)
    geometry = Geometry.of((3, 3), 1, ((0, -2), (1, 1)))
    x, w = a.draw(1, 9, 5, 3)[:, 1:], a.draw(7, 3, 3, 3, dtype=np.float32)
    ys = (1, *geometry.output_shape((8, 5)), 7)
    dy, y, dx = a.draw(*ys), a.poisoned(*ys), a.poisoned(1, 9, 5, 3)[:, 1:]
    dw, db = a.poisoned(7, 3, 3, 3, dtype=np.float32), a.poisoned(7, dtype=np.float32)
    assert x.data.ptr % 16
    ours_backend.conv_forward(x, w, None, y, geometry, RELU)()
    ours_backend.conv_backward_data(dy, w, dx, geometry)()
    ours_backend.conv_backward_filter(x, dy, dw, db, geometry)()
    rounded = w.astype(bfloat16)
    assert_close(y, np.maximum(reference.conv(x, rounded, None, geometry, ys), 0), 2)
    assert_close(dx, reference.conv_data(dy, rounded, geometry, dx.shape), 2)
    assert (dx[:, -2:] == 0).all()
    np.testing.assert_allclose(dw, reference.conv_filter(x, dy, geometry, w.shape), rtol=2**-7, atol=2**-7)
    np.testing.assert_allclose(db, dy.astype(np.float64).sum(axis=(0, 1, 2)), rtol=1e-5, atol=1e-5)


def test_dense_layers_with_bias(ours_backend):
    dtype = np.dtype(np.float32)
    a = Arrays(ours_backend, dtype)
    x, w, b, dy = a.draw(5, 7), a.draw(3, 7), a.draw(3), a.draw(5, 3)
    y, dw, db = a.poisoned(5, 3), a.poisoned(3, 7), a.poisoned(3)
    ours_backend.dense_forward(x, w, b, y)()
    ours_backend.dense_backward_filter(x, dy, dw, db)()
    eps = np.finfo(dtype).eps
    wide = [v.astype(np.float64) for v in (x, w, b, dy)]
    np.testing.assert_allclose(y.astype(np.float64), wide[0] @ wide[1].T + wide[2], rtol=16 * eps, atol=16 * eps)
    np.testing.assert_allclose(dw.astype(np.float64), wide[3].T @ wide[0], rtol=16 * eps, atol=16 * eps)
    np.testing.assert_allclose(db.astype(np.float64), wide[3].sum(axis=0), rtol=16 * eps, atol=16 * eps)
