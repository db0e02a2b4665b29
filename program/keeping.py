"""Choice of the outputs that are kept for the backward pass, by segments of a network; others are computed again.

A network is split into segments of consecutive layers. Outputs that a later segment reads are kept; the others are
computed again, one segment at a time, when the backward pass of the segment begins. Memory is then that of all kept
outputs, and of the largest segment. Segments of equal bytes, not of equal numbers of layers, make this sum small: a few
layers of high resolution have most of the memory. The last segment is not computed again, because its backward pass
comes first.

References
----------
Chen et al. 2016, "Training deep nets with sublinear memory cost", Section 4: segments of equal cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..layers import Network
from ..layers.strategy import Strategy
from ..lowering.views import Value
from .compiler import compile_program, outline
from .program import Step, Target

__all__ = ["keep_few"]

#: Number of limits of a segment's size that are tried.
LIMITS = 16


def keep_few(network: Network, strategy: Strategy, target: Target) -> Strategy:
    """Return the strategy that computes outputs again by segments, with the smallest arena that was found. Local.

    The rule ``"block"`` becomes an option of each layer of all segments but the last; options ``"none"`` of single
    layers stay. The cuts are those of `strategy`; `target` has batch and rank.
    """
    steps = outline(network, strategy, target).steps
    blocks = _blocks(steps)
    best, least = strategy, compile_program(network, strategy, target).placement.size
    seen = set[frozenset[str]]()
    for ends in _segmentations(blocks):
        again = _again(blocks, ends)
        if again not in seen:
            seen.add(again)
            made = _with(strategy, again & network.layers.keys())
            size = compile_program(network, made, target).placement.size
            best, least = (made, size) if size < least else (best, least)
    return best


def _with(strategy: Strategy, again: frozenset[str]) -> Strategy:
    layers = dict(strategy.layers)
    for name in sorted(again):
        layers[name] = {"recompute": "block", **layers.get(name, {})}
    return replace(strategy, layers=layers)


@dataclass(frozen=True)
class _Output:
    """Output of a layer: its size [B], the block that computes it, and the last block that reads it."""

    name: str
    nbytes: int
    made: int
    read: int
    repeatable: bool


def _blocks(steps: Sequence[Step]) -> list[_Output]:
    """Return the outputs of all layers, with numbers of blocks. Each layer that is costly to repeat begins a block."""
    number, numbers = -1, dict[str, int]()
    for step in steps:
        number += step.layer.recomputation == "block" or number < 0
        numbers[step.name] = number
    read: dict[Value, int] = {}
    for step in steps:
        read.update(dict.fromkeys(step.inputs, numbers[step.name]))
    return [
        _Output(
            step.name,
            step.output.box.size * step.output.dtype.itemsize,
            numbers[step.name],
            read.get(step.output, numbers[step.name]),
            step.layer.recomputation != "never",
        )
        for step in steps
    ]


def _segmentations(outputs: Sequence[_Output]) -> Iterator[tuple[int, ...]]:
    """Yield segmentations, each as the last blocks of its segments, from large segments to small ones."""
    count = 1 + max((output.made for output in outputs), default=0)
    within, kept = _sizes(outputs, count)
    largest, smallest = within[0, count - 1], max(within[i, i] for i in range(count))
    for k in range(LIMITS):
        yield _segmentation(within, kept, count, largest * (max(smallest, 1) / max(largest, 1)) ** (k / (LIMITS - 1)))


def _sizes(outputs: Sequence[_Output], count: int) -> tuple[dict[tuple[int, int], int], dict[tuple[int, int], int]]:
    """Return, by first and last block of a segment, the sizes of its recomputed and of its kept outputs [B]."""
    within, kept = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
    for first in range(count):
        for last in range(first, count):
            own = [output for output in outputs if first <= output.made <= last]
            again = sum(output.nbytes for output in own if output.read <= last and output.repeatable)
            within[first, last], kept[first, last] = again, sum(output.nbytes for output in own) - again
    return within, kept


def _segmentation(
    within: Mapping[tuple[int, int], int], kept: Mapping[tuple[int, int], int], count: int, limit: float
) -> tuple[int, ...]:
    """Return the segmentation that keeps the fewest bytes, with at most `limit` bytes computed again in a segment."""
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for last in range(count):
        best.append(
            min(
                (best[first][0] + kept[first, last], (*best[first][1], last))
                for first in range(last + 1)
                if within[first, last] <= limit or first == last
            )
        )
    return best[count][1]


def _again(outputs: Sequence[_Output], ends: Sequence[int]) -> frozenset[str]:
    """Return the layers whose outputs are computed again."""
    end_of = {block: end for first, end in zip((-1, *ends), ends) for block in range(first + 1, end + 1)}
    return frozenset(
        output.name
        for output in outputs
        if output.repeatable and output.read <= end_of[output.made] and end_of[output.made] != ends[-1]
    )
