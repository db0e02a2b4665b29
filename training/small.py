"""Cuts of small layers of a run, for ``strategy.small = "auto"``: their choice, their description, and their plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from halograd.errors import UserError

from ..comm.transport import TRANSPORTS
from ..kernels import BACKENDS
from ..layers import Network, Strategy
from ..layers.strategy import cuts_text
from ..perfmodel.cost import Training
from ..perfmodel.machine import Machine
from ..perfmodel.plans import Plan, Request
from ..perfmodel.small import MACHINE, SmallLayers, suit_small_layers
from .build import state_slots, with_reduction
from .root import on_root

if TYPE_CHECKING:
    from ..comm import Communicator
    from .config import Config

__all__ = ["describe", "plan_of", "suited"]

#: Number of layers that a line names for each cut.
NAMED = 3


def suited(config: Config, comm: Communicator, network: Network, strategy: Strategy) -> SmallLayers | None:
    """Return the strategy with other cuts of small layers, which rank 0 chooses; None if no cut changes. Collective.

    No cut changes on one rank, on devices, if no spatial axis is cut, with a strategy from a file, with
    ``small = "keep"``, if a layer of the user has no known cost, or if no other cut is predicted to be faster.

    Raises
    ------
    UserError
        If the strategy does not fit the network.
    """
    table = config.strategy
    space = (table.depth, table.height, table.width)
    if table.small == "keep" or table.file is not None or comm.size == 1 or all(cut == 1 for cut in space):
        return None
    # The assumed machine is a processor, and devices have other rates.
    if BACKENDS[config.backend.kernels].on_device:
        return None
    machine = _machine(config, comm)
    reduced = with_reduction(strategy, config)
    # Here, because `_changed` suppresses a UserError.
    reduced.validate(network, comm.size)
    reduced.refuse_empty_blocks(network)
    arguments = reduced, config.training.at_once, comm.size, machine, _training(config)
    small: SmallLayers | None = on_root(comm.mpi, partial(_changed, network, *arguments))
    return small


def _changed(network: Network, *arguments: Any) -> SmallLayers | None:
    try:
        small = suit_small_layers(network, *arguments)
    except UserError:  # a layer of the user can run under this cut, but cannot be priced
        return None
    return small if small.layers else None


def _training(config: Config) -> Training:
    accumulates, clips = config.training.accumulate > 1, config.training.clip_norm is not None
    return Training(config.training.dtype, state_slots(config), False, accumulates, clips, config.data.prefetch + 1)


def _machine(config: Config, comm: Communicator) -> Machine:
    """Return the assumed machine, with the nodes of the ranks, and the rates of a rank's threads. Collective."""
    transport, threads = TRANSPORTS.make(config.backend.transport), config.backend.threads
    # The largest number of ranks on one node.
    most, assumed = max(Counter(comm.nodes).values()), Machine.load(MACHINE)
    # The assumed rates are those of one core.
    peaks = {dtype: threads * peak for dtype, peak in assumed.peak_flops.items()}
    machine = replace(assumed, peak_flops=peaks, memory_bandwidth=threads * assumed.memory_bandwidth)
    if transport.network is not None:
        return machine.emulated(transport.network.alpha, transport.network.beta, node=transport.network.node)
    # Without shared memory, ranks of one node exchange messages as ranks of different nodes do.
    return replace(machine, devices_per_node=most if transport.shares else 1)


def plan_of(config: Config, network: Network, small: SmallLayers) -> Plan:
    """Return the choice as a plan, which `halograd explain` explains. Local."""
    p, machine = small.prediction, small.machine
    request = Request(
        config.model.source,
        dict(config.model.options),
        machine.to_toml(),
        machine.name,
        f"roofline of {machine.name}",
        slots=state_slots(config),
    )
    return Plan(
        network.name,
        tuple(network.layers),
        p.batch,
        p.ranks,
        p.dtype,
        machine.name,
        "small",
        small.strategy,
        p,
        request=request,
    )


def describe(network: Network, small: SmallLayers) -> str:
    """Return one line on the layers with other cuts, and the predicted gain. Local."""
    by_cut: dict[str, list[str]] = {}
    for name in small.layers:
        by_cut.setdefault(cuts_text(small.strategy.cuts_of(name)), []).append(name)
    texts = []
    for cut, names in by_cut.items():
        more = f", and {len(names) - NAMED} more" if len(names) > NAMED else ""
        texts.append(f"{cut}: {', '.join(names[:NAMED])}{more}")
    gain = 1 - small.prediction.step_seconds / small.given_seconds
    return (
        f"small layers: {len(small.layers)} of {len(network.layers)} are cut otherwise ({'; '.join(texts)}), for a "
        f'predicted step that is {gain:.0%} shorter; strategy.small = "keep" cuts all in the same way'
    )
