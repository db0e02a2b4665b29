"""The machine and the versions of a report."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from halograd import __version__
from halograd.cli.doctor.mpi import probe_mpi

__all__ = ["describe_machine"]


def describe_machine() -> list[tuple[str, str]]:
    """Name and value of what decides the times of a report. Local."""
    return [
        ("processor", _processor()),
        ("cores for this process", str(_cores())),
        ("memory", _memory()),
        ("system", platform.platform()),
        ("halograd", __version__),
        ("Python", platform.python_version()),
        *((finding.name, finding.value) for finding in probe_mpi() if finding.status == "ok"),
        *_versions("numpy", "h5py", "onednn-cpu-gomp"),
    ]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> str:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{total / 2**30:.1f} GiB"


def _versions(*names: str) -> Iterator[tuple[str, str]]:
    for name in names:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            yield name, "not installed"
