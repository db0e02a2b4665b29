"""Distributed tensors: boxes, windows, layouts, exchanges. Usable on its own."""

from halograd.dtensor.box import Box, hull
from halograd.dtensor.disttensor import DistTensor, Halo
from halograd.dtensor.exchange import Exchange
from halograd.dtensor.layout import Layout, axis_names, balanced_boundaries
from halograd.dtensor.plan import Piece, plan_exchange, subtract
from halograd.dtensor.window import Window, input_box, output_box

__all__ = [
    "Box",
    "DistTensor",
    "Exchange",
    "Halo",
    "Layout",
    "Piece",
    "Window",
    "axis_names",
    "balanced_boundaries",
    "hull",
    "input_box",
    "output_box",
    "plan_exchange",
    "subtract",
]
