"""Gradient reduction: sums over all ranks, bucket by bucket, behind the rest of backward.

A bucket is started when the last of its layers has its gradients, and waited for when the first of
its parameters is needed again: all ranks run the same layers in the same order, so collectives are
issued in one order everywhere. More schemes will stand beside this one, under the same four calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from halograd.comm import Communicator
from halograd.training.store import Bucket, ParameterStore

__all__ = ["GradientReducer"]


class GradientReducer:
    """Sums the gradients of a store over `comm` in its buckets. Collective to build and run.

    Attributes
    ----------
    update
        Called with a bucket once its gradients are summed, when its parameters are next needed or
        :meth:`finish` is called, whichever comes first. None: nothing is updated.

    Notes
    -----
    Communication per process and step: one all-reduce per bucket, of its bytes.
    """

    def __init__(self, store: ParameterStore, comm: Communicator, layers: Sequence[str]) -> None:
        self._store = store
        self._reductions = [comm.reduction(b.grads, kind="allreduce") for b in store.buckets]
        self._bucket_of: dict[str, int] = {}
        for i, bucket in enumerate(store.buckets):
            self._bucket_of |= {name.rpartition("/")[0]: i for name in bucket.names}
        self._layers = [{n.rpartition("/")[0] for n in b.names} for b in store.buckets]
        self._missing = [0] * len(store.buckets)
        self._running = [False] * len(store.buckets)  # the sum was started and not waited for
        self._pending = [False] * len(store.buckets)  # the update is still due
        self.update: Callable[[Bucket], None] | None = None

    def begin(self) -> None:
        """A backward pass begins."""
        self.finish()
        self._missing = [len(layers) for layers in self._layers]

    def ready(self, layer: str) -> None:
        """The gradients of `layer` are complete on this rank."""
        i = self._bucket_of.get(layer)
        if i is None:
            return
        self._missing[i] -= 1
        if self._missing[i] == 0:
            self._start(i)

    def _start(self, i: int) -> None:
        self._reductions[i].start()
        self._running[i] = self._pending[i] = True

    def flush(self) -> None:
        """Backward is over: start what is incomplete (layers that no gradient reaches)."""
        for i, missing in enumerate(self._missing):
            if missing > 0:
                self._start(i)
                self._missing[i] = 0

    def require(self, layer: str) -> None:
        """`layer` is about to use its parameters."""
        i = self._bucket_of.get(layer)
        if i is not None:
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
            self._reductions[i].finish()

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
            reduction.close()
