"""Layers: the interface for writing one, the graph they build, and those that halograd has."""

from halograd.layers.activation import GELU, LeakyReLU, ReLU, Sigmoid, Softmax, Tanh
from halograd.layers.auxiliary import AuxiliaryCrossEntropy
from halograd.layers.batch_norm import BatchNorm
from halograd.layers.convolution import Conv
from halograd.layers.dense import Dense
from halograd.layers.dice import Dice
from halograd.layers.dropout import Dropout
from halograd.layers.global_pooling import GlobalAveragePool
from halograd.layers.group_norm import GroupNorm, InstanceNorm, LayerNorm
from halograd.layers.layer import Input, Layer, Node, Shape
from halograd.layers.local_response_norm import LocalResponseNorm
from halograd.layers.loss import Loss
from halograd.layers.losses import BinaryCrossEntropyWithLogits, MeanSquaredError
from halograd.layers.merge import Add, Concat
from halograd.layers.network import Network
from halograd.layers.parameter import Parameter
from halograd.layers.pooling import AveragePool, MaxPool
from halograd.layers.redistribute import Redistribute
from halograd.layers.reshape import Flatten
from halograd.layers.resize import Resize
from halograd.layers.softmax_cross_entropy import SoftmaxCrossEntropy
from halograd.layers.stencil import Stencil
from halograd.layers.strategy import Strategy
from halograd.layers.transposed import ConvTranspose

__all__ = [
    "GELU",
    "Add",
    "AuxiliaryCrossEntropy",
    "AveragePool",
    "BatchNorm",
    "BinaryCrossEntropyWithLogits",
    "Concat",
    "Conv",
    "ConvTranspose",
    "Dense",
    "Dice",
    "Dropout",
    "Flatten",
    "GlobalAveragePool",
    "GroupNorm",
    "Input",
    "InstanceNorm",
    "Layer",
    "LayerNorm",
    "LeakyReLU",
    "LocalResponseNorm",
    "Loss",
    "MaxPool",
    "MeanSquaredError",
    "Network",
    "Node",
    "Parameter",
    "ReLU",
    "Redistribute",
    "Resize",
    "Shape",
    "Sigmoid",
    "Softmax",
    "SoftmaxCrossEntropy",
    "Stencil",
    "Strategy",
    "Tanh",
]
