"""Timeline of one step: backward, the sums of gradients during it, and the next forward pass, which waits for them.

The operations of a program are simulated in their order. A kernel takes its time; a message overlaps with the
operations between the one that starts it and the one that finishes it. ::

    pad        forward   pack | halo of x | kernel
    overlap    forward   pack | max(halo of x, kernel) | boundary strips again
    both       backward  pack | max(halo of dy, filter gradient) | data gradient

Sums of gradients overlap greedily (Dryden et al. 2019, Section V-B): one at a time, in the order of their starts, with
the rest of backward and, if the program finishes them before the layer that needs them, with the next forward pass::

    compute    | backward .......................| forward of the next step ...|
    network        | bucket 0 | bucket 1 |    | bucket 2 |
                                                    ^ waits here if bucket 2 is late

On the emulated network all sums travel at the same time. Exchanges, sums within layers and sums of gradients do not
compete with each other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...lowering.operations import ExchangeSpec, Operation, Run, Sum, Total, Transfer
from ...program.gradients import BucketOperation, BucketTotal, CheckGradients, Update, completions
from ...program.program import Program, Segment, Step
from .pricing import Pricing, SumPrice

__all__ = ["LayerCost", "StepTimeline", "play", "price_layer"]

_Halo = Literal["", "pad", "overlap"]


@dataclass(frozen=True)
class LayerCost:
    """Times of one layer in one step [s].

    Attributes
    ----------
    forward_seconds, backward_seconds
        Times from the start to the end of its passes, without sums of parameters' gradients.
    terms
        Parts of these times: kernels by phase (`Timing.phase`), ``"packing"``, exchanges of ``"halo"`` and the waits
        for them, ``"halo_exposed"``, waits for ``"channel"`` and ``"redistribute"`` exchanges and for sums of
        ``"statistics"``, and ``"again"``, all of this for operations of the forward pass that backward repeats.
    halo_algorithm
        ``"pad"`` or ``"overlap"``; "" without a halo of `x`.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict)
    halo_algorithm: _Halo = ""

    @property
    def seconds(self) -> float:
        """Time of both passes [s]."""
        return self.forward_seconds + self.backward_seconds


def price_layer(step: Step, forward: Sequence[Operation], backward: Sequence[Operation], pricing: Pricing) -> LayerCost:
    """Return the cost of one layer, or of a redistribution, in both passes from its operations. Local.

    If the strategy allows both halo algorithms, with and without boundary strips, the faster one is taken.
    """
    strips = any(isinstance(o, Run) and o.timing is not None and o.timing.phase == "boundary" for o in forward)
    chosen = strips and pricing.best_halo and step.options.get("halo", "auto") == "auto"
    name, trained = step.name, {step.name} if backward else set()
    players = [_Player(pricing, {name: step}, trained, pads) for pads in ((True, False) if chosen else (False,))]
    for player in players:
        player.compute(name, forward, "forward")
    player = min(players, key=lambda one: one.now)
    seconds, algorithm = player.now, player.algorithms.get(name, "")
    player.begin_backward()
    if backward:
        player.compute(name, backward, "backward_data")
    terms = {term: spent for (_, term), spent in player.terms.items()}
    return LayerCost(seconds, player.now, terms, algorithm)


@dataclass(frozen=True)
class StepTimeline:
    """Times of a step [s].

    Attributes
    ----------
    seconds
        Time of the whole step.
    forward, backward
        Times of the two passes, without waits for sums of gradients and without updates; gradients of replicated layers
        count in the second.
    waits, sums
        Per bucket, time that computation waited for its sums and gathers, and their durations.
    update
        Time of the optimizer's updates.
    terms, algorithms
        Terms by layer and name, and halo algorithms by layer, as in :class:`LayerCost`, of the simulated operations,
        not of layers with a known cost.
    """

    seconds: float
    forward: float
    backward: float
    waits: Mapping[int, float]
    sums: Mapping[int, float]
    update: float
    terms: Mapping[tuple[str, str], float]
    algorithms: Mapping[str, _Halo]


def play(
    program: Program, costs: Mapping[str, LayerCost], pricing: Pricing, slots: int = 0, barrier: bool = False
) -> StepTimeline:
    """Return the timeline of a step in the steady state. Local.

    Parameters
    ----------
    program
        Program with operations on gradients.
    costs
        Known costs of layers, by name of the segment; the operations of all other segments are simulated.
    slots
        Number of arrays of the parameters' size in the optimizer's state.
    barrier
        Whether all sums end, and all parameters are updated, before the next forward pass begins.
    """
    player = _StepPlayer(program, costs, pricing, slots)
    player.start_gathers()
    player.backward()
    player.forward(barrier)
    return player.timeline()


class _Link:
    """Link that carries messages, one after the other or all at the same time."""

    def __init__(self, concurrent: bool = False) -> None:
        self._concurrent, self._free = concurrent, -math.inf

    def send(self, at: float, seconds: float, in_order: bool = False) -> float:
        """Send a message that is ready at time `at` [s]; return its time of arrival [s]."""
        if self._concurrent:
            if in_order:
                self._free = max(self._free, at + seconds)
            return self._free if in_order else at + seconds
        self._free = max(self._free, at) + seconds
        return self._free


class _Player:
    """Simulator of layers: the time `now` that computation has reached, and the end times of messages in progress.

    With `pads`, computation waits for exchanges at their start, and boundary strips are left out.
    """

    def __init__(
        self, pricing: Pricing, steps: Mapping[str, Step], trained: Collection[str], pads: bool = False
    ) -> None:
        self.pricing, self.now = pricing, 0.0
        self.terms: defaultdict[tuple[str, str], float] = defaultdict(float)
        self.algorithms: dict[str, _Halo] = {}
        self._steps, self._trained, self._pads, self._again = steps, trained, pads, False
        self._exchanges, self._statistics, self._ends = _Link(), _Link(), dict[ExchangeSpec | Sum, float]()

    def begin_backward(self) -> None:
        """Begin the backward pass of one layer at time 0; all messages of its forward pass have ended."""
        self.now = 0.0
        self._exchanges, self._statistics, self._pads = _Link(), _Link(), False
        self._ends.clear()

    def compute(self, name: str, operations: Sequence[Operation], own: str) -> None:
        """Simulate operations of a segment; `own` is the term to which the time of the executor is added.

        All time of repeated operations, whose `own` is ``"again"``, belongs to this term.
        """
        self._again = own == "again"
        if name in self._steps or self._again:
            self._spend(operations[0].layer if self._again else name, own, self.pricing.overhead)
        for operation in operations:
            if operation.when == "evaluation":
                continue
            if isinstance(operation, Run):
                self.kernel(operation)
            elif isinstance(operation, Transfer):
                (self._start if operation.end == "start" else self._finish)(operation, own == "forward")
            elif isinstance(operation, Total):
                self._sum(operation)
        self._again = False

    def kernel(self, operation: Run) -> float:
        """Simulate a kernel; return its time [s]."""
        timing, layer = operation.timing, operation.layer
        if timing is None or (self._pads and timing.phase == "boundary"):
            return 0.0
        if self.algorithms.get(layer) == "pad" and any(one.kind == "halo" and one.name == layer for one in self._ends):
            self.algorithms[layer] = "overlap"
        seconds = self.pricing.kernel(timing, self._steps.get(layer), layer in self._trained)
        self._spend(layer, timing.phase, seconds)
        if timing.copied:
            self._spend(layer, "packing", self.pricing.wires.copy(timing.copied))
        return seconds

    def _spend(self, layer: str, term: str, seconds: float) -> None:
        self.now += seconds
        self.terms[layer, "again" if self._again else term] += seconds

    def _start(self, operation: Transfer, forward: bool) -> None:
        made = operation.exchange
        seconds, packing = self.pricing.exchange(made)
        self._spend(operation.layer, "packing", packing)
        self._ends[made] = self._exchanges.send(self.now, seconds)
        if made.kind == "halo" and not self._again:
            self.terms[operation.layer, "halo"] += seconds
            if forward and seconds:
                self.algorithms[operation.layer] = "pad"
        if self._pads:
            self._finish(operation)

    def _finish(self, operation: Transfer, forward: bool = False) -> None:
        made = operation.exchange
        waited = max(0.0, self._ends.pop(made, self.now) - self.now)
        self._spend(operation.layer, "halo_exposed" if made.kind == "halo" else made.kind, waited)

    def _sum(self, operation: Total) -> None:
        price = self.pricing.sum(operation.sum)
        if operation.end == "start":
            self._ends[operation.sum] = self._statistics.send(self.now + price.begin, price.seconds - price.work)
        elif operation.sum in self._ends:
            waited = max(0.0, self._ends.pop(operation.sum) - self.now) + price.work
            self._spend(operation.layer, "statistics", waited)


class _StepPlayer(_Player):
    """Simulator of a whole step with its gradient reductions; time 0 is the beginning of backward."""

    def __init__(self, program: Program, costs: Mapping[str, LayerCost], pricing: Pricing, slots: int) -> None:
        steps = {step.name: step for step in program.steps}
        super().__init__(pricing, steps, {segment.name for segment in program.backward})
        self._program, self._costs, self._slots = program, costs, slots
        self._gradients = _Link(pricing.concurrent)
        self._buckets: dict[Sum, tuple[float, float]] = {}  # end of each sum in progress, and work of its finish
        self._forward = self._backward = self._update = 0.0
        self._waits: dict[int, float] = dict.fromkeys(range(len(program.buckets)), 0.0)
        self._sums = dict(self._waits)
        end = [o for o in program.end if isinstance(o, Total)]
        # The device is idle already at a sum that is started and finished at the end of backward.
        self._at_rest = {o.sum for o in end if o.end == "start"} & {o.sum for o in end if o.end == "finish"}

    def start_gathers(self) -> None:
        """Simulate the gathers that kernels of the previous forward pass have started."""
        program = self._program
        if not any(bucket.replicated for bucket in program.buckets):
            return
        before = (operation for segment in program.forward for operation in segment.before)
        totals = [o for o in (*before, *program.end) if isinstance(o, BucketTotal)]
        started = {o.sum for o in totals if o.end == "start"}
        gathers = {o.layer: o for o in totals if o.layer and o.sum not in started}
        earlier, begins = _StepPlayer(program, self._costs, self.pricing, self._slots), dict[str, float]()
        for segment in program.forward:
            begins.setdefault(segment.name, earlier.now)
            earlier._segment(segment, "forward")
        for segment in program.forward:
            if segment.name in gathers:
                gather = gathers.pop(segment.name)
                self._send(gather, self.pricing.sum(gather.sum), begins[segment.name] - earlier.now)

    def backward(self) -> None:
        for segment in self._program.backward:
            self._backward += self._segment(segment, "again" if segment.again else "backward_data")
            if segment.after:
                self.run(segment.after)
        self.run(self._program.end)

    def forward(self, barrier: bool) -> None:
        if barrier:
            self.run(completions(self._program))
        for segment in self._program.forward:
            if segment.before and not barrier:
                self.run(segment.before)
            self._forward += self._segment(segment, "forward")

    def _segment(self, segment: Segment, own: str) -> float:
        """Simulate the layer of a segment; return its time [s]."""
        known = self._costs.get(segment.name)
        if known is not None:
            seconds = known.forward_seconds if own == "forward" else known.backward_seconds
            self.now += seconds
            return seconds
        begin = self.now
        self.compute(segment.name, segment.operations, own)
        return self.now - begin

    def run(self, operations: Sequence[Operation]) -> None:
        """Simulate operations on gradients."""
        for operation in operations:
            if isinstance(operation, BucketTotal):
                (self._begin if operation.end == "start" else self._complete)(operation)
            elif isinstance(operation, Update):
                seconds = self.pricing.update(operation, self._slots)
                self._update += seconds
                self.now += seconds
            elif isinstance(operation, Run):
                self._backward += self.kernel(operation)
            elif isinstance(operation, BucketOperation | CheckGradients):
                self.now += self.pricing.pass_over(operation)

    def _begin(self, operation: BucketTotal) -> None:
        price = self.pricing.sum(operation.sum)
        begin = price.begin
        if operation.sum.algorithm.adds and price.seconds and operation.sum not in self._at_rest:
            begin += self.pricing.synchronize
        self.now += begin
        self._waits[operation.bucket] += begin
        self._sums[operation.bucket] += begin
        self._send(operation, price, self.now)

    def _send(self, operation: BucketTotal, price: SumPrice, at: float) -> None:
        self._sums[operation.bucket] += price.seconds
        end = self._gradients.send(at, price.seconds - price.work, price.in_order)
        self._buckets[operation.sum] = end, price.work

    def _complete(self, operation: BucketTotal) -> None:
        end, work = self._buckets.pop(operation.sum)
        waited = max(0.0, end - self.now) + work
        self._waits[operation.bucket] += waited
        self.now += waited

    def timeline(self) -> StepTimeline:
        passes = self._forward, self._backward
        return StepTimeline(
            self.now, *passes, self._waits, self._sums, self._update, dict(self.terms), self.algorithms
        )
