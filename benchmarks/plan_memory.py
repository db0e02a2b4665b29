"""Compare plans under memory limits with the optimum of all choices of what is computed again, on random chains.

    python benchmarks/plan_memory.py --chains 200

A chain has three to eight layers (convolutions, norms, activations, pooling) in front of a dense layer. Every choice of
kept outputs is simulated with its arena. Under ten limits between the smallest memory and that of keeping everything,
`halograd.perfmodel.predict.plan_network` is compared with the fastest choice that fits. Chains whose memory depends on
the choice by less than two percent are left out. The program ends with the number of limits under which the plan is the
optimum, with the largest excess of a step, and with the limits for which the plan found no choice that fits.
"""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).resolve().parent.parent))

import halograd as hg
from halograd.errors import UserError
from halograd.layers import Network, Strategy
from halograd.perfmodel.cost import NetworkModel, Pricing, Training
from halograd.perfmodel.cost.simulate import Simulation
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.predict import Planning, plan_network

BATCH, LIMITS = 8, 10
#: Smallest part of the memory by which choices differ, and relative difference below which times are equal.
SPREAD, ROUNDING = 0.02, 1e-9


@dataclass(frozen=True)
class Found:
    """Relative excess of a plan's step over the optimum under one limit; infinite: the plan found nothing that fits."""

    chain: int
    limit: int
    excess: float


def chain(seed: int) -> Network | None:
    """Return a random chain; None: its layers leave no rows."""
    draw = random.Random(seed)
    edge = draw.choice((64, 96, 128))
    x = hg.Input((edge, edge, draw.choice((4, 8, 16))))
    try:
        for _ in range(draw.randint(3, 8)):
            x = _layer(draw)(x)
        scores = hg.Dense(4)(hg.Flatten()(x))
        return hg.Network({"loss": hg.SoftmaxCrossEntropy()(scores, hg.Input((1,), "t", "int32"))})
    except ValueError:
        return None


def _layer(draw: random.Random) -> hg.Layer:
    kind = draw.choice(("conv", "conv", "norm", "relu", "gelu", "pool"))
    if kind == "conv":
        return hg.Conv(draw.choice((4, 8, 16, 32, 64)), kernel=draw.choice((1, 3)), stride=draw.choice((1, 1, 2)))
    return {"norm": hg.BatchNorm, "relu": hg.ReLU, "gelu": hg.GELU, "pool": lambda: hg.MaxPool(2)}[kind]()


def compared(number: int, network: Network, machine: Machine) -> Iterator[Found]:
    """Yield the excess of the plan under each limit."""
    pricing, training = Pricing(NetworkModel(machine), RooflineTimes(machine), best_halo=True), Training()
    some = [name for name, node in network.layers.items() if node.layer.recomputation != "never"]
    points = []
    for choice in itertools.product((False, True), repeat=len(some)):
        again = {name: {"recompute": "block"} for name, chosen in zip(some, choice) if chosen}
        simulation = Simulation(network, Strategy({}, layers=again), BATCH, pricing, training, 1)
        points.append((simulation.step_seconds, sum(simulation.memory.values())))
    low, high = min(nbytes for _, nbytes in points), points[0][1]
    if high - low < SPREAD * high:
        return
    for i in range(LIMITS):
        limit = low + (high - low) * i / LIMITS
        best = min(seconds for seconds, nbytes in points if nbytes <= limit)
        try:
            plan = plan_network(network, BATCH, 1, machine, RooflineTimes(machine), Planning(limit=limit))
        except UserError:
            yield Found(number, i, float("inf"))
            continue
        yield Found(number, i, plan.step_seconds / best - 1)


def main(
    chains: Annotated[int, typer.Option(help="Number of chains.")] = 200,
    first: Annotated[int, typer.Option(help="Seed of the first chain.")] = 0,
    machine: Annotated[str, typer.Option(help="A shipped machine, or a machine file.")] = "lassen",
) -> None:
    """Compare plans with the optimum."""
    found, used, began, target = list[Found](), 0, time.perf_counter(), Machine.load(machine)
    for seed in itertools.count(first):
        network = chain(seed)
        own = [] if network is None else list(compared(seed, network, target))
        used += bool(own)
        found += own
        for one in own:
            if one.excess > ROUNDING:
                print(f"chain {one.chain}, limit {one.limit}: {one.excess:+.2%}", flush=True)
        if used == chains:
            break
    exact = sum(one.excess <= ROUNDING for one in found)
    none = sum(one.excess == float("inf") for one in found)
    worst = max((one.excess for one in found if one.excess < float("inf")), default=0.0)
    print(
        f"{used} chains, {len(found)} limits: the optimum under {exact} ({exact / len(found):.1%}), nothing found "
        f"under {none}, largest excess {worst:.1%}; {time.perf_counter() - began:.0f} s"
    )


if __name__ == "__main__":
    typer.run(main)
