"""Tests of layers with 16-bit activations on the double of a device: equal to float32 up to rounding of results."""

from itertools import islice

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.device import as_dtype
from halograd.dtensor import axis_names
from halograd.testing import grids, random_array, run_layer
from tests.layers.cases import LAYERS
from tests.support.fake_device import FakeBackend

#: With 300 equal rows, whose gradients are added up in more than 16 bits.
IN_16_BITS = {**LAYERS, "pad repeated": (lambda: hg.Pad(((0, 0), (300, 2)), "replicate", name="l"), [(7, 6, 4)])}

#: The loss is a sum of terms of both signs; here it is smaller than a term, so its error is compared with the largest.
CANCELLING = ("response norm", "rows")


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", IN_16_BITS)
def test_layers(name):
    kernels, (make, shapes) = FakeBackend(), IN_16_BITS[name]
    axes = axis_names(len(shapes[0]) + 1)[1:-1] or ("sample",)
    shift = {f"x{i}": rounding(f"x{i}", shape) for i, shape in enumerate(shapes)}
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in islice(grids(comm.size, axes), 2):
            expected = run_layer(make, shapes, comm, parts, dtype="float32", shift=shift)
            found = run_layer(make, shapes, comm, parts, dtype="bfloat16", backend=kernels, shift=shift)
            if expected and name in CANCELLING:
                expected["loss"], found["loss"] = ([*r["loss"], np.abs(expected["y"]).max()] for r in (expected, found))
            wrong = [k for k in expected or () if not near(found[k], expected[k])]
            comm.agree(AssertionError(f"{parts}: {wrong} differ") if wrong else None)
    kernels.close()


def rounding(name, shape):
    """Return the rounding error of the random inputs of a test in bfloat16."""
    x = random_array((2, *shape), name, 0)
    return x.astype(as_dtype("bfloat16")).astype(np.float64) - x


def near(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.abs(found - expected).max(initial=0) <= 6 * 2.0**-8 * max(np.abs(expected).max(initial=0), 1e-3)
