"""Program of one process of a contestant: it sets up, then runs steps on request, and sleeps otherwise.

Started by :mod:`benchmarks.contestants` as ``python worker.py SPEC`` (under mpiexec for several ranks), with a
JSON object. Commands and replies are JSON lines through two named pipes per rank. A rank that waits for a
command is blocked in a read: it uses no CPU, and neither do the other ranks, because each has its own pipe.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
from pathlib import Path
from typing import Any, Protocol

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parent.parent))

__all__ = ["Subject", "measure", "serve"]


class Subject(Protocol):
    """Protocol of a network that is ready to train on its data."""

    about: str

    def step(self) -> float:
        """Run forward, backward and update; return the loss before the update."""

    def clock(self) -> float:
        """Return the reading of the clock for steps [s]: `time.perf_counter`, except for the raw kernels."""

    def synchronize(self) -> None:
        """Wait until all steps so far are complete."""

    def close(self) -> None:
        """Free resources."""


def make(spec: dict[str, Any]) -> Subject:
    """Return the subject of this process; import only the modules that it needs."""
    kind = spec["kind"]
    if kind == "torch":
        from benchmarks.subject_torch import TorchSubject

        return TorchSubject(spec)
    if kind == "gloo":
        from benchmarks.subject_gloo import GlooSubject

        return GlooSubject(spec)
    if kind == "shardtensor":
        from benchmarks.subject_shardtensor import ShardTensorSubject

        return ShardTensorSubject(spec)
    if kind == "jax":
        from benchmarks.subject_jax import JaxSubject

        return JaxSubject(spec)
    from benchmarks.subject_halograd import HalogradSubject, RawSubject

    return RawSubject(spec) if kind == "raw" else HalogradSubject(spec)


def measure(subject: Subject, count: int) -> dict[str, Any]:
    """Return the wall times [s] of `count` steps; each begins at the end of the previous one.

    An additional untimed step comes first. It warms caches that other contestants have emptied. In halograd, it leaves
    its updates to the next step, as every step does. So each timed step has one forward, one backward and one update of
    all parameters.
    """
    subject.step()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    seconds, losses = [], []
    before = subject.clock()
    for _ in range(count):
        losses.append(subject.step())
        now = subject.clock()
        seconds.append(now - before)
        before = now
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    subject.synchronize()
    return {"seconds": seconds, "losses": losses, "faults": faults / count}


def losses(subject: Subject, count: int) -> dict[str, Any]:
    """Return the losses of `count` steps."""
    values = [subject.step() for _ in range(count)]
    subject.synchronize()
    return {"losses": values}


def serve(spec: dict[str, Any]) -> None:
    """Execute commands until the parent sends ``quit`` or has ended."""
    base = Path(spec["pipes"]) / f"{spec['name']}.{launched_rank()}"
    # Open the pipes before long work; later, a parent that has ended would not be noticed.
    with open(f"{base}.in") as commands, open(f"{base}.out", "w", buffering=1) as replies:
        subject = make(spec)
        gc.collect()
        gc.disable()
        print(json.dumps({"pid": os.getpid(), "about": subject.about}), file=replies)
        for line in commands:
            command = json.loads(line)
            if command["do"] == "quit":
                break
            run = measure if command["do"] == "measure" else losses
            print(json.dumps(run(subject, command["count"])), file=replies)
        subject.close()


def launched_rank() -> int:
    """Return the rank from the launcher's environment, 0 without one; known before MPI starts."""
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
