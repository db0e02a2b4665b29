"""A training step under a strategy, simulated: times, what hides behind what, memory and traffic."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from halograd.layers import Add, Network
from halograd.layers.reduction_scheme import Scheme
from halograd.layers.strategy import Strategy
from halograd.perfmodel.cost.blocks import PARTS
from halograd.perfmodel.cost.counts import count_steps
from halograd.perfmodel.cost.layer_cost import LayerCost, Pricing, layer_cost
from halograd.perfmodel.cost.memory import memory_of
from halograd.perfmodel.cost.parameters import Bucket, buckets_of
from halograd.perfmodel.cost.prediction import LayerRecord, Prediction
from halograd.perfmodel.cost.reductions import price
from halograd.perfmodel.cost.replicated import lighter, replication, rows_of
from halograd.perfmodel.cost.stages import Stage, itemsize_of, stages
from halograd.perfmodel.cost.timeline import Reduction, Replication, Timeline, run_step
from halograd.perfmodel.cost.wires import Wires
from halograd.perfmodel.kernel_times import KernelTimes
from halograd.perfmodel.machine import Machine

__all__ = ["Simulation", "Training", "simulate"]


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
    """

    dtype: str = "float32"
    slots: int = 1
    barrier: bool = False


def simulate(
    network: Network,
    strategy: Strategy,
    batch: int,
    machine: Machine,
    times: KernelTimes,
    training: Training | None = None,
    ranks: int | None = None,
    pricing: Pricing | None = None,
    account: bool = True,
) -> Prediction:
    """What one training step takes.

    Parameters
    ----------
    network, strategy
        What is trained, and how it is cut; a strategy that does not fit is the caller's mistake
        (`Strategy.validate`).
    batch
        Global number of samples.
    machine, times
        Links and kernels.
    training
        Dtype and optimizer.
    ranks
        How many there are; those of the strategy if None.
    pricing
        To share what was priced already; made of machine and times if None.
    account
        Whether to find memory and traffic too.
    """
    training = training or Training()
    pricing = pricing or Pricing(Wires(machine), times, training.dtype)
    return Simulation(network, strategy, batch, pricing, training, ranks).prediction(account)


@dataclass(frozen=True)
class _Step:
    """What layers, sums and replicated layers cost under one scheme, and the step that they make."""

    costs: Sequence[LayerCost]
    reductions: Sequence[Reduction]
    replications: Sequence[Replication]
    timeline: Timeline


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
        self.itemsize = itemsize_of(training.dtype)
        self.steps = stages(network, strategy, batch, training.dtype)
        gathered: set = set()
        costs = [layer_cost(stage, pricing, self.ranks, gathered) for stage in self.steps]
        sums = _gradients(self.steps)
        self.costs = [_with_sum(cost, stage, n, pricing) for cost, stage, n in zip(costs, self.steps, sums)]
        self._made: dict[tuple[Scheme, int], _Step] = {}

    def with_reduction(self, scheme: Scheme, bucket_bytes: int | None = None) -> Simulation:
        """The same with another scheme of gradient reduction, or buckets of another size [B].

        Layers are not priced again.
        """
        other = copy.copy(self)
        nbytes = self.strategy.bucket_bytes if bucket_bytes is None else bucket_bytes
        other.strategy = replace(self.strategy, reduction=scheme, bucket_bytes=nbytes)
        return other

    @property
    def step_seconds(self) -> float:
        """What a step takes [s]."""
        return self._step().timeline.seconds + self.pricing.wires.machine.runtime.step

    @property
    def memory(self) -> Mapping[str, int]:
        """Of the fullest rank, by use [B]."""
        buckets, scheme = self._buckets(), self.strategy.reduction
        slots, per_node = self.training.slots, self.pricing.wires.per_node
        some = _some(self.steps)
        found = [
            memory_of(self.steps, buckets, rank, self.ranks, self.itemsize, True, slots, scheme, per_node)
            for rank in some
        ]
        return max(found, key=lambda m: sum(m.values()))

    def _buckets(self) -> list[Bucket]:
        return buckets_of(self.steps, self.itemsize, self.strategy.bucket_bytes, self.strategy.reduction)

    def _step(self) -> _Step:
        key = self.strategy.reduction, self.strategy.bucket_bytes
        if key not in self._made:
            self._made[key] = self._make(key[0])
        return self._made[key]

    def _make(self, scheme: Scheme) -> _Step:
        pricing, slots = self.pricing, self.training.slots
        buckets = self._buckets()
        rows = rows_of(self.steps, buckets, self.itemsize)
        nbytes: Counter[str] = Counter()
        for bucket in buckets:
            nbytes.update({name: max(bucket.nbytes) for name in bucket.layers if bucket.replicated})
        replications = [
            replication(s, rows[s.name], nbytes[s.name], slots, pricing) for s in self.steps if s.name in rows
        ]
        costs = [
            lighter(cost, rows[stage.name], pricing) if stage.name in rows else cost
            for cost, stage in zip(self.costs, self.steps)
        ]
        reductions = [price(bucket, scheme, pricing.wires, slots) for bucket in buckets if not bucket.replicated]
        names = [stage.name for stage in self.steps]
        timeline = run_step(
            names,
            costs,
            reductions,
            pricing.wires.emulated,
            self.training.barrier,
            replications,
            scheme.name == "blocking",
        )
        return _Step(costs, reductions, replications, timeline)

    def prediction(self, account: bool = True) -> Prediction:
        """Everything; memory and traffic if `account`."""
        step = self._step()
        timeline = step.timeline
        traffic = {}
        if account:
            per_node = self.pricing.wires.per_node
            traffic = count_steps(self.network, self.steps, self.ranks, self.itemsize, self.strategy, per_node)
        return Prediction(
            network=self.network.name,
            machine=self.pricing.wires.machine.name,
            batch=self.batch,
            ranks=self.ranks,
            dtype=self.training.dtype,
            layers=tuple(_records(self.steps, step)),
            step_seconds=self.step_seconds,
            forward_seconds=timeline.forward,
            backward_seconds=timeline.backward,
            allreduce_seconds=sum(r.total for r in step.reductions) + sum(r.total for r in step.replications),
            allreduce_exposed=sum(timeline.waits) + sum(timeline.replicated),
            update_seconds=timeline.update,
            memory=self.memory if account else {},
            traffic={kind: (int(t.messages.max()), int(t.bytes.max())) for kind, t in traffic.items()},
        )


def _gradients(steps: Sequence[Stage]) -> list[int]:
    """Per stage, of how many readers' gradients that of its output is the sum."""
    readers = Counter(id(v) for s in steps if s.backward for v in s.inputs if v.trainable)
    return [readers[id(stage.output)] for stage in steps]


def _with_sum(cost: LayerCost, stage: Stage, gradients: int, pricing: Pricing) -> LayerCost:
    """With the kernel that adds up the gradients of several readers, before the layer's own backward."""
    if gradients < 2 or not stage.backward:
        return cost
    shape = tuple(int(extents.max()) for extents in stage.output.blocks.extents)
    time = pricing.times.time(Add(), [shape] * gradients, pricing.dtype, False)
    return replace(cost, backward_data=cost.backward_data + time.forward)


def _some(steps: Sequence[Stage]) -> list[int]:
    """The first rank, whose blocks are the largest, and one in the middle, which has margins on all sides."""
    blocks = max((s.output.blocks for s in steps), key=lambda b: b.placed)
    middle = 0
    for parts in blocks.grid:
        middle = middle * parts + parts // 2
    return sorted({0, min(middle, blocks.placed - 1)})


def _records(steps: Sequence[Stage], step: _Step) -> list[LayerRecord]:
    shares = _shares(steps, step)
    whole = {r.layer: r.compute for r in step.replications}
    records, before = [], 0.0
    for stage, cost in zip(steps, step.costs):
        if not stage.is_layer:
            before += cost.seconds
            continue
        record = _record(stage, cost, before, shares.get(stage.name, (0.0, 0.0)))
        records.append(replace(record, backward=record.backward + whole.get(stage.name, 0.0)))
        before = 0.0
    return records


def _record(stage: Stage, cost: LayerCost, before: float, share: tuple[float, float]) -> LayerRecord:
    return LayerRecord(
        stage.name,
        stage.layer.kind,
        {axis: n for axis, n in zip(PARTS, stage.parts) if n > 1},
        math.prod(stage.parts),
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
        memory=stage.output.blocks.fullest * stage.output.itemsize,
    )


def _shares(steps: Sequence[Stage], step: _Step) -> Mapping[str, tuple[float, float]]:
    """Per layer, its part of the sum of its bucket and of the wait for it, by parameters."""
    weights = {
        stage.name: sum(p.size for p in stage.layer.parameters(*stage.shapes).values())
        for stage in steps
        if stage.is_layer
    }
    found = {r.layer: (r.total, wait) for r, wait in zip(step.replications, step.timeline.replicated)}
    for reduction, wait in zip(step.reductions, step.timeline.waits):
        total = sum(weights[name] for name in reduction.bucket.layers)
        for name in reduction.bucket.layers:
            share = weights[name] / total
            seconds, waited = found.get(name, (0.0, 0.0))
            found[name] = (seconds + reduction.total * share, waited + wait * share)
    return found
