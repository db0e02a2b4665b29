"""One step in time: backward, the sums of gradients behind it, and the next forward that waits for them.

All-reduces are overlapped greedily (Dryden et al. 2019, Section V-B): one at a time, in the order in which backward
completes their buckets, behind the rest of backward and, because the runtime waits for a bucket only when its first
parameter is needed again, behind the next forward::

    compute    | backward .......................| forward of the next step ...|
    network        | bucket 0 | bucket 1 |    | bucket 2 |
                                                    ^ waits here if bucket 2 is late

A step lasts from the beginning of one backward to that of the next. The emulated network differs: there all sums
under way travel at the same time.

Schemes differ in the buckets (`halograd.layers.reduction_chunks`), and in this: ``blocking`` starts its sums when
backward is over, and waits for them at once; ``sharded`` updates all shards before the first layer of forward, those of
the first layers first, and all-gathers each behind it; replicated dense layers gather their activations behind the
forward pass of the step before, their errors behind its backward, and compute their gradients where they are needed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ...dtensor import Groups
from ...layers import Network, Strategy
from ...layers.parameter import ParameterBlocks
from ...layers.reduction_chunks import chunks_of, gradient_layers
from ...program.traffic import GroupSum
from .layer_cost import LayerCost

__all__ = ["PricedBucket", "PricedReduction", "Replication", "StepTimeline", "aligned", "buckets_of", "run_step"]

#: Parameters begin at multiples of this [B].
ALIGN = 64


@dataclass(frozen=True)
class PricedBucket:
    """Parameters whose gradients are summed together.

    Attributes
    ----------
    layers
        Names, last layer first.
    holders
        Who sums them: ranks of one group hold the same block.
    nbytes
        Per group, alignment included [B].
    replicated
        Every rank computes the gradients of the whole batch: there is nothing to sum.
    """

    layers: tuple[str, ...]
    holders: Groups
    nbytes: tuple[int, ...]
    replicated: bool = False

    @cached_property
    def sum(self) -> GroupSum:
        """The reduction of its gradients."""
        return GroupSum.of("allreduce", self.holders, self.nbytes)


def buckets_of(
    network: Network, blocks: Mapping[str, ParameterBlocks], itemsize: int, strategy: Strategy
) -> list[PricedBucket]:
    """Return all buckets under the strategy's scheme, in the order in which the store makes them."""
    return Gradients(network, blocks, itemsize).buckets(strategy)


class Gradients:
    """The gradients of a network by layer, with their bytes; buckets are made of them under any scheme."""

    def __init__(self, network: Network, blocks: Mapping[str, ParameterBlocks], itemsize: int) -> None:
        self._layers, self._itemsize = gradient_layers(network, blocks), itemsize
        names = [gradient.name for layer in self._layers for gradient in layer.gradients]
        self._nbytes = {name: [aligned(n * itemsize) for n in blocks[name].sizes] for name in names}
        self._found: dict[tuple[object, ...], list[PricedBucket]] = {}

    def buckets(self, strategy: Strategy) -> list[PricedBucket]:
        """Return all buckets under the strategy's scheme, in the order in which the store makes them."""
        scheme, nbytes = strategy.reduction, strategy.bucket_bytes * strategy.reduction.has_buckets
        key = scheme.kind.chunks, scheme.first_layers, scheme.chunk, scheme.replicated_dense, nbytes
        if key not in self._found:
            self._found[key] = self._buckets(strategy)
        return self._found[key]

    def _buckets(self, strategy: Strategy) -> list[PricedBucket]:
        found = []
        for chunk in chunks_of(self._layers, strategy.reduction, strategy.bucket_bytes, self._itemsize):
            assert isinstance(chunk.sharing, Groups)
            nbytes = tuple(map(sum, zip(*(self._nbytes[g.name] for g in chunk.gradients))))
            found.append(PricedBucket(chunk.layers, chunk.sharing, nbytes, chunk.replicated))
        return found


def aligned(nbytes: int) -> int:
    """Return what so many bytes take [B]."""
    return -(-nbytes // ALIGN) * ALIGN


@dataclass(frozen=True)
class PricedReduction:
    """One bucket's sum.

    Attributes
    ----------
    bucket
        What is summed.
    seconds
        How long it takes [s].
    update
        How long the optimizer takes behind it [s].
    work
        The part of `seconds` that is done where the sum is waited for, and not behind computation [s].
    begin
        What it takes to start the sum, not behind computation [s].
    gather
        All-gather of the updated parameters [s]; None: they are updated whole.
    gather_work
        The part of `gather` that is done where it is waited for [s].
    in_order
        On the emulated network, where all sums travel at the same time: whether this one ends no earlier than others
        of the kind that were started before.
    """

    bucket: PricedBucket
    seconds: float
    update: float
    work: float = 0.0
    begin: float = 0.0
    gather: float | None = None
    gather_work: float = 0.0
    in_order: bool = False

    @property
    def total(self) -> float:
        """All of its communication [s]."""
        return self.begin + self.seconds + (self.gather or 0.0)


@dataclass(frozen=True)
class Replication:
    """One dense layer whose gradient every rank computes of the whole batch.

    Attributes
    ----------
    layer
        Name.
    activations, errors
        All-gathers [s].
    compute
        The gradient of the whole batch [s].
    update
        The optimizer [s].
    """

    layer: str
    activations: float
    errors: float
    compute: float
    update: float

    @property
    def total(self) -> float:
        """All of its communication [s]."""
        return self.activations + self.errors


@dataclass(frozen=True)
class StepTimeline:
    """What a step takes [s].

    Attributes
    ----------
    seconds
        The whole step.
    forward, backward
        The two passes, without waiting for sums of gradients and without updates; gradients of replicated layers are
        in the second.
    waits
        Per bucket, what computation waited for it.
    update
        The optimizer.
    replicated
        Per replicated layer, what computation waited for its activations and errors.
    """

    seconds: float
    forward: float
    backward: float
    waits: tuple[float, ...]
    update: float
    replicated: tuple[float, ...] = ()


def run_step(
    names: Sequence[str],
    costs: Sequence[LayerCost],
    reductions: Sequence[PricedReduction],
    concurrent: bool = False,
    barrier: bool = False,
    replications: Sequence[Replication] = (),
    blocking: bool = False,
) -> StepTimeline:
    """Return a step in its steady state.

    Parameters
    ----------
    names, costs
        Stages in order of computation.
    reductions
        Buckets in the order in which backward completes them.
    concurrent
        All sums travel at the same time (the emulated network).
    barrier
        Nothing is overlapped with the next forward: all sums end, and all parameters are updated, before it begins.
    replications
        Layers whose gradients are replicated, in order of computation; they are in no bucket.
    blocking
        Sums begin when backward is over and end before the next forward begins; updates come where they are needed.
    """
    step = _Player(reductions, replications, _Link(concurrent))
    step.gather_activations(names, costs)
    step.backward(names, costs, blocking)
    if blocking:
        step.wait()
    if barrier:
        step.finish()
    step.forward(names, costs)
    return step.timeline()


class _Link:
    """What carries the sums: one after the other, or all at the same time."""

    def __init__(self, concurrent: bool) -> None:
        self._concurrent, self._free = concurrent, -math.inf

    def send(self, at: float, seconds: float, in_order: bool = False) -> float:
        """Return when something that is ready then has arrived."""
        if self._concurrent:
            if in_order:
                self._free = max(self._free, at + seconds)
            return self._free if in_order else at + seconds
        self._free = max(self._free, at) + seconds
        return self._free


class _Player:
    """Where computation stands, and what is under way; time 0 is the beginning of backward."""

    def __init__(self, reductions: Sequence[PricedReduction], replications: Sequence[Replication], link: _Link) -> None:
        self.reductions, self.replications, self.link = reductions, replications, link
        self.now = self.forward_seconds = self.backward_seconds = 0.0
        self.waits = [0.0] * len(reductions)
        self.replicated_waits = [0.0] * len(replications)
        self._of_layer: dict[str, list[int]] = {}
        for i, reduction in enumerate(reductions):
            for name in reduction.bucket.layers:
                self._of_layer.setdefault(name, []).append(i)
        self._replicated = {r.layer: i for i, r in enumerate(replications)}
        self._started: list[int] = []
        self._ends = [0.0] * len(reductions)  # of sums, without the work that is left for who waits
        self._pending: set[int] = set()  # neither waited for nor updated
        self._unwaited: set[int] = set()
        self._gathers: dict[int, float] = {}  # when the parameters of all shards are there
        self._activations = [0.0] * len(replications)
        self._errors = [0.0] * len(replications)
        self._uncomputed = set(range(len(replications)))

    def gather_activations(self, names: Sequence[str], costs: Sequence[LayerCost]) -> None:
        """Play what the forward pass of the step before has left under way."""
        before = -sum(cost.forward_seconds for cost in costs)
        for name, cost in zip(names, costs):
            if name in self._replicated:
                i = self._replicated[name]
                self._activations[i] = self.link.send(before, self.replications[i].activations)
            before += cost.forward_seconds

    def backward(self, names: Sequence[str], costs: Sequence[LayerCost], blocking: bool) -> None:
        missing = [len(r.bucket.layers) for r in self.reductions]
        ready = []
        for name, cost in zip(reversed(names), reversed(costs)):
            self.now += cost.backward_seconds
            self.backward_seconds += cost.backward_seconds
            for i in self._of_layer.get(name, ()):
                missing[i] -= 1
                if not missing[i]:
                    ready.append(i)
                    if not blocking:
                        self._start(i)
        if blocking:
            for i in ready:
                self._start(i)
        self._pending, self._unwaited = set(ready), set(ready)
        for i, replication in enumerate(self.replications):
            self._errors[i] = self.link.send(self.now, replication.errors)

    def _start(self, i: int) -> None:
        reduction = self.reductions[i]
        self.now += reduction.begin
        self.waits[i] += reduction.begin
        self._ends[i] = self.link.send(self.now, reduction.seconds - reduction.work, reduction.in_order)
        self._started.append(i)

    def wait(self) -> None:
        """For all sums; nothing is updated."""
        for i in self._started:
            self._wait(i)

    def _wait(self, i: int) -> None:
        if i in self._unwaited:
            self._unwaited.discard(i)
            waited = max(0.0, self._ends[i] - self.now) + self.reductions[i].work
            self.waits[i] += waited
            self.now += waited

    def _complete(self, i: int) -> None:
        """Wait for a bucket, update it, and send the updated shards."""
        if i not in self._pending:
            return
        self._pending.discard(i)
        self._wait(i)
        reduction = self.reductions[i]
        self.now += reduction.update
        if reduction.gather is not None:
            self._gathers[i] = self.link.send(self.now, reduction.gather - reduction.gather_work)

    def _wait_for_gather(self, i: int) -> None:
        if i in self._gathers:
            waited = max(0.0, self._gathers.pop(i) - self.now) + self.reductions[i].gather_work
            self.waits[i] += waited
            self.now += waited

    def _compute(self, i: int) -> None:
        """Play the gradient of the whole batch, and its update."""
        if i not in self._uncomputed:
            return
        self._uncomputed.discard(i)
        replication = self.replications[i]
        self.replicated_waits[i] = max(0.0, self._activations[i] - self.now, self._errors[i] - self.now)
        self.now += self.replicated_waits[i] + replication.compute + replication.update
        self.backward_seconds += replication.compute

    def finish(self) -> None:
        """Wait for what is under way."""
        self._update_shards()
        for i in self._started:
            self._complete(i)
        for i in reversed(self._started):
            self._wait_for_gather(i)
        for i in range(len(self.replications)):
            self._compute(i)

    def _update_shards(self) -> None:
        for i in reversed(self._started):
            if self.reductions[i].gather is not None:
                self._complete(i)

    def forward(self, names: Sequence[str], costs: Sequence[LayerCost]) -> None:
        self._update_shards()
        for name, cost in zip(names, costs):
            for i in self._of_layer.get(name, ()):
                self._complete(i)
                self._wait_for_gather(i)
            if name in self._replicated:
                self._compute(self._replicated[name])
            self.now += cost.forward_seconds
            self.forward_seconds += cost.forward_seconds

    def timeline(self) -> StepTimeline:
        update = sum(r.update for r in self.reductions) + sum(r.update for r in self.replications)
        return StepTimeline(
            self.now,
            self.forward_seconds,
            self.backward_seconds,
            tuple(self.waits),
            update,
            tuple(self.replicated_waits),
        )
