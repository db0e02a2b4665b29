"""Scripts of jobs, rendered from the templates in `templates/`, and their submission to Slurm."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from halograd.documents import to_toml
from halograd.errors import UserError

from .quoting import Raw, checked_line, directives, folder, word, words
from .resources import Resources, Software

__all__ = ["AFTER_CRASH", "KINDS", "Job", "Profiling", "render", "require_slurm", "start_chain", "submit_chain"]

#: Kinds of jobs, and their templates.
KINDS = {
    "train": "train.sbatch",
    "profile": "profile.sbatch",
    "plan-then-train": "plan-then-train.sh",
    "sweep": "train.sbatch",
    "local": "local.sh",
}
AFTER_CRASH = ("requeue", "stop")


@dataclass(frozen=True)
class Profiling:
    """Settings of a configuration for profiling and planning.

    Attributes
    ----------
    model, options
        Name and options of the model.
    batch
        Number of samples that are computed at once: the global batch, or a part of it.
    dtype, kernels, transport, autotune
        Values of the configuration: ``training.dtype`` and keys of ``[backend]``.
    planner, memory
        Options of `halograd plan`; None: its defaults.
    budget
        Time after which no further layer is measured [s]; None: no limit.
    nodes
        Number of nodes that take part in the measurement.
    """

    model: str
    options: Mapping[str, Any]
    batch: int
    dtype: str = "float32"
    kernels: str = "auto"
    transport: str = "auto"
    autotune: bool = False
    planner: str | None = None
    memory: str | None = None
    budget: float | None = None
    nodes: int = 1


@dataclass(frozen=True)
class Job:
    """Job, or several jobs that belong together.

    Attributes
    ----------
    name
        Name of the job; without ``/``, because the log is named after it.
    config
        The configuration's path.
    run
        Directory of the run: ``output.directory``.
    resources, software
        Resources and software of the job.
    threads
        Threads per rank.
    overrides
        ``section.key=value``, for ``--set``.
    data
        Path of the data set.
    stage
        Folder on every node to which the data set, a file or a folder, is copied under its own name; a leading
        ``$NAME`` is a variable of the job. None: the data set is not copied.
    after_crash
        ``"requeue"``: a crashed job continues from its newest checkpoint if it has written one since its start, else it
        stops; ``"stop"``: it stops.
    links
        Number of jobs of a chain; each continues where the previous one ended. 1: a single job, which may be requeued.
    settings
        Overrides of each task of a sweep, one sequence per task.
    at_most
        Tasks of a sweep that run at the same time; None: all.
    profiling
        Settings for profiling and planning.
    """

    name: str
    config: str
    run: str
    resources: Resources
    software: Software
    threads: int = 1
    overrides: Sequence[str] = ()
    data: str = ""
    stage: str | None = None
    after_crash: str = "requeue"
    links: int = 1
    settings: Sequence[Sequence[str]] = field(default_factory=tuple)
    at_most: int | None = None
    profiling: Profiling | None = None

    def __post_init__(self) -> None:
        if not checked_line("--job-name", self.name).strip() or "/" in self.name:
            raise UserError(f"--job-name: expected a name without /, which names the log too, got {self.name!a}")
        checked_line("CONFIG.toml", self.config)
        checked_line("output.directory", self.run)
        for override in self.overrides:
            checked_line("--set", override)
        if self.after_crash not in AFTER_CRASH:
            raise UserError(f"--after-crash: expected one of {', '.join(AFTER_CRASH)}, got {self.after_crash!a}")
        for name, count in (("--chain", self.links), ("--at-most", self.at_most)):
            if count is not None and count < 1:
                raise UserError(f"{name}: expected a whole number >= 1, got {count}")
        if self.stage is not None:
            checked_line("data.path", self.data)
            if not checked_line("--stage", self.stage).startswith(("/", "$")):
                raise UserError(
                    f"--stage: expected a folder of every node, such as /tmp or '$TMPDIR', got {self.stage!a}"
                )


def render(kind: str, job: Job) -> str:
    """Return the script of a job. Local.

    Raises
    ------
    UserError
        If the kind is unknown or a value cannot be rendered; the message has one line.
    """
    if kind not in KINDS:
        raise UserError(f"--kind: expected one of {', '.join(KINDS)}, got {kind!a}")
    return _RENDERERS[kind](job)


def _train(job: Job) -> str:
    return _fill("train", job, _directives(job))


def _sweep(job: Job) -> str:
    if not job.settings:
        raise UserError("--sweep: expected KEY=VALUE,VALUE,... at least once, got none")
    # Slurm's suffix %N limits the tasks that run at the same time.
    last, limit = len(job.settings) - 1, "" if job.at_most is None else f"%{job.at_most}"
    # A folder per task: runs cannot write to the same one.
    runs = [f"{job.run}/{i:03d}" for i in range(len(job.settings))]
    settings = [[*changes, f"output.directory={to_toml(run)}"] for changes, run in zip(job.settings, runs)]
    return _fill("sweep", job, _directives(job, array=f"0-{last}{limit}"), settings=settings, runs=runs)


def _profile(job: Job) -> str:
    profiling = _profiling(job)
    command = ["profile", profiling.model, "--out", f"{job.run}/machine.toml"]
    command += ["--batch", f"{profiling.batch}", "--ranks", f"{job.resources.ranks}", "--threads", f"{job.threads}"]
    command += ["--dtype", profiling.dtype]
    command += ["--kernels", profiling.kernels, "--transport", profiling.transport]
    command += ["--autotune"] * profiling.autotune
    command += [] if profiling.budget is None else ["--budget", f"{profiling.budget:g}"]
    command += _options(profiling)
    measuring = replace(job, name=f"{job.name}-profile", resources=replace(job.resources, nodes=profiling.nodes))
    # Without a signal: a profile writes no checkpoint, and keeps the times of measured layers anyway.
    options = _directives(measuring, signal=False)
    return _fill("profile", measuring, options, profile=command, machine_file=f"{job.run}/machine.toml")


def _plan_then_train(job: Job) -> str:
    profiling = _profiling(job)
    command = ["plan", profiling.model, "--machine", f"{job.run}/machine.toml", "--out", f"{job.run}/plan.json"]
    command += ["--ranks", f"{job.resources.ranks}", "--batch", f"{profiling.batch}", "--dtype", profiling.dtype]
    command += [] if profiling.planner is None else ["--planner", profiling.planner]
    command += [] if profiling.memory is None else ["--memory", profiling.memory]
    command += _options(profiling)
    # One process computes the plan, without a GPU.
    alone = replace(job.resources, nodes=1, ranks_per_node=1, gpus_per_node=0)
    planning = replace(job, name=f"{job.name}-plan", resources=alone)
    # Replaces the whole table [strategy], whose other keys are for making a plan.
    trained = replace(job, overrides=[*job.overrides, f"strategy={to_toml({'file': f'{job.run}/plan.json'})}"])
    # The template's here-documents end each script with a line feed.
    others = {"profile_script": _profile(job).rstrip("\n"), "train_script": _train(trained).rstrip("\n")}
    return _fill("plan-then-train", planning, _directives(planning, signal=False), plan=command, **others)


def _local(job: Job) -> str:
    if job.resources.nodes != 1:
        raise UserError(f"--nodes: expected 1 for a local job, got {job.resources.nodes}; use --kind train")
    if job.software.container is not None or job.stage is not None:
        name = "--stage" if job.software.container is None else "--container"
        raise UserError(f"{name}: expected none for a local job; start `mpirun` by hand, or use --kind train")
    return _fill("local", job, [])


_RENDERERS = {
    "train": _train,
    "profile": _profile,
    "plan-then-train": _plan_then_train,
    "sweep": _sweep,
    "local": _local,
}


def _profiling(job: Job) -> Profiling:
    assert job.profiling is not None
    return job.profiling


def _options(profiling: Profiling) -> list[str]:
    """Return the options of the model as options of the command line."""
    return [text for key, value in profiling.options.items() for text in ("--option", f"{key}={to_toml(value)}")]


def _directives(job: Job, array: str | None = None, signal: bool = True) -> list[tuple[str, Any]]:
    """Return the options of sbatch, in a readable order; the user's options override those of the library."""
    resources = job.resources
    directives: dict[str, Any] = {"job-name": job.name}
    if array is not None:
        directives["array"] = array
    # A task of an array has a job number of its own (%j); squeue prints %A_%a.
    directives["output"] = "%x-%j.out" if array is None else "%x-%A_%a.out"
    directives |= {"open-mode": "append", "nodes": resources.nodes, "ntasks-per-node": resources.ranks_per_node}
    directives["cpus-per-task"] = resources.cpus_per_rank
    if resources.gpus_per_node:
        directives["gpus-per-node"] = resources.gpus_per_node
    directives |= {k: v for k in ("time", "partition", "account") if (v := getattr(resources, k)) is not None}
    if signal:
        # B: to the shell of the script, which passes it on to the launcher until training has ended.
        directives["signal"] = f"B:USR1@{resources.warning}"
    # The next job of a chain continues the run, so a requeued one would train it at the same time.
    directives["no-requeue" if job.links > 1 else "requeue"] = None
    return list({**directives, **dict(resources.directives)}.items())


def _fill(kind: str, job: Job, options: Sequence[tuple[str, Any]], **more: Any) -> str:
    """Return the rendered template of a kind of job; `options` are the options of sbatch."""
    software, resources = job.software, job.resources
    enter, flags = list(software.prefix), []
    if software.container is not None and software.runtime == "pyxis":
        mounts = ",".join(f"{folder}:{folder}" for folder in software.mounted)
        flags = [f"--container-image={software.container}", f"--container-workdir={software.folder}"]
        flags.append(f"--container-mounts={mounts}")  # the last one: a script may append a folder
    elif software.container is not None:
        # --nv shows the driver in the container; the slice is empty without GPUs.
        enter += [*["--nv"][: resources.gpus_per_node], software.container]
    values = {name: getattr(job, name) for name in ("run", "overrides", "threads", "data", "stage", "links")}
    values |= {"settings": (), "after_crash": job.after_crash, "warning": resources.warning, "software": software}
    values |= {"ranks": resources.ranks, "cpus": resources.cpus_per_rank, "gpus": resources.gpus_per_node}
    values |= {"config": _path(job.config), "directives": options, "enter": enter, "container_flags": flags}
    # Normalized, because a path that ends with / or .. has no usable last part.
    values["staged"] = os.path.basename(os.path.normpath(os.path.join(software.folder, job.data)))
    # Parts of a template that do not apply leave blank lines, which the substitution merges.
    text = _environment().get_template(f"{KINDS[kind]}.j2").render({**values, **more})
    return re.sub(r"\n{3,}", "\n\n", text)


def _path(path: str) -> str:
    """Return the path, with ``./`` before it if it looks like an option."""
    return f"./{path}" if path.startswith("-") else path


@cache
def _environment() -> jinja2.Environment:
    """Return the jinja2 environment that quotes every ``{{ value }}`` for the shell."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("halograd.jobs"),
        finalize=word,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # escaping is for HTML
        comment_start_string="<#",  # {# occurs in shell code
        comment_end_string="#>",
    )
    environment.filters |= {"directives": directives, "folder": folder, "words": words, "raw": Raw}
    return environment


def require_slurm() -> None:
    """Raise UserError if there is no Slurm on PATH."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "expected sbatch on PATH, got none; call this on a login node of the cluster, or print the script by "
            "--dry-run, or train here by --kind local"
        )


def submit_chain(script: Path, links: int = 1) -> list[str]:
    """Submit a script, or a chain of `links` jobs of it; return the job IDs. Local.

    A job of a chain starts when the previous one has ended with a non-zero exit code. It depends on all previous jobs:
    after a job has ended with 0, the dependencies of later jobs cannot be satisfied, and Slurm removes these jobs.

    Raises
    ------
    UserError
        If there is no sbatch, or it fails; the message contains that of sbatch. Jobs of the chain that were submitted
        already are canceled.
    """
    require_slurm()
    jobs: list[str] = []
    for _ in range(links):
        waiting = [f"--dependency=afternotok:{':'.join(jobs)}", "--kill-on-invalid-dep=yes"] if jobs else []
        try:
            # sbatch --parsable prints NUMBER;CLUSTER if there are several clusters.
            jobs.append(_call(["sbatch", "--parsable", *waiting, str(script)]).split(";")[0])
        except UserError:
            if jobs:
                # Else jobs of an incomplete chain would run.
                subprocess.run(["scancel", *jobs], check=False)
            raise
    return jobs


def start_chain(script: Path) -> list[str]:
    """Run a script that itself submits jobs and prints their IDs; return the IDs. Local."""
    require_slurm()
    return _call(["bash", str(script)]).split()


def _call(command: list[str]) -> str:
    """Run a command and return its output; raise UserError with its message if it fails."""
    # Without an input, a command that waits for one ends instead.
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        message = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(f"expected {command[0]} {command[-1]} to submit a job, got: {message}")
    return done.stdout.strip()
