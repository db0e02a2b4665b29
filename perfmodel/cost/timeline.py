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

On the emulated network all sums travel at the same time. If the machine has a topology, halos and sums of gradients
that use a node's adapters at the same time delay each other; else exchanges, sums within layers and sums of gradients
do not compete with each other.

If kernels vary, a message leaves when its sender is ready, and a sum starts when the last of its ranks is ready: later
than the mean by the expected maximum over these ranks, which the kernels until the wait may hide.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ...lowering.operations import ExchangeSpec, Operation, Run, Sum, Timing, Total, Transfer
from ...program.gradients import BucketOperation, BucketTotal, CheckGradients, Update, completions
from ...program.program import Program, Segment, Step
from .pricing import Pricing, SumPrice

__all__ = ["LayerCost", "StepTimeline", "play", "price_layer"]

_Halo = Literal["", "pad", "overlap"]
_NONE = (0.0, 0.0)


@dataclass(frozen=True)
class LayerCost:
    """Times of one layer in one step [s].

    Attributes
    ----------
    forward_seconds, backward_seconds
        Times from the start to the end of its passes, without sums of parameters' gradients.
    terms
        Parts of these times: kernels by phase (`Timing.phase`); ``"packing"``; ``"halo"``, the exchanges of halos, and
        ``"halo_exposed"``, the waits for them; ``"channel"``, ``"redistribute"`` and ``"statistics"``, the waits for
        these exchanges and sums; ``"again"``, the time of operations of the forward pass that backward repeats.
    halo_algorithm
        ``"pad"`` or ``"overlap"``; "" without a halo of `x`.
    busy
        Times in which the exchanges of the two passes use the adapters of a node, if they are shared.
    slack
        Times by which these exchanges may be later without delaying the two passes.
    squares
        Sums of the squared times of the kernels in the two passes [s^2].
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    terms: Mapping[str, float] = field(default_factory=dict)
    halo_algorithm: _Halo = ""
    busy: tuple[float, float] = (0.0, 0.0)
    slack: tuple[float, float] = (0.0, 0.0)
    squares: tuple[float, float] = (0.0, 0.0)

    @property
    def seconds(self) -> float:
        """Time of both passes [s]."""
        return self.forward_seconds + self.backward_seconds


def price_layer(step: Step, forward: Sequence[Operation], backward: Sequence[Operation], pricing: Pricing) -> LayerCost:
    """Return the cost of one layer, or of a redistribution, in both passes from its operations. Local.

    If strategy and `pricing` leave the halo algorithm open, the faster one is taken: with or without boundary strips.
    """
    strips = any(isinstance(o, Run) and o.timing is not None and o.timing.phase == "boundary" for o in forward)
    chosen = strips and pricing.best_halo and step.options.get("halo", "auto") == "auto"
    name, trained = step.name, {step.name} if backward else set()
    players = [_Player(pricing, {name: step}, trained, pads) for pads in ((True, False) if chosen else (False,))]
    for player in players:
        player.begin_forward(forward)
        player.compute(name, forward, "forward")
    # Only the forward passes differ: both algorithms have the same backward pass.
    player = min(players, key=lambda player: player.now)
    forward_seconds, algorithm, forward_use = player.now, player.algorithms.get(name, ""), player.use_of_pass()
    player.begin_backward()
    if backward:
        player.compute(name, backward, "backward_data")
    terms = {term: spent for (_, term), spent in player.terms.items()}
    busy, slack, squares = zip(forward_use, player.use_of_pass())
    return LayerCost(forward_seconds, player.now, terms, algorithm, busy, slack, squares)


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
        Terms by layer and name, and halo algorithms by layer, as in :class:`LayerCost`; only of layers that were
        simulated, not of those whose cost was known.
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
    """Link that carries messages, one after the other or all at the same time.

    Attributes
    ----------
    free
        Time at which the last message has arrived [s]; if all travel at the same time, the last one in order.
    load
        Share of the time until `free` in which the messages in progress use the adapters of a node.
    """

    def __init__(self, concurrent: bool = False) -> None:
        # Not 0: gathers of the previous step start at negative times.
        self._concurrent, self.free, self.load = concurrent, -math.inf, 0.0

    def send(self, at: float, seconds: float, in_order: bool = False, busy: float = 0.0) -> float:
        """Send a message that is ready at time `at` [s] and takes `seconds`; return its time of arrival [s].

        With `in_order`, it arrives after earlier ones of its kind; for `busy` [s] it uses the adapters of a node.
        """
        if self._concurrent:
            if in_order:
                self.free = max(self.free, at + seconds)
            return self.free if in_order else at + seconds
        if busy or self.load:
            # One number describes all messages in progress: the mean of their loads, weighted by the time left.
            waiting = max(0.0, self.free - at)
            self.load = (self.load * waiting + busy) / (waiting + seconds) if seconds else self.load
        self.free = max(self.free, at) + seconds
        return self.free


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
        self._busy, self._slack, self._squares, self._all = 0.0, math.inf, 0.0, 0.0

    def begin_forward(self, operations: Sequence[Operation]) -> None:
        """Begin the forward pass of one layer; the kernels before it are taken to vary as much as its own."""
        if self.pricing.jitter:
            timings = [(o.timing, o.layer) for o in operations if isinstance(o, Run) and o.timing is not None]
            self._squares = sum(self._seconds(*timing) ** 2 for timing in timings if timing[0].phase != "boundary")

    def begin_backward(self) -> None:
        """Begin the backward pass of one layer at time 0; all messages of its forward pass have ended."""
        self.now = 0.0
        self._exchanges, self._statistics, self._pads = _Link(), _Link(), False
        self._busy, self._slack, self._all = 0.0, math.inf, 0.0
        self._ends.clear()

    def use_of_pass(self) -> tuple[float, float, float]:
        """Return `busy`, `slack` and `squares` of the pass, as in :class:`LayerCost`."""
        # Without exchanges, the slack is still infinite.
        return self._busy, self._slack if self._busy else 0.0, self._all

    def compute(self, name: str, operations: Sequence[Operation], own: str) -> None:
        """Simulate operations of a segment; `own` is the term to which the time of the executor is added.

        All time of repeated operations, whose `own` is ``"again"``, belongs to this term.
        """
        self._again = own == "again"
        # Segments that only add up gradients are not among the steps, and have no overhead.
        if name in self._steps or self._again:
            self._spend(operations[0].layer if self._again else name, own, self.pricing.overhead)
        for operation in operations:
            # A training step does not run these operations.
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
        # A kernel between the start and the end of its halo exchange hides the exchange.
        in_progress = any(exchange.kind == "halo" and exchange.name == layer for exchange in self._ends)
        if self.algorithms.get(layer) == "pad" and in_progress:
            self.algorithms[layer] = "overlap"
        seconds = self._seconds(timing, layer)
        self._squares += seconds * seconds
        self._all += seconds * seconds
        self._spend(layer, timing.phase, seconds)
        if timing.copied:
            self._spend(layer, "packing", self.pricing.network_model.copy(timing.copied))
        return seconds

    def _seconds(self, timing: Timing, layer: str) -> float:
        return self.pricing.kernel(timing, self._steps.get(layer), layer in self._trained)

    def _wait(self, end: float) -> float:
        """Return the time until `end` [s]; ranks that have waited for each other are in step again."""
        waited = max(0.0, end - self.now)
        if waited:
            self._squares = 0.0
        return waited

    def _spend(self, layer: str, term: str, seconds: float) -> None:
        self.now += seconds
        self.terms[layer, "again" if self._again else term] += seconds

    def _start(self, operation: Transfer, forward: bool) -> None:
        exchange = operation.exchange
        seconds, packing, busy, peers = self.pricing.exchange(exchange)
        self._spend(operation.layer, "packing", packing)
        late = self.pricing.straggling(self._squares, 1 + peers) if self.pricing.jitter else 0.0
        self._busy += busy
        self._ends[exchange] = self._exchanges.send(self.now + late, seconds)
        # Repeated operations belong to the term "again", and do not change the algorithm of the forward pass.
        if exchange.kind == "halo" and not self._again:
            self.terms[operation.layer, "halo"] += seconds
            if forward and seconds:
                self.algorithms[operation.layer] = "pad"
        if self._pads:
            self._finish(operation)

    def _finish(self, operation: Transfer, forward: bool = False) -> None:
        exchange = operation.exchange
        # No end: with `pads`, the exchange was finished at its start.
        end = self._ends.pop(exchange, self.now)
        # The exchange that ends with the least time to spare limits the delay that the pass can hide.
        self._slack = min(self._slack, max(0.0, self.now - end))
        waited = self._wait(end)
        self._spend(operation.layer, "halo_exposed" if exchange.kind == "halo" else exchange.kind, waited)

    def _sum(self, operation: Total) -> None:
        price = self.pricing.sum(operation.sum)
        if operation.end == "start":
            late = self.pricing.straggling(self._squares, price.ranks) if self.pricing.jitter else 0.0
            at = self.now + late + price.begin
            # Computation hides only the transfer: the work follows in the wait.
            self._ends[operation.sum] = self._statistics.send(at, price.seconds - price.work)
        elif operation.sum in self._ends:  # else it was started in the forward pass, and has ended since
            waited = self._wait(self._ends.pop(operation.sum)) + price.work
            self._spend(operation.layer, "statistics", waited)


class _StepPlayer(_Player):
    """Simulator of a whole step with its gradient reductions; time 0 is the beginning of backward."""

    def __init__(self, program: Program, costs: Mapping[str, LayerCost], pricing: Pricing, slots: int) -> None:
        super().__init__(pricing, {}, ())
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
        # The program only finishes these gathers: layers of the previous forward pass start them.
        gathers = {o.layer: o for o in totals if o.layer and o.sum not in started}
        previous, begins = _StepPlayer(program, self._costs, self.pricing, self._slots), dict[str, float]()
        for segment in program.forward:
            begins.setdefault(segment.name, previous.now)
            previous._segment(segment, "forward")
        for segment in program.forward:
            if segment.name in gathers:
                gather = gathers.pop(segment.name)
                # Time 0 is the end of the previous forward pass, so gathers start at negative times.
                self._send(gather, self.pricing.sum(gather.sum), begins[segment.name] - previous.now)

    def backward(self) -> None:
        self._backward += self._pass(self._program.backward, True)
        self.run(self._program.end)

    def forward(self, barrier: bool) -> None:
        if barrier:
            self.run(completions(self._program))
        self._forward += self._pass(self._program.forward, False, barrier)

    def _pass(self, segments: Sequence[Segment], backward: bool, completed: bool = False) -> float:
        """Simulate the segments of a pass and their operations on gradients; return the time of the layers [s].

        If the parameters are `completed`, the operations before the segments are left out.
        """
        total, costs, gradients = 0.0, self._costs, self._gradients
        for segment in segments:
            if segment.before and not completed:
                self.run(segment.before)
            cost = costs.get(segment.name)
            # Sums that use the adapters may delay halos, so known times do not hold.
            if cost is None or gradients.load:
                own = "forward" if not backward else "again" if segment.again else "backward_data"
                seconds = self._segment(segment, own)
            else:  # a search simulates thousands of steps: most layers take the known time
                seconds = cost.backward_seconds if backward else cost.forward_seconds
                self._all += cost.squares[backward]
                self.now += seconds
            total += seconds
            if segment.after:
                self.run(segment.after)
        return total

    def compute(self, name: str, operations: Sequence[Operation], own: str) -> None:
        self._index_steps()
        super().compute(name, operations, own)

    def _seconds(self, timing: Timing, layer: str) -> float:
        self._index_steps()
        return super()._seconds(timing, layer)

    def _index_steps(self) -> None:
        """Index the steps and the trained layers, which most simulations of a search do not need."""
        if not self._steps:
            self._steps = {step.name: step for step in self._program.steps}
            self._trained = {segment.name for segment in self._program.backward}

    def _segment(self, segment: Segment, own: str) -> float:
        """Simulate the layer of a segment; return its time [s]."""
        cost = self._costs.get(segment.name)
        if cost is None:
            begin, self._busy, self._slack = self.now, 0.0, math.inf
            self.compute(segment.name, segment.operations, own)
            self.now += self._contend(segment.name, self._busy, self._slack, begin, self.now - begin)
            return self.now - begin
        backward = own != "forward"
        seconds = cost.backward_seconds if backward else cost.forward_seconds
        if cost.busy != _NONE:
            seconds += self._contend(segment.name, cost.busy[backward], cost.slack[backward], self.now, seconds)
        self._all += cost.squares[backward]
        self.now += seconds
        return seconds

    def _contend(self, name: str, busy: float, slack: float, begin: float, seconds: float) -> float:
        """Let the exchanges of a segment and the sums in progress share the adapters; return the segment's delay [s].

        `busy` is the time of the exchanges alone; the segment lasts `seconds` from the time `begin`. While both are in
        progress, the exchanges wait for the sums in proportion to the time in which these use the adapters, and the
        sums end later by as much.
        """
        shared = self._gradients.load * min(busy, max(0.0, self._gradients.free - begin), seconds)
        if not shared:
            return 0.0
        self._gradients.free += shared
        # Sums that ended before the segment began are not delayed.
        delayed = {total: (end + shared, work) for total, (end, work) in self._buckets.items() if end > begin}
        self._buckets.update(delayed)
        delay = max(0.0, shared - slack)
        self.terms[name, "halo_exposed"] += delay
        return delay

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
                # The weight gradient of a replicated layer, from gathered rows.
                self._backward += self.kernel(operation)
            elif isinstance(operation, BucketOperation | CheckGradients):
                self.now += self.pricing.pass_over(operation)

    def _begin(self, operation: BucketTotal) -> None:
        price = self.pricing.sum(operation.sum)
        begin = price.begin
        # The sum reads what the device has written, so the host waits for the device first.
        if operation.sum.algorithm.adds and price.seconds and operation.sum not in self._at_rest:
            begin += self.pricing.synchronize
        self.now += begin
        self._waits[operation.bucket] += begin
        self._sums[operation.bucket] += begin
        self._send(operation, price, self.now)

    def _send(self, operation: BucketTotal, price: SumPrice, at: float) -> None:
        self._sums[operation.bucket] += price.seconds
        late = self.pricing.straggling(self._all, price.ranks) if self.pricing.jitter else 0.0
        end = self._gradients.send(at + late, price.seconds - price.work, price.in_order, price.busy)
        self._buckets[operation.sum] = end, price.work

    def _complete(self, operation: BucketTotal) -> None:
        end, work = self._buckets.pop(operation.sum)
        waited = max(0.0, end - self.now) + work
        if end > self.now:
            self._all = self._squares = 0.0  # all ranks are in step again
        self._waits[operation.bucket] += waited
        self.now += waited

    def timeline(self) -> StepTimeline:
        passes = self._forward, self._backward
        return StepTimeline(
            self.now, *passes, self._waits, self._sums, self._update, dict(self.terms), self.algorithms
        )
