"""Simulated strategies, each under all promising schemes of gradient reduction.

A plan chooses among them; a run ranks the schemes of one strategy by the predicted time of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..layers import Network, Strategy
from ..layers.reduction_chunks import kinds_of, replicable_layers
from ..layers.reduction_scheme import Scheme
from .cost.network_model import NetworkModel
from .cost.pricing import Pricing
from .cost.simulate import Simulation, Training
from .kernel_times import KernelTimes
from .machine import Machine

__all__ = [
    "PlanCandidate",
    "PlanCandidates",
    "candidate_schemes",
    "first_chunks",
    "planned_schemes",
    "rank_schemes",
    "shortlist",
]

Cuts = tuple[tuple[int, ...], ...]


@dataclass(eq=False)
class PlanCandidate:
    """A strategy with its simulated step.

    Attributes
    ----------
    name
        Name of the baseline or planner that proposed it.
    simulation
        Simulation with one scheme of gradient reduction.
    optimal
        Whether a planner proved that it is the fastest by additive costs.
    indices
        Indices of its cuts among the candidates of the layers; None: some of its cuts are not candidates.
    """

    name: str
    simulation: Simulation
    optimal: bool = False
    indices: tuple[int, ...] | None = None

    @property
    def strategy(self) -> Strategy:
        """Strategy: the cuts, the scheme and the size of buckets."""
        return self.simulation.strategy

    @cached_property
    def seconds(self) -> float:
        """Time of a step [s]."""
        return self.simulation.step_seconds

    @cached_property
    def memory_bytes(self) -> int:
        """Memory of the fullest rank [B]; computed on demand: this takes as long as the rest of a simulation."""
        return sum(self.simulation.memory.values())

    def fits(self, limit: float) -> bool:
        """Return whether the fullest rank needs at most `limit` [B]."""
        return limit == math.inf or self.memory_bytes <= limit


class PlanCandidates:
    """All strategies of a search, each stored once.

    A search with a smaller memory limit evaluates the same strategies and more. It therefore finds a plan again if the
    limit equals the memory of that plan.

    Parameters
    ----------
    schemes
        Function that returns the schemes of gradient reduction to try for a strategy, with the size of their buckets
        [B].
    """

    def __init__(self, network: Network, schemes: Callable[[Strategy], Sequence[tuple[Scheme, int]]]) -> None:
        self._network, self._schemes = network, schemes
        self._candidates: dict[Cuts, PlanCandidate] = {}
        self._variants: dict[Cuts, list[PlanCandidate]] = {}

    def __iter__(self) -> Iterator[PlanCandidate]:
        return iter(self._candidates.values())

    def cuts(self, strategy: Strategy) -> Cuts:
        """Return the numbers of parts of all layers, per axis, which identify a strategy here."""
        return tuple(tuple(strategy.parts_of(name).values()) for name in self._network.layers)

    def find(self, strategy: Strategy) -> PlanCandidate | None:
        """Return the stored strategy with the same cuts; None if there is none."""
        return self._candidates.get(self.cuts(strategy))

    def add(self, plan_candidate: PlanCandidate) -> PlanCandidate:
        """Store a strategy; return the stored one with the same cuts if there is one."""
        return self._candidates.setdefault(self.cuts(plan_candidate.strategy), plan_candidate)

    def variants(self, plan_candidate: PlanCandidate) -> list[PlanCandidate]:
        """Return the strategies with the same cuts, the fastest first.

        They have all schemes, and the recomputed outputs that :meth:`add_recomputed` has added so far.
        """
        key = self.cuts(plan_candidate.strategy)
        if key not in self._variants:
            distinct: dict[object, Simulation] = {}  # buckets of several sizes may hold the same gradients
            for scheme, nbytes in self._schemes(plan_candidate.strategy):
                simulation = plan_candidate.simulation.with_reduction(scheme, nbytes)
                distinct.setdefault((scheme, simulation.chunking), simulation)
            variants = [
                PlanCandidate(plan_candidate.name, simulation, plan_candidate.optimal, plan_candidate.indices)
                for simulation in distinct.values()
            ]
            self._variants[key] = sorted(variants, key=lambda variant: variant.seconds)
        return self._variants[key]

    def least_memory(self, plan_candidate: PlanCandidate, kinds: Collection[str], enough: float) -> float:
        """Return an estimate of the least memory with the same cuts [B].

        Outputs of layers of `kinds` are computed again if it is more than `enough` without that.
        """
        least: float = min(variant.memory_bytes for variant in self.variants(plan_candidate))
        if kinds and least > enough:  # else it is not needed, and takes as long as a simulation
            keeping = plan_candidate.simulation.keeping(kinds)
            least += keeping.least - keeping.most
        return least

    def allows(self, strategy: Strategy, scheme: Scheme) -> bool:
        """Return whether a scheme is among those to try for a strategy."""
        return any(scheme == allowed for allowed, _ in self._schemes(strategy))

    def add_recomputed(self, plan_candidate: PlanCandidate, simulation: Simulation) -> PlanCandidate:
        """Store and return the strategy of `simulation`: the cuts of `plan_candidate`, with outputs computed again."""
        recomputed = PlanCandidate(plan_candidate.name, simulation, indices=plan_candidate.indices)
        self._variants[self.cuts(plan_candidate.strategy)] = sorted(
            [*self.variants(plan_candidate), recomputed], key=lambda variant: variant.seconds
        )
        return recomputed

    def best_of(
        self, plan_candidate: PlanCandidate, limit: float, faster_than: float = math.inf
    ) -> PlanCandidate | None:
        """Return the fastest variant within a limit [B] if it is faster than `faster_than` [s]; else None."""
        # No scheme makes a step shorter than its passes, so most strategies need no variants.
        if plan_candidate.simulation.computing >= faster_than:
            return None
        for variant in self.variants(plan_candidate):
            # Variants are sorted by time, so the others are slower still.
            if variant.seconds >= faster_than:
                return None
            if variant.fits(limit):
                return variant
        return None

    def fastest(self, limit: float = math.inf) -> PlanCandidate | None:
        """Return the fastest strategy within a limit [B], under any scheme; None if nothing fits."""
        best: PlanCandidate | None = None
        # By the lower bound of the time, so that most of the later ones need no variants.
        for plan_candidate in sorted(self, key=lambda other: other.simulation.computing):
            best = self.best_of(plan_candidate, limit, math.inf if best is None else best.seconds) or best
        return best

    def few(self, limit: float, count: int) -> list[PlanCandidate]:
        """Return at most `count` strategies, the fastest with different cuts that fit into `limit` [B]."""
        fastest: list[PlanCandidate] = []
        for plan_candidate in sorted(self, key=lambda other: other.simulation.computing):
            slowest = fastest[-1].seconds if len(fastest) == count else math.inf
            # The lower bounds increase, so no later strategy is among the fastest.
            if plan_candidate.simulation.computing >= slowest:
                break
            best = self.best_of(plan_candidate, limit, slowest)
            if best is not None:
                fastest = sorted([*fastest, best], key=lambda candidate: candidate.seconds)[:count]
        return fastest

    def leanest(self) -> PlanCandidate:
        """Return the strategy, under any scheme, that needs the least memory."""
        return min(
            (variant for plan_candidate in self for variant in self.variants(plan_candidate)),
            key=lambda candidate: candidate.memory_bytes,
        )


#: Number of sizes of the first of two chunks to try in networks with little pooling.
SIZES = 4
#: Layers per chunk of host_accumulate that a plan may choose; a run searches more finely.
CHUNKS = (1, 3, 9, 20)


def candidate_schemes(network: Network, strategy: Strategy, batch: int) -> list[Scheme]:
    """Return the schemes to try during training, the simplest first. Pure arithmetic.

    These are buckets, and two chunks of several sizes, each with the gradients of the first 0, 1, ... dense layers
    replicated, as long as that saves traffic (:func:`halograd.layers.reduction_chunks.replicable_layers`).
    """
    most = len(replicable_layers(strategy, network, batch))
    sizes = first_chunks(network)
    return [
        replace(scheme, replicated_dense=f)
        for f in range(most + 1)
        for scheme in (Scheme("bucketed"), *(Scheme("two_chunks", first_layers=k) for k in sizes))
    ]


def planned_schemes(
    network: Network, strategy: Strategy, batch: int, machine: Machine, without: Collection[str] = ()
) -> list[Scheme]:
    """Return the schemes that a plan may choose: `candidate_schemes`, and those that a run uses only if planned.

    Parameters
    ----------
    without
        Names of schemes that the run cannot use.
    """
    schemes = candidate_schemes(network, strategy, batch)
    replicated = sorted({scheme.replicated_dense for scheme in schemes})
    schemes += [Scheme(name, replicated_dense=f) for name in ("per_layer", "sharded") for f in replicated]
    if machine.devices_per_node > 1:  # ranks share memory
        schemes.append(Scheme("hierarchical"))
        schemes += [Scheme("host_accumulate", chunk=n) for n in CHUNKS]
    return [scheme for scheme in schemes if scheme.name not in without]


def first_chunks(network: Network) -> list[int]:
    """Return promising numbers of layers in the first of two chunks, in increasing order.

    In backward order, these chunks end before a pooling layer, as in Lee et al. 2017, Section IV-C4 (3, 6, 9 and 12 of
    VGG-A). If there are fewer than three of them, one to four fifths of the number of layers are added. Layers of the
    kind "other", such as norms, do not count.

    >>> from halograd.models import build
    >>> first_chunks(build("vgg_a"))
    [3, 6, 9, 12]
    """
    # Backward order: the gradients of the last layers are complete first.
    counted = [kind for kind in reversed(kinds_of(network).values()) if kind != "other"]
    firsts = {i for i, kind in enumerate(counted) if kind == "pooling" and 0 < i < len(counted) - 2}
    if len(firsts) < 3:
        firsts |= {len(counted) * i // (SIZES + 1) for i in range(1, SIZES + 1)} - {0}
    return sorted(firsts)


def rank_schemes(
    network: Network,
    strategy: Strategy,
    batch: int,
    machine: Machine,
    times: KernelTimes,
    schemes: Sequence[Scheme],
    training: Training | None = None,
    ranks: int | None = None,
) -> dict[Scheme, float]:
    """Return the predicted time of a step with each scheme [s], the fastest first; ties keep their order.

    Parameters
    ----------
    strategy
        Strategy that defines the cuts; its own scheme does not matter.
    machine, times, training, ranks
        As for :func:`halograd.perfmodel.cost.simulate`.
    """
    training = training or Training()
    pricing = Pricing(NetworkModel(machine), times, training.dtype)
    whole = Simulation(network, strategy, batch, pricing, training, ranks)
    # The layers are priced once; a scheme only changes the sums of gradients.
    priced = {scheme: whole.with_reduction(scheme).step_seconds for scheme in schemes}
    return dict(sorted(priced.items(), key=lambda item: item[1]))


def shortlist(schemes: Sequence[Scheme]) -> list[Scheme]:
    """Return a few typical schemes of `candidate_schemes`, to try without a prediction.

    These are buckets, and two chunks of a medium size, each without and with the most replicated dense layers.
    """
    most = max(s.replicated_dense for s in schemes)
    sizes = sorted({s.first_layers for s in schemes if s.first_layers})
    # A slice, which is empty if there are no sizes.
    middle = sizes[len(sizes) // 2 : len(sizes) // 2 + 1]
    preferred = [Scheme("bucketed"), *(Scheme("two_chunks", first_layers=k) for k in middle)]
    return [replace(scheme, replicated_dense=f) for f in sorted({0, most}) for scheme in preferred]
