"""Layers on activations of 16 bits, on the double of a device: as in float32, up to rounding of what they write."""

from itertools import islice

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.device import as_dtype
from halograd.layers import (
    ELU,
    GELU,
    AdaptiveAveragePool,
    AdaptiveMaxPool,
    Affine,
    AveragePool,
    BatchNorm,
    BroadcastAdd,
    ChannelShuffle,
    Clamp,
    Concat,
    Conv,
    ConvTranspose,
    Dropout,
    GlobalAveragePool,
    GlobalMaxPool,
    GroupNorm,
    HardSigmoid,
    HardSwish,
    InstanceNorm,
    LayerNorm,
    LocalResponseNorm,
    LogSoftmax,
    MaxPool,
    Mish,
    Multiply,
    Pad,
    PixelShuffle,
    PReLU,
    Resize,
    Scale,
    SiLU,
    Slice,
    Softmax,
    Softplus,
    StochasticDepth,
)
from halograd.testing import grids, random_array, run_layer
from tests.support.fake_device import FakeBackend

SHAPE = (7, 6, 4)
LAYERS = {
    "conv": lambda: Conv(5, 3, padding=1, activation="relu", name="l"),
    "transposed": lambda: ConvTranspose(3, 2, stride=2, name="l"),
    "batch norm": lambda: BatchNorm(name="l"),
    "group norm": lambda: GroupNorm(2, activation="relu", name="l"),
    "instance norm": lambda: InstanceNorm(name="l"),
    "layer norm": lambda: LayerNorm(name="l"),
    "channel norm": lambda: LayerNorm("channels", name="l"),
    "response norm": lambda: LocalResponseNorm(3, name="l"),
    "softmax": lambda: Softmax(name="l"),
    "max pool": lambda: MaxPool(2, name="l"),
    "average pool": lambda: AveragePool(2, name="l"),
    "global pool": lambda: GlobalAveragePool(name="l"),
    "one slope": lambda: PReLU(name="l"),
    "slopes": lambda: PReLU("channel", name="l"),
    "scale": lambda: Scale(0.1, bias=True, name="l"),
    "stochastic depth": lambda: StochasticDepth(0.5, "l"),
    "resize cubic": lambda: Resize(1.5, mode="bicubic", align_corners=True, name="l"),
    "resize by means": lambda: Resize(size=(3, 4), mode="area", name="l"),
    "global max": lambda: GlobalMaxPool("l"),
    "adaptive average": lambda: AdaptiveAveragePool((5, 4), "l"),
    "adaptive max": lambda: AdaptiveMaxPool((5, 4), "l"),
    "average pool rounded up": lambda: AveragePool(2, ceil_mode=True, name="l"),
    "pixel shuffle": lambda: PixelShuffle(2, "l"),
    "weight norm": lambda: Conv(5, 3, padding=1, weight_norm=True, name="l"),
    "resize": lambda: Resize(2, mode="bilinear", name="l"),
    "dropout": lambda: Dropout(0.4, name="l"),
    "gelu": lambda: GELU(name="l"),
    "gelu by tanh": lambda: GELU("tanh", "l"),
    "elu": lambda: ELU(name="l"),
    "concat": lambda: Concat(name="l"),
    "multiply": lambda: Multiply(name="l"),
    "multiply by channels": lambda: Multiply(name="l"),
    "add channels": lambda: BroadcastAdd(name="l"),
    "crop": lambda: Pad(((-2, 3), (0, -3)), name="l"),
    "pad around": lambda: Pad(((2, 3), (0, 0)), "circular", name="l"),
    "pad mirrored": lambda: Pad(((2, 3), (0, 0)), "reflect", name="l"),
    "pad repeated": lambda: Pad(((0, 0), (300, 2)), "replicate", name="l"),
    "slice": lambda: Slice(1, 3, name="l"),
    "silu": lambda: SiLU(name="l"),
    "hard sigmoid": lambda: HardSigmoid(name="l"),
    "clamp": lambda: Clamp(-0.5, 0.7, "l"),
    "softplus": lambda: Softplus(name="l"),
    "mish": lambda: Mish(name="l"),
    "affine": lambda: Affine(-0.5, 0.7, "l"),
    "log softmax": lambda: LogSoftmax(name="l"),
    "channel shuffle": lambda: ChannelShuffle(2, "l"),
    "hard swish": lambda: HardSwish(name="l"),
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
    """What makes the inputs of a test numbers of bfloat16."""
    x = random_array((2, *shape), name, 0)
    return x.astype(as_dtype("bfloat16")).astype(np.float64) - x


def near(found, expected):
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return np.abs(found - expected).max(initial=0) <= 6 * 2.0**-8 * max(np.abs(expected).max(initial=0), 1e-3)
