"""Passes over the operations of layers: functions from program to program, by name.

A strategy names them (`Strategy.passes`), so cost, traffic, memory and listing are those of the program that runs. They
are applied when the layers are lowered. The pass that adds the operations on gradients runs later
(`halograd.program.gradients`); its settings are the scheme and the buckets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from halograd.errors import UserError
from halograd.registry import Registry
from halograd.schema import STRICT

from ..kernels.summed import SummedConvolution
from ..lowering.operations import ForkEnd, KernelSpec, NormSums, Operation, Run, SumsOver, Timing, Total, Transfer
from ..lowering.views import Buffer, View
from .program import Program, Segment
from .recompute import recomputed

__all__ = ["PASSES", "Fork", "Fuse", "FuseSums", "Overlap", "Pass", "apply_passes"]


class Pass(ABC):
    """Transformation of a program. Subclasses are frozen dataclasses, whose fields are their settings.

    A pass sees the program of one rank. All ranks must issue their exchanges and sums in the same order, including the
    sums of gradients, which are added later. So the order must not depend on this rank's blocks.
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
        If a name is unknown, or a pass does not return a program.
    """
    for name in names:
        changed = PASSES.make(name)(program)
        if not isinstance(changed, Program):
            raise UserError(f"strategy.passes: {name}: expected it to return a Program, got {type(changed).__name__}")
        program = changed
    return program


@PASSES.register
@dataclass(frozen=True)
class Fuse(Pass):
    """Pass that fuses activations with the kernels before them, such as a convolution with the ReLU that follows it.

    An activation is fused if its gradient needs only its output, if exactly one kernel writes its input and can apply
    the function (`KernelSpec.fuse`), and if nothing else reads the input. The network does not change. This pass does
    not fuse norms: one kernel computes the gradient of both, so a norm needs `activation=` of its layer.
    """

    __pydantic_config__ = STRICT
    name: ClassVar[str] = "fuse"

    def __call__(self, program: Program) -> Program:
        users = _users(program)
        read = {v.region.view.buffer for v in program.values.values() if v.read or v.kept}
        kernels: dict[KernelSpec, KernelSpec] = {}
        fused: set[Operation] = set()
        for operation in (o for segment in program.forward for o in segment.operations):
            if not isinstance(operation, Run) or operation.kernel.function is None:
                continue
            x, y = operation.kernel.views["x"], operation.kernel.views["y"]
            # Arrays that are read after the step, or outside of the program, must be written.
            if x is None or x.buffer in read or x.buffer.kept or x.buffer.location is not None:
                continue
            writer = _only_writer(users[x.buffer], operation.kernel)
            # A kernel applies one function, to all that it writes.
            if writer is None or writer.kernel in kernels or writer.kernel.views["y"] != x:
                continue
            function = operation.kernel.function
            assert writer.kernel.fuse is not None
            kernel = writer.kernel.fuse(function)
            # `summing`: with an activation, a kernel cannot compute the sums of a norm, too (`FuseSums`).
            kernels[writer.kernel] = replace(
                writer.kernel, make=kernel, views={**writer.kernel.views, "y": y}, fuse=None, summing=None
            )
            # Only the gradient remains of the activation's kernel, and it does not read `x`.
            kernels[operation.kernel] = replace(operation.kernel, views={**operation.kernel.views, "x": y})
            fused.add(operation)
        forward, backward = (
            [replace(segment, operations=_with(segment.operations, kernels, fused)) for segment in segments]
            for segments in (program.forward, program.backward)
        )
        return replace(program, forward=forward, backward=backward)


def _users(program: Program) -> dict[Buffer, list[Operation]]:
    """Return the operations that hold each buffer, in order."""
    users: dict[Buffer, list[Operation]] = {}
    for operation in program:
        for buffer in dict.fromkeys(operation.held()):
            users.setdefault(buffer, []).append(operation)
    return users


def _only_writer(users: Sequence[Operation], reader: KernelSpec) -> Run | None:
    """Return the only operation of `users` that does not run `reader`; None if there is not exactly one, or if it
    cannot be fused.
    """
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
    """Return `operations` without the `fused` ones, with kernels replaced as in `kernels`."""
    return [
        replace(o, kernel=kernels[o.kernel]) if isinstance(o, Run) and o.kernel in kernels else o
        for o in operations
        if o not in fused
    ]


@PASSES.register
@dataclass(frozen=True)
class FuseSums(Pass):
    """Pass that fuses the sums of batch norms with the convolutions before and after them.

    A convolution whose output a norm reads also computes the sums for the statistics. A convolution that reads the
    output of a norm also computes, in its data gradient, the gradient before the norm's ReLU and the sums of the norm's
    gradient. Each of these saves a pass over the array; sums over ranks do not change. ::

        conv, statistics, (sum), train       ->  conv with sums, (sum), train
        conv_data, backward_sums, (sum), backward_data  ->  conv_data with sums, (sum), backward_rest

    Only sums over a whole array that one kernel writes are fused, not sums over a block with a margin, or over one that
    is computed in parts, as with ``halo = "overlap"``. What is not fused is listed with the reason. The backend decides
    by measurement whether one kernel computes both.
    """

    __pydantic_config__ = STRICT
    name: ClassVar[str] = "sums"

    def __call__(self, program: Program) -> Program:
        return _FusedSums(program).program() if program.target.trainable else program


class _FusedSums:
    """Fusion of sums in a program.

    Attributes
    ----------
    unfused
        Names of norm layers, each with the reason why sums of it are not fused.
    """

    def __init__(self, program: Program) -> None:
        self._program, self._users, self.unfused = program, _users(program), list[tuple[str, str]]()
        self._steps = {step.name: step for step in program.steps}
        self._fused: dict[KernelSpec, KernelSpec] = {}
        #: Operations in place of others.
        self._changed: dict[Operation, list[Operation]] = {}
        for operation in program:
            if isinstance(operation, Run) and operation.kernel.norm is not None:
                self._visit(operation.layer, operation.kernel, operation.kernel.norm)

    def program(self) -> Program:
        """Return the program with fused sums."""
        forward, backward = (
            [replace(segment, operations=list(self._operations(segment))) for segment in segments]
            for segments in (self._program.forward, self._program.backward)
        )
        return replace(self._program, forward=forward, backward=backward, unfused=tuple(self.unfused))

    def _operations(self, segment: Segment) -> Iterator[Operation]:
        for operation in segment.operations:
            for o in self._changed.get(operation, [operation]):
                yield self._with_kernels(o) if isinstance(o, Run) else o

    def _with_kernels(self, run: Run) -> Run:
        guarded = tuple(self._with_kernels(o) if isinstance(o, Run) else o for o in run.guarded)
        return replace(run, kernel=self._fused.get(run.kernel, run.kernel), guarded=guarded)

    def _visit(self, layer: str, kernel: KernelSpec, norm: NormSums) -> None:
        """Fuse the sums of a norm, if that is possible."""
        if kernel in self._fused:
            return
        runs: dict[str, list[Run]] = {name: [] for name in norm.over if kernel.views.get(name) is not None}
        for name, methods in ((name, norm.over[name]) for name in runs):
            for o in self._users[_view_of(kernel, name).buffer]:
                if isinstance(o, Run) and o.kernel is kernel and o.method in (methods.sums, methods.reader):
                    runs[name].append(o)
        fused = {}
        for name in runs:
            # One run computes and reads the sums if they are local; otherwise a sum over ranks lies between two runs.
            candidate = self._writer(kernel, norm, name, len(runs[name]) == 1)
            if isinstance(candidate, str):
                self.unfused.append((layer, f"sums over {name}: {candidate}"))
            else:
                fused[name] = candidate
        self._fused[kernel] = kernel  # visited, even if nothing is fused
        if not fused:
            return
        views = {**kernel.views, **(norm.narrow if "x" in fused else {})}
        fused_kernel = self._fused[kernel] = replace(kernel, make=norm.without(frozenset(fused)), views=views)
        for name, runs_of_norm in runs.items():
            self._split(runs_of_norm, norm.over[name], name in fused)
        for name, writer in fused.items():
            self._sum_up(writer, fused_kernel, norm, norm.over[name])

    def _writer(self, kernel: KernelSpec, norm: NormSums, name: str, local: bool) -> Run | str:
        """Return the operation that can compute the sums of a norm over an array, or the reason why none can."""
        view, over = _view_of(kernel, name), norm.over[name]
        if over.refused:
            return over.refused
        others = [o for o in self._users[view.buffer] if not (isinstance(o, Run) and o.kernel is kernel)]
        writers = [o for o in others if _writes(o, view.buffer)]
        if len(writers) != 1:
            return "no kernel writes it" if not writers else f"{len(writers)} operations write it"
        writer = writers[0]
        if not isinstance(writer, Run) or writer.kernel.summing is None or writer.method or writer.when:
            return "a convolution without activation does not write it"
        summing = writer.kernel.summing
        if writer.kernel.views[summing.written] != view or not view.packed:
            return "it has a margin"
        if writer in self._changed:
            return "its kernel computes the sums of another norm"
        if over.activation is not None and len(others) > 1:
            return "other operations read it"
        # Kernels of the forward pass have methods (of training and evaluation), those of the backward pass none.
        if summing.methods and recomputed(self._steps[writer.layer]):
            return "it is computed again"
        x, w, y = (_in_memory(_view_of(writer.kernel, array)) for array in summing.names)
        backward = not summing.methods
        conv = SummedConvolution(
            x, w, y, view.dtype.name, summing.geometry(), backward, over.activation if backward else None, local
        )
        return writer if self._program.target.fuses_sums(conv) else "no kernel computes both, or it saves nothing"

    def _split(self, runs: Sequence[Run], over: SumsOver, fused: bool) -> None:
        """Split a run that computes and reads sums into two runs; if `fused`, keep only the one that reads them."""
        first, last = runs[0], runs[-1]
        timing: Timing | None = next((o.timing for o in runs if o.timing is not None), None)
        if not fused:
            # The new kernel has separate sums, so a run that computed and read them becomes two.
            if first is last:
                self._changed[first] = [
                    replace(first, method=over.sums, timing=None),
                    replace(first, method=over.reader, timing=timing),
                ]
            return
        for run in runs[:-1]:
            self._changed[run] = []
        less = None if timing is None else timing._replace(share=timing.share * over.share)
        self._changed[last] = [replace(last, method=over.rest, timing=less)]

    def _sum_up(self, writer: Run, kernel: KernelSpec, norm: NormSums, over: SumsOver) -> None:
        """Replace the kernel that writes an array by one that computes its sums, too."""
        summing = writer.kernel.summing
        assert summing is not None
        more = {name: kernel.views[name] for name in over.arrays if name in kernel.views}
        make = summing.make(norm.eps, over.activation)
        kernel_with_sums = replace(
            writer.kernel, make=make, views={**writer.kernel.views, **more}, fuse=None, summing=None
        )
        # One run per kind of pass if only training needs sums; a kernel without methods runs as before.
        self._changed[writer] = [
            replace(writer, kernel=kernel_with_sums, method=method, when=when)
            for when, method in summing.methods.items()
        ] or [replace(writer, kernel=kernel_with_sums)]


def _view_of(kernel: KernelSpec, name: str) -> View:
    view = kernel.views[name]
    assert view is not None
    return view


def _in_memory(view: View) -> tuple[int, ...]:
    """Return the shape of an array in memory, including channels that are padding."""
    padded = not view.packed and view.packed_but_for_channels
    return (*view.shape[:-1], view.buffer.shape[-1]) if padded else view.shape


def _writes(operation: Operation, buffer: Buffer) -> bool:
    """Return whether an operation writes a buffer."""
    if isinstance(operation, Transfer):
        return operation.exchange.target.buffer is buffer
    if not isinstance(operation, Run):
        # A sum is in place.
        return any(used is buffer for used in operation.buffers())
    views = operation.kernel.views
    written = any((v := views[name]) is not None and v.buffer is buffer for name in operation.access.written(views))
    return written or any(_writes(o, buffer) for o in operation.guarded)


@PASSES.register
@dataclass(frozen=True)
class Overlap(Pass):
    """Pass that starts exchanges and sums earlier, and finishes them later, as far as other operations permit.

    A start moves before operations that use neither its source nor its target; a finish moves after operations that do
    not use its target. Neither moves past operations with conditions or sums. The results are bitwise identical;
    buffers of messages are in use for longer. How far a message moves depends on the arrays of this rank's block. The
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


@PASSES.register
@dataclass(frozen=True)
class Fork(Pass):
    """Pass that lets gradients of filters run on a second stream of a GPU, at the same time as later operations.

    They fill multiprocessors that small kernels, and the last blocks of large ones, leave idle. A gradient ends before
    the next one begins, so that only one runs at a time, and before an operation that uses its result or writes what it
    reads. On several ranks, where its sum may follow the layer, it ends at the latest with the operations of its layer.
    Its arrays stay in use until then, which takes memory. The results are bitwise identical. Without a GPU, a gradient
    runs in program order. Predictions assume this too: they include the memory, but not the time saved.
    """

    __pydantic_config__ = STRICT
    name: ClassVar[str] = "fork"

    def __call__(self, program: Program) -> Program:
        trained = {step.name for step in program.steps if step.parameters}
        # After the last layer with parameters come operations on gradients, which the program does not have yet.
        last = max((i for i, segment in enumerate(program.backward) if segment.name in trained), default=0)
        backward, forked = list[Segment](), list[Run]()
        for i, segment in enumerate(program.backward):
            operations = list[Operation]()
            for operation in segment.operations:
                forks = isinstance(operation, Run) and operation.kernel.forks and not operation.guarded
                if forks or any(_conflicts(run, operation) for run in forked):
                    operations += _ends(forked)
                if forks:
                    assert isinstance(operation, Run)
                    operation = replace(operation, forked=True)
                    forked.append(operation)
                operations.append(operation)
            if program.target.size > 1 or i == last:
                operations += _ends(forked)
            backward.append(replace(segment, operations=operations))
        return replace(program, backward=backward)


def _ends(forked: list[Run]) -> list[Operation]:
    """Return the ends of the kernels in `forked`, and clear this list."""
    ends: list[Operation] = [ForkEnd(run.layer, run.kernel, tuple(run.views()), when=run.when) for run in forked]
    forked.clear()
    return ends


def _conflicts(run: Run, other: Operation) -> bool:
    """Return whether an operation writes what a run reads, or uses what it writes."""
    (used, written), (others, overwritten) = _accesses(run), _accesses(other)
    return bool(written & others or used & overwritten)


def _accesses(operation: Operation) -> tuple[frozenset[object], frozenset[object]]:
    """Return the arrays that an operation uses, and those that it may write."""
    # Outside the arena, several buffers may be one array: calls of one layer share parameters.
    used = frozenset(buffer.location or buffer for buffer in operation.buffers())
    if not isinstance(operation, Run) or operation.guarded:
        return used, used
    names = operation.access.written(operation.arrays)
    return used, frozenset((b := operation.arrays[name].buffer).location or b for name in names)


@dataclass(frozen=True)
class _Placed:
    """Operation in a segment, with the arrays that it uses."""

    segment: int
    operation: Operation
    arrays: frozenset[object]

    def may_pass(self, other: _Placed, end: str, closed: Sequence[bool]) -> bool:
        """Return whether this start may move before `other`, or this finish after it."""
        own, run = self.operation, other.operation
        if not isinstance(own, Transfer | Total) or own.end != end or own.when != run.when:
            return False
        if not isinstance(run, Run) or run.guarded or any(True for _ in run.sums()):
            return False
        first, last = sorted((self.segment, other.segment))
        return not any(closed[first + 1 : last + 1]) and not self.arrays & other.arrays


def _moved(segments: Sequence[Segment], closed: Sequence[bool]) -> list[Segment]:
    """Return the segments of a pass, with starts moved earlier and finishes later.

    If ``closed[i]``, nothing moves between segments ``i - 1`` and ``i``.
    """
    order = [
        _Placed(i, operation, frozenset(buffer.location or buffer for buffer in operation.buffers()))
        for i, segment in enumerate(segments)
        for operation in segment.operations
    ]
    for at in range(len(order)):
        while at and order[at].may_pass(order[at - 1], "start", closed):
            before = order[at - 1]
            # The start goes to the segment of the operation that it passes.
            order[at - 1], order[at] = replace(order[at], segment=before.segment), before
            at -= 1
    for at in reversed(range(len(order))):
        while at + 1 < len(order) and order[at].may_pass(order[at + 1], "finish", closed):
            after = order[at + 1]
            order[at + 1], order[at] = replace(order[at], segment=after.segment), after
            at += 1
    operations: list[list[Operation]] = [[] for _ in segments]
    for placed in order:
        operations[placed.segment].append(placed.operation)
    return [replace(segment, operations=own) for segment, own in zip(segments, operations)]
