"""GoogLeNet, the first Inception network (Szegedy et al. 2015), as Caffe's definition has it."""

from __future__ import annotations

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
from .classifier import classifier, dense_relu_dropout, scaled
from .options import ClassWeights, Extent, Factor, Filters, Rate

__all__ = ["googlenet"]

#: Filters per module: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection (Table 1 of the paper).
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
    """Nine modules of four branches. 6,998,552 parameters; 13,378,280 with the auxiliary classifiers.

    Parameters
    ----------
    classes, channels, resolution
        Of the head and of the samples.
    width
        Factor of all filters and hidden units, for small networks.
    dropout
        Rate before the last layer (the auxiliary classifiers have 0.7, or 0 where this is 0).
    auxiliary
        Whether two more classifiers, behind the modules 4a and 4d, add to the loss of training, with weight 0.3
        each; needs a resolution of at least 65.
    class_weights
        Of the loss: a number per class, or "balanced".

    Returns
    -------
    Network
        Inputs ``x (resolution, resolution, channels)`` and ``target (1,)`` (class index); outputs
        ``prediction`` (logits) and ``loss``.

    Notes
    -----
    Pooling of stride 2 rounds up, with the padding behind, as in Caffe at sizes that are multiples of 32.
    """
    y: Node = Input((resolution, resolution, channels), name="x")
    y = Conv(scaled(64, width), 7, 2, 3, activation="relu", name="conv1")(y)
    y = LocalResponseNorm(5, 1e-4, 0.75, name="norm1")(_pool(y, "1"))
    y = Conv(scaled(64, width), 1, activation="relu", name="conv2_reduce")(y)
    y = Conv(scaled(192, width), 3, padding=1, activation="relu", name="conv2")(y)
    y = _pool(LocalResponseNorm(5, 1e-4, 0.75, name="norm2")(y), "2")
    heads = []
    for label, filters in MODULES.items():
        y = _module(y, tuple(scaled(f, width) for f in filters), label)
        if auxiliary and label in ("4a", "4d"):
            heads.append(_auxiliary(y, classes, width, 0.7 if dropout else 0.0, label))
        if label in ("3b", "4e"):
            y = _pool(y, label[0])
    y = Dropout(dropout, name="dropout")(GlobalAveragePool(name="pool")(y))
    return classifier(Dense(classes, name="dense")(y), "googlenet", heads, class_weights=class_weights)


def _pool(y: Node, label: str) -> Node:
    return MaxPool(3, 2, padding="same", name=f"pool{label}")(y)


def _module(x: Node, filters: tuple[int, ...], label: str) -> Node:
    """1x1, 3x3 and 5x5 convolutions and a pooling beside one another, the latter three with a 1x1 convolution."""
    one, reduce3, three, reduce5, five, projection = filters

    def conv(y: Node, count: int, kernel: int, branch: str) -> Node:
        layer = Conv(count, kernel, padding=kernel // 2, activation="relu", name=f"conv{label}_{branch}")
        return layer(y)

    return Concat(name=f"join{label}")(
        conv(x, one, 1, "1x1"),
        conv(conv(x, reduce3, 1, "3x3_reduce"), three, 3, "3x3"),
        conv(conv(x, reduce5, 1, "5x5_reduce"), five, 5, "5x5"),
        conv(MaxPool(3, 1, 1, name=f"pool{label}")(x), projection, 1, "projection"),
    )


def _auxiliary(x: Node, classes: int, width: float, dropout: float, label: str) -> Node:
    """The logits of a classifier behind a module (Section 5 of the paper)."""
    if min(x.shape[:-1]) < 5:
        raise ValueError(
            f"auxiliary: expected at least 5 x 5 positions behind module {label}, got {x.shape[0]} x {x.shape[1]}; "
            "take a resolution of at least 65, or leave the auxiliary classifiers out"
        )
    y = AveragePool(5, 3, name=f"pool{label}_aux")(x)
    y = Conv(scaled(128, width), 1, activation="relu", name=f"conv{label}_aux")(y)
    y = dense_relu_dropout(Flatten(name=f"flatten{label}_aux")(y), scaled(1024, width), dropout, f"{label}_aux")
    return Dense(classes, name=f"predict{label}_aux")(y)
