"""`halograd submit`: submission of a configuration as a batch job."""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..documents import write_whole, writing
from ..errors import UserError
from .options import Several

if TYPE_CHECKING:
    from ..jobs import Job, Resources, Software
    from ..layers import Network
    from ..perfmodel.cost import Training
    from ..perfmodel.machine import Machine
    from ..training.config import BackendConfig, Config

__all__ = ["submit"]

_SHELL_NAME = re.compile(r"[^\w.+-]+", re.ASCII)


@dataclass(frozen=True)
class ResourceOptions:
    """Options for nodes, ranks, time and queue of a job."""

    nodes: Annotated[int, typer.Option(help="Nodes.")] = 1
    gpus_per_node: Annotated[int, typer.Option(help="GPUs of every node, for kernels = cudnn; one rank each.")] = 0
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks on every node; one per GPU if left out, or one without GPUs.")
    ] = None
    cpus_per_rank: Annotated[
        int | None, typer.Option(help="Cores of a rank; also its threads, unless backend.threads is set.")
    ] = None
    time: Annotated[str | None, typer.Option(metavar="LIMIT", help="Minutes, HH:MM:SS or D-HH:MM:SS.")] = None
    partition: Annotated[str | None, typer.Option(help="Partition of the cluster.")] = None
    account: Annotated[str | None, typer.Option(help="Account that is charged.")] = None
    sbatch: Annotated[
        Several, typer.Option("--sbatch", metavar="KEY=VALUE", help="Any other option of sbatch; repeatable.")
    ] = None
    warning: Annotated[int, typer.Option(help="Seconds before the time limit to write a checkpoint at.")] = 120

    def resources(self, threads: int) -> Resources:
        """Return the resources of the job, for ranks of `threads` threads."""
        from ..jobs import Resources, parse_directives

        return Resources(
            self.nodes,
            self.ranks_per_node if self.ranks_per_node is not None else max(1, self.gpus_per_node),
            threads if self.cpus_per_rank is None else self.cpus_per_rank,
            self.gpus_per_node,
            self.time,
            self.partition,
            self.account,
            self.warning,
            parse_directives(self.sbatch or []),
        )


@dataclass(frozen=True)
class SoftwareOptions:
    """Options for the software of a job."""

    modules: Annotated[
        Several, typer.Option("--module", metavar="NAME", help="Module to load, in this order; repeatable.")
    ] = None
    env: Annotated[Several, typer.Option("--env", metavar="KEY=VALUE", help="Environment of the job; repeatable.")] = (
        None
    )
    container: Annotated[str | None, typer.Option(metavar="IMAGE", help="Run in this container.")] = None
    bind: Annotated[
        Several,
        typer.Option(
            metavar="PATH",
            help="Path that the container shows, in addition to this folder, data and output; repeatable.",
        ),
    ] = None
    container_runtime: Annotated[str, typer.Option(help="apptainer, singularity or pyxis.")] = "apptainer"
    python: Annotated[str | None, typer.Option(metavar="PATH", help="Interpreter on the nodes; else this one.")] = None
    launcher: Annotated[str, typer.Option(help="Launcher of the ranks: srun or mpirun.")] = "srun"
    mpi: Annotated[
        str | None, typer.Option(metavar="PLUGIN", help="For `srun --mpi`: pmi2 (MPICH), pmix (Open MPI), ...")
    ] = None
    mpirun: Annotated[str | None, typer.Option(metavar="PATH", help="The mpirun to use.")] = None

    def software(self) -> Software:
        """Return the software of the job."""
        from ..jobs import Software, parse_environment

        return Software(
            _here(),
            self.python,
            self.launcher,
            self.mpi,
            self.mpirun,
            self.modules or (),
            parse_environment(self.env or []),
            self.container,
            self.container_runtime,
            self.bind or (),
        )


@dataclass(frozen=True)
class JobOptions:
    """Options for name, restarts and sweeps of a job."""

    job_name: Annotated[str | None, typer.Option(help="Name of job and log; default: the configuration's.")] = None
    stage: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Copy the data set, a file or a folder, to this folder of every node; it may begin with '$NAME/'.",
        ),
    ] = None
    chain: Annotated[int, typer.Option(help="Submit this many jobs; each continues where the previous one ended.")] = 1
    after_crash: Annotated[
        str, typer.Option(help="requeue, if there is a newer checkpoint than when the job started; or stop.")
    ] = "requeue"
    sweep: Annotated[
        Several, typer.Option(metavar="KEY=V1,V2", help="A task for every combination of values; repeatable.")
    ] = None
    at_most: Annotated[int | None, typer.Option(help="Tasks of a sweep that run at the same time.")] = None
    profile_nodes: Annotated[int, typer.Option(help="Nodes that measure, of plan-then-train and profile.")] = 1


def submit(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="The configuration of the run.")],
    requested: ResourceOptions,
    runs_with: SoftwareOptions,
    job: JobOptions,
    kind: Annotated[
        str | None,
        typer.Option(help="train, profile, plan-then-train, sweep or local; train, or sweep if --sweep is given."),
    ] = None,
    sets: Annotated[
        Several, typer.Option("--set", metavar="KEY=VALUE", help="Replace a key of the configuration; repeatable.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script, and submit nothing.")] = False,
) -> int:
    """Train on a cluster with Slurm: write a script, and submit it.

    The script is saved in the run's directory, where you can read and edit it. Before its time limit, or when it is
    preempted, the job writes a checkpoint, is requeued, and continues from the checkpoint.

    \b
    Examples:
      halograd submit mesh.toml --nodes 4 --gpus-per-node 4 --set backend.kernels=cudnn --partition gpu --dry-run
      halograd submit mesh.toml --nodes 2 --ranks-per-node 8 --cpus-per-rank 8 --module openmpi/5 --launcher mpirun
      halograd submit mesh.toml --nodes 16 --ranks-per-node 4 --cpus-per-rank 16 --kind plan-then-train
      halograd submit mesh.toml --ranks-per-node 4 --cpus-per-rank 4 --sweep training.batch=2,4 --at-most 1
      halograd submit mesh.toml --kind local --ranks-per-node 4
    """
    from ..comm.boot import launched_size
    from ..jobs import parse_sweep

    if launched_size() is not None:
        raise UserError("submit: expected to be started alone, got a launcher; the job starts its ranks itself")
    chosen = _kind(kind, job)
    loaded = _load(config, sets or [])
    threads = _threads(loaded.backend, requested.cpus_per_rank)
    # A rank gets as many threads as cores, unless the configuration sets them (`_threads`).
    overrides = [*(sets or []), *([] if threads == loaded.backend.threads else [f"backend.threads={threads}"])]
    resources, software = requested.resources(threads), runs_with.software()
    settings = parse_sweep(job.sweep or [])
    _check(config, overrides, settings, resources, chosen)
    if job.stage is not None:
        _check_stage([_load(config, [*overrides, *changes]).data.path for changes in settings or [[]]])
    if requested.cpus_per_rank is None and chosen != "local":
        _note_single_cores(loaded.backend)
    script = _job(config, loaded, job, resources, software)
    return _start(chosen, replace(script, threads=threads, overrides=overrides, settings=settings), dry_run)


# -- checks of the request ----------------------------------------------------------------------


def _kind(kind: str | None, job: JobOptions) -> str:
    from ..jobs import KINDS

    chosen = kind or ("sweep" if job.sweep else "train")
    if chosen not in KINDS:
        raise UserError(f"--kind: expected one of {', '.join(KINDS)}, got {chosen!a}")
    needs = (("--sweep", job.sweep, "sweep"), ("--at-most", job.at_most is not None, "sweep"))
    for option, used, kind_of_job in (*needs, ("--chain", job.chain != 1, "train")):
        if used and chosen != kind_of_job:
            raise UserError(f"{option}: expected --kind {kind_of_job} with it, got {chosen}")
    return chosen


def _load(path: Path, overrides: Sequence[str]) -> Config:
    from ..training.config import load_config

    return load_config(path, overrides)


def _threads(backend: BackendConfig, cpus_per_rank: int | None) -> int:
    """Return the threads of a rank: on CPUs all of its cores, unless the configuration sets them."""
    from ..kernels import BACKENDS

    stated = "threads" in backend.model_fields_set or BACKENDS[backend.kernels].on_device
    return backend.threads if stated or cpus_per_rank is None else cpus_per_rank


def _note_single_cores(backend: BackendConfig) -> None:
    from ..kernels import BACKENDS

    if not BACKENDS[backend.kernels].on_device and "threads" not in backend.model_fields_set:
        note = "every rank has one core; --cpus-per-rank N reserves N, and its kernels then use N threads"
        print(f"halograd: note: {note}", file=sys.stderr)


def _check(
    config: Path, sets: Sequence[str], settings: Sequence[Sequence[str]], resources: Resources, kind: str
) -> None:
    """Raise errors now that the job would raise after its wait in the queue; reject resources that it would not use."""
    from ..kernels import BACKENDS
    from ..perfmodel.machine import Machine
    from ..planning import check_planner
    from ..training.build import make_network, make_strategy

    checked, ranks = set[str](), resources.ranks
    # Without a sweep there is one task, without changes.
    for changes in settings or [[]]:
        loaded = _load(config, [*sets, *changes])
        # A local job reserves nothing, so there is nothing to compare with the backend unless GPUs are requested.
        if kind != "local" or resources.gpus_per_node:
            on_device = BACKENDS[loaded.backend.kernels].on_device
            resources.check_backend(loaded.backend.kernels, on_device, loaded.backend.threads)
        # Most sweeps change keys on which the cut does not depend, and making a large network takes long.
        limited = loaded.strategy.auto and loaded.strategy.memory is not None
        step = _planned_step(loaded) if limited else None
        what = repr((loaded.model, loaded.strategy, loaded.training.at_once, step))
        if what in checked:
            continue
        checked.add(what)
        network = make_network(loaded)
        # A profile has no cut, and plan-then-train makes its own.
        if kind in ("profile", "plan-then-train"):
            continue
        if loaded.strategy.auto:  # the job makes the plan
            check_planner(loaded.strategy.planner, "strategy.planner")
            if loaded.strategy.machine is not None:
                machine = Machine.load(loaded.strategy.machine)
                if step is not None:
                    _check_limit(loaded, network, machine, ranks, step)
        else:
            # Not trainable: which outputs are kept for recomputation does not matter to these checks.
            strategy = make_strategy(loaded.strategy, ranks, network, loaded.training.at_once, trainable=False)
            strategy.validate(network, ranks)
            strategy.warn_of_idle_ranks(network, loaded.training.at_once, ranks)


def _planned_step(loaded: Config) -> Training:
    """Return the settings of training that the memory of a plan depends on."""
    from ..perfmodel.cost import Training
    from ..training.build import state_slots

    training = loaded.training
    # As in `halograd.auto`, so that the check refuses what the job would refuse.
    accumulates, clips = training.accumulate > 1, training.clip_norm is not None
    return Training(training.dtype, state_slots(loaded), False, accumulates, clips, loaded.data.prefetch + 1)


def _check_limit(loaded: Config, network: Network, machine: Machine, ranks: int, step: Training) -> None:
    """Raise UserError if no plan that the job may make is within the memory limit of the configuration."""
    from ..output import working
    from ..perfmodel.kernel_times import RooflineTimes
    from ..perfmodel.predict import Planning, plan_network
    from ..planning import parse_memory

    table = loaded.strategy
    limit = parse_memory(table.memory, "strategy.memory")
    planning = Planning(table.planner, limit, training=step, recompute=table.recompute or "auto")
    with working(f"planning on {ranks} ranks within {table.memory}"):
        plan_network(network, loaded.training.at_once, ranks, machine, RooflineTimes(machine), planning)


def _check_stage(paths: Sequence[str | list[str]]) -> None:
    """Raise UserError unless the data are one file or folder that all tasks read, because only that would be copied."""
    single = paths[0]
    name = single if isinstance(single, str) else single[0] if len(single) == 1 else ""
    if any(path != single for path in paths):
        got = "one that the sweep changes"
    elif not name:
        got = f"{len(single)} of them"
    elif any(sign in name for sign in "*?[") and not os.path.exists(name):
        got = f"a pattern, {name!a}"
    else:
        return
    raise UserError(f"--stage: expected one file or folder as data.path, got {got}; leave it out, or name a folder")


def _job(config: Path, loaded: Config, job: JobOptions, resources: Resources, software: Software) -> Job:
    from ..jobs import Job, Profiling

    if not 1 <= job.profile_nodes <= resources.nodes:
        raise UserError(
            f"--profile-nodes: expected 1 to {resources.nodes}, the nodes of the job, got {job.profile_nodes}"
        )
    strategy, backend = loaded.strategy, loaded.backend
    profiling = Profiling(
        loaded.model.source,
        loaded.model.options,
        loaded.training.at_once,
        loaded.training.dtype,
        backend.kernels,
        backend.transport,
        backend.autotune,
        strategy.planner if strategy.auto else None,
        strategy.memory,
        strategy.budget,
        job.profile_nodes,
    )
    path = loaded.data.path if isinstance(loaded.data.path, str) else loaded.data.path[0]
    if software.container is not None:  # data and output outside of the job's folder must be mounted too
        every = [loaded.data.path] if isinstance(loaded.data.path, str) else loaded.data.path
        shown = [*software.binds, *map(_folder_of, every), str(Path(software.folder, loaded.output.directory))]
        software = replace(software, binds=tuple(os.path.normpath(Path(software.folder, bind)) for bind in shown))
    # The default names script and log, so unusual characters of the file's name are replaced.
    named = _SHELL_NAME.sub("-", config.stem).strip("-") or "halograd" if job.job_name is None else job.job_name
    return Job(
        named,
        str(config),
        loaded.output.directory,
        resources,
        software,
        data=path,
        stage=job.stage,
        after_crash=job.after_crash,
        links=job.chain,
        at_most=job.at_most,
        profiling=profiling,
    )


def _folder_of(path: str) -> str:
    """Return the folder that contains the data at `path`, which may be a pattern."""
    while any(sign in path for sign in "*?["):
        path = os.path.dirname(path)
    return path if os.path.isdir(path) else os.path.dirname(path)


def _here() -> str:
    """Return the working directory, with the symbolic links by which the user entered it."""
    logical = os.environ.get("PWD", "")
    # On other nodes, the target of a link may have another path.
    if logical and os.path.isabs(logical) and os.path.isdir(logical) and os.path.samefile(logical, "."):
        return logical
    return os.getcwd()


# -- submission ---------------------------------------------------------------------------------


def _start(kind: str, job: Job, dry_run: bool) -> int:
    from ..jobs import KINDS, render, require_slurm, start_chain, submit_chain

    script = render(kind, job)
    if dry_run:
        print(script, end="")
        return 0
    if kind != "local":
        require_slurm()
    if job.data and not any(glob.iglob(job.data)):
        print(f"halograd: note: data.path {job.data} does not exist here; it must exist on the nodes", file=sys.stderr)
    path = _write(Path(job.run) / f"{job.name}{Path(KINDS[kind]).suffix}", script)
    if kind == "local":
        # The new program replaces this one, and with it what Python has buffered.
        sys.stdout.flush()
        sys.stderr.flush()
        os.execvp("bash", ["bash", str(path)])  # signals (such as Ctrl-C) go to the script
    # The script of plan-then-train runs here: it submits three jobs, each after the one before.
    jobs = start_chain(path) if kind == "plan-then-train" else submit_chain(path, job.links)
    ranks, nodes = job.resources.ranks, job.resources.nodes
    several = f"jobs {', then '.join(jobs)}" if len(jobs) > 1 else f"job {jobs[0]}"
    each = "one GPU" if job.resources.gpus_per_node else f"{job.resources.cpus_per_rank} core(s)"
    print(f"submitted {several}: {ranks} rank(s) with {each} each on {nodes} node(s); script {path}")
    return 0


def _write(path: Path, script: str) -> Path:
    """Write the script; return its path. An existing, edited script is renamed."""
    with writing(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        # The user may have edited it.
        if path.exists() and path.read_text(encoding="utf-8", errors="replace") != script:
            number = 1
            while (kept := path.with_name(f"{path.name}.old{number}")).exists():
                number += 1
            path.rename(kept)
            print(f"halograd: note: the existing script is now {kept}", file=sys.stderr)
        write_whole(path, script)
    return path
