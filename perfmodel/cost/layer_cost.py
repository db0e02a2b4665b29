"""Times of one layer under one cut: kernels, halos and statistics, on the slowest rank.

All times in [s]. Terms are those of Dryden et al. 2019, Section V-A: forward ``C``, backward ``Cx`` and ``Cw``, halos
``SR``; communication overlaps with kernels as in the runtime (`docs/layers.md`)::

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
        Time from the start of the halo exchange until the last rank has its halo, without packing. With cut channels it
        includes the exchange of input channels that other ranks own, and the sums of their gradients.
    channel_forward, channel_backward
        Sending of partial sums of `y` to their owners, and of `dy` back.
    redistribution_forward, redistribution_backward
        Exchanges of changes of layout (`Redistribute`, `Flatten`, `GlobalAveragePool`).
    packing_forward, packing_backward
        Packing and unpacking of messages.
    strips
        Repeated computation of the boundary, if the halo of `x` is overlapped.
    statistics_forward, statistics_backward
        Blocking sums of statistics.
    overlaps
        Whether the exchange of the halo of `x` overlaps with the kernel.
    hides
        Whether the exchange of the halo of `dy` overlaps with the filter gradient.
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
        """Time of all kernels."""
        return self.forward + self.backward_data + self.backward_filter + self.strips * self.overlaps

    @property
    def exposed_forward(self) -> float:
        """The part of the exchange of `x` that does not overlap with computation."""
        return max(0.0, self.halo_forward - self.forward) if self.overlaps else self.halo_forward

    @property
    def exposed_backward(self) -> float:
        """The part of the backward exchange that does not overlap with computation."""
        return max(0.0, self.halo_backward - self.backward_filter) if self.hides else self.halo_backward

    @cached_property
    def forward_seconds(self) -> float:
        """Time from the start to the end of the layer's forward pass."""
        beside = self.packing_forward + self.channel_forward + self.redistribution_forward + self.statistics_forward
        return self.forward + self.strips * self.overlaps + self.exposed_forward + beside

    @cached_property
    def backward_seconds(self) -> float:
        """Time from the start to the end of the layer's backward pass."""
        beside = self.packing_backward + self.channel_backward + self.redistribution_backward + self.statistics_backward
        return self.backward_data + self.backward_filter + self.exposed_backward + beside

    @property
    def seconds(self) -> float:
        """Time of both passes, without all-reduces of parameters' gradients."""
        return self.forward_seconds + self.backward_seconds

    def with_halo(self, algorithm: str) -> LayerCost:
        """Return the cost with the halo algorithm ``"pad"`` or ``"overlap"``."""
        return replace(self, overlaps=algorithm == "overlap" and self.strips > 0)


class Pricing:
    """Times of kernels and links of a machine, from which layers are priced. Caches its results.

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
        #: Cached results: of layers under a cut (`steps.py`) and of sums of gradients (`simulate.py`).
        self.known: dict[Hashable, Any] = {}
        self._signatures: dict[Hashable, Hashable] = {}

    def signature(self, step: Step) -> Hashable:
        """Return a key that is equal for layers with the same operations on inputs of the same shapes, whatever their
        names.

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
        """Whether to lower the boundary strips, which ``halo = "auto"`` may choose."""
        return self.best_halo or self.wires.waits_for_network


def price_layer(step: Step, forward: Sequence[Operation], backward: Sequence[Operation], pricing: Pricing) -> LayerCost:
    """Return the times of the operations of one layer, or of a redistribution, in both passes."""
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
    """Sums of the operations' times by purpose [s]."""

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
                if operation.end == "start" and operation.sum.kind != "running statistics":  # no layer waits for these
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
            # Without a gradient of the inputs, the other operations (of an activation) count with the weights'
            # gradient.
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
