"""What a graph of a device holds of a pass: the longest runs of calls between those that it cannot hold. Arithmetic.

A graph repeats what was enqueued while it was recorded: kernels, and messages of a transport that lets itself be
recorded. What waits, decides or makes arrays on the host is called between two graphs. Order never changes, so ranks
whose graphs differ still send and sum alike::

    conv1   bn1    sum   bn1   conv2  ->halo  conv2  halo->  my layer  conv3
    [    graph    ]       [   graph  ]        [graph]                  [graph]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

__all__ = ["Item", "Section", "apart", "sections"]


@dataclass(frozen=True)
class Item:
    """One call of a pass.

    Attributes
    ----------
    call, layer
        What is called, and for which layer.
    held
        Whether a graph may hold it.
    pair
        Number of the exchange or sum of which this is one end: both ends are in one graph, or none. The same on all
        ranks.
    starts
        Whether it is the end that starts it.
    """

    call: Callable[[], object]
    layer: str
    held: bool = True
    pair: int | None = None
    starts: bool = False


@dataclass(frozen=True)
class Section:
    """Calls that follow one another, all in one graph or none."""

    items: tuple[Item, ...]
    graph: bool

    @property
    def communicates(self) -> bool:
        """Whether there are ends of exchanges or sums among them."""
        return any(item.pair is not None for item in self.items)

    def run(self) -> None:
        """Call them."""
        for item in self.items:
            item.call()


def apart(items: Sequence[Item], known: Collection[int] = ()) -> set[int]:
    """Pairs that cannot be in a graph: not a start and then its end, not held, or with something between that is not.

    A sum that is begun in one pass and waited for in the next has an end here before its start: no pair of this pass.

    Parameters
    ----------
    known
        Pairs that cannot on another rank, and therefore not here.
    """
    places: dict[int, list[int]] = {}
    for at, item in enumerate(items):
        if item.pair is not None:
            places.setdefault(item.pair, []).append(at)
    whole = {pair: [items[at].starts for at in ends] == [True, False] for pair, ends in places.items()}
    found = {pair for pair, ends in places.items() if not whole[pair] or not all(items[at].held for at in ends)}
    found |= set(known)
    while True:
        out = [not item.held or item.pair in found for item in items]
        more = {pair for pair, (*_, last) in places.items() if pair not in found and any(out[places[pair][0] : last])}
        if not more:
            return found
        found |= more


def sections(items: Sequence[Item], out: Collection[int]) -> list[Section]:
    """The pass in sections; `out` are the pairs that :func:`apart` found, on any rank. A single call is no graph."""
    runs: list[tuple[bool, list[Item]]] = []
    for item in items:
        graph = item.held and item.pair not in out
        if not runs or runs[-1][0] != graph:
            runs.append((graph, []))
        runs[-1][1].append(item)
    return [Section(tuple(some), graph and len(some) > 1) for graph, some in runs]
