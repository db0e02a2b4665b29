"""Choice of wide values: layers of a plan that compute margins instead of exchanging halos, where this is faster.

The layers between two halo exchanges are a *link*: if all of them are wide, the exchange after them is left out. If
only its last layers are wide, from a norm on, the exchange moves before this norm, and travels during the sum of its
statistics. Links are joined into runs: the last link of a run is wide from its norm on, the others as a whole. For
every length in `RUNS` the whole network is simulated. The runs that gain most by these simulations form one more
strategy. The fastest that fits is taken if it is faster than the plain one by `MARGIN`: the times of kernels on larger
blocks, and of copies, are less certain than those of exchanges.

If the halos that computation does not hide, and packing, take less than `MARGIN` of the step, nothing is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from ..layers import Strategy
from .plans import LayerRecord, Prediction

__all__ = ["MARGIN", "RUNS", "wider"]

#: Part of the step's time that wide values must save.
MARGIN = 0.05
#: Numbers of links that are joined: all but the last of them become wide, and the last from its statistics on.
RUNS = (1, 2, 3, 4, 6, 12)


def wider(
    strategy: Strategy, plain: Prediction, simulate: Callable[[Strategy], Prediction], margin: float = MARGIN
) -> list[Strategy]:
    """Return strategies with wide values that are faster than the plain one by a margin, the fastest first.

    Parameters
    ----------
    strategy
        The plain strategy, with the halo algorithms of its prediction.
    plain
        Its prediction.
    simulate
        Function that returns the prediction of a strategy, without memory and traffic.
    margin
        Part of the step's time that they must save.
    """
    if plain.total("halo_exposed") + plain.total("packing") < margin * plain.step_seconds:
        return []
    links = _links(plain.layers)
    widened: list[tuple[float, Strategy]] = []
    gains: list[tuple[float, range]] = []
    for length in RUNS:
        runs = [range(first, min(first + length, len(links))) for first in range(0, len(links), length)]
        candidate = with_wide(strategy, _wide(plain, links, runs))
        if candidate.layers in [strategy.layers, *(other.layers for _, other in widened)]:
            continue
        prediction = simulate(candidate)
        widened.append((prediction.step_seconds, candidate))
        gains += _gains(plain.layers, prediction.layers, links, runs)
    chosen, used = list[range](), set[int]()
    for gain, run in sorted(gains, key=lambda pair: -pair[0]):
        if gain > 0 and not used & {*run}:
            chosen.append(run)
            used |= {*run}
    if chosen:
        candidate = with_wide(strategy, _wide(plain, links, chosen))
        if candidate.layers not in [strategy.layers, *(other.layers for _, other in widened)]:
            widened.append((simulate(candidate).step_seconds, candidate))
    faster = (pair for pair in widened if pair[0] < (1 - margin) * plain.step_seconds)
    return [candidate for _, candidate in sorted(faster, key=lambda pair: pair[0])]


def with_wide(strategy: Strategy, names: Collection[str]) -> Strategy:
    """Return the strategy in which the outputs of these layers are wide."""
    layers = dict(strategy.layers)
    layers |= {name: {**layers.get(name, {}), "wide": True} for name in names}
    return replace(strategy, layers=layers)


def _links(records: Sequence[LayerRecord]) -> list[range]:
    """Return the layers of each link, as numbers in the order of computation."""
    begins = [i for i, record in enumerate(records) if record.halo_algorithm]
    bounds = [0, *begins, len(records)]
    return [range(a, b) for a, b in pairwise(bounds) if a < b]


def _wide(plain: Prediction, links: Sequence[range], runs: Sequence[range]) -> list[str]:
    """Return the names of the wide layers of the runs."""
    numbers: list[int] = []
    for run in runs:
        numbers += [i for link in run[:-1] for i in links[link]]
        last = links[run[-1]]
        numbers += range(next((i for i in last if plain.layers[i].statistics), last.stop), last.stop)
    return [plain.layers[i].name for i in numbers]


def _gains(
    plain: Sequence[LayerRecord], wide: Sequence[LayerRecord], links: Sequence[range], runs: Sequence[range]
) -> Iterator[tuple[float, range]]:
    """Yield the time that each run saves in its layers [s], with the run."""
    saved = [0.0, *accumulate(a.seconds - b.seconds for a, b in zip(plain, wide, strict=True))]
    for run in runs:
        yield saved[links[run[-1]].stop] - saved[links[run[0]].start], run
