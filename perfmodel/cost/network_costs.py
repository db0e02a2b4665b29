"""The planners' problem for a network: costs of all candidates of all layers, and of all redistributions between them.

The costs of layers with the same settings and shapes are computed once; tables of edges are made once per shape and
pair of lists of candidates.

The problem is a sum over layers and pairs of layers, which requires approximations that `simulate` does not make:

* Sums of gradients overlap with computation, so the time that they add is not a sum over layers. The cost of a layer
  contains `exposed` times its share of a bucket. :func:`halograd.perfmodel.predict.plan_network` solves the problem for
  several values (0: all sums hidden, 1: none, as `t_s` of Jia et al. 2018), and `simulate` decides.
* A value that two layers read under the same cut, different from its own, is redistributed once, but counted twice.
* A halo that two layers share is counted for both.
* The time of a redistribution is that of a few representative ranks (see :class:`NetworkModel`): their bytes and
  messages are exact; all devices of a node are assumed to send as much through its link.
* Memory is that of permanent arrays: parameters, gradients and optimizer state, activations, halo copies. Arrays that
  the arena holds for part of the backward pass (`transient`) are not additive; `plan_network` checks them with
  `memory_of`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...device import as_dtype
from ...dtensor import Layout
from ...layers import Input, Network, Node, Strategy
from ...layers.parameter import blocks_of
from ...layers.strategy import AXES, layout_of
from ...lowering.views import Value
from ...program.compiler import Alone, compile_program
from ...program.program import Step, Target
from ..cuts import Parts, candidates, grids, shared_candidates
from ..kernel_times import LayerWork, Recorded, RooflineTimes
from ..machine import Machine
from ..planners import Problem
from .network_model import NetworkModel, Ranks, middle_rank
from .pricing import Pricing
from .simulate import Training
from .steps import faster
from .timeline import price_layer

__all__ = [
    "Grids",
    "NetworkCosts",
    "edge_seconds",
    "mean_costs",
    "network_costs",
    "redistributed_bytes",
    "varied_costs",
    "works_of",
]

Ints = NDArray[np.int64]
#: Cuts that are candidates of every layer, or all candidates by layer.
Extra = Sequence[Parts] | Mapping[str, tuple[Parts, ...]]


@dataclass(frozen=True)
class Grids:
    """The cuts of an array under a list of candidates.

    Attributes
    ----------
    shape
        Global extent of each axis.
    parts
        Number of parts, ``[candidates, axes]``.
    """

    shape: tuple[int, ...]
    parts: Ints

    @staticmethod
    @lru_cache(maxsize=64)
    def of(shape: tuple[int, ...], candidates: tuple[Parts, ...]) -> Grids:
        grids = [layout_of(shape, dict(zip(AXES, parts)), math.prod(parts)).boxes.grid for parts in candidates]
        return Grids(shape, np.array(grids, np.int64))

    def boxes(self, rank: int) -> tuple[Ints, Ints]:
        """Return starts and stops of a rank's box, ``[candidates, axes]``; a rank without a part has an empty box."""
        left = np.full(len(self.parts), rank, np.int64)
        at = np.empty_like(self.parts)
        # The last axis varies fastest in the order of the ranks.
        for axis in range(self.parts.shape[1] - 1, -1, -1):
            left, at[:, axis] = np.divmod(left, self.parts[:, axis])
        sizes = np.array(self.shape, np.int64)
        # The first `more` parts of an axis have base + 1 elements, the others `base`.
        base, more = np.divmod(sizes, self.parts)
        start = at * base + np.minimum(at, more)
        stop = start + base + (at < more)
        # Ranks beyond the last part hold nothing.
        stop[left > 0] = start[left > 0]
        return start, stop

    def count(self, start: Ints, stop: Ints) -> Ints:
        """Return the number of ranks of each cut whose blocks overlap boxes ``[u, axes]``: ``[u, candidates]``."""
        count = np.repeat((stop > start).all(axis=1, keepdims=True).astype(np.int64), len(self.parts), axis=1)
        for axis, (size, (cuts, which)) in enumerate(zip(self.shape, self._cuts)):
            base, more = np.divmod(size, cuts)
            # A box overlaps all blocks from that of its first to that of its last element.
            first, last = (_block(position[:, axis, None], base, more) for position in (start, stop - 1))
            count *= (last - first + 1)[:, which]
        return count

    @cached_property
    def _cuts(self) -> list[tuple[Ints, Ints]]:
        """Per axis, the distinct numbers of parts, and the index of each candidate's number."""
        return [np.unique(column, return_inverse=True) for column in self.parts.T]

    @property
    def fullest(self) -> Ints:
        """Number of elements of the largest box under each candidate, ``[candidates]``."""
        return (-(-np.array(self.shape, np.int64) // self.parts)).prod(axis=1)


def _block(position: Ints, base: Ints, more: Ints) -> Ints:
    """Return the index of the block that contains a position: the first `more` blocks have ``base + 1`` elements, the
    others `base`.
    """
    large = more * (base + 1)
    # With fewer elements than parts, `base` is 0, and no position is in the small blocks.
    after = more + (position - large) // np.maximum(base, 1)
    return np.where(position < large, position // (base + 1), after)


def _overlap(a: tuple[Ints, Ints], b: tuple[Ints, Ints]) -> Ints:
    """Return the number of common elements of boxes, ``[u, v]``."""
    total = np.ones((len(a[0]), len(b[0])), np.int64)
    for axis in range(a[0].shape[1]):
        low = np.maximum.outer(a[0][:, axis], b[0][:, axis])
        total *= np.maximum(0, np.minimum.outer(a[1][:, axis], b[1][:, axis]) - low)
    return total


def edge_seconds(
    shape: tuple[int, ...],
    makers: Sequence[Parts],
    readers: Sequence[Parts],
    network_model: NetworkModel,
    itemsize: int,
    ranks: int,
) -> NDArray[np.float64]:
    """Return the time of one redistribution, ``[makers, readers]`` [s]; 0 between equal layouts.

    `shape` is that of the array ``(N, *spatial, C)``. The adjoint redistribution takes the same time.
    """
    u, v = Grids.of(shape, tuple(makers)), Grids.of(shape, tuple(readers))
    seconds = np.zeros((len(makers), len(readers)))
    for rank in _looked_at(ranks):
        sent = _one_way(u, v, rank, network_model, itemsize, ranks)
        received = sent if makers == readers else _one_way(v, u, rank, network_model, itemsize, ranks)
        # The slowest of these ranks, each by the longer of its two directions; `received` is [readers, makers].
        seconds = np.maximum(seconds, np.maximum(sent, received.T))
    return seconds


def _looked_at(ranks: int) -> list[int]:
    """Return representative ranks: up to four of at most 8 ranks; else rank 0, and the rank at 3/8 of all."""
    return sorted({0, min(1, ranks - 1), ranks // 2, ranks - 1}) if ranks <= 8 else [0, 3 * ranks // 8]


def _one_way(
    source: Grids, target: Grids, rank: int, network_model: NetworkModel, itemsize: int, ranks: int
) -> NDArray[np.float64]:
    """Return the time in which `rank` sends its elements, ``[source, target]`` [s].

    With `source` and `target` swapped, the result is the time to receive.
    """
    own = source.boxes(rank)
    kept = _overlap(own, target.boxes(rank))
    # What the rank keeps needs no message.
    messages = target.count(*own) - (kept > 0)
    nbytes = ((own[1] - own[0]).prod(axis=1)[:, None] - kept) * itemsize
    packing = np.zeros(nbytes.shape)
    if not network_model.packed:
        # The sender packs, and the receiver unpacks, each by one kernel per message.
        packing += 2 * (network_model.copy(1.0) * nbytes + network_model.machine.launch * messages)
    width = network_model.per_node
    near_messages, near_bytes = messages, nbytes
    if ranks > width:
        near_messages, near_bytes = np.zeros_like(messages), np.zeros_like(nbytes)
        # Messages to the other ranks of the node take the link within it.
        first = rank // width * width
        for peer in range(first, min(first + width, ranks)):
            if peer != rank:
                common = _overlap(own, target.boxes(peer))
                near_messages, near_bytes = near_messages + (common > 0), near_bytes + common * itemsize
    if network_model.emulated:
        # All messages travel at the same time, so the largest one determines the time.
        largest = _largest(source, target) * itemsize
        link = network_model.machine.links["across"]
        far_messages, far_bytes = messages - near_messages, nbytes - near_bytes
        return packing + (far_messages > 0) * link.alpha + link.beta * np.minimum(far_bytes, largest)
    near = network_model.machine.links["node"]
    far = network_model.machine.links["switch" if ranks <= width * network_model.machine.nodes_per_switch else "across"]
    # All devices of the node that hold a part send at the same time.
    sharing = np.minimum(width, source.parts.prod(axis=1))[:, None]
    seconds = near.alpha * near_messages + near.beta * near_bytes
    return packing + seconds + far.alpha * (messages - near_messages) + far.beta * sharing * (nbytes - near_bytes)


def _largest(source: Grids, target: Grids) -> Ints:
    """Return an upper bound on the number of elements of the largest message, ``[source, target]``."""
    sizes = np.array(source.shape, np.int64)
    a, b = -(-sizes // source.parts), -(-sizes // target.parts)
    return np.minimum(a[:, None, :], b[None, :, :]).prod(axis=2)


def redistributed_bytes(
    shape: tuple[int, ...], makers: Sequence[Parts], readers: Sequence[Parts], itemsize: int
) -> NDArray[np.float64]:
    """Return the size of the copy under the reader's cut, ``[makers, readers]`` [B]; 0 between equal layouts."""
    u, v = Grids.of(shape, tuple(makers)), Grids.of(shape, tuple(readers))
    differ = (u.parts[:, None, :] != v.parts[None, :, :]).any(axis=2)
    return differ * (v.fullest * itemsize)[None, :].astype(np.float64)


Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class NetworkCosts:
    """Costs of all candidates of a network, from which a `Problem` is made.

    Attributes
    ----------
    names
        Layers in order of computation.
    candidates
        Candidate cuts of each layer.
    times, sums, memory
        Per layer ``[candidates]``: kernels, halos, statistics and update [s]; sums of gradients [s]; memory of
        permanent arrays [B].
    halos
        Per layer, the cheaper halo algorithm of each candidate; "" without a halo.
    edges, edge_memory
        ``(u, v)`` -> ``[candidates of u, candidates of v]``: time of the redistribution in both passes [s]; size of its
        copy [B].
    """

    names: tuple[str, ...]
    candidates: tuple[tuple[Parts, ...], ...]
    times: tuple[Floats, ...]
    sums: tuple[Floats, ...]
    memory: tuple[Floats, ...]
    halos: tuple[tuple[str, ...], ...]
    edges: Mapping[tuple[int, int], Floats]
    edge_memory: Mapping[tuple[int, int], Floats]

    def problem(self, exposed: float = 1.0, limit: float | None = None) -> Problem:
        """Return the problem under a memory limit [B], with the fraction `exposed` of the sums of gradients as cost."""
        times = tuple(t + exposed * s for t, s in zip(self.times, self.sums))
        return Problem(self.names, times, self.memory, self.edges, limit, self.edge_memory)

    def strategy(self, indices: Sequence[int], bucket_bytes: int = 4 << 20) -> Strategy:
        """Return the strategy for a choice of candidates, with the halo algorithm of each layer."""
        layers: dict[str, dict[str, Any]] = {}
        for name, parts, halos, i in zip(self.names, self.candidates, self.halos, indices):
            layers[name] = {axis: n for axis, n in zip(AXES, parts[i]) if n > 1} or {"sample": 1}
            if halos[i]:
                layers[name]["halo"] = halos[i]
        return Strategy({}, layers, bucket_bytes=bucket_bytes)

    def indices(self, strategy: Strategy) -> list[int] | None:
        """Return the choice of candidates for a strategy; None if one of its cuts is not a candidate."""
        indices = []
        for name, parts in zip(self.names, self.candidates):
            cuts = tuple(strategy.cuts_of(name).get(axis, 1) for axis in AXES)
            if cuts not in parts:
                return None
            indices.append(parts.index(cuts))
        return indices


def mean_costs(costs: Sequence[NetworkCosts], weights: Sequence[float]) -> NetworkCosts:
    """Return the weighted sum of the times of several machines; everything else is that of the first machine."""
    means: dict[tuple[int, ...], Floats] = {}

    def mean(tables: Sequence[Floats]) -> Floats:
        key = tuple(map(id, tables))  # equal edges stay one object
        if key not in means:
            means[key] = np.add.reduce([weight * table for weight, table in zip(weights, tables)])
        return means[key]

    times, sums = (
        tuple(mean(arrays) for arrays in zip(*(getattr(own, name) for own in costs))) for name in ("times", "sums")
    )
    edges = {edge: mean([own.edges[edge] for own in costs]) for edge in costs[0].edges}
    return replace(costs[0], times=times, sums=sums, edges=edges)


class _Priced(NamedTuple):
    """Costs of one layer, as in :class:`NetworkCosts`."""

    times: Floats
    sums: Floats
    memory: Floats
    halos: tuple[str, ...]


def network_costs(
    network: Network,
    batch: int,
    ranks: int,
    pricing: Pricing,
    training: Training | None = None,
    full: bool = False,
    bucket_bytes: int = 4 << 20,
    grids: Extra = (),
) -> NetworkCosts:
    """Return the costs of all candidates of all layers.

    Parameters
    ----------
    batch
        Global number of samples.
    ranks
        Number of ranks; a layer may use fewer.
    pricing
        Cost model of the machine. (``NetworkModel(machine, quick=True)`` is enough for a plan.)
    training
        Dtype and optimizer.
    full
        Whether every legal cut is a candidate, not only the preselected ones (`candidates`).
    bucket_bytes
        Size of the buckets of gradients [B]: a layer is charged its fraction of a bucket's sum.
    grids
        Additional cuts, the same for all layers; or all candidates by layer, instead of the preselected ones.
    """
    arguments = (network, batch, ranks, [pricing], training or Training(), full, bucket_bytes, grids)
    return _Maker(*arguments).costs()[0]


def varied_costs(
    network: Network,
    batch: int,
    ranks: int,
    pricings: Sequence[Pricing],
    training: Training,
    full: bool,
    bucket_bytes: int,
    grids: Sequence[Parts],
) -> list[NetworkCosts]:
    """Return the costs on several machines, for which each candidate is lowered once; see :func:`network_costs`."""
    return _Maker(network, batch, ranks, pricings, training, full, bucket_bytes, grids).costs()


def works_of(
    network: Network, batch: int, ranks: int, machine: Machine, dtype: str = "float32", full: bool = False
) -> dict[str, LayerWork]:
    """Return, by key, the layers on local blocks whose kernel times the costs of all candidates require.

    Boundary strips are included.

    Parameters
    ----------
    machine
        Machine whose roofline replaces the unknown kernel times.
    full
        Whether to include every legal cut, not only the preselected ones.
    """
    recorded = Recorded(RooflineTimes(machine))
    pricing = Pricing(NetworkModel(machine, quick=True), recorded, dtype, best_halo=True)
    # The size of buckets, 1, does not affect which kernels are requested.
    _Maker(network, batch, ranks, [pricing], Training(dtype), full, 1, grids(network, batch, ranks)).price()
    return recorded.requested


class _Maker:
    def __init__(
        self,
        network: Network,
        batch: int,
        ranks: int,
        pricings: Sequence[Pricing],
        training: Training,
        full: bool,
        bucket_bytes: int,
        grids: Extra = (),
    ) -> None:
        self.network, self.batch, self.ranks, self.training = network, batch, ranks, training
        #: Machines; candidates are lowered for the first of them, and priced on each.
        self.pricings, self.pricing = pricings, pricings[0]
        self.full, self.grids = full, grids
        self.itemsize = as_dtype(training.dtype).itemsize
        # A bucket holds at most all gradients: they share the least cost of its sum.
        self.bucket_bytes = max(1, min(bucket_bytes, self.itemsize * _parameters(network)))
        # Which layers and values have gradients does not depend on the cut.
        program = compile_program(network, Strategy(), Target(batch, dtype=as_dtype(training.dtype)))
        self.plain = {step.name: step for step in program.steps}
        self._trained = {segment.name for segment in program.backward}
        self._priced: dict[object, list[_Priced]] = {}
        self._tables: dict[object, tuple[list[Floats], Floats]] = {}

    def price(self) -> tuple[list[tuple[Parts, ...]], list[list[_Priced]]]:
        """Return the candidates of all layers and their costs, by layer and machine."""
        nodes = self.network.layers
        candidates = list(self._candidates(nodes).values())
        return candidates, [self._price(self.plain[name], own) for name, own in zip(nodes, candidates)]

    def costs(self) -> list[NetworkCosts]:
        nodes = self.network.layers
        candidates, priced = self.price()
        edges, edge_memory = self._edges(list(nodes.values()), candidates)
        costs = []
        for own, tables in zip(zip(*priced), edges):
            times, sums, memory, halos = zip(*own)
            costs.append(NetworkCosts(tuple(nodes), tuple(candidates), times, sums, memory, halos, tables, edge_memory))
        return costs

    def _candidates(self, nodes: Mapping[str, Node]) -> dict[str, tuple[Parts, ...]]:
        if isinstance(self.grids, Mapping):
            return {name: self.grids[name] for name in nodes}
        by_layer: dict[str, tuple[Parts, ...]] = {}
        for name, node in nodes.items():
            parts = candidates(
                node.layer, [n.shape for n in node.inputs], node.shape, self.batch, self.ranks, self.full
            )
            by_layer[name] = tuple(dict.fromkeys([*parts, *self.grids]))
        return shared_candidates(self.network, by_layer)

    # -- layers --------------------------------------------------------------------------------

    def _price(self, plain: Step, candidates: tuple[Parts, ...]) -> list[_Priced]:
        flags = tuple((value.read, value.trainable, value.dtype) for value in plain.inputs)
        key = (self.pricing.signature(plain), flags, plain.name in self._trained, plain.owner, plain.frozen, candidates)
        if key not in self._priced:
            # A layer does not use more ranks than its cut has parts, so searches for other numbers of ranks share rows.
            same = key[:-1], self.batch, self.training, self.bucket_bytes, *self.pricings
            known = self.pricing.known.setdefault(same, {})
            rows = []
            for parts in candidates:
                if parts not in known:
                    known[parts] = self._row(plain, parts)
                rows.append(known[parts])
            self._priced[key] = []
            # From rows by candidate and machine to tables by machine.
            for own in zip(*rows):
                times, sums, memory = (np.array(column, np.float64) for column in zip(*(r[:3] for r in own)))
                self._priced[key].append(_Priced(times, sums, memory, tuple(r[3] for r in own)))
        return self._priced[key]

    def _row(self, plain: Step, parts: Parts) -> list[tuple[float, float, float, str]]:
        """Return the time, sums of gradients, memory and halo algorithm of one candidate on every machine."""
        trained = plain.name in self._trained

        def under(step: Step) -> Step:
            return _under(step, dict(zip(AXES, parts)), math.prod(parts))

        step = faster(under(plain), self.pricing, lambda other: Alone(under(other), trained, self.pricing.overlaps))
        alone = Alone(step, trained, self.pricing.overlaps)
        backward = alone.backward() if trained else []
        summed: list[tuple[int, Ranks]] = []
        parameters = 0
        # Parameters that another call of the layer owns count there.
        for spec in () if step.owner else plain.parameters.values():
            held = blocks_of(spec, step.parts, step.output.layout)
            nbytes = held.largest * self.itemsize
            parameters += nbytes
            summed += [] if step.frozen else [(nbytes, held.holders.members(0))]
        memory, rows = self._memory(step, parameters), list[tuple[float, float, float, str]]()
        for pricing in self.pricings:
            cost = price_layer(step, alone.forward, backward, pricing)
            sums = sum((self._sum(pricing.network_model, *gradient) for gradient in summed), 0.0)
            update = sum((pricing.network_model.update(nbytes, self.training.slots) for nbytes, _ in summed), 0.0)
            rows.append((cost.seconds + update, sums, memory, cost.halo_algorithm))
        return rows

    def _sum(self, network_model: NetworkModel, nbytes: int, group: Ranks) -> float:
        """Return the time to sum a layer's gradients [s]: that of a separate sum if they fill a bucket, else their
        fraction of the time of a bucket's sum.
        """
        if nbytes >= self.bucket_bytes:
            return network_model.sum(nbytes, group)
        return network_model.sum(self.bucket_bytes, group) * nbytes / self.bucket_bytes

    def _memory(self, step: Step, parameters: int) -> float:
        slots = 0 if step.frozen else self.training.slots
        # Parameters, their gradients, the optimizer's state, and the output.
        total = parameters * (2 + slots) + step.output.layout.boxes.fullest * self.itemsize
        for value in step.inputs:
            for boxes, *_ in value.gathered:
                # The maker of a value counts its owned boxes; inputs of the network have no maker.
                if value.read or boxes != value.layout.boxes:
                    total += boxes.fullest * value.dtype.itemsize
        return float(total)

    # -- edges ---------------------------------------------------------------------------------

    def _edges(
        self, nodes: Sequence[Node], candidates: Sequence[tuple[Parts, ...]]
    ) -> tuple[list[dict[tuple[int, int], Floats]], dict[tuple[int, int], Floats]]:
        """Return the times of redistributions by machine, and the memory of their copies."""
        # Inputs are not among the layers; the loop adds each of them with its first reader.
        index_of = {node: i for i, node in enumerate(nodes)}
        edges: list[dict[tuple[int, int], Floats]] = [{} for _ in self.pricings]
        memory: dict[tuple[int, int], Floats] = {}
        for v, node in enumerate(nodes):
            # Once per value: a layer that reads it several times gets one copy.
            for source in dict.fromkeys(node.inputs):
                u = index_of.get(source)
                if isinstance(source, Input):
                    # The first reader's layout is read from disk, and redistributed for the other readers.
                    u = index_of.setdefault(source, v)
                assert u is not None
                if u == v:
                    continue
                seconds, nbytes = self._table(source, candidates[u], candidates[v])
                # Two values may pass between the same pair of layers: an input, and its reader's output.
                for tables, table in zip(edges, seconds):
                    tables[u, v] = tables[u, v] + table if (u, v) in tables else table
                memory[u, v] = memory[u, v] + nbytes if (u, v) in memory else nbytes
        return edges, memory

    def _table(
        self, source: Node, makers: tuple[Parts, ...], readers: tuple[Parts, ...]
    ) -> tuple[list[Floats], Floats]:
        shape, passes, itemsize = (self.batch, *source.shape), 1, self.itemsize
        if not isinstance(source, Input):
            # Backward redistributes the gradient.
            passes += self.plain[self.network.names[source]].output.trainable
        key = (shape, makers, readers, passes)
        if key not in self._tables:
            arguments = (shape, makers, readers)
            seconds = [
                edge_seconds(*arguments, own.network_model, itemsize, self.ranks) * passes for own in self.pricings
            ]
            self._tables[key] = (seconds, redistributed_bytes(shape, makers, readers, itemsize))
        return self._tables[key]


def _parameters(network: Network) -> int:
    return sum(spec.size for spec in network.parameters().values())


def _under(plain: Step, parts: Mapping[str, int], ranks: int) -> Step:
    """Return the layer under a cut, on a rank in the middle of the grid, which has halos on all sides."""

    output, *inputs = (layout_of(v.layout.shape, parts, ranks) for v in (plain.output, *plain.inputs))
    middle = middle_rank(output.boxes)

    def cut(value: Value, layout: Layout) -> Value:
        return Value(value.name, layout, value.dtype, middle, value.trainable, value.read)

    return plain.under(parts, list(map(cut, plain.inputs, inputs)), cut(plain.output, output))
