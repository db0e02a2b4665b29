"""Time of ranks to build an executor together, with many more ranks than cores.

    mpiexec -n 64 python -m benchmarks.startup_ranks --network mesh --options resolution=256 --parts height=8 width=8

Every repetition builds and closes one executor on the NumPy backend. The output has, per repetition, the wall time and
the CPU time of all ranks [s]; the last line is the median. The first repetition also opens shared memory and
communicators of groups. Garbage is collected between repetitions, because on each of 64 ranks this takes as long as
building.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

from mpi4py import MPI

from halograd.cli.options import parse_options
from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.layers.strategy import Strategy
from halograd.models import build
from halograd.training.executor import Executor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="mesh")
    parser.add_argument("--options", nargs="*", default=["resolution=256"], metavar="KEY=VALUE")
    parser.add_argument("--parts", nargs="*", default=None, metavar="AXIS=N")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--transport", default="auto")
    given = parser.parse_args()
    gc.disable()
    network = build(given.network, **parse_options(given.options))
    with Communicator(MPI.COMM_WORLD, given.transport) as comm, get_backend("numpy") as kernels:
        parts = {"height": comm.size} if given.parts is None else parse_options(given.parts)
        walls = []
        for number in range(given.repeat):
            comm.barrier()
            wall, cpu = time.perf_counter(), time.process_time()
            executor = Executor(network, comm, kernels, given.batch, Strategy(parts), "float32")
            cpu = comm.allreduce_scalar(time.process_time() - cpu)  # synchronizes all ranks
            walls.append(time.perf_counter() - wall)
            executor.close()
            del executor
            gc.collect()
            if comm.rank == 0:
                print(f"{number}: {walls[-1]:.2f} s, {cpu:.1f} CPU seconds of {comm.size} ranks", flush=True)
        if comm.rank == 0:
            print(f"median seconds with {comm.size} ranks: {statistics.median(walls):.2f}")


if __name__ == "__main__":
    main()
