"""Regret of plans on machines that differ from the described one.

    python benchmarks/plan_regret.py
    python benchmarks/plan_regret.py --only resnet50 --robust

A case is a network on a number of ranks of a machine, of which one quantity (latency, launch time, rate of arithmetic)
is 3 x or 1/3 of what the machine file has: 4 networks, 3 numbers of ranks and machines, 6 variations, 72 cases. The
regret is the step of the plan for the described machine, simulated on the varied one, relative to the step of the plan
that was made for the varied one; the first column is the loss on the described machine. With ``--robust``, plans of
``halograd plan --robust`` are compared too.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).resolve().parent.parent))

from halograd.models import build
from halograd.perfmodel.cost import NetworkModel, Pricing, Training, simulate
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.predict import plan_network
from halograd.perfmodel.robust import plan_robust, variations

#: Networks with their options and samples; ranks and machines.
NETWORKS = {
    "mesh_1k": ({"resolution": 512}, 4),
    "resnet50": ({}, 32),
    "vgg_a": ({}, 16),
    "unet3d": ({"resolution": 64}, 2),
}
PLACES = ((8, "dgx-h100"), (16, "lassen"), (64, "p100-cluster"))


def main() -> None:
    """Print the regret of each case, and the median, 90th percentile and maximum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="Part of the name of a network.")
    parser.add_argument("--robust", action="store_true", help="Robust plans.")
    options = parser.parse_args()
    regrets: dict[str, list[float]] = {}
    cpu = dict.fromkeys(("plan", "robust"), 0.0)
    for model, (settings, batch) in NETWORKS.items():
        for ranks, name in PLACES if options.only in model else ():
            network, machine = build(model, **settings), Machine.load(name)
            request, strategies = (network, batch, ranks, machine, RooflineTimes(machine)), {}
            for kind in ("plan", "robust") if options.robust else ("plan",):
                began = time.process_time()
                made = plan_robust(*request).plan if kind == "robust" else plan_network(*request)
                cpu[kind] += time.process_time() - began
                strategies[kind] = made.strategy
            some = list(variations(machine, RooflineTimes(machine)))
            best = [plan_network(network, batch, ranks, one.machine, one.times).step_seconds for one in some]
            for kind, strategy in strategies.items():
                row = []
                for one, least in zip(some, best):
                    pricing = Pricing(NetworkModel(one.machine), one.times, best_halo=True)
                    found = simulate(network, strategy, batch, pricing, Training(), ranks, account=False)
                    row.append(found.step_seconds / least - 1)
                regrets.setdefault(kind, []).extend(row[1:])
                print(f"{model} on {ranks} x {name}, {kind}: " + " ".join(f"{100 * r:6.1f}" for r in row), flush=True)
    for kind, found in regrets.items():
        quantiles = (("median", 0.5), ("90th percentile", 0.9), ("worst", 1.0))
        parts = ", ".join(f"{text} {100 * np.quantile(found, q):.1f} %" for text, q in quantiles)
        print(f"regret of {kind} in {len(found)} cases: {parts}; {cpu[kind]:.1f} CPU s")


if __name__ == "__main__":
    main()
