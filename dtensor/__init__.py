"""Distributed tensors: boxes, windows, blocks, layouts, groups, exchanges. Usable on its own."""

from halograd.dtensor.blocks import Blocks, Interval, Intervals, balanced_boundaries, intervals, shared_boundaries
from halograd.dtensor.box import Box, hull
from halograd.dtensor.disttensor import DistTensor, Halo
from halograd.dtensor.exchange import Exchange
from halograd.dtensor.groups import Groups
from halograd.dtensor.layout import Layout, axis_names
from halograd.dtensor.plan import Piece, plan_exchange
from halograd.dtensor.window import Window, input_box, output_box

__all__ = [
    "Blocks",
    "Box",
    "DistTensor",
    "Exchange",
    "Groups",
    "Halo",
    "Interval",
    "Intervals",
    "Layout",
    "Piece",
    "Window",
    "axis_names",
    "balanced_boundaries",
    "hull",
    "input_box",
    "intervals",
    "output_box",
    "plan_exchange",
    "shared_boundaries",
]
