"""`strategy = "auto"`: profiled, planned and run under MPI, and compared with measurements."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from mpi4py import MPI

from halograd import auto, measuring
from halograd.auto import plan_run, rests_on
from halograd.comm import Communicator
from halograd.errors import UserError
from halograd.kernels import KernelError
from halograd.layers import Conv
from halograd.limits import Cores
from halograd.measuring import fastest_or_first, measure_steps, near_baselines
from halograd.models import build
from halograd.perfmodel.cost import Training, simulate
from halograd.perfmodel.cuts import BASELINES, baseline
from halograd.perfmodel.kernel_times import LayerTime, Recorded, RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.plans import Alternative, Plan
from halograd.perfmodel.predict import plan_network
from halograd.perfmodel.profile.layers import Coverage, LayerTimer
from halograd.planning import make_plan
from halograd.training.build import make_network, make_strategy
from halograd.training.config import StrategyConfig, parse_config
from halograd.training.log import read_log
from tests.launch import mpiexec
from tests.perfmodel.pricing import priced
from tests.support.clock import DrivenClock
from tests.support.refusals import refusals
from tests.training.runs import CONFIG, write_data

PLAIN = CONFIG.format(edge=16, channels=3, data="data.h5", out="out").replace("[strategy]\nbucket_bytes = 512\n", "")
AUTO = 'strategy = "auto"\n' + PLAIN.replace("progress = false\n", "")
MACHINE = Machine.load("p100-cluster")
UNMEASURED = "strategy.budget=0"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return folder, environment and finished process of an automatically planned run on 2 ranks."""
    folder = tmp_path_factory.mktemp("auto")
    write_data(folder / "data.h5")
    (folder / "run.toml").write_text(AUTO)
    env = {"HALOGRAD_CACHE": str(folder / "cache")}
    # Time to measure all shapes, also on a machine with other work.
    done = mpiexec(2, ["-m", "halograd", "train", "run.toml", "--set", "strategy.budget=60"], cwd=folder, env=env)
    shutil.copy(folder / "out" / "plan.json", folder / "plan.json")  # a resumed run makes its own plan
    return folder, env, done


def test_it_profiles_plans_runs_and_compares(trained):
    folder, _, done = trained
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mesh on 2 ranks of here, batch 4, float64") == 1, "the table is printed once"
    assert "kernel times: measured here\n" in done.stdout
    assert re.search(r"^plan +[\d.]+", done.stdout, re.M) and re.search(r"^data +[\d.]+", done.stdout, re.M)
    assert done.stderr.count("profiling this machine: messages and kernels\n") == 1
    assert re.search(r"^profiling \d+ shapes of layers$", done.stderr, re.M)
    table = done.stderr.partition("predicted against measured")[2]
    for row in (*build("mesh", resolution=16, widths=[4, 6], convs=1, decoder=True).layers, "step", "update"):
        assert re.search(rf"^{row} ", table, re.M), row
    assert (folder / "cache" / "kernel_times.jsonl").exists()


def test_the_log_holds_the_comparison(trained):
    folder, _, _ = trained
    (entry,) = read_log(folder / "out" / "log.jsonl", "prediction")
    plan = Plan.load(folder / "out" / "plan.json")
    assert entry["predicted_step_seconds"] == plan.step_seconds > 0
    assert entry["steps"] >= 1 and set(entry["layers"]) == set(plan.layers)
    measured = sum(layer["measured"] for layer in entry["layers"].values())
    assert 0 < measured < 1.5 * entry["measured_step_seconds"]


def test_a_second_run_knows_the_machine_and_resumes(trained):
    folder, env, _ = trained
    done = mpiexec(
        2, ["-m", "halograd", "train", "run.toml", "--resume", "--set", "training.epochs=4"], cwd=folder, env=env
    )
    assert done.returncode == 0, done.stderr
    assert "profiling" not in done.stderr and "predicted against measured" in done.stderr


def test_evaluation_takes_the_plan_of_the_run(trained):
    folder, env, _ = trained
    done = mpiexec(2, ["-m", "halograd", "evaluate", "out"], cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"validation: 6 of \d+ samples, .*\n", done.stdout) and done.stderr == ""


def test_a_plan_file_is_a_strategy(trained):
    folder, env, _ = trained
    arguments = ["--set", "output.directory=again", "--set", "strategy.file=plan.json"]
    done = mpiexec(2, ["-m", "halograd", "train", "run.toml", *arguments], cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    losses = [[e["loss"] for e in read_log(folder / out / "log.jsonl", "step")][:9] for out in ("out", "again")]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("ranks", "sets", "message"),
    [
        (2, ["strategy.memory=1KiB"], "within 1 KiB per rank, the smallest found"),
        (2, ["strategy.machine=lasen"], "got 'lasen'; did you mean lassen?"),
        (2, ["strategy.planner=best"], "strategy.planner: expected shortest_path"),
        (2, ["strategy.memory=lots"], "strategy.memory: expected a size with its unit"),
        (3, ["strategy.file=out/plan.json"], "plan: expected 2 ranks, which it was made for, got 3"),
        (2, ["strategy.file=out/plan.json", "training.batch=2"], "plan: expected a batch of 4 samples"),
        (2, ["strategy.file=out/plan.json", "model.decoder=false", "data.rule=any"], "plan: expected network 'mesh'"),
    ],
)
def test_mistakes_are_one_line_on_all_ranks(trained, ranks, sets, message):
    folder, env, _ = trained
    chosen = [word for entry in ["output.directory=no", "output.progress=false", *sets] for word in ("--set", entry)]
    done = mpiexec(ranks, ["-m", "halograd", "train", "run.toml", *chosen], cwd=folder, env=env)
    assert done.returncode == 2 and done.stdout == "", done.stderr
    assert len(done.stderr.splitlines()) == 1 and message in done.stderr, done.stderr


def test_both_spellings():
    table = PLAIN + "[strategy]\nauto = true\n"
    assert parse_config(AUTO).strategy == parse_config(table).strategy == StrategyConfig(auto=True)
    rich = parse_config(table + 'planner = "data"\nmemory = "1GiB"\nmachine = "lassen"\nbudget = 5.0\n').strategy
    assert (rich.planner, rich.memory, rich.machine, rich.budget) == ("data", "1GiB", "lassen", 5.0)


def test_settings_replace_a_plan_and_the_other_way_round():
    assert parse_config(PLAIN, ["strategy=auto"]).strategy.auto
    by_hand = PLAIN + "[strategy]\nheight = 2\n"
    assert parse_config(by_hand, ["strategy=auto"]).strategy == StrategyConfig(auto=True)
    assert parse_config(AUTO, ["strategy.height=2"]).strategy == StrategyConfig(height=2)
    assert parse_config(AUTO, ["strategy.memory=1GiB"]).strategy == StrategyConfig(auto=True, memory="1GiB")
    assert parse_config(AUTO, ["strategy.statistics=local"]).strategy.auto


test_tables_that_are_refused = refusals(
    ("auto = true\nheight = 2", "strategy.auto: expected no height with it, which the plan decides"),
    ('memory = "1GiB"', "strategy.memory: expected auto = true with it, got none"),
    ("auto = 1", "strategy.auto: expected true or false, got 1"),
    ("auto = true\nbudget = -1.0", "strategy.budget: expected a number >= 0"),
    call=lambda table: parse_config(f"{PLAIN}[strategy]\n{table}\n"),
    error=UserError,
    literal=True,
)


def test_another_text_is_refused():
    with pytest.raises(UserError, match="strategy: expected a table, got 'automatic'"):
        parse_config(AUTO.replace('"auto"', '"automatic"'))


def test_without_a_planner_it_says_what_to_do():
    with pytest.raises(UserError, match=r"pass planner=halograd\.auto\.plan_run"):
        make_strategy(StrategyConfig(auto=True), 2)


def test_a_plan_is_checked_against_the_network(trained):
    path = trained[0] / "out" / "plan.json"
    assert json.loads(Path(path).read_text())["request"]["model"] == "mesh"
    config = StrategyConfig(file=str(path))
    with pytest.raises(UserError, match="plan: expected network 'mesh'"):
        make_strategy(config, 2, build("lenet5"), 4)


# -- trials -------------------------------------------------------------------------------------


def test_a_rival_has_to_be_faster_by_more_than_noise():
    assert fastest_or_first({"elimination": 1.0, "data": 0.985, "model": 1.2}) == "elimination"
    assert fastest_or_first({"elimination": 1.0, "data": 0.97, "model": 0.96}) == "model"


def test_rivals_are_baselines_that_fit_and_are_near(trained):
    folder, *_ = trained
    plan = Plan.load(folder / "out/plan.json")
    step = plan.step_seconds
    others = [
        ("data", 1.2, True),
        ("owt", 1.1, True),
        ("model", 1.1, False),
        ("spatial", 1.3, True),
        ("other", 1, True),
    ]
    some = tuple(Alternative(name, factor * step, 1, fits) for name, factor, fits in others)
    assert near_baselines(replace(plan, alternatives=some)) == ["owt", "data"]


@pytest.mark.ranks(2)
def test_steps_are_measured_one_strategy_at_a_time(monkeypatch):
    log, clock = [], DrivenClock().drive(monkeypatch, measuring)

    @contextmanager
    def opened(strategy):
        log.append(f"open {strategy}")
        yield lambda: (log.append(strategy), clock.sleep(0.02 * (1 + MPI.COMM_WORLD.rank) * strategy))
        log.append(f"close {strategy}")

    with Communicator(MPI.COMM_WORLD) as comm:
        found = measure_steps(comm, {"slow": 4, "fast": 1}, opened)
        assert comm.bcast(found) == found, "all ranks settle on the same"
    assert [entry for entry in log if isinstance(entry, str)] == ["open 4", "close 4", "open 1", "close 1"] * 2
    assert found["slow"] == pytest.approx(0.16, abs=1e-5) and found["fast"] == pytest.approx(0.04, abs=1e-5)
    counts = [log.count(strategy) for strategy in (4, 1)]
    assert counts == [2 * (2 + 3), 2 * (2 + 12)], "half a second each, two and at least three steps"


@pytest.mark.ranks(2)
def test_a_run_settles_on_what_was_faster(known, monkeypatch):
    """The faster plan is used, saved and printed, with the replaced plan as an alternative."""
    with Communicator(MPI.COMM_WORLD) as comm:
        config = parse_config(AUTO, [f"output.directory={known / 'out'}"])
        tried: list[list[str]] = []

        def measured(comm, strategies, opened):
            for strategy in strategies.values():
                with opened(strategy) as step:
                    step()
            tried.append(list(strategies))
            return {name: 1.0 - 0.5 * (name == tried[0][-1]) for name in strategies}

        monkeypatch.setattr(auto, "measure_steps", measured)
        monkeypatch.setattr(auto, "usable_cores", lambda: Cores(frozenset({0})))
        monkeypatch.setattr(auto, "near_baselines", lambda plan: ["model" if plan.planner != "model" else "data"])
        run = plan_run(config, comm)
        ((favorite, rival),) = tried
        assert run.plan.planner == rival != favorite
        expected = baseline(rival, make_network(config), config.training.batch, comm.size)
        cuts = {name: {k: n for k, n in some.items() if k != "halo"} for name, some in run.strategy.layers.items()}
        assert cuts == {name: dict(some) for name, some in expected.layers.items()}
        if comm.rank == 0:
            kept = Plan.load(known / "out/plan.json")
            assert kept.planner == rival and kept.alternatives[0].name == favorite


@pytest.mark.ranks(2)
def test_a_plan_rests_on_measured_times(known, monkeypatch):
    """Every layer shape that the planner requests, possibly in several rounds, is measured."""
    measured: list[str] = []
    calls: list[object] = []

    def measure(timer, work):
        measured.append(work.key)
        return RooflineTimes(MACHINE).of_work(work)

    def curious(plan_request, batch, ranks, planning, times):
        calls.append(plan_request)
        for count in range(1, 1 + min(len(calls), 7)):
            times.time(Conv(count, 3), [(1, 8, 8, 2)], "float64")
        return make_plan(plan_request, batch, ranks, planning, times)

    with Communicator(MPI.COMM_WORLD) as comm:
        monkeypatch.setattr(LayerTimer, "measure", measure)
        monkeypatch.setattr(auto, "make_plan", curious)
        monkeypatch.setattr(auto, "near_baselines", lambda plan: [])
        monkeypatch.setattr(auto, "usable_cores", lambda: Cores(frozenset({0})))
        config = parse_config(AUTO, [f"output.directory={known / 'out'}"])
        plan = plan_run(config, comm).plan
        counts = Counter(measured)
        assert sum('"Conv"' in key and "[[1,8,8,2]]" in key for key in counts) == 7 and set(counts.values()) == {1, 2}
        assert plan.request.kernel_times == "measured here"
        del measured[:]
        again = plan_run(config, comm).plan
        assert not measured and again.strategy == plan.strategy


@pytest.mark.ranks(2)
def test_a_plan_that_rank_0_cannot_save_is_an_error_of_all_ranks(tmp_path, monkeypatch):
    def refused(plan, path):
        raise UserError(f"plan {path}: the disk is full")

    monkeypatch.setattr(Plan, "save", refused)
    config = parse_config(AUTO, [f"output.directory={tmp_path / 'out'}", "strategy.machine=lassen"])
    with Communicator(MPI.COMM_WORLD) as comm, pytest.raises(UserError, match="the disk is full"):
        plan_run(config, comm)


@pytest.mark.ranks(1, 2)
def test_an_error_in_the_plan_of_a_run_is_one_of_all_ranks(comm, shared, monkeypatch):
    """Rank 0 alone reads the plan of the run; the other ranks must not wait for it."""

    def broken(path):
        raise RuntimeError("of rank 0")

    (shared / "plan.json").touch()
    monkeypatch.setattr(Plan, "load", broken)
    config = parse_config(AUTO, [f"output.directory={shared}"])
    with Communicator(comm) as ranks, pytest.raises(RuntimeError, match="of rank 0"):
        plan_run(config, ranks, training=False)


def test_a_plan_for_a_described_machine_is_robust(tmp_path, capsys):
    """So that wrong numbers of a machine file cost little; a measured machine, or `robust = false`, has the fastest."""
    shown, plans = [], []
    with Communicator(MPI.COMM_WORLD) as comm:
        for robust in ([], ["strategy.robust=false"]):
            sets = [f"output.directory={tmp_path / 'out'}", "strategy.machine=lassen", *robust]
            plans.append(plan_run(parse_config(AUTO, sets), comm).plan)
            shown.append(comm.bcast(capsys.readouterr().out))
        assert comm.bcast(plans[0].strategy.layers) == plans[0].strategy.layers
    assert "\nrobust      at most " in shown[0] and "is off by 3 x" in shown[0] and "robust " not in shown[1]


@pytest.mark.ranks(1)
def test_a_budget_is_one_for_all_rounds(tmp_path, monkeypatch):
    """All rounds of measurements of a run share one budget."""
    budgets = []

    def layers(self, works, budget, again, show):
        budgets.append(budget)
        for work in works:
            self.cache.put(self.conditions, work.key, RooflineTimes(MACHINE).of_work(work))
        return Coverage(measured=len(works), seconds=3.0)

    monkeypatch.setenv("HALOGRAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measuring.Measuring, "known_machine", lambda self, path: MACHINE)
    monkeypatch.setattr(measuring.Measuring, "layers", layers)
    config = parse_config(AUTO, [f"output.directory={tmp_path / 'out'}", "strategy.budget=5.0"])
    with Communicator(MPI.COMM_WORLD) as comm:
        plan_run(config, comm)
    assert budgets == [5.0, 2.0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("fault", [KernelError("no primitive"), MemoryError(), UserError("not one sample")], ids=repr)
def test_what_one_rank_cannot_do_ends_no_run(known, monkeypatch, fault):
    """An error of the trial on one rank with all threads, which is only for comparison, does not end the run."""
    with Communicator(MPI.COMM_WORLD) as comm:
        trial = trial_with(comm, known, monkeypatch, fault)
        assert trial.alone is None and trial.seconds
        assert not any("1 rank" in line for line in trial.lines(1))


@pytest.mark.ranks(2)
def test_the_communicator_of_a_trial_is_freed_after_any_error(known, monkeypatch):
    parts, split = [], Communicator.split
    monkeypatch.setattr(Communicator, "split", lambda *some: parts.append(split(*some)) or parts[-1])
    with Communicator(MPI.COMM_WORLD) as comm:
        with pytest.raises(RuntimeError, match="of rank 0"):
            trial_with(comm, known, monkeypatch, RuntimeError("of rank 0"))
        assert [part.closed for part in parts if part.size == 1] == [True]


def trial_with(comm, known, monkeypatch, fault):
    """Return the outcome of a trial whose steps on one rank raise an error. Collective."""

    def measured(comm, strategies, opened):
        if "alone" in strategies:
            raise fault
        return dict.fromkeys(strategies, 1.0)

    monkeypatch.setattr(auto, "measure_steps", measured)
    monkeypatch.setattr(auto, "usable_cores", lambda: Cores(frozenset(range(8))))
    return auto.try_run(parse_config(AUTO, [UNMEASURED, f"output.directory={known / 'out'}"]), comm)


@pytest.mark.ranks(2)
def test_what_the_configuration_forbids_is_no_rival(tmp_path):
    """Baselines take the run's reduction settings; a baseline that conflicts with them is skipped, not an error."""
    network = build("lenet5")
    with Communicator(MPI.COMM_WORLD) as comm:
        overrides = ["reduction.name=bucketed", "reduction.replicated_dense=1"]
        config = parse_config(AUTO, overrides)
        some = {name: auto.as_run(baseline(name, network, 4, 2), config) for name in ("data", "owt")}
        assert all(strategy.reduction.replicated_dense == 1 for strategy in some.values())
        assert {name: auto.can_run(strategy, network, comm.size) for name, strategy in some.items()} == {
            "data": True,
            "owt": False,
        }


# -- second measurements --------------------------------------------------------------------------

BATCH, RANKS = 8, 4


class Disturbed(Recorded):
    """Recorder of measurements that adds one second to the times of some layers."""

    def __init__(self, keys):
        super().__init__(RooflineTimes(MACHINE))
        self.keys = keys

    def of_work(self, work):
        time = super().of_work(work)
        return (
            LayerTime(time.forward + 1.0, time.backward_data, time.backward_filter) if work.key in self.keys else time
        )


def test_predictions_rest_on_these_layers_and_no_others():
    network = build("lenet5")
    times = Recorded(RooflineTimes(MACHINE))
    plan = plan_network(network, BATCH, RANKS, MACHINE, times)
    behind = rests_on(plan, network, MACHINE, times, Training())
    others = times.requested.keys() - behind.keys()
    assert behind and others, "the planner has looked at more than it chose"
    strategies = [plan.strategy, *(baseline(name, network, BATCH, RANKS) for name in BASELINES)]

    def seconds(keys):
        return [simulate(network, s, BATCH, priced(MACHINE, Disturbed(keys))).step_seconds for s in strategies]

    quiet = seconds(set())
    assert seconds(others) == quiet
    for key in behind:
        assert max(a - b for a, b in zip(seconds({key}), quiet)) > 0.5
