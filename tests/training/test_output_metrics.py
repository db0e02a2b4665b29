"""Tests of metrics in a user's file: exact under every cut; in log, best score, patience and report."""

import pytest
from mpi4py import MPI

from halograd.errors import UserError
from halograd.report.page import write_page
from halograd.report.status import read_record
from halograd.training import evaluate, train
from halograd.training.log import read_log
from tests.docs.pages import write_files
from tests.training.cuts import CUTS, overrides_of
from tests.training.runs import write_config

OWN = ['output.metrics=["within.py:Within:limit=1.5", "errors"]', 'output.best="within"', "training.patience=9"]
SETS = [*OWN, 'schedule.kind="constant"']


def write(folder):
    write_config(folder)
    write_files("extending.md", folder)


def scores(folder, out):
    keys = ("within", "mae", "rmse", "iou", "loss")
    return [[entry[key] for key in keys] for entry in read_log(folder / out / "log.jsonl", "validation")]


@pytest.mark.ranks(1, 2, 4)
def test_under_every_cut_and_resumed(comm, config):
    if comm.rank == 0:
        alone = train(config, [*SETS, "output.directory=alone"], comm=MPI.COMM_SELF)
    comm.barrier()
    want = scores(config.parent, "alone")
    assert len(want) == 3 and 0 < want[0][0] < 1 and want[0][0] != want[2][0]
    for number, cut in enumerate(CUTS[comm.size]):
        more = [*SETS, *overrides_of(cut), f"output.directory=cut{number}"]
        train(config, [*more, "training.epochs=2"], comm=comm)
        comm.barrier()
        result = train(config, more, resume=True, comm=comm)
        comm.barrier()
        found = scores(config.parent, f"cut{number}")
        assert [row[0] for row in found] == [row[0] for row in want]  # whole numbers are counted
        for row, expected in zip(found, want, strict=True):
            assert row == pytest.approx(expected, rel=1e-9)
        assert evaluate(config, more, details=f"{number}.json", comm=comm)["within"] == found[-1][0]
        if comm.rank == 0:
            assert result["best"] == alone["best"] and result["best"]["name"] == "within"
            folder = config.parent / f"cut{number}"
            write_page(read_record(folder), folder / "report.html", details=config.parent / f"{number}.json")
            text = (folder / "report.html").read_text()
            assert "within" in text and "prediction by Within" in text
        comm.barrier()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("sets", "message"),
    [
        (['output.metrics=["within.py:Inside"]'], "output.metrics: expected a class 'Inside' in within.py, got Within"),
        (['output.metrics=["within.py:Within:size=1"]'], "output.metrics.size: unknown key; expected one of limit"),
        (['output.metrics=["within.py:Within:limit=yes"]'], "output.metrics.limit: expected a number, got 'yes'"),
        (
            ['output.metrics=["auc"]'],
            "output.metrics: expected errors, dice, iou, weighted, or \"FILE.py:CLASS\", got 'auc'",
        ),
        (['output.metrics=["dice:all=true"]'], "output.metrics.all: unknown key; expected one of each"),
        (['output.metrics=["weighted"]'], "output.metrics: weighted: expected a loss of numbers, got one of classes"),
        (['output.metrics=["errors", "errors"]'], "errors: expected other scores than those of errors, got 'mae'"),
        (['output.metrics=["rms.py:RMSprop"]'], "output.metrics: rms.py:RMSprop: expected a class derived from Metric"),
        (["output.metrics=3"], "output.metrics: expected a list, got 3"),
    ],
)
def test_what_is_refused_before_the_run(comm, config, sets, message):
    with pytest.raises(UserError) as error:
        train(config, sets, comm=comm)
    assert message in str(error.value) and "\n" not in str(error.value)
