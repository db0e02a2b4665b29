"""Share of communication that overlaps with computation, on an emulated network.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --quick

A chain of 3 x 3 convolutions is trained on 2 and 4 ranks over a network (transport ``emulated``) on which a message
takes ``alpha + beta * bytes`` of wall-clock time and no CPU. alpha and beta are chosen so that the messages of a layer
take a given share (``--share``) of its forward time, or the sums of the gradients that share of the backward time. Per
phase::

    hidden = 1 - (T_overlap - T_compute) / T_comm

``T_overlap``   time of the phase on that network, on the slowest rank, all ranks starting together (median);
``T_compute``   the same with the same kernels on a network without delay (alpha = beta = 0);
``T_comm``      sum over the exchanges of the phase of the time of their longest message, and over the all-reduces
                of the time of a ring: the wait if nothing were hidden.

``halo``        forward and backward separately, cut along height, and along height and width, with both halo
                algorithms; gradients are summed after the phases. In backward both algorithms hide the halo of `dy`.
``all-reduce``  whole steps in the steady state, samples cut, one bucket per layer.

Processors: ``real`` ranks compute, each on its own core. ``paced`` ranks sleep for the time that each convolution would
take on a separate device, so that four of them fit on two cores: this measures the schedule, not the kernels.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.contestants import EntryError, launcher

_PROGRAM = Path(__file__).resolve().parent / "overlap_ranks.py"

#: Work of a rank. Paced: 16 x 16 positions, 5 ms per forward kernel.
REAL = {"rate": 0, "extent": 256, "channels": 64, "layers": 6, "backend": "onednn"}
QUICK = {**REAL, "extent": 64, "channels": 16, "layers": 4}
PACED = {"rate": 2 * 9 * 8 * 8 * 16 * 16 / 5e-3, "extent": 32, "channels": 8, "layers": 6, "backend": "numpy"}

CUTS: tuple[tuple[str, dict[str, int]], ...] = (
    ("halo", {"height": 2}),
    ("halo", {"height": 4}),
    ("halo", {"height": 2, "width": 2}),
    ("allreduce", {"sample": 2}),
    ("allreduce", {"sample": 4}),
)


def measure(what: str, parts: dict[str, int], work: dict[str, Any], share: float, repeats: int) -> dict[str, Any]:
    """Run one cut under MPI and return the results of rank 0.

    Raises
    ------
    EntryError
        If the job fails.
    """
    ranks = math.prod(parts.values())
    spec = {"what": what, "parts": parts, "share": share, "repeats": repeats, "batch": parts.get("sample", 1), **work}
    if what == "allreduce":
        spec["extent"] = max(16, work["extent"] // 2)
    elif work["rate"]:
        # Every rank computes 16 x 16 positions, or as many in another shape.
        spec["extent"] = 16 * 2 if ranks == 4 else 24
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [*launcher(ranks), sys.executable, str(_PROGRAM), json.dumps(spec)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise EntryError(f"{what} on {parts} failed with exit code {done.returncode}\n{done.stderr[-2000:]}")
    return {"what": what, "parts": parts, "processor": "paced" if work["rate"] else "real"} | json.loads(done.stdout)


def rows(result: dict[str, Any]) -> list[tuple[str, ...]]:
    """Return lines of the table for one cut: per phase and algorithm times [ms] and the hidden share."""
    lines = []
    cut = " x ".join(f"{axis} {n}" for axis, n in result["parts"].items())
    for name, phases in result["found"].items():
        algorithm, _, network = name.partition(" ")
        if network != "slow":
            continue
        for phase, slow in phases.items():
            compute = result["found"][f"{algorithm} ideal"][phase]["seconds"]
            communication = slow[result["what"]]
            hidden = 1 - (slow["seconds"] - compute) / communication
            times = (f"{1e3 * t:.2f}" for t in (compute, communication, slow["seconds"]))
            label = (result["what"], cut, result["processor"], algorithm, phase)
            lines.append((*label, *times, f"{100 * hidden:.1f} %"))
    return lines


def table(results: list[dict[str, Any]]) -> str:
    """Return the table of all cuts."""
    head = ("what", "cut", "processor", "algorithm", "phase", "T_compute", "T_comm", "T_overlap", "hidden")
    lines = [head, *(row for result in results for row in rows(result))]
    widths = [max(len(line[c]) for line in lines) for c in range(len(head))]
    text = [
        "  ".join(v.ljust(w) if c < 5 else v.rjust(w) for c, (v, w) in enumerate(zip(line, widths))) for line in lines
    ]
    return "\n".join([text[0] + "   [ms]", *text[1:]])


def main(
    share: Annotated[float, typer.Option(min=0.01, help="Communication as a share of the work.")] = 0.4,
    repeats: Annotated[int, typer.Option(min=1, help="Repetitions, of which medians are taken.")] = 15,
    quick: Annotated[bool, typer.Option("--quick", help="Small and short: to see that it works.")] = False,
    out: Annotated[str, typer.Option(help="Write what was measured as JSON there.")] = "",
) -> None:
    """Print how much of halo exchange and all-reduce is hidden on an emulated network."""
    results = []
    cores = len(os.sched_getaffinity(0))
    try:
        for what, parts in CUTS:
            real = [QUICK if quick else REAL] if math.prod(parts.values()) <= cores else []
            for work in (*real, PACED):
                results.append(measure(what, parts, work, share, 3 if quick else repeats))
    except EntryError as error:
        print(f"overlap: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    print(table(results))
    if out:
        Path(out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
