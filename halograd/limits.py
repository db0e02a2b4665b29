"""Memory and cores of the machine that this process may use: the minimum of all limits.

Containers and batch systems limit processes by control groups (versions 1 and 2), which are nested. Slurm reports its
allocation in environment variables.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath

__all__ = ["Cores", "memory_size", "usable_cores"]

ROOT = Path("/")


def memory_size(ranks: int, root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> int:
    """Return the memory [B] of one of `ranks` ranks on this node: an equal share of the smallest limit. Local.

    The limits are the memory of the node, those of this process's control groups and all their ancestors, and Slurm's
    allocation for the job on this node.

    Parameters
    ----------
    ranks
        Number of ranks on the node.
    root
        Directory of ``proc`` and ``sys``.
    environment
        Variables of the process.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for group, version in _groups(root, "memory"):
        text = _read(group / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        # Without a limit, version 1 has a number larger than any memory.
        if text.isdigit():  # not "max"
            limits.append(int(text))
    # In MiB; 0 means the whole node.
    per_node, per_cpu, cpus = (
        environment.get(f"SLURM_{name}", "") for name in ("MEM_PER_NODE", "MEM_PER_CPU", "CPUS_ON_NODE")
    )
    if per_node.isdigit() and int(per_node):
        limits.append(int(per_node) << 20)
    if per_cpu.isdigit() and cpus.isdigit() and int(per_cpu) * int(cpus):
        limits.append(int(per_cpu) * int(cpus) << 20)
    return min(limits) // ranks


@dataclass(frozen=True)
class Cores:
    """Cores that a process may use.

    Attributes
    ----------
    bound
        Numbers of the cores in its affinity mask.
    quota
        CPU time that its control groups permit, in cores, shared with other processes of these groups; infinity without
        a limit.
    task
        Number of cores that Slurm gave to this process alone; infinity without Slurm's setting.
    """

    bound: frozenset[int]
    quota: float = math.inf
    task: float = math.inf

    @property
    def count(self) -> int:
        """Number of cores that the process may use, at least 1."""
        return Cores.together([self])

    @staticmethod
    def together(processes: Sequence[Cores]) -> int:
        """Return the number of cores that processes of one host may use together, at least 1. Local.

        >>> Cores.together([Cores(frozenset({0, 1, 2, 3}), quota=2.5)] * 4)
        2
        >>> Cores.together([Cores(frozenset({0})), Cores(frozenset({1}))])
        2
        """
        bound = frozenset[int]().union(*(cores.bound for cores in processes))
        cores_given = sum(cores.task for cores in processes)
        # A quota is shared by all processes of a group, so quotas are not added; cores of a task are its own.
        return max(1, int(min(len(bound), cores_given, *(cores.quota for cores in processes))))


def usable_cores(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> Cores:
    """Return the cores that this process may use. Local.

    The limits are its affinity mask, the CPU quotas of its control groups and all their ancestors (``docker run
    --cpus``), and Slurm's cores per task (``--cpus-per-task``).

    Parameters
    ----------
    root
        Directory of ``proc`` and ``sys``.
    environment
        Variables of the process.
    """
    # macOS has no affinity masks.
    affinity = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    task = environment.get("SLURM_CPUS_PER_TASK", "")
    return Cores(frozenset(affinity), _quota(root), int(task) if task.isdigit() and int(task) else math.inf)


@cache
def _quota(root: Path) -> float:
    """Return the CPU time that the control groups of this process permit, in cores; read once per process."""
    quota = math.inf
    for group, version in _groups(root, "cpu"):
        if version == 2:
            # The file has QUOTA PERIOD; without a file, both are empty.
            time, period = (*_read(group / "cpu.max").split(), "", "")[:2]
        else:
            time, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        if time.isdigit() and period.isdigit() and int(period):  # not "max", not -1
            quota = min(quota, int(time) / int(period))
    return quota


def _read(path: Path) -> str:
    """Return the text of a file, empty if there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, int]]:
    """Yield the control groups that may limit this process, and all their ancestors, each with its version (1 or 2)."""
    mounted = root / "sys/fs/cgroup"
    # In a container, the mounted root may be the container's own group, whatever path the process reports.
    groups = {(mounted, 2, "/"), (mounted / controller, 1, "/")}
    # Lines `ID:CONTROLLERS:PATH`; `0::PATH` is the group of version 2.
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:  # if both versions are mounted, version 2 is in a separate folder
            groups |= {(mounted, 2, path), (mounted / "unified", 2, path)}
        elif controller in controllers.split(","):
            # Controllers that are mounted together have one folder (cpu,cpuacct), often with a link per controller.
            groups |= {(mounted / controller, 1, path), (mounted / controllers, 1, path)}
    for folder, version, path in sorted(groups):
        group = PurePosixPath("/", path).relative_to("/")
        if ".." in group.parts:  # outside of what this process can see
            continue
        for ancestor in (group, *group.parents):
            yield folder / ancestor, version
