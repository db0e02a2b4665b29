"""Helpers for tests of costs: cuts of an array, and cost models with rooflines."""

from __future__ import annotations

import math

from halograd.dtensor import Blocks
from halograd.layers.strategy import AXES, layout_of
from halograd.perfmodel.cost import NetworkModel, Pricing
from halograd.perfmodel.kernel_times import KernelTimes, RooflineTimes
from halograd.perfmodel.machine import Machine


def cut(shape: tuple[int, ...], parts: tuple[int, ...]) -> Blocks:
    """Return the blocks of an array ``(N, *spatial, C)`` on the product of `parts` ranks."""
    return layout_of(shape, dict(zip(AXES, parts)), math.prod(parts)).boxes


def priced(machine: Machine, times: KernelTimes | None = None, quick: bool = False) -> Pricing:
    """Return the cost model of a machine; with `quick`, the one that planners use."""
    return Pricing(NetworkModel(machine, quick), times or RooflineTimes(machine), best_halo=quick)
