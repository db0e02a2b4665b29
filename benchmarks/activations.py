"""Savings by activations that the kernels of other layers compute.

    python benchmarks/activations.py --threads 2

Two networks of the same blocks alternate steps: one with the activation inside the layers, one with a separate
activation layer after each. The table shows per block, in percent of the second network: the best and the median time
of a step, and memory. With one thread, times are processor times, which depend less on the load of the machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer
from mpi4py import MPI

sys.path.append(str(Path(__file__).resolve().parent.parent))

from halograd.comm import Communicator
from halograd.kernels import Backend, get_backend
from halograd.layers import Add, BatchNorm, Conv, GlobalAveragePool, Input, MeanSquaredError, Network, Node
from halograd.layers.activation import _KINDS
from halograd.layers.strategy import Strategy
from halograd.training.executor import Executor

#: Function that adds a block to a node, given a maker of activations.
Block = Callable[[Node, Callable[[], object]], Node]

BLOCKS: dict[str, Block] = {
    "conv": lambda x, f: Conv(x.shape[-1], 3, padding=1, activation=f())(x),
    "conv 1x1": lambda x, f: Conv(x.shape[-1], 1, activation=f())(x),
    "conv, norm": lambda x, f: BatchNorm(activation=f())(Conv(x.shape[-1], 3, padding=1, bias=False)(x)),
    "conv, sum": lambda x, f: Add(f())(Conv(x.shape[-1], 1)(x), x),
}


def network(block: Block, kind: str, inside: bool, blocks: int, extent: int, channels: int) -> Network:
    """Return a network of `blocks` blocks. With ``inside=False`` the activation is a separate layer."""
    names = iter(range(blocks))
    y = Input((extent, extent, channels), "x")
    for _ in range(blocks):
        y = block(y, (lambda: _KINDS[kind]()) if inside else (lambda: _KINDS[kind](name=f"f{next(names)}")))
    y = GlobalAveragePool()(y)
    return Network({"y": y, "loss": MeanSquaredError("loss")(y, Input(y.shape, "target"))})


def step(executor: Executor, clock: Callable[[], float]) -> float:
    """Run one step and return its time [s]."""
    start = clock()
    executor.forward()
    executor.backward()
    if executor.reducer is not None:
        executor.reducer.finish()
    return clock() - start


def compare(
    block: Block, kind: str, backend: Backend, batch: int, rounds: int, sizes: tuple[int, int, int]
) -> list[float]:
    """Return the ratios of best time, median time and memory: activation inside the layers over separate layers."""
    with Communicator(MPI.COMM_SELF) as comm, ExitStack() as stack:
        both = []
        for inside in (True, False):
            fused_or_separate = Executor(network(block, kind, inside, *sizes), comm, backend, batch, Strategy({}))
            both.append(stack.enter_context(fused_or_separate))
            for name in fused_or_separate.network.inputs:
                array = fused_or_separate.input(name).array
                array[...] = np.random.default_rng(0).standard_normal(array.shape)
        clock = time.perf_counter if backend.threads > 1 else time.process_time
        times = [[step(executor, clock) for executor in both] for _ in range(rounds + 1)][1:]
        fused, separate = zip(*times)
        memory = [sum(executor.predicted_bytes.values()) for executor in both]
        return [min(fused) / min(separate), median(fused) / median(separate), memory[0] / memory[1]]


def main(
    kinds: Annotated[str, typer.Option(help="Activations.")] = "relu,leaky_relu,elu,silu,gelu",
    only: Annotated[str, typer.Option(help="Blocks, by default all.")] = ",".join(BLOCKS).replace(", ", "+"),
    blocks: Annotated[int, typer.Option(help="Blocks of a network.")] = 4,
    extent: Annotated[int, typer.Option(help="Rows and columns.")] = 64,
    channels: Annotated[int, typer.Option(help="Channels.")] = 64,
    batch: Annotated[int, typer.Option(help="Samples.")] = 4,
    rounds: Annotated[int, typer.Option(help="Steps of each.")] = 20,
    threads: Annotated[int, typer.Option(help="Threads of kernels.")] = 1,
) -> None:
    """Print the table of savings."""
    with get_backend("auto", threads=threads) as backend:
        typer.echo(f"{backend.describe()} [%]\n{'block':16}{'activation':12}{'best':>8}{'median':>8}{'memory':>8}")
        for name in only.split(","):
            for kind in kinds.split(","):
                block = BLOCKS[name.replace("+", ", ")]
                ratios = compare(block, kind, backend, batch, rounds, (blocks, extent, channels))
                typer.echo(f"{name:16}{kind:12}" + "".join(f"{100 * value:8.0f}" for value in ratios))


if __name__ == "__main__":
    typer.run(main)
