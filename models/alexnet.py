"""AlexNet (Krizhevsky et al. 2012), in one tower or with the grouped convolutions of the original."""

from __future__ import annotations

from typing import Literal

from ..layers import Conv, Dense, Flatten, Input, LocalResponseNorm, MaxPool, Network, Node
from .classifier import classifier, dense_relu_dropout, scaled
from .options import ClassWeights, Extent, Factor, Filters, Rate

__all__ = ["alexnet"]

#: Per variant: filters of the five convolutions, and the groups of the second, fourth and fifth.
_VARIANTS = {"one_tower": ((64, 192, 384, 256, 256), 1), "grouped": ((96, 256, 384, 384, 256), 2)}


def alexnet(
    classes: Filters = 1000,
    channels: Filters = 3,
    resolution: Extent = 224,
    width: Factor = 1.0,
    dropout: Rate = 0.5,
    variant: Literal["one_tower", "grouped"] = "one_tower",
    class_weights: ClassWeights = None,
) -> Network:
    """Five convolutions, three dense layers.

    ``variant="one_tower"`` (61,100,840 parameters) is that of Krizhevsky's "One weird trick" (2014): 64, 192, 384,
    256, 256 filters, no groups, no normalization. It is the default because the papers that we compare with
    train it (Jia et al.'s Table 1: conv2 has 64 channels in, 192 out, conv5 256 and 256) and torchvision
    has it. ``variant="grouped"`` (60,965,224) is that of 2012: 96, 256, 384, 384, 256 filters, the second, fourth
    and fifth convolution in two groups, local response normalization behind the first two.

    Parameters
    ----------
    classes, channels, resolution
        Of the head and of the samples; a resolution of at least 63.
    width
        Factor of all filters and hidden units, for small networks.
    dropout
        Rate behind each of the two hidden dense layers.
    variant
        ``"one_tower"`` or ``"grouped"``.
    class_weights
        Of the loss: a number per class, or "balanced".

    Returns
    -------
    Network
        Inputs ``x (resolution, resolution, channels)`` and ``target (1,)`` (class index); outputs
        ``prediction`` (logits) and ``loss``.

    Notes
    -----
    Both variants pad the first convolution by 2, so that 224 x 224 gives 55 x 55 as 227 x 227 does without.
    """
    filters, groups = _VARIANTS[variant]
    f1, f2, f3, f4, f5 = (scaled(f, width, groups) for f in filters)
    normalized = variant == "grouped"
    y: Node = Input((resolution, resolution, channels), name="x")
    y = _pooled(Conv(f1, 11, 4, 2, activation="relu", name="conv1")(y), 1, normalized)
    y = _pooled(Conv(f2, 5, padding=2, groups=groups, activation="relu", name="conv2")(y), 2, normalized)
    y = Conv(f3, 3, padding=1, activation="relu", name="conv3")(y)
    y = Conv(f4, 3, padding=1, groups=groups, activation="relu", name="conv4")(y)
    y = _pooled(Conv(f5, 3, padding=1, groups=groups, activation="relu", name="conv5")(y), 5, False)
    y = Flatten(name="flatten")(y)
    for label in "67":
        y = dense_relu_dropout(y, scaled(4096, width), dropout, label)
    return classifier(Dense(classes, name="dense8")(y), "alexnet", class_weights=class_weights)


def _pooled(y: Node, label: int, normalized: bool) -> Node:
    """Overlapping pooling, behind the paper's normalization if wanted (its alpha is not divided by the size)."""
    if normalized:
        y = LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0, name=f"norm{label}")(y)
    return MaxPool(3, 2, name=f"pool{label}")(y)
