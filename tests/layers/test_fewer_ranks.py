"""Every layer on fewer ranks than there are: the others hold nothing of it, and nothing goes wrong there."""

import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.layers import (
    GELU,
    AdaptiveAveragePool,
    AdaptiveMaxPool,
    Add,
    AveragePool,
    BatchNorm,
    Concat,
    Conv,
    ConvTranspose,
    Crop,
    Dense,
    Dropout,
    Flatten,
    GlobalAveragePool,
    GlobalMaxPool,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LocalResponseNorm,
    MaxPool,
    PixelShuffle,
    PixelUnshuffle,
    PReLU,
    ReLU,
    Reshape,
    Resize,
    Scale,
    Softmax,
    StochasticDepth,
)
from halograd.testing import compare, run_layer
from tests.layers.graphs import Centre, poison
from tests.layers.norms import needs

SHAPE = (6, 5, 4)
LAYERS = {
    "conv": lambda: Conv(5, 3, padding=1, activation="relu"),
    "weight norm": lambda: Conv(5, 3, padding=1, weight_norm=True),
    "grouped": lambda: Conv(4, 3, groups=2),
    "transposed": lambda: ConvTranspose(4, 3, 2, 1),
    "max pool": lambda: MaxPool(3, 2, 1),
    "average pool": lambda: AveragePool(2, 1),
    "global average pool": GlobalAveragePool,
    "batch norm": BatchNorm,
    "local batch norm": lambda: BatchNorm("local"),
    "batch norm of samples": lambda: BatchNorm("sample", activation="relu"),
    "group norm": lambda: GroupNorm(2),
    "instance norm": InstanceNorm,
    "layer norm": LayerNorm,
    "layer norm of channels": lambda: LayerNorm("channels", activation="relu"),
    "local response norm": LocalResponseNorm,
    "dropout": lambda: Dropout(0.3),
    "relu": ReLU,
    "gelu": GELU,
    "softmax": Softmax,
    "resize": lambda: Resize(2, mode="bilinear"),
    "resize cubic": lambda: Resize(1.5, mode="cubic", align_corners=True),
    "scale": lambda: Scale(bias=True),
    "one slope": PReLU,
    "slopes": lambda: PReLU("channel"),
    "stochastic depth": lambda: StochasticDepth(0.5),
    "global max": GlobalMaxPool,
    "adaptive average": lambda: AdaptiveAveragePool((4, 3)),
    "adaptive max": lambda: AdaptiveMaxPool((4, 3)),
    "one adaptive max": lambda: AdaptiveMaxPool(1),
    "max pool rounded up": lambda: MaxPool(2, ceil_mode=True),
    "pixel shuffle": lambda: PixelShuffle(2),
    "pixel unshuffle": lambda: lambda x: PixelUnshuffle(2)(Crop(((0, 0), (0, 1)))(x)),
    "reshape": lambda: lambda x: Reshape((3, 10, 4))(Flatten()(x)),
    "flatten": Flatten,
    "dense": lambda: lambda x: Dense(3)(Flatten()(x)),
    "add": lambda: lambda x: Add("relu")(ReLU()(x), x),
    "concat": lambda: lambda x: Concat()(ReLU()(x), x),
    "custom": Centre,
}
#: Under cuts these are not what one process computes: see test_batch_norm.
OWN_STATISTICS = ("local batch norm", "batch norm of samples")
PARTS = [{"height": 1}, {"height": 2}, {"sample": 2}]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("backend, dtype", [("numpy", "float64"), ("onednn", "float32")])
@pytest.mark.parametrize("name", LAYERS)
def test_exact_on_fewer_ranks(name, backend, dtype, monkeypatch):
    needs(backend)
    poison(monkeypatch)
    options = {"backend": backend, "dtype": dtype, "steps": 2}
    with Communicator(MPI.COMM_SELF) as alone, Communicator(MPI.COMM_WORLD) as comm:
        for parts in PARTS:
            batch = parts.get("sample", 1)
            found = run_layer(LAYERS[name], [SHAPE], comm, parts, batch=batch, **options)
            own = name in OWN_STATISTICS and parts != {"height": 1}
            fault = None
            if found is not None and not own:
                want = run_layer(LAYERS[name], [SHAPE], alone, {}, batch=batch, **options)
                fault = compare(found, want, 256.0, dtype, str(parts))
            comm.agree(fault)
