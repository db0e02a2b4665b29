"""Layers and training under several ranks on one GPU, and races between streams, copies and messages. Collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from halograd.comm import Communicator
from halograd.device import as_dtype, is_low, resolution
from halograd.dtensor import Exchange, Layout
from halograd.gpucheck.report import Report
from halograd.kernels import Backend, get_backend
from halograd.layers import BatchNorm, Conv, ConvTranspose, Dropout, GroupNorm, MaxPool, Resize, SoftmaxCrossEntropy
from halograd.layers.strategy import Strategy
from halograd.models import lenet5, mesh, resnet, unet
from halograd.testing import grids, random_array, run_layer
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer

__all__ = ["Slow", "agreed", "check_layers", "check_races", "check_training", "reused_message"]

STEPS = 5
Outcome = tuple[str, Mapping[str, float]]

LAYERS: dict[str, Callable[[], Any]] = {
    "convolution": lambda: Conv(4, 3, padding=1, activation="relu", name="l"),
    "strided convolution": lambda: Conv(4, 3, 2, padding=1, name="l"),
    "transposed convolution": lambda: ConvTranspose(3, 3, 2, 1, 1, name="l"),
    "max pool": lambda: MaxPool(3, 2, 1, name="l"),
    "batch norm": lambda: BatchNorm(activation="relu", name="l"),
    "group norm": lambda: GroupNorm(2, name="l"),
    "resize": lambda: Resize(2, mode="bilinear", name="l"),
    "dropout": lambda: Dropout(0.3, name="l"),
}
NETWORKS: dict[str, Callable[[], Any]] = {
    "mesh": lambda: mesh(resolution=(20, 16), channels=3, widths=(8, 8), convs=1, decoder=True, pos_weight=3.0),
    "resnet": lambda: resnet((1, 1, 1, 1), classes=5, resolution=36, width=8, name="small resnet"),
    "unet": lambda: unet((16, 24), channels=2, classes=3, width=8, levels=2, name="small unet"),
    "lenet": lambda: lenet5(classes=4, resolution=28),
}


def check_layers(kernels: Backend, comm: Communicator, report: Report, dtype: str) -> None:
    """Output and gradients under every cut, against NumPy under the same cut. Collective."""
    with get_backend("numpy") as reference:
        for name, make in LAYERS.items():
            for parts in grids(comm.size, ("sample", "height", "width")):
                run = partial(_layer, make, comm, parts, kernels, reference, dtype)
                agreed(report, comm, f"layers {comm.size} ranks", f"{name} {_text(parts)}", run)


def _layer(make: Any, comm: Communicator, parts: dict, kernels: Backend, reference: Backend, dtype: str) -> Outcome:
    expected = run_layer(make, [(9, 8, 4)], comm, parts, dtype="float64", backend=reference, batch=4, steps=2)
    found = run_layer(make, [(9, 8, 4)], comm, parts, dtype=dtype, backend=kernels, batch=4, steps=2)
    worst = 0.0
    for key, want in (expected or {}).items():
        assert found is not None
        error = float(np.abs(found[key] - want).max(initial=0)) / max(1.0, float(np.abs(want).max(initial=0)))
        worst = max(worst, error)
        if not error <= 2e4 * np.finfo(dtype).eps:
            raise AssertionError(f"{key} differs from NumPy by {error:.1e}")
    return f"{worst:.1e}", {}


def check_training(kernels: Backend, comm: Communicator, report: Report, dtype: str, group: str = "") -> None:
    """Losses of some steps against NumPy's under the same cut, and no synchronization. Collective."""
    group = group or f"training {comm.size} ranks"
    with get_backend("numpy") as reference:
        for name, make in NETWORKS.items():
            for parts in grids(comm.size, ("sample", "height", "width")):
                if parts["sample"] > 4:
                    continue
                run = partial(_training, make(), comm, parts, kernels, reference, dtype)
                agreed(report, comm, group, f"{name} {_text(parts)}", run)


def _training(
    network: Any, comm: Communicator, parts: dict, kernels: Backend, reference: Backend, dtype: str
) -> Outcome:
    expected = _losses(network, comm, parts, reference, "float64")
    found = _losses(network, comm, parts, kernels, dtype)
    if is_low(dtype):  # every layer rounds what it writes once
        bound = resolution(as_dtype(dtype)) * len(network.layers) * (1 + np.arange(STEPS))
    else:
        reduction = max(math.prod(n.shape) for n in network.layers.values()) * 4
        bound = resolution(dtype) * math.sqrt(reduction) * 20 * (1 + np.arange(STEPS)) ** 2
    error = np.abs(found - expected) / np.maximum(1.0, np.abs(expected))
    if not (error <= bound).all():
        raise AssertionError(f"losses differ by {error.max():.1e}, allowed are {bound.max():.1e}")
    return f"{error.max():.1e}", {}


def _losses(network: Any, comm: Communicator, parts: dict, kernels: Backend, dtype: str) -> np.ndarray:
    strategy, losses = Strategy(parts, bucket_bytes=4096), []
    with Executor(network, comm, kernels, 4, strategy, dtype, seed=3) as executor:
        trainer = Trainer(executor, SGD(executor.store, momentum=0.9), Constant(0.01))
        for step in range(STEPS):
            _fill(executor, step)
            losses.append(trainer.step())
        trainer.settle()
        return np.array([float(loss) for loss in losses])


def _fill(executor: Executor, step: int) -> None:
    loss = executor.network.outputs["loss"]
    for name, node in executor.network.inputs.items():
        array = random_array((executor.batch, *node.shape), name, seed=step % 3)
        if name == "target" and isinstance(loss.layer, SoftmaxCrossEntropy):
            array = np.floor(np.abs(array * 1000)) % loss.inputs[0].shape[-1]
        elif name == "target":
            array = (array > 0.5).astype(float)
        executor.set_input(name, array)


def check_races(kernels: Backend, comm: Communicator, report: Report) -> None:
    """Copies and messages behind a producer that takes long: what they carry is what it has written. Collective."""
    group = f"races {comm.size} ranks"
    for name, run in (("download", _download), ("upload ahead", _upload_ahead), ("reused message", reused_message)):
        agreed(report, comm, group, name, partial(run, kernels, comm))


class Slow:
    """A producer that keeps the device busy for some milliseconds, then writes a number into an array."""

    def __init__(self, kernels: Backend) -> None:
        n = 2048 if not kernels.device.is_host and kernels.name == "cudnn" else 64
        self._x, self._y = kernels.zeros((n, n), "float32"), kernels.zeros((n, n), "float32")
        self._multiply = kernels.dense_forward if "float32" in kernels.dtypes else None
        assert self._multiply is not None
        self._kernel = self._multiply(self._x, self._x, None, self._y)

    def write(self, array: Any, value: float) -> None:
        for _ in range(10):
            self._kernel()
        array.fill(value)


def _download(kernels: Backend, comm: Communicator) -> Outcome:
    device, slow = kernels.device, Slow(kernels)
    array, pinned = kernels.zeros((1 << 16,), "float32"), device.pinned((1 << 16,), "float32")
    for value in (1.0, 2.0, 3.0):
        slow.write(array, value)
        device.download(array, pinned)
        ticket = device.mark()
        array.fill(-1)  # behind the copy
        ticket.wait()
        if not (pinned == value).all():
            raise AssertionError(f"expected {value} everywhere, got {np.unique(pinned)[:4]}")
    return "3 rounds", {}


def _upload_ahead(kernels: Backend, comm: Communicator) -> Outcome:
    device, slow = kernels.device, Slow(kernels)
    staged, used = kernels.zeros((1 << 16,), "float32"), kernels.zeros((1 << 16,), "float32")
    pinned = [device.pinned((1 << 16,), "float32") for _ in range(2)]
    after, found = None, []
    for i, value in enumerate((1.0, 2.0, 3.0, 4.0)):
        if i >= 2:
            device.synchronize()  # pinned memory of two rounds before is free
        pinned[i % 2][:] = value
        ticket = device.upload_ahead([(pinned[i % 2], staged)], after)
        slow.write(used, -1)
        device.join(ticket)
        np.copyto(used, staged)
        after = device.mark()
        found.append(device.to_host(used))
    for value, array in zip((1.0, 2.0, 3.0, 4.0), found):
        if not (array == value).all():
            raise AssertionError(f"expected {value} everywhere, got {np.unique(array)[:4]}")
    return "4 rounds", {}


def reused_message(kernels: Backend, comm: Communicator) -> Outcome:
    """A redistribution from rows to columns, again and again, without waiting in between."""
    slow, size, shape = Slow(kernels), comm.size, (1, 4 * comm.size, 4 * comm.size, 16)
    rows, columns = Layout.blocks(shape, {"height": size}, size), Layout.blocks(shape, {"width": size}, size)
    source = kernels.zeros(rows.boxes[comm.rank].shape, "float32")
    target = kernels.zeros(columns.boxes[comm.rank].shape, "float32")
    kept = [kernels.zeros(target.shape, "float32") for _ in range(6)]
    exchange = Exchange(comm, rows.boxes, columns.boxes, source, target)
    for i, copy in enumerate(kept):
        slow.write(source, 10.0 * i + comm.rank)
        exchange.run()
        source.fill(-1)
        np.copyto(copy, target)
        target.fill(-2)
    exchange.close()
    for i, copy in enumerate(kept):
        found = kernels.device.to_host(copy)
        for rank in range(size):
            if not (found[:, 4 * rank : 4 * rank + 4] == 10.0 * i + rank).all():
                raise AssertionError(f"message {i} of rank {rank} carried {np.unique(found)[:4]}")
    return f"{len(kept)} messages", {}


def agreed(report: Report, comm: Communicator, group: str, name: str, run: Callable[[], Outcome]) -> None:
    """A check that all ranks pass or fail together."""

    def together() -> Outcome:
        fault: Exception | None = None
        outcome: Outcome = ("", {})
        try:
            outcome = run()
        except AssertionError as error:  # what ranks do together is done; anything else would leave others waiting
            fault = error
        comm.agree(fault)
        return outcome

    report.check(group, name, together)


def _text(parts: Mapping[str, int]) -> str:
    return "x".join(str(n) for n in parts.values())
