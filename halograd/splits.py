"""Cores as ranks or threads: every way to use those of this machine is tried, for ``halograd plan --cores``.

Small layers do not get faster by cutting them, but may by computing them with several threads. Each split is a job of
its own, as a run would be: it measures, plans, and trains for some steps under the plan and under the best cut of all
layers alike.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .cli.output import split_text
from .documents import read_json
from .errors import UserError
from .local import find_mpiexec, run_ranks

__all__ = ["CoreSplit", "splits", "try_split", "try_splits"]


@dataclass(frozen=True)
class CoreSplit:
    """One way to use the cores, and what a step took.

    Attributes
    ----------
    ranks, threads
        Threads of each rank.
    predicted, seconds
        A step of what was the fastest, as the planner saw it, and measured [s].
    by
        Name of what was the fastest: a planner or baseline.
    alike
        Measured with all layers cut alike over all ranks [s]; of one rank the same as `seconds`.
    """

    ranks: int
    threads: int
    predicted: float
    seconds: float
    by: str
    alike: float


def splits(cores: int) -> list[tuple[int, int]]:
    """Ranks, and threads of each, that together use so many cores; the fewest ranks first.

    >>> splits(4)
    [(1, 4), (2, 2), (4, 1)]
    """
    return [(n, cores // n) for n in range(1, cores + 1) if cores % n == 0]


def try_splits(
    cores: int, tables: Mapping[str, Any], say: Callable[[str], None], begin: Callable[[int, int], None]
) -> list[CoreSplit]:
    """All splits of so many cores of this machine, tried one after the other; those that cannot be are left out. Local.

    Parameters
    ----------
    tables
        Of a configuration: model, training, backend, strategy.
    say
        Gets a line about each that cannot be tried, and why.
    begin
        Gets ranks and threads before each is tried.

    Raises
    ------
    UserError
        If there is no launcher, or none of the splits can be tried.
    """
    mpiexec = find_mpiexec()
    found, refused = [], ""
    with tempfile.TemporaryDirectory(prefix="halograd-splits-") as folder:
        for ranks, threads in splits(cores):
            begin(ranks, threads)
            lines: list[str] = []
            job, result = Path(folder) / "job.json", Path(folder) / f"{ranks}.json"
            backend = {**tables.get("backend", {}), "threads": threads}
            job.write_text(json.dumps({**tables, "backend": backend, "output": {"directory": folder}}))
            try:
                run_ranks(mpiexec, ranks, ["try-split", str(job), str(result)], lines.append)
                found.append(CoreSplit(**json.loads(result.read_text())))
            except UserError as error:
                refused = next(
                    (line.removeprefix("halograd: error: ") for line in lines if "error: " in line), f"{error}"
                )
                say(f"{split_text(ranks, threads)} cannot be tried: {refused}")
    if not found:
        raise UserError(refused)
    return found


def try_split(job: Path, result: Path) -> None:
    """One split, on the ranks that were launched; what it took is written to a file. Collective.

    Parameters
    ----------
    job, result
        A configuration, and a `CoreSplit`, as JSON.
    """
    from .auto import try_run
    from .cli.profiling import open_communicator
    from .perfmodel.cuts import GRID
    from .training.config import check_config

    config = check_config(read_json(job, "job"))
    with open_communicator(config.backend.transport) as comm:
        trial = try_run(config, comm)
        if comm.rank == 0:
            seconds, threads = trial.seconds[trial.name], config.backend.threads
            alike = trial.seconds.get(GRID, seconds)
            found = CoreSplit(comm.size, threads, trial.plan.step_seconds, seconds, trial.name, alike)
            result.write_text(json.dumps(asdict(found)))
