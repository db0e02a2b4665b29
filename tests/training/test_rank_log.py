"""A log of every rank: what all ranks say is in it, and what is heard outside does not change."""

from __future__ import annotations

import logging
import re
import sys
from pathlib import Path

import pytest

from halograd.errors import UserError
from halograd.training.log import RankLog
from halograd.training.run import train
from tests.launch import mpiexec
from tests.training.runs import write_config


def test_what_goes_into_it(tmp_path, capsys):
    heard: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    listener = Listener()
    root, log = logging.getLogger(), logging.getLogger("halograd.test")
    level = root.level
    root.addHandler(listener)
    try:
        with RankLog(tmp_path, 3, 4):
            log.info("only in the file")
            log.warning("in both")
            print("printed")
            print("complained", file=sys.stderr)
        assert root.level == level and listener.level == logging.NOTSET
    finally:
        root.removeHandler(listener)
    log.warning("afterwards")
    text = (tmp_path / "rank-0003.log").read_text()
    assert heard == ["in both"]
    assert capsys.readouterr() == ("printed\n", "complained\n")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d rank 3 of 4 on \S+, process \d+, cores [\d,-]+\n", text)
    assert "INFO halograd.test: only in the file\n" in text and "WARNING halograd.test: in both\n" in text
    assert "\nprinted\ncomplained\n" in text and "afterwards" not in text and text.endswith(" ends\n")


def test_what_ended_it(tmp_path):
    for message in ("expected a moon", "expected a sun"):
        with pytest.raises(UserError), RankLog(tmp_path, 0, 1):
            raise UserError(message)
    text = (tmp_path / "rank-0000.log").read_text()
    assert text.index("UserError: expected a moon") < text.index("UserError: expected a sun")  # continued


@pytest.mark.mpi
def test_a_run_with_a_log_of_every_rank(comm, tmp_path):
    folder = Path(comm.bcast(str(tmp_path)))
    if comm.rank == 0:
        write_config(folder)
    comm.Barrier()
    train(folder / "run.toml", ["output.rank_logs=true", "output.timeline=true", "training.epochs=2"], comm=comm)
    comm.Barrier()
    logs = sorted((folder / "out" / "logs").iterdir())
    assert [path.name for path in logs] == [f"rank-{rank:04d}.log" for rank in range(comm.size)]
    for path in logs:
        text = path.read_text()
        assert re.search(r"INFO halograd\.training\.epochs: step 6: waited \d+\.\d+ s for data", text)
        assert ("step 6: allreduce {'communication':" in text) == (comm.size > 1)
    comm.Barrier()


def test_only_rank_0_is_heard(tmp_path):
    """Lines that other ranks print are in their logs, and nowhere else."""
    config = write_config(tmp_path)
    (tmp_path / "run.toml").write_text(config.read_text().replace("progress = false", "rank_logs = true"))
    done = mpiexec(2, ["-m", "halograd", "train", config, "--set", "training.epochs=1"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained to step 3") == 1 and done.stderr.count("2 rank(s)") == 1
    logs = [(tmp_path / "out" / "logs" / f"rank-000{rank}.log").read_text() for rank in (0, 1)]
    assert "epoch 1/1" in logs[0] and "epoch 1/1" not in logs[1] and "step 3: waited" in logs[1]


COMPLAINS = """
import logging
from mpi4py import MPI
from halograd.cli.run import run
run(["--version"], MPI.COMM_WORLD)
logging.warning("of rank %d", MPI.COMM_WORLD.rank)
logging.error("the disk of rank %d burns", MPI.COMM_WORLD.rank)
"""


def test_another_rank_says_which_it_is():
    """Rank 0 warns; others are heard when something is wrong."""
    lines = mpiexec(2, ["-c", COMPLAINS]).stderr.splitlines()
    wanted = ["halograd: of rank 0", "halograd: the disk of rank 0 burns"]
    assert [line for line in lines if "rank 1" not in line] == wanted
    (line,) = (line for line in lines if "rank 1" in line)
    assert re.fullmatch(r"halograd: rank 1 of 2 on \S+: the disk of rank 1 burns", line)


def test_a_folder_that_cannot_be_made(tmp_path):
    config = write_config(tmp_path)
    (tmp_path / "out").write_text("")
    for sets in (["output.rank_logs=true"], []):
        with pytest.raises(UserError, match=r"output\.directory: expected a folder that can be made, got .*/out"):
            train(config, sets)


@pytest.mark.parametrize("name", ["log.jsonl", "logs/rank-0000.log", "tensorboard"])
def test_files_that_cannot_be_written(name, tmp_path):
    """Something else is in their place, or they are another user's."""
    config = write_config(tmp_path)
    place = tmp_path / "out" / name
    place.parent.mkdir(parents=True, exist_ok=True)
    (place.touch if name == "tensorboard" else place.mkdir)()
    with pytest.raises(UserError, match=rf"output\.directory: expected files that can be .*, got .*{name}: "):
        train(config, ["output.rank_logs=true", "output.tensorboard=true"])
