"""Comparison of predicted and measured step times on this machine, and of chosen plans and fixed strategies.

    python benchmarks/prediction.py                    every grid of 1, 2 and 4 ranks, and six emulated networks
    python benchmarks/prediction.py --kind plans       the planner's choice against the four baselines

Each job profiles messages and layers, and measures steps of all strategies in turn. A star marks jobs in which ranks
share cores.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import typer

from benchmarks.contestants import EntryError, launcher
from benchmarks.machine import describe

_PROGRAM = Path(__file__).with_name("prediction_ranks.py")

NETWORKS = ("mesh-256", "resnet50", "unet-128", "vgg_a", "alexnet", "inception_v3")
#: Latency [s] and inverse bandwidth [s/B] of the emulated networks.
EMULATED = ((1e-6, 1e-10), (2e-5, 1e-10), (2e-4, 1e-9), (1e-3, 1e-9), (5e-5, 1e-8), (5e-3, 1e-9))
#: Networks on which plans are compared: 200 us and 1 GB/s, and a slower one.
WHERE_IT_MATTERS = ((2e-4, 1e-9), (5e-5, 1e-8))
#: Strategies that differ by less than this need not be ranked.
NEAR = 0.10


def emulated(some: tuple[tuple[float, float], ...]) -> list[str]:
    """Return names of emulated transports with these alpha [s] and beta [s/B]."""
    return [f"emulated:alpha={alpha:g},beta={beta:g}" for alpha, beta in some]


def job(ranks: int, networks: list[str], transports: list[str], kind: str, seconds: float) -> list[dict[str, Any]]:
    """Return the rows of one MPI job.

    Raises
    ------
    EntryError
        If the job fails.
    """
    spec = {"networks": networks, "transports": transports, "kind": kind, "seconds": seconds, "threads": 1}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [*launcher(ranks), sys.executable, str(_PROGRAM), json.dumps(spec)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=3600)
    if done.returncode:
        raise EntryError(f"{ranks} ranks failed with exit code {done.returncode}")
    return json.loads(done.stdout)


def errors(rows: list[dict[str, Any]]) -> list[float]:
    """Return the absolute values of the relative errors of the predictions, sorted."""
    return sorted(abs(row["predicted"] / row["measured"] - 1) for row in rows)


def misranked(rows: list[dict[str, Any]]) -> tuple[int, int]:
    """Return the number of pairs of strategies ranked wrongly, and of pairs that differ by more than `NEAR`."""
    wrong = total = 0
    keys = ("network", "ranks", "transport")
    for _, group in itertools.groupby(rows, key=lambda row: tuple(row[k] for k in keys)):
        for a, b in itertools.combinations(list(group), 2):
            low, high = sorted((a, b), key=lambda row: row["measured"])
            if high["measured"] > (1 + NEAR) * low["measured"]:
                total += 1
                wrong += low["predicted"] >= high["predicted"]
    return wrong, total


def summary(rows: list[dict[str, Any]], cores: int) -> str:
    """Return lines on errors and ranking, separately for jobs with at most as many ranks as cores and with more."""
    lines = []
    for label, some in (
        ("as many ranks as cores", [r for r in rows if r["ranks"] <= cores]),
        ("more ranks than cores *", [r for r in rows if r["ranks"] > cores]),
    ):
        if some:
            found, (wrong, total) = errors(some), misranked(some)
            lines.append(
                f"{label}: {len(some)} steps, error median {median(found):.1%}, worst {found[-1]:.1%}; "
                f"{wrong} of {total} pairs that differ by more than {NEAR:.0%} ranked wrongly"
            )
    return "\n".join(lines)


def gains(rows: list[dict[str, Any]]) -> str:
    """Return a table of the plan's speed-up over the best baseline, per network, ranks and transport."""
    lines = [f"{'network':>14} {'ranks':>5}  {'transport':<34} {'plan ms':>9} {'best baseline':>22} {'speed-up':>9}"]
    keys = ("network", "ranks", "transport")
    for key, group in itertools.groupby(rows, key=lambda row: tuple(row[k] for k in keys)):
        by = {row["strategy"]: row["measured"] for row in group}
        plan = by.pop("plan")
        best = min(by, key=lambda name: by[name])
        other = f"{best} {1e3 * by[best]:.2f} ms"
        lines.append(f"{key[0]:>14} {key[1]:>5}  {key[2]:<34} {1e3 * plan:>9.2f} {other:>22} {by[best] / plan:>9.3f}")
    return "\n".join(lines)


def main(
    kind: Annotated[str, typer.Option(help="grids or plans.")] = "grids",
    networks: Annotated[str, typer.Option(help="Separated by commas.")] = ",".join(NETWORKS),
    ranks: Annotated[str, typer.Option(help="Separated by commas.")] = "1,2,4",
    seconds: Annotated[float, typer.Option(min=0.05, help="Of steps per strategy.")] = 2.0,
    out: Annotated[str, typer.Option(help="Write everything as JSON there.")] = "",
) -> None:
    """Compare predictions, or plans, with measured steps."""
    if kind not in ("grids", "plans"):
        raise typer.BadParameter(f"expected grids or plans, got {kind!r}", param_hint="--kind")
    names, cores = networks.split(","), len(os.sched_getaffinity(0))
    rows: list[dict[str, Any]] = []
    try:
        for count in map(int, ranks.split(",")):
            if kind == "plans":
                rows += job(count, names, emulated(WHERE_IT_MATTERS), "plans", seconds) if count > 1 else []
                continue
            transports = ["auto"] + (emulated(EMULATED) if count == 2 else [])
            rows += job(count, names, transports, "grids", seconds)
    except EntryError as error:
        print(f"prediction: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(gains(rows) if kind == "plans" else summary(rows, cores))
    if out:
        Path(out).write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
