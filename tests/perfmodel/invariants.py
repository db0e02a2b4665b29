"""Invariants of plans, checked on random problems.

    python -m tests.perfmodel.invariants --count 500 [--contention]

* A plan is never slower than a grid that is the same for all layers, or a baseline, that fits.
* It is not slower with faster links, with faster devices, or with more memory.
* It is within 5 % as fast with the spatial axes in another order, if all links are equal. (Ranks are numbered along the
  axes in their order: which elements stay where they are when the cut changes, and which neighbors share a node,
  depends on it, in the runtime too.)
* A plan's own memory is a sufficient limit for it; a limit is respected, or rejected.

Wide values are chosen only where they save a part of the step (`MARGIN`): another plan may lose that part.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from multiprocessing import get_context

from halograd.errors import UserError
from halograd.layers import Network, Strategy
from halograd.layers.strategy import AXES
from halograd.perfmodel.cost import NetworkModel, Pricing, simulate
from halograd.perfmodel.cuts import BASELINES, baseline, grids
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.plans import Plan, Prediction
from halograd.perfmodel.predict import Planning, plan_network
from halograd.perfmodel.widening import MARGIN
from tests.perfmodel.problems import PlanningProblem, contended, faster, random_problem, stronger

#: Times and predictions closer than this are equal.
ROUNDING = 1e-6
#: What the numbering of the ranks may cost, as a part of the step.
NUMBERING = 0.05
#: Every limit of memory is so much of what the plan before took; so many are asked for.
SMALLER, LIMITS = 0.8, 3


def plan_of(problem: PlanningProblem, network: Network, machine: Machine, limit: float | None = None) -> Plan:
    """Return the plan of a problem on a machine, with a memory limit [B]."""
    times = RooflineTimes(machine)
    return plan_network(network, problem.batch, problem.ranks, machine, times, Planning(limit=limit))


def rivals(problem: PlanningProblem, network: Network) -> Iterator[tuple[str, Prediction]]:
    """Yield names and predictions of baselines and of grids that are the same for all layers."""
    pricing = Pricing(NetworkModel(problem.machine), RooflineTimes(problem.machine), best_halo=True)
    some = {name: baseline(name, network, problem.batch, problem.ranks) for name in BASELINES}
    for parts in grids(network, problem.batch, problem.ranks):
        strategy = Strategy({axis: n for axis, n in zip(AXES, parts) if n > 1})
        some["grid " + str(dict(strategy.parts))] = strategy
    for name, strategy in some.items():
        strategy.validate(network, max(strategy.ranks, 1))
        yield name, simulate(network, strategy, problem.batch, pricing, ranks=problem.ranks)


def largest(plan: Plan) -> float:
    """Return the longest time of a plan that is not slower than `plan`, but may do without its wide values [s]."""
    wide = any(options.get("wide") for options in plan.strategy.layers.values())
    return plan.step_seconds * (1 + ROUNDING) / (1 - MARGIN if wide else 1.0)


def violations(problem: PlanningProblem) -> list[str]:
    """Return the descriptions of violated invariants."""
    network, machine = problem.network(), problem.machine
    free = plan_of(problem, network, machine)
    found = [
        f"{name}: {what.step_seconds:.4g} s, the plan {free.step_seconds:.4g} s"
        for name, what in rivals(problem, network)
        if what.step_seconds < free.step_seconds * (1 - ROUNDING)
    ]
    others = {"links twice as fast": faster(machine), "devices twice as fast": stronger(machine)}
    for name, other in others.items():
        seconds = plan_of(problem, network, other).step_seconds
        if seconds > largest(free):
            found.append(f"{name}: {seconds:.4g} s, before {free.step_seconds:.4g} s")
    links = {machine.links[level] for level in ("node", "switch", "across")}
    if len(links) == 1:
        seconds = plan_of(problem, problem.network(turned=True), machine).step_seconds
        if abs(seconds / free.step_seconds - 1) > NUMBERING:
            found.append(f"axes turned: {seconds:.4g} s, before {free.step_seconds:.4g} s")
    return found + list(_of_memory(problem, network, free))


def _of_memory(problem: PlanningProblem, network: Network, free: Plan) -> Iterator[str]:
    before, limit = free, float(free.prediction.memory_bytes)
    for _ in range(LIMITS + 1):
        try:
            plan = plan_of(problem, network, problem.machine, limit)
        except UserError:
            if limit == before.prediction.memory_bytes:
                yield f"a limit of {limit:.0f} B, which a plan takes, is refused"
            return
        if plan.prediction.memory_bytes > limit:
            yield f"a limit of {limit:.0f} B is exceeded"
        if before.step_seconds > largest(plan):
            yield f"less memory: {plan.step_seconds:.4g} s, before {before.step_seconds:.4g} s"
        try:
            again = plan_of(problem, network, problem.machine, float(plan.prediction.memory_bytes))
        except UserError as error:
            yield f"its own memory as limit: {error}"
            return
        if again.step_seconds > largest(plan):
            yield f"its own memory as limit: {again.step_seconds:.4g} s, before {plan.step_seconds:.4g} s"
        before, limit = plan, plan.prediction.memory_bytes * SMALLER


def drawn(seed: int, contention: bool = False) -> PlanningProblem:
    """Return a random problem, with `contention` on a machine with shared links and stragglers."""
    problem = random_problem(seed)
    return replace(problem, machine=contended(problem.machine, seed)) if contention else problem


def _checked(seed: int, contention: bool) -> tuple[int, list[str]]:
    return seed, violations(drawn(seed, contention))


def main() -> int:
    """Check the problems of the command line; the last line reports the number of problems without violations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--contention", action="store_true", help="machines with shared links and stragglers")
    options = parser.parse_args()
    held = 0
    with get_context("spawn").Pool(options.processes) as pool:
        check = partial(_checked, contention=options.contention)
        seeds = range(options.first, options.first + options.count)
        for seed, found in pool.imap_unordered(check, seeds):
            problem = random_problem(seed)
            for text in found:
                print(f"{seed} ({problem.family}, batch {problem.batch}, {problem.ranks} ranks): {text}", flush=True)
            held += not found
    print(f"{held} of {options.count} problems held")
    return 0 if held == options.count else 1


if __name__ == "__main__":
    sys.exit(main())
