"""Every rank sums and updates a shard of the parameters, and passes it on."""

from __future__ import annotations

from collections.abc import Sequence

from halograd.comm import Communicator, Reduction
from halograd.layers.groups import in_group
from halograd.layers.reduction_scheme import Scheme
from halograd.training.reduction.bucketed import BucketedReducer
from halograd.training.store import Bucket, ParameterStore

__all__ = ["ShardedReducer"]


class ShardedReducer(BucketedReducer):
    """Reduce-scatters the gradients in buckets, lets each rank update its shard, and all-gathers the parameters. ::

        backward   ready: start the reduce-scatter of a bucket
        forward    first require: for every bucket, those of the first layers first:
                       wait for the reduce-scatter, update the own shard, start the all-gather
                   require: wait for the all-gather of the layer's buckets

    so that the reduce-scatters travel behind backward, and the all-gathers behind the next forward pass. The shards are
    those of `halograd.comm.shards`, among the ranks that hold the bucket. Outside of its shard a rank's gradients are
    of no use after the sum; the optimizer keeps state for the shard only (`halograd.training.shards`).

    Collective to build and run.

    Notes
    -----
    Communication per process and step and bucket of n bytes that P processes hold: a reduce-scatter, booked as n, and
    an all-gather, booked as the process's shard, about n / P. Together they take the time of an all-reduce.

    References
    ----------
    Rajbhandari et al. 2020, "ZeRO", stage 1 (P_os), with gradients that are scattered bucket by bucket.
    """

    def __init__(self, store: ParameterStore, comm: Communicator, layers: Sequence[str], scheme: Scheme) -> None:
        super().__init__(store, comm, layers, scheme)
        self._gathers = [self._gather(bucket) for bucket in self.buckets]
        self._gathering = [False] * len(self.buckets)

    def _sum(self, bucket: Bucket) -> Reduction | None:
        return in_group(
            self.comm,
            bucket.holders,
            lambda group: group.reduction(bucket.grads, kind="reduce_scatter", method="reduce_scatter"),
        )

    def _gather(self, bucket: Bucket) -> Reduction | None:
        return in_group(
            self.comm,
            bucket.holders,
            lambda group: group.reduction(bucket.params, kind="all_gather", method="all_gather"),
        )

    def require(self, layer: str) -> None:
        self._update_shards()
        for i in self._buckets_of.get(layer, ()):
            self._wait_for_gather(i)

    def _update_shards(self) -> None:
        """Update all shards whose update is due, and start to pass them on; what forward needs first goes first."""
        if True not in self._pending:
            return
        for i in reversed(range(len(self._pending))):
            self._complete(i)

    def _complete(self, i: int) -> None:
        if not self._pending[i]:
            return
        super()._complete(i)
        gather = self._gathers[i]
        if gather is not None and self.update is not None:
            gather.start()
            self._gathering[i] = True

    def _wait_for_gather(self, i: int) -> None:
        if self._gathering[i]:
            self._gathering[i] = False
            gather = self._gathers[i]
            assert gather is not None
            gather.finish()
            self.buckets[i].refresh()

    def finish(self) -> None:
        self._update_shards()
        for i in reversed(range(len(self._gathering))):
            self._wait_for_gather(i)

    def discard(self) -> None:
        super().discard()
        for i in reversed(range(len(self._gathering))):
            self._wait_for_gather(i)

    def close(self) -> None:
        super().close()
        for gather in self._gathers:
            if gather is not None:
                gather.close()
