"""Costs of a program's steps: layers are lowered one by one, and each is priced once per set of circumstances.

A search simulates strategies that differ in a few layers. The operations of a layer depend on its own cut, on the
stored blocks of its inputs, and on the boxes of them that earlier layers have gathered. If all of these are equal, its
cost is equal in any program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ...layers import Add, Network
from ...lowering.operations import Operation, Run
from ...lowering.views import Value
from ...program.compiler import Alone
from ...program.program import Program, Segment, Step
from .layer_cost import LayerCost, Pricing, price_layer

__all__ = ["apart", "price_program", "price_steps"]

#: Operations that add the gradients of several readers.
_ADD = Add()

#: Per input, keys of `Value.gathered`.
_Gathered = tuple[tuple[Any, ...], ...]


def price_steps(
    network: Network, program: Program, pricing: Pricing
) -> tuple[dict[str, LayerCost], Mapping[Value, Collection[Any]]]:
    """Price the steps of a program, which need not have been lowered.

    Returns
    -------
    Costs by name, in order of computation; and the boxes of values that layers gather: keys of `Value.gathered`.
    """
    values, node = _Values(), network.outputs.get("loss")
    known = _forward(program, pricing, values)
    loss = None if node is None else network.names[node]
    return _backward(program, pricing, values, known, loss), values.gathered


def price_program(
    program: Program, pricing: Pricing
) -> tuple[dict[str, LayerCost], Mapping[Value, Collection[Any]]]:
    """Price the operations of a compiled program, layer by layer, as passes have left them.

    Returns
    -------
    As :func:`price_steps`.
    """
    forward, backward = (_by_layer(segments) for segments in (program.forward, program.backward))
    costs = {}
    for step in program.steps:
        cost = price_layer(step, forward.get(step.name, []), backward.get(step.name, []), pricing)
        for operation in backward.get(f"{step.name} (sum)", []):
            assert isinstance(operation, Run)
            summands = sum(name != "total" for name in operation.kernel.views)
            shapes = [step.output.layout.boxes.longest] * summands
            seconds = pricing.times.time(_ADD, shapes, pricing.dtype, False).forward
            cost = replace(cost, backward_data=cost.backward_data + seconds)
        costs[step.name] = cost
    return costs, {value: tuple(value.gathered) for value in program.values.values()}


def _by_layer(segments: Sequence[Segment]) -> dict[str, list[Operation]]:
    found: dict[str, list[Operation]] = {}
    for operation in (operation for segment in segments for operation in segment.operations):
        found.setdefault(operation.layer, []).append(operation)
    return found


def apart(step: Step) -> Step:
    """Return a copy of the step whose values no other layer uses."""
    copies = {value: _copied(value) for value in (*step.inputs, step.output)}
    return step.under(step.parts, [copies[value] for value in step.inputs], copies[step.output])


def _copied(value: Value) -> Value:
    copy = Value(value.name, value.layout, value.dtype, value.rank, value.trainable, value.read)
    copy.stored = value.stored
    return copy


class _Known:
    """A layer under one cut, priced on demand."""

    def __init__(self, step: Step, gathered: _Gathered, pricing: Pricing) -> None:
        self._step, self._before = step, gathered
        self._passes: dict[_Gathered | None, _Passes] = {}
        self._alone: Alone | None = self._lowered(pricing)
        self.gathered = _gathered(self._alone.step)
        self.is_loss = self._alone.lowered.loss is not None

    def _lowered(self, pricing: Pricing) -> Alone:
        return Alone(apart(self._step), True, pricing.overlaps, self._before)

    def passes(self, gathered: _Gathered | None, pricing: Pricing) -> _Passes:
        """Price the layer. `gathered` holds the boxes of its inputs that other layers gather before its backward pass;
        None: it has no backward pass.
        """
        if gathered not in self._passes:
            alone, self._alone = self._alone or self._lowered(pricing), None  # operations need more memory than costs
            backward = [] if gathered is None else alone.backward(gathered)
            cost = price_layer(alone.step, alone.forward, backward, pricing)
            made = [len(value.contributions) for value in dict.fromkeys(alone.step.inputs)]
            self._passes[gathered] = _Passes(cost, made, _gathered(alone.step))
        return self._passes[gathered]


class _Passes(NamedTuple):
    """Cost of a layer; gradients that it makes, per input (an input that is read twice counts once); all gathered
    boxes.
    """

    cost: LayerCost
    contributions: list[int]
    gathered: _Gathered


def _gathered(step: Step) -> _Gathered:
    return tuple(tuple(value.gathered) for value in step.inputs)


class _Values:
    """State of the values of a program during pricing."""

    def __init__(self) -> None:
        self.gathered: dict[Value, dict[Any, None]] = {}
        self.contributions: Counter[Value] = Counter()

    def gathered_of(self, step: Step) -> _Gathered:
        return tuple(tuple(self.gathered.get(value, ())) for value in step.inputs)

    def add(self, step: Step, gathered: _Gathered) -> None:
        for value, keys in zip(step.inputs, gathered):
            if keys:
                self.gathered.setdefault(value, {}).update(dict.fromkeys(keys))


def _forward(program: Program, pricing: Pricing, values: _Values) -> list[_Known]:
    found: list[_Known] = []
    for step in program.steps:
        before = values.gathered_of(step)
        key = _key(step, before, pricing)
        if key not in pricing.known:
            pricing.known[key] = _Known(step, before, pricing)
        found.append(pricing.known[key])
        values.add(step, found[-1].gathered)
    return found


def _key(step: Step, gathered: _Gathered, pricing: Pricing) -> Hashable:
    """Return the circumstances on which the cost of a layer depends: equal keys have equal costs."""
    output = step.output
    inputs = [
        (step.inputs.index(v), v.layout.boxes, v.stored, v.dtype, v.trainable, keys)
        for v, keys in zip(step.inputs, gathered)
    ]
    flags = (step.frozen, tuple(step.parts.values()), *sorted(step.options.items()))
    return pricing.signature(step), output.layout.boxes, output.dtype, output.rank, flags, *inputs


def _backward(
    program: Program, pricing: Pricing, values: _Values, known: Sequence[_Known], loss: str | None
) -> dict[str, LayerCost]:
    costs = []
    for step, layer in zip(reversed(program.steps), reversed(known)):
        summands = values.contributions[step.output]
        trained = step.output.trainable and (summands > 0 or (step.name == loss and layer.is_loss))
        cost, contributions, gathered = layer.passes(values.gathered_of(step) if trained else None, pricing)
        if trained:
            values.contributions.update(dict(zip(dict.fromkeys(step.inputs), contributions)))
            values.add(step, gathered)
        if trained and summands > 1:
            # The gradients of several readers are added before the layer's own backward pass.
            shape = step.output.layout.boxes.longest
            time = pricing.times.time(_ADD, [shape] * summands, pricing.dtype, False)
            cost = replace(cost, backward_data=cost.backward_data + time.forward)
        costs.append(cost)
    return {step.name: cost for step, cost in zip(program.steps, reversed(costs))}
