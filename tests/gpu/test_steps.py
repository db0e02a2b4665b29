"""Tests of training steps on a GPU: a step does not wait for the device, and uses the predicted memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from mpi4py import MPI

from benchmarks.gpu.subjects import SUBJECTS
from halograd.comm import Communicator
from halograd.kernels import Backend, get_backend
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.gpu.place import only_gpu
from tests.training.device_steps import NETWORKS
from tests.training.steps import fill

#: A kernel that ends when the host says so, and by itself after some seconds: a host that waits for it goes on.
GATE = """
extern "C" __global__ void gate(volatile int* open, long long cycles) {
    long long begin = clock64();
    while (!*open && clock64() - begin < cycles) {}
}
"""
CYCLES = 20_000_000_000


@contextmanager
def gate(kernels: Backend) -> Iterator[object]:
    """Block the device; yield an event after the blocking kernel, which ends when the context is left."""
    device = kernels.device
    flag = device.pinned((1,), np.int32)
    wait = device.cupy.RawKernel(GATE, "gate")
    flag[0] = 1
    wait((1,), (1,), (np.uint64(flag.ctypes.data), np.int64(CYCLES)))  # compiled and loaded before
    device.synchronize()
    flag[0] = 0
    wait((1,), (1,), (np.uint64(flag.ctypes.data), np.int64(CYCLES)))
    try:
        yield device.mark()
    finally:
        flag[0] = 1
        device.synchronize()


@only_gpu
@pytest.mark.parametrize("graph", [False, True], ids=["kernels", "graph"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_does_not_wait_for_the_device(name, graph):
    """A training step returns while a kernel enqueued before it still runs, so no library synchronizes."""
    with (
        Communicator(MPI.COMM_SELF) as comm,
        get_backend("cudnn") as kernels,
        Executor(NETWORKS[name](), comm, kernels, 4, graph=graph) as executor,
    ):
        trainer = Trainer(executor, SGD(executor.store, momentum=0.9), Constant(0.01), clip_norm=1.0)
        fill(executor, 0)
        for _ in range(4):
            trainer.step()
        kernels.synchronize()
        with gate(kernels) as behind:
            trainer.step()
            assert not behind.done(), "the step has waited for the device"
        trainer.synchronize()


@only_gpu
@pytest.mark.parametrize("subject", ["mesh-1K", "unet-512"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_is_what_was_predicted(subject, dtype, record_property):
    """The memory used by training steps is within 5 % of the prediction."""
    chosen = SUBJECTS[subject]
    with Communicator(MPI.COMM_SELF) as comm, get_backend("cudnn") as kernels:
        before = kernels.device.memory().used
        with Executor(chosen.network(), comm, kernels, chosen.batch, dtype=dtype) as executor:
            trainer = Trainer(executor, SGD(executor.store, momentum=0.9), Constant(1e-4))
            for name, array in chosen.data(executor.network).items():
                executor.set_input(name, array)
            for _ in range(3):
                trainer.step()
            trainer.synchronize()
            predicted = sum(executor.predicted_bytes.values())
            used = kernels.device.memory().used - before
    record_property("predicted_bytes", predicted)
    record_property("used_bytes", used)
    record_property("detail", f"{used / 2**20:.0f} MiB used, {100 * (used / predicted - 1):+.1f} % of the prediction")
    assert abs(used / predicted - 1) <= 0.05
