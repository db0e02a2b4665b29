"""Ranks on this machine: the launcher, commands on several ranks, and the choice of ranks and threads for its cores.

Cutting small layers does not speed them up, but several threads may. ``halograd plan --cores`` tries every split of the
cores. Each split is a separate job, like a run: it measures, plans, and trains some steps under the plan and under the
best single cut for all layers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .documents import read_json
from .errors import UserError
from .output import split_text

if TYPE_CHECKING:
    from .comm import Communicator

__all__ = [
    "CoreSplit",
    "find_mpiexec",
    "open_communicator",
    "run_ranks",
    "splits",
    "try_split",
    "try_splits",
]

# Without this, Open MPI refuses more ranks than cores: version 5 reads the first variable, version 4 the second.
ENVIRONMENT = {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def find_mpiexec() -> str:
    """Return the mpiexec next to this Python (the `mpich` wheel), else the first on PATH. Local.

    Raises
    ------
    UserError
        If there is no mpiexec.
    """
    sibling = Path(sys.executable).with_name("mpiexec")
    path = str(sibling) if sibling.exists() else shutil.which("mpiexec")
    if path is None:
        raise UserError(
            f"expected mpiexec in {sibling.parent} or on PATH, got none; pip install 'halograd[mpich]', or load an MPI"
        )
    return path


def run_ranks(mpiexec: str, ranks: int, arguments: Sequence[str], report: Callable[[str], None]) -> list[str]:
    """Run ``halograd ARGUMENTS`` on several ranks; return what was printed, line by line.

    `report` is called with each line as soon as it is printed. Other libraries compute with one thread per rank. An
    interrupt also ends the job.

    Raises
    ------
    UserError
        The job failed; `report` has received the message of the job.
    """
    command = [mpiexec, "-n", str(ranks), sys.executable, "-m", "halograd", *arguments]
    # Settings of the user have priority over those for Open MPI, but not over the threads of other libraries.
    environment = {**ENVIRONMENT, **os.environ, **dict.fromkeys(THREADS, "1")}
    lines = []
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        # One stream, so that messages and output keep their order.
        stderr=subprocess.STDOUT,
        # mpiexec forwards its standard input to rank 0, and would read that of a script which calls this command.
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        env=environment,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line.rstrip("\n"))
                report(lines[-1])
        except BaseException:
            process.terminate()  # mpiexec ends its ranks
            raise
    if process.returncode:
        raise UserError(
            f"`halograd {arguments[0]}` on {ranks} ranks: expected exit code 0, got {process.returncode}; "
            "see its message above, and `halograd doctor`"
        )
    return lines


@dataclass(frozen=True)
class CoreSplit:
    """Split of the cores into ranks and threads, with the time of a step.

    Attributes
    ----------
    ranks, threads
        Number of ranks, and threads of each.
    predicted, seconds
        Time of a step under the fastest strategy, predicted and measured [s].
    by
        Name of the fastest strategy: a planner or baseline.
    uniform
        Measured time with all layers cut in the same way over all ranks [s]; `seconds` if no such cut fits.
    """

    ranks: int
    threads: int
    predicted: float
    seconds: float
    by: str
    uniform: float


def splits(cores: int) -> list[tuple[int, int]]:
    """Return all pairs (ranks, threads of each) that use `cores` cores, the fewest ranks first.

    >>> splits(4)
    [(1, 4), (2, 2), (4, 1)]
    """
    return [(n, cores // n) for n in range(1, cores + 1) if cores % n == 0]


def try_splits(
    cores: int, tables: Mapping[str, Any], report: Callable[[str], None], begin: Callable[[int, int], None]
) -> list[CoreSplit]:
    """Try all splits of `cores` cores of this machine, one after the other; return their times. Local.

    Splits that are not possible are left out.

    Parameters
    ----------
    tables
        Tables of a configuration: model, training, backend, strategy.
    report
        Called with a line for each split that cannot be tried, and the reason.
    begin
        Called with ranks and threads before each trial.

    Raises
    ------
    UserError
        If there is no launcher, or no split can be tried.
    """
    mpiexec = find_mpiexec()
    tried_splits, refused = [], ""
    with tempfile.TemporaryDirectory(prefix="halograd-splits-") as folder:
        for ranks, threads in splits(cores):
            begin(ranks, threads)
            lines: list[str] = []
            job, result = Path(folder) / "job.json", Path(folder) / f"{ranks}.json"
            backend = {**tables.get("backend", {}), "threads": threads}
            # output.directory is a required key, but trials write nothing there.
            job.write_text(json.dumps({**tables, "backend": backend, "output": {"directory": folder}}))
            try:
                run_ranks(mpiexec, ranks, ["try-split", str(job), str(result)], lines.append)
                tried_splits.append(CoreSplit(**json.loads(result.read_text())))
            except UserError as error:
                # The job's own message; `error` only reports its exit code.
                refused = next(
                    (line.removeprefix("halograd: error: ") for line in lines if "error: " in line), f"{error}"
                )
                report(f"{split_text(ranks, threads)} cannot be tried: {refused}")
    if not tried_splits:
        raise UserError(refused)
    return tried_splits


@contextmanager
def open_communicator(transport: str) -> Iterator[Communicator]:
    """Yield a communicator of all launched ranks, or of this process alone without a launcher."""
    from .comm import Communicator
    from .comm.transport import TRANSPORTS

    # Raises the error of a wrong name here, with the option's name, on all ranks.
    TRANSPORTS.make(transport, "--transport")
    with Communicator.launched(transport) as comm:
        yield comm


def try_split(job: Path, result: Path) -> None:
    """Try one split, on the ranks that were launched, and write its times to a file. Collective.

    Parameters
    ----------
    job, result
        Paths of JSON files: a configuration to read, and a `CoreSplit` to write.
    """
    from .auto import try_run
    from .perfmodel.cuts import GRID
    from .training.config import check_config

    config = check_config(read_json(job, "job"))
    with open_communicator(config.backend.transport) as comm:
        trial = try_run(config, comm)
        if comm.rank == 0:
            seconds, threads = trial.seconds[trial.name], config.backend.threads
            # The grid is missing if no such cut fits into memory or is valid.
            uniform = trial.seconds.get(GRID, seconds)
            split = CoreSplit(comm.size, threads, trial.plan.step_seconds, seconds, trial.name, uniform)
            result.write_text(json.dumps(asdict(split)))
