"""A network of what the models do not have: rows around and away, gates, two tasks, four losses, some of weights."""

from halograd.layers import (
    AdaptiveAveragePool,
    AdaptiveMaxPool,
    Concat,
    Conv,
    Dense,
    Dice,
    GlobalAveragePool,
    GlobalMaxPool,
    Input,
    MaxPool,
    Network,
    Pad,
    PixelShuffle,
    PixelUnshuffle,
    PReLU,
    Reshape,
    Resize,
    Scale,
    Sequential,
    Sigmoid,
    Slice,
    SoftmaxCrossEntropy,
    StochasticDepth,
    training_only,
)


def gated(edge=16, pad=5, width=6):
    """Targets ``target`` (a map of 3 classes) and ``kind`` (4 classes per sample); weights ``share`` and ``mask``."""
    x = Input((edge, edge, 3), name="x")
    y = residual(Conv(width, 3, padding=1, activation="silu", name="conv")(x), width)
    y = Pad(((0, 0), (pad, pad)), "circular", name="around")(y)
    y = Pad(((pad, pad), (0, 0)), "reflect", name="mirrored")(y)
    y = Pad(((0, 1), (2, 0)), "replicate", name="repeated")(y)
    y = Pad(((-pad, 2 - pad), (1 - pad, -pad)), value=0.25, name="cropped")(y)
    first, last = Slice(0, width - 2, "first")(y), Slice(width - 2, width, "last")(y)
    y = pyramid(Concat(name="turned")(last, first), width)
    y = called_again(y, width)
    y = y * Sigmoid()(Dense(width, name="gate")(GlobalAveragePool()(y)))
    y = y * Sigmoid()(Conv(1, 1, name="attention")(y))
    logits = Conv(3, 1, name="logits")(y)
    coarse = Conv(3, 1, weight_norm=True, name="coarse")(Pad(-2)(y))
    kind = Dense(4, name="kind_logits")(Concat(name="pooled")(GlobalAveragePool()(y), GlobalMaxPool()(y)))
    target, mask = Input((*logits.shape[:-1], 1), "target", "int32"), Input((*logits.shape[:-1], 1), "mask")
    share = Input((1,), "share")
    loss = SoftmaxCrossEntropy(normalization="weights")(logits, target, mask) + 0.5 * Dice("softmax")(logits, target)
    loss += training_only(0.3 * SoftmaxCrossEntropy()(coarse, Pad(-2)(target), share))
    loss += SoftmaxCrossEntropy()(kind, Input((1,), "kind", "int32"), share)
    return Network({"prediction": logits, "kind": kind, "loss": loss}, name="gated")


def residual(x, width):
    """A branch on cells of 2 x 2, scaled, and left out for some samples."""
    branch = Sequential(
        PixelUnshuffle(2, name="unshuffled"),
        Conv(4 * width, 3, padding=1, activation=PReLU("channel", name="slopes"), name="cells"),
        PixelShuffle(2, name="shuffled"),
        Scale(0.5, bias=True, name="scale"),
        StochasticDepth(0.3, name="depth"),
    )
    return x + branch(x)


def called_again(x, width):
    """One convolution at two scales: its second call has the parameters of the first."""
    conv = Conv(width, 3, padding=1, activation="relu", name="again")
    coarse = conv(MaxPool(2, name="halved")(conv(x)))
    return x + Resize(size=x.shape[:-1], name="doubled")(coarse)


def pyramid(x, width):
    """Means, maxima and a map made of a vector, of few positions each, brought to the extent of x and added."""
    size = x.shape[:-1]
    means = Resize(size=size, mode="bicubic", align_corners=True, name="means_up")(AdaptiveAveragePool((5, 3))(x))
    maxima = MaxPool(2, ceil_mode=True, name="rounded")(AdaptiveMaxPool((7, 5))(x))
    vector = Dense(4 * width, weight_norm=True, name="vector")(GlobalAveragePool()(x))
    made = Resize(size=size, mode="linear", name="made_up")(Reshape((2, 2, width), name="made")(vector))
    return x + means + Resize(size=size, name="maxima_up")(maxima) + made
