"""Regret of plans on machines that differ from the described one.

    python benchmarks/plan_regret.py
    python benchmarks/plan_regret.py --only resnet50 --robust
    python benchmarks/plan_regret.py --robust --update

A case is a network on a number of ranks of a machine, of which one quantity (latency, launch time, rate of arithmetic)
is 3 x or 1/3 of what the machine file has: 4 networks, 3 numbers of ranks and machines, 6 variations, 72 cases. The
first column of the output is the described machine itself.

The regret is the step of the plan for the described machine, simulated on the varied one, relative to the step of a
*reference*: the fastest strategy that any search has found there until now. The file `REFERENCES` has them, so a better
search does not make the regrets of all plans larger, and a slower one does not make them smaller. A plan that is faster
than the reference has a negative regret; the last line counts such references, and ``--update`` replaces them. The
second line of the summary has the regrets relative to the fastest of the references and of this run.

A run compares the plans of the described machine and of its variations, and with ``--robust`` also the plan of
``halograd plan --robust`` and the best strategies that it has found for each variation. The row "seen" has the one of
them with the smallest largest regret.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
from halograd.perfmodel.robust import RobustPlan, VariedMachine, plan_robust, variations
from halograd.schema import build as read

#: File of references: the fastest known strategy of each network, number of ranks and varied machine.
REFERENCES = Path(__file__).parent / "results" / "plan-references.json"
#: Relative difference below which times are equal.
ROUNDING = 1e-9

#: Networks with their options and samples; ranks and machines.
NETWORKS = {
    "mesh_1k": ({"resolution": 512}, 4),
    "resnet50": ({}, 32),
    "vgg_a": ({}, 16),
    "unet3d": ({"resolution": 64}, 2),
}
MACHINES = ((8, "dgx-h100"), (16, "lassen"), (64, "p100-cluster"))


class Cell:
    """A network on a number of ranks of a machine and of its variations; the machine itself comes first."""

    def __init__(self, model: str, ranks: int, machine: str) -> None:
        settings, self.batch = NETWORKS[model]
        self.name, self.ranks = f"{model} on {ranks} x {machine}", ranks
        self.network, self.machine = build(model, **settings), Machine.load(machine)
        self.machines = list(variations(self.machine, RooflineTimes(self.machine)))
        self.keys = [f"{self.name}, {one.name or 'as described'}" for one in self.machines]

    def plan(self, one: VariedMachine) -> Strategy:
        """Return the plan for one of the machines."""
        return plan_network(self.network, self.batch, self.ranks, one.machine, one.times).strategy

    def robust(self) -> RobustPlan:
        """Return the robust plan for the machine."""
        return plan_robust(self.network, self.batch, self.ranks, self.machine, self.machines[0].times)

    def steps(self, strategies: Sequence[Strategy], machines: Sequence[VariedMachine]) -> NDArray[np.float64]:
        """Return the steps of strategies on machines, ``[strategies, machines]`` [s]."""
        pricings = [Pricing(NetworkModel(one.machine), one.times, best_halo=True) for one in machines]
        arguments = self.batch, pricings[0], Training(), self.ranks
        # The program of a strategy is lowered once for all machines.
        whole = [Simulation(self.network, strategy, *arguments) for strategy in strategies]
        return np.array([[one.on(pricing).step_seconds for pricing in pricings] for one in whole])

    def references(self, known: Mapping[str, Any]) -> NDArray[np.float64]:
        """Return the steps of the references, each on its own machine [s]; ``inf`` without a reference.

        They are simulated again, so that a change of the cost model changes them too.
        """
        seconds = np.full(len(self.machines), np.inf)
        for i, (key, one) in enumerate(zip(self.keys, self.machines)):
            if key in known:
                seconds[i] = self.steps([unpacked(known[key], self.network)], [one])[0, 0]
        return seconds


def main() -> None:
    """Print the regret of each case, and the median, 90th percentile and maximum."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="Part of the name of a network.")
    parser.add_argument("--robust", action="store_true", help="Robust plans.")
    parser.add_argument("--update", action="store_true", help="Replace references that a found strategy beats.")
    parser.add_argument("--references", type=Path, default=REFERENCES, help="File of references.")
    options = parser.parse_args()
    known = json.loads(options.references.read_text()) if options.references.exists() else {}
    improved: dict[str, dict[str, Any]] = {}
    gains: list[float] = []
    regrets: dict[str, list[NDArray[np.float64]]] = {}
    cpu = dict.fromkeys(("plan", "robust"), 0.0)
    for model, (ranks, machine) in itertools.product([m for m in NETWORKS if options.only in m], MACHINES):
        cell = Cell(model, ranks, machine)
        began = time.process_time()
        plans = {"plan": cell.plan(cell.machines[0])}
        cpu["plan"] += time.process_time() - began
        others = [cell.plan(one) for one in cell.machines[1:]]
        if options.robust:
            began = time.process_time()
            robust = cell.robust()
            cpu["robust"] += time.process_time() - began
            plans["robust"] = robust.plan.strategy
            others += robust.others.values()
        strategies = [*plans.values(), *others]
        steps, references = cell.steps(strategies, cell.machines), cell.references(known)
        fastest = steps.min(axis=0)
        for i in np.flatnonzero(fastest < references * (1 - ROUNDING)):
            improved[cell.keys[i]] = packed(strategies[int(steps[:, i].argmin())], cell.network)
        gains += (1 - fastest / references)[np.isfinite(references)].tolist()
        rows = steps / np.where(np.isinf(references), fastest, references) - 1
        seen = min(range(len(rows)), key=lambda number: rows[number].max())
        for kind, number in (*((kind, number) for number, kind in enumerate(plans)), ("seen", seen)):
            now = steps[number] / np.minimum(references, fastest) - 1
            regrets.setdefault(kind, []).append(np.array([rows[number], now])[:, 1:])
            print(f"{cell.name}, {kind}: " + " ".join(f"{100 * regret:6.1f}" for regret in rows[number]), flush=True)
    for kind, cells in regrets.items():
        against_references, against_all = np.concatenate(cells, axis=1)
        seconds = f"; {cpu[kind]:.1f} CPU s" if kind in cpu else ""
        print(f"regret of {kind} in {len(against_all)} cases: {quantiles(against_references)}{seconds}")
        print(f"    relative to the fastest of references and of this run: {quantiles(against_all)}")
    beaten = sum(gain > ROUNDING for gain in gains)
    most = max(gains, default=0.0)
    print(f"{len(gains)} references, {beaten} of them slower than a strategy of this run, by up to {most:.2%}")
    if options.update:
        lines = (f"{json.dumps(key)}: {json.dumps(data)}" for key, data in sorted((known | improved).items()))
        options.references.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def quantiles(regrets: NDArray[np.float64]) -> str:
    """Return the text of the median, 90th percentile and maximum of regrets."""
    parts = (("median", 0.5), ("90th percentile", 0.9), ("worst", 1.0))
    return ", ".join(f"{text} {100 * np.quantile(regrets, part):.1f} %" for text, part in parts)


def packed(strategy: Strategy, network: Network) -> dict[str, Any]:
    """Return the data of a strategy, with the number of each layer's options in the list of distinct ones."""
    layers = [dict(strategy.layers.get(name, {})) for name in network.layers]
    distinct = [own for i, own in enumerate(layers) if own not in layers[:i]]
    return {**asdict(strategy), "layers": [distinct.index(own) for own in layers], "distinct": distinct}


def unpacked(data: Mapping[str, Any], network: Network) -> Strategy:
    """Return the strategy of packed data."""
    own = {name: data["distinct"][i] for name, i in zip(network.layers, data["layers"], strict=True)}
    fields = {key: value for key, value in data.items() if key != "distinct"}
    return read(Strategy, {**fields, "layers": own}, "reference")


if __name__ == "__main__":
    main()
