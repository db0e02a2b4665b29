"""Planning, explaining, predicting and writing job scripts work without mpi4py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.jobs import job_environment, new_mark
from tests.harness.limits import LIMIT
from tests.training.runs import CONFIG

BLOCKED = """
import importlib.abc, sys

class NoMPI(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "mpi4py":
            raise ImportError(f"{name}: there is no MPI here")

sys.meta_path.insert(0, NoMPI())
"""
IMPORTS = """
import importlib, pkgutil

def load(name):
    package = importlib.import_module(name)
    for found in pkgutil.iter_modules(package.__path__, name + "."):
        load(found.name) if found.ispkg else importlib.import_module(found.name)

for name in ("perfmodel", "layers", "models", "program", "lowering", "dtensor", "jobs"):
    load(f"halograd.{name}")
"""
COMMAND = """
from halograd.cli.run import run
sys.exit(run(sys.argv[1:]))
"""


def without_mpi(program: str, *arguments: object, cwd: Path | None = None) -> str:
    """Return the output of a program in a process without mpi4py."""
    command = [sys.executable, "-c", BLOCKED + program, *map(str, arguments)]
    env = job_environment(new_mark())
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=cwd, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_the_hook_blocks():
    with pytest.raises(AssertionError, match="there is no MPI here"):
        without_mpi("import mpi4py.MPI")


def test_what_planning_is_made_of_is_imported():
    without_mpi(IMPORTS)


def test_plans_are_made_explained_and_predicted(tmp_path):
    small = ("mesh", "--option", "resolution=64", "--machine", "lassen", "--batch", 2)
    plan = tmp_path / "plan.json"
    assert "step  " in without_mpi(COMMAND, "plan", *small, "--ranks", 4, "--out", plan)
    assert "cuts were examined" in without_mpi(COMMAND, "explain", plan)
    assert "kernel" in without_mpi(COMMAND, "explain", plan, "--program").lower()
    assert "efficiency" in without_mpi(COMMAND, "predict", *small, "--ranks", "2,4")
    assert "halo  " in without_mpi(COMMAND, "predict", *small, "--ranks", 4, "--grid", "height=2,width=2")


def test_a_job_script_is_written(tmp_path):
    (tmp_path / "run.toml").write_text(CONFIG.format(edge=16, channels=3, data="data.h5", out="out"))
    script = without_mpi(COMMAND, "submit", "run.toml", "--dry-run", cwd=tmp_path)
    assert script.startswith("#!/bin/bash") and "-m halograd train run.toml" in script
