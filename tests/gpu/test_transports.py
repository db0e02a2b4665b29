"""Tests of one transport for device arrays on several ranks: messages, sums, halos, training. Collective.

The tests run on doubles, and with several ranks on one GPU: by a CUDA-aware MPI, by NCCL if it lets ranks share a
GPU. A transport that is not available is skipped with the library's reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import CommError, Communicator
from halograd.comm.gpu.nccl import SUMMABLE, NcclLink
from halograd.comm.gpu.streams import Cuda, Passage
from halograd.comm.gpu.watchdog import DeviceWatchdog
from halograd.comm.sums import shards
from halograd.comm.transports.base import TransportContext
from halograd.device import as_dtype
from halograd.dtensor import End, Exchange, Layout
from halograd.kernels import Backend
from halograd.training.backend import open_kernels
from halograd.training.config import BackendConfig
from tests.gpu.place import gpu_count
from tests.gpu.slow import Slow, reused_message
from tests.gpu.test_ranks import SIZE, compare_losses
from tests.support.fake_device import FakeBackend
from tests.support.gpu_ranks import gpu_ranks

METHODS = ("allreduce", "ordered", "reduce_scatter", "all_gather")
#: Elements: some ranks have no shard; shards are as long as each other, or not; more than goes the urgent way.
COUNTS = {"double": (5, 1 << 12, 3001), "gpu": (5, 1 << 12, 3001, 1 << 20)}
#: Ranks that share one GPU. NCCL lets two do so from 2.30.3 on, and may hang where multiprocessors run out.
SHARING = {"nccl": (2,), "mpi-cuda": (2,)}


def places(names: Mapping[str, tuple[int, ...]]) -> list[Any]:
    """Return the parameters of a test: each transport on two ranks with doubles, and on the given ranks on a GPU."""
    return [
        pytest.param((place, name), marks=[pytest.mark.ranks(*sizes), *[pytest.mark.gpu] * gpu], id=f"{place}-{name}")
        for place, gpu in (("double", False), *[("gpu", True)] * bool(gpu_count()))
        for name, sizes in (names if gpu else dict.fromkeys(names, (2,))).items()
    ]


@pytest.fixture(params=places(SHARING))
def opened(request, monkeypatch) -> Iterator[tuple[Backend, Communicator, str]]:
    """Return kernels, a communicator over the transport, and the name of the device: the double or the GPU."""
    place, name = request.param
    if place == "double":
        monkeypatch.setattr(Slow, "write", lambda self, array, value: array.fill(value))
        with gpu_ranks(monkeypatch, name) as r:
            r.trace_barriers(monkeypatch)
            yield r.kernels, r.comm, place
        return
    with Communicator(MPI.COMM_WORLD) as comm, open_kernels(BackendConfig(kernels="cudnn"), comm) as kernels:
        try:
            comm.use_device(kernels.device, name)
        except CommError as error:
            pytest.skip(f"needs the transport: {error}")
        yield kernels, comm, place


def test_messages(opened):
    reused_message(*opened[:2])


@pytest.mark.parametrize("method", METHODS)
def test_sums(opened, method):
    """Several simultaneous sums after a slow producer are right in every run; results are read only at the end."""
    kernels, comm, place = opened
    slow, device = Slow(kernels), kernels.device
    buffers = [kernels.zeros((count,), "float32") for count in COUNTS[place]]
    sums = [comm.reduction(buffer, method=method, name=f"{method} {buffer.size}") for buffer in buffers]
    kept = [[kernels.zeros(buffer.shape, "float32") for buffer in buffers] for _ in range(4)]
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
            summands = [100.0 * run + 10 * i + rank for rank in range(comm.size)]
            check_sum(device.to_host(copy), summands, method, comm.rank)


def check_sum(found: np.ndarray, summands: list[float], method: str, rank: int) -> None:
    """Raise unless `found` is this rank's part of the sum; each rank contributes one constant."""
    parts = shards(found.size, len(summands), found.itemsize)
    expected = np.full(found.size, sum(summands), np.float32)
    where = parts[rank] if method == "reduce_scatter" else slice(None)
    if method == "all_gather":
        for part, value in zip(parts, summands):
            expected[part] = value
    wrong = f"{method} of {found.size}: expected {np.unique(expected)[:4]}, got {np.unique(found)[:4]}"
    assert np.array_equal(found[where], expected[where]), wrong


def test_halos(opened, record_property):
    """Successive halo exchanges between blocks of rows are right, and the device times them."""
    kernels, comm, place = opened
    extent, channels, rounds = (256, 64, 20) if place == "gpu" else (8, 4, 2)
    shape, device = (1, extent * comm.size, extent, channels), kernels.device
    layout = Layout.blocks(shape, {"height": comm.size}, comm.size)
    needed = layout.boxes.map(None, lambda a, b: (a - 1, b + 1), None, None).clipped(shape)
    array = kernels.zeros(needed[comm.rank].shape, "float32")
    origin = needed[comm.rank].start
    own = layout.boxes[comm.rank].start[1] - origin[1]
    array[:, own : own + extent].fill(comm.rank + 1)
    exchange = Exchange(comm, End(layout.boxes, array, origin), End(needed, array, origin))
    exchange.run()
    device.synchronize()
    comm.barrier()
    first = device.timestamp()
    for _ in range(rounds):
        exchange.run()
    last = device.timestamp()
    device.synchronize()
    seconds = comm.allreduce_scalar(device.seconds(first, last) / rounds, "max")
    nbytes = comm.counters["halo"].bytes // (rounds + 1)
    exchange.close()
    found = device.to_host(array)
    rows = [found[0, i, 0, 0] - 1 for i in range(found.shape[1])]
    assert rows == [(origin[1] + i) // extent for i in range(found.shape[1])]
    record_property("seconds", seconds)
    record_property("detail", f"{1e6 * seconds:.0f} us for {nbytes / 1024:.0f} KiB")


@pytest.mark.parametrize("name", ["mesh", "resnet", "unet", "lenet"])
def test_training(opened, name):
    kernels, comm, place = opened
    if place == "gpu" or name == "mesh":  # on doubles: tests/training/test_device.py
        compare_losses(kernels, comm, "float32", name, {"sample": 1, "height": SIZE, "width": 1})


def test_graphs(opened):
    """With NCCL, graphs contain the messages too, and losses are correct."""
    kernels, comm, _ = opened
    compare_losses(kernels, comm, "float32", "mesh", {"sample": 1, "height": SIZE, "width": 1}, steps=6)


# -- NCCL with one rank: all that can be called where ranks share a GPU and it is older than 2.30.3 ------------
@pytest.fixture(
    params=[
        pytest.param("double", marks=pytest.mark.ranks(1)),
        *[pytest.param("gpu", marks=[pytest.mark.gpu, pytest.mark.ranks(1)])] * bool(gpu_count()),
    ]
)
def link(request, monkeypatch) -> Iterator[tuple[Backend, NcclLink]]:
    """Return kernels and an NCCL communicator of one rank, on a separate stream."""

    def connected(kernels: Backend, comm: Communicator) -> Iterator[tuple[Backend, NcclLink]]:
        from halograd.comm.gpu import link as links

        cuda, watchdog = Cuda(kernels.device), DeviceWatchdog("the only rank", begin=kernels.device.use)
        context = TransportContext(comm.mpi, None, comm.agree, (0,))
        made = NcclLink(links.load_nccl(), cuda.comm_stream(), context, watchdog)
        try:
            yield kernels, made
        finally:
            made.close()
            watchdog.close()

    if request.param == "double":
        with gpu_ranks(monkeypatch, "none") as r:
            yield from connected(r.kernels, r.comm)
        return
    with Communicator(MPI.COMM_WORLD) as comm, open_kernels(BackendConfig(kernels="cudnn"), comm) as kernels:
        yield from connected(kernels, comm)


@pytest.mark.parametrize("dtype", SUMMABLE)
def test_every_call_of_nccl_in_every_dtype(link, dtype):
    """Every NCCL call on one rank copies one array into another, so order of arguments and constants are right."""
    kernels, link = link
    count, stream, nccl = 1000, link.comm_stream.ptr, link.nccl
    values = np.arange(count).astype(as_dtype(dtype))
    number, nbytes = getattr(nccl, SUMMABLE[dtype]), values.nbytes
    calls = {
        "allReduce": lambda c, a, b: c.allReduce(a, b, count, number, nccl.NCCL_SUM, stream),
        "reduce": lambda c, a, b: c.reduce(a, b, count, number, nccl.NCCL_SUM, 0, stream),
        "reduceScatter": lambda c, a, b: c.reduceScatter(a, b, count, number, nccl.NCCL_SUM, stream),
        "allGather": lambda c, a, b: c.allGather(a, b, count, number, stream),
        "broadcast": lambda c, a, b: c.broadcast(a, b, count, number, 0, stream),
        "send": lambda c, a, b: (
            c.send(a, nbytes, nccl.NCCL_UINT8, 0, stream),
            c.recv(b, nbytes, nccl.NCCL_UINT8, 0, stream),
        ),
    }
    source, address = kernels.device.array(values), kernels.device.address
    for name, call in calls.items():
        target, passage = kernels.zeros((count,), as_dtype(dtype)), Passage(link.comm_stream)
        passage.enter()
        with link.group() as comm:
            call(comm, address(source), address(target))
        link.leave(passage, name)
        passage.join()
        assert np.array_equal(kernels.device.to_host(target), values), name
        link.forget(passage)


# -- the checks themselves ------------------------------------------------------------------------------------------
@pytest.mark.ranks(2)
def test_what_is_wrong_is_found(monkeypatch):
    """A missing wait for a stream makes the tests fail, because the double executes other streams late."""
    monkeypatch.setattr(Passage, "join", lambda self: None)
    monkeypatch.setattr(Slow, "write", lambda self, array, value: array.fill(value))
    with pytest.raises(AssertionError, match="rank [01]: "), gpu_ranks(monkeypatch, "nccl") as r:  # noqa: RUF043
        with pytest.raises(AssertionError, match=r"of rank . carried"):
            reused_message(r.kernels, r.comm)
        for method in ("allreduce", "ordered", "all_gather"):
            with pytest.raises(AssertionError, match=f"{method} of"):
                test_sums((r.kernels, r.comm, "double"), method)


@pytest.mark.ranks(2)
def test_what_cannot_be_had_is_said():
    refused = pytest.raises(CommError, match="rank 0 has no CUDA device")
    with FakeBackend() as kernels, Communicator(MPI.COMM_WORLD) as comm, refused:
        comm.use_device(kernels.device, "nccl")


def test_wrong_sums_are_found():
    for method in METHODS:
        with pytest.raises(AssertionError, match=f"{method} of 40: expected"):
            check_sum(np.zeros(40, np.float32), [1.0, 2.0], method, 0)
