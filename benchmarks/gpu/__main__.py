"""``python -m benchmarks.gpu host | copies | norms | attention | fusions | (cutting | steps) SUBJECT PRECISION``.

The command prints JSON lines: ``{"begin": NAME}`` before a timing, and ``{"check": NAME, "status": ..., "detail": ...,
"numbers": {...}}`` after it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from mpi4py import MPI

from benchmarks.gpu.attention import ATTENTION, time_attention
from benchmarks.gpu.contest import COMPILED, contest, contest_compiled
from benchmarks.gpu.fusions import CASES, time_fusions
from benchmarks.gpu.host import time_host
from benchmarks.gpu.norms import NORMS, time_norm
from benchmarks.gpu.subjects import SUBJECTS, Subject
from benchmarks.gpu.timings import time_copies, time_cutting, time_halo
from benchmarks.gpu.torch_process import TorchProcess, find_torch
from halograd.comm import Communicator
from halograd.kernels import Backend, get_backend

__all__ = ["main", "measure", "run"]

#: Variable for a JSON file with the names of timings to skip; tests/gpu/runner.py sets it.
SKIP = "HALOGRAD_GPU_SKIP"


def measure(name: str, call: Callable[[], tuple[str, Mapping[str, float]]]) -> None:
    """Run a timing and print its result; an exception is a result too."""
    if name in _known():
        return
    print(json.dumps({"begin": name}), flush=True)
    begin, numbers = time.perf_counter(), dict[str, float]()
    try:
        detail, measured = call()
        status, numbers = "ok", dict(measured)
    except Exception as error:
        status, detail = "failed", " ".join(f"{type(error).__name__}: {error}".split())[:2000]
    seconds = round(time.perf_counter() - begin, 3)
    event = {"check": name, "status": status, "detail": detail, "seconds": seconds, "numbers": numbers}
    print(json.dumps(event), flush=True)


def _known() -> list[str]:
    path = os.environ.get(SKIP)
    return json.loads(Path(path).read_text(encoding="utf-8")) if path else []


def run(what: Sequence[str], kernels: Backend, comm: Communicator, torch_device: str = "cuda") -> None:
    """Run the timings of one name. Local."""
    name = what[0]
    if name == "host":
        measure("time of the host per call", lambda: time_host(kernels))
    elif name == "copies":
        measure("copy within the device", lambda: time_copies(kernels))
        measure("halo of (1, 1024, 1024, 128) bf16", lambda: time_halo(kernels))
    elif name == "norms":
        for shape in NORMS:
            measure(f"norm, {shape.title}", partial(time_norm, kernels, shape))
    elif name == "attention":
        _attention(kernels, torch_device)
    elif name == "fusions":
        for case in CASES:
            for backward, direction in ((False, "forward"), (True, "backward")):
                measure(f"{case.title}, {direction}", partial(time_fusions, kernels, case, backward))
    elif name == "cutting":
        subject, precision = SUBJECTS[what[1]], what[2]
        for graph, how in ((True, "as graphs"), (False, "one by one")):
            cutting = partial(time_cutting, kernels, comm, subject, precision, graph=graph)
            measure(f"cutting {subject.title}, {precision}, {how}", cutting)
    else:
        _steps(kernels, comm, SUBJECTS[what[1]], what[2], torch_device)


def _attention(kernels: Backend, torch_device: str) -> None:
    """Time attention of halograd and, if it is installed, of torch in a separate process."""
    lacks = find_torch()
    if lacks:
        for subject in ATTENTION:
            measure(f"attention, {subject.title}", partial(time_attention, kernels, subject, None))
        print(json.dumps({"check": "attention, torch", "status": "missing", "detail": lacks}), flush=True)
        return
    with TorchProcess(torch_device) as torch:
        for subject in ATTENTION:
            measure(f"attention, {subject.title}", partial(time_attention, kernels, subject, torch))


def _steps(kernels: Backend, comm: Communicator, subject: Subject, precision: str, torch_device: str) -> None:
    """Time steps of halograd and, if it is installed, of torch; each mode of torch runs in a separate process."""
    title, lacks = f"{subject.title}, {precision}", find_torch()
    if lacks:
        measure(title, lambda: contest(kernels, comm, subject, precision, None))
        print(json.dumps({"check": f"{title}, torch", "status": "missing", "detail": lacks}), flush=True)
        return
    with TorchProcess(torch_device) as torch:
        measure(title, lambda: contest(kernels, comm, subject, precision, torch))
    for mode in COMPILED:
        with TorchProcess(torch_device) as torch:
            measure(f"{title}, {mode}", partial(contest_compiled, kernels, comm, subject, precision, torch, mode))


def main() -> int:
    """Run the timings on the first GPU, with autotuning and TF32, which is equal to torch with ``cudnn.benchmark``."""
    with Communicator(MPI.COMM_SELF) as comm, get_backend("cudnn", autotune=True, precision="tf32") as kernels:
        run(sys.argv[1:], kernels, comm)
    return 0


if __name__ == "__main__":
    sys.exit(main())
