"""A network of what the models do not have: rows around and away, gates, pieces of channels, two tasks, four losses."""

from halograd.layers import (
    Concat,
    Conv,
    Dense,
    Dice,
    GlobalAveragePool,
    Input,
    Network,
    Pad,
    Sigmoid,
    SiLU,
    Slice,
    SoftmaxCrossEntropy,
    training_only,
)


def gated(edge=16, pad=5, width=6):
    """Targets ``target`` (a map of 3 classes) and ``kind`` (4 classes per sample)."""
    x = Input((edge, edge, 3), name="x")
    y = SiLU()(Conv(width, 3, padding=1, name="conv")(x))
    y = Pad(((0, 0), (pad, pad)), "circular", name="around")(y)
    y = Pad(((pad, pad), (0, 0)), "reflect", name="mirrored")(y)
    y = Pad(((0, 1), (2, 0)), "replicate", name="repeated")(y)
    y = Pad(((-pad, 2 - pad), (1 - pad, -pad)), value=0.25, name="cropped")(y)
    first, last = Slice(0, width - 2, "first")(y), Slice(width - 2, width, "last")(y)
    y = Concat(name="turned")(last, first)
    y = y * Sigmoid()(Dense(width, name="gate")(GlobalAveragePool()(y)))
    y = y * Sigmoid()(Conv(1, 1, name="attention")(y))
    logits = Conv(3, 1, name="logits")(y)
    coarse = Conv(3, 1, name="coarse")(Pad(-2)(y))
    kind = Dense(4, name="kind_logits")(GlobalAveragePool()(y))
    target = Input((*logits.shape[:-1], 1), "target", "int32")
    loss = SoftmaxCrossEntropy()(logits, target) + 0.5 * Dice("softmax")(logits, target)
    loss += training_only(0.3 * SoftmaxCrossEntropy()(coarse, Pad(-2)(target)))
    loss += SoftmaxCrossEntropy()(kind, Input((1,), "kind", "int32"))
    return Network({"prediction": logits, "kind": kind, "loss": loss}, name="gated")
