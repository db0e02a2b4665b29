"""Check that outputs that are computed again leave all bits as they are, under random strategies.

    mpiexec -n 2 python benchmarks/recompute_bits.py --seconds 300
    mpiexec -n 3 python benchmarks/recompute_bits.py --only unet3d --seed 4    # repeats a case that failed

A case is a network of `ZOO` or a random one, a random strategy (cuts of every layer, halo algorithms, statistics of
norms, buckets, passes), a backend and a dtype. It trains four steps without recomputation, and then under each rule:
``pointwise``, ``block`` (of all layers, or by segments), and a random rule per layer. Losses, parameters and running
statistics must be equal bit by bit on all ranks, and the arena must be as large as the program that is compiled without
arrays predicts. Cases come in a random order, which is the same on every number of ranks: ``--some`` and ``--seconds``
take the first of them, ``--skip`` begins later. The program ends with the number of comparisons and of differences, and
with exit code 1 after a difference.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from mpi4py import MPI

sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np

from halograd.comm import Communicator
from halograd.comm.errors import is_shared
from halograd.kernels import get_backend
from halograd.layers import Network, Strategy
from halograd.models import build
from halograd.program.compiler import compile_program
from halograd.program.keeping import keep_few
from halograd.program.program import Target
from halograd.training import SGD, Constant, Trainer
from halograd.training.executor import Executor
from tests.layers.cuts import random_strategy
from tests.training.combinations import Case as Combination
from tests.training.steps import fill

#: Networks of `halograd.models` at a small size.
ZOO: dict[str, Callable[[], Network]] = {
    "lenet5": lambda: build("lenet5", classes=4),
    "alexnet": lambda: build("alexnet", classes=4, resolution=64, width=0.05),
    "vgg_a": lambda: build("vgg_a", classes=4, resolution=32, width=0.05),
    "googlenet": lambda: build("googlenet", classes=4, resolution=65, width=0.07, auxiliary=True),
    "inception_v3": lambda: build("inception_v3", classes=4, resolution=75, width=0.05),
    "resnet50": lambda: build("resnet50", classes=4, resolution=36, width=4),
    "resnet50_one": lambda: build("resnet50", depths=(1, 1, 1, 1), classes=4, resolution=40, width=6),
    "mesh": lambda: build("mesh", resolution=(40, 36), channels=5, widths=(6, 8, 8), convs=2),
    "mesh_decoder": lambda: build("mesh", resolution=16, channels=3, widths=(4, 6), convs=2, decoder=True),
    "mesh_16": lambda: build("mesh", resolution=64, channels=18, widths=(16, 32), convs=2),
    "unet2d": lambda: build("unet2d", resolution=32, width=4, levels=3),
    "unet3d": lambda: build("unet3d", resolution=16, width=4, levels=2),
}
STRATEGIES = 10
STEPS, BATCH = 4, 4
#: Backends with their dtypes.
KERNELS = [("numpy", "float64"), ("numpy", "float32"), ("onednn", "float32")]
RULES = ("pointwise", "block", "random")


@dataclass(frozen=True)
class Case:
    """Network, number of the strategy, backend and dtype. `name` is one of `ZOO`, or ``"random"``."""

    name: str
    seed: int
    backend: str
    dtype: str

    def __str__(self) -> str:
        return f"--only {self.name} --seed {self.seed} --kernels {self.backend}:{self.dtype}"

    def network(self) -> Network:
        """Return the network."""
        return ZOO[self.name]() if self.name in ZOO else Combination(self.seed).network

    def strategy(self, network: Network, size: int) -> Strategy:
        """Return the strategy without recomputation."""
        draw = np.random.default_rng([35, self.seed])
        statistics = str(draw.choice(["global", "global", "sample", "local"]))
        passes = [(), ("fuse",), ("overlap",), ("fuse", "overlap")][int(draw.integers(4))]
        cut = random_strategy(network, size, self.seed)
        return replace(cut, options={"statistics": statistics}, passes=passes)

    @property
    def batch(self) -> int:
        """Number of samples."""
        return BATCH if self.name in ZOO else Combination(self.seed).batch

    def fill(self, executor: Executor, step: int) -> None:
        """Fill the inputs of a step. Collective."""
        if self.name in ZOO:
            fill(executor, step)
            return
        for name, array in Combination(self.seed).arrays(step).items():
            executor.set_input(name, array)

    def recomputed(self, network: Network, strategy: Strategy, size: int, rule: str) -> Strategy:
        """Return the strategy with recomputation by a rule."""
        draw = np.random.default_rng([36, self.seed])
        if rule == "random":
            layers = {
                name: {**strategy.layers[name], "recompute": str(draw.choice(["none", "pointwise", "block"]))}
                for name in strategy.layers
            }
            return replace(strategy, layers=layers)
        if rule == "block" and draw.random() < 0.8:
            return keep_few(network, strategy, Target(self.batch, size))
        return replace(strategy, options={**strategy.options, "recompute": rule})


@dataclass
class Result:
    """Losses, digests of losses and of this rank's parameters and states, and the arena as allocated and as predicted
    [B].
    """

    losses: list[float]
    digests: dict[str, str]
    allocated: int
    predicted: int

    def difference(self, other: Result) -> str:
        """Return the first difference of `other`, or an empty text."""
        if other.allocated != other.predicted:
            return f"arena: predicted {other.predicted:,} B, allocated {other.allocated:,} B"
        names = [name for name, digest in self.digests.items() if other.digests[name] != digest]
        return f"losses {self.losses} and {other.losses}, {len(names)} arrays: {', '.join(names[:6])}" if names else ""


def train(case: Case, network: Network, comm: Communicator, backend: Any, strategy: Strategy, debug: bool) -> Result:
    """Train some steps. Collective."""
    batch, dtype, waits = case.batch, np.dtype(case.dtype), comm.waits_for_network
    target = Target(batch, comm.size, comm.rank, dtype, overlaps=waits, padded_channels=backend.padded_channels)
    predicted = compile_program(network, strategy, target).placement.size
    with Executor(network, comm, backend, batch, strategy, case.dtype, seed=3, debug=debug) as executor:
        trainer, losses = Trainer(executor, SGD(executor.store, momentum=0.9), Constant(0.02)), list[float]()
        for step in range(STEPS):
            case.fill(executor, step)
            losses.append(float(trainer.step()))
        trainer.synchronize()
        arrays = {"losses": np.array(losses), **executor.store.params, **executor.store.state}
        digests = {key: hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest() for key, a in arrays.items()}
        allocated = predicted if debug else len(executor.runner.arena)
    return Result(losses, digests, allocated, predicted)


def differences(case: Case, comm: Communicator, debug: bool) -> Iterator[tuple[str, str, int, int]]:
    """Yield per rule its name, the differences of all ranks as text, and the arena with and without it [B]. Collective.
    """
    network = case.network()
    strategy = case.strategy(network, comm.size)
    with get_backend(case.backend, threads=1) as backend:
        kept = train(case, network, comm, backend, strategy, debug)
        for rule in RULES:
            other = case.recomputed(network, strategy, comm.size, rule)
            made = train(case, network, comm, backend, other, debug)
            texts = comm.allgather_objects(kept.difference(made))
            text = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
            yield rule, text, made.allocated, kept.allocated


def cases(names: list[str], seeds: list[int], kernels: list[tuple[str, str]]) -> list[Case]:
    """Return all cases of these networks, strategies and kernels in an order that does not depend on the ranks."""
    found = [Case(name, seed, *kernel) for name in names for seed in seeds for kernel in kernels]
    return [found[i] for i in np.random.default_rng(1).permutation(len(found))]


def check(case: Case, comm: Communicator, debug: bool, log: Callable[[str], None]) -> tuple[int, int]:
    """Check one case; return the numbers of comparisons and of differences. Collective."""
    count = failed = 0
    try:
        for rule, text, arena, kept in differences(case, comm, debug):
            count += 1
            failed += bool(text)
            log(f"{'DIFFERENT' if text else 'same':10}{case}  {rule}  arena {100 * (arena / kept - 1):+.0f} %  {text}")
    except Exception as error:
        if not is_shared(error, comm.size):
            log(f"FAILED on rank {comm.rank}: {case}")
            raise
        count, failed = count + 1, failed + 1
        log(f"{'FAILED':10}{case}  {type(error).__name__}: {error}")
    return count, failed


def main(
    only: Annotated[str, typer.Option(help=f"Networks, of {', '.join(ZOO)}, random.")] = ",".join([*ZOO, "random"]),
    seed: Annotated[int, typer.Option(help="Only this strategy.")] = -1,
    kernels: Annotated[str, typer.Option(help="Only these, as BACKEND:DTYPE.")] = "",
    some: Annotated[int, typer.Option(min=0, help="Cases at most; 0 for all.")] = 0,
    skip: Annotated[int, typer.Option(min=0, help="Cases that are left out first.")] = 0,
    seconds: Annotated[float, typer.Option(min=0, help="Time after which no case begins; 0 for no limit.")] = 0.0,
    debug: Annotated[bool, typer.Option("--debug", help="Detect accesses that kernels do not declare; slow.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Print every comparison.")] = False,
) -> None:
    """Compare training with and without recomputation, bit by bit."""
    chosen = [tuple(one.split(":")) for one in kernels.split(",")] if kernels else KERNELS
    drawn = cases(only.split(","), [seed] if seed >= 0 else list(range(STRATEGIES)), chosen)[skip:]
    begin, done, count, failed = time.perf_counter(), 0, 0, 0
    with Communicator(MPI.COMM_WORLD) as comm:

        def log(line: str) -> None:
            if comm.rank == 0 and (verbose or not line.startswith("same")):
                print(line, flush=True)

        for case in drawn[: some or None]:
            # Rank 0 decides, because all ranks must run the same cases.
            if comm.allgather_objects(0 < seconds < time.perf_counter() - begin)[0]:
                break
            own = check(case, comm, debug, log)
            done, count, failed = done + 1, count + own[0], failed + own[1]
        if comm.rank == 0:
            print(f"{comm.size} ranks: {done} of {len(drawn)} cases, {count} comparisons, {failed} differences")
    if failed:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
