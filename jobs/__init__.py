"""Batch jobs: scripts for Slurm and for this machine, in which every value is quoted."""

from halograd.jobs.resources import Resources, parse_directives
from halograd.jobs.scripts import AFTER_CRASH, KINDS, Job, Profiling, render
from halograd.jobs.slurm import require_slurm, start_chain, submit_chain
from halograd.jobs.software import CONTAINERS, LAUNCHERS, Software, parse_environment
from halograd.jobs.sweeps import parse_sweep

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
