"""Timeline of one step: backward, the sums of gradients during it, and the next forward pass, which waits for them.

Sums overlap greedily (Dryden et al. 2019, Section V-B): one at a time, in the order of their starts, with the rest of
backward and, if the program finishes them before the layer that needs them, with the next forward pass::

    compute    | backward .......................| forward of the next step ...|
    network        | bucket 0 | bucket 1 |    | bucket 2 |
                                                    ^ waits here if bucket 2 is late

On the emulated network all sums travel at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...comm.sums import LARGEST_AT_ONCE
from ...lowering.operations import Operation, Run, Sum, Total
from ...program.gradients import Accumulate, BucketTotal, Cast, CheckGradients, Update, completions
from ...program.program import Program, Segment
from ...program.traffic import GroupSum
from .layer_cost import LayerCost, Pricing
from .wires import Wires

__all__ = ["OperationPrices", "StepTimeline", "SumPrice", "play", "price_sum"]

#: Memory that operations on gradients pass over, in copies of the gradients: 16 bits are read and 32 written; two
#: arrays are read and one written; one is read.
_CAST, _ACCUMULATE, _CHECK = 6 / 8, 3 / 2, 1 / 2


@dataclass(frozen=True)
class SumPrice:
    """Times of one sum over ranks [s].

    Attributes
    ----------
    seconds
        Time from the start to the end of the sum, without `begin`.
    work
        The part of `seconds` that is done during the wait for the sum, and does not overlap with computation.
    begin
        Time to start the sum, which does not overlap with computation.
    in_order
        On the emulated network, where all sums travel at the same time: whether this sum ends no earlier than others
        of the kind that were started before.
    """

    seconds: float
    work: float = 0.0
    begin: float = 0.0
    in_order: bool = False


def price_sum(total: Sum, wires: Wires) -> SumPrice:
    """Return the times of a sum of gradients, or of a gather, on the slowest ranks. Local."""
    nbytes, members = GroupSum.of(total.kind, total.groups, total.sizes).largest
    method = total.algorithm
    if len(members) < 2 or not nbytes:
        return SumPrice(0.0)
    # Small sums have their own places in shared memory; large ones share a stage, sums by nodes a thread.
    in_order = method.adds and wires.emulated and (nbytes > LARGEST_AT_ONCE or not method.on_devices)
    if method.by_nodes:
        parts = wires.sum_by_nodes(nbytes, members)
        if method.in_background:
            return SumPrice(parts.seconds, in_order=in_order)
        behind = parts.addition + parts.across
        return SumPrice(behind + parts.way_back, parts.way_back, parts.deposit, in_order)
    if not (method.adds and method.gathers):
        seconds = wires.scatter(nbytes, members) if method.adds else wires.gather(nbytes, members)
        return SumPrice(seconds, min(seconds, wires.sum_work(nbytes, members) / 2), in_order=in_order)
    codec = method.codec
    payload = codec.payload(nbytes)
    seconds = wires.sum(payload, members)
    work = min(seconds, wires.sum_work(payload, members))
    if codec.identity:
        return SumPrice(seconds, work, in_order=in_order)
    one_pass = wires.copy(nbytes) / 2  # a copy reads and writes
    back, begin = codec.decoding * one_pass, codec.encoding(total.feedback) * one_pass
    return SumPrice(seconds + back, work + back, begin, in_order)


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
    whole
        Per replicated layer, time of the gradient of the whole batch.
    """

    seconds: float
    forward: float
    backward: float
    waits: Mapping[int, float]
    sums: Mapping[int, float]
    update: float
    whole: Mapping[str, float]


class OperationPrices:
    """Times of operations on gradients [s]. Local; sums are priced once per machine.

    Parameters
    ----------
    program
        Program of the operations.
    pricing
        Times of the machine's kernels and links.
    slots
        Number of arrays of the parameters' size in the optimizer's state.
    """

    def __init__(self, program: Program, pricing: Pricing, slots: int) -> None:
        self._layers = {step.name: step.layer for step in program.steps}
        self._pricing, self._slots, self.wires = pricing, slots, pricing.wires

    def sum(self, total: Sum) -> SumPrice:
        """Return the times of a sum or of a gather."""
        known, key = self._pricing.known, (total.groups, tuple(total.sizes), total.method, total.codec, total.feedback)
        if key not in known:
            known[key] = price_sum(total, self.wires)
        return known[key]

    @property
    def synchronize(self) -> float:
        """Time to wait for the device before a sum that starts during other work."""
        return self.wires.machine.runtime.synchronize

    def update(self, operation: Update) -> float:
        """Return the time of the optimizer's update of the largest part that a rank updates."""
        return self.wires.update(operation.largest, self._slots)

    def whole_gradient(self, operation: Run) -> float:
        """Return the time of a dense layer's gradient over the samples of all ranks."""
        assert operation.timing is not None
        layer, inputs = self._layers[operation.layer], list(operation.timing.inputs)
        return self._pricing.times.time(layer, inputs, self._pricing.dtype, True).backward_filter

    def pass_over(self, operation: Cast | Accumulate | CheckGradients) -> float:
        """Return the time of an operation that reads all gradients once, with its sum over the ranks."""
        copies = {Cast: _CAST, Accumulate: _ACCUMULATE, CheckGradients: _CHECK}[type(operation)]
        return copies * self.wires.copy(operation.nbytes) + sum(self.sum(total).seconds for total in operation.sums())


def play(
    program: Program,
    costs: Mapping[str, LayerCost],
    prices: OperationPrices,
    concurrent: bool = False,
    barrier: bool = False,
) -> StepTimeline:
    """Return the timeline of a step in the steady state. Local.

    Parameters
    ----------
    program
        Program with operations on gradients; those of layers may be missing.
    costs
        Costs of the layers, by name of the segment; a segment without a cost belongs to another one.
    prices
        Times of operations on gradients.
    concurrent
        Whether all sums travel at the same time (the emulated network).
    barrier
        Whether all sums end, and all parameters are updated, before the next forward pass begins.
    """
    player = _Player(program, costs, prices, _Link(concurrent))
    player.start_gathers()
    player.backward()
    if barrier:
        player.run(completions(program))
    player.forward()
    return player.timeline()


class _Link:
    """Link that carries the sums, one after the other or all at the same time."""

    def __init__(self, concurrent: bool) -> None:
        self._concurrent, self._free = concurrent, -math.inf

    def send(self, at: float, seconds: float, in_order: bool = False) -> float:
        """Return the time of arrival of a message that is ready at a time."""
        if self._concurrent:
            if in_order:
                self._free = max(self._free, at + seconds)
            return self._free if in_order else at + seconds
        self._free = max(self._free, at) + seconds
        return self._free


def _charged(segments: Sequence[Segment], seconds: Mapping[str, float]) -> list[float]:
    """Return the time of each segment: that of a layer is charged to the last segment with its operations."""
    left, found = dict(seconds), []
    for segment in reversed(segments):
        layers = dict.fromkeys([segment.name, *(operation.layer for operation in segment.operations)])
        found.append(sum(left.pop(layer, 0.0) for layer in layers))
    return found[::-1]


class _Player:
    """Time that computation has reached, and the communication in progress; time 0 is the beginning of backward."""

    def __init__(
        self, program: Program, costs: Mapping[str, LayerCost], prices: OperationPrices, link: _Link
    ) -> None:
        self._program, self._prices, self._link = program, prices, link
        self._forwards = _charged(program.forward, {name: cost.forward_seconds for name, cost in costs.items()})
        self._backwards = _charged(program.backward, {name: cost.backward_seconds for name, cost in costs.items()})
        self._now = self._forward = self._backward = self._update = 0.0
        self._waits: dict[int, float] = dict.fromkeys(range(len(program.buckets)), 0.0)
        self._sums = dict(self._waits)
        self._whole: dict[str, float] = {}
        self._ends: dict[Sum, float] = {}  # ends of sums in progress, without the work of their finish
        self._done: set[Operation] = set()  # operations that a barrier has executed already
        end = [o for o in program.end if isinstance(o, Total)]
        # The device is idle already at a sum that is started and finished at the end of backward.
        self._at_rest = {o.sum for o in end if o.end == "start"} & {o.sum for o in end if o.end == "finish"}

    def start_gathers(self) -> None:
        """Play the gathers that kernels of the previous forward pass have started."""
        program = self._program
        placed = [*(o for s in program.forward for o in s.before), *(o for s in program.backward for o in s.after)]
        started = {o.sum for o in (*placed, *program.end) if isinstance(o, Total) and o.end == "start"}
        before = -sum(self._forwards)
        for segment, seconds in zip(program.forward, self._forwards):
            for operation in (*segment.before, *(program.end if segment is program.forward[0] else ())):
                if isinstance(operation, BucketTotal) and operation.sum not in started:
                    self._send(operation, before)
            before += seconds

    def backward(self) -> None:
        for segment, seconds in zip(self._program.backward, self._backwards):
            self._now += seconds
            self._backward += seconds
            self.run(segment.after)
        self.run(self._program.end)

    def forward(self) -> None:
        for segment, seconds in zip(self._program.forward, self._forwards):
            self.run(segment.before)
            self._now += seconds
            self._forward += seconds

    def run(self, operations: Sequence[Operation]) -> None:
        """Play operations on gradients, each once."""
        for operation in operations:
            if operation in self._done:
                continue
            self._done.add(operation)
            if isinstance(operation, BucketTotal):
                (self._start if operation.end == "start" else self._finish)(operation)
            elif isinstance(operation, Update):
                seconds = self._prices.update(operation)
                self._update += seconds
                self._now += seconds
            elif isinstance(operation, Run):
                self._whole[operation.layer] = seconds = self._prices.whole_gradient(operation)
                self._backward += seconds
                self._now += seconds
            elif isinstance(operation, Cast | Accumulate | CheckGradients):
                self._now += self._prices.pass_over(operation)

    def _start(self, operation: BucketTotal) -> None:
        price = self._prices.sum(operation.sum)
        begin = price.begin
        if operation.sum.algorithm.adds and price.seconds and operation.sum not in self._at_rest:
            begin += self._prices.synchronize
        self._now += begin
        self._waits[operation.bucket] += begin
        self._sums[operation.bucket] += begin
        self._send(operation, self._now)

    def _send(self, operation: BucketTotal, at: float) -> None:
        price = self._prices.sum(operation.sum)
        self._sums[operation.bucket] += price.seconds
        self._ends[operation.sum] = self._link.send(at, price.seconds - price.work, price.in_order)

    def _finish(self, operation: BucketTotal) -> None:
        waited = max(0.0, self._ends.pop(operation.sum) - self._now) + self._prices.sum(operation.sum).work
        self._waits[operation.bucket] += waited
        self._now += waited

    def timeline(self) -> StepTimeline:
        passes = self._forward, self._backward
        return StepTimeline(self._now, *passes, self._waits, self._sums, self._update, self._whole)
