"""Time of a training step compared with torch and JAX: forward, backward, update by plain SGD, in float32.

    make bench-step                                  # or: pip install '.[mpich,peers]'; python benchmarks/step.py
    python benchmarks/step.py --quick --networks mesh-256 --peers torch --isa avx2

Every contestant is a separate process (two under MPI for two ranks) with its own settings of threads, on the same two
cores and with the same allocator settings. All train the same network from the same weights on the same data: their
losses of the first three steps must agree to 1e-3, or nothing is timed. Then they run in turn, a block of steps each,
in one order and back (A B C C B A); the others sleep in a read, which is checked. The time of a step is from the end of
the previous step to its own end; every step reads its loss on the host.

``median``, ``quarters`` (first and third quartile) and ``best`` are over all steps of all blocks. Per
network::

    ratio to best peer   = (smaller median of halograd's contestants) / (smallest median of the peers in float32)
    ratio in bfloat16    = (smaller median of halograd's in bfloat16) / (median of torch under autocast to bfloat16)
    ratio to gloo        = (median, two ranks x 1 thread) / (median of halos by hand over gloo, two ranks x 1)
    ratio to raw sum     = (median, one rank x 2 threads) / (median of the sum of its kernels' times within a step)
    ratio to ShardTensor = (the same) / (median of PhysicsNeMo's ShardTensor, two ranks x 1, where it can take part)
    ratio to JAX sharded = (median, two ranks x 1 thread) / (median of JAX with the image sharded over 2 devices)
    two ranks to one     = (median, two ranks x 1 thread) / (median, one rank x 2 threads)

``--isa avx2`` limits the instruction set of all contestants. Each reports its own: halograd the one of
oneDNN, torch its CPU capability, JAX the limit. A contestant in bfloat16 is left out where the processor emulates it.
The last line is ``worst ratio to best peer: R`` with R the largest `ratio to best peer` of the networks. The raw sum
leaves out the loss, copies, messages, the update, and the library around the kernels.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks import report
from benchmarks.contest import Outcome, Settings, run
from benchmarks.contestants import ALLOCATOR, CONTESTANTS, INSTRUCTION_SETS, Entry, EntryError
from benchmarks.machine import choose_cores, describe
from benchmarks.problems import DEFAULT, PROBLEMS
from halograd.kernels import get_backend

PEERS = tuple(e.name for e in CONTESTANTS if e.peer)
CORES = 2
#: Packages of peers outside of the extra ``peers``, because they install a CUDA toolkit.
OPTIONAL = {"physicsnemo": "nvidia-physicsnemo"}


class UsageError(ValueError):
    """Error that the caller can fix."""


def select(peers: Sequence[str]) -> list[Entry]:
    """Return halograd's contestants, and the named peers; this imports none of them.

    Raises
    ------
    UsageError
        If a peer is unknown, or one of the extra ``peers`` is not installed.
    """
    unknown = sorted(set(peers) - set(PEERS))
    if unknown:
        raise UsageError(f"--peers: expected some of {', '.join(PEERS)} or none, got {unknown[0]!r}")
    with get_backend("auto") as kernels:
        emulated = kernels.emulates("bfloat16")
    entries = [e for e in CONTESTANTS if not e.peer or e.name in peers]
    if emulated:
        print(f"left out: contestants in bfloat16, because {emulated}", flush=True)
        entries = [e for e in entries if e.equal]
    missing = [e for e in entries if e.peer and importlib.util.find_spec(e.module) is None]
    for entry in missing:
        if entry.module not in OPTIONAL:
            raise UsageError(
                f"peers: expected {entry.module} to be installed, got none; run `make bench-step` or "
                "`pip install '.[peers]'`, or leave it out with --peers"
            )
        print(f"left out: {entry.name}, for which `pip install {OPTIONAL[entry.module]}`", flush=True)
    return [e for e in entries if e not in missing]


def split(text: str, known: Sequence[str], option: str) -> list[str]:
    """Return the names in a comma-separated text; raise UsageError for an unknown name."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UsageError(f"{option}: expected some of {', '.join(known)}, got {text!r}")
    return names


def record(path: Path, outcomes: Sequence[Outcome], settings: Settings, isa: str) -> None:
    """Write all measurements as JSON."""
    data = {
        "date": datetime.datetime.now().isoformat(timespec="seconds"),
        "machine": describe(),
        "isa": isa,
        "environment": ALLOCATOR | INSTRUCTION_SETS[isa],
        "settings": asdict(settings),
        "worst_ratio_to_best_peer": report.worst(outcomes),
        "networks": [o.as_dict() | {"ratios": report.ratios(o)} for o in outcomes],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1) + "\n")


def results_path(isa: str) -> Path:
    """Return the default path of the results, with today's date and the limit of the instruction set."""
    name = "-".join(["step", datetime.date.today().isoformat(), *([isa] if isa != "native" else [])])
    return Path(__file__).resolve().parent / "results" / f"{name}.json"


def main(
    networks: Annotated[str, typer.Option(help=f"Of {', '.join(PROBLEMS)}; separated by commas.")] = ",".join(DEFAULT),
    peers: Annotated[str, typer.Option(help=f"Of {', '.join(PEERS)}; or none.")] = ",".join(PEERS),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds at most per network.")] = 12,
    budget: Annotated[float, typer.Option(min=0, help="Seconds of timing per network.")] = 240.0,
    isa: Annotated[
        str, typer.Option(help=f"Limit of the instruction set: {' or '.join(INSTRUCTION_SETS)}.")
    ] = "native",
    quick: Annotated[bool, typer.Option("--quick", help="Two short rounds: to see that it works.")] = False,
    out: Annotated[
        str, typer.Option(help="Write JSON there; 'auto' for benchmarks/results/step-DATE[-ISA].json.")
    ] = "",
) -> None:
    """Time a training step of halograd, torch and JAX.

    Example: python benchmarks/step.py --networks mesh-512 --peers torch --rounds 4
    """
    settings = Settings(0.1, min(rounds, 2), 5.0) if quick else Settings(rounds=rounds, budget=budget)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that contestants are ended too
    try:
        names = split(networks, list(PROBLEMS), "--networks")
        if isa not in INSTRUCTION_SETS:
            raise UsageError(f"--isa: expected {' or '.join(INSTRUCTION_SETS)}, got {isa!r}")
        os.environ.update(INSTRUCTION_SETS[isa])  # all contestants inherit it, and oneDNN here reads it
        entries = select([] if peers == "none" else split(peers, PEERS, "--peers"))
        os.sched_setaffinity(0, choose_cores(CORES))
        outcomes = []
        for name in names:
            print(f"\n{name}", flush=True)
            participants = [e for e in entries if e.takes_part(name)]
            outcomes.append(run(name, participants, settings, lambda line: print(line, flush=True)))
            print(report.table(outcomes[-1]), flush=True)
    except (UsageError, ValueError) as error:
        print(f"step: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except EntryError as error:
        print(f"step: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if out:
        record(results_path(isa) if out == "auto" else Path(out), outcomes, settings, isa)
    print("\n" + report.summary(outcomes))


if __name__ == "__main__":
    typer.run(main)
