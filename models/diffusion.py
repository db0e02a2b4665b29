"""U-Net of diffusion models (Ho et al. 2020): residual blocks that depend on the step, attention at coarse levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from halograd.schema import Count, Whole

from ..layers import (
    Concat,
    Conv,
    Dense,
    Dropout,
    GroupNorm,
    Input,
    MeanSquaredError,
    MultiHeadAttention,
    Network,
    Node,
    Resize,
    SinusoidalEmbedding,
)
from .common import Extents, Filters, Name, Rate, Times

__all__ = ["diffusion_unet"]


def diffusion_unet(
    resolution: Extents = (64, 64),
    channels: Filters = 3,
    width: Filters = 64,
    factors: Annotated[Sequence[Times], Field(min_length=1, max_length=8)] = (1, 2, 4, 8),
    blocks: Times = 2,
    attention_levels: Annotated[Sequence[Whole], Field(max_length=8)] = (2, 3),
    heads: Filters = 4,
    groups: Annotated[Count, Field(le=2**10)] = 32,
    dropout: Rate = 0.0,
    name: Name = "diffusion_unet",
) -> Network:
    """Make a U-Net that predicts the noise of a sample at a step of diffusion.

    Parameters
    ----------
    resolution
        Spatial extent of a sample, 1 to 3 numbers, multiples of ``2**(len(factors) - 1)``.
    channels
        Channels of a sample, and of the predicted noise.
    width, factors
        Channels of a level: `width` times its factor.
    blocks
        Residual blocks per level of the encoder; the decoder has one more.
    attention_levels
        Levels, from 0, whose blocks are followed by attention over the whole sample; the middle always has it.
    heads, groups
        Heads of attention; groups of the norms.
    dropout
        Rate of dropout within the blocks.

    Returns
    -------
    Network
        Inputs ``x (*resolution, channels)``, ``step (1,)`` (a number per sample) and ``target (*resolution, channels)``
        (the noise); outputs ``prediction`` and ``loss`` (mean squared error).
    """
    # Every level after the first halves the extents.
    multiple = 2 ** (len(factors) - 1)
    if any(n % multiple for n in resolution):
        raise ValueError(f"resolution: expected multiples of {multiple} for {len(factors)} levels, got {resolution}")
    x, step = Input((*resolution, channels), name="x"), Input((1,), name="step")
    target = Input((*resolution, channels), name="target")
    # Embedding of the step; two dense layers make it (4 * width,).
    time = SinusoidalEmbedding(width, name="time")(step)
    time = Dense(4 * width, activation="silu", name="time_1")(time)
    time = Dense(4 * width, activation="silu", name="time_2")(time)

    def block(y: Node, level: int, label: str) -> Node:
        y = _residual(y, time, width * factors[level], groups, dropout, label)
        return _attended(y, heads, groups, f"{label}.attention") if level in attention_levels else y

    y: Node = Conv(width * factors[0], 3, padding=1, name="begin")(x)
    skips = [y]
    for level in range(len(factors)):
        if level:
            y = Conv(y.shape[-1], 3, 2, padding=1, name=f"down{level}")(y)
            skips.append(y)
        for number in range(blocks):
            y = block(y, level, f"encoder{level}.{number}")
            skips.append(y)
    y = _residual(y, time, y.shape[-1], groups, dropout, "middle1")
    y = _attended(y, heads, groups, "middle.attention")
    y = _residual(y, time, y.shape[-1], groups, dropout, "middle2")
    for level in reversed(range(len(factors))):
        # The encoder has left blocks + 1 outputs per level: its blocks, and the layer that begins the level.
        for number in range(blocks + 1):
            y = Concat(name=f"join{level}.{number}")(y, skips.pop())
            y = block(y, level, f"decoder{level}.{number}")
        # Upsampling as in Ho et al.: nearest neighbors, then a convolution.
        if level:
            y = Conv(y.shape[-1], 3, padding=1, name=f"up{level}")(Resize(2, name=f"resize{level}")(y))
    y = GroupNorm(groups, activation="silu", name="end_norm")(y)
    prediction = Conv(channels, 3, padding=1, name="end")(y)
    loss = MeanSquaredError(name="mse")(prediction, target)
    return Network({"prediction": prediction, "loss": loss}, name=name)


def _residual(x: Node, time: Node, filters: int, groups: int, dropout: float, label: str) -> Node:
    """Add a residual block, whose channels are shifted by a projection of `time`, the embedding of the step."""
    y = GroupNorm(groups, activation="silu", name=f"{label}.norm1")(x)
    y = Conv(filters, 3, padding=1, name=f"{label}.conv1")(y) + Dense(filters, name=f"{label}.time")(time)
    y = GroupNorm(groups, activation="silu", name=f"{label}.norm2")(y)
    if dropout:
        y = Dropout(dropout, name=f"{label}.dropout")(y)
    y = Conv(filters, 3, padding=1, name=f"{label}.conv2")(y)
    # A 1 x 1 convolution fits the shortcut to another number of channels.
    return y + (x if x.shape[-1] == filters else Conv(filters, 1, name=f"{label}.shortcut")(x))


def _attended(x: Node, heads: int, groups: int, label: str) -> Node:
    return x + MultiHeadAttention(heads, name=label)(GroupNorm(groups, name=f"{label}.norm")(x))
