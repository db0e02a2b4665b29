"""Tests that NaN reaches the output of every kernel that reads it, on every backend, so that a run detects it."""

import numpy as np
import pytest

from halograd.kernels import ACTIVATIONS, Geometry
from halograd.kernels.kernel import BatchNormArrays

from .every import norm
from .reference import FUSED

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
