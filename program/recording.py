"""Sections of a pass for graphs of a device: the longest runs of calls that a graph can record. Pure arithmetic.

A graph repeats the work that was enqueued during its capture: kernels, and messages of a transport that can be
captured. Calls that wait, branch or allocate on the host run between two graphs. The order never changes, so ranks with
different graphs still send and sum in the same order::

    conv1   bn1    sum   bn1   conv2  ->halo  conv2  halo->  my layer  conv3
    [    graph    ]       [   graph  ]        [graph]                  [graph]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

__all__ = ["Item", "Section", "sections", "separate_pairs"]


@dataclass(frozen=True)
class Item:
    """One call of a pass.

    Attributes
    ----------
    call, layer
        Function to call, and the name of its layer.
    held
        Whether a graph may contain it.
    pair
        Number of the exchange or sum that it starts or finishes, the same on all ranks; negative for a fork. Start and
        finish are in the same graph, or in none.
    starts
        Whether it starts the exchange, sum or fork.
    when
        ``"training"`` or ``"evaluation"`` if it is part of such passes only; None: part of both.
    again
        Whether it repeats an operation of the forward pass in the backward pass.
    on_gradients
        Whether it is an operation on gradients (`halograd.program.gradients`), which is not part of the layer's time.
    """

    call: Callable[[], object]
    layer: str
    held: bool = True
    pair: int | None = None
    starts: bool = False
    when: str | None = None
    again: bool = False
    on_gradients: bool = False


@dataclass(frozen=True)
class Section:
    """Consecutive calls, all in one graph or in none."""

    items: tuple[Item, ...]
    graph: bool

    @property
    def communicates(self) -> bool:
        """Whether a call of the section starts or finishes an exchange or a sum."""
        return any(item.pair is not None and item.pair >= 0 for item in self.items)

    def run(self) -> None:
        """Run all calls."""
        for item in self.items:
            item.call()


def separate_pairs(items: Sequence[Item], known: Collection[int] = ()) -> set[int]:
    """Return the pairs that cannot be in a graph.

    These are pairs without a start followed by a finish in this pass, pairs with a call that a graph cannot contain,
    and pairs with such a call between start and finish. The finish of a sum that starts in one pass and finishes in the
    next comes before its start in `items`.

    Parameters
    ----------
    known
        Pairs that cannot be in a graph on another rank, and therefore not on this rank.
    """
    positions: dict[int, list[int]] = {}
    for at, item in enumerate(items):
        if item.pair is not None:
            positions.setdefault(item.pair, []).append(at)
    # Start and finish in this pass, in this order.
    whole = {pair: [items[at].starts for at in ends] == [True, False] for pair, ends in positions.items()}
    separate = {pair for pair, ends in positions.items() if not whole[pair] or not all(items[at].held for at in ends)}
    separate |= set(known)
    # A pair outside of graphs cuts a graph in two, which may separate the ends of another pair.
    while True:
        out = [not item.held or item.pair in separate for item in items]
        more = {
            pair
            for pair, (*_, last) in positions.items()
            if pair not in separate and any(out[positions[pair][0] : last])
        }
        if not more:
            return separate
        separate |= more


def sections(items: Sequence[Item], out: Collection[int]) -> list[Section]:
    """Split a pass into sections that are graphs, of at least two calls, and others. `out`: the pairs that
    `separate_pairs` gave on any rank.
    """
    runs: list[tuple[bool, list[Item]]] = []
    for item in items:
        graph = item.held and item.pair not in out
        if not runs or runs[-1][0] != graph:
            runs.append((graph, []))
        runs[-1][1].append(item)
    # A graph of one call would save nothing.
    return [Section(tuple(numbers), graph and len(numbers) > 1) for graph, numbers in runs]
