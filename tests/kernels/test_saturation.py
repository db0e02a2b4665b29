"""Activations, losses and NaN: from -100 to 100 and at infinities within a few roundings; NaN reaches every output."""

import warnings

import numpy as np
import pytest

from halograd.kernels import ACTIVATIONS, ClassTargets, FusedActivation, Geometry, LossArrays, get_backend
from halograd.kernels.cuda import CudaKernels
from halograd.kernels.kernel import BatchNormArrays

from .conftest import Arrays
from .every import norm
from .reference import FUSED
from .saturation import (
    ALPHAS,
    EXACT,
    ROUNDINGS,
    SMALL,
    SMALL_FLUSHED,
    Long,
    assert_few,
    exact,
    needs_more_digits,
    points,
    roundings,
    sigmoid,
    softplus,
)

#: Extreme values, and their maximum with 0.
EXTREMES = np.array([-np.inf, np.inf, np.nan, -3e38, 3e38, -1e-30, 1e-30, 0, -1, 2], np.float32)
RECTIFIED = np.array([0, np.inf, np.nan, 0, 3e38, 0, 1e-30, 0, 0, 2], np.float32)
RELU = FusedActivation("relu")


def results(arrays, kind, x, alpha):
    """Return value and derivative of an activation at a copy of `x`; warnings are errors."""
    x = np.array(x)
    y, dy, dx = np.full_like(x, np.nan), np.ones_like(x), np.full_like(x, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        forward, backward = arrays.backend.activation(kind, x, y, dy, dx, alpha)
        forward()
        backward()
    forward.close()
    backward.close()
    return y, dx


def test_every_activation_has_an_exact_form():
    assert set(EXACT) == set(ACTIVATIONS)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation_near_saturation(typed, kind):
    needs_more_digits(typed.dtype)
    x = points(typed.dtype)
    for alpha in ALPHAS.get(kind, (0.0,)):
        y, dx = results(typed, kind, x, alpha)
        (value, slope), size = exact(kind, x, alpha)
        small = SMALL_FLUSHED if isinstance(typed.backend, CudaKernels) else SMALL
        found = {"value": roundings(y, value, None, small), "derivative": roundings(dx, slope, size, small)}
        for what, error in found.items():
            worst = int(np.argmax(np.where(np.isnan(error), np.inf, error)))
            assert error[worst] <= ROUNDINGS, f"{what} of {kind}({alpha}) at {x[worst]}: {error[worst]} roundings"


@pytest.mark.torch
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_the_exact_forms_are_those_of_torch(kind):
    """The exact closed forms agree with torch's float64, except where torch subtracts and loses digits."""
    x = points(np.float64)
    x = x[np.abs(np.abs(x) - 3) > 1e-14]  # the derivative of a hard swish at its corners is a convention
    for alpha in ALPHAS.get(kind, (0.0,)):
        (value, slope), _ = exact(kind, x, alpha)
        for found, want in zip(torch_results(kind, x, alpha), (value, slope)):
            assert np.all(np.abs(found - want) <= 4e-9 * np.abs(want) + 1e-15 * np.maximum(1, np.abs(x)))


@pytest.mark.torch
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation_of_infinities(typed, kind):
    """Activations of infinities equal torch's; where torch has NaN (infinity times 0), NaN or the limit is accepted."""
    x = np.array([-np.inf, np.inf, np.nan] * 6).astype(typed.dtype)
    limits = {"value": exact(kind, np.array([-1e4, 1e4]), 0.1)[0][0], "derivative": (0, 1)}
    for alpha in ALPHAS.get(kind, (0.0,)):
        pairs = zip(results(typed, kind, x, alpha), torch_results(kind, x.astype(np.float64), alpha), limits)
        for found, want, what in pairs:
            for i in (0, 1):
                number = float(found[i])
                if np.isnan(want[i]):
                    assert np.isnan(number) or number == limits[what][i]
                else:
                    assert number == want[i] or abs(number - want[i]) <= 1e-2 * abs(want[i])
                assert np.array_equal(found[i::3], np.repeat(found[i], 6), equal_nan=True)
            assert what == "derivative" or np.isnan(found[2::3]).all()


@pytest.mark.parametrize("kind", ["relu", "hard_sigmoid", "hard_swish"])
def test_no_gradient_passes_where_an_activation_is_flat(typed, kind):
    """Where an activation is flat, an infinite or NaN gradient gives 0 (for ReLU in oneDNN only an infinite one)."""
    x = np.array([-np.inf, -4, 4, np.inf] * 4).astype(typed.dtype)
    onednn = kind == "relu" and typed.backend.name == "onednn" and typed.dtype == np.float32
    for number in (np.inf, -np.inf) if onednn else (np.inf, -np.inf, np.nan):
        y, dy, dx = np.full_like(x, np.nan), np.full_like(x, number), np.full_like(x, 7)
        forward, backward = typed.backend.activation(kind, x, y, dy, dx)
        forward()
        backward()
        passed = 0 if kind == "hard_sigmoid" else number
        assert np.array_equal(dx.astype(np.float32), np.array([0, 0, passed, passed] * 4), equal_nan=True)


def torch_results(kind, x, alpha):
    torch = pytest.importorskip("torch", reason="needs torch as oracle: pip install 'halograd[oracle]'")
    functional = torch.nn.functional
    # torch divides by 6 in float32 in the gradient of its own hard sigmoid.
    others = {
        "hard_sigmoid": lambda v: functional.relu6(v + 3) / 6,
        "gelu_tanh": lambda v: functional.gelu(v, approximate="tanh"),
    }
    function = others.get(kind) or getattr(functional, kind.replace("_sw", "sw"))
    given = torch.tensor(x.astype(np.float64), requires_grad=True)
    made = function(given, alpha) if kind in ALPHAS else function(given)
    made.sum().backward()
    return made.detach().numpy(), given.grad.numpy()


@pytest.fixture(params=["numpy", "onednn", "onednn on 2 threads"])
def extremes(backends, request):
    """Return float32 arrays of every backend; for oneDNN also with several threads per kernel."""
    if not request.param.endswith("threads"):
        yield Arrays(backends(request.param), np.float32)
        return
    backends("onednn")
    with get_backend("onednn", threads=2) as made:
        yield Arrays(made, np.float32)


def extreme(arrays, *shape):
    """Return an array of repeated EXTREMES, and its ReLU."""
    x = arrays.draw(*shape)
    x.reshape(-1)[...] = np.resize(EXTREMES, x.size)
    return x, np.resize(RECTIFIED, x.size).reshape(shape)


def assert_rectified(y, want):
    assert np.array_equal(y, want, equal_nan=True), f"{y.reshape(-1)[:10]} instead of {want.reshape(-1)[:10]}"


@pytest.mark.parametrize("terms", [None, 1, 2, 3], ids=["alone", "1", "2", "3"])
@pytest.mark.parametrize("in_place", [False, True], ids=["two arrays", "in place"])
def test_relu_of_infinities(extremes, in_place, terms):
    """ReLU, alone or of a sum, is exact for infinities and NaN, and for numbers after them."""
    x, want = extreme(extremes, 3, 7, 5, 16)
    first = x.copy()
    y = x if in_place else extremes.poisoned(*x.shape)
    if terms is None:
        kernel = extremes.backend.activation("relu", x, y, None, None)[0]
    else:
        kernel = extremes.backend.add([x, *(np.zeros_like(x) for _ in range(terms - 1))], y, RELU)
    for _ in range(2):
        x[...] = first
        kernel()
        assert_rectified(y, want)
    x[...] = 1
    kernel()
    assert (y == 1).all()
    kernel.close()


@pytest.mark.parametrize("geometry", [Geometry.of((1, 1)), Geometry.of((3, 3), 1, 1)], ids=["1x1", "3x3"])
@pytest.mark.parametrize("channels", [5, 16, 64])
def test_relu_of_convolutions_of_infinities(extremes, channels, geometry):
    """ReLU of a convolution with infinite outputs is exact; they come from a bias, as infinite inputs give NaN."""
    x, w = extremes.draw(2, 6, 7, channels), extremes.draw(10, *geometry.kernel, channels)
    b, y = extremes.draw(10), extremes.poisoned(2, 6, 7, 10)
    kernel = extremes.backend.conv_forward(x, w, b, y, geometry, RELU)
    for _ in range(2):
        b[...] = 0
        b[1:4] = EXTREMES[:3]
        kernel()
        assert_rectified(y[..., 1:4], np.broadcast_to(RECTIFIED[:3], (2, 6, 7, 3)))
        assert np.isfinite(y[..., 4:]).all()
    x[...] = 0
    b[...] = 2
    kernel()
    assert (y == 2).all()
    kernel.close()


def test_relu_of_a_convolution_of_an_image_of_infinities(extremes):
    x, want = extreme(extremes, 1, 5, 4, 1)
    y = extremes.poisoned(1, 5, 4, 1)
    extremes.backend.conv_forward(x, np.ones((1, 1, 1, 1), np.float32), None, y, Geometry.of((1, 1)), RELU)()
    assert_rectified(y, want)


@pytest.mark.parametrize("channels", [16, 18])
def test_relu_of_a_norm_and_a_residual_of_infinities(extremes, channels):
    """ReLU of a batch norm with an infinite residual gives infinity or 0, as the residual determines the sum."""
    given = norm(extremes, (2, 8, 9, channels), local=False, activation=RELU, dy=None, dx=None)
    given["x"][...] = 0
    given["mean"][...], given["beta"][...] = 0, 0
    given["residual"], want = extreme(extremes, 2, 8, 9, channels)
    kernels = extremes.backend.batch_norm(BatchNormArrays(**given))
    for _ in range(2):
        kernels.forward()
        assert_rectified(given["y"], want)
    kernels.close()


# ---------------------------------------------------------------------- losses


def each(kernel_of, x):
    """Return loss and gradient of every row of `x`, each computed alone."""
    losses, gradients = [], np.full_like(x, np.nan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for i in range(len(x)):
            loss = np.zeros(1)
            kernel = kernel_of(i, x[i : i + 1], gradients[i : i + 1], loss)
            kernel()
            kernel.close()
            losses.append(loss[0])
    return np.array(losses).astype(x.dtype), gradients


def some_points(dtype):
    x = points(dtype)
    return np.ascontiguousarray(x[:: max(1, len(x) // 150)])


@pytest.mark.parametrize("positive", [None, 3.0])
@pytest.mark.parametrize("target", [0.0, 1.0, 0.25])
def test_saturated_binary_cross_entropy(typed, target, positive):
    needs_more_digits(typed.dtype)
    x = some_points(typed.dtype)[:, None]
    t = np.full(x.shape, target, x.dtype)

    def kernel(i, x, dx, loss):
        return typed.backend.binary_cross_entropy(LossArrays(x, t[i : i + 1], dx, loss), positive)

    losses, gradients = each(kernel, x)
    wide, p = x.astype(Long), positive or 1
    one, zero = p * Long(target), 1 - Long(target)
    assert_few(losses, (zero * softplus(wide) + one * softplus(-wide))[:, 0], "loss")
    up, down = zero * sigmoid(wide), one * sigmoid(-wide)
    assert_few(gradients, up - down, "gradient", np.maximum(np.maximum(up, down), np.abs(up - down)))


@pytest.mark.parametrize("smoothing", [0.0, 0.125])
@pytest.mark.parametrize("label", [0, 1])
@pytest.mark.parametrize("classes", [2, 3, 20])
def test_saturated_softmax_cross_entropy(typed, classes, label, smoothing):
    needs_more_digits(typed.dtype)
    margin = some_points(typed.dtype)
    x = np.zeros((len(margin), classes), typed.dtype)
    x[:, 0] = margin
    t = np.full((1, 1), label, np.int32)

    def kernel(i, x, dx, loss):
        return typed.backend.softmax_cross_entropy(LossArrays(x, t, dx, loss), ClassTargets(classes), smoothing)

    losses, gradients = each(kernel, x)
    # For every class: the sum of the others, and its own term.
    z = x.astype(Long) - np.maximum(x[:, :1], 0).astype(Long)
    e = np.exp(z)
    others = np.stack([np.delete(e, c, axis=1).sum(axis=1) for c in range(classes)], axis=1)
    top = np.argmax(z, axis=1)[:, None]
    q = np.full(classes, Long(smoothing) / classes)
    q[label] += 1 - Long(smoothing)
    rest = np.log1p(np.take_along_axis(others, top, axis=1))[:, 0]
    assert_few(losses, rest - (q * z).sum(axis=1), "loss")
    probability, missing = e / (e + others), others / (e + others)
    want = probability * (1 - q) - q * missing
    assert_few(gradients, want, "gradient", np.maximum(np.abs(want), np.maximum(probability * (1 - q), q * missing)))


def test_squared_error_of_small_differences(typed):
    needs_more_digits(typed.dtype)
    x = some_points(typed.dtype)[:, None]
    x = x[(np.abs(x) > 1e-15) | (x == 0)][:, None]
    zero = np.zeros((1, 1), x.dtype)
    losses, gradients = each(lambda i, x, dx, loss: typed.backend.mean_squared_error(LossArrays(x, zero, dx, loss)), x)
    wide = x.astype(Long)
    assert_few(losses, (wide * wide)[:, 0], "loss")
    assert_few(gradients, 2 * wide, "gradient")


@pytest.mark.torch
@pytest.mark.parametrize("number", [-np.inf, np.inf])
@pytest.mark.parametrize("target", [0, 1])
@pytest.mark.parametrize("kind", ["binary_cross_entropy", "softmax_cross_entropy", "mean_squared_error"])
def test_losses_of_infinities(typed, kind, target, number):
    """Losses of infinities equal torch's; where torch has NaN (infinity times 0), NaN or infinity is accepted."""
    torch = pytest.importorskip("torch", reason="needs torch as oracle: pip install 'halograd[oracle]'")
    functional, classes = torch.nn.functional, kind.startswith("softmax")
    x = np.array([[number, 0, 1] if classes else [number]]).astype(typed.dtype)
    t = np.array([[target]], np.int32 if classes else np.float32)

    def kernel(i, x, dx, loss):
        arrays = LossArrays(x, t, dx, loss)
        made = getattr(typed.backend, kind)
        return made(arrays, ClassTargets(3)) if classes else made(arrays)

    losses, gradients = each(kernel, x)
    given = torch.tensor(x.astype(np.float64), requires_grad=True)
    if classes:
        want = functional.cross_entropy(given, torch.tensor([target]))
    elif kind.startswith("binary"):
        want = functional.binary_cross_entropy_with_logits(given, torch.tensor(t, dtype=torch.float64))
    else:
        want = functional.mse_loss(given, torch.tensor(t, dtype=torch.float64))
    want.backward()
    found, value = float(losses[0]), want.item()
    assert np.isnan(found) or found == np.inf if np.isnan(value) else found == pytest.approx(value, rel=1e-2)
    expected = given.grad.numpy()
    assert np.array_equal(np.isnan(gradients), np.isnan(expected))
    assert np.allclose(gradients.astype(np.float64), expected, rtol=1e-2, equal_nan=True)


POOLS = {
    "2/2/0": Geometry.of((2, 2), 2),
    "3/1/1": Geometry.of((3, 3), 1, 1),
    "dropped rows": Geometry.of((3, 3), 2, ((1, -1), (0, -2))),
}
SHAPE = (2, 8, 9)
#: Positions (sample, row, column) of NaN, in the last channel.
PLACES = ((0, 2, 3), (1, 7, 8))
CHANNELS = pytest.mark.parametrize("channels", [5, 16, 18])


def with_nan(arrays, *shape, value=np.nan):
    x = arrays.draw(*shape)
    x[(*zip(*PLACES), -1)] = value
    return x


def windows_with(x, geometry):
    """Return which pooling windows contain NaN."""
    torch = pytest.importorskip("torch", reason="needs torch as oracle: pip install 'halograd[oracle]'")
    (lo_h, hi_h), (lo_w, hi_w) = geometry.padding
    padded = torch.nn.functional.pad(
        torch.tensor(np.isnan(x).astype(np.float32)).movedim(-1, 1), (lo_w, hi_w, lo_h, hi_h)
    )
    return (torch.nn.functional.max_pool2d(padded, geometry.kernel, geometry.stride) > 0).movedim(1, -1).numpy()


@CHANNELS
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(arrays, kind, channels):
    x = with_nan(arrays, *SHAPE, channels)
    y, dy, dx = arrays.poisoned(*x.shape), arrays.draw(*x.shape), arrays.poisoned(*x.shape)
    forward, backward = arrays.backend.activation(kind, x, y, dy, dx, 0.1)
    forward()
    assert np.array_equal(np.isnan(y), np.isnan(x))
    backward()


@CHANNELS
def test_leaky_relu_without_slope(arrays, channels):
    x = with_nan(arrays, *SHAPE, channels)
    y = arrays.poisoned(*x.shape)
    arrays.backend.activation("leaky_relu", x, y, None, None, 0.0)[0]()
    assert np.array_equal(np.isnan(y), np.isnan(x)) and np.array_equal(y[y == y], np.maximum(x, 0)[x == x])


@CHANNELS
@pytest.mark.parametrize("f", FUSED, ids=str)
def test_sums(arrays, f, channels):
    x = with_nan(arrays, *SHAPE, channels)
    y = arrays.draw(*x.shape)
    arrays.backend.add([arrays.draw(*x.shape), x, y], y, f)()
    assert np.array_equal(np.isnan(y), np.isnan(x))


@pytest.mark.parametrize("where", ["image", "weights", "bias"])
@pytest.mark.parametrize("geometry", [Geometry.of((1, 1)), Geometry.of((3, 3), 1, 1)], ids=["1x1", "3x3"])
@CHANNELS
@pytest.mark.parametrize("f", FUSED, ids=str)
def test_convolutions(arrays, f, channels, geometry, where):
    x = with_nan(arrays, *SHAPE, channels) if where == "image" else arrays.draw(*SHAPE, channels)
    w, b, y = arrays.draw(16, *geometry.kernel, channels), arrays.draw(16), arrays.poisoned(*SHAPE, 16)
    if where == "weights":
        w[3, 0, 0, 0] = np.nan
    if where == "bias":
        b[3] = np.nan
    arrays.backend.conv_forward(x, w, b, y, geometry, f)()
    found = np.isnan(y)
    if where == "image":
        reach = geometry.kernel[0] // 2
        for n, i, j in PLACES:
            assert found[n, max(0, i - reach) : i + reach + 1, max(0, j - reach) : j + reach + 1].all()
    else:
        assert found[..., 3].any() and (where == "weights" or found[..., 3].all())
        assert not found[..., :3].any() and not found[..., 4:].any()


@CHANNELS
@pytest.mark.parametrize("trainable", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", POOLS)
def test_maxima(arrays, name, trainable, channels):
    """A NaN is the maximum of its windows and gets their gradient; the next batch is not affected."""
    geometry = POOLS[name]
    x = with_nan(arrays, *SHAPE, channels)
    numbers = arrays.draw(*x.shape)
    shape = (SHAPE[0], *geometry.output_shape(SHAPE[1:]), channels)
    y, dy, dx = arrays.poisoned(*shape), arrays.draw(*shape), arrays.poisoned(*x.shape)
    poisoned, want = x.copy(), windows_with(x, geometry)
    forward, backward = arrays.backend.max_pool(x, y, *((dy, dx) if trainable else (None, None)), geometry)
    for image in (numbers, poisoned, numbers):
        x[...] = image
        forward()
        assert np.array_equal(np.isnan(y), want if image is poisoned else np.zeros_like(want))
        if backward is None:
            continue
        backward()
        for n, i, j in PLACES if image is poisoned else ():
            rows, columns = (
                [o for o in range(shape[1 + axis]) if 0 <= at + lo - o * s < k]
                for axis, (at, (lo, _), s, k) in enumerate(
                    zip((i, j), geometry.padding, geometry.stride, geometry.kernel)
                )
            )
            readers = [float(dy[n, row, column, -1]) for row in rows for column in columns]
            assert abs(dx[n, i, j, -1] - sum(readers)) <= 1e-5
    forward.close()


@CHANNELS
def test_maxima_of_no_numbers(arrays, channels):
    """The maximum of a window that contains only -inf is -inf."""
    x = arrays.draw(*SHAPE, channels)
    x[0, :2, :2] = -np.inf
    y = arrays.poisoned(2, 4, 4, channels)
    arrays.backend.max_pool(x, y, None, None, POOLS["2/2/0"])[0]()
    assert np.isneginf(y[0, 0, 0]).all() and np.isfinite(y[1]).all()


@CHANNELS
@pytest.mark.parametrize("name", POOLS)
def test_means(arrays, name, channels):
    geometry = POOLS[name]
    x = with_nan(arrays, *SHAPE, channels)
    y = arrays.poisoned(SHAPE[0], *geometry.output_shape(SHAPE[1:]), channels)
    arrays.backend.average_pool(x, y, None, None, geometry, True)[0]()
    assert np.array_equal(np.isnan(y), windows_with(x, geometry))


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract:RuntimeWarning")  # NumPy, at infinity
@CHANNELS
@pytest.mark.parametrize("f", FUSED, ids=str)
@pytest.mark.parametrize("local", [False, True], ids=["given", "own"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_batch_norm_in_training(arrays, value, local, f, channels):
    """One NaN in training makes statistics and all elements of its channel NaN; an infinity makes the variance NaN."""
    given = norm(arrays, (*SHAPE, channels), local=local, activation=f)
    given["x"][(*zip(*PLACES), -1)] = value
    kernels = arrays.backend.batch_norm(BatchNormArrays(**given))
    kernels.statistics()
    if not local:
        mean, square = given["sums"] / (given["x"].size // channels)
        given["mean"][...], given["var"][...] = mean, square - mean**2
    kernels.forward()
    assert np.isnan(given["y"][..., -1]).all() and np.isfinite(given["y"][..., :-1]).all()
    assert np.isnan(given["var"]).tolist() == [False] * (channels - 1) + [True]
    again = {**given, "y": np.zeros_like(given["y"]), "dy": None, "dx": None, "local": False, "of_x": True}
    arrays.backend.batch_norm(BatchNormArrays(**again)).forward()
    np.testing.assert_array_equal(again["y"], given["y"], err_msg="normalized again by the statistics of the batch")
    kernels.close()


@CHANNELS
@pytest.mark.parametrize("f", FUSED, ids=str)
@pytest.mark.parametrize("where", ["x", "mean", "var", "gamma", "beta"])
def test_batch_norm_in_evaluation(arrays, where, f, channels):
    given = norm(arrays, (*SHAPE, channels), local=False, activation=f)
    given |= {"dy": None, "dx": None}
    given["var"][...] = 1
    want = np.zeros(given["x"].shape, bool)
    if where == "x":
        given["x"][(*zip(*PLACES), -1)] = np.nan
        want[(*zip(*PLACES), -1)] = True
    else:
        given[where][-1] = np.nan
        want[..., -1] = True
    arrays.backend.batch_norm(BatchNormArrays(**given)).forward()
    assert np.array_equal(np.isnan(given["y"]), want)


def test_dense(arrays):
    x, w, y = arrays.draw(4, 16), arrays.draw(6, 16), arrays.poisoned(4, 6)
    x[2, 3] = np.nan
    arrays.backend.dense_forward(x, w, None, y)()
    assert np.isnan(y[2]).all() and np.isfinite(y[[0, 1, 3]]).all()
