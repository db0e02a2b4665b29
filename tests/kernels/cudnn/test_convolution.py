"""Tests of convolutions on the double of cuDNN, which uses only addresses, extents and strides, against loops."""

import ml_dtypes
import numpy as np
import pytest

from halograd.kernels import Geometry, KernelError
from halograd.kernels.cudnn.conv import outside
from tests.kernels import reference
from tests.kernels.conftest import Arrays, assert_close
from tests.kernels.geometries import CASES
from tests.kernels.reference import RELU
from tests.kernels.test_convolution import check

from .fake_cudnn import DataType

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
