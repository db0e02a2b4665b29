"""Losses in NumPy, in chunks that stay in the cache."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from ..losses import ClassTargets, LossArrays, Losses, LossKernel
from ..memory import Workspace, buffer, chunks, constant, masked, take, total

__all__ = ["NumpyLosses"]


class _NumpyLoss(LossKernel):
    """A loss summed over ``(positions, C)``, chunk by chunk.

    Subclasses compute the contribution of a chunk of positions in `chunk`. Where a weight is 0, `chunk` gets zeros.
    """

    #: Whether the scale is divided by the number of channels.
    mean_over_channels = True

    def __init__(self, name: str, arrays: LossArrays) -> None:
        self.arrays, self.work = arrays, Workspace()
        self._samples = arrays.x.shape[0]
        whole = (arrays.x, arrays.target, arrays.dx, arrays.weights)
        flat: list[Any] = [None if a is None else a.reshape(-1, a.shape[-1]) for a in whole]
        self._x, self._target, self._dx, self._weights = flat
        self.width = int(arrays.x.shape[-1])
        super().__init__(self._compute, f"numpy:{name}", close=self.work.clear)
        self.set(self._samples, 1.0)

    def set(self, samples: int, scale: float) -> None:
        # In positions. The valid samples of a batch may end among those of this rank, or before them.
        self._counted = max(0, min(samples, self._samples)) * (len(self._x) // self._samples)
        self._scale = scale / self._x.shape[1] if self.mean_over_channels else scale

    def _compute(self) -> None:
        arrays, counted, scale = self.arrays, self._counted, self._scale
        if arrays.divisor is not None:
            # A NumPy float64 scalar would promote float32 arrays to float64.
            divisor = float(arrays.divisor[0])
            scale = scale * (1.0 / divisor) if divisor > 0 else 0.0
        if self._dx is not None:
            self._dx[counted:] = 0  # samples that only fill the last batch
        loss = 0.0
        # The loss of an infinity may be NaN: the check of the loss detects it, so no warning.
        with np.errstate(over="ignore", invalid="ignore"):
            for part in chunks(counted, self.width):
                loss = loss + self._chunk(part, scale)
            arrays.loss[0] = loss * scale

    def _chunk(self, part: slice, scale: float) -> float:
        dx = None if self._dx is None else self._dx[part]
        x, t, weights = self._x[part], self._target[part], None
        if self._weights is not None:
            weights = self._weights[part]
            # Values without weight may be infinite or NaN, and 0 times these is NaN: they become 0 before.
            none = np.equal(weights, 0, out=buffer(self.work, "none", weights.shape, np.bool_))
            x, t = masked(x, none, self.work, "masked x"), masked(t, none, self.work, "masked t")
        loss = self.chunk(x, t, dx, scale, weights)
        if dx is not None and self.arrays.factor is not None:
            dx *= float(self.arrays.factor[0])
        return loss

    @abstractmethod
    def chunk(self, x: Any, t: Any, dx: Any | None, scale: float, weights: Any | None) -> float:
        """Return the weighted sum of the loss over some positions; write `scale` times its gradient to `dx`."""


class _Elementwise(_NumpyLoss):
    """A loss that is a function of each element of prediction and target."""

    def chunk(self, x: Any, t: Any, dx: Any | None, scale: float, weights: Any | None) -> float:
        targets = buffer(self.work, "t", x.shape, x.dtype)
        # Targets may be integers.
        np.copyto(targets, t, casting="unsafe")
        losses = self.values(x, targets, dx, scale)
        if weights is not None:
            losses *= weights
            if dx is not None:
                dx *= weights
        return total(losses)

    @abstractmethod
    def values(self, x: Any, t: Any, dx: Any | None, scale: float) -> Any:
        """Return the loss of every element, in a buffer; write `scale` times its gradient to `dx`.

        `t` is a copy of the targets in the dtype of `x`, and may be overwritten.
        """

class _MeanSquaredError(_Elementwise):
    def values(self, x: Any, t: Any, dx: Any | None, scale: float) -> Any:
        np.subtract(x, t, out=t)
        if dx is not None:
            np.multiply(t, 2 * scale, out=dx)
        return np.multiply(t, t, out=t)


class _BinaryCrossEntropy(_Elementwise):
    """The loss ``(1 - t) * softplus(x) + p * t * softplus(-x)``, with the weight p of positive targets, and
    ``softplus(x) = max(x, 0) + log1p(exp(-|x|))``.

    It neither overflows nor cancels for any `x`, as no term is negative; nor does the gradient ``(1 - t) * sigmoid(x) -
    p * t * sigmoid(-x)`` for targets 0 and 1.
    """

    def __init__(self, arrays: LossArrays, pos_weight: Any) -> None:
        super().__init__("binary_cross_entropy", arrays)
        self._pos_weight = np.asarray(1.0 if pos_weight is None else pos_weight, np.float64)

    def values(self, x: Any, t: Any, dx: Any | None, scale: float) -> Any:
        names = ("e", "losses", "part", "rest")
        e, losses, part, rest = (buffer(self.work, name, x.shape, x.dtype) for name in names)
        np.negative(np.abs(x, out=e), out=e)
        np.exp(e, out=e)
        np.subtract(1, t, out=rest)
        t *= constant(self.work, "pos weight", lambda: self._pos_weight, x.dtype)
        # softplus(x) = log1p(e) + max(x, 0), softplus(-x) = log1p(e) - min(x, 0).
        np.log1p(e, out=part)
        np.add(part, np.maximum(x, 0, out=losses), out=losses)
        losses *= rest
        part -= np.minimum(x, 0, out=buffer(self.work, "negative", x.shape, x.dtype))
        part *= t
        losses += part
        if dx is not None:
            self._gradient(x, t, rest, e, part, dx, scale)
        return losses

    def _gradient(self, x: Any, t: Any, rest: Any, e: Any, work: Any, dx: Any, scale: float) -> None:
        """Write the gradient to `dx`, from ``e = exp(-|x|)``, `t` times the positive weight, and ``rest = 1 - t``.

        `e`, `t` and `rest` are modified.
        """
        # sigmoid(x) = max(e, 1 if x >= 0 else 0) / (1 + e); the division follows once, at the end.
        np.greater_equal(x, 0, out=work)
        np.maximum(e, work, out=work)
        rest *= work
        # The same for sigmoid(-x).
        np.less(x, 0, out=work)
        np.maximum(e, work, out=work)
        t *= work
        rest -= t
        e += 1
        np.divide(rest, e, out=dx)
        dx *= scale


class _OfClasses(_NumpyLoss):
    """A loss with class indices as targets."""

    mean_over_channels = False

    def __init__(self, name: str, arrays: LossArrays, targets: ClassTargets) -> None:
        self.targets = targets
        super().__init__(name, arrays)

    def _labels(self, t: Any, dtype: np.dtype, weights: Any | None) -> tuple[Any, Any]:
        """Return, for each position, the class index and its weight times that of the position; both 0 where ignored.
        """
        targets, work = self.targets, self.work
        label = buffer(work, "label", t.shape, np.int64)
        weight = buffer(work, f"weight {dtype}", t.shape, dtype)
        np.copyto(label, t, casting="unsafe")
        counts = None
        if targets.ignored is not None:
            counts = np.not_equal(label, targets.ignored, out=buffer(work, "counts", t.shape, np.bool_))
            # Ignored targets become class 0 with weight 0, so that the check below passes over them.
            label *= counts
        if label.size and not (label.min() >= 0 and label.max() < targets.classes):
            wrong = label.max() if label.max() >= targets.classes else label.min()
            raise ValueError(
                f"SoftmaxCrossEntropy: expected targets in [0, {targets.classes}), got {wrong}; check the dataset's "
                "classes"
            )
        if targets.weights is None:
            weight.fill(1)
        else:
            take(self._class_weights(dtype), label, out=weight)
        if counts is not None:
            weight *= counts
        if weights is not None:
            weight *= weights[:, 0]
        return label, weight

    def _class_weights(self, dtype: np.dtype) -> Any:
        """Return the weights of the classes as an array of `dtype`: 1 each if none are given."""
        weights = self.targets.weights
        return constant(
            self.work,
            f"class weights {dtype}",
            lambda: np.ones(self.targets.classes) if weights is None else np.asarray(weights),
            dtype,
        )


class _TargetWeight(_OfClasses):
    def __init__(self, arrays: LossArrays, targets: ClassTargets) -> None:
        super().__init__("target_weight", arrays, targets)
        self.width = targets.classes

    def chunk(self, x: Any, t: Any, dx: Any | None, scale: float, weights: Any | None) -> float:
        return total(self._labels(t[:, 0], np.dtype(np.float64), weights)[1])


class _SoftmaxCrossEntropy(_OfClasses):
    """Softmax cross-entropy on arrays ``(K, positions)``, class by class: large data have many more positions than
    classes.
    """

    def __init__(self, arrays: LossArrays, targets: ClassTargets, label_smoothing: float) -> None:
        super().__init__("softmax_cross_entropy", arrays, targets)
        self._smoothing = label_smoothing

    def chunk(self, x: Any, t: Any, dx: Any | None, scale: float, weights: Any | None) -> float:
        shape, work = (x.shape[1], x.shape[0]), self.work
        z, column = buffer(work, "z", shape, x.dtype), buffer(work, "column", shape[1:], x.dtype)
        label, weight = self._labels(t[:, 0], x.dtype, weights)
        index = buffer(work, "index", shape[1:], np.int64)
        # In the flat array (K, positions), the label's logit is at label * positions + position.
        np.multiply(label, shape[1], out=index)
        index += _positions(shape[1], work)
        np.copyto(z, x.T)
        # Minus the largest logit, no exponential overflows.
        np.amax(z, axis=0, out=column)
        z -= column
        # The sum of the exponentials is `own`, that of the label, plus `others`. Its logarithm near 1, and own / sum -
        # 1 = -others / sum, need `others` separately: the rounded sum has lost the small terms.
        flat, own, others = z.reshape(-1), *(buffer(work, name, shape[1:], x.dtype) for name in ("own", "others"))
        # With target probabilities q, the loss is sum(q) * log(sum of the exponentials) - q . z: `mass` and `picked`.
        share = self._smoothing / shape[0]
        picked = buffer(work, "picked", shape[1:], x.dtype)
        take(z.reshape(-1), index, out=picked)
        self._times(picked, weight)
        picked *= 1 - self._smoothing
        mass = buffer(work, "mass", shape[1:], x.dtype)
        np.multiply(weight, 1 - self._smoothing, out=mass)
        if share:
            self._smooth(z, mass, picked, share, weights)
        np.exp(z, out=z)
        take(flat, index, out=own)
        flat[index] = 0  # so that the sum is that of the others
        np.sum(z, axis=0, out=others)
        if dx is not None:
            np.add(others, own, out=column)
            np.divide(mass, column, out=column)
            z *= column
            self._at_the_label(flat, index, mass, weight, own, others, share)
            if share:
                self._subtract_smoothing(z, share, weights)
            z *= scale
            np.copyto(dx, z.T)
        # log(own + others), accurate near 0: own is 1 where the label has the largest logit.
        own -= 1
        np.add(others, own, out=column)
        np.log1p(column, out=column)
        column *= mass
        column -= picked
        return total(column)

    def _smooth(self, z: Any, mass: Any, picked: Any, share: float, weights: Any | None) -> None:
        """Add the `share` of every class by label smoothing to ``q . z`` (`picked`) and to the sum of q (`mass`)."""
        of_classes = self._class_weights(z.dtype)
        part, counts = (buffer(self.work, k, picked.shape, z.dtype) for k in ("part", "counted"))
        self._counted_positions(counts, weights)
        np.dot(of_classes, z, out=part)
        part *= share
        self._times(part, counts)
        picked += part
        counts *= share * float(np.sum(of_classes, dtype=np.float64))
        mass += counts

    def _times(self, values: Any, weight: Any) -> None:
        """Compute ``values *= weight``, and 0 where the weight is 0: a logit of -inf at an ignored position must not
        give NaN.
        """
        none = np.equal(weight, 0, out=buffer(self.work, "none", weight.shape, np.bool_))
        np.copyto(values, 0, where=none)
        values *= weight

    def _at_the_label(
        self, flat: Any, index: Any, mass: Any, weight: Any, own: Any, others: Any, share: float
    ) -> None:
        """Write ``mass * own / sum - (1 - smoothing) * weight`` to the element of the label.

        It is computed as ``(rest * own - hard * others) / sum`` with ``hard = (1 - smoothing) * weight`` and ``rest =
        mass - hard``: the difference above would lose its digits where the label has almost all of the probability.
        """
        hard, part = (buffer(self.work, k, weight.shape, flat.dtype) for k in ("hard", "part"))
        np.multiply(weight, 1 - self._smoothing, out=hard)
        if share:
            np.subtract(mass, hard, out=part)
            part *= own
        else:
            part.fill(0)
        hard *= others
        part -= hard
        np.add(own, others, out=hard)
        part /= hard
        flat[index] = part

    def _subtract_smoothing(self, z: Any, share: float, weights: Any | None) -> None:
        """Subtract from the gradient `z` the target probability that label smoothing gives to every class."""
        counted, part = (buffer(self.work, k, z.shape[1:], z.dtype) for k in ("counted", "part"))
        self._counted_positions(counted, weights)
        for row, w in zip(z, self._class_weights(z.dtype)):
            np.multiply(counted, share * float(w), out=part)
            row -= part

    def _counted_positions(self, out: Any, weights: Any | None) -> None:
        """Compute the weight of each position: 1 without weights, 0 where the target is ignored."""
        if self.targets.ignored is None:
            out.fill(1)
        else:
            # `_labels` wrote this buffer for the same chunk.
            np.copyto(out, buffer(self.work, "counts", out.shape, np.bool_))
        if weights is not None:
            out *= weights[:, 0]


def _positions(count: int, work: dict) -> Any:
    """Return the array ``0 .. count - 1``."""
    if "positions" in work and work["positions"].size < count:
        del work["positions"]  # `constant` makes it again, for the longer chunk
    return constant(work, "positions", lambda: np.arange(count), np.int64)[:count]


class NumpyLosses(Losses):
    """Losses in NumPy."""

    def _softmax_cross_entropy(self, arrays: LossArrays, targets: ClassTargets, label_smoothing: float) -> LossKernel:
        return _SoftmaxCrossEntropy(arrays, targets, label_smoothing)

    def _target_weight(self, arrays: LossArrays, targets: ClassTargets) -> LossKernel:
        return _TargetWeight(arrays, targets)

    def _binary_cross_entropy(self, arrays: LossArrays, pos_weight: Any) -> LossKernel:
        return _BinaryCrossEntropy(arrays, pos_weight)

    def _mean_squared_error(self, arrays: LossArrays) -> LossKernel:
        return _MeanSquaredError("mean_squared_error", arrays)
