"""Which block of a parameter each rank holds, and with whom it shares it. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from halograd.dtensor import Box, balanced_boundaries
from halograd.layers.layer import Node
from halograd.layers.network import Network
from halograd.layers.parameter import Parameter
from halograd.layers.strategy import Strategy

__all__ = ["ParameterBlocks", "block_channels", "parameter_blocks"]


@dataclass(frozen=True)
class ParameterBlocks:
    """The blocks of one parameter over the ranks.

    Attributes
    ----------
    boxes
        Box of the whole array per rank; empty where the rank holds nothing of it.
    colors
        Per rank the number of its block: ranks of one color hold the same block, each has a summand of its gradient.
        None where the rank holds nothing.
    """

    boxes: tuple[Box, ...]
    colors: tuple[int | None, ...]

    @property
    def whole(self) -> bool:
        """Whether every rank holds all of it."""
        return set(self.colors) == {0}

    @property
    def largest(self) -> int:
        """Elements of the largest block."""
        return max(box.size for box in self.boxes)

    def owners(self) -> tuple[Box, ...]:
        """The boxes with every element at one rank only, the first that holds it."""
        firsts = {color: rank for rank, color in reversed(list(enumerate(self.colors)))}
        return tuple(
            box if color is not None and firsts[color] == rank else _nothing(box)
            for rank, (box, color) in enumerate(zip(self.boxes, self.colors))
        )


def parameter_blocks(network: Network, strategy: Strategy, size: int) -> dict[str, ParameterBlocks]:
    """Blocks of all parameters and states by ``layer/parameter``, on `size` ranks. Local.

    Ranks that a layer does without hold nothing of it. Where channels are cut, a rank holds its block of filters,
    of input channels, or of both; biases lie with the first part of the sum over the input channels.
    """
    result: dict[str, ParameterBlocks] = {}
    for name, node in network.layers.items():
        shapes = [n.shape for n in node.inputs]
        specs = {**node.layer.parameters(*shapes), **node.layer.state(*shapes)}
        parts = strategy.parts_of(name)
        result |= {f"{name}/{key}": _blocks(spec, node, parts, size) for key, spec in specs.items()}
    return result


def block_channels(channels: int, parts: Mapping[str, int]) -> list[tuple[int, int]]:
    """Per part of "channel", its output channels: whole blocks of the output's layout.

    >>> block_channels(10, {"channel": 2, "input_channel": 2})
    [(0, 6), (6, 10)]
    """
    inner = parts["input_channel"]
    cuts = balanced_boundaries(channels, parts["channel"] * inner)
    return [(cuts[k * inner], cuts[(k + 1) * inner]) for k in range(parts["channel"])]


def _blocks(spec: Parameter, node: Node, parts: Mapping[str, int], size: int) -> ParameterBlocks:
    whole, inner = Box.of_shape(spec.shape), parts["input_channel"]
    used, blocks = math.prod(parts.values()), parts["channel"] * inner
    boxes = [_nothing(whole)] * size
    colors: list[int | None] = [None] * size
    for rank in range(used):
        filters, share = divmod(rank % blocks, inner)
        if spec.input_axis is None and spec.channel_axis is not None and share:
            continue  # what is added once lies with the first part of the sum
        ranges = list(whole.ranges)
        color = 0
        if spec.channel_axis is not None:
            ranges[spec.channel_axis] = block_channels(spec.shape[spec.channel_axis], parts)[filters]
            color = filters
        if spec.input_axis is not None and inner > 1:
            cuts = balanced_boundaries(spec.shape[spec.input_axis], inner)
            ranges[spec.input_axis] = (cuts[share], cuts[share + 1])
            color = color * inner + share
        boxes[rank], colors[rank] = Box.of_ranges(ranges), color
    return ParameterBlocks(tuple(boxes), tuple(colors))


def _nothing(box: Box) -> Box:
    return Box((0,) * box.ndim, (0, *box.shape[1:]))
