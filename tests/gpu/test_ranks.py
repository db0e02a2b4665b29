"""Tests of layers and training on several ranks with staged messages, and of races of streams, copies and messages.

The tests run on the double, and with 1, 2 and 4 ranks on one GPU. Collective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from mpi4py import MPI

import halograd as hg
from halograd.comm import Communicator
from halograd.device import as_dtype, is_low
from halograd.kernels import Backend, get_backend
from halograd.layers import BatchNorm as Norm
from halograd.testing import grids, run_layer
from halograd.training.backend import open_kernels
from halograd.training.config import BackendConfig
from tests.gpu.place import gpu_count
from tests.gpu.slow import check_download, check_upload_ahead, reused_message
from tests.support.fake_device import FakeBackend
from tests.training.device_steps import NETWORKS, OPTIMIZERS, train

STEPS = 5
SIZE = MPI.COMM_WORLD.size
#: A layer and its number of inputs.
LAYERS: dict[str, tuple[Callable[[], Any], int]] = {
    "convolution": (lambda: hg.Conv(4, 3, padding=1, activation="relu", name="l"), 1),
    "strided convolution": (lambda: hg.Conv(4, 3, 2, padding=1, name="l"), 1),
    "transposed convolution": (lambda: hg.ConvTranspose(3, 3, 2, 1, 1, name="l"), 1),
    "max pool": (lambda: hg.MaxPool(3, 2, 1, name="l"), 1),
    "batch norm": (lambda: Norm(activation="relu", name="l"), 1),
    "group norm": (lambda: hg.GroupNorm(2, name="l"), 1),
    "layer norm": (lambda: hg.LayerNorm("channels", name="l"), 1),
    "local response norm": (lambda: hg.LocalResponseNorm(3, name="l"), 1),
    "resize": (lambda: hg.Resize(2, mode="bilinear", name="l"), 1),
    "resize cubic": (lambda: hg.Resize(1.5, mode="bicubic", align_corners=True, name="l"), 1),
    "adaptive average pool": (lambda: hg.AdaptiveAveragePool((4, 3), name="l"), 1),
    "adaptive max pool": (lambda: hg.AdaptiveMaxPool((4, 3), name="l"), 1),
    "global max pool": (lambda: hg.GlobalMaxPool(name="l"), 1),
    "scale": (lambda: hg.Scale(bias=True, name="l"), 1),
    "slopes": (lambda: hg.PReLU("channel", name="l"), 1),
    "stochastic depth": (lambda: hg.StochasticDepth(0.5, name="l"), 1),
    "pixel shuffle": (lambda: hg.PixelShuffle(2, name="l"), 1),
    "dropout": (lambda: hg.Dropout(0.3, name="l"), 1),
    "channel dropout": (lambda: hg.ChannelDropout(0.3, name="l"), 1),
    "concat": (lambda: hg.Concat("l"), 2),
    "sum": (lambda: hg.Add(activation="relu", name="l"), 2),
}
CUTS = list(grids(SIZE, ("sample", "height", "width")))


def text(parts: Mapping[str, int]) -> str:
    """Return a cut as text, such as ``1x2x1``."""
    return "x".join(str(n) for n in parts.values())


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("double", marks=pytest.mark.ranks(1, 2)),
        *[pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.ranks(1, 2, 4)])] * bool(gpu_count()),
    ],
)
def opened(request) -> Iterator[tuple[Backend, Communicator]]:
    """Return kernels and a communicator whose messages go through the host."""
    with Communicator(MPI.COMM_WORLD) as comm:
        kernels = FakeBackend() if request.param == "double" else open_kernels(BackendConfig(kernels="cudnn"), comm)
        with kernels:
            yield kernels, comm


@pytest.mark.parametrize("parts", CUTS, ids=text)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(opened, name, parts):
    """Outputs and gradients of each layer equal those of NumPy under the same cut."""
    kernels, comm = opened
    make, inputs = LAYERS[name]
    shapes = [(9, 8, 4)] * inputs
    with get_backend("numpy") as reference:
        expected = run_layer(make, shapes, comm, parts, backend=reference, batch=4, steps=2)
    found = run_layer(make, shapes, comm, parts, dtype="float32", backend=kernels, batch=4, steps=2)
    for key, want in (expected or {}).items():
        assert found is not None
        error = float(np.abs(found[key] - want).max(initial=0)) / max(1.0, float(np.abs(want).max(initial=0)))
        assert error <= 2e4 * np.finfo("float32").eps, f"{key} differs from NumPy by {error:.1e}"


@pytest.mark.parametrize("parts", [p for p in CUTS if p["sample"] <= 4], ids=text)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training(opened, dtype, name, parts):
    """Losses of several training steps equal those of NumPy under the same cut."""
    compare_losses(*opened, dtype, name, parts)


@pytest.mark.parametrize("name", ["mesh", "resnet"])
def test_graphs(opened, name):
    """Losses are correct when steps after the third replay graphs between messages."""
    compare_losses(*opened, "float32", name, {"height": SIZE}, steps=STEPS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers(opened, optimizer):
    compare_losses(*opened, "float32", "mesh", {"height": SIZE}, optimizer)


def compare_losses(
    kernels: Backend,
    comm: Communicator,
    dtype: str,
    name: str,
    parts: Mapping[str, int],
    optimizer: str = "sgd",
    steps: int | None = None,
) -> None:
    """Raise unless losses equal NumPy's up to the precision of `dtype`; `steps` sets the steps of a run with graphs."""
    network = NETWORKS[name]()
    with get_backend("numpy") as reference:
        expected, *_ = train(network, comm, reference, parts, optimizer, steps=steps or STEPS)
    options = {"dtype": dtype, "steps": steps or STEPS, "graph": steps is not None}
    found, *_ = train(network, comm, kernels, parts, optimizer, **options)
    if is_low(dtype):  # every layer rounds what it writes once
        bound = float(ml_dtypes.finfo(as_dtype(dtype)).eps) * len(network.layers) * (1 + np.arange(len(found)))
    else:
        reduction = max(math.prod(n.shape) for n in network.layers.values()) * 4
        bound = np.finfo(dtype).eps * math.sqrt(reduction) * 20 * (1 + np.arange(len(found))) ** 2
    error = np.abs(found - expected) / np.maximum(1.0, np.abs(expected))
    assert (error <= bound).all(), f"losses differ by {error.max():.1e}, allowed are {bound.max():.1e}"


def test_downloads_behind_a_slow_producer(opened):
    check_download(opened[0])


def test_uploads_ahead_of_a_slow_consumer(opened):
    check_upload_ahead(opened[0])


def test_messages_behind_a_slow_producer(opened):
    reused_message(*opened)


@pytest.mark.ranks(1, 2)
def test_races_are_found(monkeypatch):
    """The race tests fail on a device whose uploads ahead, or whose downloads, are never awaited."""
    with FakeBackend() as kernels, Communicator(MPI.COMM_WORLD) as comm:
        monkeypatch.setattr(kernels.device, "join", lambda ticket: None)
        monkeypatch.setattr(kernels.device, "arrive", lambda ticket: None)
        with pytest.raises(AssertionError, match=r"expected 1\.0 everywhere"):
            check_download(kernels)
        with pytest.raises(AssertionError, match=r"expected 1\.0 everywhere"):
            check_upload_ahead(kernels)
        if comm.size > 1:
            with pytest.raises(AssertionError, match=r"of rank . carried"):
                reused_message(kernels, comm)
