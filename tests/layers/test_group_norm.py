"""Tests of group, instance, layer and RMS norm: the definition, messages, rejected settings."""

import math

import numpy as np
import pytest

from halograd.layers import GroupNorm, Input, LayerNorm, RMSNorm
from halograd.testing import grids, random_array, run_layer
from tests.layers.cases import NORMS
from tests.layers.norms import check_grids, close, executing, moved, normalize, step, traffic
from tests.support.refusals import refusals

SHAPE = (7, 5, 4)
AXES = ("sample", "height", "width")
BACKENDS = ("numpy", "onednn")

OPTIONS = [{"activation": "relu"}, {"affine": False}, {"affine": False, "activation": "relu"}]


def oracle(kind, x, relu=False, affine=True):
    """Return the results by the definition: x as (N, positions, groups, members), statistics over the kind's axes."""
    shape, channels = x.shape, x.shape[-1]
    groups = {"group": 2, "instance": channels, "layer": 1, "channels": 1, "rms": 1}[kind]
    axes, centered = (3,) if kind in ("channels", "rms") else (1, 3), kind != "rms"
    split = (shape[0], -1, groups, channels // groups)
    gamma, beta = (random_array((channels,), f"norm/{k}") for k in ("gamma", "beta"))
    gamma, beta = gamma if affine else np.ones(channels), beta * (affine and centered)
    g = random_array(shape, "g").reshape(split)
    vectors = [one.reshape(groups, -1) for one in (gamma, beta)]
    found = normalize(x.reshape(split), g, *vectors, axes, relu=relu, centered=centered)
    result = {k: found[k].reshape(shape) for k in ("y", "dx0")}
    if affine:
        plain = normalize(x.reshape(split), g, np.ones(split[2:]), np.zeros(split[2:]), axes, centered=centered)
        xhat = plain["y"].reshape(shape)
        dy = random_array(shape, "g") * (result["y"] > 0 if relu else 1)
        rest = tuple(range(len(shape) - 1))
        result |= {"dgamma": (dy * xhat).sum(rest)} | ({"dbeta": dy.sum(rest)} if centered else {})
    return result


@pytest.mark.mpi
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("options", OPTIONS)
def test_is_the_definition(ranks, turn, kind, options):
    x = random_array((3, *SHAPE), "x0")
    want = oracle(kind, x, relu="activation" in options, affine=options.get("affine", True))
    check_grids(ranks, turn, lambda: NORMS[kind](**options), SHAPE, want, batch=3, steps=2)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_against_the_definition(ranks, turn, kind, backend):
    shape = (9, 8, 16)
    x = random_array((2, *shape), "x0").astype(np.float32)
    want = oracle(kind, x, relu=True)
    check_grids(ranks, turn, lambda: NORMS[kind](activation="relu"), shape, want, 300, dtype="float32", backend=backend)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["group", "instance", "channels"])
@pytest.mark.parametrize(("mean", "spread"), [(1e6, 1.0), (5.0, 0.0)])
def test_large_mean_and_small_variance(ranks, turn, kind, mean, spread):
    shift, x = moved(SHAPE, 2, lambda x: mean + spread * x)
    want = {"y": oracle(kind, x)["y"]}
    check_grids(ranks, turn, NORMS[kind], SHAPE, want, 10 * max(1, abs(mean) / math.hypot(spread, 3e-3)), shift=shift)


@pytest.mark.mpi
@pytest.mark.parametrize("kind", NORMS)
def test_evaluation_is_the_same(ranks, kind):
    with executing(lambda: NORMS[kind](), SHAPE, ranks, {"width": ranks.size}, trainable=False) as executor:
        for name, array in executor.store.params.items():
            array[...] = random_array(array.shape, name)
        executor.forward(training=False)
        executor.loss_value()
        y = executor.gather("norm")
    if y is not None:
        close(y, oracle(kind, random_array((2, *SHAPE), "x0"))["y"])


@pytest.mark.many_ranks
@pytest.mark.parametrize("kind", NORMS)
def test_one_sum_forward_and_one_backward_among_those_who_share_samples(ranks, kind):
    groups = {"group": 2, "instance": SHAPE[-1], "layer": 1, "channels": 0, "rms": 0}[kind]
    for parts in grids(ranks.size, AXES):
        with executing(lambda: NORMS[kind](), SHAPE, ranks, parts, batch=4) as executor:
            step(executor)
            sent = traffic(ranks, lambda executor=executor: step(executor))
            nbytes = ranks.counters["statistics"].bytes
            box = executor.program.values["norm"].box
        shares = groups and parts["height"] * parts["width"] > 1 and box.shape[0]
        assert sent.get("statistics", 0) == (2 if shares else 0)
        assert nbytes == (2 * box.shape[0] * 2 * groups * 8 if shares else 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rms_norm_without_eps_takes_the_rounding_unit(ranks, dtype):
    tiny = moved(SHAPE, 2, lambda x: 1e-9 * x)
    found = run_layer(lambda: RMSNorm(affine=False, name="norm"), [SHAPE], ranks, {}, shift=tiny[0], dtype=dtype)
    x = tiny[1]
    close(found["y"], x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.finfo(dtype).eps), dtype)


test_refuses_what_is_not_meant = refusals(
    (lambda: GroupNorm(0), "groups: expected a number >= 1"),
    (lambda: GroupNorm(2, eps=0.0), "eps: expected a number > 0"),
    (lambda: GroupNorm(2, activation="gel"), "expected None, one of relu, .* got 'gel'"),
    (lambda: LayerNorm("space"), "axes: expected"),
    (lambda: RMSNorm(0.0), "eps: expected a number > 0"),
    (lambda: GroupNorm(3)(Input(SHAPE, name="x")), "expected a number of groups that divides 4, got 3"),
)
