"""Optimizer steps against their formulas in float64, with low-precision gradients and copies."""

from __future__ import annotations

import math

import numpy as np
import pytest

from halograd.kernels import KernelError

from ..conftest import EPS
from .conftest import BFLOAT16, DTYPES

FLOAT32 = np.dtype(np.float32)
#: Masters, gradients, copies.
PRECISIONS = [
    (FLOAT32, FLOAT32, None),
    (np.dtype(np.float64), np.dtype(np.float64), None),
    (FLOAT32, BFLOAT16, BFLOAT16),
    (FLOAT32, DTYPES[2], DTYPES[2]),
    (FLOAT32, FLOAT32, BFLOAT16),
]
DECAYS = {"none": 0, "leading": 50, "ranges": [(0, 7, True), (7, 30, False), (30, 101, True), (101, 131, False)]}


class Bucket:
    """Arrays of one bucket and their float64 twins."""

    def __init__(self, precision, count=131, states=1):
        master, gradient, copy = precision
        rng = np.random.default_rng(count)
        self.p, self.g = rng.standard_normal(count).astype(master), rng.standard_normal(count).astype(gradient)
        self.state = [np.zeros(count, master) for _ in range(states)]
        self.copy = None if copy is None else np.full(count, np.nan).astype(copy)
        self.scalars = np.ones(4)
        self.exact = self.p.astype(np.float64)
        self.exact_state = [np.zeros(count) for _ in range(states)]

    def decayed(self, decays):
        """Weight decay of each element is on."""
        flags = np.zeros(len(self.p))
        for start, stop, on in [(0, decays, True)] if isinstance(decays, int) else decays:
            flags[start:stop] = on
        return flags

    def next_gradient(self, step):
        rng = np.random.default_rng(step)
        self.g[...] = rng.standard_normal(len(self.g))

    def check(self):
        bound = 64 * EPS[self.p.dtype] * max(1, np.abs(self.exact).max())
        assert np.abs(self.p - self.exact).max() <= bound
        for found, want in zip(self.state, self.exact_state):
            assert np.abs(found - want).max() <= bound
        if self.copy is not None:
            assert np.array_equal(self.copy, self.p.astype(self.copy.dtype))


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("kind", ["plain", "momentum", "nesterov"])
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_sgd(cuda, precision, kind, decays):
    momentum, weight_decay = (0.0 if kind == "plain" else 0.9), 0.01
    b = Bucket(precision, states=0 if kind == "plain" else 1)
    v = b.state[0] if b.state else None
    nesterov = kind == "nesterov"
    kernel = cuda.sgd(b.p, b.g, v, b.scalars, momentum, nesterov, weight_decay, DECAYS[decays], b.copy)
    decay = weight_decay * b.decayed(DECAYS[decays])
    for step in range(1, 4):
        b.next_gradient(step)
        b.scalars[:2] = rate, scale = 0.1 / step, 0.5 + step
        kernel()
        g = b.g.astype(np.float64) * scale + decay * b.exact
        if b.state:
            b.exact_state[0] = momentum * b.exact_state[0] + g
            g = g + momentum * b.exact_state[0] if nesterov else b.exact_state[0]
        b.exact -= rate * g
        b.check()


@pytest.mark.parametrize("decays", DECAYS)
@pytest.mark.parametrize("decoupled", [False, True], ids=["adam", "adamw"])
@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_adam(cuda, precision, decoupled, decays):
    b = Bucket(precision, states=2)
    one, two = betas = (0.9, 0.99)
    epsilon, weight_decay = 1e-6, 0.02
    arrays = (b.p, b.g, *b.state, b.scalars)
    kernel = cuda.adam(*arrays, betas, epsilon, weight_decay, DECAYS[decays], decoupled, b.copy)
    decay = weight_decay * b.decayed(DECAYS[decays])
    for step in range(1, 4):
        b.next_gradient(step)
        b.scalars[...] = 0.01, 2.0, 1 - one**step, math.sqrt(1 - two**step)
        kernel()
        g = b.g.astype(np.float64) * 2
        if decoupled:
            b.exact -= 0.01 * decay * b.exact
        else:
            g += decay * b.exact
        m, v = b.exact_state
        m += (1 - one) * (g - m)
        v += (1 - two) * (g * g - v)
        b.exact -= 0.01 / (1 - one**step) * m / (np.sqrt(v) / math.sqrt(1 - two**step) + epsilon)
        b.check()


@pytest.mark.parametrize("precision", PRECISIONS, ids=str)
def test_lars(cuda, precision):
    b = Bucket(precision, count=9000)
    b.p[8000:8100] = b.exact[8000:8100] = 0
    segments = [(0, 5, True), (5, 70, False), (70, 8000, True), (8000, 8100, True), (8100, 8900, False)]
    momentum, trust, decay = 0.9, 0.02, 0.001
    kernel = cuda.lars(b.p, b.g, b.state[0], b.scalars, segments, momentum, trust, decay, b.copy)
    if b.copy is not None:
        b.copy[8900:] = b.p[8900:]
    for step in range(1, 3):
        b.next_gradient(step)
        b.scalars[:2] = 0.1, 3.0
        kernel()
        g = b.g.astype(np.float64) * 3
        for start, stop, on in segments:
            p, part, v = b.exact[start:stop], g[start:stop], b.exact_state[0][start:stop]
            norm, below = np.linalg.norm(p), np.linalg.norm(part) + decay * np.linalg.norm(p)
            rate = 0.1 * (trust * norm / below if on and norm > 0 and below > 0 else 1.0)
            v[...] = momentum * v + rate * (part + (decay if on else 0) * p)
            p -= v
        b.check()


def test_nothing_is_updated_after_an_overflow(cuda):
    """The flag is read on the device: no host has to wait for it."""
    b, skip = Bucket(PRECISIONS[2], states=2), np.ones(1, np.int32)
    kernels = [
        cuda.sgd(b.p, b.g, None, b.scalars, 0.0, False, 0.0, 0, b.copy, skip),
        cuda.adam(b.p, b.g, *b.state, b.scalars, (0.9, 0.99), 1e-8, 0.0, 0, False, b.copy, skip),
        cuda.lars(b.p, b.g, b.state[0], b.scalars, [(0, 131, True)], 0.9, 0.1, 0.0, b.copy, skip),
    ]
    before = b.p.copy()
    for kernel in kernels:
        kernel()
    assert np.array_equal(before, b.p) and not b.state[0].any() and not b.state[1].any()
    skip[0] = 0
    for kernel in kernels:
        kernel()
        assert not np.array_equal(before, b.p)
        before = b.p.copy()


@pytest.mark.parametrize("count", [1, 3, 4, 1000, 1027])
@pytest.mark.parametrize("start", [0, 1])
def test_any_length_and_address(cuda, count, start):
    """Arrays that begin between vectors, and those that end there."""
    p, g = np.arange(1100, dtype=np.float32), np.ones(1100, np.float32)
    at = slice(start, start + count)
    cuda.sgd(p[at], g[at], None, np.array([1.0, 2.0, 1, 1]), 0.0, False, 0.0, 0)()
    want = np.arange(1100)
    want[at] -= 2
    assert np.array_equal(p, want)


def test_refused(cuda):
    half = np.zeros(4, np.float16)
    with pytest.raises(KernelError, match="expected parameters of float32 or float64, got float16; keep masters"):
        cuda.sgd(half, half, None, np.ones(4), 0.0, False, 0.0, 0)
    single = np.zeros(4, np.float32)
    with pytest.raises(KernelError, match="expected arrays of 4 elements, got 3"):
        cuda.sgd(single, single[:3], None, np.ones(4), 0.0, False, 0.0, 0)
    with pytest.raises(KernelError, match=r"expected scalars float64 \(4,\), got float32 \(4,\)"):
        cuda.sgd(single, single, None, single, 0.0, False, 0.0, 0)
