"""``python -m halograd.gpucheck``: everything there is to check on one GPU, under nine minutes.

Without a GPU it says what is missing and ends with exit code 0. A short table comes last, and one JSON file is written.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from halograd.demo.job import ENVIRONMENT, find_mpiexec
from halograd.errors import UserError
from halograd.gpucheck.facts import facts, missing
from halograd.gpucheck.report import Report, Result

__all__ = ["main"]

BUDGET = 500.0  # [s]
#: Of each part [s]; what one does not need is left to those behind it.
PARTS = {"kernels": 110.0, "ranks": 140.0, "transports": 60.0, "benchmarks": 420.0}
RANKS = (1, 2, 4)
RANKS_LIMIT = 150.0  # [s]: a job that takes longer hangs
#: Ranks that share the GPU by other ways than the host's memory. NCCL lets two do so, and may hang where SMs run out.
TRANSPORTS = {"cuda-ipc": (2, 4), "nccl": (2,), "mpi-cuda": (2,)}
SHARING = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "8", "HALOGRAD_GPU_TIMEOUT": "30"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print, write; 0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m halograd.gpucheck", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="where the results go")
    parser.add_argument("--budget", type=float, default=BUDGET, help="seconds after which nothing new is begun")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part only; may be repeated")
    parser.add_argument("--ranks", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--transport", default="", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.ranks is not None:
        return _as_ranks(given.ranks, given.transport)
    report = Report(given.budget, say=lambda line: print(line, flush=True))
    report.facts = facts()
    lacks = missing(report.facts)
    if lacks:
        reason = f"needs {'; '.join(lacks)}"
        report.add(Result("gpu", "everything", "skipped", reason))
    else:
        print("\n".join(f"{key}: {value}" for key, value in report.facts.items()))
        parts = {"kernels": _kernels, "ranks": _all_ranks, "transports": _transports, "benchmarks": _benchmarks}
        for name, run in parts.items():
            if given.only is None or name in given.only:
                with report.part(PARTS[name]):
                    run(report)
    report.write(given.json)
    print(report.table())
    print(f"written to {given.json}")
    return int(report.failed)


def _all_ranks(report: Report) -> None:
    for size in RANKS:
        _ranks(report, size)


def _transports(report: Report) -> None:
    for transport, sizes in TRANSPORTS.items():
        for size in sizes:
            _ranks(report, size, transport)


def _kernels(report: Report) -> None:
    """All kernels in all precisions."""
    from halograd.gpucheck.kernel_checks import check_kernels
    from halograd.kernels import get_backend

    for precision, dtype, mode in (
        ("strict", "float32", "strict"),
        ("tf32", "float32", "tf32"),
        ("float64", "float64", "strict"),
        ("bfloat16", "bfloat16", "strict"),
        ("float16", "float16", "strict"),
    ):
        try:
            backend = get_backend("cudnn", precision=mode)
        except Exception as error:
            report.add(Result(f"kernels {precision}", "backend", "failed", " ".join(str(error).split())))
            continue
        with backend:
            check_kernels(backend, report, precision, _dtype(dtype))


def _dtype(name: str) -> object:
    if name != "bfloat16":
        return name
    import ml_dtypes

    return ml_dtypes.bfloat16


def _ranks(report: Report, size: int, transport: str = "") -> None:
    """Layers, training and races under so many ranks on the one GPU, or one transport, as a job of its own."""
    group = f"{transport} {size} ranks".strip()
    if report.seconds_left <= 0:
        report.add(Result(group, "job", "skipped", "the budget is used up"))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ranks.json"
        try:
            command = [find_mpiexec(), "-n", str(size), sys.executable, "-m", "halograd.gpucheck", "--ranks", str(path)]
            command += ["--transport", transport] if transport else []
        except UserError as error:
            report.add(Result(group, "job", "skipped", str(error)))
            return
        limit = min(RANKS_LIMIT, max(30.0, report.seconds_left))
        environment = {**ENVIRONMENT, **SHARING, **os.environ}
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment, check=False)
        except subprocess.TimeoutExpired:
            report.add(Result(group, "job", "failed", f"it did not end within {limit:.0f} s"))
            return
        if not path.exists():
            last = (done.stderr or done.stdout).strip().splitlines()[-1:]
            report.add(Result(group, "job", "failed", f"exit code {done.returncode}: {' '.join(last)}"))
            return
        for entry in json.loads(path.read_text(encoding="utf-8")):
            report.add(Result(**entry))


def _as_ranks(path: Path, transport: str = "") -> int:
    """One rank of such a job; rank 0 writes the results. Collective."""
    from dataclasses import asdict

    from halograd.comm import Communicator, boot
    from halograd.gpucheck.rank_checks import check_layers, check_races, check_training
    from halograd.gpucheck.transport_checks import check_transport
    from halograd.training.config import BackendConfig
    from halograd.training.kernels import open_kernels

    report = Report(math.inf, say=lambda line: None)  # ranks do not watch the time: they would disagree
    with Communicator(boot()) as comm, open_kernels(BackendConfig(kernels="cudnn"), comm) as kernels:
        if transport:
            check_transport(kernels, comm, report, transport)
        else:
            check_races(kernels, comm, report)
            check_layers(kernels, comm, report, "float32")
            check_training(kernels, comm, report, "float32")
            check_training(kernels, comm, report, "bfloat16", f"bfloat16 {comm.size} ranks")
        if comm.rank == 0:
            path.write_text(json.dumps([asdict(r) for r in report.results]), encoding="utf-8")
    return 0


def _benchmarks(report: Report) -> None:
    from halograd.comm import Communicator, boot
    from halograd.gpucheck.benchmarks import run_benchmarks
    from halograd.kernels import get_backend

    # torch measures its algorithms too (cudnn.benchmark).
    with Communicator(boot()) as comm, get_backend("cudnn", autotune=True, precision="tf32") as kernels:
        run_benchmarks(kernels, comm, report)


if __name__ == "__main__":
    sys.exit(main())
