"""Steps with wide values (`halograd.program.widening`) and without them, measured and predicted, on emulated networks.

    python benchmarks/wide.py
    python benchmarks/wide.py --network resnet50 --cut height=2,width=2 --alpha 2e-4

For every cut and latency, the model simulates strategies with wide values (`halograd.perfmodel.widening`). The one
that it finds fastest is measured, also where it expects no gain, in turn with the plain strategy: a block of steps
each, `ROUNDS` times. A row has the best and the median step of both, the ratios ``plain / wide`` as measured and as
predicted, and the choice of a plan. A choice is wrong if the other strategy's median is smaller by more than `NOISE`.

Ranks have one thread. If there are fewer cores than ranks, ranks that wait leave their core to others; then messages
are hidden that would not be on a real machine, and gains are smaller.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.contestants import EntryError, launcher
from benchmarks.prediction_cases import Case
from benchmarks.problems import PROBLEMS

CUTS = ("height=4", "height=2,width=2")
#: Latencies [s]: one at which wide values should win, and one at which they should lose.
ALPHAS = (2e-4, 1e-6)
ROUNDS = 5
NOISE = 0.03
#: Predicted parts of a step.
TERMS = ("forward", "backward", "halo_exposed", "statistics", "packing")


def parse_cut(text: str) -> dict[str, int]:
    """Return the parts of a cut.

    >>> parse_cut("height=2,width=2")
    {'height': 2, 'width': 2}
    """
    return {axis: int(parts) for axis, _, parts in (item.partition("=") for item in text.split(","))}


def measure(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row per cut and latency. Collective."""
    from mpi4py import MPI

    from benchmarks.prediction_ranks import Predictor, Run
    from halograd.comm import Communicator
    from halograd.kernels import get_backend
    from halograd.layers import Strategy
    from halograd.perfmodel.cost import NetworkModel, Pricing, Training
    from halograd.perfmodel.cost.simulate import Simulation
    from halograd.perfmodel.widening import MARGIN, wider

    problem, rows = PROBLEMS[spec["network"]], []
    case = Case(problem.make, problem.batch)
    backend = get_backend("onednn", threads=1)
    for alpha in spec["alphas"]:
        with Communicator(MPI.COMM_WORLD, f"emulated:alpha={alpha},beta={spec['beta']}") as comm:
            predictor = Predictor(comm, backend)
            times, network = predictor.times(case), case.make()
            pricing = Pricing(NetworkModel(predictor.machine), times, best_halo=True)

            def simulate(strategy: Strategy, network: Any = network, pricing: Pricing = pricing) -> Simulation:
                return Simulation(network, strategy, case.batch, pricing, Training(slots=1))

            for cut in map(parse_cut, spec["cuts"]):
                plain = simulate(Strategy(cut)).prediction(account=False)
                halos = {layer.name: layer.halo_algorithm for layer in plain.layers}
                base = Strategy(cut, {name: {"halo": kind} for name, kind in halos.items() if kind})
                fastest = wider(base, plain, simulate)[0]
                predicted = [plain, fastest.prediction(account=False)]
                seconds = [prediction.step_seconds for prediction in predicted]
                chosen = seconds[1] < (1 - MARGIN) * seconds[0]
                parts = {term: [prediction.total(term) for prediction in predicted] for term in TERMS}
                runs = [Run(case, comm, backend, strategy) for strategy in (base, fastest.strategy)]
                for run in runs:
                    run.steps(3)
                    run.seconds.clear()
                for _ in range(ROUNDS):
                    for run in runs:
                        comm.barrier()
                        run.steps(-(-spec["steps"] // ROUNDS))
                steps = [[comm.allreduce_scalar(taken, "max") for taken in run.seconds] for run in runs]
                for run in reversed(runs):
                    run.close()
                wide = [name for name, options in fastest.strategy.layers.items() if options.get("wide")]
                row = {"cut": cut, "alpha": alpha, "predicted": seconds, "parts": parts, "chosen": chosen, "wide": wide}
                rows.append(row | {"median": [*map(median, steps)], "best": [*map(min, steps)]})
                if comm.rank == 0:
                    print(line(rows[-1]), file=sys.stderr, flush=True)
    backend.close()
    return rows


def is_right(row: dict[str, Any]) -> bool:
    """Return whether the choice of a row does not lose against the other strategy, but for noise."""
    plain, wide = row["median"]
    return (plain / wide if row["chosen"] else wide / plain) > 1 - NOISE


def line(row: dict[str, Any]) -> str:
    """Return a row as text."""
    (plain, wide), (fast, faster), (first, second) = row["median"], row["best"], row["predicted"]
    choice, verdict = ("wide" if row["chosen"] else "plain"), ("right" if is_right(row) else "wrong")
    parts = ", ".join(f"{term} {1e3 * a:.1f} -> {1e3 * b:.1f}" for term, (a, b) in row["parts"].items())
    return (
        f"{' x '.join(f'{axis} {n}' for axis, n in row['cut'].items()):<18} {1e6 * row['alpha']:6.0f} us  "
        f"plain {1e3 * plain:7.2f} (best {1e3 * fast:7.2f}) ms  wide {1e3 * wide:7.2f} ({1e3 * faster:7.2f}) ms  "
        f"ratio {plain / wide:.3f} (best {fast / faster:.3f})  predicted {1e3 * first:7.2f} / {1e3 * second:7.2f} ms = "
        f"{first / second:.3f}  {len(row['wide'])} layers wide; plan: {choice}, {verdict}\n"
        f"{'':18} predicted parts [ms]: {parts}"
    )


def main(
    network: Annotated[str, typer.Option(help=f"One of {', '.join(PROBLEMS)}.")] = "mesh-256",
    cut: Annotated[list[str] | None, typer.Option(help="Cut, as height=2,width=2; may be repeated.")] = None,
    alpha: Annotated[list[float] | None, typer.Option(help="Latency of a message [s]; may be repeated.")] = None,
    beta: Annotated[float, typer.Option(help="Inverse bandwidth [s/B].")] = 1e-10,
    steps: Annotated[int, typer.Option(help="Steps of each strategy.")] = 40,
    output: Annotated[Path | None, typer.Option(help="File for the results (JSON).")] = None,
) -> None:
    """Measure and print one row per cut and latency."""
    cut, alpha = cut or list(CUTS), alpha or list(ALPHAS)
    ranks = {math.prod(parse_cut(text).values()) for text in cut}
    if len(ranks) != 1:
        raise typer.BadParameter(f"--cut: expected cuts over one number of ranks, got {sorted(ranks)}")
    spec = {"network": network, "cuts": cut, "alphas": alpha, "beta": beta, "steps": steps}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [*launcher(ranks.pop()), sys.executable, str(Path(__file__).resolve()), json.dumps(spec)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=1200)
    if done.returncode:
        raise EntryError(f"{network} failed with exit code {done.returncode}")
    rows = json.loads(done.stdout)
    print(f"{sum(not is_right(row) for row in rows)} of {len(rows)} choices are wrong")
    if output is not None:
        output.write_text(done.stdout)


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        from mpi4py import MPI

        rows = measure(json.loads(sys.argv[1]))
        if MPI.COMM_WORLD.rank == 0:
            print(json.dumps(rows, indent=1))
    else:
        typer.run(main)
