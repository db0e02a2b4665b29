"""U-Net in two (Ronneberger et al. 2015) and three dimensions (Çiçek et al. 2016)."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from halograd.schema import Count

from ..layers import BatchNorm, Concat, Conv, ConvTranspose, Input, MaxPool, Network, Node
from .common import ClassWeights, Extent, Extents, Filters, Ignored, Name, Statistics, classifier

__all__ = ["unet", "unet2d", "unet3d"]


def unet(
    resolution: Extents,
    channels: Filters = 1,
    classes: Filters = 2,
    width: Filters = 64,
    levels: Annotated[Count, Field(le=16)] = 4,
    statistics: Statistics = "global",
    name: Name = "unet",
    class_weights: ClassWeights = None,
    ignore_index: Ignored = None,
) -> Network:
    """Make a U-Net: encoder and decoder with skip connections; "same" padding, so that every element is predicted.

    Parameters
    ----------
    resolution
        Spatial extent of a sample, 1 to 3 numbers, multiples of ``2**levels``.
    channels, classes
        Input channels; classes per element.
    width
        Filters of the first level; each further level has twice as many.
    levels
        Number of poolings.
    statistics
        Statistics of batch norm: "global", "sample" or "local".
    class_weights
        Weights of the classes in the loss: a number per class, or "balanced".
    ignore_index
        Class index of elements that do not count in loss and metrics, for example -1; by default all count.

    Returns
    -------
    Network
        Inputs ``x (*resolution, channels)`` and ``target (*resolution, 1)`` (class index per element);
        outputs ``prediction`` (logits) and ``loss``.
    """
    if any(n % 2**levels for n in resolution):
        raise ValueError(f"resolution: expected multiples of {2**levels} ({levels} levels), got {tuple(resolution)}")
    x = Input((*resolution, channels), name="x")
    y: Node = x
    skips: list[Node] = []
    for level in range(levels):
        y = _double(y, width * 2**level, f"down{level}", statistics)
        skips.append(y)
        y = MaxPool(2, 2, name=f"pool{level}")(y)
    y = _double(y, width * 2**levels, "bottom", statistics)
    for level in reversed(range(levels)):
        # Back to the extents and channels of this level's skip connection.
        y = ConvTranspose(width * 2**level, 2, 2, name=f"up{level}")(y)
        y = _double(Concat(name=f"join{level}")(skips[level], y), width * 2**level, f"up{level}", statistics)
    return classifier(Conv(classes, 1, name="predict")(y), name, class_weights, ignore_index=ignore_index)


def _double(y: Node, filters: int, label: str, statistics: str) -> Node:
    for part in "ab":
        # No bias: the norm subtracts the mean, and with it any bias.
        y = Conv(filters, 3, padding=1, bias=False, name=f"{label}_conv_{part}")(y)
        y = BatchNorm(statistics=statistics, activation="relu", name=f"{label}_bn_{part}")(y)
    return y


def unet2d(resolution: Extent = 256, **options) -> Network:
    """Make a U-Net for square 2-D samples."""
    return unet(**{"resolution": (resolution,) * 2, "name": "unet2d", **options})


def unet3d(resolution: Extent = 64, **options) -> Network:
    """Make a U-Net for cubic 3-D samples, with three levels as in Çiçek et al."""
    return unet(**{"resolution": (resolution,) * 3, "levels": 3, "width": 32, "name": "unet3d", **options})
