"""Batch jobs: scripts for Slurm and for this machine, with every value quoted."""

from .quoting import parse_sweep
from .resources import CONTAINERS, LAUNCHERS, Resources, Software, parse_directives, parse_environment
from .scripts import AFTER_CRASH, KINDS, Job, Profiling, render, require_slurm, start_chain, submit_chain

__all__ = [
    "AFTER_CRASH",
    "CONTAINERS",
    "KINDS",
    "LAUNCHERS",
    "Job",
    "Profiling",
    "Resources",
    "Software",
    "parse_directives",
    "parse_environment",
    "parse_sweep",
    "render",
    "require_slurm",
    "start_chain",
    "submit_chain",
]
