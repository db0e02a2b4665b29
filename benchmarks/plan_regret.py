"""Regret of plans on machines that differ from the described one.

    python benchmarks/plan_regret.py
    python benchmarks/plan_regret.py --only resnet50 --robust

A case is a network on a number of ranks of a machine, of which one quantity (latency, launch time, rate of arithmetic)
is 3 x or 1/3 of what the machine file has: 4 networks, 3 numbers of ranks and machines, 6 variations, 72 cases. The
regret is the step of the plan for the described machine, simulated on the varied one, relative to the fastest step of
all strategies that were seen there; the first column is the regret on the described machine. These strategies are the
plans of the described machine and of its variations, and with ``--robust`` also the plan of ``halograd plan --robust``
and the best strategies that it has found for each variation. The row "seen" has the one of them with the smallest
largest regret.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.append(str(Path(__file__).resolve().parent.parent))

from halograd.layers import Network, Strategy
from halograd.models import build
from halograd.perfmodel.cost import NetworkModel, Pricing, Training
from halograd.perfmodel.cost.simulate import Simulation
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.predict import plan_network
from halograd.perfmodel.robust import VariedMachine, plan_robust, variations

#: Networks with their options and samples; ranks and machines.
NETWORKS = {
    "mesh_1k": ({"resolution": 512}, 4),
    "resnet50": ({}, 32),
    "vgg_a": ({}, 16),
    "unet3d": ({"resolution": 64}, 2),
}
MACHINES = ((8, "dgx-h100"), (16, "lassen"), (64, "p100-cluster"))


def main() -> None:
    """Print the regret of each case, and the median, 90th percentile and maximum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="Part of the name of a network.")
    parser.add_argument("--robust", action="store_true", help="Robust plans.")
    options = parser.parse_args()
    regrets: dict[str, list[float]] = {}
    cpu = dict.fromkeys(("plan", "robust"), 0.0)
    for model, (settings, batch) in NETWORKS.items():
        for ranks, name in MACHINES if options.only in model else ():
            network, machine = build(model, **settings), Machine.load(name)
            machines = list(variations(machine, RooflineTimes(machine)))
            began = time.process_time()
            plans = {"plan": plan_network(network, batch, ranks, machine, machines[0].times).strategy}
            cpu["plan"] += time.process_time() - began
            others = [plan_network(network, batch, ranks, one.machine, one.times).strategy for one in machines[1:]]
            if options.robust:
                began = time.process_time()
                robust = plan_robust(network, batch, ranks, machine, machines[0].times)
                cpu["robust"] += time.process_time() - began
                plans["robust"] = robust.plan.strategy
                others += robust.others.values()
            steps = _steps(network, batch, ranks, machines, [*plans.values(), *others])
            rows = steps / steps.min(axis=0) - 1
            for kind, row in (*zip(plans, rows), ("seen", min(rows, key=max))):
                regrets.setdefault(kind, []).extend(row[1:])
                print(f"{model} on {ranks} x {name}, {kind}: " + " ".join(f"{100 * r:6.1f}" for r in row), flush=True)
    for kind, found in regrets.items():
        quantiles = (("median", 0.5), ("90th percentile", 0.9), ("worst", 1.0))
        parts = ", ".join(f"{text} {100 * np.quantile(found, q):.1f} %" for text, q in quantiles)
        print(f"regret of {kind} in {len(found)} cases: {parts}" + (f"; {cpu[kind]:.1f} CPU s" if kind in cpu else ""))


def _steps(
    network: Network, batch: int, ranks: int, machines: Sequence[VariedMachine], strategies: Sequence[Strategy]
) -> NDArray[np.float64]:
    """Return the steps of strategies on machines, ``[strategies, machines]`` [s]."""
    pricings = [Pricing(NetworkModel(one.machine), one.times, best_halo=True) for one in machines]
    # The program of a strategy is lowered once for all machines.
    whole = [Simulation(network, strategy, batch, pricings[0], Training(), ranks) for strategy in strategies]
    return np.array([[one.on(pricing).step_seconds for pricing in pricings] for one in whole])


if __name__ == "__main__":
    main()
