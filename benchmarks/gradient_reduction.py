"""Comparison of all schemes of gradient reduction on emulated networks that resemble the papers' machines.

    python benchmarks/gradient_reduction.py
    python benchmarks/gradient_reduction.py --quick --networks vgg_a,resnet152 --out found.json

========  ============================================================================================================
network   as the paper trained it
========  ============================================================================================================
vgg_a     Lee et al. 2017: 128 nodes of Cori (Haswell, Aries), batch 256
alexnet, googlenet, vgg16, resnet152
          Le et al. 2018: one POWER8 node with four P100, 256, 64, 32 and 12 samples per GPU
========  ============================================================================================================

Four ranks represent the machine (see `benchmarks/paper_machines.py`): layers sleep for as long as they would compute on
that machine (`benchmarks/paced_executor.py`), sums are the library's own, in shared memory, on an emulated network as
slow as the paper's. So the benchmark measures the schedule, also on a busy machine. All schemes train in turn; medians
of steps count. Times in the tables are those of the paper's machine: measured times divided by `slow`.

``exposed`` time that the main thread waited for sums and gathers of gradients, per step;
``R``        overlap ratio of Lee et al., Eq. 11: ``100 * sum(T_c - T_b) / sum(T_c)``, with `T_c` from the start of a
             communication to its arrival, and `T_b` the time of the waits for it;
``bytes``    what the rank that sends most sends of the whole network per step, all kinds together, as the counters
             count it (``!``: the counters of this run, of the narrow network, were not those of the cost model).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

sys.path.append(str(Path(__file__).resolve().parent.parent))

from benchmarks.contestants import EntryError, launcher
from benchmarks.gradient_reduction_tables import tables

_PROGRAM = Path(__file__).resolve().parent / "gradient_reduction_ranks.py"

NETWORKS = ("vgg_a", "alexnet", "googlenet", "vgg16", "resnet152")
#: Schemes for every network.
COMMON: tuple[dict[str, Any], ...] = (
    {"name": "blocking"},
    {"name": "per_layer"},
    {"name": "bucketed"},
    {"name": "sharded"},
    {"name": "bucketed", "payload": "bfloat16"},
    {"name": "bucketed", "deterministic": True},
    {"name": "host_accumulate", "chunk": 1},
    {"name": "host_accumulate", "chunk": 3},
    {"name": "host_accumulate", "chunk": 9},
)
#: Number of layers of the first chunk, except for VGG-A.
FIRST = {"alexnet": 3, "googlenet": 30, "vgg16": 8, "resnet152": 60}
#: Networks also measured with two ranks per node.
NODES_OF_TWO: tuple[dict[str, Any], ...] = ({"name": "bucketed"}, {"name": "hierarchical"})
#: Fixed chunk sizes to compare with the search, which may choose any of them; and a few for a quick run.
SIZES = (*range(1, 11), *range(20, 101, 10))
FEW_SIZES = (1, 3, 9, 20, 60)


def schemes_of(network: str) -> list[dict[str, Any]]:
    """Return the measured cases of a network: scheme, and ranks per node."""
    schemes = list(COMMON)
    if network == "vgg_a":
        two = {"name": "two_chunks", "replicated_dense": 2}
        schemes += [{**two, "first_layers": k} for k in (3, 6, 9, 12)]
        schemes += [{**two, "first_layers": 9, "replicated_dense": f} for f in (0, 1, 3)]
        schemes += [{"name": "sharded", "replicated_dense": 1}]
    else:
        schemes.append({"name": "two_chunks", "first_layers": FIRST[network]})
    return [{"scheme": s, "node": 1} for s in schemes] + [{"scheme": s, "node": 2} for s in NODES_OF_TWO]


def measure(network: str, ranks: int, seconds: float, quick: bool) -> dict[str, Any]:
    """Run one network under MPI and return the results of rank 0.

    Raises
    ------
    EntryError
        If the job fails.
    """
    spec = {
        "network": network,
        "schemes": schemes_of(network),
        "seconds": 0.0 if quick else seconds,
        "rounds": 1 if quick else 2,
        "steps": 3 if quick else 4,
        "search": network == "resnet152" if quick else network != "vgg_a",
        "sizes": FEW_SIZES if quick else SIZES,
        "interval": 3 if quick else 10,
    }
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [*launcher(ranks), sys.executable, str(_PROGRAM), json.dumps(spec)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800 + 4 * seconds)
    if done.returncode:
        raise EntryError(f"{network} failed with exit code {done.returncode}\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main(
    networks: Annotated[str, typer.Option(help="Which, with commas between.")] = ",".join(NETWORKS),
    seconds: Annotated[float, typer.Option(min=0, help="For the schemes of a network; as long again for chunks.")] = 60,
    ranks: Annotated[int, typer.Option(min=2, help="That stand for each machine.")] = 4,
    quick: Annotated[bool, typer.Option("--quick", help="Two steps of each, to see that it works.")] = False,
    out: Annotated[str, typer.Option(help="Write what was measured as JSON there.")] = "",
) -> None:
    """Measure every scheme of gradient reduction, and print the results in the papers' form."""
    chosen = [name.strip() for name in networks.split(",")]
    unknown = sorted(set(chosen) - set(NETWORKS))
    if unknown:
        print(f"--networks: expected some of {', '.join(NETWORKS)}, got {unknown[0]!r}", file=sys.stderr)
        raise typer.Exit(2)
    results = []
    for network in chosen:
        try:
            results.append(measure(network, ranks, seconds, quick))
        except EntryError as error:
            print(f"gradient_reduction: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        print("\n".join(tables(results[-1])), flush=True)
        if out:
            Path(out).write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
