"""Mesh-tangling models of Dryden et al. 2019 (Section VI): six blocks of convolutions, each with batch norm and
ReLU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from ..layers import (
    BinaryCrossEntropyWithLogits,
    Concat,
    Conv,
    Input,
    Network,
    Node,
    Resize,
)
from .common import Balanced, Extent, Filters, Name, Statistics, Times, Weight, unit

__all__ = ["mesh", "mesh_1k", "mesh_2k"]

#: Filters per block; the paper's figures give the first (128), the fifth (384) and the last (128).
WIDTHS = (128, 192, 256, 320, 384, 128)


def mesh(
    resolution: Extent | Annotated[Sequence[Extent], Field(min_length=2, max_length=2)] = 512,
    channels: Filters = 18,
    widths: Annotated[Sequence[Filters], Field(min_length=1, max_length=32)] = WIDTHS,
    convs: Times = 3,
    decoder: bool = False,
    statistics: Statistics = "global",
    pos_weight: Weight | Balanced = 1.0,
    name: Name = "mesh",
) -> Network:
    """Make the mesh-tangling network, which predicts the cells, or the patches of cells, that need relaxation.

    Every block begins with a convolution of stride 2 (the first of all with a 5 x 5 kernel), so with six blocks there
    is one prediction per 64 x 64 patch. The loss compares it with the mask reduced to that grid
    (:mod:`halograd.data.targets`).
    With `decoder`, an upsampling path with skip connections predicts every cell.

    Parameters
    ----------
    resolution
        Cells along height and width (one number, or two).
    channels
        Channels of a sample.
    widths
        Filters of each block.
    convs
        Convolution-norm-ReLU units per block: 3 in the paper's 1K model, 5 in its 2K model.
    decoder
        Whether every cell is predicted instead of every patch.
    statistics
        Statistics of batch norm: "global", "sample" or "local".
    pos_weight
        Weight in the loss of the cells that need relaxation; "balanced": the number of other cells divided by the
        number of these cells.

    Returns
    -------
    Network
        Inputs ``x (H, W, channels)`` and ``target (h, w, 1)``; outputs ``prediction`` (logits) and ``loss``.
    """
    height, width = (resolution, resolution) if isinstance(resolution, int) else resolution
    # The decoder doubles extents, so each block must halve them exactly.
    scale = 2 ** len(widths)
    if decoder and (height % scale or width % scale):
        raise ValueError(f"resolution: with a decoder, expected multiples of {scale}, got {height} x {width}")
    x = Input((height, width, channels), name="x")
    y: Node = x
    skips: list[Node] = []
    for i, filters in enumerate(widths, start=1):
        for j in range(1, convs + 1):
            first = j == 1
            kernel = 5 if first and i == 1 else 3
            # Not "same": for even extents and stride 2, it would pad the end by one more than the start.
            y = unit(y, filters, kernel, f"{i}_{j}", 2 if first else 1, kernel // 2, statistics=statistics)
        skips.append(y)
    if decoder:
        # The last output is `y` itself, not a skip connection.
        y = _decoder(y, skips[:-1], widths, statistics)
    logits = Conv(1, 1 if decoder else 3, padding=0 if decoder else 1, name="predict")(y)
    target = Input(logits.shape, name="target")
    loss = BinaryCrossEntropyWithLogits(pos_weight=pos_weight, name="bce")(logits, target)
    return Network({"prediction": logits, "loss": loss}, name=name)


def _decoder(y: Node, skips: Sequence[Node], widths: Sequence[int], statistics: str) -> Node:
    """Add, per level, a resize by 2, a join with the encoder's output of that size, and a unit; then a unit and a last
    resize.
    """
    for level in range(len(widths) - 1, 0, -1):
        y = Resize(scale=2, name=f"up{level}")(y)
        y = Concat(name=f"join{level}")(y, skips[level - 1])
        y = unit(y, widths[level - 1], 3, f"d{level}", 1, 1, statistics=statistics)
    return Resize(scale=2, mode="bilinear", name="up0")(unit(y, widths[0], 3, "d0", 1, 1, statistics=statistics))


def mesh_1k(**options) -> Network:
    """Make the paper's 1K model: 1024 x 1024 x 18, three convolutions per block."""
    return mesh(**{"resolution": 1024, "convs": 3, "name": "mesh_1k", **options})


def mesh_2k(**options) -> Network:
    """Make the paper's 2K model: 2048 x 2048 x 18, five convolutions per block."""
    return mesh(**{"resolution": 2048, "convs": 5, "name": "mesh_2k", **options})
