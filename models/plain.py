"""Plain networks, with layers in sequence: LeNet-5, AlexNet, VGG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from ..layers import Conv, Dense, Flatten, Input, LocalResponseNorm, MaxPool, Network, Node
from .common import ClassWeights, Extent, Factor, Filters, Name, Rate, classifier, hidden, scaled

__all__ = ["alexnet", "lenet5", "vgg", "vgg16", "vgg128", "vgg256", "vgg512", "vgg_a"]


def lenet5(
    classes: Filters = 10,
    channels: Filters = 1,
    resolution: Extent = 28,
    width: Factor = 1.0,
    class_weights: ClassWeights = None,
) -> Network:
    """Make LeNet-5 (LeCun et al. 1998), with ReLU and max pooling, as is usual today.

    Two convolutions with pooling, three dense layers. 61,706 parameters for 28 x 28 x 1.

    Parameters
    ----------
    classes, channels, resolution
        Classes of the head; channels and edge of the samples.
    width
        Factor of all filters and hidden units, for small networks.
    class_weights
        Weights of the classes in the loss: a number per class, or "balanced".

    Returns
    -------
    Network
        Inputs ``x (resolution, resolution, channels)`` and ``target (1,)`` (class index); outputs
        ``prediction`` (logits) and ``loss``.
    """
    x = Input((resolution, resolution, channels), name="x")
    # The paper's samples of 32 x 32 have this margin already.
    y = Conv(scaled(6, width), 5, padding=2, activation="relu", name="conv1")(x)
    y = MaxPool(2, 2, name="pool1")(y)
    y = Conv(scaled(16, width), 5, activation="relu", name="conv2")(y)
    y = Flatten(name="flatten")(MaxPool(2, 2, name="pool2")(y))
    y = hidden(hidden(y, scaled(120, width), "3"), scaled(84, width), "4")
    return classifier(Dense(classes, name="dense5")(y), "lenet5", class_weights)


#: Filters of AlexNet's five convolutions, and the groups of the second, fourth and fifth, by variant.
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
    """Make AlexNet (Krizhevsky et al. 2012): five convolutions, three dense layers.

    ``variant="one_tower"`` (61,100,840 parameters) is the network of Krizhevsky's "One weird trick" (2014): 64, 192,
    384, 256, 256 filters, no groups, no normalization. It is the default because torchvision and the papers of the
    benchmarks use it (Jia et al.'s Table 1: conv2 has 64 channels in, 192 out, conv5 256 and 256).
    ``variant="grouped"`` (60,965,224) is the network of 2012: 96, 256, 384, 384, 256 filters, the second, fourth and
    fifth convolution in two groups, local response normalization after the first two.

    Parameters
    ----------
    classes, channels, resolution
        Classes of the head; channels and edge of the samples; a resolution of at least 63.
    width
        Factor of all filters and hidden units, for small networks.
    dropout
        Rate after each of the two hidden dense layers.
    variant
        ``"one_tower"`` or ``"grouped"``.
    class_weights
        Weights of the classes in the loss: a number per class, or "balanced".

    Returns
    -------
    Network
        Inputs ``x (resolution, resolution, channels)`` and ``target (1,)`` (class index); outputs
        ``prediction`` (logits) and ``loss``.

    Notes
    -----
    Both variants pad the first convolution by 2, so that 224 x 224 gives 55 x 55, as 227 x 227 gives without padding.
    """
    filters, groups = _VARIANTS[variant]
    f1, f2, f3, f4, f5 = (scaled(f, width, groups) for f in filters)
    normalized = variant == "grouped"
    y: Node = Input((resolution, resolution, channels), name="x")
    # 27 x 27, 13 x 13 and 6 x 6 after the poolings, for samples of 224 x 224.
    y = _pooled(Conv(f1, 11, 4, 2, activation="relu", name="conv1")(y), 1, normalized)
    y = _pooled(Conv(f2, 5, padding=2, groups=groups, activation="relu", name="conv2")(y), 2, normalized)
    y = Conv(f3, 3, padding=1, activation="relu", name="conv3")(y)
    y = Conv(f4, 3, padding=1, groups=groups, activation="relu", name="conv4")(y)
    y = _pooled(Conv(f5, 3, padding=1, groups=groups, activation="relu", name="conv5")(y), 5, False)
    y = Flatten(name="flatten")(y)
    # The paper's layers 6 and 7.
    for label in "67":
        y = hidden(y, scaled(4096, width), label, dropout)
    return classifier(Dense(classes, name="dense8")(y), "alexnet", class_weights)


def _pooled(y: Node, label: int, normalized: bool) -> Node:
    """Add overlapping pooling, preceded by local response normalization if `normalized`."""
    if normalized:
        # The paper's alpha is 1e-4; the layer divides by the size, 5, and the paper does not.
        y = LocalResponseNorm(5, alpha=5e-4, beta=0.75, k=2.0, name=f"norm{label}")(y)
    return MaxPool(3, 2, name=f"pool{label}")(y)


#: Filters of the convolutions, block by block.
Blocks = Annotated[
    Sequence[Annotated[Sequence[Filters], Field(min_length=1, max_length=64)]], Field(min_length=1, max_length=16)
]
#: Configurations A and D of the paper's Table 1; every block ends with a pooling.
VGG_A = ((64,), (128,), (256, 256), (512, 512), (512, 512))
VGG_D = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg(
    blocks: Blocks,
    classes: Filters = 1000,
    channels: Filters = 3,
    resolution: Extent = 224,
    width: Factor = 1.0,
    dropout: Rate = 0.5,
    name: Name = "vgg",
    class_weights: ClassWeights = None,
) -> Network:
    """Make a VGG network (Simonyan and Zisserman 2014): blocks of 3 x 3 convolutions and a 2 x 2 pooling, a dense head.

    Parameters
    ----------
    blocks
        Filters of every convolution, block by block.
    classes, channels, resolution
        Classes of the head; channels and edge of the samples; the resolution at least ``2**len(blocks)``.
    width
        Factor of all filters and hidden units, for small networks.
    dropout
        Rate after each of the two hidden dense layers.
    class_weights
        Weights of the classes in the loss: a number per class, or "balanced".

    Returns
    -------
    Network
        Inputs ``x (resolution, resolution, channels)`` and ``target (1,)`` (class index); outputs
        ``prediction`` (logits) and ``loss``.
    """
    y: Node = Input((resolution, resolution, channels), name="x")
    for i, block in enumerate(blocks, start=1):
        for j, filters in enumerate(block, start=1):
            y = Conv(scaled(filters, width), 3, padding=1, activation="relu", name=f"conv{i}_{j}")(y)
        y = MaxPool(2, 2, name=f"pool{i}")(y)
    y = Flatten(name="flatten")(y)
    for label in "12":
        y = hidden(y, scaled(4096, width), label, dropout)
    return classifier(Dense(classes, name="dense3")(y), name, class_weights)


def vgg_a(**options) -> Network:
    """Make VGG-A (VGG-11), eight convolutions: 132,863,336 parameters with 1000 classes."""
    return vgg(**{"blocks": VGG_A, "name": "vgg_a", **options})


def vgg16(**options) -> Network:
    """Make VGG-16 (configuration D), thirteen convolutions: 138,357,544 parameters with 1000 classes."""
    return vgg(**{"blocks": VGG_D, "name": "vgg16", **options})


def _uniform(filters: int, options: dict) -> Network:
    """Make VGG-A with `filters` filters in all convolutions."""
    blocks = [[filters] * len(block) for block in VGG_A]
    return vgg(**{"blocks": blocks, "name": f"vgg{filters}", **options})


def vgg128(**options) -> Network:
    """Make VGG-A with 128 filters everywhere (Lee et al. 2017, Section IV: "48 millions"): 47,609,192 parameters."""
    return _uniform(128, options)


def vgg256(**options) -> Network:
    """Make VGG-A with 256 filters everywhere (Lee et al. 2017, Section IV: "76 millions"): 76,400,360 parameters."""
    return _uniform(256, options)


def vgg512(**options) -> Network:
    """Make VGG-A with 512 filters everywhere (Lee et al. 2017, Section IV: "140 millions"): 140,175,848 parameters."""
    return _uniform(512, options)
