"""`halograd plan`, `explain` and `predict`: output, JSON and errors; planners in a file of the user."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from mpi4py import MPI

from halograd.auto import plan_run
from halograd.cli import pictures
from halograd.cli.run import run as command
from halograd.cli.scaling import Point, Series
from halograd.errors import UserError
from halograd.layers.reduction_scheme import Scheme
from halograd.measuring import near_baselines
from halograd.models import build
from halograd.perfmodel.cost import Training, simulate
from halograd.perfmodel.cuts import BASELINES, GRID
from halograd.perfmodel.kernel_times import RooflineTimes
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.plans import Alternative, Plan, Prediction
from halograd.perfmodel.predict import Planning, plan_network
from halograd.perfmodel.robust import RobustPlan
from halograd.plan_text import plan_text, robust_text
from halograd.planning import AHEAD, PlanRequest, baselines_of
from halograd.training.config import DataConfig
from halograd.training.run import train
from tests.launch import command_line
from tests.perfmodel.pricing import priced
from tests.support.terminal import on_terminal
from tests.training.runs import CONFIG, write_data

SMALL = ("mesh", "--option", "resolution=[128, 64]", "--option", "widths=[8, 16]", "--option", "convs=1")
LASSEN = ("--machine", "lassen", "--ranks", "8", "--batch", "2")
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def planned(tmp_path_factory) -> Path:
    """Return a plan, written by a separate process."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    done = command_line("plan", *SMALL, *LASSEN, "-o", path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and f"{path}: written" in done.stdout
    return path


def test_the_page_of_planning_shows_what_the_commands_print(typed, tmp_path):
    """Lines of the two tables of `plan` and `explain` in docs/planning.md, but for those that end with "..."."""
    page = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
    shown = [
        block for block in re.findall(r"```text\n(.*?)```", page, re.DOTALL) if re.match("mesh_2k on|conv6_1", block)
    ]
    plan = tmp_path / "plan.json"
    printed = typed("plan", "mesh_2k", "--machine", "lassen", "--ranks", 16, "--batch", 4, "-o", plan)[1]
    printed += typed("explain", plan, "--layer", "conv6_1")[1]
    for line in "".join(shown).splitlines():
        if not line.startswith("planner grid, ..."):
            start = line.partition("...")[0].rstrip(" ,")
            assert start in printed, f"docs/planning.md: expected a line that is printed, got {line!r}"
    assert len(shown) == 2


def test_a_plan_with_ranks_that_are_idle_says_so(typed, planned):
    line = "idle        {} of 8 ranks have nothing to compute: plan for fewer, or for a larger batch"
    assert line.format(6) in typed("plan", *SMALL, *LASSEN, "--planner", "data")[1].splitlines()
    plan = Plan.load(planned)
    used = max(math.prod(plan.strategy.parts_of(layer).values()) for layer in plan.layers)
    assert used < 8 and line.format(8 - used) in typed("explain", planned)[1].splitlines()
    few = ("--machine", "lassen", "--ranks", "2", "--batch", "2", "--planner", "data")
    assert "idle" not in typed("plan", *SMALL, *few)[1]


def test_a_robust_plan_says_what_it_is_sensitive_to(typed, monkeypatch):
    code, out, _ = typed("plan", *SMALL, *LASSEN, "--robust", "--json")
    found = json.loads(out)["robust"]
    assert code == 0 and found["factor"] == 3 and len(found["regrets"]) == 7 and "as described" in found["regrets"]
    assert max(found["regrets"].values()) <= max(found["regrets_of_fastest"].values())
    monkeypatch.setattr("halograd.planning.plan_robust", lambda *_: pytest.fail("it plans"))
    for options, option in ((("--frontier",), "--robust"), (("--planner", "nothing"), "--planner")):
        code, _, err = typed("plan", *SMALL, *LASSEN, "--robust", *options)
        assert code == 2 and f"{option}: expected" in err


def test_text_of_a_robust_plan(planned):
    plan = Plan.load(planned)
    regrets = {"": 0.01, "3 x the latency": 0.12}
    others = dict.fromkeys(regrets, replace(plan.strategy, layers={}, parts={"sample": 2}))
    lines = robust_text(RobustPlan(plan, regrets, {"": 0.0, "3 x the latency": 0.3}, others, 3.0))
    assert "at most 12.0% slower" in lines[0] and "the fastest plan: 30.0%); 1.0% here" in lines[0]
    assert "with 3 x the latency, another plan would be 12.0% faster: 2 sample of conv1_1" in lines[1]
    assert len(robust_text(RobustPlan(plan, {"": 0.0}, {"": 0.0}, others, 3.0))) == 1


@pytest.mark.parametrize("options, table", [((), "conv1_1 "), (("--json",), '"step_seconds"')])
def test_a_plan_is_printed_if_its_file_cannot_be_written_after_all(typed, monkeypatch, tmp_path, options, table):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("halograd.perfmodel.plans.write_whole", full)
    planner = ("--planner", "data", "-o", tmp_path / "plan.json")
    code, out, err = typed("plan", *SMALL, *LASSEN, *planner, *options)
    assert (code, table in out) == (2, True) and "No space left on device" in err


def test_a_plan_along_an_axis_that_the_network_lacks_is_not_explained(typed, planned, tmp_path):
    made = json.loads(planned.read_text())
    made["strategy"]["layers"]["conv1_1"] = {"depth": 2}
    (tmp_path / "edited.json").write_text(json.dumps(made))
    code, _, err = typed("explain", tmp_path / "edited.json")
    line = "halograd: error: strategy: layer 'conv1_1' (Conv) cannot be cut along 'depth'; use sample or height or"
    assert code == 2 and err.startswith(line), err


def test_plan_is_a_table_with_totals_and_baselines(typed):
    code, out, err = typed("plan", *SMALL, *LASSEN)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "mesh on 8 ranks of lassen, batch 2, float32, at most 16 GiB per rank"
    assert lines[1].startswith("planner ") and lines[1].endswith("kernel times: roofline of lassen")
    heading = next(line for line in lines if line.startswith("layer "))
    columns = ("cut", "ranks", "forward", "backward", "halo", "all-reduce", "redistr.", "other", "output")
    assert all(column in heading for column in columns)
    for layer in ("conv1_1", "bn1_1", "predict", "bce", "sum"):
        row = next(line for line in lines if line.startswith(layer))
        assert len(row) == len(heading), "columns end alike"
    assert any(re.match(r"step +[\d.]+ (us|ms) \([\d.e+]+ samples/s\)", line) for line in lines)
    for name in ("data", "spatial", "model", "owt"):
        assert any(re.match(rf"{name} +[\d.]+ +[\d.]+ x", line) for line in lines), name


def test_json_of_plan_holds_the_same(typed):
    code, out, _ = typed("plan", *SMALL, *LASSEN, "--json")
    record = json.loads(out)
    assert code == 0
    assert record["planning_seconds"] > 0 and record["step_seconds"] == record["prediction"]["step_seconds"] > 0
    assert record["ranks"] == 8 and record["batch"] == 2 and record["machine"] == "lassen"
    assert record["request"]["model"] == "mesh" and record["request"]["options"]["resolution"] == [128, 64]
    assert [b["name"] for b in record["baselines"]] == ["data", "spatial", "model", "owt", "grid"]
    for other in record["baselines"]:
        assert other["speed_up"] == pytest.approx(other["step_seconds"] / record["step_seconds"])
        assert not other["fits"] or other["speed_up"] >= 1
    layers = {r["name"]: r for r in record["prediction"]["layers"]}
    assert set(layers) == set(record["layers"])
    assert all(r["forward"] >= 0 and 1 <= r["ranks"] <= 8 for r in layers.values())


def test_plan_file_is_read_back_and_simulates_to_the_same(planned):
    made = Plan.load(planned)
    assert made.request is not None
    machine = made.request.load_machine()
    assert machine == Machine.load("lassen")
    network = build(made.request.model, **made.request.options)
    again = simulate(network, made.strategy, 2, priced(machine), ranks=8)
    assert again.step_seconds == pytest.approx(made.step_seconds)
    assert Plan.from_dict(json.loads(json.dumps(made.as_dict()))) == made


def test_a_baseline_may_be_asked_for(typed):
    code, out, _ = typed("plan", *SMALL, *LASSEN, "--planner", "spatial", "--json")
    record = json.loads(out)
    assert code == 0 and record["planner"] == "spatial"
    assert {b["name"]: b["speed_up"] for b in record["baselines"]}["spatial"] == 1


def test_baselines_with_equal_cuts_take_the_same(typed, planned):
    """A mesh network has no dense layer, so `owt` equals `data`; baselines with the cuts of the plan are not tried."""
    rows = {b["name"]: b for b in json.loads(typed("plan", *SMALL, *LASSEN, "--json")[1])["baselines"]}
    assert rows["owt"] == {**rows["data"], "name": "owt"} and rows["owt"]["speed_up"] > 1
    made = Plan.load(planned)
    slowest = 10 * made.step_seconds
    same = Alternative("model", made.step_seconds, made.prediction.memory_bytes, True)
    others = [same, Alternative("data", slowest / 9, 7, True), Alternative("owt", slowest / 9, 7, True)]
    assert near_baselines(replace(made, alternatives=tuple(others))) == ["data"], "equal cuts are tried once"


def test_a_grid_is_shown_where_one_was_looked_for(planned):
    """The grid is simulated only for a plan that searched for grids; the other baselines are simulated for any plan."""
    made = Plan.load(planned)
    assert made.request is not None
    network = build(made.request.model, **made.request.options)
    plan_request = PlanRequest("mesh", {}, network, made.request.load_machine(), "lassen", made.dtype)
    assert [a.name for a in baselines_of(plan_request, made)] == [*BASELINES, GRID]
    assert [a.name for a in baselines_of(plan_request, replace(made, alternatives=()))] == [*BASELINES]


def test_the_arrays_of_the_optimizer_count(typed):
    """Adam keeps two arrays of the parameters' size, SGD one; plans, baselines and predictions count their memory."""
    network = build("mesh", resolution=[128, 64], widths=[8, 16], convs=1)
    parameters = 4 * sum(math.prod(p.shape) for p in network.parameters().values())
    found = {}
    for optimizer in ("sgd", "adam"):
        more = ("--optimizer", optimizer, "--json")
        plan = json.loads(typed("plan", *SMALL, *LASSEN, "--planner", "spatial", *more)[1])
        assert plan["request"]["slots"] == 1 + (optimizer == "adam")
        baseline = next(b["memory_bytes"] for b in plan["baselines"] if b["name"] == "data")
        grid = json.loads(typed("predict", *SMALL, *LASSEN, "--grid", "height=8", *more)[1])
        found[optimizer] = [plan["prediction"]["memory_bytes"], baseline, grid["memory_bytes"]]
    for some, more in zip(found["sgd"], found["adam"]):
        assert parameters * 0.9 < more - some < parameters * 1.2


def test_plans_count_the_batches_that_a_run_reads_ahead_by_default():
    assert DataConfig.model_fields["prefetch"].default + 1 == AHEAD


def test_less_memory_makes_a_leaner_plan(typed):
    free = json.loads(typed("plan", *SMALL, *LASSEN, "--json")[1])
    needed = free["prediction"]["memory_bytes"]
    code, out, err = typed("plan", *SMALL, *LASSEN, "--json", "--memory", f"{needed - 1} B")
    if code == 0:
        tight = json.loads(out)
        assert tight["prediction"]["memory_bytes"] < needed and tight["step_seconds"] >= free["step_seconds"]
    else:
        assert "too much; use more ranks" in err


def test_explain_prices_the_next_best(typed, planned):
    code, out, err = typed("explain", planned, "--layer", "conv2_1")
    assert (code, err) == (0, "")
    assert re.search(r"^conv2_1.* \(Conv\): ", out, re.M)
    assert re.search(r"^ +cut +step \[ms\] +more \[ms\] +memory +because of \[ms\]$", out, re.M), out
    rivals = re.findall(r"([+-][\d.]+) +([+-][\d.]+)% ", out)
    assert rivals and [float(m) for m, _ in rivals] == sorted(float(m) for m, _ in rivals)


def test_explain_chooses_the_layers_that_take_longest(typed, planned):
    code, out, _ = typed("explain", planned)
    plan = Plan.load(planned)
    slowest = max(plan.prediction.layers, key=lambda r: r.seconds)
    assert code == 0 and re.search(rf"^{slowest.name}\b", out, re.M), out


def test_explain_names_layers_that_compute_margins(typed, planned, tmp_path):
    made = json.loads(planned.read_text())
    made["strategy"]["layers"]["conv1_1"]["wide"] = True
    (tmp_path / "wide.json").write_text(json.dumps(made))
    line = rf"^the outputs of 1 of {len(made['layers'])} layers are wide .*; with all halos exchanged a step takes "
    assert re.search(line, typed("explain", tmp_path / "wide.json", "--layer", "predict")[1], re.M)
    assert "are wide" not in typed("explain", planned, "--layer", "predict")[1]


@pytest.fixture
def repeating(planned, tmp_path):
    """Return the path of the planned cuts with outputs of norms and activations computed again."""
    plan = Plan.load(planned)
    strategy = replace(plan.strategy, options={"recompute": "pointwise"})
    plan_request = PlanRequest(
        "mesh", {}, build("mesh", **plan.request.options), plan.request.load_machine(), "lassen", plan.dtype
    )
    pricing, training = plan_request.pricing(plan.batch, plan.ranks), Training(plan.dtype, plan.request.slots)
    prediction = simulate(plan_request.network, strategy, plan.batch, pricing, training, plan.ranks)
    replace(plan, strategy=strategy, prediction=prediction).save(tmp_path / "again.json")
    return tmp_path / "again.json"


def test_explain_has_the_memory_and_time_of_repetition(typed, planned, repeating):
    plan = Plan.load(repeating)
    assert plan.prediction.total("again") > 0, "the file has the time"
    code, out, err = typed("explain", repeating)
    assert (code, err) == (0, "")
    number = r" +([\d.]+|-)"
    rows = re.findall(rf"^  (\w+|all layers){number * 3}$", out, re.M)
    cells = {name: [0.0 if cell == "-" else float(cell) for cell in own] for name, *own in rows}
    times = {record.name: 1e3 * record.again for record in plan.prediction.layers if record.again}
    assert times and all(cells[name][2] == pytest.approx(t, abs=6e-4) for name, t in times.items())
    freed = {name for name, _, again, _ in rows if again != "-"}
    assert freed >= set(times), "what is made again takes no memory in between"
    *layers, (total, *sums) = cells.items()
    assert total == "all layers" and sums[0][2] == pytest.approx(sum(own[2] for _, own in layers), abs=0.01)
    arena, step = (float(re.search(rf"^  {word} .* \(([+-][\d.]+)%\)$", out, re.M)[1]) for word in ("arena", "step"))
    assert arena < 0 < step
    other = [float(less) for less in re.findall(r" computed again ([+-][\d.]+)", out)]
    assert all(less > -0.9 * sums[0][2] for less in other), "other cuts compute outputs again, too"
    assert "kept for the backward pass" not in typed("explain", planned)[1]
    one = typed("explain", repeating, "--layer", next(iter(times)))[1]
    assert len(re.findall(rf"^  \w+{number * 3}$", one, re.M)) == 1 and "all layers" in one


def test_a_strip_has_the_time_of_repetition(typed, repeating, tmp_path, monkeypatch):
    terms = []
    monkeypatch.setattr(pictures, "_value", lambda record, term: terms.append(term) or record.forward)
    assert typed("explain", repeating, "--layer", "predict", "--picture", tmp_path / "strip.png")[0] == 0
    assert "again" in terms


def test_a_plan_has_a_column_for_repetition_only_with_it(planned, repeating):
    texts = ["\n".join(plan_text(Plan.load(path), [])) for path in (planned, repeating)]
    assert ["again" in text for text in texts] == [False, True]
    assert re.search(r"backward +again +halo", texts[1]) and "repeat the forward pass" in texts[1]
    files = [json.loads(path.read_text())["prediction"]["layers"] for path in (planned, repeating)]
    assert [any("again" in layer for layer in layers) for layers in files] == [False, True]


def test_explain_draws_the_strip(typed, planned, tmp_path):
    code, out, _ = typed("explain", planned, "--layer", "predict", "--picture", tmp_path / "strip.png")
    assert code == 0 and out.endswith(f"{tmp_path / 'strip.png'}: written\n")
    assert (tmp_path / "strip.png").read_bytes().startswith(PNG)


def test_predict_one_grid_is_one_record(typed):
    arguments = ("predict", *SMALL, *LASSEN, "--grid", "sample=2,height=2,width=2")
    code, out, err = typed(*arguments, "--json")
    record = json.loads(out)
    assert (code, err) == (0, "") and record["step_seconds"] > 0 and record["ranks"] == 8
    parts = record["parts"]
    assert parts["forward"] > 0 and parts["halo"] >= parts["halo_exposed"] >= 0
    exposed = ("forward", "backward", "halo_exposed", "channel", "statistics", "redistribution", "packing")
    whole = sum(parts[term] for term in (*exposed, "allreduce_exposed", "update"))
    assert record["step_seconds"] == pytest.approx(whole, rel=0.05)
    code, text, _ = typed(*arguments)
    assert code == 0 and re.search(r"^step +[\d.]+ (us|ms)", text, re.M) and re.search(r"^  halo +", text, re.M)


def test_samples_fill_the_grid(typed):
    whole = json.loads(typed("predict", *SMALL, *LASSEN, "--grid", "sample=2,height=4", "--json")[1])
    filled = json.loads(typed("predict", *SMALL, *LASSEN, "--grid", "height=4", "--json")[1])
    assert whole["step_seconds"] == filled["step_seconds"]


def test_predict_scales_strongly_and_weakly(typed, tmp_path):
    picture = tmp_path / "curves.png"
    ranks = ("--machine", "lassen", "--ranks", "2,4,...,16", "--batch", "4")
    code, out, _ = typed("predict", *SMALL, *ranks, "--json", "--plot", picture)
    record = json.loads(out)
    assert code == 0 and picture.read_bytes().startswith(PNG)
    assert [p["ranks"] for p in record["strong"]] == [2, 4, 8, 16]
    assert [p["batch"] for p in record["strong"]] == [4] * 4 and [p["batch"] for p in record["weak"]] == [4, 8, 16, 32]
    assert record["strong"][0]["step_seconds"] == record["weak"][0]["step_seconds"]
    for kind in ("strong", "weak"):
        assert record[kind][0]["efficiency"] == 1
        for a, b in itertools.pairwise(record[kind]):
            assert b["samples_per_second"] > 0.9 * a["samples_per_second"]
            assert b["step_seconds"] <= min(x["step_seconds"] for x in b["baselines"].values() if x["fits"]) * 1.0001
    code, text, _ = typed("predict", *SMALL, *ranks)
    assert code == 0 and "strong scaling: same batch" in text and "weak scaling: same samples per rank" in text


def test_predict_where_some_numbers_of_ranks_have_no_grid(typed, tmp_path):
    """A narrow sample has enough rows for two ranks, but not for sixteen, so the prediction has no grid for sixteen."""
    few = ("mesh", "--option", "resolution=[4, 1]", "--option", "widths=[8]", "--option", "convs=1")
    arguments = ("predict", *few, "--machine", "lassen", "--ranks", "2,16", "--batch", "1")
    code, out, err = typed(*arguments, "--json", "--plot", tmp_path / "curves.png")
    assert (code, err) == (0, "")
    assert [GRID in p["baselines"] for p in json.loads(out)["strong"]] == [True, False]
    code, text, _ = typed(*arguments)
    assert code == 0 and GRID in text


def test_scaling_says_where_fewer_ranks_are_faster():
    """Only a search for the other number of ranks finds such a plan, and fewer ranks are what a job needs for it."""
    steps = {2: 3.0, 4: 2.0, 8: 2.2, 16: 2.001, 32: 1.0}
    made = {n: Prediction("net", "machine", 4, n, "float32", (), t, 0.0, 0.0, 0.0, 0.0, 0.0) for n, t in steps.items()}
    strong = Series("strong", tuple(Point(n, 4, p) for n, p in made.items()))
    assert [strong.faster_on(point) for point in strong.points] == [None, None, 4, None, None]
    (line,) = (line for line in strong.text() if "faster" in line)
    assert line.split()[0] == "8" and line.endswith("fewer ranks are faster: 4")
    weak = Series("weak", tuple(Point(n, n, p) for n, p in made.items()))
    assert not any(weak.faster_on(point) for point in weak.points)
    full = Series("strong", tuple(Point(n, 4, p, fits=n != 4) for n, p in made.items()))
    assert [full.faster_on(point) for point in full.points] == [None] * 5


def test_predict_says_where_nothing_fits(typed):
    limited = ("--machine", "lassen", "--ranks", "1,8", "--batch", "2", "--memory", "1500kB")
    code, out, _ = typed("predict", *SMALL, *limited)
    reason = "expected a strategy within .*, the smallest found .* needs .* too much$"  # in brief, without remedies
    assert code == 0 and re.search(rf"^ +1 +2 .* nothing fits: {reason}", out, re.M), out


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing/plan.json", "No such file or directory"),
        ("", "Is a directory"),
        ("file/plan.json", "Not a directory"),
        ("y" * 256, "File name too long"),
    ],
)
def test_an_output_that_cannot_be_written_is_found_first(typed, planned, tmp_path, monkeypatch, path, message):
    """An output path that cannot be written is an error before planning or measuring begins."""
    monkeypatch.setattr("halograd.planning.make_plan", lambda *_: pytest.fail("it plans"))
    monkeypatch.setattr("halograd.cli.explaining._plan_request", lambda *_: pytest.fail("it plans"))
    monkeypatch.setattr("halograd.cli.profiling.Measuring", lambda *_: pytest.fail("it measures"), raising=False)
    (tmp_path / "file").write_text("")
    path = tmp_path / path
    for option, words in (
        ("--out", ("plan", *SMALL, *LASSEN, "--out", path)),
        ("--plot", ("predict", *SMALL, "--machine", "lassen", "--ranks", "2,4", "--batch", 4, "--plot", f"{path}.png")),
        ("--picture", ("explain", planned, "--picture", f"{path}.png")),
        ("--out", ("profile", "mesh", "--out", path)),
    ):
        if message == "Is a directory" and option != "--out":
            continue
        code, _, err = typed(*words)
        assert code == 2 and f"{option} {path}" in err and f"got an error ({message})" in err, err
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("option", ["--picture", "--plot"])
def test_a_picture_of_another_form_is_refused(typed, planned, tmp_path, option):
    path = tmp_path / "strip.xyz"
    words = {"--picture": ("explain", planned), "--plot": ("predict", *SMALL, *LASSEN)}[option]
    code, _, err = typed(*words, option, path)
    assert code == 2 and f"{option} {path}: expected a name that ends with .png" in err and not path.exists(), err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "expected valid JSON, got an error: Expecting value"),
        ("[1, 2]", "got other JSON"),
        ('{"parts": {}, "layers": {}}', "got a strategy without a plan"),
        ('{"halograd_plan": 2}', "network: expected a value, got nothing; this key is required"),
        ('{"halograd_plan": 7}', "expected version 2, got 7"),
    ],
)
def test_what_is_no_plan_is_refused(typed, tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    code, _, err = typed("explain", path)
    assert code == 2 and len(err.splitlines()) == 1 and message in err, err


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("prediction", "step_seconds"), "1", "prediction.step_seconds: expected a number, got '1'"),
        (
            ("prediction", "layers", 0, "forward"),
            -1.0,
            r"prediction.layers\[0\].forward: expected a number >= 0, got -1",
        ),
        (("prediction", "layers", 0, "parts"), [], r"prediction.layers\[0\].parts: expected a table, got \[\]"),
        (("prediction", "memory"), 3, "prediction.memory: expected a table, got 3"),
        (("prediction", "traffic"), {"halo": [1]}, r"prediction.traffic.halo\[1\]: expected a value, got nothing"),
        (("strategy", "bucket_bytes"), "4096", "strategy.bucket_bytes: expected a whole number, got '4096'"),
        (("alternatives",), [{}], r"alternatives\[0\].name: expected a value, got nothing; this key is required"),
        (("ranks",), 10**6, "ranks: expected a whole number <= 8192, got 1000000"),
        (("batch",), True, "batch: expected a whole number, got true"),
        (("rnks",), 4, "rnks: unknown key; expected one of network, .*; did you mean ranks"),
        (("request", "options"), 3, "request.options: expected a table, got 3"),
        (("request", "machine"), "x", "machine lassen in the plan: expected valid TOML"),
        (("request", "slots"), 10**6, "request.slots: expected a whole number <= 8, got 1000000"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_plans_of_wrong_types_are_refused(typed, planned, tmp_path, place, value, message):
    data, path = json.loads(planned.read_text()), tmp_path / "plan.json"
    table = data
    for step in place[:-1]:
        table = table[step]
    table[place[-1]] = value
    path.write_text(json.dumps(data))
    code, _, err = typed("explain", path)
    assert code == 2 and len(err.splitlines()) == 1 and re.search(message, err), err


def test_a_plan_carries_its_gradient_reduction(planned, tmp_path):
    data, path = json.loads(planned.read_text()), tmp_path / "plan.json"
    data["strategy"]["reduction"] = {"name": "per_layer"}
    path.write_text(json.dumps(data))
    assert Plan.load(path).strategy.reduction == Scheme("per_layer")
    data["strategy"]["reduction"] = {"name": "ring"}
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=r"plan .*plan.json: strategy.reduction.name: expected one of .*, got 'ring'$"):
        Plan.load(path)


def test_a_layer_that_is_not_there(typed, planned):
    code, _, err = typed("explain", planned, "--layer", "conv2_2")
    assert code == 2 and "expected a layer of 'mesh', got 'conv2_2'; did you mean conv2_1" in err


def test_a_plan_of_python_cannot_be_explained(typed, planned, tmp_path):
    path = tmp_path / "plain.json"
    made = replace(Plan.load(planned), request=None)
    made.save(path)
    assert Plan.load(path) == made
    code, _, err = typed("explain", path)
    assert code == 2 and "expected one with its model and machine" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[links.across]", "[links.elsewhere]"), "links"),
        (('memory = "', 'memory = "x'), "device.memory"),
        (('launch = "', 'launch = "5 GB'), "device.launch"),
    ],
)
def test_machine_files_with_faults(typed, tmp_path, change, message):
    path = tmp_path / "mine.toml"
    path.write_text(Machine.load("lassen").to_toml().replace(*change))
    code, _, err = typed("plan", *SMALL, "--machine", path, "--ranks", 2, "--batch", 1)
    assert code == 2 and len(err.splitlines()) == 1 and str(path) in err and message in err, err


def test_what_takes_long_shows_a_sign_of_life_on_a_terminal(typed, tmp_path):
    """Long commands print their progress on a terminal, and nothing if stderr is not a terminal."""
    out = str(tmp_path / "plan.json")
    for words, sign in [
        (("plan", *SMALL, *LASSEN, "--out", out), "planning mesh on 8 ranks"),
        (("explain", out), "planning around the cuts of"),
        (("predict", *SMALL, "--machine", "lassen", "--ranks", "2,4", "--batch", "2"), "predicting 4 ranks, batch 2"),
    ]:
        code, shown = on_terminal([sys.executable, "-m", "halograd", *words])
        assert code == 0, shown
        assert sign in shown and "\x1b[" in shown
        code, _, err = typed(*words)
        assert (code, err) == (0, "")


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


def own_planned(planner: str, ranks: int = 4):
    network, machine = build("mesh_1k", resolution=64), Machine.load("lassen")
    return plan_network(network, 4, ranks, machine, RooflineTimes(machine), Planning(planner))


def test_a_planner_is_compared_and_simulated(own):
    mine, theirs = own_planned(f"{own}:Careful"), own_planned("elimination")
    assert mine.planner in ("careful", *(a.name for a in theirs.alternatives))
    assert (mine.strategy, mine.step_seconds) == (theirs.strategy, theirs.step_seconds)
    assert mine.alternatives == theirs.alternatives


def test_a_baseline_is_used_as_it_is(own):
    mine = own_planned(f"{own}:Samples")
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
        own_planned(f"{own}:Lost")
    with pytest.raises(UserError, match=r"planner: expected .*elimination.*got 'eliminate'; did you mean elimination"):
        own_planned("eliminate")
