"""Tests of every layer on some of the ranks: the other ranks hold no data of it, and the results are right."""

import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.testing import compare, run_layer
from tests.layers.graphs import Centre, poison

SHAPE = (6, 5, 4)
LAYERS = {
    "conv": lambda: hg.Conv(5, 3, padding=1, activation="relu"),
    "weight norm": lambda: hg.Conv(5, 3, padding=1, weight_norm=True),
    "grouped": lambda: hg.Conv(4, 3, groups=2),
    "transposed": lambda: hg.ConvTranspose(4, 3, 2, 1),
    "max pool": lambda: hg.MaxPool(3, 2, 1),
    "average pool": lambda: hg.AveragePool(2, 1),
    "global average pool": hg.GlobalAveragePool,
    "batch norm": hg.BatchNorm,
    "local batch norm": lambda: hg.BatchNorm("local"),
    "batch norm of samples": lambda: hg.BatchNorm("sample", activation="relu"),
    "group norm": lambda: hg.GroupNorm(2),
    "instance norm": hg.InstanceNorm,
    "layer norm": hg.LayerNorm,
    "layer norm of channels": lambda: hg.LayerNorm("channels", activation="relu"),
    "local response norm": hg.LocalResponseNorm,
    "dropout": lambda: hg.Dropout(0.3),
    "relu": hg.ReLU,
    "gelu": hg.GELU,
    "softmax": hg.Softmax,
    "resize": lambda: hg.Resize(2, mode="bilinear"),
    "resize cubic": lambda: hg.Resize(1.5, mode="cubic", align_corners=True),
    "scale": lambda: hg.Scale(bias=True),
    "scale of columns": lambda: hg.Scale(axes=("width",)),
    "positions": hg.Embedding,
    "rows": lambda: hg.Embedding(("height", "channel"), trained=False),
    "class token": lambda: lambda x: hg.Token()(hg.Reshape((-1, x.shape[-1]))(x)),
    "one slope": hg.PReLU,
    "slopes": lambda: hg.PReLU("channel"),
    "stochastic depth": lambda: hg.StochasticDepth(0.5),
    "global max": hg.GlobalMaxPool,
    "adaptive average": lambda: hg.AdaptiveAveragePool((4, 3)),
    "adaptive max": lambda: hg.AdaptiveMaxPool((4, 3)),
    "one adaptive max": lambda: hg.AdaptiveMaxPool(1),
    "max pool rounded up": lambda: hg.MaxPool(2, ceil_mode=True),
    "pixel shuffle": lambda: hg.PixelShuffle(2),
    "pixel unshuffle": lambda: lambda x: hg.PixelUnshuffle(2)(hg.Crop(((0, 0), (0, 1)))(x)),
    "reshape": lambda: lambda x: hg.Reshape((3, 10, 4))(hg.Flatten()(x)),
    "tokens": lambda: lambda x: hg.Reshape((x.shape[1], x.shape[0], -1))(hg.Reshape((-1, x.shape[-1]))(x)),
    "flatten": hg.Flatten,
    "dense": lambda: lambda x: hg.Dense(3)(hg.Flatten()(x)),
    "add": lambda: lambda x: hg.Add("relu")(hg.ReLU()(x), x),
    "concat": lambda: lambda x: hg.Concat()(hg.ReLU()(x), x),
    "custom": Centre,
}
#: Under cuts these are not what one process computes: see test_batch_norm.
OWN_STATISTICS = ("local batch norm", "batch norm of samples")
PARTS = [{"height": 1}, {"height": 2}, {"sample": 2}]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("backend, dtype", [("numpy", "float64"), ("onednn", "float32")])
@pytest.mark.parametrize("name", LAYERS)
def test_exact_on_fewer_ranks(name, backend, dtype, monkeypatch):
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
