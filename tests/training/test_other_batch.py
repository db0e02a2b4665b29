"""Tests of runs that are resumed with batches of another size: they go on after the same samples, under every cut."""

import os
import signal

import pytest
from mpi4py import MPI

from halograd import Callback
from halograd.training import train
from halograd.training.log import read_log
from tests.training.cuts import CUTS, overrides_of


class Stop(Callback):
    """Callback that stops a run after its fourth update."""

    def on_step(self, step, loss, learning_rate):
        if step == 4:
            os.kill(os.getpid(), signal.SIGUSR1)


def steps(folder):
    entries = read_log(folder / "log.jsonl", "step")
    return [(entry["epoch"], entry["loss"], entry["learning_rate"]) for entry in entries]


SETS = ["training.epochs=2", "schedule={kind='linear', learning_rate=0.01}"]


def run(out, sets, comm):
    """Train in batches of 4, in the second epoch after a signal in batches of 2. Collective over `comm`."""
    sets = [*SETS, *sets, f"output.directory={out}"]
    assert train("run.toml", sets, comm=comm, callbacks=[Stop()])["stopped"]
    comm.barrier()
    return train("run.toml", [*sets, "training.batch=2"], True, comm=comm)


@pytest.mark.ranks(1, 2, 4)
def test_with_smaller_batches(comm, config):
    """13 samples: an epoch of 3 steps of 4, then 1 or 2 of 4 and the rest of 2; the rate is that of the samples."""
    for number, cut in enumerate(CUTS[comm.size]):
        result = run(f"cut{number}", overrides_of(cut), comm)
        comm.barrier()
        found = steps(config.parent / f"cut{number}")
        first = sum(1 for epoch, *_ in found if epoch == 0)
        stopped = max(n for n in (4, 5) if n <= result["steps"] and (len(found) - n) * 2 + (n - 3) * 4 == 12)
        assert first == 3 and result["steps"] == len(found) and result["validation"]
        assert [rate for *_, rate in found[:stopped]] == pytest.approx([0.01 * (1 - s / 6) for s in range(stopped)])
        begin = 6 + 2 * (stopped - 3)  # in steps of 2 samples
        rates = [0.01 * (1 - s / 12) for s in range(begin, 12)]
        assert [rate for *_, rate in found[stopped:]] == pytest.approx(rates)
        comm.barrier()
    if comm.rank == 0 and comm.size > 1:
        run("alone", [], MPI.COMM_SELF)
        alone = steps(config.parent / "alone")
        losses = [loss for _, loss, _ in found]
        assert losses[:4] == pytest.approx([loss for _, loss, _ in alone[:4]], rel=1e-9)
