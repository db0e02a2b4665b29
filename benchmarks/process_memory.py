"""Peak memory of a whole process against the prediction, for six networks on one rank.

    python benchmarks/process_memory.py
    python benchmarks/process_memory.py --networks unet3d resnet50

Each network is trained for two steps in a separate process: the compiled program, kernels, optimizer (SGD with
momentum) and a loader that reads batches ahead. ``process`` is the growth of the peak of resident memory (VmHWM) from
the time when libraries are loaded and the data set is made; ``plan`` is the prediction of `memory_of` without any
array, as plans and `check_memory` make it; ``run`` has the workspaces that the kernels reserved in place of the
estimate. MiB; ``ratio`` is process / plan.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent.parent))

import numpy as np
from mpi4py import MPI

import halograd as hg
from benchmarks.memory_ranks import fill, peak_bytes, reset_peak, resident_bytes, warm_up
from halograd.comm import Communicator
from halograd.data import ArrayDataset, Loader, Sampler
from halograd.kernels import get_backend
from halograd.layers import Network
from halograd.layers.strategy import Strategy, parameter_blocks
from halograd.models import build
from halograd.perfmodel.cost import memory_of, program_of
from halograd.program.program import Target
from halograd.training.executor import Executor
from halograd.training.optimizers import SGD

#: Sets of buffers of the loader, steps, and arrays of the optimizer's state.
AHEAD, STEPS, SLOTS = 2, 2, 1


def group_norms() -> Network:
    """Build a U-shaped network with group norms, for samples of 512 x 512 x 4."""
    x, target = hg.Input((512, 512, 4), "x"), hg.Input((512, 512, 1), "target", dtype="uint8")

    def block(y: hg.layers.Node, filters: int) -> hg.layers.Node:
        return hg.GroupNorm(8, activation="relu")(hg.Conv(filters, 3, padding=1, bias=False)(y))

    fine = block(block(x, 32), 32)
    coarse = block(block(hg.MaxPool(2)(fine), 64), 64)
    y = block(hg.Concat()(fine, hg.ConvTranspose(32, 2, stride=2)(coarse)), 32)
    return hg.Network({"loss": hg.SoftmaxCrossEntropy()(hg.Conv(2, 1)(y), target)})


#: Networks with the number of samples in a batch.
NETWORKS: dict[str, tuple[Callable[[], Network], int]] = {
    "mesh_2k": (lambda: build("mesh_2k", resolution=1024), 1),
    "resnet50": (lambda: build("resnet50", resolution=256), 8),
    "unet2d": (lambda: build("unet2d", resolution=256), 2),
    "unet3d": (lambda: build("unet3d", resolution=64), 1),
    "alexnet": (lambda: build("alexnet"), 32),
    "group_norm": (group_norms, 4),
}


def measure(name: str) -> tuple[int, int, int]:
    """Train the network for a few steps; return the memory of the process, the plan and the run [B]."""
    make, batch = NETWORKS[name]
    network, draw = make(), np.random.default_rng(0)
    with Communicator(MPI.COMM_SELF) as comm, get_backend("auto", threads=1) as backend:
        warm_up(backend)
        shapes = {key: (STEPS * batch, *node.shape) for key, node in network.inputs.items()}
        arrays = {key: np.empty(shape, np.float32) for key, shape in shapes.items()}
        for key, array in arrays.items():
            if network.inputs[key].dtype == "compute":
                fill(array, draw)
            else:
                array.fill(1)
        dataset = ArrayDataset(arrays)
        before = resident_bytes()
        reset_peak()
        with Executor(network, comm, backend, batch, Strategy()) as executor:
            optimizer = SGD(executor.store, momentum=0.9)
            assert executor.reducer is not None
            executor.reducer.update = optimizer.update
            inputs = {key: executor.input(key) for key in network.inputs}
            with Loader(dataset, {key: block.box for key, block in inputs.items()}, depth=AHEAD) as loader:
                for item in loader.iterate(Sampler(np.arange(STEPS * batch), batch, shuffle="never").rest_of_epoch()):
                    for key, block in inputs.items():
                        np.copyto(block.array, item.arrays[key], casting="unsafe")
                    executor.forward()
                    executor.loss_value()
                    optimizer.begin_step(1e-3)
                    executor.backward()
                    executor.reducer.finish()
                measured, workspace = peak_bytes() - before, backend.held_bytes
    blocks = parameter_blocks(network, Strategy(), 1)
    program = program_of(network, Strategy(), Target(batch, 1), blocks)
    plan, run = (
        sum(memory_of(program, blocks, SLOTS, ahead=AHEAD, workspace=held).values()) for held in (None, workspace)
    )
    return measured, plan, run


def main() -> None:
    """Print a line per network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    print(f"{'network':<12}{'process':>10}{'plan':>10}{'run':>10}{'ratio':>8}{'of run':>8}", flush=True)
    for name in parser.parse_args().networks:
        with multiprocessing.get_context("spawn").Pool(1) as fresh:
            measured, plan, run = fresh.apply(measure, (name,))
        numbers = "".join(f"{nbytes / 2**20:>10.1f}" for nbytes in (measured, plan, run))
        print(f"{name:<12}{numbers}{measured / plan:>8.3f}{measured / run:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
