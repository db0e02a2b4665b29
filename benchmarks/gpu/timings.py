"""Speed on one GPU: copies, halos, and the overhead of cutting. Local."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.gpu.contest import DTYPES, Ours, rounds
from benchmarks.gpu.lone import LoneCommunicator
from benchmarks.gpu.subjects import Subject
from halograd.device import DeviceError, as_dtype
from halograd.dtensor import End, Exchange, Layout
from halograd.kernels import Backend

__all__ = ["fastest", "recorded", "time_copies", "time_cutting", "time_halo"]

ROUNDS, STEPS = 3, 20
CUTS: tuple[dict[str, int], ...] = ({"height": 2}, {"height": 2, "width": 2})
Outcome = tuple[str, Mapping[str, float]]


def time_copies(kernels: Backend, nbytes: int = 1 << 28) -> Outcome:
    """Time a copy; return the bandwidth of its reads and writes together [B/s]."""
    source, target = (kernels.zeros((nbytes,), "uint8") for _ in range(2))
    rate = 2 * nbytes / fastest(kernels, lambda: np.copyto(target, source))
    return f"{rate / 1e9:.0f} GB/s", {"bytes_per_second": rate}


def time_halo(
    kernels: Backend, extent: int = 1024, channels: int = 128, dtype: str = "bfloat16", nbytes: int = 1 << 28
) -> Outcome:
    """Time packing, copying and unpacking the halo of width 1 of a block with eight neighbors, without a network.

    For comparison, this also times a large copy, and three launches that move almost nothing, which is a lower bound.
    Launches are captured as graphs if the device supports graphs, to exclude the host's time.
    """
    bandwidth = time_copies(kernels, nbytes)[1]["bytes_per_second"]
    blocks = Layout.blocks((1, 3 * extent, 3 * extent, channels), {"height": 3, "width": 3}, 9).boxes
    grow = lambda a, b: (a - 1, b + 1)  # noqa: E731
    haloed = blocks.map(None, grow, grow, None).clipped((1, 3 * extent, 3 * extent, channels))
    array = kernels.zeros(haloed[4].shape, as_dtype(dtype))
    comm: Any = LoneCommunicator(4, 9)
    origin = haloed[4].start
    exchange = Exchange(comm, End(blocks, array, origin), End(haloed, array, origin))
    nbytes = array.nbytes - blocks[4].size * array.itemsize
    small = [kernels.zeros((64,), "uint8") for _ in range(2)]

    def floor() -> None:
        for _ in range(3):
            np.copyto(small[0], small[1])

    seconds, least = fastest(kernels, recorded(kernels, exchange.run)), fastest(kernels, recorded(kernels, floor))
    enqueued = fastest(kernels, exchange.run)
    exchange.close()
    # Packing, the copy and unpacking each read and write the halo.
    rate = 6 * nbytes / seconds
    share = rate / bandwidth
    numbers = {"seconds": seconds, "floor_seconds": least, "enqueued_seconds": enqueued, "bytes": nbytes}
    numbers |= {"bytes_per_second": rate, "share_of_copy": share}
    text = f"{1e6 * seconds:.1f} us ({1e6 * enqueued:.1f} us enqueued one by one), {100 * share:.0f} % of the copy"
    return f"{text} bandwidth; three launches that move nothing take {1e6 * least:.1f} us", numbers


def time_cutting(
    kernels: Backend,
    comm: Any,
    subject: Subject,
    precision: str,
    cuts: Sequence[Mapping[str, int]] = CUTS,
    graph: bool = False,
) -> Outcome:
    """Time the steps of all blocks of a sample, one after the other, compared with the step of the uncut sample.

    A block's step includes everything except the network: its kernels on its part of the sample with halos, packing,
    unpacking, and statistics around sums. The update of all parameters, which every block repeats, is counted once.
    Without graphs, the host enqueues as many kernels for a quarter of the sample as for the whole sample, and may limit
    the speed (its time is printed). With `graph`, only device time is measured.
    """
    dtype, numbers = DTYPES[precision], {}
    uncut = Ours(kernels, comm, subject, dtype, graph)
    uncut.warm_up()
    numbers["uncut"] = _median(uncut.seconds)
    numbers["uncut host"] = uncut.host_seconds(STEPS // 4)
    numbers["update"] = update = fastest(kernels, uncut.update)
    uncut.close()
    texts = []
    for parts in cuts:
        size = int(np.prod(list(parts.values())))
        seconds, host = [], []
        for rank in range(size):
            block = Ours(kernels, LoneCommunicator(rank, size), subject, dtype, graph, parts)
            block.warm_up()
            seconds.append(_median(block.seconds))
            host.append(block.host_seconds(STEPS // 4))
            block.close()
        total = numbers[f"{size} blocks"] = sum(seconds) - (size - 1) * update
        numbers[f"{size} blocks host"] = sum(host) / size
        pace = ", the host sets the pace" if sum(host) >= 0.9 * sum(seconds) else ""
        texts.append(f"{size} blocks {100 * (total / numbers['uncut'] - 1):+.1f} %{pace}")
    return f"uncut {1e3 * numbers['uncut']:.2f} ms/step; {', '.join(texts)}", numbers


def _median(run: Callable[[int], float]) -> float:
    return float(np.median(rounds({"it": run}, ROUNDS)["it"]))


def recorded(kernels: Backend, run: Callable[[], None]) -> Callable[[], None]:
    """Return a function captured as a graph if the device supports graphs, else `run`."""
    run()  # load libraries at a first launch, before the capture
    kernels.device.synchronize()
    prepare = kernels.before_capture
    if prepare is not None:
        prepare()
    try:
        return kernels.device.capture(run)
    except DeviceError:
        return run


def fastest(kernels: Backend, run: Callable[[], None]) -> float:
    """Return the mean device time of a run in the fastest of several rounds [s]."""
    device, seconds = kernels.device, []
    for _ in range(ROUNDS + 1):
        first = device.timestamp()
        for _ in range(STEPS):
            run()
        second = device.timestamp()
        device.synchronize()
        seconds.append(device.seconds(first, second) / STEPS)
    return max(min(seconds[1:]), 1e-12)
