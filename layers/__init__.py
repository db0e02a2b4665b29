"""Layers: the interface for writing one, the graph they build, and those that halograd has."""

from .activation import ELU, GELU, Clamp, HardSigmoid, HardSwish, LeakyReLU, ReLU, Sigmoid, SiLU, Softmax, Tanh
from .batch_norm import BatchNorm
from .convolution import Conv
from .dense import Dense
from .dice import Dice, Tversky
from .dropout import Dropout
from .global_pooling import GlobalAveragePool
from .group_norm import GroupNorm, InstanceNorm, LayerNorm
from .layer import Input, Layer, Node, Shape
from .local_response_norm import LocalResponseNorm
from .loss import Loss
from .losses import AbsoluteError, BinaryCrossEntropyWithLogits, Focal, Huber, MeanSquaredError
from .merge import Add, Concat, Multiply
from .network import Network
from .padding import Pad, Slice
from .parameter import GivenValues, Parameter
from .pooling import AveragePool, MaxPool
from .redistribute import Redistribute
from .reshape import Flatten
from .resize import Resize
from .softmax_cross_entropy import SoftmaxCrossEntropy
from .stencil import Stencil
from .strategy import Strategy
from .total_loss import training_only
from .transposed import ConvTranspose

__all__ = [
    "ELU",
    "GELU",
    "AbsoluteError",
    "Add",
    "AveragePool",
    "BatchNorm",
    "BinaryCrossEntropyWithLogits",
    "Clamp",
    "Concat",
    "Conv",
    "ConvTranspose",
    "Dense",
    "Dice",
    "Dropout",
    "Flatten",
    "Focal",
    "GivenValues",
    "GlobalAveragePool",
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
    "Loss",
    "MaxPool",
    "MeanSquaredError",
    "Multiply",
    "Network",
    "Node",
    "Pad",
    "Parameter",
    "ReLU",
    "Redistribute",
    "Resize",
    "Shape",
    "SiLU",
    "Sigmoid",
    "Slice",
    "Softmax",
    "SoftmaxCrossEntropy",
    "Stencil",
    "Strategy",
    "Tanh",
    "Tversky",
    "training_only",
]
