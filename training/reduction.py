"""Execution of the operations on gradients: the calls that sum this rank's gradients and update its parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from halograd.errors import UserError

from ..comm import Communicator, Reduction
from ..comm.reduction import ReductionSpec
from ..dtensor import group_of, reductions_in_groups
from ..layers.reduction_scheme import BY_NODES, KINDS, Scheme
from ..lowering.operations import Operation, Run, Sum
from ..program.gradients import (
    Accumulate,
    BucketOperation,
    BucketTotal,
    Cast,
    CheckGradients,
    Compensate,
    Refresh,
    ShardGather,
    Update,
    completions,
)
from ..program.program import Program
from ..program.runner import Call, Runner
from .store import Bucket, ParameterStore

__all__ = ["Reducer", "check_possible"]


class Reducer:
    """Executor of a program's operations on gradients (`halograd.program.gradients`), on a store's arrays. Collective.

    `call` returns the call of one operation; an executor makes these calls where the program has the operations, after
    `begin` before every backward pass. Call `finish` before parameters are read. All ranks make the same calls in the
    same order, so collectives are issued in one order everywhere. A step allocates nothing.

    The calls of one bucket depend on its state: an update is made only if the sum was started, and only once, so that
    `finish` may be called at any time.

    Parameters
    ----------
    program
        Program with operations on gradients, for the buckets of the store.
    store
        Store of the parameters.
    comm
        Communicator of the ranks that share the parameters.
    runner
        Runner of the layers' operations.
    recorded
        ``recorded(layer, "backward", calls)`` returns calls that also record the time of a gradient.
    checks
        Calls that :class:`~halograd.program.gradients.CheckGradients` operations make, by the name of the check.

    Attributes
    ----------
    store, comm
        The arguments of the same names.
    update
        Called with a bucket after its gradients are summed: when its parameters are next needed or at :meth:`finish`,
        whichever comes first. None: nothing is updated.

    Notes
    -----
    Communication per process and step: `halograd.perfmodel.cost.count_program`. Residuals of rounding are in
    `Bucket.errors` and, until `synchronize`, in the encodings of the sums.

    References
    ----------
    Le et al. 2018, Section 3.1 (steps B-4-1 to B-5-2) and Section 4.1: chunks summed on the host. Rajbhandari et al.
    2020, "ZeRO", stage 1 (P_os), with a reduce-scatter per bucket. Lee et al. 2017, Algorithm 2, lines 7 to 9, 12, 25
    to 26: in the paper, the previous layer starts the gather of activations; here, the gather starts after the update,
    which reads the activations that the gather overwrites.
    """

    def __init__(
        self,
        program: Program,
        store: ParameterStore,
        comm: Communicator,
        runner: Runner,
        recorded: Callable[[str, str, Sequence[Call]], Sequence[Call]],
        checks: Mapping[str, Call] | None = None,
    ) -> None:
        self.program, self.store, self.comm = program, store, comm
        self.update: Callable[[Bucket], None] | None = None
        self._runner, self._recorded, self._checks = runner, recorded, checks or {}
        self._states = [_State(bucket) for bucket in store.buckets]
        self._part, self._parts = 0, store.parts
        self._due: set[str] = set()  # layers with a gradient of the whole batch to compute
        self._sums = self._open()
        self._calls: dict[Operation, Call] = {}
        self._completions = [self.call(operation) for operation in completions(program)]

    def _open(self) -> dict[Sum, Reduction | None]:
        """Open the reductions of buckets; return them by sum, None for buckets without elements on this rank."""
        # Totals with a layer gather activations or their gradients; the runner has opened them.
        totals = [o for o in self.program if isinstance(o, BucketTotal) and not o.layer]
        sums = {o.sum: (self._states[o.bucket], isinstance(o, ShardGather)) for o in totals}
        specs = [
            (summed.groups, ReductionSpec(array, summed.kind, summed.name, summed.method, summed.codec))
            for summed, (state, gathers) in sums.items()
            # In place: sums on gradients, gathers of updated shards on parameters.
            for array in [state.bucket.params if gathers else state.bucket.grads]
        ]
        reductions = dict(zip(sums, reductions_in_groups(self.comm, specs)))
        for summed, (state, gathers) in sums.items():
            total = reductions[summed]
            if gathers:
                state.gather = total
                continue
            state.total = total
            # Error feedback: the encoding adds what rounding left out to the next sum.
            if total is not None and total.encoding is not None and state.bucket.errors is not None:
                total.encoding.compensate(state.bucket.errors)
        return reductions

    # -- calls ---------------------------------------------------------------------------------

    def call(self, operation: Operation) -> Call:
        """Return the call of an operation of the program. Local."""
        if operation not in self._calls:
            call = self._bound(operation)
            # Gradients of the parts of a batch are added on each rank first, and summed over the ranks once.
            self._calls[operation] = partial(self._in_last_pass, call) if operation.when == "step" else call
        return self._calls[operation]

    def _in_last_pass(self, call: Call) -> None:
        if self._part + 1 == self._parts:
            call()

    def _bound(self, operation: Operation) -> Call:
        if isinstance(operation, CheckGradients):
            return self._checks[operation.what]
        if isinstance(operation, Run):
            # The gradient of the whole batch, by a replicated dense layer.
            gradient = getattr(self._runner.instance(operation.kernel), operation.method or "")
            return partial(self._compute, operation.layer, self._recorded(operation.layer, "backward", [gradient]))
        if isinstance(operation, BucketTotal) and operation.layer:
            gather = self._runner.instance(operation.sum)
            call = self._gather_errors if operation.end == "start" else self._finish_rows
            return partial(call, operation.layer, gather)
        assert isinstance(operation, BucketOperation | BucketTotal)
        state = self._states[operation.bucket]
        if isinstance(operation, BucketTotal):
            return self._of_sum(operation, state)
        calls: dict[type, Call] = {
            Cast: partial(self._cast, state),
            Accumulate: partial(self._accumulate, state),
            Compensate: partial(self._compensate, state),
            Update: partial(self._update, state),
            Refresh: state.refresh,
        }
        return calls[type(operation)]

    def _of_sum(self, operation: BucketTotal, state: _State) -> Call:
        if self._sums[operation.sum] is None:
            return _nothing
        if isinstance(operation, ShardGather):
            return state.start_gather if operation.end == "start" else state.finish_gather
        return state.start if operation.end == "start" else state.finish

    def _gather_errors(self, layer: str, gather: Reduction | None) -> None:
        if gather is not None:
            gather.start()
        self._due.add(layer)

    def _finish_rows(self, layer: str, gather: Reduction | None) -> None:
        # The next forward pass may have started a gather of its own already.
        if gather is not None and layer in self._due:
            gather.finish()

    def _compute(self, layer: str, gradient: Sequence[Call]) -> None:
        """Compute a layer's gradient of the whole batch if it is due."""
        if layer in self._due:
            self._due.discard(layer)
            for call in gradient:
                call()
            for state in self._replicated(layer):
                # No sum makes the update of a replicated bucket due.
                state.computed, state.pending = True, self._part + 1 == self._parts

    def _replicated(self, layer: str) -> list[_State]:
        return [s for s in self._states if s.bucket.replicated and layer in s.bucket.chunk.layers]

    def _cast(self, state: _State) -> None:
        # Direct updates read the gradients in 16 bits themselves.
        if not self.store.direct:
            state.bucket.widen()

    def _accumulate(self, state: _State) -> None:
        # After `finish` this call comes again in the next forward pass: a replicated gradient is added only once.
        if state.computed or not state.bucket.replicated:
            state.computed = False
            state.bucket.add_part(self._part, self._parts)

    def _compensate(self, state: _State) -> None:
        """Add residuals from a checkpoint, once, to the gradients of a bucket whose sum does not round, as on one rank.
        """
        bucket, total = state.bucket, state.total
        if total is not None and total.encoding is None and bucket.errors is not None and bucket.errors.any():
            bucket.grads += self.store.memory.device.array(bucket.errors, bucket.errors.dtype)
            bucket.errors.fill(0)

    def _update(self, state: _State) -> None:
        if state.pending:
            state.pending = False
            if self.update is not None:
                self.update(state.bucket)
                # The rank has updated its shard only; the others are gathered next.
                state.updated = state.gather is not None

    # -- a step --------------------------------------------------------------------------------

    def begin(self, part: int = 0) -> None:
        """Begin the backward pass of part number `part` of the batch (of `ParameterStore.parts`); gradients are summed
        in the last one only.
        """
        if self._due or not all(state.idle for state in self._states):  # never in a step that follows a forward pass
            self.finish()
        self._part = part

    def finish(self) -> None:
        """Finish all sums and update all parameters."""
        for call in self._completions:
            call()

    # -- outside of a step ---------------------------------------------------------------------

    def spread(self) -> None:
        """Gather the shards of parameters that the ranks own, and round the copies in 16 bits, after a change outside
        of a step. Collective.
        """
        for state in self._states:
            if state.gather is not None:
                state.gather.run()
            state.bucket.refresh()

    def synchronize(self) -> None:
        """Finish all sums and updates, and collect rounding residuals for a checkpoint. Collective; outside of steps.

        The rounding residuals of all ranks are summed on the first rank that holds the block, which adds them to its
        next gradient, also under another decomposition.
        """
        self.finish()
        for state in self._states:
            bucket, group = state.bucket, group_of(self.comm, state.bucket.holders)
            if state.total is None or state.total.encoding is None or bucket.errors is None or group is None:
                continue
            state.total.encoding.collect()
            with closing(group.reduction(bucket.errors, kind="errors")) as whole:
                whole.run()
            # Their sum is added once, by the first rank.
            if group.rank:
                bucket.errors.fill(0)

    def discard(self) -> None:
        """Finish all sums, and drop the updates of a failed step and residuals that are not finite."""
        # Sums in progress end on all ranks, so that the next step can start them. No update is pending after this loop,
        # so the calls of `finish` make no update.
        for state in self._states:
            state.finish()
            state.pending = state.computed = False
            if state.total is not None and state.total.encoding is not None:
                state.total.encoding.forget_faults()
        self._due.clear()
        self.finish()
        # A forward pass or a backward pass that was cut short leaves gathers of dense layers in progress.
        for kernel in self.program.exposed.values():
            self._runner.instance(kernel).abandon()

    def close(self) -> None:
        """Free the reductions; idempotent."""
        for total in self._sums.values():
            if total is not None:
                total.close()


@dataclass
class _State:
    """Progress of a bucket in a step: sum of gradients, update, gather of parameters.

    Attributes
    ----------
    total, gather
        Reductions that sum the gradients and, if ranks update shards, gather the parameters; None without a sum or
        gather on this rank.
    computed
        Whether a gradient of the whole batch was computed and is still to be added to those of earlier parts.
    pending, updated
        Whether an update is due, and whether it was made but the gather has not started.
    gathered
        Whether the parameters were gathered, and their copies in 16 bits are not rounded yet.
    """

    bucket: Bucket
    total: Reduction | None = None
    gather: Reduction | None = None
    computed: bool = False
    pending: bool = False
    updated: bool = False
    gathered: bool = False

    @property
    def idle(self) -> bool:
        """Whether nothing is pending: the parameters of the bucket are updated, gathered and rounded."""
        gathering = self.gather is not None and self.gather.under_way
        return not (self.pending or self.updated or gathering or self.gathered)

    def start(self) -> None:
        """Start the sum; an update is due afterwards."""
        assert self.total is not None
        self.total.start()
        self.pending = True

    def finish(self) -> None:
        """Finish the sum if it is in progress."""
        if self.total is not None and self.total.under_way:
            self.total.finish()

    def start_gather(self) -> None:
        """Start the gather of parameters if this rank has updated its shard."""
        if self.updated:
            assert self.gather is not None
            self.gather.start()
            self.updated = False

    def finish_gather(self) -> None:
        """Finish the gather if it is in progress."""
        if self.gather is not None and self.gather.under_way:
            self.gather.finish()
            # Fused updates write the copies of this rank's shard only.
            self.gathered = self.bucket.copies is not None

    def refresh(self) -> None:
        """Round the parameters to 16 bits if they were gathered and are not rounded yet."""
        if self.gathered:
            self.gathered = False
            self.bucket.refresh()


def _nothing() -> None:
    pass


def check_possible(store: ParameterStore, comm: Communicator, scheme: Scheme) -> None:
    """Validate the scheme. Local, the same on all ranks.

    Raises
    ------
    UserError
        If the dtype does not allow the rounding or its residuals, or hierarchical sums have no shared memory.
    """
    if not scheme.codec.takes(store.dtype.name):
        raise UserError(
            f'reduction.payload: expected training.dtype = "{scheme.codec.dtype}" with "{scheme.payload}", got '
            f'"{store.dtype}"; change one'
        )
    if scheme.keeps_errors and store.loss_scale is not None:
        raise UserError(
            'reduction.error_feedback: expected false with training.dtype = "float16", whose overflows would stay in '
            'the errors, got true; set it to false, or choose training.dtype = "bfloat16"'
        )
    if scheme.sum.by_nodes and comm.size > 1 and not comm.shares_memory:
        others = [name for name, kind in KINDS.items() if name not in BY_NODES and not kind.searches]
        raise UserError(
            f'reduction.name: expected a transport by which ranks share memory with "{scheme.name}", got '
            f'"{comm.transport}"; '
            f'choose backend.transport = "auto", or one of {", ".join(others)}'
        )
