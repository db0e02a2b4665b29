"""Cost of one operation of a program on a machine: of a kernel, an exchange, a sum, or a pass over gradients.

Costs are times of the slowest rank [s]. `timeline.py` computes the overlap from the order of the operations.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from ...comm.sums import LARGEST_AT_ONCE
from ...layers import Add
from ...lowering.operations import ExchangeSpec, Operation, Sum, Timing
from ...program.gradients import Accumulate, BucketOperation, Cast, CheckGradients, Refresh, Update
from ...program.program import Step
from ...program.traffic import GroupSum, Move
from ..kernel_times import KernelTimes, LayerWork
from .wires import Wires

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
    in_order
        On the emulated network, where all sums travel at the same time: whether this sum ends no earlier than sums of
        its kind that started before it.
    """

    seconds: float
    work: float = 0.0
    begin: float = 0.0
    in_order: bool = False


class Pricing:
    """Cost model of operations on a machine. Local; caches its results.

    Parameters
    ----------
    wires
        Times of communication.
    times
        Times of kernels.
    dtype
        Dtype of the computation.
    best_halo
        Meaning of ``halo = "auto"``: the cheaper algorithm (True, for planning), or the runtime's choice, which
        overlaps if messages cross a network (False).
    """

    def __init__(self, wires: Wires, times: KernelTimes, dtype: str = "float32", best_halo: bool = False) -> None:
        self.wires, self.times, self.dtype, self.best_halo = wires, times, dtype, best_halo
        #: Cached results: of layers under a cut (`steps.py`), of buckets (`simulate.py`) and of sums.
        self.known: dict[Hashable, Any] = {}
        self._signatures: dict[Hashable, Hashable] = {}

    def signature(self, step: Step) -> Hashable:
        """Return a key that is equal for layers with the same operations and input shapes, whatever their names.

        The key of a user's own layer is unique: its settings may be functions, of which only the names are known.
        """
        shapes = tuple(value.layout.shape for value in step.inputs)
        key = step.layer, shapes
        if key not in self._signatures:
            ours = type(step.layer).__module__.startswith("halograd.")
            self._signatures[key] = LayerWork.of(*key).key if ours else key, step.output.layout.shape
        return self._signatures[key]

    @property
    def overlaps(self) -> bool:
        """Whether kernels of boundary strips are needed, because ``halo = "auto"`` may choose ``"overlap"``."""
        return self.best_halo or self.wires.waits_for_network

    @property
    def concurrent(self) -> bool:
        """Whether all sums travel at the same time (the emulated network), not one after the other."""
        return self.wires.emulated

    @property
    def overhead(self) -> float:
        """Time that the executor adds to each forward or backward of a layer [s]."""
        return self.wires.machine.runtime.layer

    @property
    def synchronize(self) -> float:
        """Time to wait for the device before a sum that starts during other work [s]."""
        return self.wires.machine.runtime.synchronize

    def kernel(self, timing: Timing, step: Step | None, trained: bool) -> float:
        """Return the time of a kernel of a layer, by its phase.

        Parameters
        ----------
        step
            The layer; None for sums of gradients of a value.
        trained
            Whether the layer has a backward pass.
        """
        times, inputs = self.times, timing.inputs
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

    def exchange(self, made: ExchangeSpec) -> tuple[float, float]:
        """Return the time of an exchange, until the last rank has received everything, and the time of packing [s]."""
        return self.wires.exchange(Move.of(made))

    def sum(self, total: Sum) -> SumPrice:
        """Return the times of a sum or gather on the slowest ranks."""
        key = (total.groups, tuple(total.sizes), total.method, total.codec, total.feedback)
        if key not in self.known:
            self.known[key] = self._sum(total)
        found: SumPrice = self.known[key]
        return found

    def _sum(self, total: Sum) -> SumPrice:
        wires, method = self.wires, total.algorithm
        nbytes, members = GroupSum.of(total.kind, total.groups, total.sizes).largest
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
            seconds = wires.collective(method.name, nbytes, members)
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

    def update(self, operation: Update, slots: int) -> float:
        """Return the time of the update of the largest part that a rank updates, with `slots` state arrays [s]."""
        return self.wires.update(operation.largest, slots)

    def pass_over(self, operation: BucketOperation | CheckGradients) -> float:
        """Return the time of an operation that reads all gradients once, with its sum over the ranks."""
        copies = _PASSES.get(type(operation), 0.0)
        return copies * self.wires.copy(operation.nbytes) + sum(self.sum(total).seconds for total in operation.sums())
