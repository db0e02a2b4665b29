"""LeNet-5 (LeCun et al. 1998), with ReLU and max pooling as it is built today."""

from __future__ import annotations

from halograd.layers import Conv, Dense, Flatten, Input, MaxPool, Network, ReLU, SoftmaxCrossEntropy

__all__ = ["lenet5"]


def lenet5(classes: int = 10, channels: int = 1, resolution: int = 28) -> Network:
    """Two convolutions with pooling, three dense layers. 61,706 parameters for 28 x 28 x 1.

    Returns
    -------
    Network
        Inputs ``x (resolution, resolution, channels)`` and ``target (1,)`` (class index); outputs
        ``prediction`` (logits) and ``loss``.
    """
    x = Input((resolution, resolution, channels), name="x")
    y = Conv(6, 5, padding=2, activation="relu", name="conv1")(x)
    y = MaxPool(2, 2, name="pool1")(y)
    y = Conv(16, 5, activation="relu", name="conv2")(y)
    y = Flatten(name="flatten")(MaxPool(2, 2, name="pool2")(y))
    y = ReLU(name="relu3")(Dense(120, name="dense3")(y))
    y = ReLU(name="relu4")(Dense(84, name="dense4")(y))
    logits = Dense(classes, name="dense5")(y)
    target = Input((1,), name="target", dtype="int32")
    return Network({"prediction": logits, "loss": SoftmaxCrossEntropy(name="ce")(logits, target)}, name="lenet5")
