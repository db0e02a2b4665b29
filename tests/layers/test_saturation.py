"""Tests of layers and losses near saturation and at infinities: small gradients stay accurate."""

import inspect

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd import layers
from halograd.layers.loss import Loss
from tests.kernels.saturation import EXACT, ROUNDINGS, Long, assert_few, needs_more_digits, points, sigmoid, softplus

#: Losses whose kernels tests/kernels/test_saturation.py has.
OF_KERNELS = {"BinaryCrossEntropyWithLogits", "MeanSquaredError", "SoftmaxCrossEntropy"}
#: Losses of several elements, without a function that saturates: test_total_loss.py.
OF_SEVERAL = {"CRPS", "GradientError", "StructuralSimilarity"}
BACKENDS = [("numpy", "float32"), ("numpy", "float64"), ("onednn", "float32")]
EVERYWHERE = pytest.mark.parametrize("backend, dtype", BACKENDS)


def some_points(dtype, count=300):
    needs_more_digits(dtype)
    x = points(np.dtype(dtype))
    return np.ascontiguousarray(x[:: max(1, len(x) // count)])


def in_a_network(made, x, backend, dtype, gradient=None, target=None):
    """Return loss, output, gradients of the input and of the slope of a PReLU, for one sample ``(positions, 1, C)``.

    `gradient` is the output gradient of a layer; `target` is the target of a loss.
    """
    given = hg.Input(x.shape[1:], "x")
    passed = hg.Affine(1.0, name="passed")(given)
    if target is None:
        y = made(passed)
        loss = _Product(gradient)(y, hg.Input(y.shape, "t"))
        target = np.zeros((1, *y.shape))
    else:
        y, loss = passed, made(passed, hg.Input(target.shape[1:], "t"))
    network = hg.Network({"y": y, "loss": loss})
    with (
        hg.Communicator(MPI.COMM_SELF) as alone,
        hg.get_backend(backend) as kernels,
        hg.Executor(network, alone, kernels, 1, dtype=dtype, probed=["x"]) as executor,
    ):
        executor.set_input("x", x)
        executor.set_input("t", target)
        with np.errstate(all="ignore"):
            executor.forward(training=True)
            found = executor.loss_value()
            output = np.array(executor.gather(network.names[y]))
            executor.backward()
        executor.reducer.finish()
        slope = executor.store.gather(alone, executor.store.grads)["p/slope"].copy() if made.name == "p" else None
        return found, output, np.array(executor.gather("x", gradient=True)), slope


class _Product(Loss):
    """Loss that is the sum of the prediction times a constant."""

    def __init__(self, gradient):
        super().__init__()
        self.gradient = gradient

    def local(self, prediction, target, dx, scale, work, weights=None):
        if dx is not None:
            dx[...] = self.gradient if self.gradient is not None else 1
        return 0.0


def test_every_loss_is_here_or_with_the_kernels():
    public = {name: getattr(layers, name) for name in layers.__all__}
    losses = {n for n, a in public.items() if inspect.isclass(a) and issubclass(a, Loss) and a is not Loss}
    assert losses == {*OF_KERNELS, *OF_SEVERAL, *POINTWISE, "Dice", "Tversky"}


# ---------------------------------------------------------------------- losses
def focal(x, t, gamma, positive, negative):
    """Return the focal loss, and the two terms of its derivative, which have the same sign for targets 0 and 1."""
    x, t = x.astype(Long), Long(t)
    p, rest = sigmoid(x), sigmoid(-x)
    ce = (1 - t) * softplus(x) + t * softplus(-x)
    wrong = (1 - t) * p + t * rest
    factor = (positive * t + negative * (1 - t)) * wrong**gamma
    inner = np.where(t == 0, rest, np.where(t == 1, p, p * rest / wrong))
    return factor * ce, factor * ((1 - t) * p - t * rest), -factor * gamma * ce * (2 * t - 1) * inner


def huber(x, t, delta):
    d = x.astype(Long) - Long(t)
    near = np.abs(d) <= delta
    value = np.where(near, d * d / 2, delta * (np.abs(d) - Long(delta) / 2))
    return value, np.clip(d, -delta, delta), 0 * d


def absolute(x, t):
    d = x.astype(Long) - Long(t)
    return np.abs(d), np.sign(d), 0 * d


POINTWISE = {
    "Focal": [
        (layers.Focal(), lambda x, t: focal(x, t, 2, Long(0.25), Long(0.75))),
        (layers.Focal(0.5, None), lambda x, t: focal(x, t, Long(0.5), 1, 1)),
        (layers.Focal(0.0, None), lambda x, t: focal(x, t, 0, 1, 1)),
    ],
    "Huber": [(layers.Huber(0.5), lambda x, t: huber(x, t, 0.5)), (layers.Huber(), lambda x, t: huber(x, t, 1))],
    "AbsoluteError": [(layers.AbsoluteError(), absolute)],
}


@pytest.mark.parametrize("target", [0.0, 1.0])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", POINTWISE)
def test_elementwise_loss(name, dtype, target):
    for loss, definition in POINTWISE[name]:
        x = some_points(dtype, 3000)
        if name == "Huber":
            x = x[np.abs(x) > 1e-15]  # the square of a smaller number is subnormal
        value, slope, t = x.copy(), np.full_like(x, np.nan), np.full_like(x, target)
        loss.terms(value, t, slope, {})
        want, *terms = definition(x, target)
        assert_few(value, want, f"{name} value")
        assert_few(slope, terms[0] + terms[1], f"{name} derivative")


@EVERYWHERE
@pytest.mark.parametrize("target", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["Dice", "Tversky"])
def test_overlap_of_sigmoids(kind, target, backend, dtype):
    x = some_points(dtype)[None, :, None, None]
    loss = layers.Dice() if kind == "Dice" else layers.Tversky(0.3, 0.7)
    found, _, dx, _ = in_a_network(loss, x, backend, dtype, target=np.full(x.shape, target))
    p, slope = EXACT["sigmoid"](x.astype(Long), 0)
    n, i, a, b = (Long(v) for v in loss.ratio)
    t, both = Long(target) * x.size, (p * Long(target)).sum()
    numerator, divisor = n * both + 1, i * both + a * p.sum() + b * t + 1
    assert_few(np.array([found]).astype(dtype), np.array([1 - numerator / divisor]), "loss", np.ones(1))
    # dloss/dp is one number here.
    rate = numerator * (i * Long(target) + a) / divisor**2 - n * Long(target) / divisor
    assert_few(dx, slope * rate, "gradient")


@EVERYWHERE
@pytest.mark.parametrize("label", [0, 1])
def test_overlap_of_softmax(label, backend, dtype):
    x = margins(dtype)
    target = np.full((1, x.shape[1], 1, 1), label)
    _, _, dx, _ = in_a_network(layers.Dice("softmax"), x, backend, dtype, target=target)
    p = _probabilities(x)
    t = np.zeros(3, Long)
    t[label] = 1
    sums = (p.sum(axis=(0, 1, 2)), (p * t).sum(axis=(0, 1, 2)), t * x.shape[1])
    divisor = sums[0] + sums[2] + 1
    rate = ((2 * sums[1] + 1) / divisor**2 - 2 * t / divisor) / 3
    want = sum(p * p[..., k : k + 1] * (rate - rate[k]) for k in range(3))
    size = sum(p * p[..., k : k + 1] * np.abs(rate - rate[k]) for k in range(3))
    assert_few(dx, want, "gradient", np.maximum(np.abs(want), size))


def margins(dtype):
    """Return logits of three classes, the first of which exceeds the others by the values of `some_points`."""
    margin = some_points(dtype)
    x = np.zeros((1, len(margin), 1, 3), dtype)
    x[0, :, 0, 0] = margin
    return x


def _probabilities(x):
    z = x.astype(Long) - x.max(axis=-1, keepdims=True).astype(Long)
    return np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)


def _of_others(p):
    """Return, for each of three probabilities, the sum of the other two."""
    return np.stack([p[..., [k for k in range(3) if k != c]].sum(axis=-1) for c in range(3)], axis=-1)


# ---------------------------------------------------------------------- layers that are no kernel
@EVERYWHERE
def test_softmax(backend, dtype):
    """Values and gradients of single outputs of a softmax are exact to a few roundings."""
    x = margins(dtype)
    for of in range(3):
        _, y, dx, _ = in_a_network(hg.Softmax(), x, backend, dtype, gradient=np.eye(3)[of])
        p = _probabilities(x)
        assert_few(y, p, "value")
        others = _of_others(p)
        want = np.where(np.arange(3) == of, p * others, -p * p[..., of : of + 1])
        assert_few(dx, want, "gradient")


@EVERYWHERE
def test_log_softmax(backend, dtype):
    """Values and gradients of single outputs of LogSoftmax are exact to a few roundings."""
    x = margins(dtype)
    for of in range(3):
        _, y, dx, _ = in_a_network(hg.LogSoftmax(), x, backend, dtype, gradient=np.eye(3)[of])
        p = _probabilities(x)
        others = _of_others(p)
        value = np.where(others < 0.5, np.log1p(-np.minimum(others, 0.5)), np.log(p))
        assert_few(y, value, "value")
        want = np.where(np.arange(3) == of, others, -p)
        # Of the output, the logarithm, whose rounding becomes a relative error of its exponential.
        assert_few(dx, want, "gradient", np.abs(want) * (1 + np.abs(value) / ROUNDINGS))


@EVERYWHERE
@pytest.mark.parametrize("slopes", ["one", "channel"])
def test_prelu_of_infinities(slopes, backend, dtype):
    x = np.array([np.inf, -1, 2, -np.inf], dtype).reshape(1, 4, 1, 1)
    _, y, dx, slope = in_a_network(hg.PReLU(slopes, name="p"), x[:, :3], backend, dtype)
    assert y.ravel().tolist() == [np.inf, -0.25, 2] and dx.ravel().tolist() == [1, 0.25, 1]
    assert slope.tolist() == [-1]
    _, y, dx, slope = in_a_network(hg.PReLU(slopes, name="p"), x, backend, dtype)
    assert y.ravel()[3] == -np.inf and dx.ravel()[3] == 0.25 and slope.tolist() == [-np.inf]


@EVERYWHERE
@pytest.mark.parametrize("slopes", ["one", "channel"])
def test_prelu_of_an_infinite_gradient(slopes, backend, dtype):
    """An infinite output gradient passes a PReLU, and does not change the gradient of its slope for positive inputs."""
    x = np.array([np.inf, 1, -1], dtype).reshape(1, 3, 1, 1)
    gradient = np.array([np.inf, np.inf, 4]).reshape(1, 3, 1, 1)
    _, _, dx, slope = in_a_network(hg.PReLU(slopes, name="p"), x, backend, dtype, gradient=gradient)
    assert dx.ravel().tolist() == [np.inf, np.inf, 1] and slope.tolist() == [-4]


@EVERYWHERE
def test_clamp_of_infinities(backend, dtype):
    x = np.array([np.inf, -np.inf, 2], dtype).reshape(1, 3, 1, 1)
    _, y, dx, _ = in_a_network(hg.Clamp(), x, backend, dtype)
    assert y.ravel().tolist() == [6, 0, 2] and dx.ravel().tolist() == [0, 0, 1]
