"""Factors on gradients that are decided on the device, without a wait: dynamic loss scaling, clipping by the norm."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from halograd.errors import UserError

from ..device import Ticket
from ..kernels import Kernel
from .pass_loss import FetchedNumber, PendingLoss

if TYPE_CHECKING:
    from ..comm import Communicator, Reduction
    from .memory import Memory
    from .store import Bucket, ParameterStore

__all__ = ["Clip", "GradientCheck", "LossScale"]

INITIAL, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
#: So many consecutive steps are skipped at a scale of 1: then the gradients themselves are not finite.
PATIENCE = 20


class GradientCheck(Protocol):
    """Protocol of a number that is computed from all gradients, between their sums and the updates."""

    @property
    def over_ranks(self) -> bool:
        """Whether the number is summed over the ranks."""
        ...

    def measure(self) -> None:
        """Compute the number. Collective if it is summed."""
        ...


class LossScale:
    """Dynamic factor on the gradient of the loss. Collective where parameters are cut or sharded, else local.

    ::

        forward   the loss multiplies its gradient by `factor`
        measure   when all gradients are summed: sets `skip` if one is infinite or NaN
        updates   multiply gradients by `inverse`; do nothing if `skip` is set
        adapt     halves the factor after a skipped step, doubles it after 2000 that were not skipped

    The smallest number of float16 is 6e-8; without the factor small gradients become zero. All state is in device
    memory and changed by kernels there, without a wait. The host reads it one step later (`known`, `skipped`), for the
    log. A skipped step counts as a step for the schedule and for Adam's corrections.

    Parameters
    ----------
    memory
        Allocates the state.

    Attributes
    ----------
    factor, inverse
        Float64 ``(1,)`` on the device.
    skip
        Int32 ``(1,)`` on the device; read by the kernels that update.
    known
        The factor as the host read it last, one step late.
    skipped
        Number of skipped steps, read at the same time.

    References
    ----------
    Micikevicius et al., "Mixed precision training", ICLR 2018, Section 3.2.
    """

    def __init__(self, memory: Memory) -> None:
        device = self._device = memory.device
        self._kernels = memory.kernels
        self.state = device.array([INITIAL, 0.0, 1.0 / INITIAL], np.float64)
        self.factor, self.inverse = self.state[0:1], self.state[2:3]
        self._flag, self.skip = (device.zeros((1,), np.int32) for _ in range(2))
        self._adapt = self._kernels.update_loss_scale(self.state, self._flag, GROWTH, BACKOFF, INTERVAL)
        self._count = device.zeros((1,), np.float64)
        self._find: Any = None
        self._sum: Reduction | None = None
        self._pinned = device.pinned((3,), np.float64)
        self._ticket: Ticket | None = None
        self.known, self.skipped, self._row = INITIAL, 0, 0

    def watch(self, grads: list[Any], comm: Communicator | None) -> None:
        """Set the gradients to check; with `comm` the ranks combine their findings. Collective over it."""
        self._find = self._kernels.find_nonfinite(grads, self._flag)
        self._sum = None if comm is None else comm.reduction(self._count, kind="loss scale")

    @property
    def over_ranks(self) -> bool:
        """Whether the ranks combine their results."""
        return self._sum is not None

    def measure(self) -> None:
        """Set `skip` if a summed gradient is not finite. Enqueued; collective with `comm`."""
        self._find()
        if self._sum is not None:
            np.copyto(self._count, self._flag)
            self._sum.run()
            np.copyto(self._flag, np.minimum(self._count, 1), casting="unsafe")
        np.copyto(self.skip, self._flag)

    def adapt(self) -> None:
        """Change the factor for the next step, after the updates of this one have read theirs. Enqueued."""
        self.observe()
        self._adapt()
        self._device.download(self.state, self._pinned)
        self._ticket = self._device.mark()

    def observe(self) -> None:
        """Read the state after the last step. Waits for that step, which is complete when the next one is enqueued."""
        if self._ticket is None:
            return
        self._ticket.wait()
        self._ticket = None
        before, self.known = self.known, float(self._pinned[0])
        skipped = self._pinned[1] == 0 and self.known <= before
        self.skipped += skipped
        self._row = self._row + 1 if skipped and self.known == 1 else 0

    @property
    def hopeless(self) -> bool:
        """Whether gradients stayed non-finite at the smallest scale for `PATIENCE` steps."""
        return self._row >= PATIENCE

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint. Waits for the device."""
        scale, good, _ = self._device.to_host(self.state).tolist()
        return {"scale": scale, "good": good}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from the state of a checkpoint."""
        scale, good = float(state["scale"]), float(state["good"])
        if not (math.isfinite(scale) and scale >= 1):
            raise UserError(f"loss scale: expected a number >= 1 in the checkpoint, got {scale}; it is damaged")
        self._device.assign(self.state, np.array([scale, good, 1 / scale]))
        self.known, self._ticket, self._row = scale, None, 0

    def close(self) -> None:
        """Free the kernels and the reduction. Collective with `comm`."""
        for item in (self._find, self._adapt, self._sum):
            if item is not None:
                item.close()


class Clip:
    """Clipping of gradients by their global norm, computed where the gradients are, without a wait. Collective.

    The factor is ``min(1, max_norm / (norm + 1e-6))`` as in torch.nn.utils.clip_grad_norm_. It is an argument of
    ``Optimizer.begin_step``, so it costs no pass over the gradients. The norm needs every gradient, so the sums of
    gradients are no longer hidden behind the next forward pass.

    Parameters
    ----------
    store
        Store of the gradients.
    comm
        Ranks that share them.
    max_norm
        Norm above which gradients are scaled down to it.

    Attributes
    ----------
    norm
        Global norm in the last step; None before the first.
    factor
        Factor on the gradients of this step, float64 ``(1,)`` where they are.
    """

    def __init__(self, store: ParameterStore, comm: Communicator, max_norm: float) -> None:
        device, kernels = store.memory.device, store.memory.kernels
        self._store = store
        self._square, self._norm, self.factor = (device.zeros((1,), np.float64) for _ in range(3))
        self._fetched = FetchedNumber(device)
        local = store.whole and not store.scheme.kind.shards
        self._sum = None if local else comm.reduction(self._square, kind="norm")
        inverse = None if store.loss_scale is None else store.loss_scale.inverse
        self._clip: Kernel = kernels.clip(self._square, inverse, max_norm, self._norm, self.factor)
        self._squares: Kernel | None = None
        self.bind()
        self.norm: PendingLoss | None = None

    def bind(self) -> None:
        """Make the kernel for the present buckets of the store. Local."""
        store = self._store
        if self._squares is not None:
            self._squares.close()
        terms = [(b.grads[store.owned(b)], self._holders(b)) for b in store.buckets]
        self._squares = store.memory.kernels.sum_of_squares(terms, self._square)

    def _holders(self, bucket: Bucket) -> int:
        """Return by how many ranks a square is counted: a block by all that hold it, a shard by its owner only."""
        return 1 if self._sum is None or self._store.is_sharded(bucket) else bucket.holders.members_each

    @property
    def over_ranks(self) -> bool:
        """Whether the ranks sum the squares of their gradients."""
        return self._sum is not None

    def measure(self) -> None:
        """Compute the norm and the factor from summed gradients. Collective.

        On a device the host knows `norm` one step later, as it does a loss.
        """
        assert self._squares is not None
        self._squares()
        if self._sum is not None:
            self._sum.run()
        self._clip()
        if self.norm is not None and self.norm.value is None:
            self.norm.value = self._fetched.read()
        self._fetched.put(self._norm)
        self._fetched.fetch()
        self.norm = PendingLoss(self._fetched.read)
