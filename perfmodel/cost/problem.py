"""The planners' problem of a network: costs of all candidates of all layers, and of all changes between them.

Layers with the same settings and shapes are priced once, tables of edges once per shape and pair of candidate lists.

What is approximated, because the problem is a sum over layers and pairs of layers (`simulate` is not):

* Sums of gradients overlap with computation, so what they add is not a sum over layers. A layer is charged `exposed`
  times its share of a bucket; :func:`halograd.perfmodel.predict.plan_network` solves for several values (0: all
  hidden, 1: none, as Jia et al. 2018 charge `t_s`) and lets `simulate` decide.
* A value that two layers read under the same other cut is redistributed once, and charged twice.
* A halo that two layers share is charged to both.
* Memory is what stays: parameters, gradients and optimizer state, activations, halo copies. What the arena lends for
  part of the backward pass (`transient`) is not additive; `plan_network` checks it with `memory_of`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from halograd.layers import Input, Network, Node, Strategy
from halograd.layers.parameter_blocks import blocks_of
from halograd.layers.strategy import layout_of
from halograd.perfmodel.candidates import candidates
from halograd.perfmodel.cost.account import program_of
from halograd.perfmodel.cost.blocks import PARTS, Parts
from halograd.perfmodel.cost.edges import edge_seconds, redistributed_bytes
from halograd.perfmodel.cost.layer_cost import Pricing, price_layer
from halograd.perfmodel.cost.simulate import Training
from halograd.perfmodel.cost.wires import Wires
from halograd.perfmodel.kernel_times import KernelTimes
from halograd.perfmodel.layer_work import LayerWork
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.planners import Problem
from halograd.program.compiler import lower_alone
from halograd.program.dtypes import dtype_of
from halograd.program.program import Step
from halograd.program.values import Value

__all__ = ["NetworkCosts", "make_problem", "network_costs"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class NetworkCosts:
    """What a `Problem` is made of.

    Attributes
    ----------
    names
        Layers in order of computation.
    candidates
        Per layer, the cuts that are looked at.
    times, sums, memory
        Per layer ``[candidates]``: kernels, halos, statistics and update [s]; sums of gradients [s]; what stays in
        memory [B].
    halos
        Per layer, the cheaper halo algorithm of each candidate; "" where there is no halo.
    edges, edge_memory
        ``(u, v)`` -> ``[candidates of u, candidates of v]``: redistribution, both passes [s]; its copy [B].
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
        """The problem with this part of the sums of gradients charged, under a memory limit [B]."""
        times = tuple(t + exposed * s for t, s in zip(self.times, self.sums))
        return Problem(self.names, times, self.memory, self.edges, limit, self.edge_memory)

    def strategy(self, indices: Sequence[int], bucket_bytes: int = 4 << 20) -> Strategy:
        """The strategy that a choice of candidates stands for, halo algorithms included."""
        layers: dict[str, dict[str, Any]] = {}
        for name, some, halos, i in zip(self.names, self.candidates, self.halos, indices):
            layers[name] = {axis: n for axis, n in zip(PARTS, some[i]) if n > 1} or {"sample": 1}
            if halos[i]:
                layers[name]["halo"] = halos[i]
        return Strategy({}, layers, bucket_bytes=bucket_bytes)

    def indices(self, strategy: Strategy) -> list[int] | None:
        """The choice that a strategy stands for; None if it has a cut that is no candidate."""
        found = []
        for name, some in zip(self.names, self.candidates):
            cuts = tuple(strategy.cuts_of(name).get(axis, 1) for axis in PARTS)
            if cuts not in some:
                return None
            found.append(some.index(cuts))
        return found


@dataclass(frozen=True)
class _Priced:
    times: Floats
    sums: Floats
    memory: Floats
    halos: tuple[str, ...]


def network_costs(
    network: Network,
    batch: int,
    ranks: int,
    machine: Machine,
    times: KernelTimes,
    training: Training | None = None,
    full: bool = False,
    bucket_bytes: int = 4 << 20,
    pricing: Pricing | None = None,
) -> NetworkCosts:
    """Costs of all candidates of all layers.

    Parameters
    ----------
    batch
        Global number of samples.
    ranks
        How many there are; a layer may use fewer.
    full
        Every legal cut, not only those that are worth a look (`candidates`).
    """
    training = training or Training()
    pricing = pricing or Pricing(Wires(machine, quick=True), times, training.dtype, best_halo=True)
    maker = _Maker(network, batch, ranks, pricing, training, full, bucket_bytes)
    return maker.costs()


def make_problem(
    network: Network, batch: int, ranks: int, machine: Machine, times: KernelTimes, exposed: float = 1.0, **options
) -> Problem:
    """The planners' problem of a network; `options` as for :func:`network_costs`, and `limit` [B]."""
    limit = options.pop("limit", None)
    return network_costs(network, batch, ranks, machine, times, **options).problem(exposed, limit)


class _Maker:
    def __init__(
        self,
        network: Network,
        batch: int,
        ranks: int,
        pricing: Pricing,
        training: Training,
        full: bool,
        bucket_bytes: int,
    ) -> None:
        self.network, self.batch, self.ranks, self.pricing, self.training = network, batch, ranks, pricing, training
        self.full, self.bucket_bytes = full, bucket_bytes
        self.itemsize = dtype_of(training.dtype).itemsize
        program = program_of(network, Strategy(), batch, 1, dtype=training.dtype)
        self.plain = {step.name: step for step in program.steps}
        self._trained = {segment.name for segment in program.backward}
        self._priced: dict[object, _Priced] = {}
        self._tables: dict[object, tuple[Floats, Floats]] = {}

    def costs(self) -> NetworkCosts:
        nodes = self.network.layers
        some = [self._candidates(node) for node in nodes.values()]
        priced = [self._price(self.plain[name], own) for name, own in zip(nodes, some)]
        edges, edge_memory = self._edges(list(nodes.values()), some)
        return NetworkCosts(
            tuple(nodes),
            tuple(some),
            tuple(p.times for p in priced),
            tuple(p.sums for p in priced),
            tuple(p.memory for p in priced),
            tuple(p.halos for p in priced),
            edges,
            edge_memory,
        )

    def _candidates(self, node: Node) -> tuple[Parts, ...]:
        return candidates(node.layer, [n.shape for n in node.inputs], node.shape, self.batch, self.ranks, self.full)

    # -- layers --------------------------------------------------------------------------------

    def _price(self, plain: Step, some: tuple[Parts, ...]) -> _Priced:
        key = (_signature(plain), plain.name in self._trained, some)
        if key not in self._priced:
            rows = [self._row(plain, parts) for parts in some]
            times, sums, memory = (np.array(column, np.float64) for column in zip(*(r[:3] for r in rows)))
            self._priced[key] = _Priced(times, sums, memory, tuple(r[3] for r in rows))
        return self._priced[key]

    def _row(self, plain: Step, parts: Parts) -> tuple[float, float, float, str]:
        """Time, sums of gradients, memory and halo algorithm of one candidate."""
        step = _under(plain, dict(zip(PARTS, parts)), self.ranks)
        lowered = lower_alone(step, plain.name in self._trained, self.pricing.overlaps)
        cost = price_layer(step, lowered.forward, lowered.backward, self.pricing)
        sums = update = 0.0
        parameters = 0
        for spec in step.layer.parameters(*(v.layout.shape[1:] for v in step.inputs)).values():
            held = blocks_of(spec, step.parts, self.ranks)
            nbytes = held.largest * self.itemsize
            parameters += nbytes
            sums += self._sum(nbytes, held.holders.members(0))
            update += self.pricing.wires.update(nbytes, self.training.slots)
        halo = ("overlap" if cost.overlaps else "pad") if cost.halo_forward else ""
        return cost.seconds + update, sums, self._memory(step, parameters), halo

    def _sum(self, nbytes: int, group: range) -> float:
        """A layer's share of a bucket's sum, or its own if it fills one."""
        wires = self.pricing.wires
        if nbytes >= self.bucket_bytes:
            return wires.sum(nbytes, group)
        return wires.sum(self.bucket_bytes, group) * nbytes / self.bucket_bytes

    def _memory(self, step: Step, parameters: int) -> float:
        total = parameters * (2 + self.training.slots) + step.output.layout.boxes.fullest * self.itemsize
        for value in step.inputs:
            for boxes, *_ in value.gathered:
                if value.read or boxes != value.layout.boxes:
                    total += boxes.fullest * value.dtype.itemsize
        return float(total)

    # -- edges ---------------------------------------------------------------------------------

    def _edges(
        self, nodes: Sequence[Node], some: Sequence[tuple[Parts, ...]]
    ) -> tuple[dict[tuple[int, int], Floats], dict[tuple[int, int], Floats]]:
        place = {node: i for i, node in enumerate(nodes)}
        edges: dict[tuple[int, int], Floats] = {}
        memory: dict[tuple[int, int], Floats] = {}
        for v, node in enumerate(nodes):
            for source in dict.fromkeys(node.inputs):
                u = place.get(source)
                if isinstance(source, Input):
                    # Read from disk by its first reader, redistributed from there for the others.
                    u = place.setdefault(source, v)
                assert u is not None
                if u == v:
                    continue
                seconds, nbytes = self._table(source, some[u], some[v])
                # Two values may be passed between the same pair of layers: an input, and what its reader makes.
                edges[u, v] = edges[u, v] + seconds if (u, v) in edges else seconds
                memory[u, v] = memory[u, v] + nbytes if (u, v) in memory else nbytes
        return edges, memory

    def _table(self, source: Node, makers: tuple[Parts, ...], readers: tuple[Parts, ...]) -> tuple[Floats, Floats]:
        shape, passes, itemsize = (self.batch, *source.shape), 1, self.itemsize
        if not isinstance(source, Input):
            passes += self.plain[self.network.names[source]].output.trainable
        key = (shape, makers, readers, passes)
        if key not in self._tables:
            seconds = edge_seconds(shape, makers, readers, self.pricing.wires, itemsize, self.ranks) * passes
            self._tables[key] = (seconds, redistributed_bytes(shape, makers, readers, itemsize))
        return self._tables[key]


def _signature(step: Step) -> object:
    """Equal for layers that cost the same under the same cut."""
    flags = tuple((value.read, value.trainable, value.dtype) for value in step.inputs)
    key = LayerWork.of(step.layer, [value.layout.shape for value in step.inputs]).key
    return key, step.output.layout.shape, flags


def _under(plain: Step, parts: Mapping[str, int], ranks: int) -> Step:
    """The layer under a cut, on a rank in the middle, which has halos on all sides."""

    def cut(value: Value) -> Value:
        layout = layout_of(value.layout.shape, parts, ranks)
        return Value(value.name, layout, value.dtype, middle, value.trainable, value.read)

    boxes, middle = layout_of(plain.output.layout.shape, parts, ranks).boxes, 0
    for count in boxes.grid:
        middle = middle * count + count // 2
    return Step(plain.name, plain.layer, [cut(v) for v in plain.inputs], cut(plain.output), plain.options, parts)
