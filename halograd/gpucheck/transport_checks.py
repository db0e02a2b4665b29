"""One way for arrays of devices to travel, checked under several ranks: messages, sums, races, training. Collective."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from halograd.comm import CommError, Communicator
from halograd.comm.shard import shards
from halograd.dtensor import Exchange, Layout
from halograd.gpucheck.rank_checks import Slow, agreed, check_training, reused_message
from halograd.gpucheck.report import Report, Result
from halograd.kernels import Backend

__all__ = ["METHODS", "check_transport", "halo_seconds"]

METHODS = ("allreduce", "ordered", "reduce_scatter", "all_gather")
#: Elements: some ranks have no shard; shards are as long as each other, or not; more than goes the urgent way.
COUNTS = (5, 1 << 12, 3001, 1 << 20)
Outcome = tuple[str, Mapping[str, float]]


def check_transport(kernels: Backend, comm: Communicator, report: Report, name: str) -> None:
    """Check a transport, or say why it cannot be had here. Collective over `comm`, which has no choice yet."""
    group = f"{name} {comm.size} ranks"
    try:
        choice = comm.use_device(kernels.device, name)
    except CommError as error:
        report.add(Result(group, "choice", "skipped", str(error)))
        return
    report.add(Result(group, "choice", "ok", choice.describe()))
    agreed(report, comm, group, "reused message", lambda: reused_message(kernels, comm))
    for method in METHODS:
        agreed(report, comm, group, method, partial(_sums, kernels, comm, method))
    agreed(report, comm, group, "halo", lambda: _halo(kernels, comm))
    check_training(kernels, comm, report, "float32", group)


def _sums(kernels: Backend, comm: Communicator, method: str) -> Outcome:
    """Several sums under way at once behind a slow producer, run after run, looked at in the end only."""
    slow, device = Slow(kernels), kernels.device
    buffers = [kernels.zeros((count,), "float32") for count in COUNTS]
    sums = [comm.reduction(buffer, method=method, name=f"{method} {buffer.size}") for buffer in buffers]
    kept: list[list[Any]] = [[kernels.zeros(buffer.shape, "float32") for buffer in buffers] for _ in range(4)]
    for run, copies in enumerate(kept):
        for i, (buffer, total) in enumerate(zip(buffers, sums)):
            slow.write(buffer, 100.0 * run + 10 * i + comm.rank)
            total.start()
        for total in reversed(sums):
            total.finish()
        for buffer, copy in zip(buffers, copies):
            np.copyto(copy, buffer)
            buffer.fill(-1)
    for total in sums:
        total.close()
    for run, copies in enumerate(kept):
        for i, copy in enumerate(copies):
            _compare(
                device.to_host(copy), [100.0 * run + 10 * i + rank for rank in range(comm.size)], method, comm.rank
            )
    return f"{len(kept)} x {len(COUNTS)} sums", {}


def _compare(found: np.ndarray, summands: list[float], method: str, rank: int) -> None:
    parts = shards(found.size, len(summands), found.itemsize)
    expected = np.full(found.size, sum(summands), np.float32)
    where = parts[rank] if method == "reduce_scatter" else slice(None)
    if method == "all_gather":
        for part, value in zip(parts, summands):
            expected[part] = value
    if not np.array_equal(found[where], expected[where]):
        raise AssertionError(
            f"{method} of {found.size}: expected {np.unique(expected)[:4]}, got {np.unique(found)[:4]}"
        )


def _halo(kernels: Backend, comm: Communicator) -> Outcome:
    seconds, nbytes = halo_seconds(kernels, comm)
    return f"{seconds * 1e6:.0f} us for {nbytes / 1024:.0f} KiB", {"seconds": seconds, "bytes": float(nbytes)}


def halo_seconds(
    kernels: Backend, comm: Communicator, extent: int = 256, channels: int = 64, rounds: int = 20
) -> tuple[float, int]:
    """Time of a halo exchange of width 1 between blocks of rows, and what a rank sends in it [s, B]. Collective.

    Timed by the device, between stamps around all rounds: a pass of packing, message and unpacking at a time.
    """
    shape, device = (1, extent * comm.size, extent, channels), kernels.device
    layout = Layout.blocks(shape, {"height": comm.size}, comm.size)
    needed = layout.boxes.map(None, lambda a, b: (a - 1, b + 1), None, None).clipped(shape)
    array = kernels.zeros(needed[comm.rank].shape, "float32")
    origin = needed[comm.rank].start
    exchange = Exchange(comm, layout.boxes, needed, array, array, source_origin=origin, target_origin=origin)
    before = comm.counters["halo"].bytes
    exchange.run()
    nbytes = comm.counters["halo"].bytes - before
    device.synchronize()
    comm.barrier()
    first, begin = device.stamp(), time.perf_counter()
    for _ in range(rounds):
        exchange.run()
    last = device.stamp()
    device.synchronize()
    took = max(device.seconds(first, last), 0.0) or time.perf_counter() - begin
    exchange.close()
    return comm.allreduce_scalar(took / rounds, "max"), nbytes
