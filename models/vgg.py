"""VGG (Simonyan and Zisserman 2014), configurations A and D, and the variants of A of Lee et al. 2017."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from ..layers import Conv, Dense, Flatten, Input, MaxPool, Network, Node
from .classifier import classifier, dense_relu_dropout, scaled
from .options import ClassWeights, Extent, Factor, Filters, Name, Rate

__all__ = ["vgg", "vgg16", "vgg128", "vgg256", "vgg512", "vgg_a"]

#: Convolutions of a block, and blocks.
Blocks = Annotated[
    Sequence[Annotated[Sequence[Filters], Field(min_length=1, max_length=64)]], Field(min_length=1, max_length=16)
]
#: Filters of the convolutions, block by block; every block ends with a pooling.
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
    """Blocks of 3 x 3 convolutions and a 2 x 2 pooling, three dense layers.

    Parameters
    ----------
    blocks
        Filters of every convolution, block by block.
    classes, channels, resolution
        Of the head and of the samples; the resolution at least ``2**len(blocks)``.
    width
        Factor of all filters and hidden units, for small networks.
    dropout
        Rate behind each of the two hidden dense layers.
    class_weights
        Of the loss: a number per class, or "balanced".

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
    for j in (1, 2):
        y = dense_relu_dropout(y, scaled(4096, width), dropout, str(j))
    return classifier(Dense(classes, name="dense3")(y), name, class_weights=class_weights)


def vgg_a(**options) -> Network:
    """VGG-A (VGG-11), eight convolutions: 132,863,336 parameters with 1000 classes."""
    return vgg(**{"blocks": VGG_A, "name": "vgg_a", **options})


def vgg16(**options) -> Network:
    """VGG-16 (configuration D), thirteen convolutions: 138,357,544 parameters with 1000 classes."""
    return vgg(**{"blocks": VGG_D, "name": "vgg16", **options})


def _uniform(filters: int, options: dict) -> Network:
    """VGG-A with as many filters in all convolutions."""
    blocks = [[filters] * len(block) for block in VGG_A]
    return vgg(**{"blocks": blocks, "name": f"vgg{filters}", **options})


def vgg128(**options) -> Network:
    """VGG-A with 128 filters everywhere (Lee et al. 2017, Section IV: "48 millions"): 47,609,192 parameters."""
    return _uniform(128, options)


def vgg256(**options) -> Network:
    """VGG-A with 256 filters everywhere (Lee et al. 2017, Section IV: "76 millions"): 76,400,360 parameters."""
    return _uniform(256, options)


def vgg512(**options) -> Network:
    """VGG-A with 512 filters everywhere (Lee et al. 2017, Section IV: "140 millions"): 140,175,848 parameters."""
    return _uniform(512, options)
