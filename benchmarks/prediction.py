"""Comparison of predicted and measured step times on this machine, and of chosen plans and fixed strategies.

    python benchmarks/prediction.py                    every grid of 1, 2 and 4 ranks, and six emulated networks
    python benchmarks/prediction.py --kind plans       the planner's choice against the four baselines
    python benchmarks/prediction.py --out FILE --minutes 4 --resume      a part of it; again until nothing is missing

Each job profiles messages and layers, and measures steps of all strategies in turn. If ranks share cores, the model
multiplies the times of layers by the ranks per core (`perfmodel/profile/cache.py`). Networks during whose measurement
other processes used more than `DISTURBED` cores are not counted, and `--resume` measures them again.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
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
#: Errors above this are counted.
FAR = 0.15
#: Cores that other processes may use during a measurement.
DISTURBED = 0.1

Row = dict[str, Any]


def _setting(row: Row) -> tuple[str, int, str]:
    return row["network"], row["ranks"], row["transport"]


def emulated(speeds: tuple[tuple[float, float], ...]) -> list[str]:
    """Return names of emulated transports with these alpha [s] and beta [s/B]."""
    return [f"emulated:alpha={alpha:g},beta={beta:g}" for alpha, beta in speeds]


def job(ranks: int, networks: dict[str, list[str]], kind: str, seconds: float, until: float) -> Iterator[list[Row]]:
    """Yield the rows of each network of one MPI job as it measures them; `networks` are given by transport.

    Raises
    ------
    EntryError
        If the job fails.
    """
    spec = {"networks": networks, "kind": kind, "seconds": seconds, "threads": 1, "until": until}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [*launcher(ranks), sys.executable, str(_PROGRAM), json.dumps(spec)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as done:
        assert done.stdout is not None
        yield from map(json.loads, done.stdout)
    if done.returncode:
        raise EntryError(f"{ranks} ranks failed with exit code {done.returncode}")


def errors(rows: list[Row]) -> list[float]:
    """Return the absolute values of the relative errors of the predictions, sorted."""
    return sorted(abs(row["predicted"] / row["measured"] - 1) for row in rows)


def misranked(rows: list[Row]) -> tuple[int, int]:
    """Return the number of pairs of strategies ranked wrongly, and of pairs that differ by more than `NEAR`."""
    wrong = total = 0
    for _, group in itertools.groupby(rows, key=_setting):
        for a, b in itertools.combinations(list(group), 2):
            low, high = sorted((a, b), key=lambda row: row["measured"])
            if high["measured"] > (1 + NEAR) * low["measured"]:
                total += 1
                wrong += low["predicted"] >= high["predicted"]
    return wrong, total


def summary(rows: list[Row], cores: int) -> str:
    """Return a line on errors and ranking per number of ranks, and where they run: on the node, or emulated."""
    lines = []
    for ranks, net in sorted({(row["ranks"], row["transport"] != "auto") for row in rows}):
        selected = [row for row in rows if (row["ranks"], row["transport"] != "auto") == (ranks, net)]
        deviations, (wrong, total) = errors(selected), misranked(selected)
        where = "emulated networks" if net else "the node"
        shared = f" ({ranks} ranks share {cores} cores)" if ranks > cores else ""
        lines.append(
            f"{ranks} ranks, {where}{shared}: {len(selected)} steps, error median {median(deviations):.1%}, worst "
            f"{deviations[-1]:.1%}, {sum(deviation > FAR for deviation in deviations)} above {FAR:.0%}; "
            f"{wrong} of {total} pairs that differ by more than {NEAR:.0%} ranked wrongly"
        )
    return "\n".join(lines)


def gains(rows: list[Row]) -> str:
    """Return a table of the plan's speed-up over the best baseline, per network, ranks and transport."""
    lines = [f"{'network':>14} {'ranks':>5}  {'transport':<34} {'plan ms':>9} {'best baseline':>22} {'speed-up':>9}"]
    for key, group in itertools.groupby(rows, key=_setting):
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
    node: Annotated[bool, typer.Option("--node", help="No emulated networks (grids).")] = False,
    out: Annotated[str, typer.Option(help="Write everything as JSON there, after every network.")] = "",
    resume: Annotated[bool, typer.Option(help="Measure only what is missing in --out.")] = False,
    minutes: Annotated[float, typer.Option(min=0, help="Begin no network after these.")] = 600.0,
) -> None:
    """Compare predictions, or plans, with measured steps."""
    if kind not in ("grids", "plans"):
        raise typer.BadParameter(f"expected grids or plans, got {kind!r}", param_hint="--kind")
    if node and kind == "plans":
        raise typer.BadParameter("expected --kind grids, got plans, which are measured on emulated networks only")
    if resume and not out:
        raise typer.BadParameter("expected --out with the file to continue", param_hint="--resume")
    rows: list[Row] = json.loads(Path(out).read_text())["rows"] if resume and Path(out).exists() else []
    rows = [row for row in rows if row["others"] <= DISTURBED]
    done, until = set(map(_setting, rows)), time.time() + 60 * minutes
    counts = [int(count) for count in ranks.split(",")]
    jobs = [(count, ["auto"]) for count in counts]
    if not node:
        jobs += [(count, emulated(EMULATED)) for count in counts if count == 2]
    if kind == "plans":
        jobs = [(count, emulated(WHERE_IT_MATTERS)) for count in counts if count > 1]
    try:
        for count, transports in jobs:
            missing = {t: [n for n in networks.split(",") if (n, count, t) not in done] for t in transports}
            if not any(missing.values()) or time.time() > until:
                continue
            for job_rows in job(count, missing, kind, seconds, until):
                rows += job_rows
                if out:
                    Path(out).write_text(json.dumps({"machine": describe(), "rows": rows}, indent=1) + "\n")
    except EntryError as error:
        print(f"prediction: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    quiet = [row for row in rows if row["others"] <= DISTURBED]
    if len(quiet) < len(rows):
        disturbed = f"{len(rows) - len(quiet)} of {len(rows)} rows"
        print(f"{disturbed} were disturbed by other processes; --resume measures them again")
    if rows := quiet:
        print(gains(rows) if kind == "plans" else summary(rows, len(os.sched_getaffinity(0))))


if __name__ == "__main__":
    typer.run(main)
