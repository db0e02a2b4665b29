"""Tests of kernels of 16-bit arrays on the CPU: equal to the kernels of float32 of the same values, up to rounding.

oneDNN computes them itself where the processor does, else both backends compute them in float32.
"""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from halograd.device import LOW, as_dtype
from halograd.kernels import (
    AttentionGeometry,
    BatchNormArrays,
    ChannelNormArrays,
    ClassTargets,
    DropoutMask,
    Everywhere,
    FusedActivation,
    Geometry,
    GroupNormArrays,
    LossArrays,
    Resampled,
    Resampling,
    get_backend,
)
from halograd.kernels.onednn import abi

from .conftest import EPS, Arrays

G, G2, RELU = Geometry.of((3, 3), 1, 1), Geometry.of((2, 2), 2), FusedActivation("relu")
FAR = Geometry.of((2, 2), 1, 0, dilation=2)


class Twin:
    """Arrays of one dtype; two objects of one seed draw equal values, all of which 16 bits hold."""

    def __init__(self, backend, dtype, low) -> None:
        self.backend, self.dtype, self.low = backend, np.dtype(dtype), np.dtype(low)
        self._arrays, self.outputs = Arrays(backend, dtype), list[np.ndarray]()

    def draw(self, *shape, dtype=None, offset=0):
        wide = self._arrays.draw(*shape, dtype=np.dtype(np.float32)) + offset
        rounded = wide.astype(self.low).astype(np.float32)
        return self._put(rounded, dtype)

    def _put(self, values, dtype):
        array = self.backend.empty(values.shape, dtype or self.dtype)
        array[...] = values
        return array

    def out(self, *shape, dtype=None):
        """Return an output array filled with NaN."""
        array = self._put(np.full(shape, np.nan), dtype)
        self.outputs.append(array)
        return array

    def wide(self, *shape):
        """Return an array of float32 numbers."""
        return self.draw(*shape, dtype=np.float32)


def convolution(t, geometry=G, channels=16, filters=32):
    b, xs = t.backend, (2, 6, 8, channels)
    ys = (2, *geometry.output_shape(xs[1:-1]), filters)
    x, dy, w, bias = t.draw(*xs), t.draw(*ys), t.draw(filters, *geometry.kernel, channels), t.draw(filters)
    return [
        b.conv_forward(x, w, bias, t.out(*ys), geometry, RELU),
        b.conv_backward_data(dy, w, t.out(*xs), geometry),
        b.conv_backward_filter(x, dy, t.out(*w.shape, dtype=np.float32), t.out(filters, dtype=np.float32), geometry),
    ]


def dense(t):
    b, (x, w, bias, dy) = t.backend, (t.draw(9, 40), t.draw(12, 40), t.draw(12), t.draw(9, 12))
    y = t.draw(9, 12)
    t.outputs.append(y)
    return [
        b.dense_forward(x, w, bias, t.out(9, 12)),
        b.dense_backward_data(dy, w, t.out(9, 40)),
        b.dense_backward_filter(x, dy, t.out(12, 40, dtype=np.float32), t.out(12, dtype=np.float32)),
        b.bias(y, bias),
        b.bias_gradient(dy, t.out(12, dtype=np.float32)),
    ]


def pair(make, xs=(2, 6, 8, 16), ys=None):
    def kernels(t):
        x, dy = t.draw(*xs), t.draw(*(ys or xs))
        return make(t.backend, (x, t.out(*(ys or xs)), dy, t.out(*xs)))

    return kernels


def add(t):
    b, (x, y, z) = t.backend, (t.draw(2, 5, 6, 7) for _ in range(3))
    t.outputs.append(z)
    shape = (2, 5, 6, 7)
    made = [b.add([x, y], t.out(*shape)), b.add([z, x, y], z, RELU), b.add([x], t.out(*shape))]
    return [*made, b.add([x[:, 1:], y[:, 1:]], t.out(2, 5, 7, 7)[:, :4].reshape(2, 4, 7, 7)[:, :, :6])]


def batch_norm(channels, local, activation=RELU, residual=False, apart=0.0):
    def kernels(t):
        shape = (2, 4, 8, channels)
        x, dy = t.draw(*shape, offset=apart), t.draw(*shape)
        extra = t.draw(*shape) if residual else None
        vectors = (t.wide(channels), t.wide(channels), t.out(channels, dtype=np.float32))
        var, sums = t.out(channels, dtype=np.float32), t.out(2, channels, dtype=np.float64)
        means = np.zeros((2, channels))
        dresidual = t.out(*shape) if residual and activation else None
        y, dx = t.out(*shape), t.out(*shape)
        k = t.backend.batch_norm(
            BatchNormArrays(
                x, y, dy, dx, *vectors, var, sums, means, 1e-5, activation, local, residual=extra, dresidual=dresidual
            )
        )

        def settle():
            vectors[2][...], var[...] = sums[0] / 64, sums[1] / 64 - (sums[0] / 64) ** 2

        def average():
            means[...] = sums / 64

        return [k.statistics, k.forward, k.backward_sums, k.backward_data] if local else [
            k.statistics, settle, k.forward, k.backward_sums, average, k.backward_data
        ]  # fmt: skip

    return kernels


def group_norm(t):
    n, c, f8 = 2, 6, np.float64
    x, dy = t.draw(n, 4, 4, c), t.draw(n, 4, 4, c)
    arrays = GroupNormArrays(
        x, t.out(*x.shape), dy, t.out(*x.shape), t.wide(c), t.wide(c), *(t.out(c, dtype=np.float32) for _ in range(2)),
        *(t.out(n, c, dtype=np.float32) for _ in range(2)), *(t.out(n, 2, c, dtype=f8) for _ in range(2)),
        t.out(n, 2, 2, dtype=f8), 48, 1e-5, FusedActivation("silu"),
    )  # fmt: skip
    k = t.backend.group_norm(arrays)
    return [k.statistics, k.normalize, k.backward_sums, k.backward_data]


def channel_norm(t):
    x, dy = t.draw(3, 5, 8), t.draw(3, 5, 8)
    vectors = (t.wide(8), t.wide(8), t.out(8, dtype=np.float32), t.out(8, dtype=np.float32))
    return t.backend.channel_norm(ChannelNormArrays(x, t.out(3, 5, 8), dy, t.out(3, 5, 8), *vectors, 1e-5))


def attention(t):
    q, k, v, dy = (t.draw(2, 6, 8) for _ in range(4))
    y, lse = t.out(2, 6, 8), t.out(2, 6, 2, dtype=np.float32)
    g = AttentionGeometry((Everywhere(6, 6),), ((0, 6),), ((0, 6),), (0, 2), 1, 0.3, False, None)
    gradients = (t.out(2, 6, 8) for _ in range(3))
    b = t.backend
    return [
        b.attention_forward(q, k, v, None, y, lse, g),
        b.attention_backward(dy, q, k, v, None, y, lse, *gradients, None, g),
    ]


def losses(t):
    x, b, f8 = t.draw(2, 5, 4), t.backend, np.float64
    classes = np.arange(10).reshape(2, 5, 1) % 4
    target = t.draw(2, 5, 4, dtype=np.float32)

    def arrays(target):
        return LossArrays(x, target, t.out(2, 5, 4), t.out(1, dtype=f8))

    made = [
        b.softmax_cross_entropy(arrays(classes), ClassTargets(4), 0.1),
        b.binary_cross_entropy(arrays(np.clip(target, 0, 1))),
        b.mean_squared_error(arrays(target)),
    ]
    for kernel in made:
        kernel.set(1, 2.0)
    return made


def dropout(b, arrays):
    state = np.array([5, 7, 0], np.uint64)
    return b.dropout(*arrays, DropoutMask(0.4, 3, arrays[0].shape, (0,) * 4, state))


def resize(b, arrays):
    return b.resize(*arrays, [Resampled(Resampling(n, m, Fraction(n, m), "linear"), 0, m) for n, m in ((6, 9), (8, 8))])


FACTORIES = {
    "convolution": convolution,
    "few channels": lambda t: convolution(t, Geometry.of((3, 3), 2, 1), 3, 5),
    "dense": dense,
    "max pool": pair(lambda b, a: b.max_pool(*a, G2), ys=(2, 3, 4, 16)),
    "average pool": pair(lambda b, a: b.average_pool(*a, G2, True), ys=(2, 3, 4, 16)),
    "dilated max pool": pair(lambda b, a: b.max_pool(*a, FAR), ys=(2, 4, 6, 16)),
    "relu": pair(lambda b, a: b.activation("relu", *a)),
    "gelu": pair(lambda b, a: b.activation("gelu", *a)),
    "sigmoid": pair(lambda b, a: b.activation("sigmoid", *a)),
    "mish": pair(lambda b, a: b.activation("mish", *a)),
    "dropout": pair(dropout),
    "resize": pair(resize, ys=(2, 9, 8, 16)),
    "add": add,
    "batch norm of sums": batch_norm(16, False),
    "batch norm": batch_norm(18, True, None),
    "batch norm far from zero": batch_norm(16, False, None, apart=128.0),
    "batch norm with residual": batch_norm(7, True, FusedActivation("leaky_relu", 0.98), residual=True),
    "group norm": group_norm,
    "channel norm": channel_norm,
    "attention": attention,
    "losses": losses,
}


@pytest.fixture(scope="module", params=["native bfloat16", "emulated bfloat16", "emulated float16", "numpy bfloat16"])
def low(request):
    """Return a backend and a 16-bit dtype."""
    how, name = request.param.split()
    with get_backend("numpy" if how == "numpy" else "onednn") as backend:
        if how == "native" and backend.emulates(name):
            pytest.skip(f"needs a processor that computes in {name}: {backend.emulates(name)}")
        if how == "emulated":
            backend._engine.emulated.update(LOW)
        yield backend, as_dtype(name)


@pytest.mark.parametrize("name", FACTORIES)
def test_kernels(low, name):
    backend, dtype = low
    twins = [Twin(backend, dtype, dtype), Twin(backend, np.float32, dtype)]
    for t in twins:
        for call in FACTORIES[name](t):
            call()
    assert any(a.dtype == dtype for a in twins[0].outputs)
    for found, expected in zip(*(t.outputs for t in twins)):
        found, expected = found.astype(np.float64), expected.astype(np.float64)
        written = ~np.isnan(expected)
        assert not np.isnan(found[written]).any()
        bound = 3 * EPS[dtype] * max(np.abs(expected[written]).max(initial=0), 0.1)
        assert np.abs(found[written] - expected[written]).max() <= bound


def test_hot_kernels_are_native(onednn):
    if onednn.emulates("bfloat16"):
        pytest.skip(f"needs a processor that computes in bfloat16: {onednn.emulates('bfloat16')}")
    hot = ("convolution", "dense", "max pool", "average pool", "relu", "sigmoid", "batch norm of sums", "batch norm")
    onednn.take_substitutes()
    held = onednn.stage.nbytes
    for name in hot:
        made = FACTORIES[name](Twin(onednn, ml_dtypes.bfloat16, ml_dtypes.bfloat16))
        impls = [k.impl for k in made if hasattr(k, "impl")]
        assert impls and not any("float32(" in impl for impl in impls), name
    assert not onednn.take_substitutes()
    assert onednn.stage.nbytes == held


def test_memory_of_stand_ins_is_shared_and_counted():
    with get_backend("numpy") as backend:
        x, y = (backend.zeros((4, 4, 4, 8), np.float16) for _ in range(2))
        before = backend.stage.nbytes
        for _ in range(3):
            backend.activation("relu", x, y, None, None)
        assert backend.stage.nbytes - before == 2 * 2 * x.nbytes <= backend.held_bytes


def test_only_processors_with_products_of_16_bits_are_native(onednn, monkeypatch):
    for name, found in (("AVX2", False), ("AVX-512", False), ("AVX-512-VNNI", False), ("AVX-512-AMX", True)):
        assert (name in abi.NATIVE["bfloat16"]) == found
    monkeypatch.setattr(onednn, "instruction_set", "AVX2")
    assert onednn._reason("bfloat16") == "the instruction set AVX2 has no products in bfloat16"
