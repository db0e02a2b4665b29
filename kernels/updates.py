"""Interface of parameter updates, gradient norms and loss scaling."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from ..device import is_low
from . import checks
from .base import Base
from .kernel import Kernel, KernelError, idle

__all__ = ["ALIGNMENT", "Rule", "StepNumbers", "UpdateArrays", "UpdatePiece", "Updates"]


#: Number of adjacent elements that are read from the same array of gradients: a bit of the CUDA kernel's table selects
#: the array.
ALIGNMENT = 16


class StepNumbers(NamedTuple):
    """Per-step scalars: floats on a CPU, arrays ``(1,)`` on a device.

    Attributes
    ----------
    rate
        Learning rate.
    scale
        Factor on the gradients (of clipping, inverse of the loss scale).
    first, second
        Two coefficients of the optimizer; of Adam the divisors of the first moment, and of the root of the second
        moment.
    weight
        Weight of new parameters in their average.
    """

    rate: Any
    scale: Any
    first: Any
    second: Any
    weight: Any


@dataclass(frozen=True)
class UpdateArrays:
    """Arrays of an update: one bucket of parameters, or a shard of it; flat and packed.

    Attributes
    ----------
    p, g
        Parameters, float32 or float64 (modified), and their summed gradients (read), which may have 16 bits.
    state
        Arrays of the optimizer, in the dtype of `p` (modified).
    scalars
        float64 ``(5,)``, read when the kernel runs: the :class:`StepNumbers`.
    decays
        Ranges ``(start, stop, decayed)`` that cover all elements; `decayed`: whether the elements of the range have
        weight decay. For LARS, the ranges of the parameters; elements outside of them are not updated.
    copy
        A copy of the parameters in another dtype, written together with them; None: no copy.
    skip
        int32 ``(1,)``, read when the kernel runs: the update runs only if it is 0. None: it always runs.
    rounded, rounds
        Gradients in 16 bits at the same offsets, in the dtype of `copy`, and the ranges ``(start, stop)`` where these
        are read instead of `g`: multiples of :data:`ALIGNMENT` (the last may end with the array). `rounded` None:
        nowhere; only backends with `reads_rounded` read them, and a rule on arrays overwrites `g` there.
    """

    p: Any
    g: Any
    state: tuple[Any, ...]
    scalars: Any
    decays: Sequence[tuple[int, int, bool]] = ()
    copy: Any = None
    skip: Any = None
    rounded: Any = None
    rounds: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True)
class UpdatePiece:
    """A range of a bucket that is updated at once, the argument of a :data:`Rule`. Arrays are flat and of one length.

    Attributes
    ----------
    p
        Parameters, float32 or float64 (modified).
    g
        Their summed gradients (read). Multiply them by :attr:`StepNumbers.scale`, or use :meth:`gradient`.
    state
        Arrays of the optimizer, in the order of their names (modified).
    scratch
        Work arrays, contents undefined; :meth:`gradient` uses the first two.
    decayed
        Whether these parameters have weight decay; biases and norms have none.
    """

    p: Any
    g: Any
    state: tuple[Any, ...]
    scratch: tuple[Any, ...]
    decayed: bool

    def gradient(self, scale: Any, weight_decay: float = 0.0) -> Any:
        """Return ``scale * g``, plus ``weight_decay * p`` where there is decay.

        The result is in ``scratch[0]``, or may be `g` itself: do not write to it.
        """
        g = self.g
        if is_low(g.dtype):
            # NumPy multiplies arrays of 16 bits, also by a Python float, in 16 bits, where a small scale gives 0.
            g = self.scratch[0]
            np.copyto(g, self.g)
        # On a device the scale is an array, whose value the host does not wait for.
        if not (isinstance(scale, float) and scale == 1.0):
            g = np.multiply(g, scale, out=self.scratch[0])
        if weight_decay and self.decayed:
            np.multiply(self.p, weight_decay, out=self.scratch[1])
            g = np.add(g, self.scratch[1], out=self.scratch[0])
        return g


#: Updates a piece in place.
Rule = Callable[[UpdatePiece, StepNumbers], None]


class Updates(Base):
    """Factories of parameter updates, gradient norms and loss scaling. The kernels run without a wait between device
    and host.

    Attributes
    ----------
    reads_rounded
        Whether updates read gradients in 16 bits (`UpdateArrays.rounded`) in addition to `UpdateArrays.g`.
    """

    reads_rounded: ClassVar[bool] = False

    # ------------------------------------------------------------------ optimizers
    def by_rule(self, name: str, arrays: UpdateArrays, rule: Rule, scratch: int = 2, whole: bool = False) -> Kernel:
        """Build one step of an optimizer that is written in operations on arrays, ``np.multiply(a, b, out=c)``.

        The rule is called for every range of `decays`: on a CPU in pieces that stay in its cache, or at once if
        `whole`; on a device on arrays of the device. It must be elementwise unless `whole`, must not allocate, and may
        depend on the step only through the state and the scalars, because a device may replay it.

        Parameters
        ----------
        name
            Name of the kernel, for messages and profiles.
        scratch
            Number of scratch arrays of a piece, at least 2.
        """
        return self._by_rule(name, arrays, rule, scratch, whole) if self._is_update(arrays) else idle()

    def sgd(self, arrays: UpdateArrays, momentum: float, nesterov: bool, weight_decay: float) -> Kernel:
        """Build one step of :class:`halograd.training.SGD`; there is no state without momentum."""
        return self._sgd(arrays, momentum, nesterov, weight_decay) if self._is_update(arrays) else idle()

    def adam(
        self, arrays: UpdateArrays, betas: tuple[float, float], epsilon: float, weight_decay: float, decoupled: bool
    ) -> Kernel:
        """Build one step of Adam or (`decoupled`) AdamW; the state is the first and the second moment."""
        return self._adam(arrays, betas, epsilon, weight_decay, decoupled) if self._is_update(arrays) else idle()

    def lars(self, arrays: UpdateArrays, momentum: float, trust: float, weight_decay: float) -> Kernel:
        """Build one step of LARS, with the norms of each parameter and of its gradient. Elements in no range of
        `decays` are not updated.
        """
        return self._lars(arrays, momentum, trust, weight_decay) if self._is_update(arrays) else idle()

    def average(self, arrays: UpdateArrays) -> Kernel:
        """Build ``p += weight * (g - p)`` for moving averages `p` and parameters `g`; there is no state."""
        return self._average(arrays) if self._is_update(arrays) else idle()

    @staticmethod
    def _is_update(a: UpdateArrays) -> bool:
        """Return whether there are elements to update. Raises KernelError if the arrays do not match."""
        others = {"g": a.g, **{f"state {i}": s for i, s in enumerate(a.state)}, "copy": a.copy}
        others["rounded"] = a.rounded
        checks.check_packed("optimizer", p=a.p, **others)
        if np.dtype(a.p.dtype).name not in ("float32", "float64"):
            described = np.dtype(a.p.dtype).name
            raise KernelError(
                f"optimizer: expected parameters of float32 or float64, got {described}; keep a float32 master copy"
            )
        for array in others.values():
            if array is not None and array.size != a.p.size:
                raise KernelError(
                    f"optimizer: expected arrays of {a.p.size} elements, got {array.size}; pass one bucket's"
                )
        if tuple(a.scalars.shape) != (5,) or np.dtype(a.scalars.dtype) != np.float64:
            described = f"{np.dtype(a.scalars.dtype).name} {tuple(a.scalars.shape)}"
            raise KernelError(f"optimizer: expected scalars float64 (5,), got {described}")
        # A rank's shard of a bucket may be empty.
        return bool(a.p.size)

    # ------------------------------------------------------------------ norms and scales
    def sum_of_squares(self, terms: Sequence[tuple[Any, int]], out: Any) -> Kernel:
        """Build ``out``, float64 ``(1,)``: the sum over terms (packed array, divisor) of the array's sum of squares,
        divided by the divisor.
        """
        # The divisor is the number of ranks that add the same array to a sum over ranks.
        arrays = [array for array, _ in terms]
        checks.check_packed("sum_of_squares", **{f"array {i}": a for i, a in enumerate(arrays)})
        checks.check_scalars("sum_of_squares", out=out)
        return self._sum_of_squares([(array, divisor) for array, divisor in terms if array.size], out)

    def clip(self, squares: Any, inverse: Any, max_norm: float, norm: Any, factor: Any) -> Kernel:
        """Build ``norm = sqrt(squares) * inverse?``, ``factor = min(1, max_norm / (norm + 1e-6))``; arrays are
        float64 ``(1,)``.

        `inverse` is the inverse of a loss scale, or None. The factor equals that of torch.nn.utils.clip_grad_norm_.
        """
        checks.check_scalars("clip", squares=squares, inverse=inverse, norm=norm, factor=factor)
        return self._clip(squares, inverse, max_norm, norm, factor)

    def find_nonfinite(self, arrays: Sequence[Any], flag: Any) -> Kernel:
        """Build a kernel that sets `flag`, int32 ``(1,)``, to 1 if any element of the packed arrays is infinite or NaN.
        """
        checks.check_packed("find_nonfinite", **{f"array {i}": a for i, a in enumerate(arrays)})
        return self._find_nonfinite([a for a in arrays if a.size], flag)

    def update_loss_scale(
        self, state: Any, flag: Any, growth: float = 2.0, backoff: float = 0.5, interval: int = 2000
    ) -> Kernel:
        """Build dynamic loss scaling: `state` float64 ``(3,)`` = [scale, good steps, 1 / scale]; the kernel clears
        `flag`.

        After a step with `flag` set, the scale is multiplied by `backoff` (result at least 1); after `interval` good
        steps, by `growth` (result at most 2^24), as in Micikevicius et al., "Mixed precision training", ICLR 2018,
        Section 3.2.
        """
        return self._update_loss_scale(state, flag, growth, backoff, interval)

    # ------------------------------------------------------------------ implemented by a backend
    @abstractmethod
    def _by_rule(self, name: str, arrays: UpdateArrays, rule: Rule, scratch: int, whole: bool) -> Kernel: ...

    @abstractmethod
    def _sgd(self, arrays: UpdateArrays, momentum: float, nesterov: bool, weight_decay: float) -> Kernel: ...

    @abstractmethod
    def _adam(
        self, arrays: UpdateArrays, betas: tuple[float, float], epsilon: float, weight_decay: float, decoupled: bool
    ) -> Kernel: ...

    @abstractmethod
    def _lars(self, arrays: UpdateArrays, momentum: float, trust: float, weight_decay: float) -> Kernel: ...

    @abstractmethod
    def _average(self, arrays: UpdateArrays) -> Kernel: ...

    @abstractmethod
    def _sum_of_squares(self, terms: Sequence[tuple[Any, int]], out: Any) -> Kernel: ...

    @abstractmethod
    def _clip(self, squares: Any, inverse: Any, max_norm: float, norm: Any, factor: Any) -> Kernel: ...

    @abstractmethod
    def _find_nonfinite(self, arrays: Sequence[Any], flag: Any) -> Kernel: ...

    @abstractmethod
    def _update_loss_scale(self, state: Any, flag: Any, growth: float, backoff: float, interval: int) -> Kernel: ...


def piece_of(arrays: UpdateArrays, start: int, stop: int, decayed: bool, scratch: Sequence[Any]) -> UpdatePiece:
    """Return the piece ``[start, stop)`` of a bucket, with the leading part of each scratch array. Local."""
    part = slice(start, stop)
    state, views = tuple(s[part] for s in arrays.state), tuple(s[: stop - start] for s in scratch)
    return UpdatePiece(arrays.p[part], arrays.g[part], state, views, decayed)
