"""Gradient reduction: sums over the ranks that hold a parameter, bucket by bucket, behind the rest of backward.

A bucket is started when the last of its layers has its gradients, and waited for when the first of
its parameters is needed again: all ranks run the same layers in the same order, so collectives are
issued in one order everywhere. More schemes will stand beside this one, under the same four calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halograd.comm import Communicator, Reduction
from halograd.layers.groups import group_of
from halograd.training.store import Bucket, ParameterStore

__all__ = ["GradientReducer"]


class GradientReducer:
    """Sums the gradients of a store in its buckets, each over the ranks of `comm` that hold the same blocks.

    Collective to build and run.

    Attributes
    ----------
    comm
        As given.
    update
        Called with a bucket once its gradients are summed, when its parameters are next needed or
        :meth:`finish` is called, whichever comes first. None: nothing is updated.

    Notes
    -----
    Communication per process and step: one all-reduce per bucket it holds something of, of its bytes.
    """

    def __init__(self, store: ParameterStore, comm: Communicator, layers: Sequence[str]) -> None:
        self._store, self.comm = store, comm
        self._reductions = [self._reduction(b, comm) for b in store.buckets]
        self._layers = [{n.rpartition("/")[0] for n in b.names} for b in store.buckets]
        self._buckets_of: dict[str, list[int]] = {}
        for i, some in enumerate(self._layers):
            for layer in some:
                self._buckets_of.setdefault(layer, []).append(i)
        self._missing = [0] * len(store.buckets)
        self._running = [False] * len(store.buckets)  # the sum was started and not waited for
        self._pending = [False] * len(store.buckets)  # the update is still due
        self.update: Callable[[Bucket], None] | None = None

    def _reduction(self, bucket: Bucket, comm: Communicator) -> Reduction | None:
        """The sum over the ranks that hold the same blocks; None where this one holds nothing."""
        group = group_of(comm, bucket.colors)
        return None if group is None else group.reduction(bucket.grads, kind="allreduce")

    def begin(self) -> None:
        """A backward pass begins."""
        self.finish()
        self._missing = [len(layers) for layers in self._layers]

    def ready(self, layer: str) -> None:
        """The gradients of `layer` are complete on this rank."""
        for i in self._buckets_of.get(layer, ()):
            self._missing[i] -= 1
            if self._missing[i] == 0:
                self._start(i)

    def _start(self, i: int) -> None:
        reduction = self._reductions[i]
        if reduction is not None:
            reduction.start()
            self._running[i] = self._pending[i] = True

    def flush(self) -> None:
        """Backward is over: start what is incomplete (layers that no gradient reaches)."""
        for i, missing in enumerate(self._missing):
            if missing > 0:
                self._start(i)
                self._missing[i] = 0

    def require(self, layer: str) -> None:
        """`layer` is about to use its parameters."""
        for i in self._buckets_of.get(layer, ()):
            self._complete(i)

    def _complete(self, i: int) -> None:
        if not self._pending[i]:
            return
        self._wait_for(i)
        self._pending[i] = False
        if self.update is not None:
            self.update(self._store.buckets[i])

    def wait(self) -> None:
        """Finish all sums without updating yet (to clip by the global norm, say); `finish` updates."""
        for i in range(len(self._running)):
            self._wait_for(i)

    def _wait_for(self, i: int) -> None:
        if self._running[i]:
            self._running[i] = False
            reduction = self._reductions[i]
            assert reduction is not None
            reduction.finish()

    def finish(self) -> None:
        """All sums are done and all parameters updated when this returns."""
        for i in range(len(self._pending)):
            self._complete(i)

    def discard(self) -> None:
        """Finish all sums and forget the updates (of a step that went wrong)."""
        self.wait()
        self._pending = [False] * len(self._pending)

    def close(self) -> None:
        """Free the reductions."""
        for reduction in self._reductions:
            if reduction is not None:
                reduction.close()
