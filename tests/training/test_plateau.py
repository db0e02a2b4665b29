"""Tests of schedules that follow validations, in whole runs: the same under every cut, and resumed."""

import pytest
from mpi4py import MPI

from halograd.errors import UserError
from halograd.training import train
from halograd.training.log import read_log
from tests.training.cuts import CUTS, overrides_of

PLATEAU = ["schedule={kind='plateau', learning_rate=0.3, factor=0.5, patience=1}", "training.epochs=6"]


def rates(folder):
    return [entry["learning_rate"] for entry in read_log(folder / "log.jsonl", "step")]


@pytest.mark.mpi
def test_plateau_under_cuts_and_resumed(comm, config, caplog):
    for number, cut in enumerate(CUTS[comm.size]):
        sets = [*PLATEAU, *overrides_of(cut), f"output.directory=cut{number}"]
        for epochs in (2, 4, 6):
            train(config, [*sets, f"training.epochs={epochs}"], epochs > 2, comm=comm)
    comm.barrier()
    if comm.rank == 0:
        train(config, [*PLATEAU, "output.directory=alone"], comm=MPI.COMM_SELF)
        alone = config.parent / "alone"
        want, losses = rates(alone), [entry["loss"] for entry in read_log(alone / "log.jsonl", "validation")]
        best, rate, expected = float("inf"), 0.3, []
        for loss in losses:
            expected += [rate] * 3
            best, rate = (loss, rate) if loss < best else (best, rate / 2)
        assert want == pytest.approx(expected, rel=1e-12) and len({*want}) > 1
        for number in range(len(CUTS[comm.size])):
            assert rates(config.parent / f"cut{number}") == pytest.approx(want, rel=1e-12)
    assert not [r for r in caplog.records if "schedule has changed" in r.getMessage()]


@pytest.mark.ranks(1, 2)
def test_plateau_without_validations_is_refused(comm, config):
    with pytest.raises(UserError, match=r"schedule\.score: expected held-out samples, .*, got data.validation = 0"):
        train(config, [*PLATEAU, "data.validation=0"], comm=comm)
