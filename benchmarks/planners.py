"""Time of the planners on networks shaped like those of the model zoo, without and with a memory limit.

    python benchmarks/planners.py
    python benchmarks/planners.py --candidates 10,50 --networks resnet-152 --planners elimination

Costs are synthetic, not random: every candidate is a cut over sample, height, width and channel in powers of two. The
cost of a layer is its share of the work and its messages; that of an edge is the data that move between two cuts. For
each network, number of candidates and memory limit (relative to the memory of the fastest choice), the table shows the
planner's time [s], its total relative to the best total, and the effort of the search.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

sys.path.append(str(Path(__file__).resolve().parent.parent))

from halograd.errors import UserError
from halograd.perfmodel.planners import PLANNERS, Problem, Selection

#: Sustained rate [flop/s] of a device, and latency [s] and inverse bandwidth [s/B] of its links.
FLOPS, ALPHA, BETA = 5e12, 5e-6, 1e-10

Layer = tuple[str, float, float, float]  # kind, [flop], activation [B], parameters [B]
Graph = tuple[list[Layer], list[tuple[int, int]]]


class Builder:
    """Builder of layers and edges, one block after the other."""

    def __init__(self) -> None:
        self.layers: list[Layer] = [("input", 2e8, 2e8, 0.0)]
        self.edges: list[tuple[int, int]] = []

    def add(self, kind: str, *inputs: int, width: float = 1.0) -> int:
        """Add a layer after `inputs`; return its number. Deeper layers have smaller activations and more parameters."""
        depth = len(self.layers)
        stage = min(depth // 60, 4)
        activation, parameters = 2e8 * width / 2**stage, 3e5 * width * 4**stage
        flops = 2e10 * width if kind == "conv" else activation
        self.layers.append((kind, flops, activation, parameters if kind == "conv" else 0.0))
        self.edges += [(u, depth) for u in inputs]
        return depth

    def block(self, x: int, width: float = 1.0) -> int:
        """Add convolution, batch norm and ReLU."""
        for kind in ("conv", "norm", "relu"):
            x = self.add(kind, x, width=width)
        return x

    def chain(self, x: int, blocks: int, width: float = 1.0) -> int:
        """Add blocks in sequence."""
        for _ in range(blocks):
            x = self.block(x, width)
        return x


def line(blocks: int = 20) -> Graph:
    """Return a network without branches (VGG, mesh-tangling)."""
    b = Builder()
    b.chain(0, blocks)
    return b.layers, b.edges


def resnet(blocks: int = 50) -> Graph:
    """Return bottleneck blocks with identity shortcuts (ResNet-152)."""
    b = Builder()
    x = b.block(0)
    for _ in range(blocks):
        y = b.add("norm", b.add("conv", b.chain(x, 2, 0.25)))
        x = b.add("relu", b.add("add", x, y))
    return b.layers, b.edges


def inception(modules: int = 11) -> Graph:
    """Return modules of four branches; in the last two modules, two branches branch again (Inception-v3)."""
    b = Builder()
    x = b.chain(0, 5)
    for module in range(modules):
        width = 0.2 + 0.02 * module
        ends = [b.block(x, width), b.chain(x, 2, width), b.chain(x, 3, width), b.block(b.add("pool", x), width)]
        if module >= modules - 2:
            ends = [ends[0], ends[3], *(b.block(end, width) for end in ends[1:3] for _ in range(2))]
        x = b.add("concat", *ends)
    return b.layers, b.edges


def unet(levels: int = 5) -> Graph:
    """Return an encoder and decoder with skip connections."""
    b = Builder()
    x, skips = 0, []
    for _ in range(levels):
        skips.append(b.chain(x, 2))
        x = b.add("pool", skips[-1])
    x = b.chain(x, 2)
    for skip in reversed(skips):
        x = b.chain(b.add("concat", skip, b.add("conv", x)), 2)
    return b.layers, b.edges


def dense_blocks(blocks: int = 3, layers: int = 5) -> Graph:
    """Return blocks in which every layer reads all earlier ones: tables over more than two layers."""
    b = Builder()
    x = b.block(0)
    for _ in range(blocks):
        inside = [x]
        for _ in range(layers):
            inside.append(b.add("conv", *inside, width=0.2))
        x = b.add("concat", *inside[-2:])
    return b.layers, b.edges


NETWORKS = {
    "line-60": line,
    "inception-v3": inception,
    "unet": unet,
    "resnet-152": resnet,
    "dense": dense_blocks,
}


def cuts(count: int) -> np.ndarray:
    """Return ``[count, 4]`` parts over sample, height, width and channel; cuts with most ranks come first."""
    exponents = [e for e in itertools.product(range(6), range(5), range(5), range(4)) if sum(e) <= 10]
    exponents.sort(key=lambda e: (-sum(e), max(e), e))
    spread = np.linspace(0, len(exponents) - 1, count).astype(int)
    return 2.0 ** np.array([exponents[i] for i in spread])


def problem(graph: Graph, candidates: int) -> Problem:
    """Return the costs of a network whose layers have the same candidates."""
    layers, edges = graph
    parts = cuts(candidates)
    ranks = parts.prod(axis=1)
    # Share of its input that a rank already has: per axis the overlap of two blocks that start together.
    share = (np.minimum(1 / parts[:, None], 1 / parts[None]) * parts[None]).prod(axis=2)
    times, memory = [], []
    noise: dict[Layer, np.ndarray] = {}  # measurement noise, the same for equal layers; without it there are many ties
    random = np.random.default_rng(1)
    for layer in layers:
        kind, flops, activation, parameters = layer
        halo = (ALPHA + BETA * activation / ranks * parts[:, 1:3].max(axis=1) / 100) * (parts[:, 1:3] > 1).any(axis=1)
        reduced = 2 * BETA * parameters / parts[:, 3] * (ranks > 1) + ALPHA * np.log2(ranks)
        gathered = BETA * activation / ranks * (parts[:, 3] - 1)
        compute = 3 * flops / FLOPS / ranks + 1e-5
        factor = noise.setdefault(layer, random.normal(1.0, 0.02, candidates))
        times.append(factor * compute + (halo + reduced + gathered if kind == "conv" else 0.0))
        memory.append(np.rint(2 * activation / ranks + 3 * parameters / parts[:, 3]))
    tables: dict[float, np.ndarray] = {}
    for u, _ in edges:
        nbytes = layers[u][2]
        if nbytes not in tables:
            moved = 2 * BETA * nbytes / np.minimum(ranks[:, None], ranks[None]) * (1 - share)
            tables[nbytes] = moved + 2 * ALPHA * (share < 1)
    names = tuple(f"{kind}{v}" for v, (kind, *_) in enumerate(layers))
    return Problem(names, tuple(times), tuple(memory), {(u, v): tables[layers[u][2]] for u, v in edges})


def limited(free: Problem, fastest: Selection, share: float) -> Problem:
    """Return the problem with a memory limit between the minimum (`share` 0) and that of the fastest choice (1)."""
    least = sum(float(m.min()) for m in free.memory)
    return replace(free, limit=math.ceil(least + share * (fastest.memory - least)))


def main(
    networks: Annotated[str, typer.Option(help="comma-separated")] = ",".join(NETWORKS),
    candidates: Annotated[str, typer.Option(help="per layer, comma-separated")] = "10,30,60,100,150",
    planners: Annotated[str, typer.Option(help="comma-separated")] = "shortest_path,longest_path_first,elimination",
    shares: Annotated[str, typer.Option(help="memory limits, 1: what the fastest choice takes")] = "1,0.9,0.5,0.1",
) -> None:
    """Print the table of planners."""
    print(f"{'network':14}{'layers':>7}{'cand.':>6}{'memory':>7}  {'planner':20}{'seconds':>8}{'ratio':>8}  work")
    for name, count in itertools.product(networks.split(","), [int(c) for c in candidates.split(",")]):
        free = problem(NETWORKS[name](), count)
        fastest = PLANNERS["elimination"]().plan(free)
        for share in [float(s) for s in shares.split(",")]:
            one = free if share == 1 else limited(free, fastest, share)
            best = PLANNERS["elimination"]().plan(one)
            for planner in planners.split(","):
                line = f"{name:14}{len(one.names):7}{count:6}{share:7.2f}  {planner:20}"
                try:
                    found = PLANNERS[planner]().plan(one)
                except UserError as error:
                    print(f"{line}  {error}"[:120])
                    continue
                mark = "" if found.optimal else f" gap {found.gap / found.seconds:.1e}"
                ratio = found.seconds / best.seconds
                print(f"{line}{found.work.seconds:8.3f}{ratio:8.4f}  {found.work}{mark}", flush=True)


if __name__ == "__main__":
    typer.run(main)
