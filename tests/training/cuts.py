"""Comparison of whole runs under several cuts with runs of one process."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from mpi4py import MPI

from halograd import Callback
from halograd.training import evaluate, train
from halograd.training.log import read_log

#: Cuts by the number of ranks.
CUTS: dict[int, list[dict[str, int]]] = {
    1: [{}],
    2: [{"height": 2}, {"sample": 2}],
    3: [{"width": 3}],
    4: [{"height": 2, "width": 2}],
}


class Stop(Callback):
    """Callback that signals some ranks, by default all, to stop after an update."""

    def __init__(self, step: int, here: bool = True) -> None:
        self.step, self.here = step, here

    def on_step(self, step: int, loss: float, learning_rate: float) -> None:
        if step == self.step and self.here:
            os.kill(os.getpid(), signal.SIGUSR1)


def overrides_of(cut: Mapping[str, int]) -> list[str]:
    """Return the overrides of a configuration for a cut."""
    return [f"strategy.{axis}={n}" for axis, n in cut.items()]


def logged_losses(folder: Path) -> list[float]:
    """Return the losses in a run's log, step by step."""
    return [entry["loss"] for entry in read_log(folder / "log.jsonl", "step")]


def logged_rates(folder: Path) -> list[float]:
    """Return the learning rates in a run's log, step by step."""
    return [entry["learning_rate"] for entry in read_log(folder / "log.jsonl", "step")]


def scores_of(comm: MPI.Comm, config: Path, sets: Sequence[str]) -> dict[str, Any]:
    """Return the scores of all samples after a run of two epochs. Collective over `comm`."""
    train(config, [*sets, "training.epochs=2"], comm=comm)
    scores = evaluate(config, sets, "all", comm=comm)
    del scores["checkpoint"]
    return scores


def check_scores(comm: MPI.Comm, config: Path) -> dict[str, Any]:
    """Assert that a run of two epochs has the scores of one process under every cut. Collective over `comm`.

    Predictions are written to the working folder: ``{number}.h5`` for the cut with this number, ``alone.h5`` for one
    process.

    Returns
    -------
    dict
        On rank 0 the scores of one process, elsewhere an empty dictionary.
    """
    found = []
    for number, cut in enumerate(CUTS[comm.size]):
        sets = [*overrides_of(cut), f"output.directory=cut{number}"]
        train(config, [*sets, "training.epochs=2"], comm=comm)
        found.append(evaluate(config, sets, predictions=f"{number}.h5", comm=comm))
    if comm.rank:
        return {}
    alone = ["output.directory=alone"]
    train(config, [*alone, "training.epochs=2"], comm=MPI.COMM_SELF)
    want = evaluate(config, alone, predictions="alone.h5", comm=MPI.COMM_SELF)
    for scores in found:
        for key in want.keys() - {"checkpoint"}:
            close = pytest.approx(want[key], rel=1e-9, abs=1e-12)
            assert scores[key] == close, f"{key}: expected {close}, got {scores[key]}"
    return want


def check_equal_runs(comm: MPI.Comm, config: Path, runs: Mapping[str, Sequence[str]]) -> None:
    """Assert that runs have the same losses and scores, bit for bit, under every cut, and the first has them alone.

    Collective over `comm`.

    Parameters
    ----------
    runs
        Name -> overrides. The folder of a run, next to the configuration, is its name with the number of the cut.
    """
    first = next(iter(runs.values()))
    for number, cut in enumerate(CUTS[comm.size]):
        found = {}
        for name, sets in runs.items():
            out = config.parent / f"{name}{number}"
            scores = scores_of(comm, config, [*overrides_of(cut), *sets, f"output.directory={out}"])
            found[name] = scores, curve(out)
        assert all(one == (scores, curve(out)) for one in found.values()), found
    if comm.rank == 0:
        alone = scores_of(MPI.COMM_SELF, config, [*first, f"output.directory={config.parent / 'alone'}"])
        assert math.isfinite(scores["loss"]) and scores == pytest.approx(alone, rel=1e-9, abs=1e-12)
    comm.barrier()


def check_resumed(
    comm: MPI.Comm,
    config: Path,
    common: Sequence[str],
    cuts: Sequence[Sequence[str]],
    parts: Sequence[int] = (1, 2),
    stop: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Assert that stopped and resumed runs log the curves of one process without a stop. Collective over `comm`.

    Parameters
    ----------
    config
        The configuration. Runs are written next to it: ``cut{number}`` by all ranks, ``alone`` by one process.
    common
        Overrides of all runs.
    cuts
        Further overrides of each run by all ranks.
    parts
        Epochs after which a run ends, one for each job of the run.
    stop
        Update after which a signal stops the first job.

    Returns
    -------
    dict
        The result of the last job of each run by its folder; that of ``alone`` only on rank 0.
    """
    scores = {}

    def run(out: str, sets: Sequence[str], comm: MPI.Comm, parts: Sequence[int]) -> dict[str, Any]:
        sets = ['schedule.kind="constant"', *common, *sets, f"output.directory={config.parent / out}"]
        for number, epochs in enumerate(parts):
            callbacks = [Stop(stop)] if stop is not None and len(parts) > 1 and not number else []
            result = train(config, [*sets, f"training.epochs={epochs}"], number > 0, comm=comm, callbacks=callbacks)
            # The ranks agree a step after the signal.
            assert not callbacks or (result["stopped"] and stop <= result["steps"] <= stop + 1)
        scores[out] = evaluate(config, sets, "all", comm=comm)["loss"]
        return result

    results = {f"cut{number}": run(f"cut{number}", sets, comm, parts) for number, sets in enumerate(cuts)}
    if comm.rank == 0:
        results["alone"] = run("alone", [], MPI.COMM_SELF, parts[-1:])
        for out in results:
            assert_same(curve(config.parent / out), curve(config.parent / "alone"))
            assert logged_rates(config.parent / out) == pytest.approx(logged_rates(config.parent / "alone"), rel=1e-12)
            assert scores[out] == pytest.approx(scores["alone"], rel=1e-9), out
    return results


TOLERANCE = 1e-9


def curve(directory):
    """Return the losses by step, and the validation scores in order, from the log of a run."""
    losses = {e["step"]: e["loss"] for e in read_log(directory / "log.jsonl", "step")}
    metrics = [
        {k: v for k, v in e.items() if k not in ("event", "epoch", "step", "time")}
        for e in read_log(directory / "log.jsonl", "validation")
    ]
    return losses, metrics


def assert_same(found, wanted):
    assert found[0].keys() == wanted[0].keys()
    assert list(found[0].values()) == pytest.approx(list(wanted[0].values()), rel=TOLERANCE)
    assert len(found[1]) == len(wanted[1])
    for mine, theirs in zip(found[1], wanted[1]):
        assert mine == pytest.approx(theirs, rel=TOLERANCE)
