"""Counts of the operations that one training step enqueues on the double of a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from mpi4py import MPI

from benchmarks.gpu import lone
from halograd.comm import Communicator
from halograd.layers import Network
from halograd.layers.strategy import Strategy
from halograd.models import mesh_2k, resnet50, unet2d, unet3d
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.support.fake_device import FakeBackend

__all__ = ["NETWORKS", "StepCounts", "count_step"]

#: As many layers as published, all of them narrow.
NETWORKS = {
    "resnet50": lambda: resnet50(width=4, resolution=64, classes=5),
    "mesh_2k": lambda: mesh_2k(resolution=128, widths=(8,) * 6),
    "unet2d": lambda: unet2d(resolution=32, width=4),
    "unet3d": lambda: unet3d(resolution=16, width=4),
}


@dataclass(frozen=True)
class StepCounts:
    """Operation counts of a step, as in `FakeDevice` (tests.support.fake_device); `launches` are of our own kernels."""

    operations: int
    launches: int
    library_calls: int


def count_step(
    network: Network,
    cuda: Any,
    parts: Mapping[str, int],
    dtype: str = "float32",
    clip: float | None = None,
    passes: tuple[str, ...] = (),
) -> StepCounts:
    """Return the counts of the third SGD step on rank 0; the number of ranks is the product of `parts`. Local.

    Parameters
    ----------
    cuda
        Our kernels on a double of a device that records the launches.
    """
    size, kernels = int(np.prod(list(parts.values()))), FakeBackend(cuda)
    kernels.epilogues = bool(passes)
    # Nothing arrives from the others, who are not there: NCCL is given addresses, and asks CuPy for nothing.
    silent = mock.patch.object(lone._Mirror, "start", lambda channel: None)
    with Communicator(MPI.COMM_SELF) as alone, silent:
        comm: Any = alone if size == 1 else lone.LoneCommunicator(0, size)
        with Executor(network, comm, kernels, 1, Strategy({"sample": 1, **parts}, passes=passes), dtype) as executor:
            trainer = Trainer(executor, SGD(executor.store, momentum=0.9), Constant(1e-4), clip_norm=clip)
            for name in network.inputs:
                array = executor.input(name).array
                executor.device.assign(array, np.zeros(array.shape, array.dtype))
            for _ in range(2):
                trainer.step()
            before = _counters(kernels, cuda)
            trainer.step()
            found = [now - then for now, then in zip(_counters(kernels, cuda), before)]
    kernels.close()
    return StepCounts(*found)


def _counters(kernels: FakeBackend, cuda: Any) -> tuple[int, int, int]:
    device = kernels.device
    return device.operations, len(cuda.launcher.launched), device.library_calls
