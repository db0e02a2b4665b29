"""Contestants: their list and settings, and their processes, which run steps on request and sleep otherwise."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.machine import cpu_seconds, tree
from benchmarks.problems import PLAIN

__all__ = ["CONTESTANTS", "INSTRUCTION_SETS", "Contestant", "Entry", "EntryError", "launcher"]

_WORKER = Path(__file__).resolve().parent / "worker.py"
#: Time limit for a contestant to build or compile its step, and to reply to a command [s].
PATIENCE = 300.0

#: Allocator settings for all contestants. Freed memory stays in the process and large arrays come from the heap: with
#: glibc's defaults, every large array is mapped again with page faults in each step, which costs eager frameworks up to
#: 2x. Huge pages are used if the system permits.
ALLOCATOR = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


#: Limits of the instruction set: variables of oneDNN (halograd's, and the one in torch), torch, MKL and XLA.
INSTRUCTION_SETS: dict[str, dict[str, str]] = {
    "native": {},
    "avx2": {
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
        # torch.compile caches programs of the native instruction set, which compute NaN under this limit.
        "TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), "halograd-inductor-avx2"),
    },
}


class EntryError(RuntimeError):
    """Error: a contestant could not be started, or ended early."""


@dataclass(frozen=True)
class Entry:
    """Settings of one contestant.

    Attributes
    ----------
    name, title
        Short name, and name in tables.
    kind
        ``"halograd"``, ``"raw"``, ``"torch"``, ``"gloo"`` (torch on several ranks), ``"shardtensor"`` or ``"jax"``.
    ranks, threads
        Processes under MPI, and threads of each.
    devices
        Devices of one process (JAX).
    spec
        Further settings for the worker.
    tolerance
        Largest permitted relative difference of its losses in the first steps.
    problems
        Names of the problems that it supports; empty: all.
    """

    name: str
    title: str
    kind: str
    ranks: int = 1
    threads: int = 2
    devices: int = 1
    spec: Mapping[str, Any] = field(default_factory=dict)
    tolerance: float = 1e-3
    problems: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Module that must be installed for this contestant."""
        return {"gloo": "torch", "shardtensor": "physicsnemo"}.get(self.kind, self.kind)

    def takes_part(self, problem: str) -> bool:
        return not self.problems or problem in self.problems

    @property
    def ours(self) -> bool:
        return self.kind == "halograd"

    @property
    def peer(self) -> bool:
        return self.kind in ("torch", "gloo", "shardtensor", "jax")

    @property
    def equal(self) -> bool:
        """Whether the contestant has the precision of the others, which is required of the best peer."""
        return self.tolerance <= 1e-3

    def environment(self) -> dict[str, str]:
        """Settings of threads and memory; all other variables come from the caller's environment."""
        result = ALLOCATOR | {"OMP_NUM_THREADS": str(self.threads), "MKL_NUM_THREADS": str(self.threads)}
        result |= {"OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        if self.kind == "jax":
            flags = f"--xla_cpu_multi_thread_eigen=true --xla_force_host_platform_device_count={self.devices}"
            flags = f"{flags} {os.environ.get('XLA_FLAGS', '')}".strip()
            result |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_ENABLE_X64": "0"}
        return result


_LOW = {"dtype": "bfloat16"}
CONTESTANTS = (
    Entry("halograd-1x2", "halograd, 1 rank x 2 threads", "halograd"),
    Entry("halograd-2x1", "halograd, 2 ranks x 1 thread, cut along H", "halograd", ranks=2, threads=1),
    Entry("raw", "sum of its raw oneDNN primitives, 2 threads", "raw"),
    Entry("torch", "torch, channels-last, 2 threads", "torch"),
    Entry("torch-compile", "torch.compile, channels-last, 2 threads", "torch", spec={"compile": True}),
    Entry("torch-gloo", "torch, halos by hand over gloo, 2 ranks x 1", "gloo", ranks=2, threads=1),
    Entry("shardtensor", "ShardTensor, NCHW over gloo, 2 ranks x 1", "shardtensor", ranks=2, threads=1, problems=PLAIN),
    Entry("halograd-1x2-bf16", "halograd, bfloat16, 1 rank x 2 threads", "halograd", spec=_LOW, tolerance=0.1),
    Entry("halograd-2x1-bf16", "halograd, bfloat16, 2 ranks x 1 thread", "halograd", 2, 1, spec=_LOW, tolerance=0.1),
    Entry("torch-bf16", "torch, bfloat16 autocast, 2 threads", "torch", spec={"bfloat16": True}, tolerance=0.1),
    Entry("jax", "JAX, jit, 1 device (2 threads)", "jax"),
    Entry("jax-sharded", "JAX, jit, image sharded over 2 devices", "jax", devices=2),
)


class Contestant:
    """Context manager that starts the processes of one entry on one problem, and ends them."""

    def __init__(self, entry: Entry, problem: str, spec: Mapping[str, Any] | None = None) -> None:
        self.entry = entry
        self._directory = Path(tempfile.mkdtemp(prefix="halograd-bench-"))
        # Opened in both directions, which never blocks, so that the death of a worker is detected.
        self._commands = [self._pipe(rank, "in") for rank in range(entry.ranks)]
        self._replies = [self._pipe(rank, "out") for rank in range(entry.ranks)]
        self._pending = [b""] * entry.ranks
        settings: dict[str, Any] = {
            "name": entry.name,
            "kind": entry.kind,
            "problem": problem,
            "pipes": str(self._directory),
        }
        settings |= {
            "ranks": entry.ranks,
            "threads": entry.threads,
            "devices": entry.devices,
            **entry.spec,
            **(spec or {}),
        }
        self._log = (self._directory / "log").open("w+")
        self._process = subprocess.Popen(
            [*launcher(entry.ranks), sys.executable, str(_WORKER), json.dumps(settings)],
            env=_inherited() | entry.environment(),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.pids: list[int] = []
        self.about = ""

    def _pipe(self, rank: int, end: str) -> int:
        path = self._directory / f"{self.entry.name}.{rank}.{end}"
        os.mkfifo(path)
        return os.open(path, os.O_RDWR)

    def ready(self) -> None:
        """Wait until the processes run and have built their step.

        Raises
        ------
        EntryError
            If the contestant has ended or took too long; the message has the end of its output.
        """
        self.about = self._read()[0]["about"]
        self.pids = tree(self._process.pid)

    def command(self, do: str, count: int) -> list[dict[str, Any]]:
        """Send a command to all ranks and return their replies."""
        for pipe in self._commands:
            os.write(pipe, json.dumps({"do": do, "count": count}).encode() + b"\n")
        return self._read()

    def cpu_seconds(self) -> float:
        """Return the CPU time of all processes of the contestant so far [s]."""
        return cpu_seconds(self.pids)

    def _read(self) -> list[dict[str, Any]]:
        deadline = time.monotonic() + PATIENCE
        return [json.loads(self._line(rank, deadline)) for rank in range(self.entry.ranks)]

    def _line(self, rank: int, deadline: float) -> bytes:
        while b"\n" not in self._pending[rank]:
            if select.select([self._replies[rank]], [], [], 0.5)[0]:
                self._pending[rank] += os.read(self._replies[rank], 1 << 16)
            elif self._process.poll() is not None:
                raise EntryError(f"{self.entry.name}: ended with exit code {self._process.returncode}\n{self._tail()}")
            elif time.monotonic() > deadline:
                raise EntryError(f"{self.entry.name}: no reply within {PATIENCE:.0f} s\n{self._tail()}")
        line, _, self._pending[rank] = self._pending[rank].partition(b"\n")
        return line

    def _tail(self, lines: int = 15) -> str:
        self._log.flush()
        text = (self._directory / "log").read_text(errors="replace")
        return "\n".join(f"  | {line}" for line in text.splitlines()[-lines:])

    def close(self) -> None:
        """End the processes and remove the pipes."""
        for pipe in self._commands:
            os.write(pipe, b'{"do": "quit"}\n')
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        for pipe in (*self._commands, *self._replies):
            os.close(pipe)
        self._log.close()
        shutil.rmtree(self._directory)

    def __enter__(self) -> Contestant:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _inherited() -> dict[str, str]:
    """Return the caller's environment without variables that would make a contestant a rank of its MPI job."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("PMI_", "OMPI_", "PMIX_"))}


def launcher(ranks: int) -> Sequence[str]:
    """Return the command that starts a program on `ranks` ranks; empty for one rank."""
    if ranks == 1:
        return []
    neighbor = Path(sys.executable).with_name("mpiexec")
    program = str(neighbor) if neighbor.exists() else shutil.which("mpiexec")
    if program is None:
        raise EntryError("expected mpiexec next to this Python or on PATH, got none; pip install '.[mpich]'")
    return [program, "-n", str(ranks)]
