"""Tests of optimizer steps, clipping and loss scaling against their formulas in float64."""

import math

import numpy as np
import pytest

from halograd.device import as_dtype
from halograd.kernels import KernelError, UpdateArrays

from .conftest import EPS

DECAYS = {
    "none": [(0, 131, False)],
    "leading": [(0, 50, True), (50, 131, False)],
    "ranges": [(0, 7, True), (7, 30, False), (30, 101, True), (101, 131, False)],
}


class Bucket:
    """Arrays of one bucket, and their float64 copies."""

    def __init__(self, precision, count=131, states=1):
        master, gradient, copy = precision
        rng = np.random.default_rng(count)
        self.p, self.g = rng.standard_normal(count).astype(master), rng.standard_normal(count).astype(gradient)
        self.state = [np.zeros(count, master) for _ in range(states)]
        self.copy = None if copy is None else np.full(count, np.nan).astype(copy)
        self.scalars = np.ones(5)
        self.exact = self.p.astype(np.float64)
        self.exact_state = [np.zeros(count) for _ in range(states)]

    def arrays(self, decays=((0, 131, False),), skip=None):
        return UpdateArrays(self.p, self.g, tuple(self.state), self.scalars, decays, self.copy, skip)

    def decayed(self, decays):
        """Return which elements have weight decay."""
        flags = np.zeros(len(self.p))
        for start, stop, on in decays:
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
def test_sgd(backend, precision, kind, decays):
    momentum, weight_decay = (0.0 if kind == "plain" else 0.9), 0.01
    b = Bucket(precision, states=0 if kind == "plain" else 1)
    nesterov = kind == "nesterov"
    kernel = backend.sgd(b.arrays(DECAYS[decays]), momentum, nesterov, weight_decay)
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
def test_adam(backend, precision, decoupled, decays):
    b = Bucket(precision, states=2)
    one, two = betas = (0.9, 0.99)
    epsilon, weight_decay = 1e-6, 0.02
    kernel = backend.adam(b.arrays(DECAYS[decays]), betas, epsilon, weight_decay, decoupled)
    decay = weight_decay * b.decayed(DECAYS[decays])
    for step in range(1, 4):
        b.next_gradient(step)
        b.scalars[:4] = 0.01, 2.0, 1 - one**step, math.sqrt(1 - two**step)
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


def test_lars(backend, precision):
    b = Bucket(precision, count=9000)
    b.p[8000:8100] = b.exact[8000:8100] = 0
    segments = [(0, 5, True), (5, 70, False), (70, 8000, True), (8000, 8100, True), (8100, 8900, False)]
    momentum, trust, decay = 0.9, 0.02, 0.001
    kernel = backend.lars(b.arrays(segments), momentum, trust, decay)
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


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("decays", DECAYS)
def test_by_rule(backend, precision, decays, whole):
    """An update rule of a user is called on ranges that cover the bucket in order, with one scratch array."""
    b, lengths = Bucket(precision), []

    def rule(piece, numbers):
        (v,), (_, _, c) = piece.state, piece.scratch
        lengths.append((len(piece.p), piece.decayed))
        np.multiply(piece.gradient(numbers.scale, 0.01), numbers.rate, out=c)
        np.multiply(c, numbers.first, out=c)
        np.multiply(v, 0.5, out=v)
        np.add(v, c, out=v)
        np.subtract(piece.p, v, out=piece.p)

    kernel = backend.by_rule("own", b.arrays(DECAYS[decays]), rule, 3, whole)
    decay = 0.01 * b.decayed(DECAYS[decays])
    for step in range(1, 4):
        b.next_gradient(step)
        b.scalars[:3] = 0.1 / step, 0.5 + step, 1.5
        lengths.clear()
        kernel()
        b.exact_state[0] = 0.5 * b.exact_state[0] + 0.15 / step * (
            b.g.astype(np.float64) * (0.5 + step) + decay * b.exact
        )
        b.exact -= b.exact_state[0]
        b.check()
        assert lengths == [(stop - start, on) for start, stop, on in DECAYS[decays]]


def test_average(backend, precision):
    """The average kernel averages parameters (here in place of gradients) in the precision of the masters."""
    b = Bucket((precision[0], precision[0], None), states=0)
    kernel = backend.average(b.arrays())
    for step in range(1, 4):
        b.next_gradient(step)
        b.scalars[4] = 0.9 / step
        kernel()
        b.exact += 0.9 / step * (b.g.astype(np.float64) - b.exact)
        b.check()


def test_nothing_is_updated_after_an_overflow(backend, precision):
    """After an overflow no optimizer changes anything; its flag is read on the device, so the host does not wait."""
    skip = np.ones(1, np.int32)
    plain, adam, lars, own = (Bucket(precision, states=n) for n in (0, 2, 1, 1))

    def rule(piece, numbers):
        np.add(piece.state[0], piece.gradient(numbers.scale), out=piece.state[0])
        np.subtract(piece.p, piece.state[0], out=piece.p)

    pairs = [
        (plain, backend.sgd(plain.arrays(skip=skip), 0.0, False, 0.0)),
        (adam, backend.adam(adam.arrays(skip=skip), (0.9, 0.99), 1e-8, 0.0, False)),
        (lars, backend.lars(lars.arrays([(0, 131, True)], skip), 0.9, 0.1, 0.0)),
        (own, backend.by_rule("own", own.arrays([(0, 131, False)], skip), rule)),
    ]
    for b, kernel in pairs:
        before = b.p.copy()
        kernel()
        assert np.array_equal(before, b.p) and not any(state.any() for state in b.state)
        skip[0] = 0
        kernel()
        assert not np.array_equal(before, b.p)
        skip[0] = 1


@pytest.mark.parametrize("count", [1, 3, 4, 1000, 1027])
@pytest.mark.parametrize("start", [0, 1])
def test_any_length_and_address(backend, count, start):
    """Updates work on arrays that start and end at any element of a vector."""
    p, g = np.arange(1100, dtype=np.float32), np.ones(1100, np.float32)
    at = slice(start, start + count)
    arrays = UpdateArrays(p[at], g[at], (), np.array([1.0, 2.0, 1, 1, 0]), [(0, count, False)])
    backend.sgd(arrays, 0.0, False, 0.0)()
    want = np.arange(1100)
    want[at] -= 2
    assert np.array_equal(p, want)


def test_refused(backend):
    half, single = np.zeros(4, np.float16), np.zeros(4, np.float32)
    for p, g, scalars, words in (
        (half, half, np.ones(4), "expected parameters of float32 or float64, got float16; keep a float32 master"),
        (single, single[:3], np.ones(4), "expected arrays of 4 elements, got 3"),
        (single, single, single, r"expected scalars float64 \(5,\), got float32 \(4,\)"),
    ):
        with pytest.raises(KernelError, match=words):
            backend.sgd(UpdateArrays(p, g, (), scalars), 0.0, False, 0.0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("rule", ["sgd", "adam", "lars"])
def test_scaled_gradients_of_16_bits(backend, rule, dtype):
    """Gradients of 16 bits times a small scale, their squares and sums of squares do not vanish or overflow."""
    results = []
    for kind in (as_dtype(dtype), np.float32):
        # Powers of two, so that both arrays have the same values.
        for scale, size in ((2.0**-24, 0.25), (1.0, 2.0**-14), (1.0, 1024.0)):
            p, g = np.ones(1100, np.float32), np.full(1100, size).astype(kind)
            state = tuple(np.zeros(1100, np.float32) for _ in range(1 + (rule == "adam")))
            arrays = UpdateArrays(p, g, state, np.array([1.0, scale, 1, 1, 0]), [(0, 1100, True)])
            if rule == "sgd":
                backend.sgd(arrays, 0.9, False, 0.0)()
            elif rule == "adam":
                backend.adam(arrays, (0.9, 0.999), 1e-8, 0.0, False)()
            else:
                backend.lars(arrays, 0.9, 0.01, 0.0)()
            squares = np.zeros(1)
            backend.sum_of_squares([(g, 1)], squares)()
            results.append([p, *state, squares])
    for low, single in zip(results[:3], results[3:]):
        for found, want in zip(low, single):
            assert np.isfinite(want).all() and np.allclose(found, want, rtol=1e-6, atol=0)


FLOAT64 = np.dtype(np.float64)


@pytest.mark.parametrize("counts", [(0,), (1,), (7, 16), (3001, 0, 5)], ids=str)
def test_sum_of_squares(typed, counts):
    """The sum of squares over several arrays with divisors is right for long, misaligned and empty arrays."""
    arrays = [typed.draw(count + 1)[1:] for count in counts]
    divisors, out = [1, 2, 4][: len(counts)], typed.poisoned(1, dtype=FLOAT64)
    kernel = typed.backend.sum_of_squares(list(zip(arrays, divisors)), out)
    for _ in range(2):
        kernel()
        exact = math.fsum(math.fsum(a.astype(np.float64) ** 2) / d for a, d in zip(arrays, divisors))
        assert math.isclose(out[0], exact, rel_tol=1e-5 if typed.dtype == np.float32 else 1e-11)
        arrays[0][...] = 0
    kernel.close()


@pytest.mark.parametrize("size", [1 << 20, (1 << 20) - 1, 5000, 1025, 1024, 1023])
def test_squares_of_many_equal_numbers(arrays, size):
    """The sum of many equal squares is accurate, so the norm does not depend on the cut of the parameters.

    Equal values are the worst case: all rounding errors have one sign.
    """
    x, out = arrays.draw(size), arrays.poisoned(1, dtype=FLOAT64)
    for value in (0.1, 0.7, 1 / 3):
        x[...] = value
        arrays.backend.sum_of_squares([(x, 1)], out)()
        assert math.isclose(out[0], x.size * float(x[0]) ** 2, rel_tol=2e-6)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
@pytest.mark.parametrize("squares", [0.0, 25.0, np.inf, np.nan])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip(arrays, max_norm, squares, scaled):
    """Norm and factor are those of torch.nn.utils.clip_grad_norm_, also for gradients with a loss scale."""
    given, norm, factor = (arrays.poisoned(1, dtype=FLOAT64) for _ in range(3))
    given[...] = squares
    inverse = np.full_like(given, 1 / 1024) if scaled else None
    arrays.backend.clip(given, inverse, max_norm, norm, factor)()
    want = math.sqrt(squares) / (1024 if scaled else 1)
    assert np.array_equal(norm, [want], equal_nan=True)
    assert np.array_equal(factor, np.minimum(1, max_norm / (np.array([want]) + 1e-6)), equal_nan=True)


def test_numbers_of_another_kind_are_refused(arrays):
    x, out = arrays.draw(3), arrays.poisoned(1, dtype=FLOAT64)
    with pytest.raises(KernelError, match=r"sum_of_squares: expected out float64 \(1,\), got float32 \(3,\)"):
        arrays.backend.sum_of_squares([(x, 1)], x)
    with pytest.raises(KernelError, match="sum_of_squares: expected array 0 packed"):
        arrays.backend.sum_of_squares([(x[::2], 1)], out)
    with pytest.raises(KernelError, match=r"clip: expected inverse float64 \(1,\), got float32 \(3,\)"):
        arrays.backend.clip(out, x, 1.0, out, out)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1023, 1026])
def test_find_nonfinite(typed, bad, where):
    fine, x, flag = typed.draw(40), typed.draw(1027), np.zeros(1, np.int32)
    kernel = typed.backend.find_nonfinite([fine, x], flag)
    kernel()
    assert flag[0] == 0
    x[where] = bad
    kernel()
    assert flag[0] == 1
    x[where] = 0
    kernel()
    assert flag[0] == 1, "it is cleared by update_loss_scale only"


def test_the_largest_finite_numbers_are_finite(arrays):
    x, flag = arrays.draw(8), np.zeros(1, np.int32)
    x[...] = np.finfo(np.float32).max
    arrays.backend.find_nonfinite([x], flag)()
    assert flag[0] == 0


def test_dynamic_loss_scale(backend):
    """The loss scale is halved after an overflow and doubled after three steps without one, between 1 and 2^24."""
    state, flag = np.array([1024.0, 0, 1 / 1024]), np.zeros(1, np.int32)
    kernel = backend.update_loss_scale(state, flag, interval=3)
    seen = []
    for overflow in (0, 0, 1, 0, 0, 0, 0):
        flag[0] = overflow
        kernel()
        assert flag[0] == 0 and state[2] == 1 / state[0]
        seen.append(state[0])
    assert seen == [1024, 1024, 512, 512, 512, 1024, 1024]
    flag[0], state[0] = 1, 1
    kernel()
    assert state[0] == 1
    state[:2] = 2.0**24, 2
    kernel()
    assert state[0] == 2.0**24
