"""Normalization by its definition in float64, and an executor of one layer whose state tests can read."""

import contextlib

import numpy as np

from halograd.kernels import get_backend
from halograd.layers import Input, Loss, Network
from halograd.layers.strategy import Strategy
from halograd.testing import random_array, run_layer
from halograd.training.executor import Executor
from tests.support.grids import grids_in_turn


class Probe(Loss):
    """Linear functional sum(y * g), whose gradient is g."""

    def local(self, prediction, target, dx, scale, work):
        if dx is not None:
            np.copyto(dx, target)
        return float(np.vdot(prediction, target))


def normalize(x, dy, gamma, beta, axes, eps=1e-5, relu=False, centered=True):
    """Compute y, dx, dgamma, dbeta, mean, var of ``relu?(gamma * (x - mean) / sqrt(var + eps) + beta)``; all float64.

    `axes` are those of the statistics; gamma and beta broadcast against x. Without `centered`, the mean counts as 0.
    """
    x, dy = x.astype(np.float64), dy.astype(np.float64)
    mean = x.mean(axes, keepdims=True) * centered
    var = np.square(x - mean).mean(axes, keepdims=True)
    std = np.sqrt(var + eps)
    xhat = (x - mean) / std
    y = gamma * xhat + beta
    if relu:
        dy = dy * (y > 0)
        y = np.maximum(y, 0)
    g = dy * gamma
    dx = (g - g.mean(axes, keepdims=True) * centered - xhat * (g * xhat).mean(axes, keepdims=True)) / std
    rest = tuple(range(x.ndim - 1))
    return {"y": y, "dx0": dx, "dgamma": (dy * xhat).sum(rest), "dbeta": dy.sum(rest), "mean": mean, "var": var}


def moved(shape, batch, change):
    """Return the change of the random input by `change`, as `run_layer` needs it, and the changed input."""
    drawn = random_array((batch, *shape), "x0")
    shift = change(drawn) - drawn
    return {"x0": shift}, drawn + shift


def close(found, want, dtype="float64", factor=1000.0):
    """Assert equality within `factor` roundings of the largest element."""
    bound = factor * float(np.finfo(dtype).eps) * max(1.0, float(np.abs(want).max(initial=0)))
    error = float(np.abs(np.asarray(found, np.float64) - want).max(initial=0))
    assert found.shape == want.shape and error <= bound, f"differs by {error:.3g}, allowed are {bound:.3g}"


def check_grids(ranks, turn, make, shape, want, factor=1000.0, dtype="float64", **options):
    """Compare the results of a layer on the grids of this turn with the expected ones (`close`)."""
    for parts in grids_in_turn(ranks.size, ("sample", "height", "width"), turn):
        found = run_layer(make, [shape], ranks, parts, dtype=dtype, **options)
        for key, array in want.items() if found is not None else ():
            close(found[key], array, dtype, factor)


@contextlib.contextmanager
def executing(make, shape, comm, parts, batch=2, dtype="float64", backend="numpy", x=None, **options):
    """Return an executor of one layer named ``norm``, with random input `x`, parameters and output gradient `g`."""
    source = Input(shape, name="x")
    y = make()(source)
    g = Input(y.shape, name="g")
    network = Network({"y": y, "loss": Probe("probe")(y, g)})
    arguments = {"trainable": True, "store": None, "seed": 0} | options
    strategy = arguments.pop("strategy", None) or Strategy(parts)
    with Executor(network, comm, get_backend(backend), batch, strategy, dtype, probed=["x"], **arguments) as executor:
        if arguments["store"] is None:
            for name, array in executor.store.params.items():
                array[...] = random_array(executor.store.shapes[name], name)[executor.store.box(name).slices()]
        executor.set_input("x", random_array((batch, *shape), "x0") if x is None else x)
        executor.set_input("g", random_array((batch, *y.shape), "g"))
        yield executor


def step(executor):
    """Run one forward and backward pass, and reduce the gradients."""
    executor.forward(training=True)
    executor.loss_value()
    executor.backward()
    executor.reducer.finish()


def traffic(comm, run):
    """Return the number of messages by kind that this rank sends in `run`."""
    comm.counters.reset()
    run()
    return {kind: t.messages for kind, t in comm.counters.snapshot().items() if t.messages}
