"""A whole run in shards, resumed with sums by nodes on another number of ranks, and in shards again."""

import pytest

from tests.launch import PATIENT, mpiexec
from tests.training.launching import losses, sets
from tests.training.runs import write_config

STEPS = 18  # six per epoch
CONSTANT = "schedule={kind = 'step', learning_rate = 0.01, milestones = [1], factor = 0.5}"


def test_resumed_with_another_scheme_on_another_number_of_ranks(tmp_path):
    config = write_config(tmp_path)

    def train(ranks, epochs, out, *settings, resume=()):
        settings = sets("training.batch=2", f"training.epochs={epochs}", CONSTANT, f"output.directory={out}", *settings)
        done = mpiexec(ranks, ["-m", "halograd", "train", config, *settings, *resume])
        assert done.returncode == 0, done.stderr
        return losses(out)

    nodes = "backend.transport=emulated:alpha=1e-5,beta=1e-11,node=2"
    wanted = train(1, 3, tmp_path / "whole")
    assert list(wanted) == list(range(1, STEPS + 1))
    out = tmp_path / "out"
    train(2, 1, out, "reduction.name=sharded")
    train(3, 2, out, "reduction.name=host_accumulate", "strategy.height=3", nodes, resume=["--resume"])
    found = train(2, 3, out, "reduction.name=sharded", "strategy.height=2", resume=["--resume"])
    assert list(found) == list(wanted)
    assert list(found.values()) == pytest.approx(list(wanted.values()), rel=1e-9)


def test_what_cannot_be_is_refused_in_one_line(tmp_path):
    config = write_config(tmp_path)
    for wrong, told in {
        "optimizer={kind = 'lars'}": 'optimizer.kind: expected sgd, adam or adamw with reduction.name = "sharded"',
        "reduction.payload=bfloat16": "reduction.payload: expected",
    }.items():
        done = mpiexec(2, [*PATIENT, "train", config, *sets("reduction.name=sharded", wrong)])
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert told in line
    settings = sets("reduction.name=hierarchical", "backend.transport=mpi")
    done = mpiexec(2, [*PATIENT, "train", config, *settings])
    assert done.returncode == 2
    assert 'by which ranks share memory with "hierarchical", got "mpi"; choose backend.transport' in done.stderr
