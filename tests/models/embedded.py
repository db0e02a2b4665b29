"""A small network with arrays of every kind of spatial extents, called once and twice."""

import halograd as hg

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
