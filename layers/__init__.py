"""Layers: the interface for writing one, the graph they build, and those that halograd has."""

from halograd.layers.convolution import Conv
from halograd.layers.layer import Input, Layer, Node, Shape
from halograd.layers.loss import Loss
from halograd.layers.network import Network
from halograd.layers.parameter import Parameter
from halograd.layers.redistribute import Redistribute
from halograd.layers.stencil import Stencil

__all__ = [
    "Conv",
    "Input",
    "Layer",
    "Loss",
    "Network",
    "Node",
    "Parameter",
    "Redistribute",
    "Shape",
    "Stencil",
]
