"""Measurements of a machine: its links and sums, and the rates of one device. All ranks measure at the same time."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import pstdev, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from ...kernels import Geometry
from ...limits import memory_size
from ..machine import Efficiency, Link, Machine, Variation
from .cache import Oversubscription, device_name
from .messages import LARGE, SIZES, MessageTimer, Nodes, fit_copy
from .record import Fit, Profile, fit_line

if TYPE_CHECKING:
    from ...comm import Communicator
    from ...device import Device

__all__ = ["group_sizes", "measure_machine", "rank_memory", "spread"]

ROUNDS = 7
#: Repetitions of a kernel whose times show how much they vary.
REPETITIONS = 40
#: Number of rows of the square matrices whose product gives the peak rate.
MATRIX = 1024
#: Size of the arrays whose copy gives the memory bandwidth [B].
STREAM = 128 << 20
#: Positions per axis of the convolutions that show the decrease of the rate for small kernels.
EXTENTS = (4, 8, 16, 32, 64)
_CHANNELS = 64
#: Lower limit of the curve, as a fraction of the peak.
_LEAST = 0.05


def rank_memory(comm: Communicator, device: Device) -> int:
    """Return the memory that every rank may use [B]: that of its whole device, or its share of the limit of its host.

    The result is the minimum over all ranks. Collective over `comm`.
    """
    hosts = Nodes(tuple(comm.allgather_objects(platform.node())))
    own = device.memory()
    return int(comm.allreduce_scalar(memory_size(hosts.fullest) if own is None else own.total, "min"))


def measure_machine(comm: Communicator, kernels: Any, name: str = "here") -> Profile:
    """Measure links, collectives and device of this machine. Collective over `comm`.

    Levels without a pair of ranks get the values of the nearest measured level; their note states this. Overheads are
    not measured here (:meth:`Profile.with_overheads` adds them).

    Parameters
    ----------
    comm
        All ranks of the run, with the transport that runs will use.
    kernels
        Backend.
    name
        Name of the machine.
    """
    hosts = Nodes(tuple(comm.allgather_objects(platform.node())))
    nodes = Nodes(tuple(map(str, comm.nodes)))
    # An emulated network between all ranks counts as the link within their node.
    grouping = nodes if nodes.has("node") else hosts
    # The time that messages travel over a network is wall time, also if ranks share cores.
    clock = time.perf_counter if comm.waits_for_network else Oversubscription.of(comm, kernels).clock
    channel, face, strided, timer = {}, {}, {}, MessageTimer(comm, clock=clock)
    for level in ("node", "across"):
        if grouping.has(level):
            partner = grouping.partner(comm.rank, level)
            channel[level] = timer.channel(partner)
            face[level] = timer.face(partner, strided=False)
            strided[level] = timer.face(partner, strided=True)
    # All ranks copy at the same time, because they share the bandwidth of their memory.
    comm.barrier()
    copy = fit_copy(clock=clock)
    sums = _reductions(comm, clock)
    rates = _device_rates(kernels, comm)
    machine = Machine(
        name=name,
        source=f"measured by halograd profile on {comm.size} ranks, {time.strftime('%Y-%m-%d')}",
        devices_per_node=grouping.fullest,
        nodes_per_switch=len(set(grouping.nodes)),
        memory=rank_memory(comm, kernels.device),
        links=_links(comm, copy, face, channel, nodes.has("node")),
        device=f"{device_name(kernels)}; {kernels.name} {kernels.version}, {kernels.threads} thread(s)",
        **rates,
    )
    profile = Profile(
        version=1,
        machine=machine,
        ranks=comm.size,
        transport=comm.transport,
        channel=channel,
        face=face,
        strided=strided,
        copy=copy,
        update=0.0,
        layer_overhead=0.0,
        **sums,
    )
    # Each rank has timed its own copies; all ranks return the profile of rank 0.
    return comm.bcast(profile)


def _links(
    comm: Communicator, copy: Fit, face: Mapping[str, Fit], channel: Mapping[str, Fit], memory_shared: bool
) -> dict[str, Link]:
    """Return the links of all levels; levels that were not measured have the values of the nearest measured one.

    Links include packing; links of an emulated network exclude it, because the cost model adds it there.
    `memory_shared`: whether an emulated node has several ranks, which share memory.
    """
    links, nearest = {"device": copy.link("copy")}, "device"
    for level in ("node", "switch", "across"):
        # A profile does not know which nodes share a switch.
        measured = "across" if level == "switch" else level
        if measured not in face:
            links[level] = Link(links[nearest].alpha, links[nearest].beta, f"not measured: copied from {nearest}")
            continue
        nearest = level
        if comm.network is None:
            shared = comm.shares_memory and level == "node"
            links[level] = face[measured].link(f"{comm.transport}, with packing", shared)
        elif level == "node" and memory_shared:
            links[level] = face[measured].link("shared, with packing", shared=True)
        else:
            links[level] = channel[measured].link(comm.transport, emulated=True)
    return links


def group_sizes(ranks: int) -> list[int]:
    """Return the sizes of groups whose sums are measured: 2, 4, 8, ... and all ranks; none for one rank.

    >>> group_sizes(6)
    [2, 4, 6]
    """
    sizes = {1 << k for k in range(1, ranks.bit_length()) if 1 << k <= ranks}
    return sorted(sizes | ({ranks} if ranks > 1 else set()))


def _reductions(comm: Communicator, clock: Callable[[], float]) -> dict[str, Any]:
    """Measure sums over groups of ranks, all groups of a size at the same time; return the results of the first group.
    """
    results: dict[str, dict[int, Fit]] = {"reduction": {}, "reduction_behind": {}, "reduction_exposed": {}}
    for size in group_sizes(comm.size):
        # Ranks that are left over do not sum, but take part in the split and the broadcast, which are collective.
        in_group = comm.rank < comm.size - comm.size % size
        group = comm.split(comm.rank // size if in_group else None)
        fits = None
        if group is not None:
            timer = MessageTimer(group, SIZES + LARGE, clock=clock)
            waited = timer.reduction()
            fits = (waited, *timer.reduction_behind(waited))
            group.close()
        for by_size, fit in zip(results.values(), comm.bcast(fits)):
            by_size[size] = fit
    return results


def _device_rates(kernels: Any, comm: Communicator) -> dict[str, Any]:
    """Return the rates of the slowest rank while all ranks compute, as fields of `Machine`. Collective."""
    oversubscription = Oversubscription.of(comm, kernels)

    def fastest(run: Callable[[], Any]) -> float:
        """Return the time of `run` on the slowest rank [s], the minimum over several rounds: peak rates are wanted."""
        # The first run is slower: libraries generate code, and memory gets its pages.
        run()
        times = []
        for _ in range(ROUNDS):
            comm.barrier()
            begin = oversubscription.clock()
            run()
            kernels.synchronize()
            times.append(float(comm.allreduce_scalar(oversubscription.clock() - begin, "max")))
        return min(times)

    def product(dtype: str, rows: int) -> float:
        x, w, y = (kernels.zeros((rows, rows), dtype) for _ in range(3))
        return fastest(kernels.dense_forward(x, w, None, y))

    peak = {dtype: 2 * MATRIX**3 / product(dtype, MATRIX) for dtype in kernels.dtypes if not kernels.emulates(dtype)}
    dtype = kernels.dtypes[0]
    # The product of two numbers takes little more than the start of a kernel.
    launch = product(dtype, 1)
    source, target = kernels.zeros((STREAM,), np.uint8), kernels.zeros((STREAM,), np.uint8)
    # A copy reads and writes.
    bandwidth = 2 * STREAM / fastest(lambda: kernels.xp.copyto(target, source))
    # The efficiency is fitted to convolutions of several sizes: t = launch + (flops + half) / (peak * compute).
    geometry = Geometry(kernel=(3, 3), stride=(1, 1), dilation=(1, 1), padding=((1, 1), (1, 1)), groups=1)
    seconds = []
    for extent in EXTENTS:
        x, y = (kernels.zeros((1, extent, extent, _CHANNELS), dtype) for _ in range(2))
        w = kernels.zeros((_CHANNELS, 3, 3, _CHANNELS), dtype)
        seconds.append(fastest(kernels.conv_forward(x, w, None, y, geometry)))
    variation = _variation(comm, oversubscription, kernels, kernels.conv_forward(x, w, None, y, geometry))
    # 3 x 3 kernels; a multiplication and an addition are two operations.
    line = fit_line([2.0 * 9 * _CHANNELS**2 * extent**2 for extent in EXTENTS], seconds)
    # A machine file allows at most 1 for the whole device.
    compute = min(1.0, 1 / (line.beta * peak[dtype])) if line.beta else 1.0
    half = max(0.0, line.alpha - launch) * peak[dtype] * compute
    efficiency = Efficiency(compute=compute, half=half, least=_LEAST)
    return {
        "rounds_gradients": kernels.rounds_gradients,
        "peak_flops": peak,
        "memory_bandwidth": bandwidth,
        "launch": launch,
        "efficiency": efficiency,
        "variation": variation,
    }


def _variation(
    comm: Communicator, oversubscription: Oversubscription, kernels: Any, run: Callable[[], Any]
) -> Variation:
    """Return the variation of the time of a kernel from call to call and between the ranks. Collective.

    All ranks run the kernel at the same time. As in the times of layers, the longest tenth does not count.
    """
    seconds = []
    for _ in range(REPETITIONS):
        comm.barrier()
        begin = oversubscription.clock()
        run()
        kernels.synchronize()
        seconds.append(oversubscription.clock() - begin)
    return spread(comm.allgather_objects(seconds))


def spread(seconds: Sequence[Sequence[float]]) -> Variation:
    """Return the variation of a kernel's times, given by rank and repetition [s].

    Times of layers that these ranks measure are those of the slowest of them, so `measured` is the number of ranks.

    >>> spread([[1.0, 1.2, 1.0, 1.2], [2.0, 2.4, 2.0, 2.4]])
    Variation(devices=0.4714, kernels=0.0909, measured=2)
    """
    kept = [sorted(times)[: max(1, round(0.9 * len(times)))] for times in seconds]
    means = [sum(times) / len(times) for times in kept]
    kernels = max((pstdev(times) / mean for times, mean in zip(kept, means) if mean), default=0.0)
    mean = sum(means) / len(means)
    # Not `pstdev`: the ranks are a sample of all devices.
    devices = stdev(means) / mean if len(means) > 1 and mean else 0.0
    return Variation(round(min(devices, 1.0), 4), round(min(kernels, 1.0), 4), len(seconds))
