"""Distributed tensors: boxes, windows, blocks, layouts, groups, exchanges. Usable without networks and training."""

from .box import Box, Window, hull, input_box, output_box
from .disttensor import DistTensor, Halo
from .exchange import End, Exchange
from .groups import Groups, group_of, in_group, reductions_in_groups, sample_groups
from .layout import Blocks, Interval, Intervals, Layout, axis_names, balanced_boundaries, intervals, shared_boundaries
from .plan import Piece, has_peers, plan_exchange

__all__ = [
    "Blocks",
    "Box",
    "DistTensor",
    "End",
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
    "group_of",
    "has_peers",
    "hull",
    "in_group",
    "input_box",
    "intervals",
    "output_box",
    "plan_exchange",
    "reductions_in_groups",
    "sample_groups",
    "shared_boundaries",
]
