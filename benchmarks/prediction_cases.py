"""Networks and strategies for the comparison of predictions with measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from halograd.auto import fastest_or_first, near_baselines, rests_on
from halograd.layers import Network, Strategy
from halograd.models import build, mesh
from halograd.perfmodel.cost import Training
from halograd.perfmodel.cuts import BASELINES, baseline
from halograd.perfmodel.kernel_times import MeasuredTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.predict import plan_network

__all__ = ["CASES", "Case", "grids", "strategies"]

_WIDTHS = (32, 48, 64, 96, 128, 128)


@dataclass(frozen=True)
class Case:
    """Network with its batch.

    Attributes
    ----------
    make
        Function that returns the network.
    batch
        Samples per step.
    """

    make: Callable[[], Network]
    batch: int


#: Small enough that a step takes about 10 to 200 ms, large enough to resemble the real networks.
CASES: dict[str, Case] = {
    "mesh-256": Case(lambda: mesh(256, channels=18, widths=_WIDTHS, convs=3), 4),
    "resnet50": Case(lambda: build("resnet50", resolution=128, width=32), 4),
    "unet-128": Case(lambda: build("unet2d", resolution=128, width=32, levels=3), 4),
    "vgg_a": Case(lambda: build("vgg_a", resolution=112, width=0.25), 8),
    "alexnet": Case(lambda: build("alexnet", resolution=224, width=0.5), 8),
    "inception_v3": Case(lambda: build("inception_v3", resolution=149, width=0.5), 4),
    "mesh-tiny": Case(lambda: mesh(64, channels=3, widths=(8, 8), convs=2), 4),
}


def grids(ranks: int) -> list[dict[str, int]]:
    """Return every grid of `ranks` parts along sample, height and width."""
    cuts = []
    for sample in range(1, ranks + 1):
        for height in range(1, ranks // sample + 1):
            width, rest = divmod(ranks, sample * height)
            if not rest:
                cuts.append({"sample": sample, "height": height, "width": width})
    return cuts


def strategies(
    case: Case,
    ranks: int,
    kind: str,
    machine: Machine,
    times: MeasuredTimes,
    again: Callable[[Iterable[str]], None],
    tried: Callable[[dict[str, Strategy]], dict[str, float]],
) -> dict[str, Strategy]:
    """Return the strategies to compare, by label: every grid, or the plan and the four baselines.

    The plan is chosen as in `halograd train`: `again` measures the decisive layers once more, `tried` times steps of
    the plan and of baselines with similar predictions. Collective.
    """
    if kind == "grids":
        options = {"halo": "auto"}
        return {_label(g): Strategy(g, options=options) for g in grids(ranks) if g["sample"] <= case.batch}
    network, done = case.make(), set[str]()
    plan = plan_network(network, case.batch, ranks, machine, times)
    while works := rests_on(plan, network, machine, times, Training()).keys() - done:
        done |= works
        again(sorted(works))
        times.forget()
        plan = plan_network(network, case.batch, ranks, machine, times)
    others = {name: baseline(name, case.make(), case.batch, ranks) for name in BASELINES}
    near = {name: others[name] for name in near_baselines(plan)}
    best = fastest_or_first(tried({"plan": plan.strategy} | near)) if near else "plan"
    return {"plan": near.get(best, plan.strategy)} | others


def _label(parts: dict[str, int]) -> str:
    return " x ".join(f"{axis} {n}" for axis, n in parts.items() if n > 1) if math.prod(parts.values()) > 1 else "1"
