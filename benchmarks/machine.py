"""State of the machine during a benchmark: cores, CPU time, and disturbances. Linux only."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Load", "Usage", "choose_cores", "cpu_seconds", "describe", "tree"]

_TICK = 1.0 / os.sysconf("SC_CLK_TCK")


def choose_cores(count: int) -> list[int]:
    """Return `count` logical CPUs of this process's affinity, on different cores if possible. Local.

    Raises
    ------
    ValueError
        If there are fewer CPUs.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < count:
        raise ValueError(f"expected at least {count} CPUs, got {len(allowed)}; the benchmark needs {count} cores")
    first: dict[str, int] = {}
    for cpu in allowed:
        first.setdefault(_core(cpu), cpu)
    chosen = list(first.values())
    return sorted((chosen + [c for c in allowed if c not in chosen])[:count])


def _core(cpu: int) -> str:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (topology / "physical_package_id").read_text() + (topology / "core_id").read_text()
    except OSError:
        return str(cpu)


def tree(root: int) -> list[int]:
    """Return process `root` and all its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry.name))
    pids = [root]
    for pid in pids:
        pids += children.get(pid, [])
    return pids


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the CPU time of these processes, all threads, user and system [s]; 0 for ended ones."""
    total = 0
    for pid in pids:
        fields = _stat(pid)
        if fields:
            total += int(fields[11]) + int(fields[12])
    return total * _TICK


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


@dataclass
class Usage:
    """CPU usage during an interval, in cores (CPU seconds per second).

    Attributes
    ----------
    idle
        Usage by contestants that should be waiting.
    others
        Usage by all other processes, except the benchmark itself.
    stolen
        Time that the hypervisor gave to other machines.
    """

    seconds: float
    idle: float
    others: float
    stolen: float


class Load:
    """Meter of the CPU time of the whole machine since the creation of this object [s]."""

    def __init__(self) -> None:
        self.busy, self.stolen = self._read()

    @staticmethod
    def _read() -> tuple[float, float]:
        ticks = [int(v) for v in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, _, _, irq, softirq, stolen = ticks
        return (user + nice + system + irq + softirq) * _TICK, stolen * _TICK

    def since(self) -> tuple[float, float]:
        """Return the busy and the stolen CPU time since the creation of this object [s]."""
        busy, stolen = self._read()
        return busy - self.busy, stolen - self.stolen


def describe() -> dict[str, str | int]:
    """Return processor, cores and system, for the record."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {
        "processor": model,
        "cpus": os.cpu_count() or 0,
        "system": platform.platform(),
        "python": platform.python_version(),
    }
