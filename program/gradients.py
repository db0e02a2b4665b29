"""Gradients in a program: operations that sum them by a scheme and update parameters, and the pass that adds these.

A step ends with its last update, and updates are made in the forward pass of the next step, before the layers that
read the parameters. Its operations on gradients are therefore in three lists (:class:`Segment`, :class:`Program`)::

    backward  conv2   after:   cast, accumulate, start sum 0
    backward  conv1   after:   cast, accumulate, start sum 1
    end                        gather errors of replicated layers (to clip: finish sums, norm)
    forward   conv1   before:  finish sum 1, update, start gather; finish gather, refresh copies
    forward   conv2   before:  finish sum 0, update, ...

Operations before a layer belong to the previous step. Pure data: no arrays, no MPI, no device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..comm.sums import shard
from ..device import is_low
from ..dtensor import Groups
from ..layers.reduction_chunks import GradientChunk
from ..layers.reduction_scheme import Scheme
from ..lowering.operations import KernelSpec, Operation, Run, Sum, Timing, Total
from ..lowering.views import Buffer
from .program import Program, Segment

__all__ = [
    "Accumulate",
    "BucketOperation",
    "BucketTotal",
    "Cast",
    "CheckGradients",
    "Compensate",
    "Refresh",
    "ShardGather",
    "Update",
    "check_gradients",
    "complete_early",
    "completions",
    "reduce_gradients",
]

#: Kinds of the arrays of buckets (`Buffer.location`).
GRADIENTS, PARAMETERS = "bucket gradients", "bucket parameters"


@dataclass(eq=False)
class BucketOperation(Operation):
    """Local operation on the arrays of one bucket.

    Attributes
    ----------
    bucket
        Number of the bucket in the program.
    nbytes
        Size of the bucket's gradients on this rank [B].
    """

    bucket: int
    nbytes: int

    def describe(self) -> str:
        return f"{super().describe()} bucket {self.bucket}, {self.nbytes} B"


@dataclass(eq=False)
class BucketTotal(Total):
    """Start or finish of the sum of a bucket's gradients, or of a gather of the rows or errors of a replicated layer.

    Attributes
    ----------
    bucket
        Number of the bucket in the program.
    """

    bucket: int


@dataclass(eq=False)
class ShardGather(BucketTotal):
    """Start or finish of the gather of a bucket's parameters, after each rank has updated its shard."""


@dataclass(eq=False)
class Cast(BucketOperation):
    """Conversion to float32 of the gradients that kernels write in 16 bits."""


@dataclass(eq=False)
class Accumulate(BucketOperation):
    """Addition of a part's gradients to those of earlier parts of the batch; for the last part, also their mean.

    Attributes
    ----------
    parts
        Number of parts.
    """

    parts: int


@dataclass(eq=False)
class Compensate(BucketOperation):
    """Addition of the bucket's rounding residuals to its gradients.

    A rounded sum adds the residuals itself. If only one rank holds the bucket, its sum is not rounded, and residuals of
    another decomposition are added once. Residuals of buckets with replicated gradients stay unused.
    """


@dataclass(eq=False)
class Update(BucketOperation):
    """Update of the parameters of a bucket by the optimizer.

    Attributes
    ----------
    updated
        Size of the part that this rank updates: the whole bucket, or its shard [B].
    largest
        Size of the largest part that a rank updates [B].
    """

    updated: int
    largest: float


@dataclass(eq=False)
class Refresh(BucketOperation):
    """Rounding of gathered parameters to copies in 16 bits."""


@dataclass(eq=False)
class CheckGradients(Operation):
    """Computation of a scalar from all gradients, such as their squared norm, with its sum over the ranks.

    Attributes
    ----------
    what
        Name of the scalar.
    nbytes
        Size of the gradients that are read on this rank [B].
    sum
        Sum of the scalar over the ranks; None: all ranks have the same gradients.
    """

    what: str
    nbytes: int
    sum: Sum | None

    def describe(self) -> str:
        return f"{self.what} of {self.nbytes} B of gradients"

    def sums(self) -> Iterator[Sum]:
        if self.sum is not None:
            yield self.sum


def reduce_gradients(program: Program, buckets: Sequence[GradientChunk], scheme: Scheme, parts: int = 1) -> Program:
    """Return the program with the operations that sum the gradients of `buckets` by a scheme and update parameters.

    Operations of another scheme are replaced. A program without a backward pass is returned unchanged. Local.

    Parameters
    ----------
    buckets
        Buckets; the sums of those that the same layer completes start in this order.
    parts
        Number of parts of a batch, which are computed one after the other; the last one starts the sums.
    """
    if not program.backward:
        return program
    return _Placing(program, buckets, scheme, parts).program()


class _Placing:
    """Builder that adds operations on gradients to a program; it lists them before they are put into segments."""

    def __init__(self, program: Program, buckets: Sequence[GradientChunk], scheme: Scheme, parts: int) -> None:
        self._program, self._buckets, self._parts = program, buckets, parts
        self._low, self._kind, self._keeps_errors = is_low(program.target.dtype), scheme.kind, scheme.keeps_errors
        self._methods = scheme.sums
        self._before: defaultdict[str, list[Operation]] = defaultdict(list)
        self._after: defaultdict[str, list[Operation]] = defaultdict(list)
        self._end: list[Operation] = []
        #: Positions of layers in the forward pass; backward has the opposite order.
        self._positions = {segment.name: i for i, segment in enumerate(program.forward)}
        self._reached = {segment.name for segment in program.backward}
        # On one rank, a forked gradient may run until the next one begins (`Fork`): it is complete at the end.
        operations = (o for segment in program.backward for o in segment.operations)
        self._late = program.target.size == 1 and any(isinstance(o, Run) and o.forked for o in operations)
        #: Sizes of the buckets on this rank [B], and their first layers in the forward pass.
        self._own = [self._size(bucket) for bucket in buckets]
        self._first = [min(bucket.layers, key=self._positions.__getitem__) for bucket in buckets]

    def program(self) -> Program:
        self._add_sums([i for i, bucket in enumerate(self._buckets) if not bucket.replicated])
        self._add_replicated([i for i, bucket in enumerate(self._buckets) if bucket.replicated])
        before, after = self._before, self._after
        # A redistribution has two segments of one name, its start and its end: operations stand before the first.
        forward = [
            Segment(s.name, s.operations, before.pop(s.name, []), s.after, again=s.again)
            if s.before or s.name in before
            else s
            for s in self._program.forward
        ]
        backward = [
            Segment(s.name, s.operations, s.before, after.pop(s.name, []), again=s.again)
            if s.after or s.name in after
            else s
            for s in self._program.backward
        ]
        return replace(self._program, forward=forward, backward=backward, end=self._end, buckets=tuple(self._buckets))

    def _add_sums(self, summed: Sequence[int]) -> None:
        """Add the operations that sum gradients and update parameters, with whole or sharded buckets."""
        sums, kind = {i: self._sums(i) for i in summed}, self._kind
        for i in summed:
            last = None if kind.waits else self._last(i)
            (self._end if last is None else self._after[last]).extend(self._starts(i, sums[i][0]))
        if kind.waits:
            # All sums have started; they finish before the step goes on.
            self._end += [BucketTotal("", sums[i][0], "finish", i, when="step") for i in summed]
        for i in reversed(summed) if kind.shards else summed:
            # All shards are updated before the first layer, the last bucket first, and travel during forward.
            before = self._before[self._program.forward[0].name if kind.shards else self._first[i]]
            if not kind.waits:
                before.append(BucketTotal("", sums[i][0], "finish", i))
            before.append(self._update(i))
            if kind.shards:
                before.append(ShardGather("", sums[i][1], "start", i))
        # A gather finishes before the first layer that reads its parameters, while gathers of later layers travel.
        for i in summed if kind.shards else ():
            refresh = [Refresh("", i, self._own[i])] if self._low else []
            self._before[self._first[i]] += [ShardGather("", sums[i][1], "finish", i), *refresh]

    def _starts(self, i: int, total: Sum) -> list[Operation]:
        """Return the operations that prepare the gradients of a bucket, and start their sum."""
        cast = [Cast("", i, self._own[i])] if self._low and self._program.target.rounds else []
        return [*cast, *self._prepared(i), BucketTotal("", total, "start", i, when="step")]

    def _prepared(self, i: int) -> list[Operation]:
        """Return the local operations on the gradients of a bucket that come before their sum."""
        own = self._own[i]
        operations: list[Operation] = [Accumulate("", i, own, self._parts)] if self._parts > 1 else []
        return [*operations, Compensate("", i, own, when="step")] if self._keeps_errors else operations

    def _add_replicated(self, replicated: Sequence[int]) -> None:
        """Add the gathers of errors, the whole gradients and the updates of dense layers with replicated gradients."""
        numbers: dict[str, list[int]] = {}
        for i in replicated:
            numbers.setdefault(self._buckets[i].layers[0], []).append(i)
        for name in sorted(numbers, key=self._positions.__getitem__):
            before, own, kernel = self._before[name], numbers[name], self._program.exposed[name]
            rows, errors = kernel.sums["rows_gather"], kernel.sums["errors_gather"]
            assert rows is not None and errors is not None
            # The gather of the rows has started in the forward pass.
            self._end.append(BucketTotal(name, errors, "start", own[0]))
            before += [BucketTotal(name, gather, "finish", own[0]) for gather in (rows, errors)]
            before.append(self._whole(name, kernel, rows))
            for i in own:
                before += [*self._prepared(i), self._update(i)]

    def _whole(self, name: str, kernel: KernelSpec, rows: Sum) -> Run:
        """Return the computation of a dense layer's gradient from the rows of all ranks."""
        view = kernel.views["rows"]
        assert view is not None
        # Rows of all ranks: the size of the gathered array over that of a row.
        samples = rows.sizes[0] // (view.shape[1] * view.dtype.itemsize)
        timing = Timing("backward_filter", ((samples, view.shape[1]),))
        return Run(name, kernel, "whole_gradient", timing)

    # -- descriptions --------------------------------------------------------------------------

    def _size(self, bucket: GradientChunk) -> int:
        """Return the size of a bucket on this rank [B]."""
        color = bucket.sharing.color(self._program.target.rank)
        return 0 if color is None else bucket.nbytes[color]

    def _sums(self, i: int) -> list[Sum]:
        """Return the sum of a bucket's gradients and, if ranks update shards, the gather of its parameters."""
        bucket, dtype = self._buckets[i], self._program.wide
        shape, label, sums = (self._own[i] // dtype.itemsize,), f"bucket {i}", []
        # A scheme without shards has one method.
        for location, method in zip((GRADIENTS, PARAMETERS), self._methods):
            kind = method.name if self._kind.shards else "allreduce"  # the kind under which traffic is counted
            view = Buffer(shape, dtype, "parameter gradient", location=(location, label)).view
            sent = method.name, method.codec, self._keeps_errors
            sums.append(Sum(bucket.sharing, view, bucket.nbytes, kind, None, *sent))
        return sums

    def _update(self, i: int) -> Update:
        bucket, own = self._buckets[i], self._own[i]
        updated, largest = own, float(max(bucket.nbytes))
        if self._kind.shards and not bucket.replicated:
            updated, largest = self._shard(bucket, own), largest / bucket.sharing.members_each
        return Update("", i, own, updated, largest)

    def _shard(self, bucket: GradientChunk, own: int) -> int:
        """Return the size of this rank's shard of a bucket [B]."""
        rank, itemsize = self._program.target.rank, self._program.wide.itemsize
        color = bucket.sharing.color(rank)
        if color is None:
            return 0
        members = bucket.sharing.members(color)
        part = shard(own // itemsize, len(members), itemsize, members.index(rank))
        return (part.stop - part.start) * itemsize

    def _last(self, i: int) -> str | None:
        """Return the last layer of a bucket in backward; None: only after backward are all its gradients complete."""
        reached = self._reached.issuperset(self._buckets[i].layers)
        return self._first[i] if reached and not self._late else None


def completions(program: Program) -> list[Operation]:
    """Return the operations that complete all parameters, in the order for a call outside of a pass. Local.

    Finishes of gathers of updated shards, and the rounding of what they gather, come last.
    """
    operations = [operation for segment in reversed(program.forward) for operation in segment.before]
    late = [o for o in operations if isinstance(o, Refresh) or (isinstance(o, ShardGather) and o.end == "finish")]
    return [*(o for o in operations if o not in late), *late]


def complete_early(program: Program) -> Program:
    """Return the program with all gradients complete at the end of backward; updates do not move. Local."""
    before = [operation for segment in program.forward for operation in segment.before]
    early = [o for o in before if not isinstance(o, Update | ShardGather | Refresh)]
    starts = [*(o for segment in program.backward for o in segment.after), *program.end]
    order = {o.sum: i for i, o in enumerate(starts) if isinstance(o, Total)}
    # Sums end in the order of their starts; gradients that are computed of gathered rows come last.
    early.sort(key=lambda o: order.get(o.sum, len(order)) if isinstance(o, Total) else len(starts))
    moved = set(early)
    forward = [replace(segment, before=[o for o in segment.before if o not in moved]) for segment in program.forward]
    return replace(program, forward=forward, end=[*program.end, *early])


def check_gradients(program: Program, what: str, over_ranks: bool) -> Program:
    """Return the program with all gradients complete at the end of backward, and a scalar computed from them there.

    Parameters
    ----------
    what
        Name of the scalar, and kind of its sum in the traffic counters.
    over_ranks
        Whether the scalars of all ranks are summed; else every rank has all gradients.
    """
    total = None
    if over_ranks:
        number = Buffer((1,), np.dtype("float64"), "loss", location=(what, ""))
        total = Sum(Groups.whole(program.target.size), number.view, [number.nbytes], what, None)
    updates = [o for segment in program.forward for o in segment.before if isinstance(o, Update)]
    check = CheckGradients("", what, sum(o.updated for o in updates), total, when="step")
    # The scalar needs all gradients, and may change or prevent the updates: clipping, loss scaling.
    program = complete_early(program)
    return replace(program, end=[*program.end, check])
