"""A whole profile: the messages and the device first, then layer after layer, as far as the budget goes."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import astuple, dataclass
from typing import Any

from halograd.comm import Communicator
from halograd.perfmodel.layer_work import LayerKey, LayerWork
from halograd.perfmodel.machine import Link, Machine
from halograd.perfmodel.profile.cache import Conditions, TimeCache, device_name
from halograd.perfmodel.profile.crowd import Crowd
from halograd.perfmodel.profile.device import measure_device, memory_size
from halograd.perfmodel.profile.fit import Fit
from halograd.perfmodel.profile.layers import LayerTimer
from halograd.perfmodel.profile.messages import (
    LARGE,
    SIZES,
    Places,
    fit_channel,
    fit_copy,
    fit_face,
    fit_reduction,
    fit_reduction_behind,
)
from halograd.perfmodel.profile.record import Profile

__all__ = ["Measured", "group_sizes", "measure_layers", "measure_machine"]

_COPIED = "not measured: copied from {}"


def measure_machine(comm: Communicator, kernels: Any, name: str = "here") -> Profile:
    """Links, collectives and device of the machine that runs this. Collective over `comm`.

    Levels that have no pair of ranks take over the numbers of the nearest that has, and their note says so.

    Parameters
    ----------
    comm
        All ranks of the run, with the transport that runs will use.
    kernels
        Backend.
    name
        Of the machine.
    """
    hosts = Places(tuple(comm.allgather_objects(platform.node())))
    nodes = Places(tuple(map(str, comm.nodes)))
    # An emulated network between all ranks is taken for the link within their node.
    places = nodes if nodes.has("node") else hosts
    clock = time.perf_counter if comm.waits_for_network else Crowd.of(comm, kernels).clock
    channel, face, strided = {}, {}, {}
    for level in ("node", "across"):
        if places.has(level):
            partner = places.partner(comm.rank, level)
            channel[level] = fit_channel(comm, partner, clock=clock)
            face[level] = fit_face(comm, partner, strided=False, clock=clock)
            strided[level] = fit_face(comm, partner, strided=True, clock=clock)
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
        links=_links(copy, _measured_links(comm.transport, face, channel, nodes.has("node"))),
        efficiency=rates.efficiency,
        device=f"{device_name(kernels)}; {kernels.name} {kernels.version}, {kernels.threads} thread(s)",
    )
    return comm.bcast(Profile(machine, comm.size, comm.transport, channel, face, strided, copy, **sums))


def _measured_links(
    transport: str, face: Mapping[str, Fit], channel: Mapping[str, Fit], memory_shared: bool
) -> dict[str, Link]:
    """With packing; those of an emulated network without, which the cost model adds there."""
    found = {}
    for level, packed in face.items():
        if not transport.startswith("emulated"):
            found[level] = packed.link(f"{transport}, with packing")
        elif level == "node" and memory_shared:
            found[level] = packed.link("shared, with packing")
        else:
            found[level] = channel[level].link(transport)
    return found


def _links(copy: Fit, found: Mapping[str, Link]) -> dict[str, Link]:
    """All levels, from those that were measured."""
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
    """Groups whose sums are measured: 2, 4, 8, ... and all ranks.

    >>> group_sizes(6)
    [2, 4, 6]
    """
    sizes = {1 << k for k in range(1, ranks.bit_length()) if 1 << k <= ranks}
    return sorted(sizes | ({ranks} if ranks > 1 else set()))


def _reductions(comm: Communicator, clock: Callable[[], float]) -> dict[str, Any]:
    """Sums over groups of ranks, all groups of a size at the same time; what the first one found.

    A network's times lie on a line; those of memory do not quite, and large sums decide.
    """
    sizes = SIZES if comm.waits_for_network else SIZES + LARGE
    found: dict[str, dict[int, Fit]] = {"reduction": {}, "reduction_behind": {}, "reduction_exposed": {}}
    for size in group_sizes(comm.size):
        whole = comm.rank < comm.size - comm.size % size
        group = comm.split(comm.rank // size if whole else None)
        fits = None
        if group is not None:
            waited = fit_reduction(group, sizes, clock=clock)
            fits = (waited, *fit_reduction_behind(group, waited, sizes, clock=clock))
            group.close()
        for by_size, fit in zip(found.values(), comm.bcast(fits)):
            by_size[size] = fit
    return found


@dataclass
class Measured:
    """How far the measuring of layers came.

    Attributes
    ----------
    known, measured, left
        Keys that were in the cache before, that were measured now, and that the budget did not reach.
    seconds
        Spent [s].
    """

    known: int = 0
    measured: int = 0
    left: int = 0
    seconds: float = 0.0


def measure_layers(
    works: Mapping[LayerKey, LayerWork] | Iterable[LayerWork],
    timer: LayerTimer,
    cache: TimeCache,
    conditions: Conditions,
    budget: float | None = None,
    progress: Callable[[int, int], None] | None = None,
    again: bool = False,
) -> Measured:
    """Measure what the cache does not have. Collective over the ranks of `timer`; rank 0 reads and writes the cache.

    Parameters
    ----------
    works
        Layers on local blocks; the same on all ranks.
    timer
        Who measures.
    cache, conditions
        Where times go. What was measured is there even if the run is interrupted.
    budget
        Seconds after which no further layer is begun; none if None [s].
    progress
        Called on rank 0 with the keys done and all keys.
    again
        Measure what the cache has, too, and keep the mean.
    """
    comm, begin = timer.comm, time.perf_counter()
    todo = list(works.values() if isinstance(works, Mapping) else works)
    wanted = comm.bcast([again or cache.get(conditions, work.key.text()) is None for work in todo])
    state = Measured(known=wanted.count(False))
    try:
        for done, (work, missing) in enumerate(zip(todo, wanted)):
            _tell(progress, comm, done, len(todo))
            if not missing:
                continue
            if comm.bcast(budget is not None and time.perf_counter() - begin > budget):
                state.left += 1
                continue
            found = timer.measure(work)
            state.measured += 1
            if comm.rank == 0:
                _keep(cache, conditions, work.key.text(), astuple(found))
    finally:
        if comm.rank == 0:
            cache.flush()
    _tell(progress, comm, len(todo), len(todo))
    state.seconds = time.perf_counter() - begin
    return state


def _keep(cache: TimeCache, conditions: Conditions, key: str, found: tuple[float, ...]) -> None:
    """With what was measured before, the mean."""
    before = cache.get(conditions, key)
    cache.put(conditions, key, found if before is None else [(a + b) / 2 for a, b in zip(before, found)])


def _tell(progress: Callable[[int, int], None] | None, comm: Communicator, done: int, total: int) -> None:
    if progress is not None and comm.rank == 0:
        progress(done, total)
