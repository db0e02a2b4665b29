"""Softmax cross-entropy with class indices, per sample or per position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from halograd.dtensor import Groups
from halograd.layers.chunks import buffer, chunks, constant, on_host, rows, take
from halograd.layers.chunks import total as total_of
from halograd.layers.costs import Judgement
from halograd.layers.layer import Shape
from halograd.layers.loss import Loss, LossKernel

if TYPE_CHECKING:
    from halograd.program.context import Context
    from halograd.program.operations import Kernel

__all__ = ["SoftmaxCrossEntropy"]

NORMALIZATIONS = ("count", "weights")


class SoftmaxCrossEntropy(Loss):
    """Cross-entropy of the softmax over channels with class indices, per sample or per position.

    ``ce = -sum_c q[c] * log(softmax(x))[c]``, with ``q[c] = (1 - s) * w[t] * (c == t) + s / K * w[c]`` for the class
    index `t`, class weights `w` and label smoothing `s` (torch's definition).

    Parameters
    ----------
    class_weights
        Weight per class; by default 1.
    normalization
        ``"count"``: the mean over all positions of the samples that count, whatever their weight.
        ``"weights"``: the sum is divided by the sum of ``w[t]``, as torch does.
    label_smoothing
        Share of the target that is spread over all classes, in [0, 1).
    ignore_index
        Positions with this target have neither loss nor weight.

    Notes
    -----
    Prediction ``(N, *spatial, K)``, target ``(N, *spatial, 1)`` of integers in ``[0, K)``. Communication per process:
    the sum of the loss; with ``"weights"`` one sum of 8 B more, in forward.

    Raises
    ------
    ValueError
        In forward, on the rank that has it, for a target that is no class. On a device, where the host does not look,
        the loss becomes NaN instead.
    """

    def __init__(
        self,
        class_weights: Sequence[float] | None = None,
        normalization: str = "count",
        label_smoothing: float = 0.0,
        ignore_index: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if normalization not in NORMALIZATIONS:
            raise ValueError(f"normalization: expected one of {NORMALIZATIONS}, got {normalization!r}")
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"label_smoothing: expected a number in [0, 1), got {label_smoothing!r}")
        self.class_weights = None if class_weights is None else np.asarray(class_weights, np.float64)
        if self.class_weights is not None and (self.class_weights.ndim != 1 or np.any(self.class_weights < 0)):
            raise ValueError(f"class_weights: expected one number >= 0 per class, got {class_weights!r}")
        self.normalization, self.label_smoothing, self.ignore_index = normalization, label_smoothing, ignore_index

    def check(self, *shapes: Shape) -> None:
        prediction, target = shapes
        if target != (*prediction[:-1], 1):
            raise ValueError(f"{self.kind}: expected a target of shape {(*prediction[:-1], 1)}, got {target}")
        weights = self.class_weights
        if weights is not None and len(weights) != prediction[-1]:
            raise ValueError(f"class_weights: expected {prediction[-1]} numbers, one per class, got {len(weights)}")

    def reads_classes(self, target: Shape, prediction: Shape) -> bool:
        return True

    def target_range(self, prediction: Shape) -> tuple[float, float] | None:
        return (0.0, prediction[-1] - 1.0) if self.ignore_index is None else None

    def judgement(self, prediction: Shape, target: Shape) -> Judgement:
        return Judgement(prediction[-1], ignored=self.ignore_index)

    def kernel_type(self) -> type[LossKernel]:
        return _WeightedKernel if self.normalization == "weights" else LossKernel

    def lower_passes(self, context: Context, kernel: Kernel) -> None:
        if self.normalization == "weights":
            weight = context.keep((1,), "float64", "loss")
            kernel.add(weight=weight)
            context.run(kernel, "weigh")
            context.add_up(context.sum(Groups.whole(context.size), weight, "loss", [8], f"{context.name} (weights)"))
        super().lower_passes(context, kernel)

    def fused(
        self, cuda: Any, prediction: Any, target: Any, dx: Any | None, loss: Any, wrong: Any, factor: Any = None
    ) -> Any | None:
        if self.normalization == "weights":
            return None
        options = (self.class_weights, self.label_smoothing, self.ignore_index, wrong, factor)
        return cuda.softmax_cross_entropy(prediction, target, dx, loss, *options)

    def local(self, prediction: Any, target: Any, dx: Any | None, scale: float, work: dict) -> Any:
        x, t = rows(prediction, work, "prediction"), rows(target, work, "target")
        gradient = None if dx is None else dx.reshape(x.shape)
        total: Any = 0.0
        for part in chunks(len(x), x.shape[1], work):
            wanted = None if gradient is None else gradient[part]
            total = total + self._chunk(x[part], t[part, 0], wanted, scale, work)
        return total * scale

    def target_weight(self, target: Any, classes: int, work: dict) -> Any:
        """Local. The sum of the weights of all targets."""
        t = rows(target, work, "target")
        total: Any = 0.0
        for part in chunks(len(t), classes, work):
            _, weight = self._labels(t[part, 0], classes, np.dtype("float64"), work)
            total = total + total_of(weight)
        return total

    def _labels(self, t: Any, classes: int, dtype: np.dtype, work: dict) -> tuple[Any, Any]:
        """Class index (0 where ignored) and its weight (0 where ignored) per position."""
        label = buffer(work, "label", t.shape, np.int64)
        weight = buffer(work, f"weight {dtype}", t.shape, dtype)
        np.copyto(label, t, casting="unsafe")
        counts = None
        if self.ignore_index is not None:
            counts = np.not_equal(label, self.ignore_index, out=buffer(work, "counts", t.shape, np.bool_))
            label *= counts
        wrong = self._check_labels(label, classes, work)
        if self.class_weights is None:
            weight.fill(1)
        else:
            take(self._typed_weights(dtype, work), label, out=weight)
        if wrong is not None:
            np.copyto(weight, math.nan, where=wrong)
        if counts is not None:
            weight *= counts
        return label, weight

    def _check_labels(self, label: Any, classes: int, work: dict) -> Any:
        """Refuse what is no class; on a device make it class 0 and return where that was."""
        if on_host(label):
            if label.size and not (label.min() >= 0 and label.max() < classes):
                wrong = label.max() if label.max() >= classes else label.min()
                raise ValueError(
                    f"{self.kind}: expected targets in [0, {classes}), got {wrong}; check the dataset's classes"
                )
            return None
        wrong, above = (buffer(work, k, label.shape, np.bool_) for k in ("wrong", "above"))
        np.less(label, 0, out=wrong)
        np.greater_equal(label, classes, out=above)
        np.logical_or(wrong, above, out=wrong)
        np.copyto(label, 0, where=wrong)
        return wrong

    def _typed_weights(self, dtype: np.dtype, work: dict) -> Any:
        return constant(work, f"class weights {dtype}", lambda: self.class_weights, dtype)

    def _chunk(self, x: Any, t: Any, dx: Any | None, scale: Any, work: dict) -> Any:
        """Class by class, ``(K, positions)``: there are many more positions than classes in what is large."""
        shape = (x.shape[1], x.shape[0])
        z, column = buffer(work, "z", shape, x.dtype), buffer(work, "column", shape[1:], x.dtype)
        label, weight = self._labels(t, shape[0], x.dtype, work)
        index = buffer(work, "index", shape[1:], np.int64)
        np.multiply(label, shape[1], out=index)
        index += _positions(shape[1], work)
        np.copyto(z, x.T)
        np.amax(z, axis=0, out=column)
        z -= column
        # q . z, of which the loss is the negative, up to the logarithm of the sum.
        share = self.label_smoothing / shape[0]
        taken = buffer(work, "taken", shape[1:], x.dtype)
        take(z.reshape(-1), index, out=taken)
        taken *= weight
        taken *= 1 - self.label_smoothing
        mass = buffer(work, "mass", shape[1:], x.dtype)
        np.multiply(weight, 1 - self.label_smoothing, out=mass)
        if share:
            self._smooth(z, weight, mass, taken, share, work)
        np.exp(z, out=z)
        np.sum(z, axis=0, out=column)
        if dx is not None:
            np.divide(mass, column, out=buffer(work, "ratio", shape[1:], x.dtype))
            z *= buffer(work, "ratio", shape[1:], x.dtype)
            self._subtract_target(z, index, weight, share, work)
            z *= scale
            np.copyto(dx, z.T)
        np.log(column, out=column)
        column *= mass
        column -= taken
        return total_of(column)

    def _smooth(self, z: Any, weight: Any, mass: Any, taken: Any, share: float, work: dict) -> None:
        """Add what label smoothing spreads over the classes to q . z and to the sum of q."""
        weights = self._spread(z, work)
        part, counts = (buffer(work, k, weight.shape, z.dtype) for k in ("part", "counted"))
        self._counted(weight, counts, work)
        np.dot(weights, z, out=part)
        part *= share
        part *= counts
        taken += part
        counts *= share * float(np.sum(self._per_class(z), dtype=np.float64))
        mass += counts

    def _subtract_target(self, z: Any, index: Any, weight: Any, share: float, work: dict) -> None:
        """``z -= q``."""
        flat = z.reshape(-1)
        taken = buffer(work, "part", weight.shape, z.dtype)
        moved = buffer(work, "moved", weight.shape, z.dtype)
        take(flat, index, out=taken)
        np.multiply(weight, 1 - self.label_smoothing, out=moved)
        taken -= moved
        flat[index] = taken
        if share:
            self._counted(weight, moved, work)
            for row, w in zip(z, self._per_class(z)):
                np.multiply(moved, share * float(w), out=taken)
                row -= taken

    def _spread(self, z: Any, work: dict) -> Any:
        """Weight per class, in the dtype of the computation."""
        if self.class_weights is None:
            return constant(work, f"ones {z.dtype}", lambda: np.ones(len(z)), z.dtype)
        return self._typed_weights(z.dtype, work)

    def _per_class(self, z: Any) -> Any:
        """The same on the host."""
        weights = np.ones(len(z)) if self.class_weights is None else self.class_weights
        return weights.astype(z.dtype)

    def _counted(self, weight: Any, out: Any, work: dict) -> None:
        """1 where a position counts, 0 where its target is ignored."""
        if self.ignore_index is None:
            out.fill(1)
        else:
            np.copyto(out, buffer(work, "counts", weight.shape, np.bool_))


class _WeightedKernel(LossKernel):
    """Divides by the sum of the target's weights over all ranks, which one small sum finds out."""

    def __init__(self, *arguments: Any, weight: Any, **arrays: Any) -> None:
        super().__init__(*arguments, **arrays)
        self.weight = weight

    def weigh(self) -> None:
        """Write the weight of this block's targets, to be summed."""
        layer, target = self.layer, self.target[: self.count]
        assert isinstance(layer, SoftmaxCrossEntropy)
        self.weight[0] = layer.target_weight(target, self.place.channels, self.work) if target.size else 0.0

    def scale(self) -> Any:
        if not on_host(self.weight):
            total = self.weight[0]
            return np.where(total > 0, 1 / np.maximum(total, 1e-300), 0.0)
        # A NumPy float64 would make float32 arrays compute in float64.
        total = float(self.weight[0])
        return 1.0 / total if total > 0 else 0.0


def _positions(count: int, work: dict) -> Any:
    """``0 .. count - 1``."""
    if "positions" in work and work["positions"].size < count:
        del work["positions"]
    return constant(work, "positions", lambda: np.arange(count), np.int64)[:count]
