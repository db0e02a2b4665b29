"""Measured times on disk, by the conditions of the measurement.

A file has one line of JSON per time. Lines are appended, so that several runs may write at once. One of the conditions
is how many ranks compute on a host at the same time, and whether they share its cores (:class:`Oversubscription`).
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import platform
import time
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from halograd.documents import writing
from halograd.errors import UserError
from halograd.schema import NotNegative
from halograd.version import __version__

from ... import device as device_package
from ... import kernels as kernels_package
from ... import layers as layers_package
from ... import lowering as lowering_package
from ... import program as program_package
from ...limits import Cores, usable_cores

if TYPE_CHECKING:
    from ...comm import Communicator

__all__ = ["Conditions", "Oversubscription", "TimeCache", "cache_path", "device_name"]


@dataclass(frozen=True)
class Oversubscription:
    """Ranks that compute on a host at the same time.

    If ranks share cores (oversubscription), a duration is the CPU time of a rank multiplied by the ranks per core: wall
    time would depend on which ranks run meanwhile. This assumes that no core is idle while one of its ranks computes.

    Attributes
    ----------
    ranks
        Number of ranks on the most oversubscribed host, or, if none is, on the one with most ranks; they share its
        memory. Emulated nodes on one host count as one host.
    cores
        Number of shared cores; 0 if every thread has its own core, or the ranks compute on devices.
    """

    ranks: int = 1
    cores: int = 0

    @classmethod
    def of(cls, comm: Communicator, kernels: Any) -> Oversubscription:
        """Return the description of the most oversubscribed host of a run with a backend. Collective over `comm`."""
        return cls.among(comm.allgather_objects(_host_and_cores(kernels)), kernels.threads)

    @classmethod
    def here(cls, ranks: int, kernels: Any) -> Oversubscription:
        """Return the description of `ranks` ranks with a backend on this host. Local."""
        return cls.among([_host_and_cores(kernels)] * ranks, kernels.threads)

    @classmethod
    def among(cls, ranks: Iterable[tuple[str, Cores | None]], threads: int) -> Oversubscription:
        """Return the description of the most oversubscribed host, given the host and the cores of every rank. Local.

        If none is oversubscribed, it is that of the host with most ranks.

        Cores are None for ranks that compute on a device: these do not share cores.

        >>> Oversubscription.among([("a", Cores(frozenset({0, 1})))] * 4, threads=1)
        Oversubscription(ranks=4, cores=2)
        >>> Oversubscription.among([("a", Cores(frozenset({0}))), ("a", Cores(frozenset({1})))], threads=1)
        Oversubscription(ranks=2, cores=0)
        """
        hosts: dict[str, list[Cores | None]] = {}
        for host, cores in ranks:
            hosts.setdefault(host, []).append(cores)
        oversubscribed = []
        for cores_of_ranks in hosts.values():
            known = [cores for cores in cores_of_ranks if cores is not None]
            count = Cores.together(known) if known else 0
            # A count of 0: all ranks of the host compute on devices.
            if len(cores_of_ranks) * threads > count > 0:
                oversubscribed.append(cls(len(cores_of_ranks), count))
        most = cls(max(map(len, hosts.values())))
        return max(oversubscribed, key=lambda host: host.ranks / host.cores, default=most)

    @property
    def shares_cores(self) -> bool:
        """Whether the ranks share cores."""
        return self.cores > 0

    def clock(self) -> float:
        """Return a clock reading [s] whose differences are durations on a rank of this host. Local."""
        # The CPU time of a process includes that of all its threads.
        return time.process_time() * self.ranks / self.cores if self.shares_cores else time.perf_counter()


def _host_and_cores(kernels: Any) -> tuple[str, Cores | None]:
    """Return the host, and the cores of this process; None for the cores of a process with a device."""
    return platform.node(), usable_cores() if kernels.device.is_host else None


#: Environment variable with the folder of the cache.
CACHE_VARIABLE = "HALOGRAD_CACHE"
#: Conditions, key and three times [s] of a line.
_ENTRY = TypeAdapter(tuple[str, str, tuple[NotNegative, NotNegative, NotNegative]])
_log = logging.getLogger("halograd.perfmodel")


@dataclass(frozen=True)
class Conditions:
    """Conditions of a measurement; times measured under other conditions are not comparable.

    Attributes
    ----------
    device
        Model of the processor or accelerator.
    backend, version
        Kernel library; `version` has the versions of the library and of halograd, and a checksum of the sources that
        run when a layer runs.
    threads
        Threads per rank.
    ranks
        Number of ranks of a host that compute at the same time, and share its memory.
    cores
        Number of cores of that host, if the ranks share them; else 0.
    autotune
        Whether the algorithms of convolutions are chosen by measurement.
    flush
        Bytes that pass through the cache between two uses of a layer's data [B].
    """

    device: str
    backend: str
    version: str
    threads: int = 1
    ranks: int = 1
    cores: int = 0
    autotune: bool = False
    flush: int = 0

    @classmethod
    def here(
        cls, kernels: Any, oversubscription: Oversubscription | None = None, autotune: bool = False, flush: int = 0
    ) -> Conditions:
        """Return the conditions of measurements on this machine; without `oversubscription`, for one rank. Local."""
        oversubscription = oversubscription or Oversubscription()
        version = f"{kernels.version}, halograd {__version__} {_sources():08x}"
        device, at_once = device_name(kernels), (oversubscription.ranks, oversubscription.cores)
        return cls(device, kernels.name, version, kernels.threads, *at_once, autotune, flush)

    @cached_property
    def text(self) -> str:
        """The conditions as one line of JSON."""
        # Sorted, so that moving a field does not invalidate stored times.
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))


class TimeCache:
    """Times by conditions and key, in memory and in a file of JSON lines. Local.

    Lines are only appended, with one write under a lock, so runs may write at the same time; if a key has two lines,
    the later one counts. A line that cannot be read (from a killed run, or a full disk) is skipped with a warning and
    counted in `damaged`.

    Parameters
    ----------
    path
        The file; it and its folder are created when the first time is written. None: only in memory.
    every
        Number of lines to collect before they are written; :meth:`flush` writes the rest.

    Raises
    ------
    UserError
        If the file exists and cannot be read.
    """

    def __init__(self, path: Path | None, every: int = 1) -> None:
        self.path, self.every = path, every
        self.damaged = 0
        self._times: dict[tuple[str, str], tuple[float, ...]] = {}
        self._unwritten: list[bytes] = []
        self.read()

    def __len__(self) -> int:
        return len(self._times)

    def get(self, conditions: Conditions, key: str) -> tuple[float, ...] | None:
        """Return the times stored under a key [s]; None if nothing is stored."""
        return self._times.get((conditions.text, key))

    def put(self, conditions: Conditions, key: str, times: Sequence[float]) -> None:
        """Store times [s] under a key.

        Raises
        ------
        UserError
            If the file cannot be written.
        """
        self._times[conditions.text, key] = tuple(times)
        # Conditions and key are JSON already and stay strings: they are compared, never parsed.
        line = json.dumps([conditions.text, key, list(times)], separators=(",", ":"))
        self._unwritten.append(f"{line}\n".encode())
        if len(self._unwritten) >= self.every:
            self.flush()

    def flush(self) -> None:
        """Write collected times, so that they survive an interruption."""
        if not self._unwritten or self.path is None:
            return
        with writing(f"cache {self.path}", f"choose another folder with {CACHE_VARIABLE}"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Not only for appending: the last byte is read.
            with self.path.open("a+b") as file:
                # The lock ends when the file is closed.
                fcntl.flock(file, fcntl.LOCK_EX)
                size = file.seek(0, os.SEEK_END)
                # A killed run may have left an incomplete last line.
                torn = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
                file.write(b"\n" * torn + b"".join(self._unwritten))
                file.flush()
                os.fsync(file.fileno())
        self._unwritten.clear()

    def read(self) -> None:
        """Read all times in the file, including those of other runs."""
        if self.path is None:
            return
        try:
            # Damaged bytes should only cost their own line.
            lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return  # if it cannot be created, the first write reports it
        except OSError as error:
            raise UserError(
                f"cache {self.path}: expected a file that can be read, got an error ({error.strerror}); remove it, or "
                f"choose another folder with {CACHE_VARIABLE}"
            ) from error
        self.damaged = 0
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                conditions, key, times = _ENTRY.validate_json(line, strict=True)
            except ValidationError:
                self.damaged += 1
                _log.warning("cache %s: line %d is damaged and was skipped", self.path, number)
            else:
                self._times[conditions, key] = times


def cache_path(folder: str | Path | None = None) -> Path:
    """Return the path of the file of measured times: in `folder`, else in $HALOGRAD_CACHE, else in the folder
    ``halograd`` of $XDG_CACHE_HOME or ~/.cache.
    """
    chosen = folder or os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen) / "kernel_times.jsonl"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "halograd" / "kernel_times.jsonl"


@lru_cache
def _sources() -> int:
    """Return a checksum of the code that runs when a layer runs, CUDA included, as code may change within a version."""
    total = 0
    for package in (device_package, kernels_package, layers_package, lowering_package, program_package):
        # Sorted: file systems list folders in different orders.
        for path in sorted(Path(package.__path__[0]).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                total = zlib.crc32(path.read_bytes(), total)
    return total


def device_name(kernels: Any) -> str:
    """Return the model of the device of the kernels: the name from the backend, else that of the processor."""
    if name := getattr(kernels, "device_name", None):
        return str(name)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    # Reversed, so that of all processors the first one counts.
    facts = dict(reversed([(k.strip(), v.strip()) for k, _, v in (line.partition(":") for line in lines) if v]))
    parts = [facts[k] for k in ("model name", "cpu family", "model", "stepping") if k in facts]
    return " ".join(parts) or platform.processor() or platform.machine()
