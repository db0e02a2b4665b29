"""`halograd generate`: the generators with a progress bar."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from halograd.comm.boot import launched_size

__all__ = ["generate_mesh_tangling"]


def generate_mesh_tangling(out: Path, resolution: int, samples: int, seed: int) -> None:
    """Write the data set and say what it is. One process does it; further ranks have nothing to do."""
    if _rank() != 0:
        return
    from halograd.data.mesh_tangling import generate

    console = Console(stderr=True)
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("blocks"), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        generate(out, resolution, samples, seed, progress=lambda n, total: bar.update(task, completed=n, total=total))
    size = out.stat().st_size / 2**20
    print(f"{out}: {samples} samples of {resolution} x {resolution} cells, seed {seed}, {size:.1f} MiB")
    sys.stdout.flush()


def _rank() -> int:
    if launched_size() is None:
        return 0
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank
