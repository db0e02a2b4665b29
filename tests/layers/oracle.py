"""Comparison of layers with torch: one process, the same inputs, parameters and gradient of the output."""

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.layers import Input
from halograd.testing import random_array, run_layer

BATCH = 2


def torch():
    """Return the torch module; skip the test without torch."""
    return pytest.importorskip("torch", reason="needs torch as oracle: pip install 'halograd[oracle]'")


class Called:
    """Layers without parameters, as `check_torch` needs them."""

    name = "called"

    def __init__(self, call):
        self.call = call

    def __call__(self, x):
        return self.call(x)

    def parameters(self, *shapes):
        return {}


def parameters(make, shapes):
    """Return the parameters that `run_layer` will use, as torch tensors with gradients."""
    layer = make()
    specs = layer.parameters(*shapes)
    layer(*(Input(s) for s in shapes))
    name = layer.name
    assert name, "give the layer a name"
    arrays = {k: random_array(p.shape, f"{name}/{k}") for k, p in specs.items()}
    return {k: torch().tensor(a, requires_grad=True) for k, a in arrays.items()}


def first(array):
    """Return an array with channels last as one with channels first."""
    return np.moveaxis(array, -1, 1)


def last(tensor):
    """Return a tensor with channels first as an array with channels last."""
    return np.moveaxis(tensor.detach().numpy(), 1, -1)


def weights(tensor):
    """Convert (K, *kernel, C) to (K, C, *kernel), differentiably."""
    return tensor.movedim(-1, 1)


def check_torch(make, shapes, function, dtype="float64", backend="numpy", options=None):
    """Compare output and all gradients with `function(*inputs, **parameters)` in torch, channels first.

    The tolerance is 1000 eps of the largest element, because sums have fewer than 1000 terms.
    """
    lib = torch()
    shapes = [tuple(s) for s in shapes]
    with Communicator(MPI.COMM_SELF) as alone:
        ours = run_layer(make, shapes, alone, {}, batch=BATCH, dtype=dtype, backend=backend)
    given = [random_array((BATCH, *s), f"x{i}") for i, s in enumerate(shapes)]
    xs = [lib.tensor(first(a).copy(), requires_grad=True) for a in given]
    params = parameters(make, shapes)
    y = function(*xs, **params)
    want = {"y": last(y)}
    y.backward(lib.tensor(first(random_array(want["y"].shape, "g")).copy()))
    want |= {f"dx{i}": last(x.grad) for i, x in enumerate(xs)}
    want |= {f"d{k}": p.grad.numpy() for k, p in params.items()}
    for key, reference in want.items():
        assert ours[key].shape == reference.shape, key
        bound = 1000 * np.finfo(dtype).eps * max(1.0, np.abs(reference).max())
        error = np.abs(ours[key] - reference).max()
        assert error <= bound, f"{key} differs from torch by {error:.3g}, allowed are {bound:.3g}"
