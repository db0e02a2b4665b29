"""Program of each rank of :mod:`benchmarks.memory`: one training step, and its memory. Collective."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.models import mesh_2k
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD

__all__ = ["measure", "peak_bytes", "reset_peak", "resident_bytes"]


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) << 10
    raise OSError(f"expected {key} in /proc/self/status, got none; this needs Linux")


def resident_bytes() -> int:
    """Return the current memory of this process, shared segments included [B]."""
    return _status("VmRSS")


def peak_bytes() -> int:
    """Return the peak memory of this process since `reset_peak` [B]."""
    return _status("VmHWM")


def reset_peak() -> None:
    """Start a new measurement of the peak."""
    Path("/proc/self/clear_refs").write_text("5")


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """Build and run one step; return this rank's measured and predicted memory [B], without that of the libraries."""
    network = mesh_2k(**spec["model"])
    with Communicator(MPI.COMM_WORLD) as comm, get_backend("auto", threads=spec["threads"]) as backend:
        warm_up(backend)
        before = resident_bytes()
        reset_peak()
        with Executor(network, comm, backend, 1, Strategy({"height": comm.size})) as executor:
            optimizer = SGD(executor.store, momentum=0.9)
            assert executor.reducer is not None
            executor.reducer.update = optimizer.update
            draw = np.random.default_rng(comm.rank)
            for name in network.inputs:
                fill(executor.input(name).array, draw)
            executor.forward()
            loss = executor.loss_value()
            optimizer.begin_step(1e-3)
            executor.backward()
            executor.reducer.finish()
            kernels = f"{backend.name} {backend.version}, {backend.threads} thread(s)"
            result = {"predicted": dict(executor.predicted_bytes), "loss": loss, "backend": kernels}
            return result | {"measured": peak_bytes() - before, "before": before}


def warm_up(backend: Any) -> None:
    """Run one kernel, so that the backend loads its libraries, threads and generated code."""
    x, y = backend.zeros((64, 64), "float32"), backend.zeros((64, 64), "float32")
    backend.dense_forward(x, x, None, y)()


def fill(array: np.ndarray, draw: np.random.Generator) -> None:
    """Fill an array with random numbers row by row, without a second array of its size."""
    for sample in array:
        for row in sample:
            row[...] = draw.random(row.shape, np.float32)


if __name__ == "__main__":
    result = measure(json.loads(sys.argv[1]))
    everyone = MPI.COMM_WORLD.gather(result)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(everyone))
