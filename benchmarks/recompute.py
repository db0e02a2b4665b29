"""Memory and time of a training step with outputs that are kept, and with outputs that are computed again.

    python benchmarks/recompute.py                                    # full sizes: 17 GiB of free memory
    python benchmarks/recompute.py --sizes mesh_2k=512,unet3d=64 --steps 12 --layers

One sample, float32, one rank, SGD with momentum. Per network one executor per rule (``strategy.recompute``) is made in
one process; then they run a step each in turn. After two rounds to warm up, every round gives the wall time and the
processor time of each rule. ``best`` and ``median`` are over all rounds. ``more`` is the median over rounds of a rule's
time divided by that of the rule ``none`` in the same round, minus 1; the number after it compares the best times. All
rules have the same losses, which is checked. ``arena`` is the memory of the arrays of a step; the second table contains
it for the full sizes, which compiling computes without running.

With ``--layers``, the time of repeated layers is printed next to that of their first run, by kind of layer.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from mpi4py import MPI

sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.memory import SHARE, available_bytes
from benchmarks.memory_ranks import fill
from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers import Network, Strategy
from halograd.models import build
from halograd.program.compiler import compile_program
from halograd.program.keeping import keep_few
from halograd.program.program import Target
from halograd.training import SGD, Constant, Trainer
from halograd.training.executor import Executor
from halograd.training.timeline import Timeline

__all__ = ["FULL", "arenas", "strategies"]

#: Resolutions of one sample of the networks that are compared.
FULL = {"mesh_2k": 2048, "resnet50": 2048, "unet3d": 128}
RULES = ("none", "pointwise", "block")
SIZES = ",".join(f"{name}={resolution}" for name, resolution in FULL.items())


def strategies(network: Network) -> dict[str, Strategy]:
    """Return the strategy of each rule, for one sample on one rank."""
    by_rule = {rule: Strategy({}, options={"recompute": rule} if rule != "none" else {}) for rule in RULES[:2]}
    return by_rule | {"block": keep_few(network, Strategy({}), Target(1))}


def arenas(network: Network, by_rule: Mapping[str, Strategy]) -> dict[str, int]:
    """Return the memory of the arrays of a step, by rule [B]."""
    return {rule: compile_program(network, strategy, Target(1)).placement.size for rule, strategy in by_rule.items()}


class Subject:
    """Training of one network under one rule, with the times of its steps [s].

    Attributes
    ----------
    wall, processor
        Times of all steps since `reset`.
    losses
        Losses of all steps.
    """

    def __init__(self, network: Network, strategy: Strategy, backend: Any, opened: ExitStack) -> None:
        self.timeline = Timeline(alone=True)
        comm = opened.enter_context(Communicator(MPI.COMM_SELF))
        comm.instruments.recorder = self.timeline
        self.executor = opened.enter_context(Executor(network, comm, backend, 1, strategy))
        self.trainer = Trainer(self.executor, SGD(self.executor.store, momentum=0.9), Constant(1e-4))
        for name, node in network.inputs.items():
            if node.dtype == "compute":
                fill(self.executor.input(name).array, np.random.default_rng(1))
        self.losses, self.wall, self.processor = list[float](), list[float](), list[float]()

    def step(self) -> None:
        """Run a step."""
        wall, processor = time.perf_counter(), time.process_time()
        self.losses.append(float(self.trainer.step()))
        self.wall.append(time.perf_counter() - wall)
        self.processor.append(time.process_time() - processor)

    def reset(self) -> None:
        """Forget all times."""
        self.wall.clear()
        self.processor.clear()
        self.timeline.clear()


def needed_bytes(network: Network, sizes: Mapping[str, int]) -> int:
    """Return the memory that the executors of all rules need together: arenas, and three arrays per parameter [B]."""
    parameters = sum(4 * np.prod(spec.shape, dtype=int) for spec in network.parameters().values())
    return sum(sizes.values()) + 3 * len(sizes) * int(parameters)


@contextmanager
def subjects(network: Network, threads: int) -> Iterator[dict[str, Subject]]:
    """Make the executors of all rules.

    Raises
    ------
    SystemExit
        If they do not fit into the memory that is free.
    """
    by_rule = strategies(network)
    needed = needed_bytes(network, arenas(network, by_rule))
    if needed > SHARE * available_bytes():
        raise SystemExit(
            f"recompute: {network.name}: expected {needed / SHARE / 2**30:.1f} GiB of free memory, got "
            f"{available_bytes() / 2**30:.1f}; use a smaller --sizes, or wait until other programs have ended"
        )
    with ExitStack() as opened:
        backend = opened.enter_context(get_backend("auto", threads=threads))
        yield {rule: Subject(network, strategy, backend, opened) for rule, strategy in by_rule.items()}


def rows(trainings: Mapping[str, Subject]) -> Iterator[str]:
    """Yield a line per rule."""
    first = trainings["none"]
    for rule, subject in trainings.items():
        size = subject.executor.program.placement.size
        saved = size / first.executor.program.placement.size - 1
        line = f"{rule:12}{size / 2**20:10.0f}{100 * saved:8.0f} %"
        for own, base in ((subject.wall, first.wall), (subject.processor, first.processor)):
            more = median(a / b for a, b in zip(own, base)) - 1
            line += f"{min(own):10.3f}{median(own):10.3f}{100 * more:8.1f} %{100 * (min(own) / min(base) - 1):8.1f} %"
        yield line


def repeated(network: Network, trainings: Mapping[str, Subject]) -> Iterator[str]:
    """Yield, by rule and kind of layer, the time per step of repeated layers, and that of their first run [ms]."""
    steps = len(trainings["none"].wall)
    for rule, subject in trainings.items():
        kinds: dict[str, list[float]] = {}
        for (name, category), phase in subject.timeline.phases.items():
            if category == "again":
                layer = name.removesuffix(" (again)")
                sums = kinds.setdefault(network.layers[layer].layer.kind, [0.0, 0.0, 0.0])
                sums[0] += 1
                sums[1] += phase.seconds
                sums[2] += subject.timeline.phases[layer, "forward"].seconds
        for kind, (count, again, forward) in kinds.items():
            yield f"{rule:12}{kind:20}{count:6.0f}{1e3 * again / steps:12.2f}{1e3 * forward / steps:12.2f}"


def compare(name: str, resolution: int, steps: int, threads: int, layers: bool) -> None:
    """Print the table of one network."""
    network = build(name, resolution=resolution)
    with subjects(network, threads) as trainings:
        for number in range(2 + steps):
            if number == 2:
                for subject in trainings.values():
                    subject.reset()
            for subject in trainings.values():
                subject.step()
        if len({tuple(subject.losses) for subject in trainings.values()}) > 1:
            raise SystemExit(f"recompute: {name}: expected the same losses of all rules, got others; report it")
        backend = trainings["none"].executor.kernels
        print(f"\n{name} at {resolution}, {steps} steps, {backend.describe()}")
        columns = "".join(f"{text:>10}" for text in ("best s", "median s", "more", "best"))
        print(f"{'':12}{'arena MiB':>10}{'':10}{columns}{columns}   (wall time, processor time)")
        for line in rows(trainings):
            print(line)
        if layers:
            print(f"{'':12}{'kind':20}{'layers':>6}{'again ms':>12}{'first ms':>12}")
            for line in repeated(network, trainings):
                print(line)
    sys.stdout.flush()


def main(
    sizes: Annotated[str, typer.Option(help="Networks with resolutions.")] = SIZES,
    steps: Annotated[int, typer.Option(min=1, help="Rounds.")] = 8,
    threads: Annotated[int, typer.Option(min=1, help="Threads of kernels.")] = 2,
    layers: Annotated[bool, typer.Option("--layers", help="Print times of repeated layers.")] = False,
) -> None:
    """Compare rules of recomputation."""
    for name, resolution in (item.split("=") for item in sizes.split(",")):
        compare(name, int(resolution), steps, threads, layers)
    print(f"\narena at full size [MiB]{'none':>16}{'pointwise':>20}{'block':>20}")
    for name, resolution in FULL.items():
        network = build(name, resolution=resolution)
        own = arenas(network, strategies(network))
        texts = [f"{size / 2**20:10,.0f} ({100 * (size / own['none'] - 1):4.1f} %)" for size in own.values()]
        print(f"{name + ' at ' + str(resolution):20}" + "".join(f"{text:>20}" for text in texts))


if __name__ == "__main__":
    typer.run(main)
