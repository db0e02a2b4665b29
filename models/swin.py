"""Swin transformers (Liu et al. 2021): Swin-T with the names of torchvision's modules, and a U-Net of their blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from ..layers import (
    Concat,
    Conv,
    Crop,
    Dense,
    GlobalAveragePool,
    Input,
    LayerNorm,
    MultiHeadAttention,
    Network,
    Node,
    Pad,
    PatchEmbedding,
    PatchMerging,
    PixelShuffle,
    StochasticDepth,
)
from .common import ClassWeights, Extent, Extents, Factor, Filters, Ignored, Name, Rate, Times, classifier

__all__ = ["swin", "swin_t", "swin_unet"]

Depths = Annotated[Sequence[Times], Field(min_length=1, max_length=8)]
Heads = Annotated[Sequence[Filters], Field(min_length=1, max_length=8)]


def swin(
    depths: Depths,
    heads: Heads,
    width: Filters = 96,
    window: Extent = 7,
    patch: Extent = 4,
    hidden_factor: Factor = 4.0,
    classes: Filters = 1000,
    channels: Filters = 3,
    resolution: Extent = 224,
    random_depth: Rate = 0.0,
    name: Name = "swin",
    class_weights: ClassWeights = None,
) -> Network:
    """Make a Swin transformer: blocks of attention within windows, which every second block shifts by half a window.

    Extents that windows do not divide are padded with zeros before the attention, as in torchvision.

    Parameters
    ----------
    depths, heads
        Blocks, and heads of their attention, per stage. Between stages, 2 x 2 positions are merged.
    width
        Channels of the first stage; each further stage has twice as many.
    window
        Edge of the windows.
    patch
        Edge of the patches of the embedding; divides the resolution.
    hidden_factor
        Channels within the perceptrons, as a multiple of the stage's channels.
    classes, channels, resolution
        Classes of the head; channels and edge of the samples.
    random_depth
        Rate at which the branches of the last block are left out for a sample; it grows linearly from 0 in the first.
    class_weights
        Weights of the classes in the loss: a number per class, or "balanced".

    Returns
    -------
    Network
        Inputs ``x (resolution, resolution, channels)`` and ``target (1,)`` (class index); outputs ``prediction``
        (logits) and ``loss``.
    """
    _check_stages(depths, heads)
    x = Input((resolution, resolution, channels), name="x")
    y = PatchEmbedding(patch, width, name="features.0.0")(x)
    y = LayerNorm("channels", name="features.0.2")(y)
    rates = _rates(random_depth, sum(depths))
    for stage, (blocks, number) in enumerate(zip(depths, heads)):
        # torchvision's names: stages have odd numbers, mergings even ones.
        if stage:
            y = PatchMerging(name=f"features.{2 * stage}")(y)
        for block in range(blocks):
            label = f"features.{2 * stage + 1}.{block}"
            y = _block(y, number, window, block % 2 == 1, hidden_factor, rates.pop(0), label)
    y = LayerNorm("channels", name="norm")(y)
    logits = Dense(classes, name="head")(GlobalAveragePool(name="avgpool")(y))
    return classifier(logits, name, class_weights)


def _check_stages(depths: Sequence[int], heads: Sequence[int]) -> None:
    if len(depths) != len(heads):
        raise ValueError(f"heads: expected a number for each of {len(depths)} stages, got {tuple(heads)}")


def _rates(last: float, blocks: int) -> list[float]:
    """Return the rate of random depth of every block.

    >>> _rates(0.2, 3), _rates(0.1, 1)
    ([0.0, 0.1, 0.2], [0.0])
    """
    return [last * block / max(1, blocks - 1) for block in range(blocks)]


def _block(x: Node, heads: int, window: int, shifted: bool, factor: float, rate: float, label: str) -> Node:
    def branch(y: Node, part: str) -> Node:
        return x + (StochasticDepth(rate, name=f"{label}.{part}")(y) if rate else y)

    y = LayerNorm("channels", name=f"{label}.norm1")(x)
    x = branch(_windowed(y, heads, window, shifted, f"{label}.attn"), "depth1")
    y = LayerNorm("channels", name=f"{label}.norm2")(x)
    # The perceptron acts on each position, as a 1 x 1 convolution.
    y = Conv(int(factor * x.shape[-1]), 1, activation="gelu", name=f"{label}.mlp.0")(y)
    return branch(Conv(x.shape[-1], 1, name=f"{label}.mlp.3")(y), "depth2")


def _windowed(y: Node, heads: int, window: int, shifted: bool, label: str) -> Node:
    """Add attention within windows on extents that are padded to multiples of the window."""
    amounts = [(0, -n % window) for n in y.shape[:-1]]
    whole = Pad(amounts, name=f"{label}.pad")(y) if any(map(any, amounts)) else y
    # One window per axis has nothing to exchange with others.
    shift = [window // 2 if shifted and n > window else 0 for n in whole.shape[:-1]]
    attention = MultiHeadAttention(heads, window=window, shift=shift, bias="relative", name=label)
    z = attention(whole)
    return z if whole is y else Crop(amounts, name=f"{label}.crop")(z)


def swin_t(**options: Any) -> Network:
    """Make Swin-T: 28,288,354 parameters with 1000 classes."""
    preset = {"depths": (2, 2, 6, 2), "heads": (3, 6, 12, 24), "random_depth": 0.2, "name": "swin_t"}
    return swin(**{**preset, **options})


def swin_unet(
    resolution: Extents = (224, 224),
    channels: Filters = 1,
    classes: Filters = 2,
    width: Filters = 96,
    depths: Depths = (2, 2, 2, 2),
    heads: Heads = (3, 6, 12, 24),
    window: Extent = 7,
    patch: Extent = 4,
    hidden_factor: Factor = 4.0,
    random_depth: Rate = 0.1,
    name: Name = "swin_unet",
    class_weights: ClassWeights = None,
    ignore_index: Ignored = None,
) -> Network:
    """Make a U-Net of Swin blocks (Cao et al. 2021), in 1 to 3 dimensions: merging down, expanding up, with skips.

    Parameters
    ----------
    resolution
        Spatial extent of a sample, 1 to 3 numbers, multiples of the patch.
    channels, classes
        Input channels; classes per element.
    depths, heads
        Blocks, and heads of their attention, per stage of the encoder; the decoder repeats all stages but the last.
    width, window, patch, hidden_factor, random_depth
        As for :func:`swin`; `random_depth` applies to the encoder.
    class_weights
        Weights of the classes in the loss: a number per class, or "balanced".
    ignore_index
        Class index of elements that do not count in loss and metrics, for example -1; by default all count.

    Returns
    -------
    Network
        Inputs ``x (*resolution, channels)`` and ``target (*resolution, 1)`` (class index per element); outputs
        ``prediction`` (logits) and ``loss``.
    """
    _check_stages(depths, heads)
    x = Input((*resolution, channels), name="x")
    y = LayerNorm("channels", name="embed_norm")(PatchEmbedding(patch, width, name="embed")(x))
    rates, skips = _rates(random_depth, sum(depths)), list[Node]()
    for stage, (blocks, number) in enumerate(zip(depths, heads)):
        if stage:
            skips.append(y)
            y = PatchMerging(name=f"merge{stage}")(y)
        for block in range(blocks):
            y = _block(y, number, window, block % 2 == 1, hidden_factor, rates.pop(0), f"down{stage}.{block}")
    for stage in reversed(range(len(depths) - 1)):
        y = Concat(name=f"join{stage}")(skips[stage], _expanded(y, width * 2**stage, 2, f"expand{stage}", skips[stage]))
        # The concatenation has twice the channels of the stage.
        y = Conv(width * 2**stage, 1, name=f"reduce{stage}")(y)
        # The decoder has no random depth.
        for block in range(depths[stage]):
            y = _block(y, heads[stage], window, block % 2 == 1, hidden_factor, 0.0, f"up{stage}.{block}")
    # Back to the elements of the sample: a patch is one position.
    y = _expanded(LayerNorm("channels", name="norm")(y), width, patch, "expand", x)
    return classifier(Conv(classes, 1, name="predict")(y), name, class_weights, ignore_index=ignore_index)


def _expanded(y: Node, filters: int, factor: int, label: str, like: Node) -> Node:
    """Expand each position to `factor` positions along each axis, cropped to the extents of `like`."""
    # Each position gets the channels of the factor**d positions that PixelShuffle makes of it, in d dimensions.
    y = Conv(filters * factor ** (len(y.shape) - 1), 1, bias=False, name=f"{label}.linear")(y)
    y = LayerNorm("channels", name=f"{label}.norm")(PixelShuffle(factor, name=f"{label}.patches")(y))
    return y if y.shape[:-1] == like.shape[:-1] else Crop([(0, m - n) for m, n in zip(y.shape, like.shape[:-1])])(y)
