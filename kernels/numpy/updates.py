"""Parameter updates in NumPy, in pieces that stay in the cache; gradient norms and loss scaling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...device import wide
from ..kernel import Kernel, ScratchKernel
from ..memory import Scratch, round_up
from ..updates import Rule, StepNumbers, UpdateArrays, UpdatePiece, Updates, piece_of

__all__ = ["NumpyUpdates"]

# Elements per piece: parameter, gradient, two states and two scratch arrays fit a 1 MiB cache.
PIECE = 1 << 15
_ROW, _ROWS = 1 << 10, 1 << 8  # elements of one float32 scalar product, and number of products at once


class NumpyUpdates(Updates):
    """Updates in NumPy."""

    scratch: Scratch

    # ------------------------------------------------------------------ optimizers
    def _sgd(self, arrays: UpdateArrays, momentum: float, nesterov: bool, weight_decay: float) -> Kernel:
        def rule(piece: UpdatePiece, numbers: StepNumbers) -> None:
            (a, b), step = piece.scratch, piece.gradient(numbers.scale, weight_decay)
            if momentum:
                (v,) = piece.state
                np.multiply(v, momentum, out=v)
                np.add(v, step, out=v)
                if nesterov:
                    np.multiply(v, momentum, out=b)
                    step = np.add(step, b, out=a)
                else:
                    step = v
            # Not in place: with momentum, `step` is the state.
            np.multiply(step, numbers.rate, out=b)
            np.subtract(piece.p, b, out=piece.p)

        return self._update("sgd", arrays, rule)

    def _adam(
        self, arrays: UpdateArrays, betas: tuple[float, float], epsilon: float, weight_decay: float, decoupled: bool
    ) -> Kernel:
        beta1, beta2 = betas

        def rule(piece: UpdatePiece, numbers: StepNumbers) -> None:
            (m, v), (a, b), rate = piece.state, piece.scratch, numbers.rate
            g = piece.gradient(numbers.scale, 0.0 if decoupled else weight_decay)
            # m + (1 - beta1) (g - m), in the order of torch.
            np.subtract(g, m, out=b)
            np.multiply(b, 1 - beta1, out=b)
            np.add(m, b, out=m)
            np.multiply(g, g, out=b)
            np.multiply(b, 1 - beta2, out=b)
            np.multiply(v, beta2, out=v)
            np.add(v, b, out=v)
            if decoupled and piece.decayed and weight_decay:
                # Before the step, in the order of torch.
                np.multiply(piece.p, 1 - rate * weight_decay, out=piece.p)
            np.sqrt(v, out=b)
            np.divide(b, numbers.second, out=b)
            np.add(b, epsilon, out=b)
            np.divide(m, b, out=a)
            np.multiply(a, rate / numbers.first, out=a)
            np.subtract(piece.p, a, out=piece.p)

        return self._update("adam", arrays, rule)

    def _lars(self, arrays: UpdateArrays, momentum: float, trust: float, weight_decay: float) -> Kernel:
        def adapted(start: int, stop: int, scale: float) -> float:
            """Return the factor on the learning rate of the parameter in this range."""
            p, g = (math.sqrt(_squares(a[start:stop])) for a in (arrays.p, arrays.g))
            # The layer-wise rate of You et al., "Large batch training of convolutional networks", 2017.
            below = g * scale + weight_decay * p
            # The ratio has no meaning for a parameter of zeros, or one without gradient.
            return trust * p / below if p > 0 and below > 0 else 1.0

        def rule(piece: UpdatePiece, numbers: StepNumbers) -> None:
            (v,), (_, b) = piece.state, piece.scratch
            g = piece.gradient(numbers.scale, weight_decay)
            np.multiply(v, momentum, out=v)
            np.multiply(g, numbers.rate, out=b)
            np.add(v, b, out=v)
            np.subtract(piece.p, v, out=piece.p)

        return self._update("lars", arrays, rule, adapted)

    def _average(self, arrays: UpdateArrays) -> Kernel:
        def rule(piece: UpdatePiece, numbers: StepNumbers) -> None:
            change = np.subtract(piece.g, piece.p, out=piece.scratch[0])
            np.multiply(change, numbers.weight, out=change)
            np.add(piece.p, change, out=piece.p)

        return self._update("average", arrays, rule)

    def _by_rule(self, name: str, arrays: UpdateArrays, rule: Rule, scratch: int, whole: bool) -> Kernel:
        return self._update(name, arrays, rule, scratch=scratch, length=arrays.p.size if whole else PIECE)

    def _update(
        self,
        name: str,
        arrays: UpdateArrays,
        rule: Rule,
        adapted: Callable[[int, int, float], float] | None = None,
        scratch: int = 2,
        length: int | None = None,
    ) -> Kernel:
        """Build an update, range by range in pieces. `adapted` returns a factor on the learning rate of a range with
        decay.
        """
        itemsize, scalars = arrays.p.itemsize, arrays.scalars
        length = min(length or PIECE, arrays.p.size)
        size = round_up(length * itemsize)

        def bind() -> Callable[[], None]:
            views = [self.scratch.view((length,), arrays.p.dtype, i * size) for i in range(scratch)]
            ranges = [
                (start, stop, decayed, [piece_of(arrays, i, min(i + length, stop), decayed, views)
                                        for i in range(start, stop, length)])
                for start, stop, decayed in arrays.decays
            ]  # fmt: skip

            def run() -> None:
                if arrays.skip is not None and arrays.skip[0]:  # gradients overflowed: leave the state as it is
                    return
                # Python's floats: with NumPy's float64, operations on float32 would run in float64.
                numbers = StepNumbers(*scalars.tolist())
                for start, stop, decayed, pieces in ranges:
                    own = numbers
                    # LARS adapts the rates of parameters with decay; biases and norms have none.
                    if adapted is not None and decayed:
                        own = numbers._replace(rate=numbers.rate * adapted(start, stop, numbers.scale))
                    for piece in pieces:
                        rule(piece, own)
                if arrays.copy is not None:
                    np.copyto(arrays.copy, arrays.p, casting="same_kind")

            return run

        return ScratchKernel(bind, self.scratch, scratch * size, f"numpy:{name}")

    # ------------------------------------------------------------------ norms and scales
    def _sum_of_squares(self, terms: Sequence[tuple[Any, int]], out: Any) -> Kernel:
        flat = [(array.reshape(-1), divisor) for array, divisor in terms]

        def run() -> None:
            out[0] = sum(_squares(array) / divisor for array, divisor in flat)

        return Kernel(run, "numpy:squares")

    def _clip(self, squares: Any, inverse: Any, max_norm: float, norm: Any, factor: Any) -> Kernel:
        def run() -> None:
            np.sqrt(squares, out=norm)
            if inverse is not None:
                np.multiply(norm, inverse, out=norm)
            # The constant of torch.nn.utils.clip_grad_norm_.
            np.add(norm, 1e-6, out=factor)
            np.divide(max_norm, factor, out=factor)
            # A norm of NaN stays NaN here, as in torch, so the step does not hide it.
            np.minimum(factor, 1.0, out=factor)

        return Kernel(run, "numpy:clip")

    def _find_nonfinite(self, arrays: Sequence[Any], flag: Any) -> Kernel:
        pieces = [a.reshape(-1)[i : i + PIECE] for a in arrays for i in range(0, a.size, PIECE)]
        finite = np.empty(max((piece.size for piece in pieces), default=0), np.bool_)

        def run() -> None:
            for piece in pieces:
                if not np.isfinite(piece, out=finite[: piece.size]).all():
                    flag[0] = 1

        return Kernel(run, "numpy:find_nonfinite", self.own.add(finite))

    def _update_loss_scale(self, state: Any, flag: Any, growth: float, backoff: float, interval: int) -> Kernel:
        def run() -> None:
            scale, good, _ = state.tolist()
            if flag[0]:
                scale, good = max(scale * backoff, 1.0), 0.0
            elif good + 1 >= interval:
                scale, good = min(scale * growth, 2.0**24), 0.0
            else:
                good += 1
            state[:] = scale, good, 1 / scale
            flag[0] = 0

        return Kernel(run, "numpy:loss_scale")


def _squares(flat: Any) -> float:
    """Return the sum of squares: the dot product of each row with itself, added up in float64.

    One dot product of millions of float32 elements is less accurate by two or three digits, depending on the number of
    partial sums that BLAS uses on the processor.
    """
    # The square of 300 overflows in float16.
    dtype = wide(flat.dtype)
    whole = flat.size - flat.size % _ROW
    rest = flat[whole:].astype(dtype, copy=False)
    total = float(np.dot(rest, rest))
    for start in range(0, whole, _ROW * _ROWS):
        rows = flat[start : min(start + _ROW * _ROWS, whole)].astype(dtype, copy=False).reshape(-1, _ROW)
        total += float(np.matmul(rows[:, None, :], rows[:, :, None]).sum(dtype=np.float64))
    return total
