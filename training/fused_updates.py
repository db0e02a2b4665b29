"""The updates of an optimizer on a device: one launch per bucket, numbers that change from step to step over there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halograd.device import Device, Ticket
from halograd.training.shards import owned
from halograd.training.store import Bucket, ParameterStore

__all__ = ["FusedUpdates", "decays_within"]

#: Kernel of ``(p, g, state, scalars, decays, bucket)``.
Make = Callable[[Any, Any, tuple[Any, ...], Any, list[tuple[int, int, bool]], Bucket], Any]


class FusedUpdates:
    """One kernel per bucket. Local.

    Parameters
    ----------
    store
        Whose buckets.
    state
        Per bucket the state arrays for what this rank updates of it.
    make
        The optimizer's own kernel.
    """

    def __init__(self, store: ParameterStore, state: Callable[[Bucket], tuple[Any, ...]], make: Make) -> None:
        self._device: Device = store.memory.device
        # Learning rate, scale of the gradients, and the two corrections of Adam.
        self._scalars = self._device.zeros((4,), np.float64)
        self._pinned = [self._device.pinned((4,), np.float64) for _ in range(2)]
        self._sent: list[Ticket | None] = [None, None]
        self._scaling = store.loss_scale
        self._kernels = {}
        for bucket in store.buckets:
            own = owned(store, bucket)
            p, g, decays = bucket.params[own], bucket.grads[own], decays_within(bucket.decays, own)
            self._kernels[id(bucket)] = make(p, g, state(bucket), self._scalars, decays, bucket)

    def begin(self, step: int, numbers: Sequence[float], scale: Any) -> None:
        """What step number `step` works with: learning rate and corrections, and the factor on the gradients."""
        pinned, sent = self._pinned[step % 2], self._sent[step % 2]
        if sent is not None:
            sent.wait()  # it was enqueued two steps ago
        rate, *corrections = numbers
        known = isinstance(scale, (int, float))
        pinned[:] = (rate, scale if known else 1.0, *corrections)
        self._device.upload(pinned, self._scalars)
        self._sent[step % 2] = self._device.mark()
        if not known:
            np.copyto(self._scalars[1:2], scale)
        if self._scaling is not None:
            np.multiply(self._scalars[1:2], self._scaling.inverse, out=self._scalars[1:2])

    def update(self, bucket: Bucket) -> None:
        """Enqueue the update of a bucket."""
        self._kernels[id(bucket)]()

    def close(self) -> None:
        """Free the kernels."""
        for kernel in self._kernels.values():
            kernel.close()


def decays_within(decays: Sequence[tuple[int, int, bool]], own: slice) -> list[tuple[int, int, bool]]:
    """The ranges within a part of the bucket, counted from its beginning.

    >>> decays_within([(0, 10, True), (10, 20, False)], slice(5, 15))
    [(0, 5, True), (5, 10, False)]
    """
    cut = [(max(a, own.start) - own.start, min(b, own.stop) - own.start, kind) for a, b, kind in decays]
    return [(a, b, kind) for a, b, kind in cut if a < b]
