"""Memory and step time with outputs that are computed again, compared with torch.

    python benchmarks/memory_peers.py                                      # memory only, at full size
    python benchmarks/memory_peers.py --problems mesh_2k-256,unet3d-64     # step times too, of these problems

One sample, float32, one process, plain SGD. torch computes again by `torch.utils.checkpoint` without reentry, in the
regions of :mod:`benchmarks.torch_checkpoint`, and has the settings of :mod:`benchmarks.step`: channels-last,
activations in place, the allocator tuned. Memory is that of arrays: in halograd the arena, parameters and gradients; in
torch the peak of all live tensors. Work space of oneDNN is left out on both sides. Sizes are those of
:mod:`benchmarks.recompute`; nothing is computed for them.

Step times are those of :mod:`benchmarks.step`: processes in turn on the same two cores, which must have the same
losses. There is one contest of halograd and torch per problem and rule; in ``matched``, torch computes blocks again,
and halograd has the memory of torch. ``ratio`` is halograd divided by torch.
"""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.contest import Outcome, Settings, run
from benchmarks.contestants import Entry, EntryError
from benchmarks.machine import choose_cores
from benchmarks.problems import PROBLEMS
from benchmarks.recompute import FULL, RULES, arenas, strategies
from benchmarks.torch_checkpoint import peak_bytes, regions_of
from halograd.layers import Network
from halograd.models import build

__all__ = ["memory", "times"]

#: Contest in which halograd has the memory of torch with blocks computed again.
MATCHED = "matched"


def memory(network: Network) -> dict[str, tuple[int, int]]:
    """Return the memory of halograd and of torch, by rule [B]."""
    own, parameters = arenas(network, strategies(network)), 2 * parameters_of(network)
    return {rule: (own[rule] + parameters, peak_bytes(network, regions_of(network, rule))) for rule in RULES}


def parameters_of(network: Network) -> int:
    """Return the size of the parameters [B]."""
    return sum(4 * math.prod(spec.shape) for spec in network.parameters().values())


def times(problem: str, rule: str, settings: Settings) -> Outcome:
    """Time the steps of halograd and torch with one rule.

    Raises
    ------
    EntryError
        If one of them fails, or their losses differ.
    """
    network = PROBLEMS[problem].make()
    regions, spec = regions_of(network, "block" if rule == MATCHED else rule), {"recompute": rule}
    if rule == MATCHED:
        spec = {"arena": peak_bytes(network, regions) - 2 * parameters_of(network)}
    entries = [
        Entry("halograd", f"halograd, {rule}", "halograd", spec=spec),
        Entry("torch", f"torch, {rule}", "torch", spec={"regions": regions}),
    ]
    return run(problem, entries, settings, lambda line: None)


def row(label: str, rule: str, ours: float, theirs: float) -> str:
    """Return a line of a table."""
    return f"{label:16}{rule:12}{ours:12,.0f}{theirs:12,.0f}{ours / theirs:8.2f}"


def main(
    problems: Annotated[str, typer.Option(help=f"Problems whose steps are timed, of {', '.join(PROBLEMS)}.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds at most.")] = 6,
    budget: Annotated[float, typer.Option(min=0, help="Seconds of timing per problem and rule.")] = 120.0,
) -> None:
    """Compare memory, and step times, with torch."""
    print(f"{'memory [MiB]':16}{'':12}{'halograd':>12}{'torch':>12}{'ratio':>8}")
    for name, resolution in FULL.items():
        for rule, sizes in memory(build(name, resolution=resolution)).items():
            print(row(f"{name} {resolution}", rule, *(size / 2**20 for size in sizes)), flush=True)
    if not problems:
        return
    os.sched_setaffinity(0, choose_cores(2))
    print(f"\n{'step [ms]':16}{'':12}{'halograd':>12}{'torch':>12}{'ratio':>8}   (median; best)")
    try:
        for problem in problems.split(","):
            for rule in (*RULES, MATCHED):
                contest_times = times(problem, rule, Settings(rounds=rounds, budget=budget)).times
                best = [1e3 * contest_times[name].best for name in ("halograd", "torch")]
                line = row(problem, rule, *(1e3 * contest_times[name].median for name in ("halograd", "torch")))
                print(f"{line}{best[0]:12,.0f}{best[1]:12,.0f}{best[0] / best[1]:8.2f}", flush=True)
    except EntryError as error:
        print(f"memory_peers: {error}", file=sys.stderr)
        raise typer.Exit(1) from None


if __name__ == "__main__":
    typer.run(main)
