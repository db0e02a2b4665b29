"""Small, complete job descriptions for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from halograd.jobs import Job, Profiling, Resources, Software

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
