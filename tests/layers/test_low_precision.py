"""Tests of layers with 16-bit activations on the double of a device: equal to float32 up to rounding of results."""

from itertools import islice

import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.device import as_dtype
from halograd.testing import grids, random_array, run_layer
from tests.support.fake_device import FakeBackend

SHAPE = (7, 6, 4)
LAYERS = {
    "conv": lambda: hg.Conv(5, 3, padding=1, activation="relu", name="l"),
    "transposed": lambda: hg.ConvTranspose(3, 2, stride=2, name="l"),
    "batch norm": lambda: hg.BatchNorm(name="l"),
    "group norm": lambda: hg.GroupNorm(2, activation="relu", name="l"),
    "instance norm": lambda: hg.InstanceNorm(name="l"),
    "layer norm": lambda: hg.LayerNorm(name="l"),
    "channel norm": lambda: hg.LayerNorm("channels", name="l"),
    "rms norm": lambda: hg.RMSNorm(name="l"),
    "response norm": lambda: hg.LocalResponseNorm(3, name="l"),
    "softmax": lambda: hg.Softmax(name="l"),
    "max pool": lambda: hg.MaxPool(2, name="l"),
    "average pool": lambda: hg.AveragePool(2, name="l"),
    "global pool": lambda: hg.GlobalAveragePool(name="l"),
    "one slope": lambda: hg.PReLU(name="l"),
    "slopes": lambda: hg.PReLU("channel", name="l"),
    "scale": lambda: hg.Scale(0.1, bias=True, name="l"),
    "scale of columns": lambda: hg.Scale(0.1, bias=True, name="l", axes=("width",)),
    "positions": lambda: hg.Embedding(name="l"),
    "stochastic depth": lambda: hg.StochasticDepth(0.5, "l"),
    "resize cubic": lambda: hg.Resize(1.5, mode="bicubic", align_corners=True, name="l"),
    "resize by means": lambda: hg.Resize(size=(3, 4), mode="area", name="l"),
    "global max": lambda: hg.GlobalMaxPool("l"),
    "adaptive average": lambda: hg.AdaptiveAveragePool((5, 4), "l"),
    "adaptive max": lambda: hg.AdaptiveMaxPool((5, 4), "l"),
    "average pool rounded up": lambda: hg.AveragePool(2, ceil_mode=True, name="l"),
    "pixel shuffle": lambda: hg.PixelShuffle(2, "l"),
    "weight norm": lambda: hg.Conv(5, 3, padding=1, weight_norm=True, name="l"),
    "resize": lambda: hg.Resize(2, mode="bilinear", name="l"),
    "dropout": lambda: hg.Dropout(0.4, name="l"),
    "gelu": lambda: hg.GELU(name="l"),
    "gelu by tanh": lambda: hg.GELU("tanh", "l"),
    "elu": lambda: hg.ELU(name="l"),
    "concat": lambda: hg.Concat(name="l"),
    "multiply": lambda: hg.Multiply(name="l"),
    "multiply by channels": lambda: hg.Multiply(name="l"),
    "add channels": lambda: hg.BroadcastAdd(name="l"),
    "crop": lambda: hg.Pad(((-2, 3), (0, -3)), name="l"),
    "pad around": lambda: hg.Pad(((2, 3), (0, 0)), "circular", name="l"),
    "pad a sphere": lambda: hg.Pad(2, hg.Sphere(sign=-1), name="l"),
    "roll": lambda: hg.Roll((2, -1), "l"),
    "pad mirrored": lambda: hg.Pad(((2, 3), (0, 0)), "reflect", name="l"),
    "pad repeated": lambda: hg.Pad(((0, 0), (300, 2)), "replicate", name="l"),
    "slice": lambda: hg.Slice(1, 3, name="l"),
    "silu": lambda: hg.SiLU(name="l"),
    "hard sigmoid": lambda: hg.HardSigmoid(name="l"),
    "channel max": lambda: hg.ChannelMax("l"),
    "channel mean": lambda: hg.ChannelMean("l"),
    "exponential": lambda: hg.Exp("l"),
    "square": lambda: hg.Power(2, "l"),
    "flip": lambda: hg.Flip("width", name="l"),
    "clamp": lambda: hg.Clamp(-0.5, 0.7, "l"),
    "softplus": lambda: hg.Softplus(name="l"),
    "mish": lambda: hg.Mish(name="l"),
    "affine": lambda: hg.Affine(-0.5, 0.7, "l"),
    "affine of channels": lambda: hg.Affine((-0.5, 2, 0, 1), 0.7, "l"),
    "log softmax": lambda: hg.LogSoftmax(name="l"),
    "channel shuffle": lambda: hg.ChannelShuffle(2, "l"),
    "hard swish": lambda: hg.HardSwish(name="l"),
}
#: Second inputs.
SECOND = {"concat": SHAPE, "multiply": SHAPE, "multiply by channels": SHAPE[-1:], "add channels": SHAPE[-1:]}


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    kernels = FakeBackend()
    shapes = [SHAPE, *filter(None, [SECOND.get(name)])]
    shift = {f"x{i}": rounding(f"x{i}", shape) for i, shape in enumerate(shapes)}
    with Communicator(MPI.COMM_WORLD) as comm:
        for parts in islice(grids(comm.size, ("height", "width")), 2):
            expected = run_layer(LAYERS[name], shapes, comm, parts, dtype="float32", shift=shift)
            found = run_layer(LAYERS[name], shapes, comm, parts, dtype="bfloat16", backend=kernels, shift=shift)
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
