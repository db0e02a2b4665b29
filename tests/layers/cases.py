"""Layers of many kinds with their inputs, for tests of exactness and comparison with torch."""

import halograd as hg

SHAPE = (7, 6, 3)
ACTIVATIONS = {
    "relu": hg.ReLU,
    "leaky": lambda name=None: hg.LeakyReLU(0.2, name),
    "sigmoid": hg.Sigmoid,
    "tanh": hg.Tanh,
    "gelu": hg.GELU,
    "gelu by tanh": lambda name=None: hg.GELU("tanh", name),
    "silu": hg.SiLU,
    "elu": lambda name=None: hg.ELU(0.7, name),
    "hard sigmoid": hg.HardSigmoid,
    "hard swish": hg.HardSwish,
    "clamp": lambda name=None: hg.Clamp(-0.5, 0.7, name),
    "softplus": hg.Softplus,
    "mish": hg.Mish,
    "affine": lambda name=None: hg.Affine(-0.5, 0.7, name),
    "shift": lambda name=None: hg.Affine(1, 0.7, name),
    "softmax": hg.Softmax,
    "log softmax": hg.LogSoftmax,
}


def conv(geometry, filters=3, **more):
    kernel, stride, padding, dilation = geometry
    return lambda: hg.Conv(filters, kernel, stride, padding, dilation, name="conv", **more)


NORMS = {
    "group": lambda **o: hg.GroupNorm(2, name="norm", **o),
    "instance": lambda **o: hg.InstanceNorm(name="norm", **o),
    "layer": lambda **o: hg.LayerNorm(name="norm", **o),
    "channels": lambda **o: hg.LayerNorm("channels", name="norm", **o),
    "rms": lambda **o: hg.RMSNorm(1e-5, name="norm", **o),
}

GATES = {
    "whole": SHAPE,
    "per channel": (3,),
    "per channel, with axes": (1, 1, 3),
    "per position": (7, 6, 1),
    "per row": (7, 1, 1),
    "per column and channel": (1, 6, 3),
    "per sample": (1,),
    "per sample, with axes": (1, 1, 1),
}

PADS = {
    "constant": ((2, 1), (0, 3)),
    "reflect": ((3, 2), (1, 5)),
    "replicate": ((2, 1), (9, 1)),
    "circular": ((7, 2), (1, 6)),
}

POOLS = {
    "max": hg.MaxPool,
    "average": hg.AveragePool,
    "average without pad": lambda *a: hg.AveragePool(*a, count_include_pad=False),
}

#: spatial shape, kernel, stride, padding; a window that reaches beyond the end, and one that would begin there.
CEIL = {
    "beyond": ((8, 7), 3, 2, 0),
    "beyond padding": ((6, 8), 3, 2, 1),
    "dropped": ((9, 7), 2, 3, 1),
    "kernel 5 stride 4": ((11, 10), 5, 4, 2),
    "nothing to round": ((9, 7), 3, 2, 1),
    "larger than the input": ((6, 2), (2, 3), 2, 0),
    "1-D": ((10,), 4, 3, 1),
    "3-D": ((6, 7, 6), 3, 2, 1),
}


def rounded_up(kind, kernel, stride, padding):
    options = {"count_include_pad": False} if kind == "average without pad" else {}
    pool = hg.MaxPool if kind == "max" else hg.AveragePool
    return pool(kernel, stride, padding, ceil_mode=True, name="p", **options)


ADAPTIVE = {"average": hg.AdaptiveAveragePool, "max": hg.AdaptiveMaxPool}

#: spatial shape, size
ADAPTIVE_CASES = {
    "divides": ((8, 6), (4, 3)),
    "overlaps": ((7, 10), (5, 4)),
    "one row": ((9, 7), (1, 3)),
    "one": ((7, 6), 1),
    "more than there are": ((4, 7), (6, 9)),
    "as many": ((6, 7), (6, 7)),
    "1-D": ((13,), 5),
    "3-D": ((6, 7, 8), (2, 3, 5)),
}

MAPS = [(4, 5, 3), (9, 2), (3, 4, 2, 2), (1, 1, 6)]

#: Layer, shape of its input: cells that blocks cut, and those that fit.
SHUFFLES = {
    "shuffle": (lambda: hg.PixelShuffle(2, "p"), (5, 4, 12)),
    "shuffle by 3": (lambda: hg.PixelShuffle(3, "p"), (3, 5, 18)),
    "shuffle 1-D": (lambda: hg.PixelShuffle(2, "p"), (7, 6)),
    "shuffle 3-D": (lambda: hg.PixelShuffle(2, "p"), (3, 2, 3, 16)),
    "unshuffle": (lambda: hg.PixelUnshuffle(2, "p"), (10, 6, 3)),
    "unshuffle by 3": (lambda: hg.PixelUnshuffle(3, "p"), (9, 12, 2)),
    "unshuffle 1-D": (lambda: hg.PixelUnshuffle(2, "p"), (14, 3)),
    "unshuffle 3-D": (lambda: hg.PixelUnshuffle(2, "p"), (6, 4, 6, 2)),
    "unshuffle by position": (lambda: hg.PixelUnshuffle(2, "p", order="position"), (10, 6, 3)),
    "unshuffle by position 3-D": (lambda: hg.PixelUnshuffle(2, "p", order="position"), (6, 4, 6, 2)),
    "of channels": (lambda: hg.ChannelShuffle(3, "p"), (5, 4, 12)),
    "of channels 3-D": (lambda: hg.ChannelShuffle(2, "p"), (3, 2, 3, 4)),
    "of one": (lambda: hg.PixelShuffle(1, "p"), (5, 4, 3)),
}

#: spatial shape -> scale or size
RESIZES = {
    "double": ((6, 7), {"scale": 2}),
    "triple and double": ((6, 7), {"scale": (3, 2)}),
    "one and a half": ((7, 6), {"scale": 1.5}),
    "half": ((9, 8), {"scale": 0.5}),
    "a third": ((13, 9), {"scale": 1 / 3}),
    "to a size": ((7, 9), {"size": (11, 6)}),
    "to one": ((7, 9), {"size": 1}),
    "1-D": ((9,), {"scale": 2.5}),
    "3-D": ((6, 7, 6), {"size": (12, 3, 7)}),
}

SCALES = {
    "scale": lambda: hg.Scale(name="l"),
    "scale and shift": lambda: hg.Scale(1e-6, bias=True, name="l"),
    "one slope": lambda: hg.PReLU(name="l"),
    "slopes": lambda: hg.PReLU("channel", name="l"),
}

#: name -> (spatial, kernel, stride, padding, output padding, dilation)
TRANSPOSED = {
    "doubling": ((9, 7), 2, 2, 0, 0, 1),
    "k3 s2 p1 op1": ((9, 8), 3, 2, 1, 1, 1),
    "k4 s2 p1": ((7, 7), 4, 2, 1, 0, 1),
    "stride beyond the kernel": ((6, 7), 2, 3, 0, (2, 1), 1),
    "halo wider than a block": ((6, 7), 5, 1, 2, 0, 1),
    "dilation": ((8, 7), 3, 2, 1, 1, 2),
    "output padding of the dilation": ((8, 7), 2, 1, 1, 2, 3),
    "asymmetric padding": ((8, 7), 4, 2, ((0, 3), (2, 1)), 0, 1),
    "padding beyond the kernel": ((8, 7), 2, 1, 3, 0, 1),
    "same": ((7, 6), 5, 3, "same", 0, 1),
    "same, stride beyond the kernel": ((7, 6), 2, 3, "same", 0, 1),
    "1-D": ((13,), 4, 3, 1, 1, 1),
    "3-D": ((6, 7, 6), (2, 3, 2), (2, 1, 2), (0, 1, 0), 0, 1),
}


def transposed(geometry, filters=3, **more):
    kernel, stride, padding, output_padding, dilation = geometry
    return lambda: hg.ConvTranspose(filters, kernel, stride, padding, output_padding, dilation, name="t", **more)

SPATIAL = [(7, 6, 4)]
#: Every kind of layer, and the shapes of its inputs.
LAYERS = {
    "add": (lambda: hg.Add("relu", name="l"), SPATIAL * 2),
    "average pool": (lambda: hg.AveragePool(3, 2, 1, count_include_pad=False, name="l"), SPATIAL),
    "batch norm": (lambda: hg.BatchNorm(activation="relu", name="l"), SPATIAL),
    "concat": (lambda: hg.Concat(name="l"), [(7, 6, 4), (7, 6, 2)]),
    "conv": (lambda: hg.Conv(4, 3, padding=1, activation="relu", name="l"), SPATIAL),
    "conv stride 2": (lambda: hg.Conv(4, 3, 2, padding=1, name="l"), SPATIAL),
    "dense": (lambda: hg.Dense(5, name="l"), [(7,)]),
    "dropout": (lambda: hg.Dropout(0.4, name="l"), SPATIAL),
    "channel dropout": (lambda: hg.ChannelDropout(0.4, name="l"), SPATIAL),
    "flatten": (lambda: hg.Flatten("l"), SPATIAL),
    "gelu": (lambda: hg.GELU(name="l"), SPATIAL),
    "gelu by tanh": (lambda: hg.GELU("tanh", "l"), SPATIAL),
    "hard swish": (lambda: hg.HardSwish("l"), SPATIAL),
    "softplus": (lambda: hg.Softplus("l"), SPATIAL),
    "mish": (lambda: hg.Mish("l"), SPATIAL),
    "affine": (lambda: hg.Affine(-0.5, 0.7, "l"), SPATIAL),
    "affine of channels": (lambda: hg.Affine(range(SPATIAL[0][-1]), 0.7, "l"), SPATIAL),
    "log softmax": (lambda: hg.LogSoftmax("l"), SPATIAL),
    "channel shuffle": (lambda: hg.ChannelShuffle(2, "l"), SPATIAL),
    "global pool": (lambda: hg.GlobalAveragePool("l"), SPATIAL),
    "group norm": (lambda: hg.GroupNorm(2, activation="relu", name="l"), SPATIAL),
    "instance norm": (lambda: hg.InstanceNorm(name="l"), SPATIAL),
    "layer norm": (lambda: hg.LayerNorm("sample", name="l"), SPATIAL),
    "layer norm of channels": (lambda: hg.LayerNorm("channels", activation="relu", name="l"), SPATIAL),
    "rms norm": (lambda: hg.RMSNorm(activation="silu", name="l"), SPATIAL),
    "hard sigmoid": (lambda: hg.HardSigmoid("l"), SPATIAL),
    "clamp": (lambda: hg.Clamp(-0.5, 0.7, "l"), SPATIAL),
    "silu": (lambda: hg.SiLU("l"), SPATIAL),
    "elu": (lambda: hg.ELU(name="l"), SPATIAL),
    "multiply": (lambda: hg.Multiply("l"), SPATIAL * 2),
    "multiply by channels": (lambda: hg.Multiply("l"), [*SPATIAL, (4,)]),
    "multiply by one channel": (lambda: hg.Multiply("l"), [*SPATIAL, (7, 6, 1)]),
    "multiply by rows": (lambda: hg.Multiply("l"), [*SPATIAL, (7, 1, 4)]),
    "add rows": (lambda: hg.BroadcastAdd("l"), [*SPATIAL, (7, 1, 4)]),
    "add channels": (lambda: hg.BroadcastAdd("l"), [*SPATIAL, (4,)]),
    "pad": (lambda: hg.Pad(((2, 1), (0, 3)), value=0.5, name="l"), SPATIAL),
    "crop": (lambda: hg.Pad(((-2, 1), (0, -3)), name="l"), SPATIAL),
    "pad around": (lambda: hg.Pad(((2, 3), (0, 0)), "circular", name="l"), SPATIAL),
    "pad a sphere": (lambda: hg.Pad(2, hg.Sphere(sign=(1, -1, 1, -1)), name="l"), SPATIAL),
    "flip": (lambda: hg.Flip("height", "channel", name="l"), SPATIAL),
    "mean of channels": (lambda: hg.ChannelMean("l"), SPATIAL),
    "maximum of channels": (lambda: hg.ChannelMax("l"), SPATIAL),
    "absolute value": (lambda: hg.Abs("l"), SPATIAL),
    "exponential": (lambda: hg.Exp("l"), SPATIAL),
    "cube": (lambda: hg.Power(3, "l"), SPATIAL),
    "roll": (lambda: hg.Roll((2, -1), "l"), SPATIAL),
    "pad mirrored": (lambda: hg.Pad(((2, 3), (0, 0)), "reflect", name="l"), SPATIAL),
    "pad repeated": (lambda: hg.Pad(((0, 0), (3, 2)), "replicate", name="l"), SPATIAL),
    "slice": (lambda: hg.Slice(1, 3, "l"), SPATIAL),
    "pad channels": (lambda: hg.ChannelPad(1, 2, "l"), SPATIAL),
    "leaky relu": (lambda: hg.LeakyReLU(0.1, "l"), SPATIAL),
    "max pool": (lambda: hg.MaxPool(3, 2, 1, name="l"), SPATIAL),
    "one slope": (lambda: hg.PReLU(name="l"), SPATIAL),
    "slopes": (lambda: hg.PReLU("channel", name="l"), SPATIAL),
    "scale": (lambda: hg.Scale(0.1, bias=True, name="l"), SPATIAL),
    "scale of columns": (lambda: hg.Scale(0.1, bias=True, name="l", axes=("width",)), SPATIAL),
    "positions": (lambda: hg.Embedding(name="l"), SPATIAL),
    "rows": (lambda: hg.Embedding(("height", "channel"), name="l", trained=False), SPATIAL),
    "class tokens": (lambda: hg.Token(2, name="l"), [(6, 4)]),
    "sines": (lambda: hg.SinusoidalEmbedding(6, name="l"), [(1,)]),
    "stochastic depth": (lambda: hg.StochasticDepth(0.5, "l"), SPATIAL),
    "resize cubic": (lambda: hg.Resize(1.5, mode="bicubic", align_corners=True, name="l"), SPATIAL),
    "resize by means": (lambda: hg.Resize(size=(3, 4), mode="area", name="l"), SPATIAL),
    "global max": (lambda: hg.GlobalMaxPool("l"), SPATIAL),
    "adaptive average": (lambda: hg.AdaptiveAveragePool((5, 4), "l"), SPATIAL),
    "adaptive max": (lambda: hg.AdaptiveMaxPool((5, 4), "l"), SPATIAL),
    "max pool rounded up": (lambda: hg.MaxPool(2, ceil_mode=True, name="l"), SPATIAL),
    "pixel shuffle": (lambda: hg.PixelShuffle(2, "l"), SPATIAL),
    "pixel unshuffle": (lambda: hg.PixelUnshuffle(2, "l"), [(8, 6, 2)]),
    "reshape": (lambda: hg.Reshape((2, 3, 4), "l"), [(24,)]),
    "tokens": (lambda: hg.Reshape((-1, 8), "l"), [(8, 6, 4)]),
    "weight norm": (lambda: hg.Conv(4, 3, padding=1, weight_norm=True, name="l"), SPATIAL),
    "resize": (lambda: hg.Resize(2, mode="bilinear", name="l"), SPATIAL),
    "response norm": (lambda: hg.LocalResponseNorm(3, alpha=0.1, name="l"), SPATIAL),
    "sigmoid": (lambda: hg.Sigmoid("l"), SPATIAL),
    "softmax": (lambda: hg.Softmax("l"), SPATIAL),
    "tanh": (lambda: hg.Tanh("l"), SPATIAL),
    "transposed": (lambda: hg.ConvTranspose(3, 3, 2, 1, 1, name="l"), SPATIAL),
    "grouped": (lambda: hg.Conv(4, 3, groups=2, name="l"), SPATIAL),
    "square": (lambda: hg.Power(2, "l"), SPATIAL),
    "one adaptive max": (lambda: hg.AdaptiveMaxPool(1, "l"), SPATIAL),
    "average pool rounded up": (lambda: hg.AveragePool(2, ceil_mode=True, name="l"), SPATIAL),
}
