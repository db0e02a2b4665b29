"""Cost of one operation of a program on a machine: of a kernel, an exchange, a sum, or a pass over gradients.

Costs are times of the slowest rank [s]. `timeline.py` computes the overlap from the order of the operations.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...comm.sums import LARGEST_AT_ONCE
from ...layers import Add
from ...lowering.operations import ExchangeSpec, Operation, Sum, Timing
from ...program.gradients import Accumulate, BucketOperation, Cast, CheckGradients, Refresh, Update
from ...program.program import Step
from ...program.traffic import GroupSum, Move
from ..kernel_times import KernelTimes, LayerWork
from .network_model import ExchangeTimes, NetworkModel, Ranks

__all__ = ["Pricing", "SumPrice"]

#: Memory that operations on gradients pass over, in copies of the gradients: one of 16 and 32 bits is read and the
#: other written; two arrays are read and one written; one is read.
_PASSES: dict[type[Operation], float] = {Cast: 6 / 8, Refresh: 6 / 8, Accumulate: 3 / 2, CheckGradients: 1 / 2}
#: Layer whose kernel adds the gradients of several readers.
_ADD = Add()


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
    busy
        The part of `seconds` in which the adapters of a node are busy; 0 if the machine has no topology.
    ranks
        Number of ranks that wait for each other.
    in_order
        On the emulated network, where all sums travel at the same time: whether this sum ends no earlier than sums of
        its kind that started before it.
    """

    seconds: float
    work: float = 0.0
    begin: float = 0.0
    in_order: bool = False
    busy: float = 0.0
    ranks: int = 1


class Pricing:
    """Cost model of operations on a machine. Local; caches its results.

    Parameters
    ----------
    network_model
        Times of communication.
    times
        Times of kernels.
    dtype
        Dtype of the computation.
    best_halo
        Meaning of ``halo = "auto"``: the cheaper algorithm (True, for planning), or the runtime's choice, which
        overlaps if messages cross a network (False).
    """

    def __init__(
        self, network_model: NetworkModel, times: KernelTimes, dtype: str = "float32", best_halo: bool = False
    ) -> None:
        self.network_model, self.times, self.dtype, self.best_halo = network_model, times, dtype, best_halo
        #: Cached results: of layers under a cut (`steps.py`), of buckets (`simulate.py`) and of sums.
        self.known: dict[Hashable, Any] = {}
        self._varied = network_model.machine.variation.devices > 0
        self._signatures: dict[Hashable, Hashable] = {}

    def signature(self, step: Step) -> Hashable:
        """Return a key that is equal for layers with the same operations and input shapes, whatever their names.

        The key of a user's own layer is unique: its settings may be functions, of which only the names are known.
        """
        shapes = tuple(value.layout.shape for value in step.inputs)
        key = step.layer, shapes
        if key not in self._signatures:
            # Settings of halograd's layers are data, so their keys are complete.
            ours = type(step.layer).__module__.startswith("halograd.")
            self._signatures[key] = LayerWork.of(*key).key if ours else key, step.output.layout.shape
        return self._signatures[key]

    @property
    def overlaps(self) -> bool:
        """Whether kernels of boundary strips are needed, because ``halo = "auto"`` may choose ``"overlap"``."""
        return self.best_halo or self.network_model.waits_for_network

    @property
    def concurrent(self) -> bool:
        """Whether all sums travel at the same time (the emulated network), not one after the other."""
        return self.network_model.emulated

    @property
    def overhead(self) -> float:
        """Time that the executor adds to each forward or backward of a layer [s]."""
        return self.network_model.machine.runtime.layer

    @property
    def synchronize(self) -> float:
        """Time to wait for the device before a sum that starts during other work [s]."""
        return self.network_model.machine.runtime.synchronize

    @cached_property
    def jitter(self) -> float:
        """Standard deviation of the time of a kernel, as a fraction of its mean."""
        return self.network_model.machine.variation.kernels

    def straggling(self, squares: float, ranks: int) -> float:
        """Return the expected time by which the last of `ranks` ranks exceeds the mean [s].

        `squares` is the sum of the squared times of the kernels since the ranks last waited for each other [s^2].
        """
        return self.jitter * self.network_model.machine.variation.last(ranks) * math.sqrt(squares) if squares else 0.0

    def kernel(self, timing: Timing, step: Step | None, trained: bool) -> float:
        """Return the time of a kernel of a layer on the slowest device [s].

        Parameters
        ----------
        timing
            Phase of the kernel, and the shapes of its blocks.
        step
            The layer; None for sums of gradients of a value.
        trained
            Whether the layer has a backward pass.
        """
        seconds = timing.share * self._kernel(timing, step, trained)
        if self._varied and step is not None:
            seconds *= self.network_model.machine.variation.slowdown(step.output.layout.boxes.placed)
        return seconds

    def _kernel(self, timing: Timing, step: Step | None, trained: bool) -> float:
        """Return the mean time of a kernel over equal devices [s]."""
        times, inputs = self.times, timing.inputs
        if timing.phase == "copy":  # it has the price of what it copies
            return 0.0
        if timing.phase == "sum":
            return times.time(_ADD, inputs, self.dtype, False).forward
        assert step is not None
        if timing.phase == "boundary":
            return times.time(step.layer, inputs, self.dtype, False, outputs=timing.outputs).forward
        gradient = any(value.trainable for value in step.inputs)
        time = times.time(
            step.layer,
            inputs,
            self.dtype,
            trained,
            input_gradient=gradient,
            filters=timing.filters,
            outputs=timing.outputs,
            options=step.options if step.output.layout.boxes.placed > 1 else None,
        )
        seconds: float = getattr(time, timing.phase)
        if timing.phase == "backward_filter" and not gradient:
            seconds += time.backward_data  # of an activation, which is a part of the layer
        return seconds

    def exchange(self, exchange: ExchangeSpec) -> ExchangeTimes:
        """Return the times of an exchange [s]."""
        return self.network_model.exchange(Move.of(exchange))

    def sum(self, total: Sum) -> SumPrice:
        """Return the times of a sum or gather on the slowest ranks."""
        key = (total.groups, tuple(total.sizes), total.method, total.codec, total.feedback)
        if key not in self.known:
            self.known[key] = self._sum(total)
        price: SumPrice = self.known[key]
        return price

    def _sum(self, total: Sum) -> SumPrice:
        sums = GroupSum.of(total.kind, total.groups, total.sizes)
        nbytes, members = sums.largest
        if len(members) < 2 or not nbytes:
            return SumPrice(0.0)
        groups = self.network_model.groups_at_once(sums.groups, members)
        return replace(self._group_sum(total, nbytes, members, groups), ranks=len(members))

    def _group_sum(self, total: Sum, nbytes: int, members: Ranks, groups: int) -> SumPrice:
        """Return the times of one of `groups` equal sums on a node, of `nbytes` [B] over the ranks `members`."""
        network_model, method = self.network_model, total.algorithm
        # Small sums have their own places in shared memory; large ones share a stage, hierarchical sums a thread.
        in_order = method.adds and network_model.emulated and (nbytes > LARGEST_AT_ONCE or not method.on_devices)
        if method.by_nodes:
            parts = network_model.sum_by_nodes(nbytes, members)
            # The progress thread makes both copies too, so nothing delays the computation.
            if method.in_background:
                return SumPrice(parts.seconds, in_order=in_order)
            after = parts.addition + parts.across
            return SumPrice(after + parts.way_back, parts.way_back, parts.deposit, in_order)
        if not (method.adds and method.gathers):
            # An all-reduce was measured, of which a reduce-scatter or all-gather is one half.
            work = network_model.sum_work(nbytes, members) / 2
            seconds = max(work, network_model.collective(method.name, nbytes, members, groups))
            busy = network_model.busy(method.name, nbytes, members, groups)
            return SumPrice(seconds, work, in_order=in_order, busy=busy)
        codec = method.codec
        payload = codec.payload(nbytes)
        # Sums back to back, as they were measured, may be faster than the end of one sum after other work.
        work = network_model.sum_work(payload, members)
        seconds = max(work, network_model.sum(payload, members, groups))
        busy = network_model.busy("allreduce", payload, members, groups)
        if codec.identity:
            return SumPrice(seconds, work, in_order=in_order, busy=busy)
        one_pass = network_model.copy(nbytes) / 2  # a copy reads and writes
        back, begin = codec.decoding * one_pass, codec.encoding(total.feedback) * one_pass
        return SumPrice(seconds + back, work + back, begin, in_order, busy)

    def update(self, operation: Update, slots: int) -> float:
        """Return the time of the update of the largest part that a rank updates, with `slots` state arrays [s]."""
        return self.network_model.update(operation.largest, slots)

    def pass_over(self, operation: BucketOperation | CheckGradients) -> float:
        """Return the time of an operation that passes over gradients, with its sums over the ranks [s]."""
        copies = _PASSES.get(type(operation), 0.0)
        return copies * self.network_model.copy(operation.nbytes) + sum(
            self.sum(total).seconds for total in operation.sums()
        )
