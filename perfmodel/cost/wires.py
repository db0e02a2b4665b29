"""What exchanges and sums take on a machine's links, seen from the ranks that have most to do.

A rank sends its messages one after the other, each ``alpha + beta * n`` of its level, and receives at the same time
(Dryden et al. 2019, Section V-A: ``2 SR + 2 SR + 4 SR``). Devices of a node share its link to others: what all of them
send across takes the node's link together. Only some nodes are looked at: those of the first rank, of the last and
of the ones in the middle of the grids, which have neighbors on all sides; all ranks where there are few.

The emulated network (`comm/transports/emulated.py`) is simpler: messages travel independently of each other, and
every sum takes the time of a ring over its ranks; between ranks of one node nothing is delayed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np

from ...dtensor import Blocks, Intervals
from ...program.traffic import Move
from .. import collectives
from ..machine import Machine
from ..machine_parts import LEVELS

__all__ = ["Ranks", "Wires", "middle_rank"]

#: With at most so many ranks all are looked at.
FEW = 8

Ranks = range | tuple[int, ...]


@dataclass(frozen=True)
class NodeSumTimes:
    """What a sum by nodes takes, part by part [s] (`comm/transports/nodes.py`).

    Attributes
    ----------
    deposit, way_back
        Copies of the buffer to the memory that the node shares, and of the result to the buffer.
    addition
        Of a rank's share of the summands of its node.
    across
        Between the first ranks of the nodes.
    """

    deposit: float = 0.0
    addition: float = 0.0
    across: float = 0.0
    way_back: float = 0.0

    @property
    def seconds(self) -> float:
        """All parts, one after the other."""
        return self.deposit + self.addition + self.across + self.way_back


class _Way(NamedTuple):
    """From a rank to some others, whatever the size of messages.

    Attributes
    ----------
    alpha, outside_alpha
        Sum over all of them, and over those on other nodes [s].
    betas
        Per rank [s/B].
    outside
        Which of them are on other nodes; None: no rank is.
    """

    alpha: float
    betas: np.ndarray
    outside: np.ndarray | None
    outside_alpha: float


class Wires:
    """Times of communication on a machine. Local; remembers what it was asked.

    Parameters
    ----------
    machine
        Whose links.
    quick
        Look at the node in the middle only (for the many candidates of a plan).
    """

    def __init__(self, machine: Machine, quick: bool = False) -> None:
        self.machine, self.quick = machine, quick
        self._exchanges: dict[Move, tuple[float, float]] = {}
        self._ways: dict[tuple[int, bytes], _Way] = {}
        self._sums: dict[tuple[str, float, Ranks], float] = {}
        links = [machine.links[level] for level in LEVELS[1:]]
        self._alpha = np.array([link.alpha for link in links])
        self._beta = np.array([link.beta for link in links])

    @cached_property
    def emulated(self) -> bool:
        """Whether this is the emulated network: no contention, rings only."""
        return self.machine.has_emulated_links

    @cached_property
    def per_node(self) -> int:
        """Ranks that share memory; one where even the links of a node are emulated."""
        return 1 if self.machine.links["node"].emulated else self.machine.devices_per_node

    @cached_property
    def waits_for_network(self) -> bool:
        """What `Communicator.waits_for_network` says there: whether there is time to compute meanwhile."""
        return self.emulated or not self.machine.links["node"].shared

    @property
    def packed(self) -> bool:
        """Whether packing and unpacking are in the times of links; they are not in those of the emulated network."""
        return self.machine.runtime.packed and not self.emulated

    def copy(self, nbytes: float) -> float:
        """Return the packing or unpacking of `nbytes` [B]: read and written once [s]."""
        return 2 * nbytes / (self.machine.memory_bandwidth * self.machine.efficiency.memory)

    def update(self, nbytes: float, slots: int) -> float:
        """Return the optimizer on `nbytes` [B] of parameters with so many arrays of its own [s].

        It reads gradient, parameter and its own arrays, and writes the last two.
        """
        arrays = 3 + 2 * slots
        measured = self.machine.runtime.update
        return nbytes * measured * arrays / 5 if measured else self.copy(nbytes) * arrays / 2 + self.machine.launch

    def sum(self, nbytes: float, ranks: Ranks) -> float:
        """Return an all-reduce of `nbytes` [B] over a group of ranks [s]."""
        return self._collective("allreduce", nbytes, ranks)

    def scatter(self, nbytes: float, ranks: Ranks) -> float:
        """Return a reduce-scatter of a buffer of `nbytes` [B] [s]."""
        return self._collective("reduce_scatter", nbytes, ranks)

    def gather(self, nbytes: float, ranks: Ranks) -> float:
        """Return an all-gather; `nbytes` [B] are those of all shards together [s]."""
        return self._collective("all_gather", nbytes, ranks)

    def _collective(self, kind: str, nbytes: float, ranks: Ranks) -> float:
        if len(ranks) < 2 or not nbytes:
            return 0.0
        key = (kind, nbytes, ranks)
        if key not in self._sums:
            self._sums[key] = self._collective_seconds(kind, nbytes, ranks)
        return self._sums[key]

    def _collective_seconds(self, kind: str, nbytes: float, ranks: Ranks) -> float:
        part = 1.0 if kind == "allreduce" else 0.5  # the halves of an all-reduce are measured with it only
        measured = self.machine.runtime.sums.get(len(ranks))
        if measured is not None and self._together(ranks):
            return part * measured.seconds(nbytes)
        if self.emulated:
            if len(self._nodes(ranks)) == 1:
                return 0.0
            link = self.machine.links["across"]
            return part * collectives.seconds("allreduce", nbytes, len(ranks), link, "ring")
        return collectives.group_seconds(kind, nbytes, self.machine.stages(ranks))

    def sum_work(self, nbytes: float, ranks: Ranks) -> float:
        """Return the part of a sum that is done where it is waited for, not behind computation [s]."""
        measured = self.machine.runtime.work.get(len(ranks))
        if len(ranks) < 2 or not nbytes or measured is None or not self._together(ranks):
            return 0.0
        return measured.seconds(nbytes)

    def sum_by_nodes(self, nbytes: float, ranks: Ranks) -> NodeSumTimes:
        """Return an all-reduce of `nbytes` [B] in the memory of each node, then by one rank of each [s].

        Copies are those of the device, or of the links within a node where these are slower (they bring gradients to
        the host).
        """
        if len(ranks) < 2 or not nbytes:
            return NodeSumTimes()
        nodes = self._nodes(ranks)
        here, leaders = max(map(len, nodes.values())), tuple(some[0] for some in nodes.values())
        link = self.machine.links["node"]
        copy = self.copy(nbytes)
        if not link.emulated:
            copy = max(copy, link.seconds(nbytes))
        addition = copy * (here + 1) / (2 * here) if here > 1 else 0.0
        across = self._collective_seconds("allreduce", nbytes, leaders) if len(leaders) > 1 else 0.0
        return NodeSumTimes(copy, addition, across, copy)

    def _nodes(self, ranks: Ranks) -> Mapping[int, list[int]]:
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(rank // self.per_node, []).append(rank)
        return found

    def _together(self, ranks: Ranks) -> bool:
        """Return whether a group is like the one of its size that was measured: the first ranks, on one node if they
        fit.
        """
        if self.emulated:  # the time of a ring, whichever of its links cross the network
            return len(ranks) > self.per_node or len(self._nodes(ranks)) == 1
        return self.machine.span(ranks) in ("device", "node")

    def exchange(self, move: Move) -> tuple[float, float]:
        """Return the times of an exchange from its start until the last rank has everything, and of packing [s].

        Packing is into its messages and out of them, a kernel each, on the rank that has most to do.
        """
        found = self._exchanges.get(move)
        if found is None:
            found = self._exchanges[move] = self._exchange(move)
            if not self.quick:  # both ways are looked at
                self._exchanges[move.adjoint] = found
        return found

    def _exchange(self, move: Move) -> tuple[float, float]:
        if move.source == move.target:
            return 0.0, 0.0
        # Most exchanges are as much work for who receives as for who sends.
        ways = [move] if self.quick else [move, move.adjoint]
        ranks = self._ranks(move)
        sent = [{rank: way.peers(rank) for rank in ranks} for way in ways]
        if self.emulated:
            seconds = max(self._farthest(*others, rank) for some in sent for rank, others in some.items())
        else:
            seconds = max(self._nodewise(some) for some in sent)
        messages = [sum(len(some[rank][0]) for some in sent) * 2 / len(sent) for rank in ranks]
        nbytes = [sum(int(some[rank][1].sum()) for some in sent) * 2 / len(sent) for rank in ranks]
        if self.packed:
            return seconds, 0.0
        return seconds, self.copy(max(nbytes)) + self.machine.launch * max(messages)

    def _ranks(self, move: Move) -> list[int]:
        ranks = max(move.source.placed, move.target.placed)
        if ranks <= max(FEW, self.machine.devices_per_node):
            return list(range(ranks))
        some = (
            {middle_rank(move.source)}
            if self.quick
            else {0, ranks - 1, middle_rank(move.source), middle_rank(move.target)}
        )
        width = self.machine.devices_per_node
        nodes = {rank // width for rank in some}
        return [rank for node in sorted(nodes) for rank in range(node * width, min(ranks, (node + 1) * width))]

    def _farthest(self, peers: np.ndarray, nbytes: np.ndarray, rank: int) -> float:
        """Return the largest of messages that travel at the same time to other nodes."""
        far = nbytes[peers // self.per_node != rank // self.per_node]
        return self.machine.links["across"].seconds(int(far.max())) if len(far) else 0.0

    def _nodewise(self, sent: Mapping[int, tuple[np.ndarray, np.ndarray]]) -> float:
        """Return the slowest rank, with what its node sends to others through one link."""
        slowest, node, beyond, alphas = 0.0, -1, 0.0, 0.0
        for rank, (peers, nbytes) in sent.items():
            if rank // self.machine.devices_per_node != node:
                node, beyond, alphas = rank // self.machine.devices_per_node, 0.0, 0.0
            if not len(peers):
                continue
            way = self._way(rank, peers)
            beta = way.betas * nbytes
            if way.outside is not None:
                beyond += float(np.add.reduce(beta[way.outside]))
                alphas = max(alphas, way.outside_alpha)
            slowest = max(slowest, way.alpha + float(np.add.reduce(beta)), beyond + alphas)
        return slowest

    def _way(self, rank: int, peers: np.ndarray) -> _Way:
        key = rank, peers.tobytes()
        if key not in self._ways:
            levels = self.levels(rank, peers)
            alpha, outside = self._alpha[levels], levels > 0
            beyond = outside if outside.any() else None
            self._ways[key] = _Way(float(alpha.sum()), self._beta[levels], beyond, float(alpha[outside].sum()))
        return self._ways[key]

    def levels(self, rank: int, peers: np.ndarray) -> np.ndarray:
        """Return the level of the link to each of the other ranks: 0 within the node, 1 within the switch, 2 across."""
        width = self.machine.devices_per_node
        wide = width * self.machine.nodes_per_switch
        return (peers // width != rank // width).astype(np.int64) + (peers // wide != rank // wide)


def middle_rank(blocks: Blocks) -> int:
    """Return the rank in the middle of a grid, with neighbors on all sides; where shares differ, one that has the most.
    """
    rank = 0
    for axis in blocks.axes:
        rank = rank * len(axis) + _middle_part(axis)
    return min(rank, math.prod(blocks.grid) - 1)


@lru_cache(maxsize=16384)
def _middle_part(axis: Intervals) -> int:
    """Return the part in the middle; that of the longest nearest to it where shares differ."""
    extents = [max(0, stop - start) for start, stop in axis]
    middle, longest = len(extents) // 2, max(extents)
    if extents[middle] + 1 >= longest:
        return middle
    return min((i for i, extent in enumerate(extents) if extent == longest), key=lambda part: abs(part - middle))
