"""Handing scripts to Slurm."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from halograd.errors import UserError

__all__ = ["require_slurm", "start_chain", "submit_chain"]


def require_slurm() -> None:
    """Refuse where there is no Slurm."""
    if shutil.which("sbatch") is None:
        raise UserError(
            "expected sbatch on PATH, got none; call this on a login node of the cluster, or print the script by "
            "--dry-run, or train here by --kind local"
        )


def submit_chain(script: Path, links: int = 1) -> list[str]:
    """Submit a script, or a chain of `links` jobs; their numbers. Local.

    A job of a chain starts when the one before it has ended with another code than 0. It waits for all before it:
    once one has ended with 0, what the others wait for cannot happen any more, and Slurm removes them.

    Raises
    ------
    UserError
        What sbatch says; those of a chain that it had taken are canceled.
    """
    require_slurm()
    jobs: list[str] = []
    for _ in range(links):
        waiting = [f"--dependency=afternotok:{':'.join(jobs)}", "--kill-on-invalid-dep=yes"] if jobs else []
        try:
            jobs.append(_call(["sbatch", "--parsable", *waiting, str(script)]).split(";")[0])
        except UserError:
            if jobs:
                subprocess.run(["scancel", *jobs], check=False)
            raise
    return jobs


def start_chain(script: Path) -> list[str]:
    """Run a script that submits jobs itself and prints their numbers. Local."""
    require_slurm()
    return _call(["bash", str(script)]).split()


def _call(command: list[str]) -> str:
    """What a command prints; UserError with what it says if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise UserError(f"expected {command[0]} {command[-1]} to submit a job, got: {said}")
    return done.stdout.strip()
