"""`halograd plan --cores`: every split is a job with its own threads, and the best is printed; the hint of ``auto``."""

import json
from pathlib import Path

import pytest
from mpi4py import MPI

from halograd import auto, local, measuring
from halograd.auto import try_run
from halograd.cli.run import run
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.limits import Cores
from halograd.local import CoreSplit, try_splits
from halograd.measuring import StepTrial
from halograd.perfmodel.plans import Plan
from halograd.training.config import check_config, parse_config
from tests.cli.test_automatic import AUTO, UNMEASURED


@pytest.fixture
def jobs(monkeypatch):
    """Record the started jobs (command, ranks, configuration); return made-up results, and none for 3 ranks."""
    found = []

    def started(mpiexec, ranks, arguments, say):
        command, job, result = arguments
        config = check_config(json.loads(Path(job).read_text()))
        found.append((command, ranks, config))
        say("a line")
        if ranks == 3:
            raise UserError("`halograd try-split` on 3 ranks: expected exit code 0, got 2")
        seconds = 0.1 * ranks
        one = CoreSplit(ranks, config.backend.threads, 0.9 * seconds, seconds, "elimination", 1.5 * seconds)
        Path(result).write_text(json.dumps(vars(one)))

    monkeypatch.setattr(local, "run_ranks", started)
    monkeypatch.setattr(local, "find_mpiexec", lambda: "mpiexec")
    return found


def test_every_split_is_a_job_with_all_cores(jobs, capsys):
    options = ("--cores", "6", "--batch", "2", "--option", "resolution=32", "--kernels", "numpy", "--budget", "1")
    assert run(["plan", "mesh", *options]) == 0
    assert [(command, ranks, config.backend.threads) for command, ranks, config in jobs] == [
        ("try-split", 1, 6),
        ("try-split", 2, 3),
        ("try-split", 3, 2),
        ("try-split", 6, 1),
    ]
    config = jobs[0][2]
    assert (config.model.name, config.model.options, config.training.batch) == ("mesh", {"resolution": 32}, 2)
    assert (config.backend.kernels, config.strategy.auto, config.strategy.budget) == ("numpy", True, 1)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "3 ranks x 2 threads cannot be tried: `halograd try-split` on 3 ranks: expected exit code 0, got 2" in err
    (best,) = [line for line in lines if line.endswith("the best")]
    assert best.split()[:6] == ["1", "rank", "x", "6", "threads", "90.000"]
    assert "best: 1 rank x 6 threads, 100 ms a step" in lines
    assert "cutting every layer over 2 ranks would take 200% longer" in lines
    assert not any("3 ranks" in line for line in lines), "what cannot be tried is left out"


def test_a_mistake_in_an_option_is_said_once(jobs, capsys):
    assert run(["plan", "mesh", "--cores", "2", "--batch", "2", "--option", "resolutoin=64"]) == 2
    err = capsys.readouterr().err
    assert err.count("resolutoin: unknown key") == 1 and "did you mean resolution?" in err and not jobs


def test_as_json(jobs, capsys):
    assert run(["plan", "mesh", "--cores", "2", "--batch", "2", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["ranks"], first["threads"], second["ranks"], second["seconds"]) == (1, 2, 2, 0.2)


def test_none_can_be_tried(jobs, monkeypatch):
    monkeypatch.setattr(local, "splits", lambda cores: [(3, 1)])
    with pytest.raises(UserError, match="on 3 ranks"):
        try_splits(3, {"model": {"name": "mesh"}, **REST}, lambda line: None, lambda ranks, threads: None)


REST = {
    "data": {"path": "none.h5"},
    "optimizer": {"kind": "sgd"},
    "schedule": {"learning_rate": 1e-3},
    "training": {"epochs": 1, "batch": 2},
}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "1"], "plan: expected --ranks with a --machine, or --cores of this one, got both or neither"),
        (["--batch", "1", "--cores", "2", "--ranks", "2"], "got both or neither"),
        (["--batch", "1", "--cores", "2", "--machine", "lassen"], "--cores: expected no --machine with it"),
        (["--batch", "1", "--ranks", "2"], "--machine: expected one of cori-haswell"),
        (["--batch", "1", "--cores", "0"], "--cores: expected"),
        (["--batch", "1", "--cores", "2", "--out", "plan.json"], "--cores: expected no --out with it"),
        (["--batch", "1", "--cores", "2", "--cache", "times"], "--cores: expected no --cache with it"),
        (["--batch", "1", "--cores", "2", "--full"], "--cores: expected no --full with it"),
        (["--batch", "1", "--cores", "2", "--frontier"], "--cores: expected no --frontier with it"),
        (["--batch", "1", "--ranks", "2", "--machine", "lassen", "--kernels", "numpy"], "--kernels: expected --cores"),
        (["--batch", "1", "--ranks", "2", "--machine", "lassen", "--budget", "1"], "--budget: expected --cores"),
        (["--batch", "1", "--ranks", "2", "--machine", "lassen", "--plot", "a.png"], "--plot: expected --frontier"),
        (
            ["--batch", "1", "--ranks", "2", "--machine", "lassen", "--frontier", "--out", "plan.json"],
            "--out: expected no --frontier with it",
        ),
    ],
)
def test_refusals(jobs, capsys, options, message):
    assert run(["plan", "mesh", *options]) == 2
    assert message in capsys.readouterr().err and not jobs


@pytest.mark.ranks(1, 2)
def test_steps_are_tried_of_the_plan_the_grid_and_one_rank(known, monkeypatch):
    monkeypatch.setattr(auto, "usable_cores", lambda: Cores(frozenset({0, 1})))
    monkeypatch.setattr(measuring, "SECONDS", 0.01)
    with Communicator(MPI.COMM_WORLD) as comm:
        config = parse_config(AUTO, [UNMEASURED, f"output.directory={known / 'out'}"])
        trial = try_run(config, comm)
        assert comm.bcast(trial.seconds) == trial.seconds, "all ranks settle on the same"
        assert {trial.plan.planner, "grid"} <= {*trial.seconds, trial.plan.planner} and trial.name in trial.seconds
        assert "grid" in trial.seconds
        assert (trial.alone is None) == (comm.size == 1)


def test_what_a_run_says_of_its_cores(tmp_path):
    plan = object.__new__(Plan)
    vars(plan)["ranks"] = 2
    tried = {"elimination": 0.02, "grid": 0.03}
    slow = StepTrial(plan, "elimination", tried, 0.05).lines(1)
    assert slow == [
        "steps tried: elimination 20.00 ms, grid 30.00 ms; training with elimination",
        "cores: 2 ranks x 1 thread take 20.00 ms; 1 rank x 2 threads would take 50.00 ms",
    ]
    (_, fast) = StepTrial(plan, "elimination", tried, 0.01).lines(1)
    assert fast.endswith("would take 10.00 ms, 2.00 x as fast: start one, with --threads 2")
    assert StepTrial(plan, "data").lines(1) == []
