"""Measurements of a machine: its links and sums, and the rates of one device. All ranks measure at the same time."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...kernels import Geometry
from ...limits import memory_size
from ..machine import Efficiency, Link, Machine
from .cache import Crowd, device_name
from .messages import LARGE, SIZES, MessageTimer, Nodes, fit_copy
from .record import Fit, Profile, fit_line

if TYPE_CHECKING:
    from ...comm import Communicator

__all__ = ["group_sizes", "measure_machine"]

ROUNDS = 7
#: Number of rows of the square matrices whose product gives the peak rate.
MATRIX = 1024
#: Size of the arrays whose copy gives the memory bandwidth [B].
STREAM = 128 << 20
#: Positions per axis of the convolutions that show the decrease of the rate for small kernels.
EXTENTS = (4, 8, 16, 32, 64)
_CHANNELS = 64
#: Lower limit of the curve, as a fraction of the peak.
_LEAST = 0.05


@dataclass(frozen=True)
class DeviceRates:
    """Rates of one rank's device.

    Attributes
    ----------
    peak
        Dtype -> best rate of a matrix product [flop/s].
    bandwidth
        Bandwidth of a copy, counting bytes read and written [B/s].
    launch
        Time of the smallest kernel [s].
    efficiency
        Fractions of the peak that convolutions reach.
    """

    peak: dict[str, float]
    bandwidth: float
    launch: float
    efficiency: Efficiency


_COPIED = "not measured: copied from {}"


def measure_machine(comm: Communicator, kernels: Any, name: str = "here") -> Profile:
    """Measure links, collectives and device of this machine. Collective over `comm`.

    Levels without a pair of ranks use the numbers of the nearest level that has one; a note says so.

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
    places = nodes if nodes.has("node") else hosts
    clock = time.perf_counter if comm.waits_for_network else Crowd.of(comm, kernels).clock
    channel, face, strided, timer = {}, {}, {}, MessageTimer(comm, clock=clock)
    for level in ("node", "across"):
        if places.has(level):
            partner = places.partner(comm.rank, level)
            channel[level] = timer.channel(partner)
            face[level] = timer.face(partner, strided=False)
            strided[level] = timer.face(partner, strided=True)
    comm.barrier()
    copy = fit_copy(clock=clock)
    sums = _reductions(comm, clock)
    rates = measure_device(kernels, comm)
    machine = Machine(
        name=name,
        source=f"measured by halograd profile on {comm.size} ranks, {time.strftime('%Y-%m-%d')}",
        devices_per_node=places.fullest,
        nodes_per_switch=len(set(places.nodes)),
        peak_flops=rates.peak,
        memory_bandwidth=rates.bandwidth,
        memory=memory_size(hosts.fullest),
        launch=rates.launch,
        links=_links(copy, _measured_links(comm, face, channel, nodes.has("node"))),
        efficiency=rates.efficiency,
        device=f"{device_name(kernels)}; {kernels.name} {kernels.version}, {kernels.threads} thread(s)",
    )
    return comm.bcast(Profile(machine, comm.size, comm.transport, channel, face, strided, copy, **sums))


def _measured_links(
    comm: Communicator, face: Mapping[str, Fit], channel: Mapping[str, Fit], memory_shared: bool
) -> dict[str, Link]:
    """Return links that include packing; links of an emulated network exclude it, because the cost model adds it there.
    """
    found = {}
    for level, packed in face.items():
        if comm.network is None:
            found[level] = packed.link(f"{comm.transport}, with packing", comm.shares_memory and level == "node")
        elif level == "node" and memory_shared:
            found[level] = packed.link("shared, with packing", shared=True)
        else:
            found[level] = channel[level].link(comm.transport, emulated=True)
    return found


def _links(copy: Fit, found: Mapping[str, Link]) -> dict[str, Link]:
    """Return the links of all levels, from the measured ones."""
    links = {"device": copy.link("copy")}
    nearest = "device"
    for level in ("node", "switch", "across"):
        measured = "across" if level == "switch" else level
        if measured in found:
            links[level] = found[measured]
            nearest = level
        else:
            links[level] = Link(links[nearest].alpha, links[nearest].beta, _COPIED.format(nearest))
    return links


def group_sizes(ranks: int) -> list[int]:
    """Return the sizes of groups whose sums are measured: 2, 4, 8, ... and all ranks.

    >>> group_sizes(6)
    [2, 4, 6]
    """
    sizes = {1 << k for k in range(1, ranks.bit_length()) if 1 << k <= ranks}
    return sorted(sizes | ({ranks} if ranks > 1 else set()))


def _reductions(comm: Communicator, clock: Callable[[], float]) -> dict[str, Any]:
    """Measure sums over groups of ranks, all groups of a size at the same time; return the results of the first group.

    The times of a network lie on a line; those of memory deviate from it, and large sums dominate the fit.
    """
    sizes = SIZES if comm.waits_for_network else SIZES + LARGE
    found: dict[str, dict[int, Fit]] = {"reduction": {}, "reduction_behind": {}, "reduction_exposed": {}}
    for size in group_sizes(comm.size):
        whole = comm.rank < comm.size - comm.size % size
        group = comm.split(comm.rank // size if whole else None)
        fits = None
        if group is not None:
            timer = MessageTimer(group, sizes, clock=clock)
            waited = timer.reduction()
            fits = (waited, *timer.reduction_behind(waited))
            group.close()
        for by_size, fit in zip(found.values(), comm.bcast(fits)):
            by_size[size] = fit
    return found


# -- the device ------------------------------------------------------------------------------------


def measure_device(kernels: Any, comm: Communicator) -> DeviceRates:
    """Return the rates of the slowest rank while all ranks compute. Collective over `comm`.

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
    """Return the best of several rounds, each as slow as its slowest rank [s]."""
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
    """Fit the efficiency to convolutions of several sizes: ``t = launch + (flops + half) / (peak * compute)``."""
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
