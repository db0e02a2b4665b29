"""Simulation of a training step under a strategy: times, overlap, memory and traffic."""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ...device import as_dtype
from ...layers import Network
from ...layers.reduction_chunks import GradientChunk, GradientLayer, chunks_of, exposed_layers, gradient_layers
from ...layers.reduction_scheme import Scheme
from ...layers.strategy import Strategy, layout_of, parameter_blocks
from ...lowering.operations import KernelSpec
from ...lowering.views import Value
from ...program.compiler import compile_program, outline
from ...program.gradients import check_gradients, reduce_gradients
from ...program.keeping import Keeping
from ...program.program import Program, Target
from ...program.traffic import Ledger
from ..plans import LayerRecord, Prediction
from .account import count_program, gradients_memory, layers_memory
from .network_model import middle_rank
from .pricing import Pricing
from .steps import price_replicated, price_steps
from .timeline import LayerCost, StepTimeline, play

__all__ = ["Simulation", "Training", "simulate"]

#: Number of compiled programs that are cached for the count of their traffic.
PROGRAMS = 16
#: Up to this number of ranks, the memory of every rank is computed.
FEW = 4


@dataclass(frozen=True)
class Training:
    """Settings of a training step that do not belong to the network.

    Attributes
    ----------
    dtype
        Dtype of the computation.
    slots
        Number of arrays of the parameters' size in the optimizer's state (SGD with momentum: 1, Adam: 2).
    barrier
        Whether all sums of gradients end before the next forward pass begins; the runtime does not require this.
    accumulates
        Whether the batch is the last part of a larger one, so that its gradients are added to the other parts'.
    clips
        Whether gradients are clipped by their global norm, which needs all of them before any update.
    ahead
        Number of batches in memory that are read ahead of their use.
    """

    dtype: str = "float32"
    slots: int = 1
    barrier: bool = False
    accumulates: bool = False
    clips: bool = False
    ahead: int = 0


def simulate(
    network: Network,
    strategy: Strategy,
    batch: int,
    pricing: Pricing,
    training: Training | None = None,
    ranks: int | None = None,
    account: bool = True,
) -> Prediction:
    """Return the prediction for one training step.

    Parameters
    ----------
    network, strategy
        Network, and a strategy that is valid for it (`Strategy.validate`).
    batch
        Global number of samples.
    pricing
        Cost model of the machine.
    training
        Dtype and optimizer.
    ranks
        Number of ranks; None: the strategy's number.
    account
        Whether to predict memory and traffic too.
    """
    return Simulation(network, strategy, batch, pricing, training or Training(), ranks).prediction(account)


@dataclass
class _Chunked:
    """Layers with gradients, and their buckets per chunking."""

    layers: list[GradientLayer]
    buckets: dict[object, list[GradientChunk]] = field(default_factory=dict)


@dataclass(eq=False)
class _Remembered:
    """Cached results that simulations of one strategy share under all schemes."""

    memory: dict[tuple[int, tuple[str, ...]], dict[str, int]] = field(default_factory=dict)
    replicated: dict[str, tuple[LayerCost, KernelSpec]] = field(default_factory=dict)
    fullest: int | None = None
    uniform: int | None = None


class Simulation:
    """Simulated step of a network under a strategy; costs of layers are computed once, other results on demand.

    Its parameters are those of :func:`simulate`; the machine is that of `pricing`.
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
        self.costs: Mapping[str, LayerCost] = {}
        if strategy.passes or strategy.recomputes or strategy.widens:  # operations are played as the passes leave them
            self._outline = compile_program(network, strategy, self._target(self._rank), self.blocks)
            self._gathered: Mapping[Value, Collection[Any]] = {v: v.gathered for v in self._outline.values.values()}
        else:
            self._outline = outline(network, strategy, self._target(self._rank))
            self._price_steps()
        self.steps = {step.name: step for step in self._outline.steps}

    def _price_steps(self) -> None:
        steps = price_steps(self.network, self._outline, self.pricing)
        self._outline.backward, self.costs, self._gathered = steps.backward, steps.costs, steps.gathered
        self.strategy = self._with_algorithms()

    def _with_algorithms(self) -> Strategy:
        """Return the strategy with the chosen halo algorithms of layers that lower each algorithm differently.

        So memory and traffic are those of the operations that were timed.
        """
        layers = dict(self.strategy.layers)
        for step in self._outline.steps if self.pricing.best_halo else ():
            algorithm = self.costs[step.name].halo_algorithm if step.layer.lowers_each_halo else ""
            if algorithm:
                layers[step.name] = {**layers.get(step.name, {}), "halo": algorithm}
        return replace(self.strategy, layers=layers) if layers != self.strategy.layers else self.strategy

    def _target(self, rank: int) -> Target:
        rounds = self.pricing.network_model.machine.rounds_gradients
        dtype = as_dtype(self.training.dtype)
        return Target(self.batch, self.ranks, rank, dtype, overlaps=self.pricing.overlaps, rounds=rounds)

    def _program(self, rank: int) -> Program:
        """Return the program of one rank, with the dense layers that the scheme replicates.

        The latest programs of the rank whose traffic is counted are cached, because its memory is counted, too.
        """
        exposed = tuple(exposed_layers(self.strategy, self.network, self.batch))
        programs: dict[object, Program] = self.pricing.known.setdefault("programs", {})
        key = self._known, exposed
        # The outline of a strategy with passes is a whole program (`__init__`).
        if rank == self._rank and not self.costs and not exposed:
            program = self._outline
        elif rank == self._rank and key in programs:
            program = programs[key]
        else:
            program = compile_program(self.network, self.strategy, self._target(rank), self.blocks, exposed)
        if rank == self._rank:
            programs[key] = program
            if len(programs) > PROGRAMS:
                del programs[next(iter(programs))]
        parts = 2 if self.training.accumulates else 1
        return self._checked(reduce_gradients(program, self._buckets, self.strategy.reduction, parts))

    def _checked(self, program: Program) -> Program:
        """Return the program, with the computation of the norm of its gradients if they are clipped."""
        if not self.training.clips:
            return program
        # Ranks that hold all gradients whole need no message.
        cut = self.strategy.reduction.kind.shards or not all(blocks.whole for blocks in self.blocks.values())
        return check_gradients(program, "norm", cut and self.ranks > 1)

    def with_reduction(self, scheme: Scheme, bucket_bytes: int | None = None) -> Simulation:
        """Return the simulation with another scheme of gradient reduction, or buckets of another size [B].

        The costs of layers are not computed again.
        """
        self._chunked  # noqa: B018  (all schemes of these cuts share it)
        other = copy.copy(self)
        # The copied cache holds the buckets of this scheme.
        vars(other).pop("_buckets", None)
        nbytes = self.strategy.bucket_bytes if bucket_bytes is None else bucket_bytes
        other.strategy = self.strategy.with_reduction(scheme, nbytes)
        return other

    def on(self, pricing: Pricing) -> Simulation:
        """Return the simulation of the same strategy on another machine; the outline of the program is shared."""
        other = copy.copy(self)
        other.pricing = pricing
        for name in ("computing", "_chunked"):  # cached times and buckets of this machine
            vars(other).pop(name, None)
        if self.costs:
            other._outline = copy.copy(self._outline)
            other._price_steps()
        other._known, known = _Remembered(), self._known
        if other.strategy.layers == self.strategy.layers:  # the operations are the same, and so is their memory
            # Not the costs of replicated layers, which are those of one machine.
            other._known = replace(known, replicated={})
        return other

    def keeping(self, kinds: Collection[str]) -> Keeping:
        """Return the choices of outputs that are computed again under the same cuts, in layers of these kinds."""
        costs = self.costs.items()
        seconds = {name: cost.terms.get("forward", 0.0) + cost.terms.get("boundary", 0.0) for name, cost in costs}
        return Keeping(self.network, self.strategy, self._target(self._fullest), seconds or None, kinds)

    @property
    def step_seconds(self) -> float:
        """Time of a step [s]."""
        return self._play()[1].seconds + self.pricing.network_model.machine.runtime.step

    @cached_property
    def computing(self) -> float:
        """Lower bound on the time of a step under any scheme of gradient reduction: the time of both passes [s]."""
        return play(self._outline, self.costs, self.pricing).seconds + self.pricing.network_model.machine.runtime.step

    @property
    def memory(self) -> Mapping[str, int]:
        """Memory of the fullest rank, by use [B].

        Only two ranks are compared if there are more than `FEW`: a rank with halos on all sides, and the rank with the
        largest parameters, blocks and halos.
        """
        ranks = range(self.ranks) if self.ranks <= FEW else sorted({self._rank, self._fullest})
        return max((self._memory(rank) for rank in ranks), key=lambda m: sum(m.values()))

    def _memory(self, rank: int) -> dict[str, int]:
        # Ranks with arrays of the same shapes need the same memory.
        same = 0 if rank < self._uniform else rank
        key = same, tuple(exposed_layers(self.strategy, self.network, self.batch))
        if key not in self._known.memory:
            self._known.memory[key] = layers_memory(self._program(rank), self.blocks, self.training.ahead)
        target = replace(self._outline.target, rank=rank)
        program = self._reduced(replace(self._outline, target=target))
        # A copy, because the cached memory does not depend on the scheme's sums, which are added.
        memory = Counter(self._known.memory[key])
        memory.update(gradients_memory(program, self.training.slots, self.pricing.network_model.per_node))
        return dict(memory)

    @property
    def _uniform(self) -> int:
        """How many of the first ranks have programs with arrays of the same shapes, because their blocks are equal and
        they read no element of another rank; 0 if shapes differ.
        """
        known = self._known
        if known.uniform is None:
            values, gathered = self._outline.values.values(), self._gathered
            separate = all(boxes == v.layout.boxes for v in values for boxes, *_ in gathered.get(v, ()))
            held = (*(v.layout.boxes for v in values), *(blocks.boxes for blocks in self.blocks.values()))
            equal = all(len(set(lengths.tolist())) == 1 for boxes in set(held) for lengths in boxes.extents)
            moved = any(step.name not in self.network.layers for step in self._outline.steps)
            placed = min(boxes.placed for boxes in held)
            known.uniform = placed if separate and equal and not moved else 0
        return known.uniform

    @property
    def _fullest(self) -> int:
        """The first rank with the largest total of parameters and values, halos included."""
        if self._known.fullest is None:
            self._known.fullest = self._find_fullest()
        return self._known.fullest

    def _find_fullest(self) -> int:
        # Parameters, their gradients and the optimizer's state.
        copies = (2 + self.training.slots) * self._outline.wide.itemsize
        # The zeros make it an array also if the network has no parameters.
        held = copies * np.sum([blocks.boxes.sizes() for blocks in self.blocks.values()], axis=0) + np.zeros(self.ranks)
        for value in self._outline.values.values():
            needed = {boxes for boxes, *_ in self._gathered.get(value, ())}
            held += value.dtype.itemsize * np.maximum.reduce([value.held.sizes(), *(b.sizes() for b in needed)])
        return int(held.argmax())

    @cached_property
    def _chunked(self) -> _Chunked:
        """Buckets by chunking, shared by all simulations in which parameters have the same blocks."""
        key = "buckets", self.network, self._outline.wide.itemsize, *self.blocks.values()
        if key not in self.pricing.known:
            self.pricing.known[key] = _Chunked(gradient_layers(self.network, self.blocks))
        chunked: _Chunked = self.pricing.known[key]
        return chunked

    @cached_property
    def _buckets(self) -> list[GradientChunk]:
        scheme, chunked = self.strategy.reduction, self._chunked
        exposed = tuple(exposed_layers(self.strategy, self.network, self.batch))
        rule = scheme.kind.chunks, scheme.first_layers, scheme.chunk, scheme.replicated_dense
        # The size of buckets matters only for schemes with buckets.
        key = rule, self.strategy.bucket_bytes * scheme.has_buckets, exposed
        if key not in chunked.buckets:
            nbytes, itemsize = self.strategy.bucket_bytes, self._outline.wide.itemsize
            chunks = chunks_of(chunked.layers, scheme, nbytes, itemsize, frozenset(exposed))
            # Equal buckets of several rules are one object.
            chunked.buckets[key] = next((known for known in chunked.buckets.values() if known == chunks), chunks)
        return chunked.buckets[key]

    @property
    def chunking(self) -> int:
        """Key that is equal for simulations with the same cuts and the same buckets."""
        return id(self._buckets)

    def _replicated(self) -> dict[str, tuple[LayerCost, KernelSpec]]:
        """Return the cost and the kernel of every dense layer whose gradient the scheme replicates."""
        known, replicated = self._known.replicated, {}
        for name in (name for bucket in self._buckets if bucket.replicated for name in bucket.layers):
            if name not in known:
                known[name] = price_replicated(self.steps[name], self.pricing)
            replicated[name] = known[name]
        return replicated

    def _reduced(self, outlined: Program) -> Program:
        """Return the outline of the program with operations on gradients by the strategy's scheme."""
        exposed = {name: kernel for name, (_, kernel) in self._replicated().items()}
        parts = 2 if self.training.accumulates else 1
        # No copy in the usual case: most schemes replicate nothing.
        if exposed or outlined.exposed:
            outlined = replace(outlined, exposed=exposed)
        return self._checked(reduce_gradients(outlined, self._buckets, self.strategy.reduction, parts))

    def _play(self) -> tuple[Mapping[str, LayerCost], StepTimeline]:
        """Return the costs of layers under the scheme, and the timeline."""
        costs, training = self.costs, self.training
        replicated = {name: cost for name, (cost, _) in self._replicated().items()}
        if replicated:
            costs = {**costs, **replicated}
        program = self._reduced(self._outline)
        return costs, play(program, costs, self.pricing, training.slots, training.barrier)

    def prediction(self, account: bool = True) -> Prediction:
        """Return the whole prediction, with memory and traffic if `account` is true."""
        costs, timeline = self._play()
        # Without `account` it stays empty, because no program is compiled for it.
        traffic = Ledger(self.ranks)
        if account:
            traffic = count_program(self._program(self._rank), self.pricing.network_model.per_node)
        sender = int(sum((t.bytes for t in traffic.layers.values()), np.zeros(self.ranks, np.int64)).argmax())
        sent = {name: (int(t.messages[sender]), int(t.bytes[sender])) for name, t in traffic.layers.items()}
        return Prediction(
            network=self.network.name,
            machine=self.pricing.network_model.machine.name,
            batch=self.batch,
            ranks=self.ranks,
            dtype=self.training.dtype,
            layers=tuple(self._records(costs, timeline, sent)),
            step_seconds=timeline.seconds + self.pricing.network_model.machine.runtime.step,
            forward_seconds=timeline.forward,
            backward_seconds=timeline.backward,
            allreduce_seconds=sum(timeline.sums.values()),
            allreduce_exposed=sum(timeline.waits.values()),
            update_seconds=timeline.update,
            memory=self.memory if account else {},
            traffic={kind: (int(t.messages.max()), int(t.bytes.max())) for kind, t in traffic.kinds.items()},
            sender=sender,
        )


    def _records(
        self, costs: Mapping[str, LayerCost], timeline: StepTimeline, sent: Mapping[str, tuple[int, int]]
    ) -> Iterator[LayerRecord]:
        """Yield the record of every layer; a redistribution counts with the next layer.

        `sent` has, by layer, the number of messages and their size [B].
        """
        terms = {name: defaultdict(float, cost.terms) for name, cost in costs.items()}
        for (name, term), seconds in timeline.terms.items():
            terms.setdefault(name, defaultdict(float))[term] += seconds
        algorithms = {**timeline.algorithms, **{name: cost.halo_algorithm for name, cost in costs.items()}}
        shares, none = self._shares(timeline), defaultdict[str, float](float)
        moved, messages, nbytes = 0.0, 0, 0
        for step in self._outline.steps:
            own, message = terms.get(step.name, none), sent.get(step.name, (0, 0))
            messages, nbytes = messages + message[0], nbytes + message[1]
            if step.name not in self.network.layers:
                # An exchange adds only its wait ("halo_exposed") to the step; "halo" is its whole time.
                moved += sum(own.values()) - own["halo"]
                continue
            share = shares.get(step.name, (0.0, 0.0))
            yield LayerRecord(
                step.name,
                step.layer.kind,
                {axis: n for axis, n in step.parts.items() if n > 1},
                math.prod(step.parts.values()),
                forward=own["forward"] + own["boundary"],
                backward=own["backward_data"]
                + own["backward_filter"]
                + terms.get(f"{step.name} (sum)", none)["sum"],
                again=own["again"],
                halo=own["halo"],
                halo_exposed=own["halo_exposed"],
                channel=own["channel"],
                statistics=own["statistics"],
                redistribution=moved + own["redistribute"],
                packing=own["packing"],
                allreduce=share[0],
                allreduce_exposed=share[1],
                halo_algorithm=algorithms.get(step.name, ""),
                messages=messages,
                sent=nbytes,
                output=step.output.layout.boxes.fullest * step.output.dtype.itemsize,
            )
            moved, messages, nbytes = 0.0, 0, 0

    def _shares(self, timeline: StepTimeline) -> Mapping[str, tuple[float, float]]:
        """Return, by layer, its shares of the times of its buckets' sums and of the waits for them [s].

        The layers of a bucket share it in proportion to the numbers of their parameters.
        """
        weights = {step.name: sum(p.size for p in step.parameters.values()) for step in self._outline.steps}
        shares: dict[str, tuple[float, float]] = {}
        for i, bucket in enumerate(self._buckets):
            total = sum(weights[name] for name in bucket.layers)
            for name in bucket.layers:
                share, (seconds, waited) = weights[name] / total, shares.get(name, (0.0, 0.0))
                shares[name] = seconds + timeline.sums[i] * share, waited + timeline.waits[i] * share
        return shares


def _middle(network: Network, strategy: Strategy, batch: int, ranks: int) -> int:
    """Return a rank in the middle of the finest grid; with unequal parts, one with a largest part near the middle."""
    nodes = network.layers.items()
    layouts = [layout_of((batch, *node.shape), strategy.cuts_of(name), ranks).boxes for name, node in nodes]
    return middle_rank(max(layouts, key=lambda boxes: boxes.placed))


