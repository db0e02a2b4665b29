"""Times of exchanges and sums on a machine's links, for the ranks with the most communication.

A rank sends its messages one after the other, each in ``alpha + beta * n`` of its level, and receives meanwhile
(Dryden et al. 2019, Section V-A: ``2 SR + 2 SR + 4 SR``). Devices of a node share its link to other nodes, which
carries the messages of all of them. Times are computed for all ranks only if there are few; else for the nodes of the
first rank, of the last rank, and of the ranks in the middle of the grids, which have neighbors on all sides.

If the machine file describes a topology, messages within a node share its links, those to other nodes the bandwidth of
the node, and those to other switches that of a tapered tree, where all nodes of a switch are taken to send as much as
the node whose time is computed. Sums over several groups of ranks share the adapters of a node.

The emulated network (`comm/transports/emulated.py`) is simpler: messages travel independently of each other, and
every all-reduce takes the time of recursive doubling or of a ring, whichever is faster; between ranks of one node
nothing is delayed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ...comm.sums import METHODS
from ...comm.transport import Emulated
from ...dtensor import Blocks, Intervals
from ...program.traffic import MessagePattern, Move
from .. import collectives
from ..machine import LEVELS, Link, Machine

__all__ = ["ExchangeTimes", "NetworkModel", "Ranks", "middle_rank"]

#: Up to this number of ranks, all ranks are priced.
FEW = 8

Ranks = range | tuple[int, ...]


@dataclass(frozen=True)
class NodeSumTimes:
    """Times of the parts of a hierarchical sum [s] (`comm/transports/nodes.py`).

    Attributes
    ----------
    deposit, way_back
        Times to copy the buffer to the node's shared memory, and to copy the result back.
    addition
        Time in which a rank adds its share of the summands of its node.
    across
        Time of the all-reduce between the first ranks of the nodes.
    """

    deposit: float = 0.0
    addition: float = 0.0
    across: float = 0.0
    way_back: float = 0.0

    @property
    def seconds(self) -> float:
        """Time of all parts, one after the other."""
        return self.deposit + self.addition + self.across + self.way_back


class ExchangeTimes(NamedTuple):
    """Times of an exchange [s].

    Attributes
    ----------
    seconds
        Time until the last rank has received everything.
    packing
        Time to pack and unpack the messages, on the rank that packs most.
    busy
        The part of `seconds` in which a node's adapters are busy; 0 if the machine has no topology.
    peers
        Largest number of messages that one rank sends or, unless the model is `quick`, receives.
    """

    seconds: float
    packing: float
    busy: float = 0.0
    peers: int = 0


class _Load(NamedTuple):
    """Messages of some ranks, which are those of whole nodes in increasing order, on the links of a machine.

    Attributes
    ----------
    senders, units
        As in :class:`~halograd.program.traffic.MessagePattern`, per message.
    beta
        Inverse bandwidth of the link, per message [s/B].
    outside, beyond
        Whether a message leaves the node, and the switch.
    first
        Positions of the first ranks of the nodes.
    counts, units_by_rank
        Number of messages, and of their units, per rank.
    farthest
        Units of the largest message to another node; 0 if there is none.
    alphas
        Sum of the latencies of the messages of each rank [s].
    latest
        Per node, the largest sum of latencies of a rank's messages to other nodes [s].
    """

    senders: np.ndarray
    units: np.ndarray
    beta: np.ndarray
    outside: np.ndarray
    beyond: np.ndarray
    first: np.ndarray
    counts: np.ndarray
    units_by_rank: np.ndarray
    farthest: int
    alphas: np.ndarray
    latest: np.ndarray


class _Loads(NamedTuple):
    """Messages of an exchange, in one or in both directions.

    Attributes
    ----------
    ways
        The messages of each direction.
    farthest
        Units of the largest message to another node; 0 if there is none.
    peers
        Largest number of messages of a rank in one direction.
    packed_units, packed_messages
        Units, and messages, that the busiest rank packs and unpacks.
    """

    ways: list[_Load]
    farthest: int
    peers: int
    packed_units: float
    packed_messages: float


class NetworkModel:
    """Times of communication on a machine. Local; caches its results.

    Parameters
    ----------
    machine
        Machine with the links.
    quick
        Whether to compute the times of one direction of an exchange, and of many ranks for the node in the middle only
        (for the many candidates of a plan).
    """

    def __init__(self, machine: Machine, quick: bool = False) -> None:
        self.machine, self.quick = machine, quick
        self._exchanges: dict[Move, ExchangeTimes] = {}
        self._loads: dict[tuple[object, ...], _Loads] = {}
        self._sums: dict[tuple[str, float, Ranks, int], tuple[float, float]] = {}
        # In the order of the numbers that `levels` returns.
        links = [machine.links[level] for level in LEVELS[1:]]
        self._alpha = np.array([link.alpha for link in links])
        self._beta = np.array([link.beta for link in links])

    @cached_property
    def emulated(self) -> bool:
        """Whether this is the emulated network: no contention, and fewer algorithms."""
        return self.machine.has_emulated_links

    @cached_property
    def per_node(self) -> int:
        """Number of ranks that share memory; 1 if even the links of a node are emulated."""
        return 1 if self.machine.links["node"].emulated else self.machine.devices_per_node

    @cached_property
    def waits_for_network(self) -> bool:
        """Value of `Communicator.waits_for_network` on the machine: whether computation can overlap with messages."""
        return self.emulated or not self.machine.links["node"].shared

    @property
    def packed(self) -> bool:
        """Whether times of links include packing and unpacking; those of the emulated network do not."""
        return self.machine.runtime.packed and not self.emulated

    def copy(self, nbytes: float) -> float:
        """Return the time to pack or unpack `nbytes` [B], which reads and writes them once [s]."""
        return 2 * nbytes / (self.machine.memory_bandwidth * self.machine.efficiency.memory)

    def update(self, nbytes: float, slots: int) -> float:
        """Return the time of the optimizer's update of `nbytes` [B] of parameters with `slots` state arrays [s].

        The update reads the gradient, the parameters and the state, and writes the last two.
        """
        arrays = 3 + 2 * slots
        measured = self.machine.runtime.update
        # SGD with momentum, which was measured, passes over 5 arrays, and a copy over 2.
        return nbytes * measured * arrays / 5 if measured else self.copy(nbytes) * arrays / 2 + self.machine.launch

    def sum(self, nbytes: float, ranks: Ranks, groups: int = 1) -> float:
        """Return the time of an all-reduce of `nbytes` [B] over a group of ranks [s]; `groups` as in `collective`."""
        return self.collective("allreduce", nbytes, ranks, groups)

    def collective(self, kind: str, nbytes: float, ranks: Ranks, groups: int = 1) -> float:
        """Return the time of an ``"allreduce"``, ``"reduce_scatter"`` or ``"all_gather"`` over a group of ranks [s].

        `nbytes` [B] is the size of the buffer, of all shards together; `groups` is the number of groups of a node that
        communicate at the same time.
        """
        if len(ranks) < 2 or not nbytes:
            return 0.0
        return self._collective(kind, nbytes, ranks, groups)[0]

    def busy(self, kind: str, nbytes: float, ranks: Ranks, groups: int = 1) -> float:
        """Return the part of a collective's time in which the adapters of a node are busy [s].

        It is 0 if the machine has no topology.
        """
        if len(ranks) < 2 or not nbytes or self.machine.topology is None:
            return 0.0
        return self._collective(kind, nbytes, ranks, groups)[1]

    def _collective(self, kind: str, nbytes: float, ranks: Ranks, groups: int) -> tuple[float, float]:
        key = (kind, nbytes, ranks, groups)
        if key not in self._sums:
            self._sums[key] = self._collective_seconds(kind, nbytes, ranks, groups)
        return self._sums[key]

    def groups_at_once(self, groups: Iterable[tuple[Ranks, float]], members: Ranks) -> int:
        """Return how many of `groups` (ranks, and bytes to sum [B]) have ranks on the node of the first of `members`.

        Without a topology it is 1, because sums of several groups do not slow each other down; so it is on the emulated
        network.
        """
        width = self.machine.devices_per_node
        if self.machine.topology is None or self.emulated or width == 1:
            return 1
        node = members[0] // width
        here = (any(rank // width == node for rank in group) for group, size in groups if len(group) > 1 and size)
        return max(1, sum(here))

    def _collective_seconds(self, kind: str, nbytes: float, ranks: Ranks, groups: int = 1) -> tuple[float, float]:
        """Return the time of a collective, and the part of it in which the adapters of a node are busy [s]."""
        part = 1.0 if kind == "allreduce" else 0.5  # an all-reduce is measured as a whole
        far = self.emulated and len(self._nodes(ranks)) > 1
        # On the emulated network a reduce-scatter or all-gather takes half of a ring, whatever an all-reduce takes.
        measured = self.machine.runtime.sums.get(len(ranks))
        if measured is not None and self._together(ranks) and not (far and part < 1):
            short = self.machine.runtime.short_sums.get(len(ranks), measured)
            return part * min(measured.seconds(nbytes), short.seconds(nbytes)), 0.0
        if self.emulated:
            link = self.machine.links["across"]
            return Emulated(link.alpha, link.beta).collective(METHODS[kind], len(ranks), int(nbytes)) * far, 0.0
        stages = self.machine.stages(ranks, groups)
        nodes = math.prod(stage.size for stage in stages if stage.level != "node")
        if self.machine.collectives:
            library = collectives.library_seconds(
                kind, nbytes, len(ranks), nodes, self.machine.collectives.values(), groups
            )
            if library is not None:
                return library[0], library[1] if nodes > 1 else 0.0
        seconds = collectives.group_seconds(kind, nbytes, stages)
        if self.machine.topology is None or nodes == 1:
            return seconds, 0.0
        # Without latencies, and with free links within the node, only the time of the adapters is left.
        network_model = [s._replace(link=Link(0.0, 0.0 if s.level == "node" else s.link.beta)) for s in stages]
        return seconds, min(seconds, collectives.group_seconds(kind, nbytes, network_model))

    def sum_work(self, nbytes: float, ranks: Ranks) -> float:
        """Return the part of a sum that is done during the wait for it, and does not overlap with computation [s]."""
        measured = self.machine.runtime.work.get(len(ranks))
        if len(ranks) < 2 or not nbytes or measured is None or not self._together(ranks):
            return 0.0
        return measured.seconds(nbytes)

    def sum_by_nodes(self, nbytes: float, ranks: Ranks) -> NodeSumTimes:
        """Return the times of a hierarchical all-reduce of `nbytes` [B]: within nodes, and between nodes [s].

        A copy takes the time of the device's memory, or of the link within a node if this is slower, because gradients
        are copied to the host.
        """
        if len(ranks) < 2 or not nbytes:
            return NodeSumTimes()
        nodes = self._nodes(ranks)
        here, leaders = max(map(len, nodes.values())), tuple(members[0] for members in nodes.values())
        link = self.machine.links["node"]
        copy = self.copy(nbytes)
        if not link.emulated:
            copy = max(copy, link.seconds(nbytes))
        # Of its share (1 / here), a rank reads `here` summands and writes the sum; a copy passes over two buffers.
        addition = copy * (here + 1) / (2 * here) if here > 1 else 0.0
        across = self._collective_seconds("allreduce", nbytes, leaders)[0] if len(leaders) > 1 else 0.0
        return NodeSumTimes(copy, addition, across, copy)

    def _nodes(self, ranks: Ranks) -> Mapping[int, list[int]]:
        nodes: dict[int, list[int]] = {}
        for rank in ranks:
            nodes.setdefault(rank // self.per_node, []).append(rank)
        return nodes

    def _together(self, ranks: Ranks) -> bool:
        """Return whether times measured with ``len(ranks)`` ranks, on one node if possible, are valid for `ranks`."""
        if self.emulated:  # independent of the links that cross the network
            return len(ranks) > self.per_node or len(self._nodes(ranks)) == 1
        return self.machine.span(ranks) in ("device", "node")

    def exchange(self, move: Move) -> ExchangeTimes:
        """Return the times of an exchange; packing has one kernel per message."""
        times = self._exchanges.get(move)
        if times is None:
            times = self._exchanges[move] = self._exchange(move)
            if not self.quick:  # both directions are priced
                self._exchanges[move.adjoint] = times
        return times

    def _exchange(self, move: Move) -> ExchangeTimes:
        if move.source == move.target:
            return ExchangeTimes(0.0, 0.0)
        # In most exchanges receivers have as much work as senders.
        ways = [move] if self.quick else [move, move.adjoint]
        ranks = self._ranks(move)
        sent = [way.pattern(ranks) for way in ways]
        unit, key = sent[0][0], (*(pattern for _, pattern in sent), ranks)
        # Arrays of other dtypes have the same loads: only `unit` differs.
        if key not in self._loads:
            # Messages are packed and unpacked: those of both directions, or of one counted twice.
            loads = [self._new_load(pattern, np.array(ranks)) for _, pattern in sent]
            self._loads[key] = _Loads(
                loads,
                max(load.farthest for load in loads),
                max(int(load.counts.max()) for load in loads),
                2 * float(np.add.reduce([load.units_by_rank for load in loads]).max()) / len(loads),
                2 * float(np.add.reduce([load.counts for load in loads]).max()) / len(loads),
            )
        together, busy = self._loads[key], 0.0
        if self.emulated:  # all messages to other nodes travel at the same time
            farthest = together.farthest * unit
            seconds = self.machine.links["across"].seconds(farthest) if farthest else 0.0
        else:
            seconds, busy = max(self._nodewise(load, unit) for load in together.ways)
        packing = 0.0
        if not self.packed:
            packing = self.copy(together.packed_units * unit) + self.machine.launch * together.packed_messages
        return ExchangeTimes(seconds, packing, busy if self.machine.topology else 0.0, together.peers)

    def _new_load(self, pattern: MessagePattern, ranks: np.ndarray) -> _Load:
        senders, peers, units, count = pattern.senders, pattern.peers, pattern.units, len(ranks)
        levels = self.levels(ranks[senders], peers)
        outside, first = levels > 0, np.flatnonzero(ranks % self.machine.devices_per_node == 0)
        # By `per_node`: ranks of one node may have emulated links between them.
        far = units[peers // self.per_node != ranks[senders] // self.per_node]
        alpha = self._alpha[levels]
        return _Load(
            senders,
            units,
            self._beta[levels],
            outside,
            levels > 1,
            first,
            np.bincount(senders, minlength=count),
            np.bincount(senders, units, count),
            int(far.max(initial=0)),
            np.bincount(senders, alpha, count),
            np.maximum.reduceat(np.bincount(senders, alpha * outside, count), first),
        )

    def _ranks(self, move: Move) -> tuple[int, ...]:
        ranks = max(move.source.placed, move.target.placed)
        if ranks <= max(FEW, self.machine.devices_per_node):
            return tuple(range(ranks))
        sample = (
            {middle_rank(move.source)}
            if self.quick
            else {0, ranks - 1, middle_rank(move.source), middle_rank(move.target)}
        )
        # Whole nodes: the messages of all devices of a node share its links.
        width = self.machine.devices_per_node
        nodes = {rank // width for rank in sample}
        return tuple(rank for node in sorted(nodes) for rank in range(node * width, min(ranks, (node + 1) * width)))

    def _nodewise(self, load: _Load, unit: int) -> tuple[float, float]:
        """Return the time of the slowest rank, and the time in which the adapters of a node are busy [s].

        All ranks of a node send to other nodes through its adapters. `unit` is the size of one of the load's units [B].
        """
        topology, nbytes = self.machine.topology, load.units * unit
        beta = load.beta * nbytes

        def by_rank(weights: np.ndarray) -> np.ndarray:
            return np.bincount(load.senders, weights, len(load.counts))

        def by_node(weights: np.ndarray) -> np.ndarray:
            return np.add.reduceat(by_rank(weights * load.outside), load.first)

        totals = by_rank(beta)
        shared = by_node(beta) / (1 if topology is None else self.machine.rails)
        slowest = float((load.alphas + totals).max())
        if topology is not None:
            shared = by_node(nbytes) / topology.network if topology.network else shared
            if topology.uplink:
                shared = np.maximum(shared, by_node(nbytes * load.beyond) / topology.uplink)
            if topology.node_links:
                inside = np.split(by_rank(beta * ~load.outside), load.first[1:])
                # The links carry a node's messages rank by rank, so a rank also waits for those before it.
                before = np.concatenate([traffic.cumsum() for traffic in inside])
                slowest = max(slowest, float((load.alphas + before / topology.node_links).max()))
        # The bytes of a node's ranks share the adapters; only the latencies of one and the same rank add up.
        beyond = shared + load.latest
        return max(slowest, float(beyond.max())), float(shared.max())

    def levels(self, ranks: np.ndarray, peers: np.ndarray) -> np.ndarray:
        """Return the level of the link of each pair of ranks: 0 within the node, 1 within the switch, 2 across."""
        width = self.machine.devices_per_node
        wide = width * self.machine.nodes_per_switch
        return (peers // width != ranks // width).astype(np.int64) + (peers // wide != ranks // wide)


def middle_rank(blocks: Blocks) -> int:
    """Return a rank in the middle of a grid, where ranks have most neighbors; if parts are unequal, with a largest one.
    """
    rank = 0
    for axis in blocks.axes:
        rank = rank * len(axis) + _middle_part(axis)
    return min(rank, math.prod(blocks.grid) - 1)


@lru_cache(maxsize=16384)
def _middle_part(axis: Intervals) -> int:
    """Return the index of the part in the middle; with unequal parts, of the largest part nearest to the middle."""
    extents = [max(0, stop - start) for start, stop in axis]
    middle, longest = len(extents) // 2, max(extents)
    # Extents of equal shares differ by 1 at most.
    if extents[middle] + 1 >= longest:
        return middle
    return min((i for i, extent in enumerate(extents) if extent == longest), key=lambda part: abs(part - middle))
