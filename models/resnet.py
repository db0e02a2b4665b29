"""ResNet-50 and ResNet-152 (He et al. 2016), version 1.5: the 3 x 3 convolution has the stride."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from ..layers import (
    BatchNorm,
    Conv,
    Dense,
    GlobalAveragePool,
    Input,
    MaxPool,
    Network,
    Node,
)
from .common import ClassWeights, Extent, Filters, Name, Statistics, Times, classifier, unit

__all__ = ["resnet", "resnet50", "resnet152"]


def resnet(
    depths: Annotated[Sequence[Times], Field(min_length=1, max_length=16)],
    classes: Filters = 1000,
    channels: Filters = 3,
    resolution: Extent = 224,
    width: Filters = 64,
    statistics: Statistics = "global",
    name: Name = "resnet",
    class_weights: ClassWeights = None,
) -> Network:
    """Make a residual network of bottleneck blocks.

    Parameters
    ----------
    depths
        Blocks per stage, (3, 4, 6, 3) for ResNet-50, (3, 8, 36, 3) for ResNet-152.
    classes, channels, resolution
        Classes of the head; channels and edge of the samples.
    width
        Filters of the first stage's 3 x 3 convolutions (64; smaller for tests).
    statistics
        Statistics of batch norm: "global", "sample" or "local".
    class_weights
        Weights of the classes in the loss: a number per class, or "balanced".

    Returns
    -------
    Network
        Inputs ``x (resolution, resolution, channels)`` and ``target (1,)`` (class index); outputs
        ``prediction`` (logits) and ``loss``.
    """
    x = Input((resolution, resolution, channels), name="x")
    # Extents / 2 here, and / 2 by the pooling.
    y = unit(x, width, 7, "1", 2, 3, statistics=statistics)
    y = MaxPool(3, 2, padding=1, name="pool1")(y)
    for stage, blocks in enumerate(depths, start=2):
        for block in range(1, blocks + 1):
            # The first stage has no stride, because the pooling before it has one.
            stride = 2 if block == 1 and stage > 2 else 1
            y = _bottleneck(y, width * 2 ** (stage - 2), stride, f"{stage}_{block}", statistics)
    logits = Dense(classes, name="dense")(GlobalAveragePool(name="pool")(y))
    return classifier(logits, name, class_weights)


def _bottleneck(x: Node, filters: int, stride: int, label: str, statistics: str) -> Node:
    # 1 x 1, 3 x 3, 1 x 1; the last has four times the filters (Table 1 of the paper).
    y = unit(x, filters, 1, f"{label}a", 1, 0, statistics=statistics)
    y = unit(y, filters, 3, f"{label}b", stride, 1, statistics=statistics)
    y = Conv(4 * filters, 1, bias=False, name=f"conv{label}c")(y)
    shortcut = x
    if stride > 1 or x.shape[-1] != 4 * filters:
        # A projection, as in option B of the paper (Section 3.3): extents or channels differ.
        shortcut = Conv(4 * filters, 1, stride, bias=False, name=f"conv{label}s")(x)
        shortcut = BatchNorm(statistics=statistics, name=f"bn{label}s")(shortcut)
    # The norm adds the shortcut before its activation, in the same kernels.
    return BatchNorm(statistics=statistics, activation="relu", name=f"bn{label}c")(y, shortcut)


def resnet50(**options) -> Network:
    """Make ResNet-50: 25,557,032 parameters with 1000 classes."""
    return resnet(**{"depths": (3, 4, 6, 3), "name": "resnet50", **options})


def resnet152(**options) -> Network:
    """Make ResNet-152: 60,192,808 parameters with 1000 classes."""
    return resnet(**{"depths": (3, 8, 36, 3), "name": "resnet152", **options})
