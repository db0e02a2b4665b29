"""Sums of gradients and updates of parameters, when the layers are passed: every scheme, from its description."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from halograd.errors import UserError

from ..comm import Communicator, Reduction
from ..comm.reduction import ReductionSpec
from ..dtensor import group_of, reductions_in_groups
from ..layers.reduction_scheme import BY_NODES, KINDS, Scheme
from ..layers.replicated_dense import ReplicatedDense
from .store import Bucket, ParameterStore

__all__ = ["Reducer", "Run", "check_possible"]

Run = Callable[[str, str, Callable[[], None]], None]


class Reducer:
    """Sums of the gradients of a store over the ranks that hold the same blocks, and their updates. Collective. ::

        begin()                      # before backward; begin(part) for a batch in parts
        ready(layer)                 # after backward of each layer: start the sums that are complete
        flush()                      # after backward
        ...
        require(layer)               # before each layer of the next forward pass: wait, update

    and `finish` before parameters are read. All ranks make the same calls in the same order, so collectives are issued
    in one order everywhere. A step allocates nothing.

    The buckets of the store decide what one sum contains, the method of the scheme how it is computed
    (`halograd.comm.sums`). With shards (``sharded``) every rank sums and updates its shard of the parameters, and sends
    it to the others. The first `require` of a forward pass does that for all buckets, those of the first layers first:
    it waits for the reduce-scatter, updates the own shard and starts the all-gather, for which the layers of the bucket
    wait. So gradients travel during backward, and parameters during forward.

    Replicated dense layers sum nothing, under any scheme: their operators gather activations and errors, and `require`
    computes the gradient of the whole batch. The gathers of errors start after all sums in `flush`, and travel during
    the next forward pass.

    Parameters
    ----------
    store
        Store that was made for this scheme.
    comm
        Communicator of the ranks that share the parameters.
    scheme
        Scheme of gradient reduction.
    dense
        Operators of the layers that may be replicated, as far as backward reaches them, in order of computation.
    run
        ``run(layer, "backward", call)`` calls, and records the time of a gradient; None: no times are recorded.

    Attributes
    ----------
    store, comm, scheme
        The parameters of the same names.
    update
        Called with a bucket after its gradients are summed: when its parameters are next needed or at :meth:`finish`,
        whichever comes first. None: nothing is updated.
    delayed
        False: `flush` waits for gathers of replicated layers and computes the gradients, as a step without overlap
        would. Both orders give the same bits, because they compute the same from the same arrays.

    Raises
    ------
    UserError
        If the scheme is not possible here; on all ranks.

    Notes
    -----
    Communication per process and step: one sum per bucket of which it holds a part, counted by its method
    (`Communicator.reduction`); per replicated layer two all-gathers of its rows
    (`halograd.layers.replicated_dense`). Rounding residuals are in `Bucket.errors`, and with the sums until `settle`.

    References
    ----------
    Le et al. 2018, Section 3.1 (steps B-4-1 to B-5-2) and Section 4.1: chunks summed on the host. Rajbhandari et al.
    2020, "ZeRO", stage 1 (P_os), with a reduce-scatter per bucket. Lee et al. 2017, Algorithm 2,
    lines 7 to 9, 12, 25 to 26: there the previous layer posts the gather of activations; here it starts after the
    update, which reads the activations that the gather overwrites.
    """

    def __init__(
        self,
        store: ParameterStore,
        comm: Communicator,
        scheme: Scheme,
        dense: Sequence[ReplicatedDense] = (),
        run: Run | None = None,
    ) -> None:
        check_possible(store, comm, scheme)
        self.store, self.comm, self.scheme, self._kind = store, comm, scheme, scheme.kind
        self.update: Callable[[Bucket], None] | None = None
        self.delayed, self._run = True, run or _unrecorded
        self._sums = self._make([bucket for bucket in store.buckets if not bucket.replicated])
        operators, replicated = {one.name: one for one in dense}, [b for b in store.buckets if b.replicated]
        found = {layer: _Replicated(b, operators.get(layer)) for b in replicated for layer in _layers(b)}
        # Gathers have the order in which forward needs them.
        self._replicated = {layer: found[layer] for layer in dict.fromkeys([*operators, *found]) if layer in found}
        self._sums_of: dict[str, list[_Sum]] = {}
        self._part, self._parts = 0, store.parts
        for one in self._sums:
            for layer in one.layers:
                self._sums_of.setdefault(layer, []).append(one)

    def _make(self, buckets: Sequence[Bucket]) -> list[_Sum]:
        """Make the sums of buckets over the ranks that hold the same blocks; none for buckets without elements here."""
        made = []
        for i, method in enumerate(self.scheme.sums):
            kind = method.name if self._kind.shards else "allreduce"  # the kind under which traffic is counted
            arrays = [bucket.params if i else bucket.grads for bucket in buckets]
            specs = [ReductionSpec(array, kind, method=method.name, codec=method.codec) for array in arrays]
            made.append(reductions_in_groups(self.comm, [(b.holders, s) for b, s in zip(buckets, specs)]))
        sums = [_Sum(bucket, *of_bucket) for bucket, *of_bucket in zip(buckets, *made)]
        for bucket, one in zip(buckets, sums):
            if one.total is not None and one.total.encoding is not None and bucket.errors is not None:
                one.total.encoding.compensate(bucket.errors)
        return sums

    def begin(self, part: int = 0) -> None:
        """Begin the backward pass of a part of the batch (`ParameterStore.parts`); the last part starts the sums."""
        self.finish()
        self._part = part
        for one in self._sums:
            one.missing = len(one.layers)

    def ready(self, layer: str) -> None:
        """Note that the gradients of `layer` are complete on this rank."""
        for one in self._sums_of.get(layer, ()):
            one.missing -= 1
            if one.missing == 0 and not self._kind.waits:
                self._start(one)

    def _start(self, one: _Sum) -> None:
        if one.total is None:
            return
        one.bucket.widen()
        one.bucket.add_part(self._part, self._parts)
        if not self._is_last:
            return
        if one.total.encoding is None and one.bucket.errors is not None:
            self._add_errors(one.bucket)
        one.total.start()
        one.running = one.pending = True

    @property
    def _is_last(self) -> bool:
        """Whether the gradients are those of the whole batch after this pass."""
        return self._part + 1 == self._parts

    def _add_errors(self, bucket: Bucket) -> None:
        """Add residuals of another decomposition, once, to a bucket of one rank, which is not rounded."""
        assert bucket.errors is not None
        if bucket.errors.any():
            bucket.grads += self.store.memory.device.array(bucket.errors, bucket.errors.dtype)
            bucket.errors.fill(0)

    def flush(self) -> None:
        """End backward: start the sums of buckets with layers that no gradient reaches."""
        for one in self._sums:
            if one.missing > 0 or self._kind.waits:
                self._start(one)
                one.missing = 0
        if self._kind.waits:
            self._wait_for_sums()
        for other in self._replicated.values():
            other.pending = self._is_last
            if other.operator is not None:
                other.operator.gather_errors()
                other.due = True
        if not self.delayed:
            self._compute_all()

    def require(self, layer: str) -> None:
        """Complete the parameters of `layer` before it uses them."""
        if layer in self._replicated:
            self._complete_replicated(layer)
            return
        if self._kind.shards:
            self._update_shards()
        for one in self._sums_of.get(layer, ()):
            self._complete(one)

    def _complete(self, one: _Sum) -> None:
        """Complete the update of a bucket, and the gather of its parameters."""
        self._update(one)
        if one.gathering:
            one.gathering = False
            assert one.gather is not None
            one.gather.finish()
            one.bucket.refresh()

    def _update(self, one: _Sum) -> None:
        if not one.pending:
            return
        one.wait()
        one.pending = False
        if self.update is not None:
            self.update(one.bucket)
            if one.gather is not None:
                one.gather.start()
                one.gathering = True

    def _update_shards(self) -> None:
        """Update all shards that are due, and start their gathers, in the order in which forward needs them."""
        for one in reversed(self._sums):
            self._update(one)

    def _complete_replicated(self, layer: str) -> None:
        self._compute(layer)
        one = self._replicated[layer]
        if one.pending:
            one.pending = False
            if self.update is not None:
                self.update(one.bucket)

    def _compute(self, layer: str) -> None:
        one = self._replicated[layer]
        if one.due:
            one.due = False
            assert one.operator is not None
            self._run(layer, "backward", one.operator.whole_gradient)
            one.bucket.add_part(self._part, self._parts)

    def _compute_all(self) -> None:
        for layer in self._replicated:
            self._compute(layer)

    def _wait_for_sums(self) -> None:
        for one in self._sums:
            one.wait()

    def wait(self) -> None:
        """Finish all sums without updates (to clip by the global norm, for example); `finish` updates."""
        self._wait_for_sums()
        self._compute_all()

    def finish(self) -> None:
        """Finish all sums and update all parameters."""
        if self._kind.shards:
            self._update_shards()
        for one in reversed(self._sums) if self._kind.shards else self._sums:
            self._complete(one)
        for layer in self._replicated:
            self._complete_replicated(layer)

    def spread(self) -> None:
        """Gather the parameters that each rank updates, after a change outside of a step. Collective."""
        for one in self._sums:
            if one.gather is not None:
                one.gather.run()
        for bucket in self.store.buckets:
            bucket.refresh()

    def settle(self) -> None:
        """Finish, and move all state to where a checkpoint finds it. Collective; no part of a step.

        The rounding residuals of all ranks are summed on the first rank that holds the block, which adds them to its
        next gradient, also under another decomposition.
        """
        self.finish()
        for one in self._sums:
            bucket, group = one.bucket, group_of(self.comm, one.bucket.holders)
            if one.total is None or one.total.encoding is None or bucket.errors is None or group is None:
                continue
            one.total.encoding.collect()
            with closing(group.reduction(bucket.errors, kind="errors")) as whole:
                whole.run()
            if group.rank:
                bucket.errors.fill(0)

    def discard(self) -> None:
        """Finish all sums, and drop the updates of a failed step and residuals that are not finite."""
        for one in self._sums:
            one.wait()
            one.pending = False
            if one.total is not None and one.total.encoding is not None:
                one.total.encoding.forget_faults()
        for one in reversed(self._sums):
            self._complete(one)
        for other in self._replicated.values():
            if other.operator is not None:
                other.operator.abandon()
            other.due = other.pending = False

    def close(self) -> None:
        """Free the sums; idempotent."""
        for one in self._sums:
            for total in (one.total, one.gather):
                if total is not None:
                    total.close()


class _Sum:
    """State of a bucket whose gradients are summed.

    Attributes
    ----------
    total, gather
        The sum, and the gather of parameters where ranks update shards.
    missing
        Number of layers with incomplete gradients.
    running, pending, gathering
        Whether the sum is in progress, the update due, the gather in progress.
    """

    def __init__(self, bucket: Bucket, total: Reduction | None, gather: Reduction | None = None) -> None:
        self.bucket, self.total, self.gather = bucket, total, gather
        self.layers = _layers(bucket)
        self.missing, self.running, self.pending, self.gathering = 0, False, False, False

    def wait(self) -> None:
        """Finish the sum if it is in progress."""
        if self.running:
            self.running = False
            assert self.total is not None
            self.total.finish()


class _Replicated:
    """State of a bucket whose gradients every rank computes for the whole batch, by `operator`, if backward reaches it.

    Attributes
    ----------
    due, pending
        Whether the computation of the gradient and the update are due.
    """

    def __init__(self, bucket: Bucket, operator: Any) -> None:
        self.bucket, self.operator = bucket, operator
        self.due = self.pending = False


def check_possible(store: ParameterStore, comm: Communicator, scheme: Scheme) -> None:
    """Validate the scheme, on all ranks alike. Local.

    Raises
    ------
    UserError
        If the dtype does not allow the rounding, or sums by nodes have no shared memory.
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


def _layers(bucket: Bucket) -> frozenset[str]:
    return frozenset(name.rpartition("/")[0] for name in bucket.names)


def _unrecorded(layer: str, category: str, call: Callable[[], None]) -> None:
    call()
