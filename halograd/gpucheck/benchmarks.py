"""Times and memory of training steps on one GPU, and its copy bandwidth. Local."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from halograd.comm import Communicator
from halograd.gpucheck.report import Report
from halograd.kernels import Backend
from halograd.layers.strategy import Strategy
from halograd.models import mesh_1k, mesh_2k, resnet50, unet2d, unet3d
from halograd.testing import random_array
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer

__all__ = ["NETWORKS", "run_benchmarks", "time_copies", "time_steps"]

#: Network and batch.
NETWORKS: dict[str, tuple[Callable[[], Any], int]] = {
    "resnet50 224, batch 64": (resnet50, 64),
    "mesh-1K, batch 1": (mesh_1k, 1),
    "mesh-2K, batch 1": (mesh_2k, 1),
    "U-Net 512, batch 1": (lambda: unet2d(512), 1),
    "U-Net 128^3, batch 1": (lambda: unet3d(128), 1),
}
ROUNDS, STEPS = 3, 10
Outcome = tuple[str, Mapping[str, float]]


def run_benchmarks(kernels: Backend, comm: Communicator, report: Report) -> None:
    """All benchmarks, each as one result with its numbers."""
    report.check("benchmarks", "copy within the device", lambda: time_copies(kernels))
    for name, (make, batch) in NETWORKS.items():
        report.check("benchmarks", name, lambda m=make, b=batch: time_steps(kernels, comm, m(), b))  # type: ignore[misc]


def time_copies(kernels: Backend, nbytes: int = 1 << 28) -> Outcome:
    """Bandwidth of a copy, reading and writing [B/s]."""
    device = kernels.device
    source, target = (kernels.zeros((nbytes,), "uint8") for _ in range(2))
    seconds = []
    for _ in range(ROUNDS + 1):
        first = device.stamp()
        for _ in range(STEPS):
            np.copyto(target, source)
        second = device.stamp()
        device.synchronize()
        seconds.append(device.seconds(first, second) / STEPS)
    rate = 2 * nbytes / min(seconds[1:])
    return f"{rate / 1e9:.0f} GB/s", {"bytes_per_second": rate}


def time_steps(kernels: Backend, comm: Communicator, network: Any, batch: int) -> Outcome:
    """Seconds of a training step by the device's clock, the fastest and the median round, and memory [B].

    Steps follow each other without anybody waiting, as in training.
    """
    device = kernels.device
    before = device.memory()
    with Executor(network, comm, kernels, batch, Strategy({"sample": 1}), "float32") as executor:
        trainer = Trainer(executor, SGD(executor.store, momentum=0.9), Constant(1e-4))
        for name, node in network.inputs.items():
            integer = node.dtype != "compute"
            array = random_array((batch, *node.shape), name)
            executor.set_input(name, np.zeros_like(array) if integer else np.clip(array, 0, 1))
        seconds = []
        for _ in range(ROUNDS + 1):
            first = device.stamp()
            for _ in range(STEPS):
                trainer.step()
            second = device.stamp()
            device.synchronize()
            seconds.append(device.seconds(first, second) / STEPS)
        trainer.settle()
        after, predicted = device.memory(), sum(executor.predicted_bytes.values())
    gc.collect()
    numbers = {"seconds": min(seconds[1:]), "median": float(np.median(seconds[1:])), "predicted_bytes": predicted}
    text = f"{1e3 * numbers['seconds']:.2f} ms/step, {batch / numbers['seconds']:.1f} samples/s"
    if before is not None and after is not None:
        numbers["device_bytes"] = after.used - before.used
        text += f", {numbers['device_bytes'] / 2**20:.0f} MiB, {predicted / 2**20:.0f} predicted"
    return text, numbers
