"""Sums of gradients and updates of parameters, when the layers are passed: every scheme, from its description."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import numpy as np

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
    """Sums the gradients of a store over the ranks that hold the same blocks, and updates them. Collective. ::

        begin()                      # backward begins; of a batch in parts, begin(part)
        ready(layer)                 # for every layer, as backward has passed it: start the sums that are complete
        flush()                      # backward is over
        ...
        require(layer)               # for every layer of the next forward pass, before it computes: wait, update

    and `finish` whenever somebody wants to read parameters. All ranks make the same calls in the same order: so
    collectives are issued in one order everywhere. A step allocates nothing.

    What is summed together says the store, whose buckets are those of the scheme; how, the scheme's method
    (`halograd.comm.sums`). In shards (``sharded``) every rank sums and updates its shard of the parameters, and passes
    it on: at the first `require` of a forward pass, for every bucket, those of the first layers first, wait for the
    reduce-scatter, update the own shard and start the all-gather, for which the bucket's layers wait. So gradients
    travel behind backward, and parameters behind forward.

    Replicated dense layers sum nothing, beside any scheme: their operators gather activations and errors, and `require`
    computes the gradient of the whole batch. The gathers of errors start behind all sums in `flush`, and travel during
    the next forward pass.

    Parameters
    ----------
    store
        Made for this scheme.
    comm
        Whose ranks share the parameters.
    scheme
        What is asked for.
    dense
        The operators of the layers that may be replicated, as far as backward reaches them, in order of computation.
    run
        ``run(layer, "backward", call)`` calls, and records the time of a gradient; None: no times are recorded.

    Attributes
    ----------
    store, comm, scheme
        As given.
    update
        Called with a bucket once its gradients are summed, when its parameters are next needed or
        :meth:`finish` is called, whichever comes first. None: nothing is updated.
    delayed
        False: `flush` waits for gathers of replicated layers and computes the gradients, as a step without any overlap
        would. Both orders give the same bits: what is computed, and of what, is the same.

    Raises
    ------
    UserError
        If the scheme cannot be had here; on all ranks.

    Notes
    -----
    Communication per process and step: one sum per bucket that it holds something of, as its method is booked
    (`Communicator.reduction`); per replicated layer two all-gathers of its rows
    (`halograd.layers.replicated_dense`). What rounding takes away lies in `Bucket.errors`, and with the sums until
    `settle`.

    References
    ----------
    Le et al. 2018, Section 3.1 (steps B-4-1 to B-5-2) and Section 4.1: chunks summed on the host. Rajbhandari et al.
    2020, "ZeRO", stage 1 (P_os), with gradients that are scattered bucket by bucket. Lee et al. 2017, Algorithm 2,
    lines 7 to 9, 12, 25 to 26: there the gather of activations is posted by the layer before, here behind the update,
    which reads the activations that it would overwrite.
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
        self.delayed, self._run = True, run or _untold
        self._sums = self._make([bucket for bucket in store.buckets if not bucket.replicated])
        operators, replicated = {one.name: one for one in dense}, [b for b in store.buckets if b.replicated]
        found = {layer: _Replicated(b, operators.get(layer)) for b in replicated for layer in _layers(b)}
        # What forward needs first is gathered first.
        self._replicated = {layer: found[layer] for layer in dict.fromkeys([*operators, *found]) if layer in found}
        self._sums_of: dict[str, list[_Sum]] = {}
        self._part, self._parts = 0, store.parts
        for one in self._sums:
            for layer in one.layers:
                self._sums_of.setdefault(layer, []).append(one)

    def _make(self, buckets: Sequence[Bucket]) -> list[_Sum]:
        """The sums of buckets over the ranks that hold the same blocks; none where this one holds nothing."""
        made = []
        for i, method in enumerate(self.scheme.methods):
            kind = method if self._kind.shards else "allreduce"  # under which it is booked
            arrays = [bucket.params if i else bucket.grads for bucket in buckets]
            specs = [(b.holders, ReductionSpec(array, kind, method=method)) for b, array in zip(buckets, arrays)]
            made.append(reductions_in_groups(self.comm, specs))
        sums = [_Sum(bucket, *of_bucket) for bucket, *of_bucket in zip(buckets, *made)]
        for bucket, one in zip(buckets, sums):
            if one.total is not None and one.total.codec is not None and bucket.errors is not None:
                one.total.codec.compensate(bucket.errors)
        return sums

    def begin(self, part: int = 0) -> None:
        """A backward pass begins, of this part of the batch (`ParameterStore.parts`): after the last one is summed."""
        self.finish()
        self._part = part
        for one in self._sums:
            one.missing = len(one.layers)

    def ready(self, layer: str) -> None:
        """The gradients of `layer` are complete on this rank."""
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
        if one.total.codec is None and one.bucket.errors is not None:
            self._add_errors(one.bucket)
        one.total.start()
        one.running = one.pending = True

    @property
    def _is_last(self) -> bool:
        """Whether the gradients are those of the whole batch after this pass."""
        return self._part + 1 == self._parts

    def _add_errors(self, bucket: Bucket) -> None:
        """A bucket held by one rank is not rounded; what was under another decomposition is added, once."""
        assert bucket.errors is not None
        if bucket.errors.any():
            bucket.grads += self.store.memory.device.array(bucket.errors, bucket.errors.dtype)
            bucket.errors.fill(0)

    def flush(self) -> None:
        """Backward is over: start what is incomplete (layers that no gradient reaches)."""
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
        """`layer` is about to use its parameters."""
        if layer in self._replicated:
            self._complete_replicated(layer)
            return
        if self._kind.shards:
            self._update_shards()
        for one in self._sums_of.get(layer, ()):
            self._complete(one)

    def _complete(self, one: _Sum) -> None:
        """Have the parameters of a bucket updated, and whole."""
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
        """Update all shards whose update is due, and start to pass them on; what forward needs first goes first."""
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
        """Finish all sums without updating yet (to clip by the global norm, say); `finish` updates."""
        self._wait_for_sums()
        self._compute_all()

    def finish(self) -> None:
        """All sums are done and all parameters updated when this returns."""
        if self._kind.shards:
            self._update_shards()
        for one in reversed(self._sums) if self._kind.shards else self._sums:
            self._complete(one)
        for layer in self._replicated:
            self._complete_replicated(layer)

    def spread(self) -> None:
        """Pass on the parameters that each rank has changed of those it updates. Collective; no part of a step."""
        for one in self._sums:
            if one.gather is not None:
                one.gather.run()
        for bucket in self.store.buckets:
            bucket.refresh()

    def settle(self) -> None:
        """`finish`, and leave nothing behind that a checkpoint would not hold. Collective; no part of a step.

        What was rounded away by all ranks lies with the first rank that holds the block: it is added to the next
        gradient there, under whatever decomposition that is computed.
        """
        self.finish()
        for one in self._sums:
            bucket, group = one.bucket, group_of(self.comm, one.bucket.holders)
            if one.total is None or one.total.codec is None or bucket.errors is None or group is None:
                continue
            one.total.codec.collect()
            with closing(group.reduction(bucket.errors, kind="errors")) as whole:
                whole.run()
            if group.rank:
                bucket.errors.fill(0)

    def discard(self) -> None:
        """Finish all sums and forget the updates (of a step that went wrong), and what rounding took of no number."""
        for one in self._sums:
            one.wait()
            one.pending = False
            if one.total is not None and one.total.codec is not None:
                one.total.codec.forget_faults()
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
    """A bucket whose gradients are summed.

    Attributes
    ----------
    total, gather
        Its sum, and the gather of its parameters where ranks update shards.
    missing
        Layers whose gradients are not complete.
    running, pending, gathering
        Whether the sum is under way, the update due, the gather under way.
    """

    def __init__(self, bucket: Bucket, total: Reduction | None, gather: Reduction | None = None) -> None:
        self.bucket, self.total, self.gather = bucket, total, gather
        self.layers = _layers(bucket)
        self.missing, self.running, self.pending, self.gathering = 0, False, False, False

    def wait(self) -> None:
        """Finish the sum if it is under way."""
        if self.running:
            self.running = False
            assert self.total is not None
            self.total.finish()


class _Replicated:
    """A bucket whose gradients every rank computes of the whole batch; `operator` does, if backward reaches it.

    Attributes
    ----------
    due, pending
        Whether the gradient is to be computed yet, and the update due.
    """

    def __init__(self, bucket: Bucket, operator: Any) -> None:
        self.bucket, self.operator = bucket, operator
        self.due = self.pending = False


def check_possible(store: ParameterStore, comm: Communicator, scheme: Scheme) -> None:
    """Refuse what cannot be had, on all ranks alike. Local.

    Raises
    ------
    UserError
        Roundings that the dtype does not allow, sums by nodes without shared memory.
    """
    if scheme.payload == "bfloat16" and store.dtype != np.float32:
        raise UserError(
            f'reduction.payload: expected training.dtype = "float32" with "bfloat16", got "{store.dtype}"; change one'
        )
    if scheme.keeps_errors and store.loss_scale is not None:
        raise UserError(
            'reduction.error_feedback: expected false with training.dtype = "float16", whose overflows would stay in '
            'the errors, got true; set it to false, or choose training.dtype = "bfloat16"'
        )
    if scheme.sum.by_nodes and comm.size > 1 and comm.transport == "mpi":
        others = [name for name, kind in KINDS.items() if name not in BY_NODES and not kind.searches]
        raise UserError(
            f'reduction.name: expected a transport by which ranks share memory with "{scheme.name}", got "mpi"; '
            f'choose backend.transport = "auto", or one of {", ".join(others)}'
        )


def _layers(bucket: Bucket) -> frozenset[str]:
    return frozenset(name.rpartition("/")[0] for name in bucket.names)


def _untold(layer: str, category: str, call: Callable[[], None]) -> None:
    call()
