"""Passes over the operations of layers: functions from program to program, by name.

A strategy names them (`Strategy.passes`), so cost, traffic, memory and listing are those of the program that runs. They
are applied when the layers are lowered. The pass that places the operations on gradients follows
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

from ..lowering.operations import KernelSpec, Operation, Run, Total, Transfer
from ..lowering.views import Buffer
from .program import Program, Segment

__all__ = ["PASSES", "Fuse", "Overlap", "Pass", "apply_passes"]


class Pass(ABC):
    """Transformation of a program. Subclasses are frozen dataclasses, whose fields are their settings.

    A pass sees the program of one rank. All ranks must issue their exchanges and sums in one order, those of gradients
    included, which are placed later: the order may not depend on this rank's blocks.
    """

    name: ClassVar[str] = ""

    @abstractmethod
    def __call__(self, program: Program) -> Program:
        """Return the transformed program; `program` is not changed. Local."""


#: Passes by name.
PASSES: Registry[Pass] = Registry("pass", Pass, key="strategy.passes")


def apply_passes(program: Program, names: Sequence[str]) -> Program:
    """Return the program after all named passes, in this order. Local.

    Raises
    ------
    UserError
        If a name is unknown, or its pass returns no program.
    """
    for name in names:
        made = PASSES.make(name)(program)
        if not isinstance(made, Program):
            raise UserError(f"strategy.passes: {name}: expected it to return a Program, got {type(made).__name__}")
        program = made
    return program


@PASSES.register
@dataclass(frozen=True)
class Fuse(Pass):
    """Pass that fuses activations with the kernels before them: a convolution or a sum and a ReLU become one kernel.

    An activation is fused if the gradient needs its output only, if one kernel alone writes its input and can apply the
    function (`KernelSpec.fuse`), and if nothing else reads the input. The network does not change. Norms with an
    activation compute the gradient of both in one kernel, so they are made only by `activation=` of the layer.
    """

    __pydantic_config__ = STRICT
    name: ClassVar[str] = "fuse"

    def __call__(self, program: Program) -> Program:
        users: dict[Buffer, list[Operation]] = {}
        for operation in program:
            held = operation.held() if isinstance(operation, Run) else operation.buffers()
            for buffer in set(held):
                users.setdefault(buffer, []).append(operation)
        read = {v.region.view.buffer for v in program.values.values() if v.read or v.kept}
        kernels: dict[KernelSpec, KernelSpec] = {}
        fused: set[Operation] = set()
        for operation in (o for segment in program.forward for o in segment.operations):
            if not isinstance(operation, Run) or operation.kernel.function is None:
                continue
            x, y = operation.kernel.views["x"], operation.kernel.views["y"]
            if x is None or x.buffer in read or x.buffer.kept or x.buffer.place is not None:
                continue
            writer = _only_writer(users[x.buffer], operation.kernel)
            if writer is None or writer.kernel in kernels or writer.kernel.views["y"] != x:
                continue
            function = operation.kernel.function
            assert writer.kernel.fuse is not None
            made = writer.kernel.fuse(function)
            kernels[writer.kernel] = replace(
                writer.kernel, make=made, views={**writer.kernel.views, "y": y}, fuse=None
            )
            kernels[operation.kernel] = replace(operation.kernel, views={**operation.kernel.views, "x": y})
            fused.add(operation)
        forward, backward = (
            [replace(segment, operations=_with(segment.operations, kernels, fused)) for segment in segments]
            for segments in (program.forward, program.backward)
        )
        return replace(program, forward=forward, backward=backward)


def _only_writer(users: Sequence[Operation], reader: KernelSpec) -> Run | None:
    """Return the only operation that uses an array in addition to `reader`; None if it cannot be fused."""
    others = [o for o in users if not (isinstance(o, Run) and o.kernel is reader)]
    if len(others) != 1 or not isinstance(others[0], Run):
        return None
    writer = others[0]
    if writer.kernel.fuse is None or writer.method is not None or writer.guarded or writer.when is not None:
        return None
    return writer


def _with(
    operations: Sequence[Operation], kernels: dict[KernelSpec, KernelSpec], fused: set[Operation]
) -> list[Operation]:
    """Return `operations` without the `fused` ones, and with replaced kernels."""
    return [
        replace(o, kernel=kernels[o.kernel]) if isinstance(o, Run) and o.kernel in kernels else o
        for o in operations
        if o not in fused
    ]


@PASSES.register
@dataclass(frozen=True)
class Overlap(Pass):
    """Pass that starts exchanges and sums earlier, and finishes them later, if the arrays of other operations permit.

    A start moves before operations that use neither its source nor its target; a finish moves after operations that do
    not use its target. Neither moves past operations with conditions or sums. The results do not change in any bit;
    buffers of messages are held for longer. How far a message moves depends on the arrays of this rank's block. The
    order of all exchanges and sums does not: they do not move past each other, nor past a layer at which sums of
    gradients may start or finish.
    """

    __pydantic_config__ = STRICT
    name: ClassVar[str] = "overlap"

    def __call__(self, program: Program) -> Program:
        trained = {step.name for step in program.steps if step.parameters}
        # Operations on gradients stand before a layer in the forward pass, and after it in the backward pass.
        closed = [segment.name in trained for segment in program.forward]
        forward = _moved(program.forward, closed)
        closed = [False, *(segment.name in trained for segment in program.backward[:-1])]
        return replace(program, forward=forward, backward=_moved(program.backward, closed))


@dataclass(frozen=True)
class _Placed:
    """Operation in a segment, with the arrays that it uses."""

    segment: int
    operation: Operation
    arrays: frozenset[object]

    def may_pass(self, other: _Placed, end: str, closed: Sequence[bool]) -> bool:
        """Return whether this start may move before `other`, or this finish after it."""
        one, run = self.operation, other.operation
        if not isinstance(one, Transfer | Total) or one.end != end or one.when != run.when:
            return False
        if not isinstance(run, Run) or run.guarded or any(True for _ in run.sums()):
            return False
        first, last = sorted((self.segment, other.segment))
        return not any(closed[first + 1 : last + 1]) and not self.arrays & other.arrays


def _moved(segments: Sequence[Segment], closed: Sequence[bool]) -> list[Segment]:
    """Return the segments of a pass with earlier starts and later finishes.

    ``closed[i]``: nothing moves between segments ``i - 1`` and ``i``.
    """
    places = [
        _Placed(i, operation, frozenset(buffer.place or buffer for buffer in operation.buffers()))
        for i, segment in enumerate(segments)
        for operation in segment.operations
    ]
    for at in range(len(places)):
        while at and places[at].may_pass(places[at - 1], "start", closed):
            before = places[at - 1]
            # The start goes to the segment of the operation that it passes.
            places[at - 1], places[at] = replace(places[at], segment=before.segment), before
            at -= 1
    for at in reversed(range(len(places))):
        while at + 1 < len(places) and places[at].may_pass(places[at + 1], "finish", closed):
            behind = places[at + 1]
            places[at + 1], places[at] = replace(places[at], segment=behind.segment), behind
            at += 1
    operations: list[list[Operation]] = [[] for _ in segments]
    for placed in places:
        operations[placed.segment].append(placed.operation)
    return [replace(segment, operations=own) for segment, own in zip(segments, operations)]
