"""Dynamic scaling of the loss, decided on the device without a wait, and the protocol of checks of gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from halograd.errors import UserError

from ..device import Event

if TYPE_CHECKING:
    from ..comm import Communicator
    from .memory import Memory

__all__ = ["GradientCheck", "LossScale", "OverflowCheck"]

# The defaults of torch.amp.GradScaler.
INITIAL, GROWTH, BACKOFF, INTERVAL = 2.0**16, 2.0, 0.5, 2000
#: Number of consecutive steps skipped at a scale of 1 after which the gradients themselves count as not finite.
PATIENCE = 20


class GradientCheck(Protocol):
    """Protocol of a check that computes a number from all gradients, after their sums and before the updates."""

    @property
    def over_ranks(self) -> bool:
        """Whether the number is summed over the ranks."""
        ...

    def measure(self) -> None:
        """Compute the number. Collective if the ranks sum it."""
        ...

    def close(self) -> None:
        """Free what :meth:`measure` needs. Collective if the ranks sum the number."""
        ...


class LossScale:
    """Dynamic factor on the gradient of the loss. Local.

    ::

        forward   the loss multiplies its gradient by `factor`
        check     when all gradients are summed: :class:`OverflowCheck` sets `skip` if one is infinite or NaN
        updates   multiply gradients by `inverse`; do nothing if `skip` is set
        adapt     halves the factor after a skipped step, doubles it after 2000 consecutive steps without a skip

    The smallest positive float16 is 6e-8; without the factor, smaller gradients become zero. All state is in device
    memory, and kernels change it without a wait. The host reads it one step later (`known`, `skipped`), for the log. A
    skipped step counts as a step for the schedule and for Adam's corrections.

    Parameters
    ----------
    memory
        Allocator of the state.

    Attributes
    ----------
    factor, inverse
        The factor on the gradient of the loss, and its reciprocal; float64 ``(1,)`` on the device.
    flag
        Int32 ``(1,)`` on the device: whether a gradient of this step is not finite; `adapt` clears it.
    skip
        Int32 ``(1,)`` on the device: a copy of `flag`, which the kernels of updates read.
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
        # Factor, number of good steps since its last change, 1 / factor: one array, so that one copy fetches all.
        self.state = device.array([INITIAL, 0.0, 1.0 / INITIAL], np.float64)
        self.factor, self.inverse = self.state[0:1], self.state[2:3]
        self.flag, self.skip = (device.zeros((1,), np.int32) for _ in range(2))
        self._adapt = memory.kernels.update_loss_scale(self.state, self.flag, GROWTH, BACKOFF, INTERVAL)
        self._pinned = device.pinned((3,), np.float64)
        self._copied: Event | None = None
        self.known, self.skipped, self._row = INITIAL, 0, 0

    def adapt(self) -> None:
        """Change the factor for the next step, after `Optimizer.begin_step` has read that of this step. Enqueued."""
        self.observe()
        self._adapt()
        self._device.download(self.state, self._pinned)
        self._copied = self._device.mark()

    def observe(self) -> None:
        """Read the state after the last step, if it was not read yet. Waits for that step, which is usually complete
        when the next one is enqueued.
        """
        if self._copied is None:
            return
        self._copied.wait()
        self._copied = None
        before, self.known = self.known, float(self._pinned[0])
        # Growth sets the number of good steps to 0, too, and changes nothing at the largest scale. A skipped step
        # changes nothing at the smallest scale, 1.
        skipped = self._pinned[1] == 0 and (self.known < before or self.known == 1)
        self.skipped += skipped
        self._row = self._row + 1 if skipped and self.known == 1 else 0

    @property
    def hopeless(self) -> bool:
        """Whether gradients were not finite in the last `PATIENCE` steps or more, all at the smallest scale."""
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
        self.known, self._copied, self._row = scale, None, 0

    def close(self) -> None:
        """Free the kernel."""
        self._adapt.close()


class OverflowCheck:
    """Check of the summed gradients for infinity and NaN. Collective over `comm`.

    Parameters
    ----------
    scale
        Loss scale whose `flag` and `skip` are set.
    grads
        All gradients, packed arrays.
    memory
        Memory of the gradients.
    comm
        Ranks that combine their results; None where every rank has the sums of all gradients.
    """

    def __init__(self, scale: LossScale, grads: Sequence[Any], memory: Memory, comm: Communicator | None) -> None:
        self._scale = scale
        self._find = memory.kernels.find_nonfinite(grads, scale.flag)
        self._count = memory.device.zeros((1,), np.float64)
        self._sum = None if comm is None else comm.reduction(self._count, kind="loss scale")

    @property
    def over_ranks(self) -> bool:
        """Whether the ranks combine their results."""
        return self._sum is not None

    def measure(self) -> None:
        """Set `skip` of the loss scale if a summed gradient is not finite. Enqueued; collective with `comm`."""
        scale = self._scale
        self._find()
        if self._sum is not None:
            np.copyto(self._count, scale.flag)
            self._sum.run()
            # The sum counts ranks; the flag is 0 or 1.
            np.copyto(scale.flag, np.minimum(self._count, 1), casting="unsafe")
        # `adapt` clears the flag, maybe before the updates of this step run; they read this copy.
        np.copyto(scale.skip, scale.flag)

    def close(self) -> None:
        """Free the kernel and the reduction. Collective with `comm`."""
        self._find.close()
        if self._sum is not None:
            self._sum.close()
