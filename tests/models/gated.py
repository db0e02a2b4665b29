"""Small networks: of layers that the models lack, and with arrays of every kind of spatial extents."""

import halograd as hg


def gated(edge=16, pad=5, width=6):
    """Return the network; targets ``target`` (3 classes per position), ``kind`` (4); weights ``share``, ``mask``."""
    x = hg.Input((edge, edge, 3), name="x")
    y = residual(hg.Conv(width, 3, padding=1, activation="silu", name="conv")(x), width)
    y = hg.Pad(((0, 0), (pad, pad)), "circular", name="around")(y)
    y = hg.Pad(((pad, pad), (0, 0)), "reflect", name="mirrored")(y)
    y = hg.Pad(((0, 1), (2, 0)), "replicate", name="repeated")(y)
    y = hg.Pad(((-pad, 2 - pad), (1 - pad, -pad)), value=0.25, name="cropped")(y)
    first, last = hg.Slice(0, width - 2, "first")(y), hg.Slice(width - 2, width, "last")(y)
    y = pyramid(hg.Concat(name="turned")(last, first), width)
    y = called_again(y, width)
    y = y * hg.Sigmoid()(hg.Dense(width, name="gate")(hg.GlobalAveragePool()(y)))
    y = y * hg.Sigmoid()(hg.Conv(1, 1, name="attention")(y))
    logits = hg.Conv(3, 1, name="logits")(y)
    coarse = hg.Conv(3, 1, weight_norm=True, name="coarse")(hg.Pad(-2)(y))
    kind = hg.Dense(4, name="kind_logits")(hg.Concat(name="pooled")(hg.GlobalAveragePool()(y), hg.GlobalMaxPool()(y)))
    target, mask = hg.Input((*logits.shape[:-1], 1), "target", "int32"), hg.Input((*logits.shape[:-1], 1), "mask")
    share = hg.Input((1,), "share")
    loss = hg.SoftmaxCrossEntropy(normalization="weights")(logits, target, mask) + 0.5 * hg.Dice("softmax")(
        logits, target
    )
    loss += hg.training_only(0.3 * hg.SoftmaxCrossEntropy()(coarse, hg.Pad(-2)(target), share))
    loss += hg.SoftmaxCrossEntropy()(kind, hg.Input((1,), "kind", "int32"), share)
    return hg.Network({"prediction": logits, "kind": kind, "loss": loss}, name="gated")


def residual(x, width):
    """Return x plus a scaled branch on cells of 2 x 2, which is left out for some samples."""
    branch = hg.Sequential(
        hg.PixelUnshuffle(2, name="unshuffled"),
        hg.Conv(4 * width, 3, padding=1, activation=hg.PReLU("channel", name="slopes"), name="cells"),
        hg.PixelShuffle(2, name="shuffled"),
        hg.Scale(0.5, bias=True, name="scale"),
        hg.StochasticDepth(0.3, name="depth"),
    )
    return x + branch(x)


def called_again(x, width):
    """Return x plus one convolution at two scales; both calls share the parameters."""
    conv = hg.Conv(width, 3, padding=1, activation="relu", name="again")
    coarse = conv(hg.MaxPool(2, name="halved")(conv(x)))
    return x + hg.Resize(size=x.shape[:-1], name="doubled")(coarse)


def pyramid(x, width):
    """Return x plus pooled means, pooled maxima and a map made of a vector, all resized to the extents of x."""
    size = x.shape[:-1]
    means = hg.Resize(size=size, mode="bicubic", align_corners=True, name="means_up")(hg.AdaptiveAveragePool((5, 3))(x))
    maxima = hg.MaxPool(2, ceil_mode=True, name="rounded")(hg.AdaptiveMaxPool((7, 5))(x))
    vector = hg.Dense(4 * width, weight_norm=True, name="vector")(hg.GlobalAveragePool()(x))
    made = hg.Resize(size=size, mode="linear", name="made_up")(hg.Reshape((2, 2, width), name="made")(vector))
    return x + means + hg.Resize(size=size, name="maxima_up")(maxima) + made


__all__ = ["embedded"]


def embedded() -> hg.Network:
    """Return a network with positions, a gain per cell, a bias per row and per column, and one layer called twice."""
    x = hg.Input((8, 7, 3), "x")
    cells = hg.Scale(1.0, True, "cells", axes=("height", "width"))
    y = hg.Embedding(name="positions", std=0.5)(hg.Conv(6, 3, padding=1, name="conv1")(x))
    y = cells(hg.ReLU(name="relu")(cells(y)))
    y = hg.Embedding(("height", "channel"), name="rows")(hg.Conv(6, 3, padding=1, name="conv2")(y))
    y = hg.Embedding(("width",), name="columns")(y)
    y = hg.Dense(4, name="dense")(hg.Flatten(name="flat")(y))
    loss = hg.SoftmaxCrossEntropy(name="ce")(y, hg.Input((1,), "target", "int32"))
    return hg.Network({"prediction": y, "loss": loss}, name="embedded")
