"""Schemes of gradient reduction that are worth a try, and what a step is predicted to take with each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from ..layers import Network, Strategy
from ..layers.reduction_chunks import kinds_of, replicable_layers
from ..layers.reduction_scheme import Scheme
from .cost.layer_cost import Pricing
from .cost.simulate import Simulation, Training
from .cost.wires import Wires
from .kernel_times import KernelTimes
from .machine import Machine

__all__ = ["PricedScheme", "candidate_schemes", "first_chunks", "planned_schemes", "rank_schemes", "shortlist"]

#: Sizes of the first of two chunks that are tried where there is little pooling.
SIZES = 4
#: Layers per chunk of host_accumulate that a plan may choose; a run searches more finely.
CHUNKS = (1, 3, 9, 20)


@dataclass(frozen=True)
class PricedScheme:
    """A scheme, and the predicted time of a step with it [s]."""

    scheme: Scheme
    seconds: float


def candidate_schemes(network: Network, strategy: Strategy, batch: int) -> list[Scheme]:
    """Schemes that may be tried while training, the simplest first. Pure arithmetic.

    Buckets, and two chunks of several sizes, each with the gradients of the first 0, 1, ... dense layers replicated, as
    far as that saves traffic (:func:`halograd.layers.reduction_chunks.replicable_layers`).
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
    """Schemes that a plan may choose: those of `candidate_schemes`, and those that a run does not try by itself.

    Parameters
    ----------
    without
        Names of schemes that the run cannot have.
    """
    found = candidate_schemes(network, strategy, batch)
    replicated = sorted({scheme.replicated_dense for scheme in found})
    found += [Scheme(name, replicated_dense=f) for name in ("per_layer", "sharded") for f in replicated]
    if machine.devices_per_node > 1:  # ranks share memory
        found.append(Scheme("hierarchical"))
        found += [Scheme("host_accumulate", chunk=n) for n in CHUNKS]
    return [scheme for scheme in found if scheme.name not in without]


def first_chunks(network: Network) -> list[int]:
    """Numbers of layers in the first of two chunks that are worth a try, rising.

    Those that end before a pooling layer, as in Lee et al. 2017, Section IV-C4 (3, 6, 9 and 12 of VGG-A); where there
    are fewer than three of them, equal parts of the layers too.

    >>> from halograd.models import build
    >>> first_chunks(build("vgg_a"))
    [3, 6, 9, 12]
    """
    counted = [kind for kind in reversed(kinds_of(network).values()) if kind != "other"]
    found = {i for i, kind in enumerate(counted) if kind == "pooling" and 0 < i < len(counted) - 2}
    if len(found) < 3:
        found |= {len(counted) * i // (SIZES + 1) for i in range(1, SIZES + 1)} - {0}
    return sorted(found)


def rank_schemes(
    network: Network,
    strategy: Strategy,
    batch: int,
    machine: Machine,
    times: KernelTimes,
    schemes: Sequence[Scheme],
    training: Training | None = None,
    ranks: int | None = None,
) -> list[PricedScheme]:
    """The schemes with predicted step times, the fastest first; of equals, in the order given.

    Parameters
    ----------
    strategy
        How layers are cut; its own scheme does not matter.
    machine, times, training, ranks
        As for :func:`halograd.perfmodel.cost.simulate`.
    """
    training = training or Training()
    pricing = Pricing(Wires(machine), times, training.dtype)
    whole = Simulation(network, strategy, batch, pricing, training, ranks)
    priced = [PricedScheme(scheme, whole.with_reduction(scheme).step_seconds) for scheme in schemes]
    return sorted(priced, key=lambda p: p.seconds)


def shortlist(schemes: Sequence[Scheme]) -> list[Scheme]:
    """The few of `candidate_schemes` to measure where nothing is predicted: the ends and the middle of each choice."""
    most = max(s.replicated_dense for s in schemes)
    sizes = sorted({s.first_layers for s in schemes if s.first_layers})
    middle = sizes[len(sizes) // 2 : len(sizes) // 2 + 1]
    wanted = [Scheme("bucketed"), *(Scheme("two_chunks", first_layers=k) for k in middle)]
    return [replace(scheme, replicated_dense=f) for f in sorted({0, most}) for scheme in wanted]
