"""Sums over the ranks that hold a parameter, bucket by bucket, behind the rest of backward."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from halograd.comm import Communicator, Reduction
from halograd.layers.groups import group_of, in_group
from halograd.layers.reduction_scheme import Scheme
from halograd.training.reduction.base import Reducer
from halograd.training.store import Bucket, ParameterStore

__all__ = ["BucketedReducer"]


class BucketedReducer(Reducer):
    """Sums the gradients of a store in its buckets, each over the ranks of `comm` that hold the same blocks.

    A bucket is started when the last of its layers has its gradients, and waited for when the first of
    its parameters is needed again: all ranks run the same layers in the same order, so collectives are
    issued in one order everywhere. ``per_layer``, ``bucketed`` and ``two_chunks`` differ in the buckets that the
    store has made by `halograd.layers.reduction_chunks`; ``blocking`` starts when backward is over, and waits.

    Collective to build and run.

    Notes
    -----
    Communication per process and step: one all-reduce per bucket it holds something of, of its bytes; of half of them
    with payload bfloat16. What rounding takes away lies in `Bucket.errors`, and with the sums until `settle`.
    """

    def __init__(self, store: ParameterStore, comm: Communicator, layers: Sequence[str], scheme: Scheme) -> None:
        super().__init__(store, comm, layers, scheme)
        self._rounded: list[tuple[Bucket, Communicator, Any]] = []
        self._sums = [self._sum(bucket) for bucket in self.buckets]
        self._alone = [b.errors is not None and b.holders.members_each == 1 for b in self.buckets]
        self._layers = [{n.rpartition("/")[0] for n in b.names} for b in self.buckets]
        self._buckets_of: dict[str, list[int]] = {}
        for i, some in enumerate(self._layers):
            for layer in some:
                self._buckets_of.setdefault(layer, []).append(i)
        self._missing = [0] * len(self.buckets)
        self._running = [False] * len(self.buckets)  # the sum was started and not waited for
        self._pending = [False] * len(self.buckets)  # the update is still due

    def _sum(self, bucket: Bucket) -> Reduction | None:
        """The sum over the ranks that hold the same blocks; None where this one holds nothing."""
        method = "ordered" if self.scheme.deterministic else "allreduce"
        if self.scheme.payload == "bfloat16":
            method = "rounded"  # which has a fixed order too
        total = in_group(
            self.comm, bucket.holders, lambda group: group.reduction(bucket.grads, kind="allreduce", method=method)
        )
        group = group_of(self.comm, bucket.holders)
        if total is not None and group is not None and bucket.errors is not None:
            rounded: Any = total.on_host
            rounded.compensate(bucket.errors)
            self._rounded.append((bucket, group, rounded))
        return total

    def begin(self) -> None:
        self.finish()
        self._missing = [len(layers) for layers in self._layers]

    def ready(self, layer: str) -> None:
        for i in self._buckets_of.get(layer, ()):
            self._missing[i] -= 1
            if self._missing[i] == 0 and not self._blocking:
                self._start(i)

    def _start(self, i: int) -> None:
        total = self._sums[i]
        if total is not None:
            self.buckets[i].widen()
            if self._alone[i]:
                self._add_errors(self.buckets[i])
            total.start()
            self._running[i] = self._pending[i] = True

    def _add_errors(self, bucket: Bucket) -> None:
        """Where nobody shares a bucket nothing is rounded; what was under another decomposition is added, once."""
        assert bucket.errors is not None
        if bucket.errors.any():
            bucket.grads += self.store.memory.device.array(bucket.errors, bucket.errors.dtype)
            bucket.errors.fill(0)

    def flush(self) -> None:
        for i, missing in enumerate(self._missing):
            if missing > 0 or self._blocking:
                self._start(i)
                self._missing[i] = 0
        if self._blocking:
            self.wait()

    @property
    def _blocking(self) -> bool:
        return self.scheme.name == "blocking"

    def require(self, layer: str) -> None:
        for i in self._buckets_of.get(layer, ()):
            self._complete(i)

    def _complete(self, i: int) -> None:
        if not self._pending[i]:
            return
        self._wait_for(i)
        self._pending[i] = False
        if self.update is not None:
            self.update(self.buckets[i])

    def wait(self) -> None:
        for i in range(len(self._running)):
            self._wait_for(i)

    def _wait_for(self, i: int) -> None:
        if self._running[i]:
            self._running[i] = False
            total = self._sums[i]
            assert total is not None
            total.finish()

    def finish(self) -> None:
        for i in range(len(self._pending)):
            self._complete(i)

    def settle(self) -> None:
        """`finish`; then what was rounded away by all ranks lies with the first rank that holds the block.

        It is added to the next gradient there, under whatever decomposition that is computed.
        """
        self.finish()
        for bucket, group, total in self._rounded:
            assert bucket.errors is not None
            taken = 0
            for part in total.owned:
                bucket.errors[part] += total.share_error[taken : taken + part.stop - part.start]
                taken += part.stop - part.start
            total.share_error.fill(0)
            with closing(group.reduction(bucket.errors, kind="errors")) as whole:
                whole.run()
            if group.rank:
                bucket.errors.fill(0)

    def discard(self) -> None:
        self.wait()
        self._pending = [False] * len(self._pending)

    def close(self) -> None:
        for total in self._sums:
            if total is not None:
                total.close()
