"""Recomputation: outputs of layers that are not kept for the backward pass, but computed again in it.

A layer whose output is computed again (option ``recompute`` of a strategy) keeps nothing for the backward pass. Before
the first operation of the backward pass that reads its output, the operations that computed it are repeated. Kernels,
arrays, addresses and order are the same, so all bits are the same. Until then, other arrays use its memory. ::

    forward     conv1   bn1   conv2   release y of bn1   bn2  ...
    backward    ...     bn2   bn1 (again)   conv2   bn1   conv1

Arrays that the repeated operations read are kept, or computed again too. Elements from other ranks (halos) are saved in
small arrays and copied back. So the messages of a step do not depend on the recomputed outputs, and ranks may recompute
different ones.

With the option ``recompute_halo = "exchange"`` of a layer, exchanges of its output are repeated instead. All ranks must
then repeat the same exchanges in the same order: those that rank 0 would repeat, at its positions
(:func:`exchanges_again`). Each rank knows them from the layouts. A rank that needs a halo earlier, or one that is not
exchanged again, saves it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from ..dtensor import Box, plan_exchange
from ..lowering.context import copying
from ..lowering.operations import ExchangeSpec, KernelSpec, Operation, Release, Run, Total, Transfer
from ..lowering.views import Buffer, Region, View
from .program import Program, Segment, Step

__all__ = ["Recomputation", "exchanges", "exchanges_again", "recompute", "recomputed"]


def recomputed(step: Step) -> bool:
    """Return whether the strategy permits that the output of a layer is computed again."""
    rule, kind = step.options.get("recompute", "none"), step.layer.recomputation
    return kind != "never" and rule in ("block", kind)


def exchanges(step: Step) -> bool:
    """Return whether halos of a layer's output are exchanged again if the output is computed again."""
    return recomputed(step) and step.options.get("recompute_halo") == "exchange"


def exchanges_again(program: Program) -> dict[int, str]:
    """Return the exchanges of the forward pass that the backward pass repeats, for the program of rank 0. Local.

    The keys are numbers of exchanges in the order of the forward pass, which is the same on all ranks; the values are
    the layers before whose backward pass the exchanges are repeated.
    """
    chosen = {step.name: step for step in program.steps if recomputed(step)}
    recomputation = Recomputation(program, chosen)
    # `program` also fills `restored`, which is read below.
    if recomputation.program().placement.size >= program.placement.size:
        return {}
    outputs = {step.output.region.view.buffer for step in chosen.values() if exchanges(step)}
    numbers = {exchange: number for number, exchange in enumerate(recomputation.exchanges)}
    return {
        numbers[exchange]: name
        for exchange, name in recomputation.restored.items()
        if exchange.source.buffer in outputs
    }


def recompute(program: Program, again: Mapping[int, str] | None = None) -> Program:
    """Return the program with the outputs of chosen layers computed again in the backward pass. Local.

    `again` are the exchanges that all ranks repeat (:func:`exchanges_again`).

    A chosen output is kept in three cases: it is read after the step; its computation needs a message or changes a
    permanent array; or the arrays from which it is computed would have to be kept instead, and are not smaller. All
    outputs are kept if the arena would not become smaller.
    """
    chosen = {step.name: step for step in program.steps if recomputed(step)}
    if not chosen or not program.backward:
        return program
    recomputation = Recomputation(program, chosen, again).program()
    # With exchanges to repeat, all ranks must repeat them, even if the arena of this rank does not become smaller.
    return recomputation if again or recomputation.placement.size < program.placement.size else program


class Recomputation:
    """Recomputation of a program: its operations by the buffers that they read and write.

    Attributes
    ----------
    operations
        Operations of a forward pass in training, in order.
    makers
        Numbers of the operations that write a buffer of the arena, by buffer.
    read_later
        Buffers that the backward pass reads.
    exchanges
        Exchanges of the forward pass, in order.
    restored
        Exchanges whose halos are copied back, with the first layer before whose backward pass this happens.
    again
        Buffers that are computed again if the chosen layers are.
    """

    def __init__(self, program: Program, chosen: Mapping[str, Step], repeated: Mapping[int, str] | None = None) -> None:
        self._program, self._chosen = program, chosen
        self._rank = program.target.rank
        forward = [o for segment in program.forward for o in segment.operations]
        backward = [o for segment in program.backward for o in segment.operations]
        self.operations = [o for o in forward if o.when != "evaluation"]
        #: What each operation reads and makes, when it is repeated.
        again = [_again(operation) for operation in self.operations]
        self._reads = [_reads(operation) for operation in again]
        self._makes = [_results(operation) for operation in again]
        self._always = frozenset(program.kept)
        self.makers: dict[Buffer, list[int]] = {}
        for at, operation in enumerate(self.operations):
            for buffer in _results(operation):
                if self._in_arena(buffer):
                    self.makers.setdefault(buffer, []).append(at)
        self.read_later = {buffer for o in backward for buffer in _reads(o)}
        self._changed_later = {buffer for o in backward for buffer in _results(o)}
        self._strips: dict[ExchangeSpec, list[tuple[View, View]]] = {}
        self.exchanges = list(dict.fromkeys(o.exchange for o in self.operations if isinstance(o, Transfer)))
        self.restored: dict[ExchangeSpec, str] = {}
        self._repeated: dict[str, list[ExchangeSpec]] = {}
        for number, name in (repeated or {}).items():
            self._repeated.setdefault(name, []).append(self.exchanges[number])
        self.again = self._choose()

    def _in_arena(self, buffer: Buffer) -> bool:
        return buffer.location is None and not buffer.kept and buffer not in self._always

    # -- what is made again --------------------------------------------------------------------

    def _choose(self) -> set[Buffer]:
        """Return the buffers that are not kept for the backward pass."""
        buffers = {buffer for buffer, numbers in self.makers.items() if all(map(self._may_repeat, numbers))}
        # Repeated operations would overwrite what the backward pass writes there.
        buffers -= self._changed_later
        # Each buffer that is kept may make others unrepeatable, so repeat this until there are no more.
        while refused := {buffer for buffer in buffers if not self._repeatable(buffer, buffers)}:
            buffers -= refused
        return buffers - self._without_gain(buffers)

    def _may_repeat(self, at: int) -> bool:
        """Return whether an operation belongs to a chosen layer, or copies boxes of an output to a reader."""
        operation = self.operations[at]
        if isinstance(operation, Transfer):
            exchange = operation.exchange
            return exchange.combine == "assign" and exchange.kind == "halo"
        if not isinstance(operation, Run) or operation.guarded:
            return False
        return operation.layer in self._chosen or operation.kernel.make is copying

    def _repeatable(self, buffer: Buffer, candidates: set[Buffer]) -> bool:
        """Return whether a buffer can be computed again: its writers write only buffers in `candidates`, and read no
        buffer that the backward pass changes; copies for readers read only candidates.
        """
        for at in self.makers[buffer]:
            operation = self.operations[at]
            copies = isinstance(operation, Transfer) or operation.layer not in self._chosen
            for read in self._reads[at]:
                if read not in candidates and ((copies and read is not buffer) or read in self._changed_later):
                    return False
            if any(source not in candidates for source in self._makes[at]):
                return False
        return True

    def _without_gain(self, candidates: set[Buffer]) -> set[Buffer]:
        """Return the buffers whose sources would have to be kept instead, and are not smaller."""
        lost, held = set[Buffer](), set(self.read_later)
        # In the order of computation: what is kept for one buffer serves later ones.
        for buffer in self.makers:
            if buffer in candidates and buffer in self.read_later:
                more = self._sources(buffer, candidates) - held
                if sum(source.nbytes for source in more) >= buffer.nbytes:
                    lost.add(buffer)
                else:
                    held |= more
        return lost

    def _sources(self, buffer: Buffer, candidates: set[Buffer]) -> set[Buffer]:
        """Return the buffers of the arena from which a buffer is computed and which are not recomputed themselves."""
        sources, waiting, seen = set[Buffer](), [buffer], {buffer}
        while waiting:
            for at in self.makers[waiting.pop()]:
                for read in self._reads[at].keys() - seen:
                    seen.add(read)
                    if read in candidates:
                        waiting.append(read)
                    elif self._in_arena(read):
                        sources.add(read)
        return sources

    # -- the program ---------------------------------------------------------------------------

    def program(self) -> Program:
        """Return the program with releases in forward and repeated operations in backward."""
        backward, repeated, restored = list[Segment](), list[Operation](), set[Buffer]()
        for segment in self._program.backward:
            sent = self._repeated.pop(segment.name, [])
            ends = (end.buffer for exchange in sent for end in (exchange.source, exchange.target))
            used = (*ends, *(buffer for o in segment.operations for buffer in o.buffers()))
            needed = dict.fromkeys(buffer for buffer in used if buffer in self.again)
            operations = list(self._restore(segment.name, needed, restored, sent))
            for layer, own in groupby(operations, key=lambda o: o.layer):
                backward.append(Segment(f"{layer} (again)", list(own), again=True))
            repeated += operations
            backward.append(segment)
        if not repeated:
            return self._program
        return replace(self._program, forward=self._forward(repeated), backward=backward)

    def _restore(
        self, name: str, needed: Iterable[Buffer], restored: set[Buffer], sent: Sequence[ExchangeSpec]
    ) -> Iterator[Operation]:
        """Yield the operations that recompute buffers and those that they need, in the order of the forward pass.

        All results of a repeated operation are recomputed together, so that no operation runs twice: it may change an
        array in place. The exchanges `sent` are repeated, whether this rank needs them or not.
        """
        waiting = list(needed)
        numbers = {at for at, o in enumerate(self.operations) if isinstance(o, Transfer) and o.exchange in sent}
        while waiting:
            buffer = waiting.pop()
            if buffer in restored:
                continue
            restored.add(buffer)
            for at in self.makers[buffer]:
                numbers.add(at)
                waiting += [other for other in (*self._reads[at], *self._makes[at]) if other in self.again]
        for at in sorted(numbers):
            operation = self.operations[at]
            if isinstance(operation, Transfer) and operation.exchange not in sent:
                self.restored.setdefault(operation.exchange, name)
                yield from self._brought(operation)
            else:
                yield _again(operation)

    def _forward(self, repeated: Sequence[Operation]) -> list[Segment]:
        """Return the forward pass with releases of buffers after their last use, and with copies of halos."""
        touched = {buffer for o in repeated for buffer in o.buffers() if self._in_arena(buffer)}
        needed = self.read_later | {buffer for o in repeated for buffer in _reads(o)}
        # These are written again before they are read: until then, their memory is free.
        ends = {buffer for buffer in touched if buffer in self.again or buffer not in needed}
        last: dict[Buffer, int] = {}
        for i, segment in enumerate(self._program.forward):
            last.update(dict.fromkeys((b for o in segment.operations for b in o.buffers() if b in ends), i))
        segments = []
        for i, segment in enumerate(self._program.forward):
            operations = [more for o in segment.operations for more in (o, *self._saved(o))]
            released = tuple(buffer for buffer, at in last.items() if at == i)
            if released:
                operations.append(Release(segment.name, released))
            segments.append(replace(segment, operations=operations))
        return segments

    # -- halos ---------------------------------------------------------------------------------

    def _saved(self, operation: Operation) -> Iterator[Operation]:
        """Yield the copies that save the received elements of an exchange, after its finish."""
        if isinstance(operation, Transfer) and operation.end == "finish" and operation.exchange in self._strips:
            yield from _copies(operation.layer, self._strips[operation.exchange])

    def _pieces(self, exchange: ExchangeSpec) -> list[tuple[View, View]]:
        """Return, per box from another rank, the part of the target that holds the box, and an array for its copy."""
        if exchange not in self._strips:
            target, pieces = _region(exchange.target, exchange.target_origin), []
            for piece in plan_exchange(exchange.sources, exchange.targets, self._rank):
                if piece.target == self._rank != piece.source and piece.box.size:
                    part = target.part(piece.box)
                    pieces.append((part, Buffer(part.shape, part.dtype, "halo copy").view))
            self._strips[exchange] = pieces
        return self._strips[exchange]

    def _brought(self, operation: Transfer) -> Iterator[Operation]:
        """Yield copies that replace an exchange: of own boxes at its start, of other ranks' boxes at its finish."""
        exchange = operation.exchange
        if operation.end == "finish":
            yield from _copies(operation.layer, [(copy, part) for part, copy in self._pieces(exchange)])
        # In place, own boxes are computed again where they are.
        elif exchange.source.buffer is not exchange.target.buffer:
            source, target = (
                _region(exchange.source, exchange.source_origin),
                _region(exchange.target, exchange.target_origin),
            )
            own = [p.box for p in plan_exchange(exchange.sources, exchange.targets, self._rank) if p.source == p.target]
            yield from _copies(operation.layer, [(source.part(box), target.part(box)) for box in own if box.size])


def _region(view: View, origin: Sequence[int]) -> Region:
    return Region(view, Box(tuple(origin), tuple(a + n for a, n in zip(origin, view.extent))))


def _copies(layer: str, pairs: Sequence[tuple[View, View]]) -> Iterator[Operation]:
    if pairs:
        views: dict[str, View | None] = {}
        for i, (source, target) in enumerate(pairs):
            views |= {f"source{i}": source, f"target{i}": target}
        yield Run(layer, KernelSpec(copying, views))


def _again(operation: Operation) -> Operation:
    """Return a copy that repeats `operation` in the backward pass: an object occurs only once in a program."""
    # `when` is not needed: there is a backward pass in training only.
    if not isinstance(operation, Run):
        return replace(operation, when=None)
    return replace(operation, method=operation.access.again or operation.method, when=None)


#: Buffers in order; a set would order them by their addresses, which differ between processes.
_Buffers = dict[Buffer, None]


def _reads(operation: Operation) -> _Buffers:
    """Return the buffers whose contents an operation needs."""
    if isinstance(operation, Run):
        views = operation.kernel.views
        own = dict.fromkeys(v.buffer for n in operation.access.read(views) if (v := views[n]) is not None and v.size)
        return own | dict.fromkeys(buffer for guarded in operation.guarded for buffer in _reads(guarded))
    if isinstance(operation, Transfer):
        exchange = operation.exchange
        own = dict.fromkeys([exchange.source.buffer] if operation.end == "start" else [])
        return own if exchange.combine == "assign" else own | {exchange.target.buffer: None}
    return dict.fromkeys(operation.buffers())


def _results(operation: Operation) -> _Buffers:
    """Return the buffers whose contents an operation makes."""
    if isinstance(operation, Run):
        views = operation.kernel.views
        own = dict.fromkeys(v.buffer for n in operation.access.results(views) if (v := views[n]) is not None)
        return own | dict.fromkeys(buffer for guarded in operation.guarded for buffer in _results(guarded))
    if isinstance(operation, Transfer):
        return {operation.exchange.target.buffer: None}
    return dict.fromkeys(operation.buffers()) if isinstance(operation, Total) else {}
