"""A training step under a strategy, simulated: times, what hides behind what, memory and traffic."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ...device import as_dtype
from ...layers import Network
from ...layers.reduction_scheme import Scheme
from ...layers.strategy import Strategy, layout_of, parameter_blocks
from ...program.compiler import Alone, outline
from ...program.program import Program, Step, Target
from ...program.traffic import Ledger
from ..plans import LayerRecord, Prediction
from .account import Keeping, add_sums, count_program, layers_memory, price, program_of
from .layer_cost import LayerCost, Pricing
from .steps import apart, price_steps
from .timeline import Gradients, PricedBucket, PricedReduction, Replication, StepTimeline, run_step
from .wires import middle_rank

__all__ = ["Simulation", "Training", "simulate"]

#: Ranks whose memory is looked at one by one.
FEW = 4


@dataclass(frozen=True)
class Rows:
    """What the ranks gather of one replicated layer.

    Attributes
    ----------
    group
        Ranks that hold the layer: the first so many.
    rows
        Rows that every one of them sends, padding included.
    activations, errors
        What every one of them sends [B].
    """

    group: int
    rows: int
    activations: int
    errors: int


def rows_of(step: Step) -> Rows:
    """Return the rows of a dense layer if its gradient is replicated."""
    options = {**step.options, "weight_gradient": "replicated"}
    exposed = Alone(replace(apart(step), options=options), trainable=True).context.exposed
    assert exposed is not None
    activations, errors = exposed.sums["rows_gather"], exposed.sums["errors_gather"]
    assert activations is not None and errors is not None
    rows = errors.sizes[0] // (step.output.layout.shape[-1] * step.output.dtype.itemsize)
    return Rows(activations.groups.members_each, rows, activations.sizes[0], errors.sizes[0])


def lighter(cost: LayerCost, rows: Rows, pricing: Pricing) -> LayerCost:
    """Return the cost of a layer that leaves its weight gradient for later: its rows are copied instead."""
    copy = pricing.wires.copy
    return replace(
        cost,
        backward_filter=0.0,
        packing_forward=cost.packing_forward + copy(rows.activations),
        packing_backward=cost.packing_backward + copy(rows.errors),
    )


def replication(step: Step, rows: Rows, nbytes: int, slots: int, pricing: Pricing) -> Replication:
    """Return what gathering, multiplying and updating take; `nbytes` [B] of parameters."""
    group, wires = range(rows.group), pricing.wires
    whole = (rows.group * rows.rows, step.inputs[0].layout.shape[-1])
    time = pricing.times.time(step.layer, [whole], pricing.dtype, True)
    return Replication(
        step.name,
        wires.gather(rows.group * rows.activations, group),
        wires.gather(rows.group * rows.errors, group),
        time.backward_filter,
        wires.update(nbytes, slots),
    )


@dataclass(frozen=True)
class Training:
    """What a step does besides the network.

    Attributes
    ----------
    dtype
        Of the computation.
    slots
        Arrays of the parameters' size that the optimizer keeps (SGD with momentum: 1, Adam: 2).
    barrier
        Whether all sums of gradients end before the next forward begins; the runtime's do not.
    accumulates
        Whether the batch is the last part of a larger one: its gradients are added to those of the others.
    """

    dtype: str = "float32"
    slots: int = 1
    barrier: bool = False
    accumulates: bool = False


def simulate(
    network: Network,
    strategy: Strategy,
    batch: int,
    pricing: Pricing,
    training: Training | None = None,
    ranks: int | None = None,
    account: bool = True,
) -> Prediction:
    """Return what one training step takes.

    Parameters
    ----------
    network, strategy
        What is trained, and how it is cut; a strategy that does not fit is the caller's mistake
        (`Strategy.validate`).
    batch
        Global number of samples.
    pricing
        Links and kernels of the machine.
    training
        Dtype and optimizer.
    ranks
        How many there are; those of the strategy if None.
    account
        Whether to find memory and traffic too.
    """
    return Simulation(network, strategy, batch, pricing, training or Training(), ranks).prediction(account)


@dataclass(frozen=True)
class _Played:
    """What layers, sums and replicated layers cost under one scheme, and the step that they make."""

    costs: Sequence[LayerCost]
    reductions: Sequence[PricedReduction]
    replications: Sequence[Replication]
    timeline: StepTimeline


@dataclass
class _Remembered:
    """What simulations of one strategy under all schemes have found."""

    memory: dict[tuple[int, int], dict[str, int]] = field(default_factory=dict)
    fullest: int | None = None


@dataclass
class _Sums:
    """Gradients and their sums by scheme, for all simulations in which parameters have the same blocks."""

    gradients: Gradients
    priced: dict[tuple[object, ...], list[PricedReduction]] = field(default_factory=dict)


class Simulation:
    """A step of a network under a strategy: what layers cost is found once, what else is asked for when it is.

    Parameters are those of :func:`simulate`; the machine is that of `pricing`.
    """

    def __init__(
        self,
        network: Network,
        strategy: Strategy,
        batch: int,
        pricing: Pricing,
        training: Training,
        ranks: int | None = None,
    ) -> None:
        self.network, self.strategy, self.batch = network, strategy, batch
        self.pricing, self.training = pricing, training
        self.ranks = ranks or strategy.ranks
        self.blocks = parameter_blocks(network, strategy, self.ranks)
        self._known = _Remembered()
        self._rank = _middle(network, strategy, batch, self.ranks)
        self._outline = outline(network, strategy, self._target(self._rank))
        self.steps = {step.name: step for step in self._outline.steps}
        self.costs, self._gathered = price_steps(network, self._outline, pricing)

    def _target(self, rank: int) -> Target:
        return Target(self.batch, self.ranks, rank, as_dtype(self.training.dtype), overlaps=self.pricing.overlaps)

    def _program(self, rank: int) -> Program:
        """Return the program of one rank, with the dense layers that the scheme replicates."""
        return program_of(self.network, self.strategy, self._target(rank), self.blocks)

    def with_reduction(self, scheme: Scheme, bucket_bytes: int | None = None) -> Simulation:
        """Return the same with another scheme of gradient reduction, or buckets of another size [B].

        Layers are not priced again.
        """
        other = copy.copy(self)
        nbytes = self.strategy.bucket_bytes if bucket_bytes is None else bucket_bytes
        other.strategy = self.strategy.with_reduction(scheme, nbytes)
        return other

    @property
    def step_seconds(self) -> float:
        """What a step takes [s]."""
        return self._play().timeline.seconds + self.pricing.wires.machine.runtime.step

    @cached_property
    def computing(self) -> float:
        """What a step takes at least, under any scheme of gradient reduction: both passes [s]."""
        passes = sum(cost.forward_seconds + cost.backward_seconds for cost in self.costs.values())
        return passes + self.pricing.wires.machine.runtime.step

    @property
    def memory(self) -> Mapping[str, int]:
        """What the fullest rank takes, by use [B]; only ranks that may be it are looked at.

        These are the one with halos on all sides, and the one whose parameters, blocks and halos are the most; all of
        up to `FEW`.
        """
        training, per_node, buckets = self.training, self.pricing.wires.per_node, self._buckets()
        some = range(self.ranks) if self.ranks <= FEW else sorted({self._rank, self._fullest})
        found = [dict(self._layers_memory(rank)) for rank in some]
        for rank, memory in zip(some, found):
            keeping = Keeping(self.strategy.reduction, rank, per_node, training.slots, training.accumulates)
            add_sums(memory, buckets, keeping)
        return max(found, key=lambda m: sum(m.values()))

    def _layers_memory(self, rank: int) -> dict[str, int]:
        key = rank, self.strategy.reduction.replicated_dense
        if key not in self._known.memory:
            self._known.memory[key] = layers_memory(self._program(rank), self.blocks)
        return self._known.memory[key]

    @property
    def _fullest(self) -> int:
        """The first rank with the most bytes of parameters and of all values, halos included."""
        if self._known.fullest is None:
            self._known.fullest = self._find_fullest()
        return self._known.fullest

    def _find_fullest(self) -> int:
        copies = (2 + self.training.slots) * self._outline.wide.itemsize
        held = copies * np.sum([one.boxes.sizes() for one in self.blocks.values()], axis=0) + np.zeros(self.ranks)
        for value in self._outline.values.values():
            needed = {boxes for boxes, *_ in self._gathered.get(value, ())}
            held += value.dtype.itemsize * np.maximum.reduce([value.layout.boxes.sizes(), *(b.sizes() for b in needed)])
        return int(held.argmax())

    def _buckets(self) -> list[PricedBucket]:
        return self._sums.gradients.buckets(self.strategy)

    @cached_property
    def _sums(self) -> _Sums:
        itemsize, known = self._outline.wide.itemsize, self.pricing.known
        key = self.network, itemsize, *self.blocks.values()
        if key not in known:
            known[key] = _Sums(Gradients(self.network, self.blocks, itemsize))
        found: _Sums = known[key]
        return found

    def _reductions(self, buckets: Sequence[PricedBucket]) -> list[PricedReduction]:
        scheme, slots, sums = self.strategy.reduction, self.training.slots, self._sums
        key = scheme, slots, self.strategy.bucket_bytes * scheme.has_buckets
        if key not in sums.priced:
            wires = self.pricing.wires
            sums.priced[key] = [price(bucket, scheme, wires, slots) for bucket in buckets if not bucket.replicated]
        return sums.priced[key]

    def _play(self) -> _Played:
        pricing, slots, scheme = self.pricing, self.training.slots, self.strategy.reduction
        buckets = self._buckets()
        replicated = {name for bucket in buckets if bucket.replicated for name in bucket.layers}
        rows = {name: rows_of(step) for name, step in self.steps.items() if name in replicated}
        nbytes: Counter[str] = Counter()
        for bucket in buckets:
            nbytes.update({name: max(bucket.nbytes) for name in bucket.layers if bucket.replicated})
        replications = [replication(self.steps[n], own, nbytes[n], slots, pricing) for n, own in rows.items()]
        costs = [lighter(cost, rows[name], pricing) if name in rows else cost for name, cost in self.costs.items()]
        reductions = self._reductions(buckets)
        timeline = run_step(
            list(self.costs),
            costs,
            reductions,
            pricing.wires.emulated,
            self.training.barrier,
            replications,
            scheme.kind.waits,
        )
        return _Played(costs, reductions, replications, timeline)

    def prediction(self, account: bool = True) -> Prediction:
        """Return everything; memory and traffic if `account`."""
        step = self._play()
        timeline = step.timeline
        traffic = Ledger(self.ranks)
        if account:
            program, per_node = self._program(self._rank), self.pricing.wires.per_node
            traffic = count_program(program, self._buckets(), self.strategy, per_node)
        sender = int(sum((t.bytes for t in traffic.layers.values()), np.zeros(self.ranks, np.int64)).argmax())
        sent = {name: (int(t.messages[sender]), int(t.bytes[sender])) for name, t in traffic.layers.items()}
        return Prediction(
            network=self.network.name,
            machine=self.pricing.wires.machine.name,
            batch=self.batch,
            ranks=self.ranks,
            dtype=self.training.dtype,
            layers=tuple(_records(self.network, self._outline.steps, step, sent)),
            step_seconds=timeline.seconds + self.pricing.wires.machine.runtime.step,
            forward_seconds=timeline.forward,
            backward_seconds=timeline.backward,
            allreduce_seconds=sum(r.total for r in step.reductions) + sum(r.total for r in step.replications),
            allreduce_exposed=sum(timeline.waits) + sum(timeline.replicated),
            update_seconds=timeline.update,
            memory=self.memory if account else {},
            traffic={kind: (int(t.messages.max()), int(t.bytes.max())) for kind, t in traffic.kinds.items()},
            sender=sender,
        )


def _middle(network: Network, strategy: Strategy, batch: int, ranks: int) -> int:
    """Return a rank in the middle of the finest grid, or one that has the most to compute."""
    nodes = network.layers.items()
    layouts = [layout_of((batch, *node.shape), strategy.cuts_of(name), ranks).boxes for name, node in nodes]
    return middle_rank(max(layouts, key=lambda boxes: boxes.placed))


def _records(
    network: Network, steps: Sequence[Step], step: _Played, sent: Mapping[str, tuple[int, int]]
) -> list[LayerRecord]:
    """Make the record of every layer; changes of layout are in that of the next layer. `sent`: messages, and [B]."""
    shares = _shares(network, steps, step)
    whole = {r.layer: r.compute for r in step.replications}
    records, before, messages, nbytes = [], 0.0, 0, 0
    for one, cost in zip(steps, step.costs):
        own = sent.get(one.name, (0, 0))
        messages, nbytes = messages + own[0], nbytes + own[1]
        if one.name not in network.layers:
            before += cost.seconds
            continue
        record = _record(one, cost, before, shares.get(one.name, (0.0, 0.0)))
        backward = record.backward + whole.get(one.name, 0.0)
        records.append(replace(record, backward=backward, messages=messages, sent=nbytes))
        before, messages, nbytes = 0.0, 0, 0
    return records


def _record(one: Step, cost: LayerCost, before: float, share: tuple[float, float]) -> LayerRecord:
    return LayerRecord(
        one.name,
        one.layer.kind,
        {axis: n for axis, n in one.parts.items() if n > 1},
        math.prod(one.parts.values()),
        forward=cost.forward + cost.strips * cost.overlaps,
        backward=cost.backward_data + cost.backward_filter,
        halo=cost.halo_forward + cost.halo_backward,
        halo_exposed=cost.exposed_forward + cost.exposed_backward,
        channel=cost.channel_forward + cost.channel_backward,
        statistics=cost.statistics_forward + cost.statistics_backward,
        redistribution=before + cost.redistribution_forward + cost.redistribution_backward,
        packing=cost.packing_forward + cost.packing_backward,
        allreduce=share[0],
        allreduce_exposed=share[1],
        halo_algorithm=("overlap" if cost.overlaps else "pad") if cost.halo_forward else "",
        output=one.output.layout.boxes.fullest * one.output.dtype.itemsize,
    )


def _shares(network: Network, steps: Sequence[Step], step: _Played) -> Mapping[str, tuple[float, float]]:
    """Per layer, its part of the sum of its bucket and of the wait for it, by parameters."""
    weights = {
        one.name: sum(p.size for p in one.parameters.values())
        for one in steps
        if one.name in network.layers and not one.owner
    }
    found = {r.layer: (r.total, wait) for r, wait in zip(step.replications, step.timeline.replicated)}
    for reduction, wait in zip(step.reductions, step.timeline.waits):
        total = sum(weights[name] for name in reduction.bucket.layers)
        for name in reduction.bucket.layers:
            share = weights[name] / total
            seconds, waited = found.get(name, (0.0, 0.0))
            found[name] = (seconds + reduction.total * share, waited + wait * share)
    return found
