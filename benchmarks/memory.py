"""Peak memory per rank of the mesh-tangling 2K model, one sample cut along the height, against the prediction.

    python benchmarks/memory.py
    python benchmarks/memory.py --resolution 512 --ranks 1,2,4

For each number of ranks, one training step (SGD with momentum) runs. ``measured`` is the rank's peak of resident memory
(VmHWM, shared segments included) minus that with all libraries loaded, before the network was compiled; ``predicted``
is the sum of `Executor.predicted_bytes`; both for the rank that needs most. ``deviation = measured / predicted - 1``.
Without ``--resolution`` the samples are 2048 x 2048, halved until all ranks together fit this machine.
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
from halograd.models import mesh_2k

_PROGRAM = Path(__file__).resolve().parent / "memory_ranks.py"
#: Share of the available memory that may be used.
SHARE = 0.8


def available_bytes() -> int:
    """Return the memory that is free or can be freed [B]."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError("expected MemAvailable in /proc/meminfo, got none; this needs Linux")


def rough_bytes(resolution: int) -> float:
    """Estimate the memory of one sample on one rank: all activations and three gradients of the largest [B]."""
    elements = [math.prod(row[2]) for row in mesh_2k(resolution=resolution).rows()]
    return 4.0 * (sum(elements) + 3 * max(elements))


def fitting_resolution() -> int:
    """Return the largest resolution of 2048, 1024, ... whose sample fits into memory."""
    resolution = 2048
    while rough_bytes(resolution) > SHARE * available_bytes() and resolution > 64:
        resolution //= 2
    return resolution


def measure(ranks: int, resolution: int) -> list[dict[str, Any]]:
    """Run one step under MPI; return the results of each rank.

    Raises
    ------
    EntryError
        If the job fails.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    spec = {"model": {"resolution": resolution}, "threads": threads}
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"}
    command = [*launcher(ranks), sys.executable, str(_PROGRAM), json.dumps(spec)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise EntryError(f"{ranks} rank(s) failed with exit code {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def row(results: list[dict[str, Any]], alone: float) -> str:
    """Return one line of the table; `alone` is the peak of one rank [B]."""
    ranks = len(results)
    measured = max(f["measured"] for f in results)
    predicted = max(sum(f["predicted"].values()) for f in results)
    numbers = (f"{b / 2**20:>12.1f}" for b in (measured, predicted))
    return f"{ranks:>5}{''.join(numbers)}{100 * (measured / predicted - 1):>11.1f} %{measured * ranks / alone:>16.3f}"


def main(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "1,2,4",
    resolution: Annotated[int, typer.Option(min=0, help="Of the samples; 0 for the largest that fits.")] = 0,
    out: Annotated[str, typer.Option(help="Write what was measured as JSON there.")] = "",
) -> None:
    """Compare the peak memory per rank with the prediction of the compile step."""
    size = resolution or fitting_resolution()
    print(f"mesh_2k at {size} x {size} x 18, one sample, float32; MiB per rank", flush=True)
    print(f"{'ranks':>5}{'measured':>12}{'predicted':>12}{'deviation':>13}{'times P, to 1':>16}", flush=True)
    results: list[list[dict[str, Any]]] = []
    try:
        for n in map(int, ranks.split(",")):
            results.append(measure(n, size))
            # Relative to one rank, or to the fewest that were requested.
            first = results[0]
            print(row(results[-1], max(f["measured"] for f in first) * len(first)), flush=True)
    except EntryError as error:
        print(f"memory: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if out:
        Path(out).write_text(json.dumps({"resolution": size, "ranks": results}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
