"""What one layer costs under one cut: kernels, halos, statistics, on the rank that has most to do.

All times in [s]. Terms are those of Dryden et al. 2019, Section V-A: forward ``C``, backward ``Cx`` and ``Cw``, halos
``SR``; what hides behind what follows the runtime (`docs/layers.md`)::

    pad        forward   pack | halo of x | unpack | kernel
    overlap    forward   pack | max(halo of x, kernel) | unpack | boundary strips again
    both       backward  pack | max(halo of dy, filter gradient) | unpack | data gradient
    channels   forward   pack | x | unpack | kernel | sum of y
               backward  dy | data gradient | max(sum of dx, filter gradient)
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ...lowering.operations import Operation, Run, Timing, Total, Transfer
from ...program.program import Step
from ...program.traffic import GroupSum, Move
from ..kernel_times import KernelTimes, LayerTime, LayerWork
from .wires import Wires

__all__ = ["LayerCost", "Pricing", "price_layer"]


@dataclass(frozen=True)
class LayerCost:
    """Times of one layer in one step [s].

    Attributes
    ----------
    forward, backward_data, backward_filter
        Kernels.
    halo_forward, halo_backward
        From the start of the halo exchange until the last rank has it, packing left out. Where channels are cut,
        with the input channels that other ranks own, and the sums of their gradients.
    channel_forward, channel_backward
        Partial sums of `y` to their owners, and `dy` from there.
    redistribution_forward, redistribution_backward
        The same of changes of layout (`Redistribute`, `Flatten`, `GlobalAveragePool`).
    packing_forward, packing_backward
        Into and out of messages.
    strips
        The boundary computed again, if the halo of `x` is overlapped.
    statistics_forward, statistics_backward
        Sums that are waited for.
    overlaps
        Whether the halo of `x` travels behind the kernel.
    hides
        Whether the halo of `dy` travels behind the filter gradient.
    """

    forward: float = 0.0
    backward_data: float = 0.0
    backward_filter: float = 0.0
    halo_forward: float = 0.0
    halo_backward: float = 0.0
    channel_forward: float = 0.0
    channel_backward: float = 0.0
    redistribution_forward: float = 0.0
    redistribution_backward: float = 0.0
    packing_forward: float = 0.0
    packing_backward: float = 0.0
    strips: float = 0.0
    statistics_forward: float = 0.0
    statistics_backward: float = 0.0
    overlaps: bool = False
    hides: bool = False

    @property
    def compute(self) -> float:
        """All kernels."""
        return self.forward + self.backward_data + self.backward_filter + self.strips * self.overlaps

    @property
    def exposed_forward(self) -> float:
        """The part of the exchange of `x` that nothing hides."""
        return max(0.0, self.halo_forward - self.forward) if self.overlaps else self.halo_forward

    @property
    def exposed_backward(self) -> float:
        """The part of the backward exchange that nothing hides."""
        return max(0.0, self.halo_backward - self.backward_filter) if self.hides else self.halo_backward

    @cached_property
    def forward_seconds(self) -> float:
        """From the layer's start to its end, forward."""
        beside = self.packing_forward + self.channel_forward + self.redistribution_forward + self.statistics_forward
        return self.forward + self.strips * self.overlaps + self.exposed_forward + beside

    @cached_property
    def backward_seconds(self) -> float:
        """The same, backward."""
        beside = self.packing_backward + self.channel_backward + self.redistribution_backward + self.statistics_backward
        return self.backward_data + self.backward_filter + self.exposed_backward + beside

    @property
    def seconds(self) -> float:
        """Both; all-reduces of parameters not included."""
        return self.forward_seconds + self.backward_seconds

    def with_halo(self, algorithm: str) -> LayerCost:
        """With the halo algorithm ``"pad"`` or ``"overlap"``."""
        return replace(self, overlaps=algorithm == "overlap" and self.strips > 0)


class Pricing:
    """What prices layers: links and kernels of a machine. Remembers what it was asked.

    Parameters
    ----------
    wires
        Times of communication.
    times
        Times of kernels.
    dtype
        Of the computation.
    best_halo
        What ``halo = "auto"`` means: the cheaper algorithm (True, for planning), or that of the runtime: overlapped
        where messages cross a network (False).
    """

    def __init__(self, wires: Wires, times: KernelTimes, dtype: str = "float32", best_halo: bool = False) -> None:
        self.wires, self.times, self.dtype, self.best_halo = wires, times, dtype, best_halo
        #: What is priced already: layers under a cut (`steps.py`), sums of gradients (`simulate.py`).
        self.known: dict[Hashable, Any] = {}
        self._signatures: dict[Hashable, Hashable] = {}

    def signature(self, step: Step) -> Hashable:
        """Return what is equal for layers that do the same on inputs of the same shapes, whatever their names.

        A layer of the user's own is like no other: its settings may be functions, of which the names are known only.
        """
        shapes = tuple(value.layout.shape for value in step.inputs)
        key = step.layer, shapes
        if key not in self._signatures:
            ours = type(step.layer).__module__.startswith("halograd.")
            self._signatures[key] = LayerWork.of(*key).key if ours else key, step.output.layout.shape
        return self._signatures[key]

    @property
    def overlaps(self) -> bool:
        """Whether to lower what ``halo = "auto"`` may choose: boundary strips."""
        return self.best_halo or self.wires.waits_for_network


def price_layer(step: Step, forward: Sequence[Operation], backward: Sequence[Operation], pricing: Pricing) -> LayerCost:
    """Return what the operations of one layer, or of a redistribution, take in both passes."""
    price = _Price(step, pricing, bool(backward))
    first, second = price.of(forward, "forward"), price.of(backward, "backward")
    more = pricing.wires.machine.runtime.layer
    cost = LayerCost(
        first["kernels"] + more,
        second["data"] + (more if backward else 0.0),
        second["filter"],
        **{f"{term}_forward": first[term] for term in _TERMS},
        **{f"{term}_backward": second[term] for term in _TERMS},
        strips=first["strips"],
        overlaps=bool(first["overlaps"]),
        hides=bool(second["overlaps"]),
    )
    if pricing.best_halo and cost.strips and step.options.get("halo", "auto") == "auto":
        return min((cost.with_halo("pad"), cost.with_halo("overlap")), key=lambda c: c.forward_seconds)
    return cost


_TERMS: tuple[str, ...] = ("halo", "channel", "redistribution", "packing", "statistics")
_KINDS = {"halo": "halo", "channel": "channel", "redistribute": "redistribution"}


class _Price:
    """Times of operations by what they are for [s]."""

    def __init__(self, step: Step, pricing: Pricing, trained: bool) -> None:
        self.step, self.pricing, self.trained = step, pricing, trained
        self.cut = step.output.layout.boxes.placed > 1
        self.gradient = any(value.trainable for value in step.inputs)

    def of(self, operations: Sequence[Operation], way: str) -> dict[str, float]:
        found = dict.fromkeys((*_TERMS, "kernels", "strips", "data", "filter", "overlaps"), 0.0)
        travelling: set[object] = set()
        for operation in operations:
            if isinstance(operation, Transfer):
                self._exchange(operation, travelling, found)
            elif isinstance(operation, Total):
                if operation.end == "start" and operation.sum.kind != "running statistics":  # no layer waits for those
                    total = GroupSum.of(operation.sum.kind, operation.sum.groups, operation.sum.sizes)
                    found["statistics"] += self.pricing.wires.sum(*total.largest)
            elif isinstance(operation, Run) and operation.timing is not None and operation.when != "evaluation":
                self._kernel(operation.timing, way, bool(travelling), found)
        return found

    def _exchange(self, operation: Transfer, travelling: set[object], found: dict[str, float]) -> None:
        made = operation.exchange
        if operation.end == "finish":
            travelling.discard(made)
            return
        move = Move(made.sources, made.targets, made.itemsize, made.kind)
        seconds, packing = self.pricing.wires.exchange(move)
        found[_KINDS[made.kind]] += seconds
        found["packing"] += packing
        if made.kind == "halo":
            travelling.add(made)

    def _kernel(self, timing: Timing, way: str, behind: bool, found: dict[str, float]) -> None:
        if way == "forward":
            name = "strips" if found["kernels"] else "kernels"
            found[name] += self._seconds(timing, own=name == "kernels").forward
        else:
            time = self._seconds(timing, own=True)
            # Of a layer without gradient of its inputs the rest (of an activation) goes with that of the weights.
            found["data"] += time.backward_data * (timing.phase == "backward_data" or not self.gradient)
            found["filter"] += time.backward_filter * (timing.phase == "backward_filter")
        hidden = timing.phase == "backward_filter" or way == "forward"
        found["overlaps"] = max(found["overlaps"], float(behind and hidden))

    def _seconds(self, timing: Timing, own: bool) -> LayerTime:
        times, layer, dtype = self.pricing.times, self.step.layer, self.pricing.dtype
        inputs = list(timing.inputs)
        if not own:  # a strip
            return times.time(layer, inputs, dtype, False, outputs=timing.outputs)
        return times.time(
            layer,
            inputs,
            dtype,
            self.trained,
            input_gradient=self.gradient,
            filters=timing.filters,
            outputs=timing.outputs,
            options=self.step.options if self.cut else None,
        )
