"""Layers: the base class, the graph that layers build, and the built-in layers."""

from . import arithmetic  # noqa: F401  (operators of nodes)
from .activation import (
    ELU,
    GELU,
    Abs,
    Affine,
    Clamp,
    Exp,
    HardSigmoid,
    HardSwish,
    LeakyReLU,
    Log,
    LogSoftmax,
    Mish,
    Power,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from .attention import Attention, MultiHeadAttention
from .batch_norm import BatchNorm
from .composed import Crop, PatchEmbedding, PatchMerging, Sequential, Split
from .convolution import Conv, ConvTranspose
from .dense import Dense
from .dice import Dice, Tversky
from .dropout import ChannelDropout, Dropout, StochasticDepth
from .embedding import Embedding, SinusoidalEmbedding, Token
from .group_norm import GroupNorm, InstanceNorm, LayerNorm, RMSNorm
from .layer import Input, Layer, Node, Shape
from .local_response_norm import LocalResponseNorm
from .loss import Loss
from .losses import (
    CRPS,
    AbsoluteError,
    BinaryCrossEntropyWithLogits,
    Focal,
    Huber,
    MeanSquaredError,
    SoftmaxCrossEntropy,
)
from .merge import Add, BroadcastAdd, Concat, Multiply
from .needs import Stencil
from .neighbors import GradientError, StructuralSimilarity
from .network import Network
from .padding import ChannelPad, Flip, Pad, Roll, Slice, Sphere
from .parameter import GivenValues, Parameter
from .pooling import (
    AdaptiveAveragePool,
    AdaptiveMaxPool,
    AveragePool,
    ChannelMax,
    ChannelMean,
    GlobalAveragePool,
    GlobalMaxPool,
    MaxPool,
)
from .reshape import ChannelShuffle, Flatten, PixelShuffle, PixelUnshuffle, Redistribute, Reshape
from .resize import Resize
from .scale import PReLU, Scale
from .strategy import Strategy
from .targets import MetricSpec
from .total_loss import training_only

__all__ = [
    "CRPS",
    "ELU",
    "GELU",
    "Abs",
    "AbsoluteError",
    "AdaptiveAveragePool",
    "AdaptiveMaxPool",
    "Add",
    "Affine",
    "Attention",
    "AveragePool",
    "BatchNorm",
    "BinaryCrossEntropyWithLogits",
    "BroadcastAdd",
    "ChannelDropout",
    "ChannelMax",
    "ChannelMean",
    "ChannelPad",
    "ChannelShuffle",
    "Clamp",
    "Concat",
    "Conv",
    "ConvTranspose",
    "Crop",
    "Dense",
    "Dice",
    "Dropout",
    "Embedding",
    "Exp",
    "Flatten",
    "Flip",
    "Focal",
    "GivenValues",
    "GlobalAveragePool",
    "GlobalMaxPool",
    "GradientError",
    "GroupNorm",
    "HardSigmoid",
    "HardSwish",
    "Huber",
    "Input",
    "InstanceNorm",
    "Layer",
    "LayerNorm",
    "LeakyReLU",
    "LocalResponseNorm",
    "Log",
    "LogSoftmax",
    "Loss",
    "MaxPool",
    "MeanSquaredError",
    "MetricSpec",
    "Mish",
    "MultiHeadAttention",
    "Multiply",
    "Network",
    "Node",
    "PReLU",
    "Pad",
    "Parameter",
    "PatchEmbedding",
    "PatchMerging",
    "PixelShuffle",
    "PixelUnshuffle",
    "Power",
    "RMSNorm",
    "ReLU",
    "Redistribute",
    "Reshape",
    "Resize",
    "Roll",
    "Scale",
    "Sequential",
    "Shape",
    "SiLU",
    "Sigmoid",
    "SinusoidalEmbedding",
    "Slice",
    "Softmax",
    "SoftmaxCrossEntropy",
    "Softplus",
    "Sphere",
    "Split",
    "Stencil",
    "StochasticDepth",
    "Strategy",
    "StructuralSimilarity",
    "Tanh",
    "Token",
    "Tversky",
    "training_only",
]
