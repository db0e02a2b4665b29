"""Which block of a parameter each rank holds, and with whom it shares it. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ..dtensor import Blocks, Groups, Intervals, balanced_boundaries, intervals
from .network import Network
from .parameter import Parameter
from .strategy import Strategy

__all__ = ["ParameterBlocks", "block_channels", "blocks_of", "parameter_blocks"]


@dataclass(frozen=True)
class ParameterBlocks:
    """The blocks of one parameter over the ranks.

    Attributes
    ----------
    boxes
        Box of the whole array per rank; empty where the rank holds nothing of it.
    holders
        Ranks of one group hold the same block, each has a summand of its gradient; ranks of none hold nothing.
    """

    boxes: Blocks
    holders: Groups

    @property
    def whole(self) -> bool:
        """Whether every rank holds all of it."""
        return self.holders.is_whole

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of the block of each group."""
        return tuple(self.boxes[self.holders.members(color)[0]].size for color in range(self.holders.count))

    @cached_property
    def largest(self) -> int:
        """Elements of the largest block."""
        return self.boxes.fullest


def parameter_blocks(network: Network, strategy: Strategy, size: int) -> dict[str, ParameterBlocks]:
    """Blocks of all parameters and states by ``layer/parameter``, on `size` ranks. Local.

    Ranks that a layer does without hold nothing of it. Where channels are cut, a rank holds its block of filters,
    of input channels, or of both; biases lie with the first part of the sum over the input channels.
    """
    result: dict[str, ParameterBlocks] = {}
    for name, node in network.layers.items():
        specs = {**network.own_parameters(name), **node.layer.state(*(n.shape for n in node.inputs))}
        parts = strategy.parts_of(name)
        result |= {f"{name}/{key}": blocks_of(spec, parts, size) for key, spec in specs.items()}
    return result


def block_channels(channels: int, parts: Mapping[str, int]) -> list[tuple[int, int]]:
    """Per part of "channel", its output channels: whole blocks of the output's layout.

    >>> block_channels(10, {"channel": 2, "input_channel": 2})
    [(0, 6), (6, 10)]
    """
    inner = parts["input_channel"]
    cuts = balanced_boundaries(channels, parts["channel"] * inner)
    return [(cuts[k * inner], cuts[(k + 1) * inner]) for k in range(parts["channel"])]


@lru_cache(maxsize=4096)
def _repeated(axis: Intervals, times: int) -> Intervals:
    """The same intervals for so many replicas; one object for all parameters that are held alike."""
    return axis * times


def blocks_of(spec: Parameter, parts: Mapping[str, int], size: int) -> ParameterBlocks:
    """The blocks of one parameter of a layer that is cut into these parts."""
    return _blocks_of(spec, parts["channel"], parts["input_channel"], math.prod(parts.values()), size)


@lru_cache(maxsize=65536)
def _blocks_of(spec: Parameter, channel: int, inner: int, used: int, size: int) -> ParameterBlocks:
    # Row-major: replicas along the first axis of the parameter, then its channels, then its input channels.
    axes: list[Intervals] = [((0, n),) for n in spec.shape]
    grid = (used // (channel * inner), channel, inner)
    agreeing, first, repeats = [], [], used
    if spec.input_axis is not None:
        axes[spec.input_axis] = intervals(spec.shape[spec.input_axis], inner)
        agreeing.append(2)
        repeats //= inner
    if spec.channel_axis is not None:
        own = block_channels(spec.shape[spec.channel_axis], {"channel": channel, "input_channel": inner})
        agreeing.append(1)
        repeats //= channel
        if spec.input_axis is None:  # what is added once lies with the first part of the sum
            own = [(a, a if share else b) for a, b in own for share in range(inner)]
            first.append(2)
            repeats //= inner
        axes[spec.channel_axis] = tuple(own)
    axes[0] = _repeated(axes[0], repeats)
    return ParameterBlocks(Blocks(axes, size), Groups.agreeing(grid, agreeing, size, first))
