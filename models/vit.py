"""Vision transformer ViT-B/16 (Dosovitskiy et al. 2021), with the names of torchvision's modules."""

from __future__ import annotations

from typing import Any

from ..layers import (
    Conv,
    Dense,
    Dropout,
    Embedding,
    Flatten,
    Input,
    LayerNorm,
    MultiHeadAttention,
    Network,
    Node,
    PatchEmbedding,
    Reshape,
    Slice,
    Token,
)
from .common import ClassWeights, Extent, Filters, Name, Rate, Times, classifier

__all__ = ["vit", "vit_b_16"]


def vit(
    depth: Times,
    heads: Filters,
    width: Filters,
    hidden_width: Filters,
    patch: Extent = 16,
    classes: Filters = 1000,
    channels: Filters = 3,
    resolution: Extent = 224,
    dropout: Rate = 0.0,
    name: Name = "vit",
    class_weights: ClassWeights = None,
) -> Network:
    """Make a vision transformer: embedded patches and a class token, encoder blocks, a dense layer on the class token.

    Parameters
    ----------
    depth, heads, width, hidden_width
        Encoder blocks, heads of their attention, channels of the tokens, channels within the perceptrons.
    patch
        Edge of the patches; divides the resolution.
    classes, channels, resolution
        Classes of the head; channels and edge of the samples.
    dropout
        Rate of dropout after the embedding and in the blocks.
    class_weights
        Weights of the classes in the loss: a number per class, or "balanced".

    Returns
    -------
    Network
        Inputs ``x (resolution, resolution, channels)`` and ``target (1,)`` (class index); outputs ``prediction``
        (logits) and ``loss``.
    """
    x = Input((resolution, resolution, channels), name="x")
    y = PatchEmbedding(patch, width, name="conv_proj")(x)
    # (patches, width): from here on a sequence.
    y = Reshape((-1, width), name="tokens")(y)
    y = Token(name="class_token")(y)
    y = _dropped(Embedding(name="encoder.pos_embedding")(y), dropout, "encoder.dropout")
    for block in range(depth):
        y = _block(y, heads, hidden_width, dropout, f"encoder.layers.encoder_layer_{block}")
    y = LayerNorm("channels", 1e-6, name="encoder.ln")(y)
    # The tokens are positions of one axis, named width; the class token is the first.
    token = Flatten(name="flatten")(Slice(0, 1, name="first", axis="width")(y))
    return classifier(Dense(classes, name="heads.head")(token), name, class_weights)


def _block(x: Node, heads: int, hidden_width: int, dropout: float, label: str) -> Node:
    # torchvision's epsilon for this network.
    y = LayerNorm("channels", 1e-6, name=f"{label}.ln_1")(x)
    x = x + _dropped(MultiHeadAttention(heads, name=f"{label}.self_attention")(y), dropout, f"{label}.dropout")
    y = LayerNorm("channels", 1e-6, name=f"{label}.ln_2")(x)
    # The perceptron acts on each token, as a convolution of kernel 1.
    y = Conv(hidden_width, 1, activation="gelu", name=f"{label}.mlp.0")(y)
    y = Conv(x.shape[-1], 1, name=f"{label}.mlp.3")(_dropped(y, dropout, f"{label}.mlp.2"))
    return x + _dropped(y, dropout, f"{label}.mlp.4")


def _dropped(y: Node, rate: float, label: str) -> Node:
    return Dropout(rate, name=label)(y) if rate else y


def vit_b_16(**options: Any) -> Network:
    """Make ViT-B/16: 86,567,656 parameters with 1000 classes."""
    preset = {"depth": 12, "heads": 12, "width": 768, "hidden_width": 3072, "name": "vit_b_16"}
    return vit(**{**preset, **options})
