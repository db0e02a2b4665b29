"""Two training steps of small networks on a GPU, for compute-sanitizer: ``python -m tests.gpu.small_step [NAME]``."""

from __future__ import annotations

import sys

from mpi4py import MPI

from halograd.comm import Communicator
from halograd.kernels import get_backend
from halograd.training.executor import Executor
from halograd.training.optimizers import LARS, AdamW
from halograd.training.schedules import Constant
from halograd.training.trainer import Trainer
from tests.training.device_steps import NETWORKS
from tests.training.steps import fill

__all__ = ["main"]


def main() -> None:
    """Train the named networks, by default all, in float32 and in bfloat16, with different optimizers."""
    with Communicator(MPI.COMM_SELF) as comm, get_backend("cudnn") as kernels:
        for dtype, optimizer in (("float32", LARS), ("bfloat16", AdamW)):
            for name in sys.argv[1:] or NETWORKS:
                with Executor(NETWORKS[name](), comm, kernels, 2, dtype=dtype) as executor:
                    trainer = Trainer(executor, optimizer(executor.store), Constant(0.01), clip_norm=1.0)
                    for step in range(2):
                        fill(executor, step)
                        trainer.step()
                    trainer.synchronize()


if __name__ == "__main__":
    main()
