"""Passes over the operations of layers: functions from program to program, by name.

A strategy names them (`Strategy.passes`), so what is run is priced, counted, placed in memory and listed. They are
applied when the layers are lowered. The pass that places the operations on gradients follows
(`halograd.program.gradients`): its settings are the scheme and the buckets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from halograd.errors import UserError
from halograd.registry import Registry
from halograd.schema import STRICT

from ..lowering.operations import Operation, Run, Total, Transfer
from .program import Program, Segment

__all__ = ["PASSES", "Overlap", "Pass", "apply_passes"]


class Pass(ABC):
    """Transformation of a program. Subclasses are frozen dataclasses, whose fields are their settings.

    A pass sees the program of one rank. It must make the same changes on all ranks, so that all issue their exchanges
    and sums in one order: it may depend on operations and buffers, not on the extents of this rank's blocks.
    """

    name: ClassVar[str] = ""

    @abstractmethod
    def __call__(self, program: Program) -> Program:
        """Return the transformed program; the given one stays as it is. Local."""


#: Passes by name.
PASSES: Registry[Pass] = Registry("pass", Pass, key="strategy.passes")  # type: ignore[type-abstract]


def apply_passes(program: Program, names: Sequence[str]) -> Program:
    """Return the program after all named passes, in this order. Local.

    Raises
    ------
    UserError
        If there is no such pass, or it returns no program.
    """
    for name in names:
        made = PASSES.make(name)(program)
        if not isinstance(made, Program):
            raise UserError(f"strategy.passes: {name}: expected it to return a Program, got {type(made).__name__}")
        program = made
    return program


@PASSES.register
@dataclass(frozen=True)
class Overlap(Pass):
    """Early starts and late finishes of exchanges and sums, as far as the buffers of other operations permit.

    A start moves before operations that use neither its source nor its target; a finish moves behind operations that do
    not use its target. Exchanges and sums keep their order among each other, so it is the same on all ranks. The bits
    do not change; messages travel behind more computation, and their buffers are held for longer.
    """

    __pydantic_config__ = STRICT
    name: ClassVar[str] = "overlap"

    def __call__(self, program: Program) -> Program:
        return replace(program, forward=_moved(program.forward), backward=_moved(program.backward))


def _moved(segments: Sequence[Segment]) -> list[Segment]:
    """Return one pass with its starts moved to the front and its finishes to the back."""
    places = [(i, operation) for i, segment in enumerate(segments) for operation in segment.operations]
    for at in range(len(places)):  # the operations before `at` are final
        while at and _may_swap(places[at - 1][1], places[at][1], "start"):
            # The start goes to the segment of the operation that it passes.
            (i, before), (_, start) = places[at - 1], places[at]
            places[at - 1 : at + 1] = [(i, start), (i, before)]
            at -= 1
    for at in reversed(range(len(places))):
        while at + 1 < len(places) and _may_swap(places[at + 1][1], places[at][1], "finish"):
            (_, finish), (i, behind) = places[at], places[at + 1]
            places[at : at + 2] = [(i, behind), (i, finish)]
            at += 1
    operations: list[list[Operation]] = [[] for _ in segments]
    for i, operation in places:
        operations[i].append(operation)
    return [replace(segment, operations=own) for segment, own in zip(segments, operations)]


def _may_swap(other: Operation, end: Operation, which: str) -> bool:
    """Return whether a start may move before `other`, or a finish behind it."""
    if not isinstance(end, Transfer | Total) or end.end != which or end.when != other.when:
        return False
    if not isinstance(other, Run) or other.guarded or list(other.sums()):
        return False
    return not _arrays(other) & _arrays(end)


def _arrays(operation: Operation) -> set[object]:
    """Return what tells the arrays of an operation from others: outside the arena their names, else their buffers."""
    return {buffer.place or buffer for buffer in operation.buffers()}
