"""Small, complete job descriptions, and files of a small run: configuration, data and log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from halograd.jobs import Job, Profiling, Resources, Software
from halograd.training.log import read_log

PROFILING = Profiling("mesh", {"resolution": 32, "widths": [8, 12]}, 4)


def job(**changes: Any) -> Job:
    """Return a job on 2 nodes with 2 ranks each; `changes` are for the job, its resources or its software."""
    resources = {k: changes.pop(k) for k in tuple(changes) if k in Resources.__dataclass_fields__}
    software = {k: changes.pop(k) for k in tuple(changes) if k in Software.__dataclass_fields__}
    found = Job(
        "mesh",
        "mesh.toml",
        "runs/mesh",
        Resources(nodes=2, ranks_per_node=2),
        Software("/tmp", python="python"),
        data="mesh.h5",
        profiling=PROFILING,
    )
    if resources:
        found = replace(found, resources=replace(found.resources, **resources))
    if software:
        found = replace(found, software=replace(found.software, **software))
    return replace(found, **changes)


CONFIG = """\
[model]
name = "mesh"
resolution = 32
widths = [8, 12]
convs = 1
decoder = true

[data]
path = "mesh.h5"
validation = 0.2

[strategy]
sample = 2
height = 2

[optimizer]
kind = "adamw"

[schedule]
kind = "cosine"
learning_rate = 0.01

[training]
epochs = 6
batch = 4

[output]
directory = "run"
checkpoint_steps = 2
progress = false
"""


def write_config(folder: Path) -> Path:
    """Write a smaller configuration of the mesh-tangling demo."""
    path = folder / "mesh.toml"
    path.write_text(CONFIG)
    return path


def losses(run: Path) -> dict[int, float]:
    """Return the logged losses by step."""
    path = run / "log.jsonl"
    return {entry["step"]: entry["loss"] for entry in read_log(path, "step")} if path.exists() else {}
