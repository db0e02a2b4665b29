"""Cost of a rank's set-up before its first step: the program, and the plan of every exchange, without MPI.

    python benchmarks/startup.py --networks mesh_2k resnet50 unet2d inception_v3 --ranks 2048

Every sample is cut 4 x 4, so that there are `ranks` / 16 samples. Each network is compiled in a separate process, for
the first rank and one in the middle. The output has CPU seconds and the memory of layouts and plans.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import tracemalloc
from collections.abc import Callable
from typing import TypeVar

from halograd.dtensor import plan_exchange
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.lowering.operations import Transfer
from halograd.models import build
from halograd.program.compiler import compile_program
from halograd.program.program import Target

Result = TypeVar("Result")
Job = tuple[str, int, int]

CUT = {"height": 4, "width": 4}


def start(name: str, ranks: int, rank: int) -> int:
    """Compute the program of one rank and the plans of its exchanges; return the number of exchanges."""
    network, samples = build(name), max(1, ranks // 16)
    strategy = Strategy({"sample": samples, **CUT})
    strategy.validate(network, 16 * samples)
    blocks = parameter_blocks(network, strategy, ranks)
    program = compile_program(network, strategy, Target(samples, ranks, rank), blocks)
    program.placement  # noqa: B018  (where everything lies)
    made = {operation.exchange for operation in program if isinstance(operation, Transfer)}
    for exchange in made:
        plan_exchange(exchange.sources, exchange.targets, rank, summed=exchange.combine == "sum")
    return len(made)


def measure(job: Job) -> tuple[float, int]:
    """Return the CPU time of one rank's set-up [s], and its number of exchanges."""
    begin = time.process_time()
    exchanges = start(*job)
    return time.process_time() - begin, exchanges


def memory(job: Job) -> int:
    """Return the peak of the memory that one rank's set-up allocates [B]."""
    tracemalloc.start()
    start(*job)
    return tracemalloc.get_traced_memory()[1]


def apart(call: Callable[[Job], Result], job: Job) -> Result:
    """Call a function in a new process, without caches."""
    with multiprocessing.get_context("spawn").Pool(1) as fresh:
        return fresh.apply(call, (job,))


def main() -> None:
    """Print a line per network and rank, and the maximum CPU time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["mesh_2k", "resnet50", "unet2d", "inception_v3"])
    parser.add_argument("--ranks", type=int, default=2048)
    parser.add_argument("--memory", action="store_true", help="also what is allocated at most (slow)")
    given = parser.parse_args()
    worst = 0.0
    for name in given.networks:
        for rank in (0, given.ranks // 2 + 5):
            job = (name, given.ranks, rank)
            seconds, exchanges = apart(measure, job)
            text = f"{name}: rank {rank} of {given.ranks}: {seconds:.2f} CPU seconds, {exchanges} exchanges"
            if given.memory:
                text += f", {apart(memory, job) / 2**20:.1f} MiB at most"
            print(text, flush=True)
            worst = max(worst, seconds)
    print(f"worst CPU seconds at {given.ranks} ranks: {worst:.2f}")


if __name__ == "__main__":
    main()
