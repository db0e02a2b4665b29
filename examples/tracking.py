"""Callback that logs losses and scores of a run to MLflow.

    pip install mlflow
    halograd generate mesh-tangling mesh.h5 --samples 32 --resolution 32
    python -m examples.tracking mesh.h5 runs/tracked
    mlflow ui

Under ``mpirun`` only rank 0 writes. Weights & Biases works in the same way: ``wandb.init(config=...)``, then
``wandb.log(values, step=...)``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

import halograd as hg


class Mlflow(hg.Callback):
    """Callback that logs every n-th step, all validations, and the checkpoint of the best validation.

    Parameters
    ----------
    rank
        Rank of this process: rank 0 writes.
    settings
        Parameters of the run, by which runs can be searched.
    every
        Steps between two logged losses. Reading a loss makes the host wait for a device.
    """

    def __init__(self, rank: int, settings: Mapping[str, Any], every: int = 10) -> None:
        self.writes, self.every, self.step = rank == 0, every, 0
        if self.writes:
            import mlflow

            self.mlflow = mlflow
            mlflow.start_run()
            mlflow.log_params(dict(settings))

    def on_step(self, step: int, loss: SupportsFloat, learning_rate: float) -> None:
        self.step = step
        if step % self.every == 0:
            value = float(loss)  # on all ranks, because it may communicate
            if self.writes:
                self.mlflow.log_metrics({"loss": value, "learning rate": learning_rate}, step=step)

    def on_epoch(self, epoch: int, scores: Mapping[str, float | None]) -> None:
        if self.writes:
            known = {f"validation {name}": value for name, value in scores.items() if value is not None}
            self.mlflow.log_metrics(known, step=self.step)

    def on_checkpoint(self, step: int, path: Path, best: bool) -> None:
        if self.writes and best:
            self.mlflow.log_artifact(str(path), "best")


def main(data: str, out: str) -> None:
    """Train a small U-Net and log the run."""
    settings = {"epochs": 3, "batch": 4}
    network = hg.models.unet((32, 32), channels=18, classes=2, width=4, levels=2)
    hg.fit(network, data, out, callbacks=[Mlflow(hg.boot().rank, settings, every=2)], **settings)


if __name__ == "__main__":
    main(*sys.argv[1:])
