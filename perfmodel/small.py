"""Cuts of small layers: where one cut for all layers makes blocks too small, layers get other cuts, if the cost model
predicts a faster step.

Blocks of a few rows compute slowly, exchange halos as large as themselves, and every rank reads, sums and updates all
weights of the layer. On fewer ranks, or cut along channels, a layer sends its small activations instead. The choice is
the optimum of the additive costs of :mod:`halograd.perfmodel.cost.network_costs` among a few cuts per layer, and
`simulate` compares it with the given cut. It depends on its arguments only, which are the same on all ranks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from halograd.errors import UserError

from ..layers import Input, Network, Strategy
from ..layers.strategy import AXES
from .cost.network_costs import NetworkCosts, network_costs
from .cost.network_model import NetworkModel
from .cost.pricing import Pricing
from .cost.simulate import Simulation, Training
from .cuts import Parts, divisors, fits
from .kernel_times import KernelTimes, RooflineTimes
from .machine import Machine
from .planners import Elimination
from .plans import Prediction

__all__ = ["MACHINE", "SmallLayers", "suit_small_layers"]

#: Machine that is assumed if nothing was measured.
MACHINE = "cpu-core"
#: Fractions by which another cut of a layer, and the step under all changed cuts, have to be faster; least gain of the
#: step [s].
MARGIN, WORTH, LEAST = 0.1, 0.04, 1e-3
#: Fractions of the sums of gradients that are charged to layers, one choice each; `simulate` decides between them.
EXPOSED = (1.0, 0.0)


@dataclass(frozen=True)
class SmallLayers:
    """Strategy with other cuts of small layers.

    Attributes
    ----------
    strategy
        The strategy; the given one if no layer is changed.
    layers
        Layers with another cut, in order of computation.
    prediction
        Prediction of a step under the strategy, without memory and traffic.
    given_seconds
        Predicted time of a step under the given strategy [s].
    machine
        Machine of the predictions.
    """

    strategy: Strategy
    layers: tuple[str, ...]
    prediction: Prediction
    given_seconds: float
    machine: Machine


def suit_small_layers(
    network: Network,
    strategy: Strategy,
    batch: int,
    ranks: int,
    machine: Machine | None = None,
    training: Training | None = None,
    times: KernelTimes | None = None,
) -> SmallLayers:
    """Return a strategy in which layers whose blocks are too small have other cuts. Local, the same on all ranks.

    These layers keep their cut: those with a cut of their own in `strategy`, those that read an input with spatial
    axes, those that share parameters, those whose result depends on their cut, and those with an axis that is cut in
    unequal shares.

    Parameters
    ----------
    network, strategy
        Network, and a valid strategy with a cut for all layers.
    batch
        Global number of samples.
    ranks
        Number of ranks.
    machine, training, times
        Machine, by default `MACHINE`; settings of the training; kernel times, by default those of the roofline.
    """
    machine, training = machine or Machine.load(MACHINE), training or Training()
    times = times or RooflineTimes(machine)
    pricing = Pricing(NetworkModel(machine), times, training.dtype)

    def simulated(arguments: Strategy) -> Simulation:
        return Simulation(network, arguments, batch, pricing, training, ranks)

    best = uncut = simulated(strategy)
    choices = _choices(network, strategy, batch, ranks)
    # Without a second cut of any layer there is nothing to choose.
    if max(map(len, choices.values())) > 1:
        # The messages of a few ranks are enough for the many candidates, because `simulated` decides.
        quick = Pricing(NetworkModel(machine, quick=True), times, training.dtype)
        arguments = (network, batch, ranks, quick, training, False, strategy.bucket_bytes, choices)
        costs = network_costs(*arguments)
        for indices in _selections(costs):
            other = simulated(_with_cuts(strategy, costs, indices))
            limit = min(best.step_seconds, (1 - WORTH) * uncut.step_seconds, uncut.step_seconds - LEAST)
            if _is_valid(other.strategy, network, ranks) and other.step_seconds < limit:
                best = other
    changed = tuple(name for name in network.layers if best.strategy.cuts_of(name) != strategy.cuts_of(name))
    # Memory and traffic would take longer than all the rest.
    return SmallLayers(best.strategy, changed, best.prediction(account=False), uncut.step_seconds, machine)


def _choices(network: Network, strategy: Strategy, batch: int, ranks: int) -> dict[str, tuple[Parts, ...]]:
    """Return the cuts of each layer that are compared; the given one comes first."""
    calls = Counter(network.owners.values())
    choices: dict[str, tuple[Parts, ...]] = {}
    for name, node in network.layers.items():
        own = tuple(strategy.parts_of(name).values())
        keeps = (
            any(axis in strategy.layers.get(name, {}) for axis in AXES)
            or any(isinstance(cut, tuple) for cut in strategy.cuts_of(name).values())
            or any(isinstance(source, Input) and len(source.shape) > 1 for source in node.inputs)
            or calls[network.owners.get(name, name)] > 1
            or node.layer.depends_on_cut(strategy.options_of(name))
        )
        others = [] if keeps else [parts for parts in _others(own, batch, ranks) if fits(node, parts, batch)]
        choices[name] = tuple(dict.fromkeys([own, *others]))
    return choices


def _others(own: Parts, batch: int, ranks: int) -> Iterator[Parts]:
    """Yield other cuts: with fewer spatial parts on fewer ranks, along samples, along output or input channels.

    >>> for parts in _others((1, 1, 4, 1, 1, 1), batch=1, ranks=4):
    ...     print(parts)
    (1, 1, 2, 1, 1, 1)
    (1, 1, 1, 1, 1, 1)
    (1, 1, 1, 1, 4, 1)
    (1, 1, 1, 1, 1, 4)
    """
    sample, *space = own[:4]
    fewer = space
    while max(fewer) > 1:
        fewer = [max(1, n // 2) for n in fewer]
        if all(n % m == 0 for n, m in zip(space, fewer)):
            yield (sample, *fewer, 1, 1)
    samples = max(n for n in divisors(ranks) if n <= batch)
    if samples > sample:
        yield (samples, 1, 1, 1, 1, 1)
    blocks = math.prod(space)
    if blocks > 1:
        yield (sample, 1, 1, 1, blocks, 1)
        yield (sample, 1, 1, 1, 1, blocks)


def _selections(costs: NetworkCosts) -> Iterator[tuple[int, ...]]:
    """Yield optimal choices by additive costs, in which cuts other than the given one cost a fraction `MARGIN` more.

    They need no more memory than the given cut.
    """
    memory = costs.problem().bytes((0,) * len(costs.names))
    for exposed in EXPOSED:
        problem = costs.problem(exposed, memory)
        # Candidate 0 is the given cut.
        biased = tuple(np.append(t[:1], t[1:] * (1 + MARGIN)) for t in problem.times)
        # The planner may reach the limits of its work; the given cut then stays.
        with suppress(UserError):
            yield Elimination().plan(replace(problem, times=biased)).indices


def _with_cuts(strategy: Strategy, costs: NetworkCosts, indices: Sequence[int]) -> Strategy:
    """Return the strategy with the chosen cut of each layer for which another than the given cut (number 0) was chosen.
    """
    layers = dict(strategy.layers)
    for name, options, i in zip(costs.names, costs.candidates, indices):
        if i:
            # An entry without any part would mean the common cut.
            parts = {axis: n for axis, n in zip(AXES, options[i]) if n > 1} or {"sample": 1}
            layers[name] = {**layers.get(name, {}), **parts}
    return replace(strategy, layers=layers)


def _is_valid(strategy: Strategy, network: Network, ranks: int) -> bool:
    """Return whether the strategy, with its scheme of gradient reduction, is valid."""
    try:
        strategy.validate(network, ranks)
    except UserError:
        return False
    return True
