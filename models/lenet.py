"""LeNet-5 (LeCun et al. 1998), with ReLU and max pooling as it is built today."""

from __future__ import annotations

from ..layers import Conv, Dense, Flatten, Input, MaxPool, Network, ReLU, SoftmaxCrossEntropy
from .classifier import scaled
from .options import ClassWeights, Extent, Factor, Filters

__all__ = ["lenet5"]


def lenet5(
    classes: Filters = 10,
    channels: Filters = 1,
    resolution: Extent = 28,
    width: Factor = 1.0,
    class_weights: ClassWeights = None,
) -> Network:
    """Two convolutions with pooling, three dense layers. 61,706 parameters for 28 x 28 x 1.

    Parameters
    ----------
    classes, channels, resolution
        Of the head and of the samples.
    width
        Factor of all filters and hidden units, for small networks.
    class_weights
        Of the loss: a number per class, or "balanced".

    Returns
    -------
    Network
        Inputs ``x (resolution, resolution, channels)`` and ``target (1,)`` (class index); outputs
        ``prediction`` (logits) and ``loss``.
    """
    x = Input((resolution, resolution, channels), name="x")
    y = Conv(scaled(6, width), 5, padding=2, activation="relu", name="conv1")(x)
    y = MaxPool(2, 2, name="pool1")(y)
    y = Conv(scaled(16, width), 5, activation="relu", name="conv2")(y)
    y = Flatten(name="flatten")(MaxPool(2, 2, name="pool2")(y))
    y = ReLU(name="relu3")(Dense(scaled(120, width), name="dense3")(y))
    y = ReLU(name="relu4")(Dense(scaled(84, width), name="dense4")(y))
    logits = Dense(classes, name="dense5")(y)
    target = Input((1,), name="target", dtype="int32")
    return Network(
        {"prediction": logits, "loss": SoftmaxCrossEntropy(class_weights, name="ce")(logits, target)}, name="lenet5"
    )
