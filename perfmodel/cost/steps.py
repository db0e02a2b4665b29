"""Costs of a program's steps: layers are lowered one by one, and costs of equal layers are computed once.

A search simulates strategies that differ in a few layers. The operations of a layer depend on its own cut, on the
stored blocks of its inputs, and on the boxes that earlier layers have gathered from these inputs. If all of these are
equal, its cost is equal in any program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ...layers import Network
from ...lowering.operations import KernelSpec, Timing
from ...lowering.views import Value
from ...program.compiler import Alone
from ...program.program import Program, Segment, Step
from .pricing import Pricing
from .timeline import LayerCost, price_layer

__all__ = ["PricedSteps", "faster", "price_replicated", "price_steps"]

#: Per input, keys of `Value.gathered`.
_Gathered = tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class PricedSteps:
    """Costs of the steps of a program.

    Attributes
    ----------
    costs
        Costs by name of the segment: layers and redistributions in order of computation, and sums of gradients.
    backward
        Segments of the backward pass, without operations.
    gathered
        Boxes of values that layers gather: keys of `Value.gathered`.
    """

    costs: Mapping[str, LayerCost]
    backward: list[Segment]
    gathered: Mapping[Value, Mapping[Any, None]]


def price_steps(network: Network, program: Program, pricing: Pricing) -> PricedSteps:
    """Return the costs of the steps of a program, which need not be lowered."""
    return _Steps(network, program, pricing).priced()


def price_replicated(step: Step, pricing: Pricing) -> tuple[LayerCost, KernelSpec]:
    """Return the cost of a dense layer whose weight gradient is replicated, without that of this gradient, and the
    gradient's kernel.
    """
    options = {**step.options, "weight_gradient": "replicated"}
    alone = Alone(replace(_separated(step), options=options), trainable=True)
    cost = price_layer(alone.step, alone.forward, alone.backward(), pricing)
    assert alone.lowered.exposed is not None
    return cost, alone.lowered.exposed


def _separated(step: Step) -> Step:
    """Return a copy of the step whose values no other layer uses."""
    # One copy per value, also if the layer reads it several times.
    copies = {value: _copied(value) for value in (*step.inputs, step.output)}
    return step.under(step.parts, [copies[value] for value in step.inputs], copies[step.output])


def _copied(value: Value) -> Value:
    copy = Value(value.name, value.layout, value.dtype, value.rank, value.trainable, value.read)
    copy.stored = value.stored
    return copy


def faster(step: Step, pricing: Pricing, lower: Callable[[Step], Alone]) -> Step:
    """Return the step with the faster halo algorithm, if its layer has operations of its own for each algorithm and the
    faster one is to be chosen; else the step itself. `lower` lowers a step.
    """
    if not (pricing.best_halo and step.layer.lowers_each_halo and step.options.get("halo", "auto") == "auto"):
        return step
    steps = [replace(step, options={**step.options, "halo": halo}) for halo in ("pad", "overlap")]

    def seconds(variant: Step) -> float:
        alone = lower(variant)
        backward = alone.backward() if variant.output.trainable else []
        return price_layer(variant, alone.forward, backward, pricing).seconds

    return min(steps, key=seconds)


class _Known:
    """Layer under one cut; its costs are computed on demand."""

    def __init__(self, step: Step, gathered: _Gathered, pricing: Pricing) -> None:
        self._before = gathered
        self._step = faster(step, pricing, lambda variant: Alone(_separated(variant), True, pricing.overlaps, gathered))
        self._passes: dict[_Gathered | None, _Passes] = {}
        self._alone: Alone | None = self._lowered(pricing)
        self.gathered = _gathered(self._alone.step)
        self.is_loss = self._alone.lowered.loss is not None

    def _lowered(self, pricing: Pricing) -> Alone:
        return Alone(_separated(self._step), True, pricing.overlaps, self._before)

    def passes(self, gathered: _Gathered | None, pricing: Pricing) -> _Passes:
        """Return the cost of the layer, and what its backward pass adds for other layers (:class:`_Passes`).

        `gathered` holds the boxes of its inputs that other layers gather before its backward pass; None: the layer has
        no backward pass.
        """
        if gathered not in self._passes:
            alone, self._alone = self._alone or self._lowered(pricing), None  # operations need more memory than costs
            backward = [] if gathered is None else alone.backward(gathered)
            cost = price_layer(alone.step, alone.forward, backward, pricing)
            contributions = [len(value.contributions) for value in dict.fromkeys(alone.step.inputs)]
            self._passes[gathered] = _Passes(cost, contributions, _gathered(alone.step))
        return self._passes[gathered]


class _Passes(NamedTuple):
    """Cost of a layer; number of gradients that it computes per distinct input; all boxes gathered from its inputs."""

    cost: LayerCost
    contributions: list[int]
    gathered: _Gathered


def _gathered(step: Step) -> _Gathered:
    return tuple(tuple(value.gathered) for value in step.inputs)


class _Steps:
    """Cost computation for the steps of a program in the order in which they are lowered: forward, then backward."""

    def __init__(self, network: Network, program: Program, pricing: Pricing) -> None:
        node = network.outputs.get("loss")
        self._loss = None if node is None else network.names[node]
        self._program, self._pricing = program, pricing
        self._gathered: dict[Value, dict[Any, None]] = {}
        self._contributions: Counter[Value] = Counter()

    def priced(self) -> PricedSteps:
        known = [self._forward(step) for step in self._program.steps]
        # Keys in the order of computation: the loop below replaces the costs in reverse order.
        costs: dict[str, LayerCost] = {step.name: LayerCost() for step in self._program.steps}
        backward = []
        for step, layer in zip(reversed(self._program.steps), reversed(known)):
            summands = self._contributions[step.output]
            costs[step.name] = self._backward(step, layer, summands)
            if step.output.trainable and summands > 1:
                # The gradients of several readers are added before the layer's own backward pass.
                timing = Timing("sum", (step.output.layout.boxes.longest,) * summands)
                seconds = self._pricing.kernel(timing, None, True)
                costs[f"{step.name} (sum)"] = LayerCost(0.0, seconds, {"sum": seconds})
                backward.append(Segment(f"{step.name} (sum)"))
            backward.append(Segment(step.name))
        return PricedSteps(costs, backward, self._gathered)

    def _forward(self, step: Step) -> _Known:
        # Boxes that earlier layers have gathered are not exchanged again, so the cost depends on them.
        before = self._gathered_of(step)
        key, known = _key(step, before, self._pricing), self._pricing.known
        if key not in known:
            known[key] = _Known(step, before, self._pricing)
        outlined: _Known = known[key]
        self._add(step, outlined.gathered)
        return outlined

    def _backward(self, step: Step, layer: _Known, summands: int) -> LayerCost:
        # Without a gradient of its output, a layer has no backward pass; the loss needs none.
        trained = step.output.trainable and (summands > 0 or (step.name == self._loss and layer.is_loss))
        cost, contributions, gathered = layer.passes(self._gathered_of(step) if trained else None, self._pricing)
        if trained:
            for value, count in zip(dict.fromkeys(step.inputs), contributions):
                self._contributions[value] += count
            self._add(step, gathered)
        return cost

    def _gathered_of(self, step: Step) -> _Gathered:
        return tuple(tuple(self._gathered.get(value, ())) for value in step.inputs)

    def _add(self, step: Step, gathered: _Gathered) -> None:
        for value, keys in zip(step.inputs, gathered):
            if keys:
                self._gathered.setdefault(value, {}).update(dict.fromkeys(keys))


def _key(step: Step, gathered: _Gathered, pricing: Pricing) -> Hashable:
    """Return a key for the cost of a layer: layers with equal keys have equal costs."""
    output = step.output
    inputs = [
        # Equal indices: the layer reads one value several times.
        (step.inputs.index(v), v.layout.boxes, v.stored, v.dtype, v.trainable, keys)
        for v, keys in zip(step.inputs, gathered)
    ]
    flags = (step.frozen, tuple(step.parts.values()), *sorted(step.options.items()))
    return pricing.signature(step), output.layout.boxes, output.dtype, output.rank, flags, *inputs
