"""Inception-v3 (Szegedy et al. 2016, "Rethinking the Inception architecture"), with the details of torchvision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..layers import (
    AveragePool,
    BatchNorm,
    Concat,
    Conv,
    Dense,
    Dropout,
    GlobalAveragePool,
    Input,
    MaxPool,
    Network,
    Node,
)
from .classifier import classifier, scaled
from .options import ClassWeights, Extent, Factor, Filters, Rate, Statistics

__all__ = ["inception_v3"]

_Kernel = int | tuple[int, int]


def inception_v3(
    classes: Filters = 1000,
    channels: Filters = 3,
    resolution: Extent = 299,
    width: Factor = 1.0,
    dropout: Rate = 0.5,
    auxiliary: bool = False,
    label_smoothing: Rate = 0.0,
    statistics: Statistics = "global",
    class_weights: ClassWeights = None,
) -> Network:
    """Eleven modules with factorized kernels. 23,834,568 parameters; 27,161,264 with the auxiliary classifier.

    Parameters
    ----------
    classes, channels, resolution
        Of the head and of the samples; a resolution of at least 75.
    width
        Factor of all filters, for small networks.
    dropout
        Rate before the last layer.
    auxiliary
        Whether one more classifier, behind the last 17 x 17 module, adds to the loss of training, with weight 0.4;
        needs at least 17 x 17 positions there, a resolution of 299.
    label_smoothing
        Share of the target that is spread over all classes (0.1 in the paper).
    statistics
        Of batch norm: "global", "sample" or "local".
    class_weights
        Of the loss: a number per class, or "balanced".

    Returns
    -------
    Network
        Inputs ``x (resolution, resolution, channels)`` and ``target (1,)`` (class index); outputs
        ``prediction`` (logits) and ``loss``.

    Notes
    -----
    The average poolings within modules count the padding, as torchvision does (TensorFlow does not).
    """
    if resolution < 75:
        raise ValueError(f"resolution: expected at least 75 (one position in the last modules), got {resolution}")
    make = _Builder(width, statistics)
    y = make.stem(Input((resolution, resolution, channels), name="x"))
    for label, pooled in (("5b", 32), ("5c", 64), ("5d", 64)):
        y = make.module_a(y, pooled, label)
    y = make.reduction_b(y, "6a")
    for label, inner in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        y = make.module_c(y, inner, label)
    heads = [make.auxiliary(y, classes)] if auxiliary else []
    y = make.reduction_d(y, "7a")
    for label in ("7b", "7c"):
        y = make.module_e(y, label)
    y = Dropout(dropout, name="dropout")(GlobalAveragePool(name="pool")(y))
    return classifier(Dense(classes, name="dense")(y), "inception_v3", heads, 0.4, label_smoothing, class_weights)


@dataclass(frozen=True)
class _Builder:
    """Parts of the network, of scaled widths. Names of modules are torchvision's: ``5b`` to ``7c``."""

    width: float
    statistics: str

    def unit(
        self, y: Node, filters: int, kernel: _Kernel, label: str, stride: int = 1, padding: str | int = "same"
    ) -> Node:
        """Convolution without bias, batch norm, ReLU; "same" padding, which all kernels (odd) have on both sides."""
        y = Conv(scaled(filters, self.width), kernel, stride, padding, bias=False, name=f"conv{label}")(y)
        return BatchNorm(self.statistics, eps=1e-3, activation="relu", name=f"bn{label}")(y)

    def chain(self, y: Node, steps: Sequence[tuple[int, _Kernel]], label: str) -> Node:
        """Units one behind the other: (filters, kernel) each."""
        for i, (filters, kernel) in enumerate(steps, start=1):
            y = self.unit(y, filters, kernel, f"{label}_{i}")
        return y

    def projection(self, x: Node, filters: int, label: str) -> Node:
        """Average pooling, then a pointwise unit."""
        return self.unit(AveragePool(3, 1, 1, name=f"pool{label}")(x), filters, 1, f"{label}_pool")

    def stem(self, x: Node) -> Node:
        """299 x 299 -> 35 x 35, without padding but in one convolution."""
        y = self.unit(x, 32, 3, "1a", 2, 0)
        y = self.unit(y, 32, 3, "2a", 1, 0)
        y = self.unit(y, 64, 3, "2b")
        y = MaxPool(3, 2, name="pool2")(y)
        y = self.unit(y, 80, 1, "3b")
        y = self.unit(y, 192, 3, "4a", 1, 0)
        return MaxPool(3, 2, name="pool4")(y)

    def module_a(self, x: Node, pooled: int, label: str) -> Node:
        """Figure 5 of the paper: 1x1, 5x5, two 3x3, pooling."""
        return Concat(name=f"join{label}")(
            self.unit(x, 64, 1, f"{label}_1x1"),
            self.chain(x, [(48, 1), (64, 5)], f"{label}_5x5"),
            self.chain(x, [(64, 1), (96, 3), (96, 3)], f"{label}_3x3"),
            self.projection(x, pooled, label),
        )

    def reduction_b(self, x: Node, label: str) -> Node:
        """35 x 35 -> 17 x 17."""
        double = self.chain(x, [(64, 1), (96, 3)], f"{label}_double")
        return Concat(name=f"join{label}")(
            self.unit(x, 384, 3, f"{label}_3x3", 2, 0),
            self.unit(double, 96, 3, f"{label}_double_3", 2, 0),
            MaxPool(3, 2, name=f"pool{label}")(x),
        )

    def module_c(self, x: Node, inner: int, label: str) -> Node:
        """Figure 6: 1x1, 7x7 and two 7x7 as 1x7 and 7x1, pooling."""
        rows, columns = (1, 7), (7, 1)
        double: list[tuple[int, _Kernel]] = [(inner, 1), (inner, columns), (inner, rows), (inner, columns), (192, rows)]
        return Concat(name=f"join{label}")(
            self.unit(x, 192, 1, f"{label}_1x1"),
            self.chain(x, [(inner, 1), (inner, rows), (192, columns)], f"{label}_7x7"),
            self.chain(x, double, f"{label}_double"),
            self.projection(x, 192, label),
        )

    def reduction_d(self, x: Node, label: str) -> Node:
        """17 x 17 -> 8 x 8."""
        three = self.unit(x, 192, 1, f"{label}_3x3_1")
        seven = self.chain(x, [(192, 1), (192, (1, 7)), (192, (7, 1))], f"{label}_7x7")
        return Concat(name=f"join{label}")(
            self.unit(three, 320, 3, f"{label}_3x3_2", 2, 0),
            self.unit(seven, 192, 3, f"{label}_7x7_4", 2, 0),
            MaxPool(3, 2, name=f"pool{label}")(x),
        )

    def module_e(self, x: Node, label: str) -> Node:
        """Figure 7: 1x1, 3x3 and two 3x3, the last of which are a 1x3 and a 3x1 side by side, pooling."""
        single = self.unit(x, 384, 1, f"{label}_3x3")
        double = self.chain(x, [(448, 1), (384, 3)], f"{label}_double")
        return Concat(name=f"join{label}")(
            self.unit(x, 320, 1, f"{label}_1x1"),
            self.unit(single, 384, (1, 3), f"{label}_1x3"),
            self.unit(single, 384, (3, 1), f"{label}_3x1"),
            self.unit(double, 384, (1, 3), f"{label}_double_1x3"),
            self.unit(double, 384, (3, 1), f"{label}_double_3x1"),
            self.projection(x, 192, label),
        )

    def auxiliary(self, x: Node, classes: int) -> Node:
        """The logits of the classifier behind the last 17 x 17 module."""
        if min(x.shape[:-1]) < 17:
            raise ValueError(
                f"auxiliary: expected at least 17 x 17 positions behind module 6e, got {x.shape[0]} x {x.shape[1]}; "
                "take a resolution of at least 299, or leave the auxiliary classifier out"
            )
        y = self.unit(AveragePool(5, 3, name="pool_aux")(x), 128, 1, "_aux_1")
        y = self.unit(y, 768, 5, "_aux_2", 1, 0)
        # One position where the samples are 299 x 299; torchvision, too, averages what is left.
        y = GlobalAveragePool(name="average_aux")(y)
        return Dense(classes, name="dense_aux")(y)
