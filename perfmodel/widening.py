"""Choice of wide values: layers of a plan that compute margins instead of exchanging halos, where this is faster.

The layers between two halo exchanges are a *link*: if all of them are wide, the exchange after them is left out. If
only its last layers are wide, from a norm on, the exchange moves before this norm, and travels during the sum of its
statistics. Links are joined into runs: the last link of a run is wide from its norm on, the others as a whole. For
every length in `RUNS` the whole network is simulated. The runs that gain most by these simulations form one more
strategy. A plan takes the fastest that fits if it is faster than all plain ones by `MARGIN`: the times of kernels on
larger blocks, and of copies, are less certain than those of exchanges.

Nothing is simulated where the step would not be fast enough even if wide values saved as much as they can. Longer runs
are left out where shorter ones save too little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

from ..layers import Strategy
from .cost.simulate import Simulation
from .plans import LayerRecord, Prediction

__all__ = ["MARGIN", "RUNS", "wide_layers", "wider", "with_wide"]

#: Part of the step's time that wide values must save.
MARGIN = 0.05
#: Numbers of links that are joined: all but the last of them become wide, and the last from its statistics on.
RUNS = (1, 2, 3, 4, 6, 12)


def wider(
    strategy: Strategy, plain: Prediction, simulate: Callable[[Strategy], Simulation], below: float = math.inf
) -> list[Simulation]:
    """Return simulations of strategies with wide values whose step is faster than `below` [s], the fastest first.

    Parameters
    ----------
    strategy
        The plain strategy, with the halo algorithms of its prediction.
    plain
        Its prediction.
    simulate
        Function that simulates a strategy.
    below
        Limit of the step's time [s]. Nothing is simulated if the plain step would not be below it even without all the
        time that wide values can save.
    """
    if plain.step_seconds - _savable(plain.layers) >= below:
        return []
    links = _links(plain.layers)
    # A list, because mappings have no hash.
    tried = [strategy.layers]
    seconds: dict[Simulation, float] = {}
    gains: list[tuple[float, range]] = []

    def simulate_runs(runs: Sequence[range]) -> None:
        """Simulate the strategy in which these runs are wide, unless one with the same layers was simulated."""
        wide = with_wide(strategy, _wide(plain, links, runs))
        if wide.layers not in tried:
            tried.append(wide.layers)
            simulation = simulate(wide)
            prediction = simulation.prediction(account=False)
            seconds[simulation] = prediction.step_seconds
            gains.extend(_gains(plain.layers, prediction.layers, links, runs))

    for length in RUNS:
        before = len(gains) if length > 2 else 0
        simulate_runs([range(first, min(first + length, len(links))) for first in range(0, len(links), length)])
        # Runs of n links save n - 1 of n exchanges. Longer ones, with wider margins, save less than n / (n - 1) of it.
        saved = sum(max(gain, 0.0) for gain, _ in gains[before:])
        if length > 1 and plain.step_seconds - saved * length / (length - 1) >= below:
            break
    chosen, used = list[range](), set[int]()
    for gain, run in sorted(gains, key=lambda pair: -pair[0]):
        # Gains of runs with a common link do not add up.
        if gain > 0 and not used & {*run}:
            chosen.append(run)
            used |= {*run}
    if chosen:
        simulate_runs(chosen)
    return sorted((simulation for simulation in seconds if seconds[simulation] < below), key=seconds.__getitem__)


def with_wide(strategy: Strategy, names: Collection[str]) -> Strategy:
    """Return the strategy in which the outputs of these layers are wide."""
    layers = dict(strategy.layers)
    layers |= {name: {**layers.get(name, {}), "wide": True} for name in names}
    return replace(strategy, layers=layers)


def wide_layers(strategy: Strategy) -> frozenset[str]:
    """Return the names of the layers whose outputs are wide."""
    return frozenset(name for name, options in strategy.layers.items() if options.get("wide"))


def _savable(records: Sequence[LayerRecord]) -> float:
    """Return the time that wide values save at most [s]: of exposed halos, of packing, and of waits for statistics.

    These waits are those for sums in the backward pass, which last as long as those in the forward pass.
    """
    halos = sum(record.halo_exposed + record.packing for record in records)
    statistics = sum(record.statistics for record in records if {*record.parts} & {"depth", "height", "width"})
    return halos + statistics / 2 if halos else 0.0


def _links(records: Sequence[LayerRecord]) -> list[range]:
    """Return the layers of each link, as indices in the order of computation."""
    # A layer with a halo begins a link, because the exchange precedes it.
    begins = [i for i, record in enumerate(records) if record.halo_algorithm]
    bounds = [0, *begins, len(records)]
    return [range(a, b) for a, b in pairwise(bounds) if a < b]


def _wide(plain: Prediction, links: Sequence[range], runs: Sequence[range]) -> list[str]:
    """Return the names of the wide layers of the runs."""
    numbers: list[int] = []
    for run in runs:
        numbers += [i for link in run[:-1] for i in links[link]]
        last = links[run[-1]]
        # Without a norm, no layer of the last link becomes wide.
        numbers += range(next((i for i in last if plain.layers[i].statistics), last.stop), last.stop)
    return [plain.layers[i].name for i in numbers]


def _gains(
    plain: Sequence[LayerRecord], wide: Sequence[LayerRecord], links: Sequence[range], runs: Sequence[range]
) -> Iterator[tuple[float, range]]:
    """Yield the time that each run saves in its layers [s], with the run."""
    # Sums over the first 0, 1, 2, ... layers: the gain of a run is the difference of two.
    saved = [0.0, *accumulate(a.seconds - b.seconds for a, b in zip(plain, wide, strict=True))]
    for run in runs:
        yield saved[links[run[-1]].stop] - saved[links[run[0]].start], run
