"""Dense layers whose gradients every rank computes of the whole batch: what that costs instead of a sum."""

from __future__ import annotations

from dataclasses import dataclass, replace

from halograd.perfmodel.cost.layer_cost import LayerCost, Pricing
from halograd.perfmodel.cost.timeline import Replication
from halograd.program.program import Program, Step

__all__ = ["Rows", "lighter", "replication", "rows_of"]


@dataclass(frozen=True)
class Rows:
    """What the ranks gather of one replicated layer.

    Attributes
    ----------
    group
        Ranks that hold the layer: the first so many.
    rows
        Rows that every one of them sends, padding included.
    activations, errors
        What every one of them sends [B].
    """

    group: int
    rows: int
    activations: int
    errors: int


def rows_of(program: Program, name: str) -> Rows:
    """Of a layer that a program exposes."""
    sums = program.exposed[name].sums
    activations, errors = sums["rows_gather"], sums["errors_gather"]
    assert activations is not None and errors is not None
    features = program.values[name].layout.shape[-1]
    rows = errors.sizes[0] // (features * program.target.dtype.itemsize)
    return Rows(activations.groups.members_each, rows, activations.sizes[0], errors.sizes[0])


def lighter(cost: LayerCost, rows: Rows, pricing: Pricing) -> LayerCost:
    """The cost of a layer that leaves its weight gradient for later: its rows are copied instead."""
    copy = pricing.wires.copy
    return replace(
        cost,
        backward_filter=0.0,
        packing_forward=cost.packing_forward + copy(rows.activations),
        packing_backward=cost.packing_backward + copy(rows.errors),
    )


def replication(step: Step, rows: Rows, nbytes: int, slots: int, pricing: Pricing) -> Replication:
    """What gathering, multiplying and updating take; `nbytes` [B] of parameters."""
    group, wires = range(rows.group), pricing.wires
    whole = (rows.group * rows.rows, step.inputs[0].layout.shape[-1])
    time = pricing.times.time(step.layer, [whole], pricing.dtype, True)
    return Replication(
        step.name,
        wires.gather(rows.group * rows.activations, group),
        wires.gather(rows.group * rows.errors, group),
        time.backward_filter,
        wires.update(nbytes, slots),
    )
