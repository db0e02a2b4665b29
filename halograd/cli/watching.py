"""`halograd status` and `halograd report`: how far a run is, and what became of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report", "status"]


def status(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN_DIR...", help="Directories of runs.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per run and line, for scripts.")] = False,
) -> int:
    """Progress, speed, time left, last checkpoint and overlap ratio of a run, from its log.

    It may be running, on whatever machine: nothing but the directory is looked at.

    \b
    Examples:
      halograd status runs/mesh
      watch halograd status runs/*
    """
    import json
    import sys

    from halograd.errors import UserError
    from halograd.report.record import read_record
    from halograd.report.status import TAIL, status_of, status_text

    code = 0
    for run in runs:
        try:
            one = status_of(read_record(run, TAIL))
        except UserError as error:
            if len(runs) == 1:
                raise
            print(f"halograd: error: {error}", file=sys.stderr)
            code = 2
        else:
            print(json.dumps(one.as_dict()) if as_json else "\n".join(status_text(one)))
    return code


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run, finished or not.")],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.html", help="The page to write; report.html of the run if left out.")
    ] = None,
    predictions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.h5", help="What `evaluate --predictions` wrote; predictions.h5 of the run if left out."
        ),
    ] = None,
) -> None:
    """One self-contained HTML page about a run: curves, predicted against measured, timeline, masks.

    \b
    Examples:
      halograd report runs/mesh
      mpiexec -n 4 halograd evaluate runs/mesh --predictions runs/mesh/predictions.h5 && halograd report runs/mesh
    """
    import mpi4py

    mpi4py.rc.initialize = False  # login nodes may not allow it
    from halograd.report.page import write_page
    from halograd.report.record import read_record

    path = run / "report.html" if out is None else out
    left_out = write_page(read_record(run), path, predictions)
    for line in left_out:
        print(f"without {line}")
    print(f"wrote {path}")
