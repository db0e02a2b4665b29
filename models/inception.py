"""GoogLeNet, the first Inception network, and Inception-v3.

GoogLeNet (Szegedy et al. 2015) is the version of Caffe. Inception-v3 (Szegedy et al. 2016, "Rethinking the Inception
architecture") is the version of torchvision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..layers import (
    AveragePool,
    Concat,
    Conv,
    Dense,
    Dropout,
    Flatten,
    GlobalAveragePool,
    Input,
    LocalResponseNorm,
    MaxPool,
    Network,
    Node,
)
from .common import ClassWeights, Extent, Factor, Filters, Rate, Statistics, classifier, hidden, scaled, unit

__all__ = ["googlenet", "inception_v3"]


#: Filters of GoogLeNet's modules: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection (Table 1 of the paper).
MODULES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}


def googlenet(
    classes: Filters = 1000,
    channels: Filters = 3,
    resolution: Extent = 224,
    width: Factor = 1.0,
    dropout: Rate = 0.4,
    auxiliary: bool = False,
    class_weights: ClassWeights = None,
) -> Network:
    """Make GoogLeNet: nine modules of four branches. 6,998,552 parameters; 13,378,280 with the auxiliary classifiers.

    Parameters
    ----------
    classes, channels, resolution
        Classes of the head; channels and edge of the samples.
    width
        Factor of all filters and hidden units, for small networks.
    dropout
        Rate before the last layer (the auxiliary classifiers have 0.7, or 0 if this is 0).
    auxiliary
        Whether two more classifiers, after the modules 4a and 4d, add to the training loss, with weight 0.3 each; this
        needs a resolution of at least 65.
    class_weights
        Weights of the classes in the loss: a number per class, or "balanced".

    Returns
    -------
    Network
        Inputs ``x (resolution, resolution, channels)`` and ``target (1,)`` (class index); outputs
        ``prediction`` (logits) and ``loss``.

    Notes
    -----
    Pooling of stride 2 rounds the size up. If the resolution is a multiple of 32, it pads at the end only, as in Caffe.
    """
    y: Node = Input((resolution, resolution, channels), name="x")
    y = Conv(scaled(64, width), 7, 2, 3, activation="relu", name="conv1")(y)
    # Pooling before the norm, as in Caffe; the second norm is before its pooling.
    y = LocalResponseNorm(5, 1e-4, 0.75, name="norm1")(_pool(y, "1"))
    y = Conv(scaled(64, width), 1, activation="relu", name="conv2_reduce")(y)
    y = Conv(scaled(192, width), 3, padding=1, activation="relu", name="conv2")(y)
    y = _pool(LocalResponseNorm(5, 1e-4, 0.75, name="norm2")(y), "2")
    heads = []
    for label, filters in MODULES.items():
        y = _module(y, tuple(scaled(f, width) for f in filters), label)
        if auxiliary and label in ("4a", "4d"):
            # A network without dropout is deterministic, so these have none either.
            heads.append(_auxiliary(y, classes, width, 0.7 if dropout else 0.0, label))
        # To 14 x 14, then 7 x 7 for samples of 224 x 224.
        if label in ("3b", "4e"):
            y = _pool(y, label[0])
    y = Dropout(dropout, name="dropout")(GlobalAveragePool(name="pool")(y))
    return classifier(Dense(classes, name="dense")(y), "googlenet", class_weights, heads)


def _pool(y: Node, label: str) -> Node:
    return MaxPool(3, 2, padding="same", name=f"pool{label}")(y)


def _module(x: Node, filters: tuple[int, ...], label: str) -> Node:
    """Add 1x1, 3x3 and 5x5 convolutions and a pooling in parallel; all but the first have a further 1x1 convolution."""
    direct, reduce3, three, reduce5, five, projection = filters

    def conv(y: Node, count: int, kernel: int, branch: str) -> Node:
        layer = Conv(count, kernel, padding=kernel // 2, activation="relu", name=f"conv{label}_{branch}")
        return layer(y)

    return Concat(name=f"join{label}")(
        conv(x, direct, 1, "1x1"),
        conv(conv(x, reduce3, 1, "3x3_reduce"), three, 3, "3x3"),
        conv(conv(x, reduce5, 1, "5x5_reduce"), five, 5, "5x5"),
        # Stride 1 and padding keep the extents, which must be those of the other branches.
        conv(MaxPool(3, 1, 1, name=f"pool{label}")(x), projection, 1, "projection"),
    )


def _auxiliary(x: Node, classes: int, width: float, dropout: float, label: str) -> Node:
    """Return the logits of a classifier after a module (Section 5 of the paper)."""
    if min(x.shape[:-1]) < 5:
        raise ValueError(
            f"auxiliary: expected at least 5 x 5 positions after module {label}, got {x.shape[0]} x {x.shape[1]}; "
            "take a resolution of at least 65, or leave the auxiliary classifiers out"
        )
    # 14 x 14 -> 4 x 4 for samples of 224 x 224.
    y = AveragePool(5, 3, name=f"pool{label}_aux")(x)
    y = Conv(scaled(128, width), 1, activation="relu", name=f"conv{label}_aux")(y)
    y = hidden(Flatten(name=f"flatten{label}_aux")(y), scaled(1024, width), f"{label}_aux", dropout)
    return Dense(classes, name=f"predict{label}_aux")(y)


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
    """Make Inception-v3: eleven modules with factorized kernels.

    23,834,568 parameters; 27,161,264 with the auxiliary classifier.

    Parameters
    ----------
    classes, channels, resolution
        Classes of the head; channels and edge of the samples; a resolution of at least 75.
    width
        Factor of all filters, for small networks.
    dropout
        Rate before the last layer.
    auxiliary
        Whether one more classifier, after the last 17 x 17 module, adds to the training loss, with weight 0.4; this
        needs at least 17 x 17 positions in that module, a resolution of at least 299.
    label_smoothing
        Fraction of the target that is spread over all classes (0.1 in the paper).
    statistics
        Statistics of batch norm: "global", "sample" or "local".
    class_weights
        Weights of the classes in the loss: a number per class, or "balanced".

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
    # 35 x 35 for samples of 299 x 299.
    for label, pooled in (("5b", 32), ("5c", 64), ("5d", 64)):
        y = make.module_a(y, pooled, label)
    y = make.reduction_b(y, "6a")  # 17 x 17
    for label, inner in (("6b", 128), ("6c", 160), ("6d", 160), ("6e", 192)):
        y = make.module_c(y, inner, label)
    heads = [make.auxiliary(y, classes)] if auxiliary else []
    y = make.reduction_d(y, "7a")  # 8 x 8
    for label in ("7b", "7c"):
        y = make.module_e(y, label)
    y = Dropout(dropout, name="dropout")(GlobalAveragePool(name="pool")(y))
    return classifier(Dense(classes, name="dense")(y), "inception_v3", class_weights, heads, 0.4, label_smoothing)


@dataclass(frozen=True)
class _Builder:
    """Parts of Inception-v3 with scaled widths. Modules have torchvision's names: ``5b`` to ``7c``."""

    width: float
    statistics: str

    def unit(
        self, y: Node, filters: int, kernel: _Kernel, label: str, stride: int = 1, padding: str | int = "same"
    ) -> Node:
        """Add a unit with a scaled number of filters."""
        width = scaled(filters, self.width)
        # torchvision's epsilon for this network; that of other batch norms is smaller.
        return unit(y, width, kernel, label, stride, padding, statistics=self.statistics, eps=1e-3)

    def chain(self, y: Node, steps: Sequence[tuple[int, _Kernel]], label: str) -> Node:
        """Add units in sequence; each step is (filters, kernel)."""
        for i, (filters, kernel) in enumerate(steps, start=1):
            y = self.unit(y, filters, kernel, f"{label}_{i}")
        return y

    def projection(self, x: Node, filters: int, label: str) -> Node:
        """Add average pooling and a pointwise unit."""
        return self.unit(AveragePool(3, 1, 1, name=f"pool{label}")(x), filters, 1, f"{label}_pool")

    def stem(self, x: Node) -> Node:
        """Add the stem, 299 x 299 -> 35 x 35, with padding in one convolution only."""
        y = self.unit(x, 32, 3, "1a", 2, 0)  # 149 x 149 for samples of 299 x 299
        y = self.unit(y, 32, 3, "2a", 1, 0)  # 147 x 147
        y = self.unit(y, 64, 3, "2b")
        y = MaxPool(3, 2, name="pool2")(y)  # 73 x 73
        y = self.unit(y, 80, 1, "3b")
        y = self.unit(y, 192, 3, "4a", 1, 0)  # 71 x 71
        return MaxPool(3, 2, name="pool4")(y)

    def module_a(self, x: Node, pooled: int, label: str) -> Node:
        """Add the module of Figure 5 of the paper, with the branches 1x1, 5x5, two 3x3, and pooling."""
        return Concat(name=f"join{label}")(
            self.unit(x, 64, 1, f"{label}_1x1"),
            self.chain(x, [(48, 1), (64, 5)], f"{label}_5x5"),
            self.chain(x, [(64, 1), (96, 3), (96, 3)], f"{label}_3x3"),
            self.projection(x, pooled, label),
        )

    def reduction_b(self, x: Node, label: str) -> Node:
        """Add the reduction 35 x 35 -> 17 x 17."""
        double = self.chain(x, [(64, 1), (96, 3)], f"{label}_double")
        return Concat(name=f"join{label}")(
            self.unit(x, 384, 3, f"{label}_3x3", 2, 0),
            self.unit(double, 96, 3, f"{label}_double_3", 2, 0),
            MaxPool(3, 2, name=f"pool{label}")(x),
        )

    def module_c(self, x: Node, inner: int, label: str) -> Node:
        """Add the module of Figure 6: 1x1, 7x7, two 7x7, pooling. Each 7x7 is a 1x7 and a 7x1 in sequence."""
        # (height, width) of the kernels.
        rows, columns = (1, 7), (7, 1)
        double: list[tuple[int, _Kernel]] = [(inner, 1), (inner, columns), (inner, rows), (inner, columns), (192, rows)]
        return Concat(name=f"join{label}")(
            self.unit(x, 192, 1, f"{label}_1x1"),
            self.chain(x, [(inner, 1), (inner, rows), (192, columns)], f"{label}_7x7"),
            self.chain(x, double, f"{label}_double"),
            self.projection(x, 192, label),
        )

    def reduction_d(self, x: Node, label: str) -> Node:
        """Add the reduction 17 x 17 -> 8 x 8."""
        three = self.unit(x, 192, 1, f"{label}_3x3_1")
        seven = self.chain(x, [(192, 1), (192, (1, 7)), (192, (7, 1))], f"{label}_7x7")
        return Concat(name=f"join{label}")(
            self.unit(three, 320, 3, f"{label}_3x3_2", 2, 0),
            self.unit(seven, 192, 3, f"{label}_7x7_4", 2, 0),
            MaxPool(3, 2, name=f"pool{label}")(x),
        )

    def module_e(self, x: Node, label: str) -> Node:
        """Add the module of Figure 7: 1x1, 3x3, two 3x3, pooling. The last 3x3 of a branch is a 1x3 and a 3x1.
        """
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
        """Return the logits of the classifier after the last 17 x 17 module."""
        if min(x.shape[:-1]) < 17:
            raise ValueError(
                f"auxiliary: expected at least 17 x 17 positions after module 6e, got {x.shape[0]} x {x.shape[1]}; "
                "take a resolution of at least 299, or leave the auxiliary classifier out"
            )
        y = self.unit(AveragePool(5, 3, name="pool_aux")(x), 128, 1, "_aux_1")
        y = self.unit(y, 768, 5, "_aux_2", 1, 0)
        # One position if the samples are 299 x 299; for others the mean, as in torchvision.
        y = GlobalAveragePool(name="average_aux")(y)
        return Dense(classes, name="dense_aux")(y)
