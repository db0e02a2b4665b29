"""Rates of one device: arithmetic, memory, and the floor of a kernel. All ranks of a node measure at the same time."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from halograd.comm import Communicator
from halograd.kernels import Geometry
from halograd.perfmodel.machine import Efficiency
from halograd.perfmodel.profile.crowd import Crowd
from halograd.perfmodel.profile.fit import fit_line

__all__ = ["DeviceRates", "measure_device", "memory_size"]

ROUNDS = 7
#: Rows of the square matrices whose product tells the peak rate.
MATRIX = 1024
#: Of the arrays whose copy tells the memory bandwidth [B].
STREAM = 128 << 20
#: Positions per axis of the convolutions that show how the rate falls for small kernels.
EXTENTS = (4, 8, 16, 32, 64)
_CHANNELS = 64
#: Below which fraction of the peak the curve does not fall.
_LEAST = 0.05


class DeviceRates:
    """What one rank's device does.

    Attributes
    ----------
    peak
        Data type -> best rate of a matrix product [flop/s].
    bandwidth
        Of a copy, bytes read and written [B/s].
    launch
        Time of the smallest kernel [s].
    efficiency
        What convolutions reach of the peak.
    """

    def __init__(self, peak: dict[str, float], bandwidth: float, launch: float, efficiency: Efficiency) -> None:
        self.peak, self.bandwidth, self.launch, self.efficiency = peak, bandwidth, launch, efficiency


def measure_device(kernels: Any, comm: Communicator) -> DeviceRates:
    """Rates of the slowest rank, while all are at work. Collective over `comm`.

    Parameters
    ----------
    kernels
        Backend.
    comm
        All ranks that measure together.
    """

    crowd = Crowd.of(comm, kernels)

    def clock(run: Callable[[], Any]) -> float:
        return _best(run, kernels, comm, crowd)

    peak = {dtype: 2 * MATRIX**3 / clock(_product(kernels, dtype, MATRIX)) for dtype in kernels.dtypes}
    launch = clock(_product(kernels, kernels.dtypes[0], 1))
    source, target = kernels.zeros((STREAM,), np.uint8), kernels.zeros((STREAM,), np.uint8)
    bandwidth = 2 * STREAM / clock(lambda: kernels.xp.copyto(target, source))
    return DeviceRates(peak, bandwidth, launch, _efficiency(kernels, clock, peak[kernels.dtypes[0]], launch))


def _best(run: Callable[[], Any], kernels: Any, comm: Communicator, crowd: Crowd) -> float:
    """The best of some rounds, each as slow as its slowest rank [s]."""
    run()
    times = []
    for _ in range(ROUNDS):
        comm.barrier()
        begin = crowd.clock()
        run()
        kernels.synchronize()
        times.append(float(comm.allreduce_scalar(crowd.clock() - begin, "max")))
    return min(times)


def _product(kernels: Any, dtype: str, rows: int) -> Callable[[], Any]:
    x, w, y = (kernels.zeros((rows, rows), dtype) for _ in range(3))
    kernel: Callable[[], Any] = kernels.dense_forward(x, w, None, y)
    return kernel


def _efficiency(kernels: Any, clock: Callable[..., float], peak: float, launch: float) -> Efficiency:
    """From convolutions of several sizes: ``t = launch + (flops + half) / (peak * compute)``."""
    geometry = Geometry(kernel=(3, 3), stride=(1, 1), dilation=(1, 1), padding=((1, 1), (1, 1)), groups=1)
    flops, seconds = [], []
    for extent in EXTENTS:
        x, y = (kernels.zeros((1, extent, extent, _CHANNELS), kernels.dtypes[0]) for _ in range(2))
        w = kernels.zeros((_CHANNELS, 3, 3, _CHANNELS), kernels.dtypes[0])
        seconds.append(clock(kernels.conv_forward(x, w, None, y, geometry)))
        flops.append(2.0 * 9 * _CHANNELS**2 * extent**2)
    line = fit_line(flops, seconds)
    compute = min(1.0, 1 / (line.beta * peak)) if line.beta else 1.0
    half = max(0.0, line.alpha - launch) * peak * compute
    return Efficiency(compute=compute, half=half, least=_LEAST)


def memory_size(ranks: int) -> int:
    """Memory of one of the ranks that share this node [B]."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdigit():
            total = min(total, int(text))
    return total // ranks
