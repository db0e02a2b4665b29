"""Planners and baselines in a file of the user: they are compared and simulated, and runs use their plans."""

import json
from pathlib import Path

import pytest
from mpi4py import MPI

from halograd.auto import plan_run
from halograd.cli.run import run as command
from halograd.errors import UserError
from halograd.models import build
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.predict import Planning, plan_network
from halograd.training.run import train
from tests.training.runs import CONFIG, write_data

OWN = '''
from halograd.perfmodel.cuts import Baseline
from halograd.perfmodel.planners import Elimination, Planner

class Careful(Planner):
    """The optimum of the problem, once more."""

    name = "careful"

    def _search(self, problem):
        return Elimination()._search(problem)

class Samples(Baseline):
    """Half of the legal parts of the batch."""

    name = "samples"

    def parts(self, node, batch, ranks, samples):
        return (max(1, samples // 2), 1, 1, 1, 1, 1)

class Lost(Planner):
    name = "lost"
'''


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "planners.py"
    path.write_text(OWN)
    return path


def planned(planner: str, ranks: int = 4):
    network, machine = build("mesh_1k", resolution=64), Machine.load("lassen")
    return plan_network(network, 4, ranks, machine, RooflineTimes(machine), Planning(planner))


def test_a_planner_is_compared_and_simulated(own):
    mine, theirs = planned(f"{own}:Careful"), planned("elimination")
    assert mine.planner in ("careful", *(a.name for a in theirs.alternatives))
    assert (mine.strategy, mine.step_seconds) == (theirs.strategy, theirs.step_seconds)
    assert mine.alternatives == theirs.alternatives


def test_a_baseline_is_used_as_it_is(own):
    mine = planned(f"{own}:Samples")
    assert mine.planner == "samples" and not mine.alternatives[1:]
    assert {record.parts["sample"] for record in mine.prediction.layers} == {2}


def test_the_command_plans_by_it(own, tmp_path, capsys):
    out = tmp_path / "plan.json"
    model = ["mesh_1k", "--option", "resolution=64", "--machine", "lassen", "--ranks", "2", "--batch", "2"]
    assert command(["plan", *model, "--planner", f"{own}:Samples", "-o", str(out)]) == 0
    assert "planner samples" in capsys.readouterr().out
    assert json.loads(out.read_text())["planner"] == "samples"


@pytest.mark.parametrize("mine", ["Careful", "Samples"])
def test_a_run_trains_by_it(own, tmp_path, monkeypatch, mine):
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "data.h5")
    text = CONFIG.format(edge=16, channels=3, data="data.h5", out="out").replace("[strategy]\nbucket_bytes = 512\n", "")
    (tmp_path / "run.toml").write_text('strategy = "auto"\n' + text)
    changes = ["strategy.machine=p100-cluster", f"strategy.planner={own}:{mine}", "training.epochs=1"]
    assert train(Path("run.toml"), changes, comm=MPI.COMM_SELF, planner=plan_run)["steps"] > 0
    plan = json.loads((tmp_path / "out" / "plan.json").read_text())
    assert plan["planner"] == "samples" or mine == "Careful"


def test_what_is_refused(own):
    with pytest.raises(UserError, match=r"planner: .*:Lost: expected a class that defines _search"):
        planned(f"{own}:Lost")
    with pytest.raises(UserError, match=r"planner: expected .*elimination.*got 'eliminate'; did you mean elimination"):
        planned("eliminate")
