"""What is called while a run trains: for loggers of one's own, and for looking on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import SupportsFloat

__all__ = ["Callback"]


class Callback:
    """What a run calls while it trains: override the methods that are wanted.

    Every method is called on all ranks, at the same place of the run.
    So a method may be collective over the ranks of the run, and must not do on one rank what others wait for. Write
    files on rank 0 only. An exception on any rank ends the job, as one in a layer does.
    """

    def on_step(self, step: int, loss: SupportsFloat, learning_rate: float) -> None:
        """After an update.

        Parameters
        ----------
        step
            Updates done.
        loss
            Of the batch, before the update. On a device it may still be computed: ``float(loss)`` waits for it, on all
            ranks.
        learning_rate
            Of the update.
        """

    def on_epoch(self, epoch: int, scores: Mapping[str, float | None]) -> None:
        """After the validation of an epoch, which is counted from 0.

        Parameters
        ----------
        scores
            As printed, the mean ``loss`` first; empty where nothing is held out. None: undefined.
        """

    def on_checkpoint(self, step: int, path: Path, best: bool) -> None:
        """After a checkpoint was written; `best`: its validation is the best so far."""
