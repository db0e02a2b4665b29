"""Speed on one GPU: copies, halos, training steps beside torch's, the cost of cutting, memory. Local."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

from halograd.comm import Communicator
from halograd.device import DeviceError, as_dtype
from halograd.dtensor import Exchange, Layout
from halograd.gpucheck.contest import DTYPES, Ours, contest, rounds
from halograd.gpucheck.lone import LoneCommunicator
from halograd.gpucheck.report import Report, Result
from halograd.gpucheck.subjects import SUBJECTS, Subject
from halograd.gpucheck.torch_process import TorchProcess, find_torch
from halograd.kernels import Backend

__all__ = ["run_benchmarks", "time_copies", "time_cutting", "time_halo"]

ROUNDS, STEPS = 3, 20
#: What has to be left of the budget for one more contest, of ours and torch's eager mode [s].
CONTEST_NEEDS = 25.0
CUTS: tuple[dict[str, int], ...] = ({"height": 2}, {"height": 2, "width": 2})
Outcome = tuple[str, Mapping[str, float]]


def run_benchmarks(
    kernels: Backend,
    comm: Communicator,
    report: Report,
    subjects: Mapping[str, Subject] = SUBJECTS,
    precisions: Sequence[str] = tuple(DTYPES),
    torch_device: str = "cuda",
) -> None:
    """All benchmarks, each as one result with its numbers; the most telling first, as long as the budget lasts."""
    group = "benchmarks"
    rate = report.check(group, "copy within the device", lambda: time_copies(kernels))
    bandwidth = rate.numbers.get("bytes_per_second", 0.0)
    report.check(group, "halo of (1, 1024, 1024, 128) bf16", lambda: time_halo(kernels, bandwidth))
    lacks = find_torch()
    with ExitStack() as stack:
        torch = None if lacks else stack.enter_context(TorchProcess(torch_device))
        if lacks:
            report.add(Result(group, "torch", "skipped", lacks))
        for precision in precisions:
            for i, subject in enumerate(subjects.values()):
                name = f"{subject.title}, {precision}"
                _within(report, group, name, partial(contest, kernels, comm, subject, precision, report, torch))
                torch = _freed(torch, stack, torch_device, subject is list(subjects.values())[-1])
                if not i and precision == precisions[0]:
                    cutting = partial(time_cutting, kernels, comm, subject, precision)
                    _within(report, group, f"cutting {name}", cutting)


def _within(report: Report, group: str, name: str, run: Callable[[], Outcome]) -> None:
    left = report.seconds_left
    if left < CONTEST_NEEDS:
        report.add(Result(group, name, "skipped", f"{max(0.0, left):.0f} s are left, it takes {CONTEST_NEEDS:.0f} s"))
    else:
        report.check(group, name, run)


def _freed(torch: TorchProcess | None, stack: ExitStack, device: str, last: bool) -> TorchProcess | None:
    """torch without its networks; a new one where it was ended because it took too long."""
    if torch is None or last:
        return torch
    try:
        torch.ask(30.0, do="free")
        return torch
    except Exception:
        return stack.enter_context(TorchProcess(device))


def time_copies(kernels: Backend, nbytes: int = 1 << 28) -> Outcome:
    """Bandwidth of a copy, reading and writing [B/s]."""
    source, target = (kernels.zeros((nbytes,), "uint8") for _ in range(2))
    rate = 2 * nbytes / _fastest(kernels, lambda: np.copyto(target, source))
    return f"{rate / 1e9:.0f} GB/s", {"bytes_per_second": rate}


def time_halo(
    kernels: Backend, bandwidth: float, extent: int = 1024, channels: int = 128, dtype: str = "bfloat16"
) -> Outcome:
    """Pack, copy and unpack of a block's halo of width 1 with all eight neighbors, without a wire.

    Beside it the time of three launches that move next to nothing, below which three launches cannot be. Both are
    recorded as graphs where the device has them, so that the host's share is not in it.
    """
    blocks = Layout.blocks((1, 3 * extent, 3 * extent, channels), {"height": 3, "width": 3}, 9).boxes
    grow = lambda a, b: (a - 1, b + 1)  # noqa: E731
    wanted = blocks.map(None, grow, grow, None).clipped((1, 3 * extent, 3 * extent, channels))
    array = kernels.zeros(wanted[4].shape, as_dtype(dtype))
    comm: Any = LoneCommunicator(4, 9)
    origin = wanted[4].start
    exchange = Exchange(comm, blocks, wanted, array, array, source_origin=origin, target_origin=origin)
    nbytes = array.nbytes - blocks[4].size * array.itemsize
    small = [kernels.zeros((64,), "uint8") for _ in range(2)]

    def floor() -> None:
        for _ in range(3):
            np.copyto(small[0], small[1])

    seconds, least = _fastest(kernels, _recorded(kernels, exchange.run)), _fastest(kernels, _recorded(kernels, floor))
    enqueued = _fastest(kernels, exchange.run)
    exchange.close()
    # Packing, the copy and unpacking each read and write what travels.
    rate = 6 * nbytes / seconds
    share = rate / bandwidth if bandwidth else 0.0
    numbers = {"seconds": seconds, "floor_seconds": least, "enqueued_seconds": enqueued, "bytes": nbytes}
    numbers |= {"bytes_per_second": rate, "share_of_copy": share}
    text = f"{1e6 * seconds:.1f} us ({1e6 * enqueued:.1f} us enqueued one by one), {100 * share:.0f} % of the copy"
    return f"{text} bandwidth; three launches that move nothing take {1e6 * least:.1f} us", numbers


def time_cutting(
    kernels: Backend, comm: Any, subject: Subject, precision: str, cuts: Sequence[Mapping[str, int]] = CUTS
) -> Outcome:
    """The same sample as blocks, whose steps are worked one after the other, against uncut.

    A block's step holds everything but the wires: its kernels over its part of the sample with halos, packing,
    unpacking, statistics around sums. The update of all parameters, which every block repeats, is counted once.
    """
    dtype, numbers = DTYPES[precision], {}
    uncut = Ours(kernels, comm, subject, dtype)
    uncut.warm_up()
    numbers["uncut"] = _median(uncut.seconds)
    numbers["update"] = update = _fastest(kernels, uncut.update)
    uncut.close()
    texts = []
    for parts in cuts:
        size = int(np.prod(list(parts.values())))
        seconds = []
        for rank in range(size):
            block = Ours(kernels, LoneCommunicator(rank, size), subject, dtype, parts=parts)
            block.warm_up()
            seconds.append(_median(block.seconds))
            block.close()
        total = numbers[f"{size} blocks"] = sum(seconds) - (size - 1) * update
        texts.append(f"{size} blocks {100 * (total / numbers['uncut'] - 1):+.1f} %")
    return f"uncut {1e3 * numbers['uncut']:.2f} ms/step; {', '.join(texts)}", numbers


def _median(run: Callable[[int], float]) -> float:
    return float(np.median(rounds({"it": run}, ROUNDS)["it"]))


def _recorded(kernels: Backend, run: Callable[[], None]) -> Callable[[], None]:
    """The same as a graph, where the device has them."""
    run()  # what is loaded at the first launch is not recorded
    kernels.device.synchronize()
    prepare = getattr(kernels, "before_capture", None)
    if prepare is not None:
        prepare()
    try:
        return kernels.device.capture(run)
    except DeviceError:
        return run


def _fastest(kernels: Backend, run: Callable[[], None]) -> float:
    """Seconds of one run on the device, in the fastest of some rounds."""
    device, seconds = kernels.device, []
    for _ in range(ROUNDS + 1):
        first = device.stamp()
        for _ in range(STEPS):
            run()
        second = device.stamp()
        device.synchronize()
        seconds.append(device.seconds(first, second) / STEPS)
    return max(min(seconds[1:]), 1e-12)
