"""The command line: help, one-line errors of every command, profiling, and the end of several ranks."""

from __future__ import annotations

import io
import json
import platform
import re

import h5py
import pytest
from rich.console import Console

from halograd import __version__
from halograd.cli.commands import app
from halograd.cli.options import parse_grid, parse_ranks
from halograd.comm.codec import CODECS
from halograd.comm.sums import METHODS
from halograd.data import mesh_tangling
from halograd.errors import UserError
from halograd.output import progress_bar
from halograd.perfmodel.machine import Machine
from halograd.perfmodel.profile.record import Profile
from tests.cli.test_planning import LASSEN, SMALL
from tests.launch import PATIENT, command_line, mpiexec
from tests.support.refusals import refusals


def commands() -> list[list[str]]:
    """Return every command as the words of a command line."""
    found = [[info.name or info.callback.__name__] for info in app.registered_commands if not info.hidden]
    for group in app.registered_groups:
        found += [
            [group.name, info.name or info.callback.__name__] for info in group.typer_instance.registered_commands
        ]
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_help_of_every_command_shows_an_example(typed, words):
    code, out, err = typed(*words, "--help")
    assert code == 0, err
    assert f"halograd {' '.join(words)}" in out.partition("Example")[2], out


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_the_commands(typed, arguments):
    code, out, _ = typed(*arguments)
    assert code == 0
    assert all(re.search(rf"^  {words[0]} ", out, re.M) for words in commands()), out


def test_version():
    assert command_line("--version").stdout == f"halograd {__version__}\n"


def test_ctrl_c_is_one_line(typed, monkeypatch):
    monkeypatch.setattr(mesh_tangling, "generate", lambda *arguments, **more: exec("raise KeyboardInterrupt"))
    assert typed("generate", "mesh-tangling", "x.h5")[::2] == (130, "halograd: interrupted\n")


def test_the_traceback_of_a_mistake_is_there_on_demand():
    done = command_line("status", "no/such/run", HALOGRAD_TRACEBACK="1")
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback") and done.stderr.splitlines()[-1].startswith("halograd: error: ")


def test_generate_writes_what_was_asked_for(tmp_path):
    out = tmp_path / "mesh.h5"
    done = command_line("generate", "mesh-tangling", out, "--resolution", 64, "--samples", 2, "--seed", 5)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"{out}: 2 samples of 64 x 64 cells, seed 5, [\d.]+ MiB\n", done.stdout)
    with h5py.File(out) as file:
        assert file["inputs"].shape == (2, 64, 64, 18) and file.attrs["seed"] == 5


def test_only_rank_0_tells_of_a_mistake():
    done = mpiexec(3, [*PATIENT, "--bogus"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "halograd: error: No such option: --bogus; see `halograd --help`\n"


def job(tmp_path, body: str, patience: float = 1e6):
    """Run a command with this body on 2 ranks; a failing rank waits `patience` [s] for the other to fail likewise."""
    script = tmp_path / "job.py"
    script.write_text(
        "from mpi4py import MPI\n"
        "from halograd.cli import main\n"
        "from halograd.cli.commands import app\n"
        "from halograd.comm import ending\n"
        "from halograd.errors import UserError\n"
        "@app.command()\n"
        "def work():\n"
        "    rank = MPI.COMM_WORLD.rank\n"
        f"    {body}\n"
        "    MPI.COMM_WORLD.Barrier()\n"
        "    print('rank', rank, 'is through')\n"
        f"ending.PATIENCE.update({{1: {patience}, 2: {patience}}})\n"
        "main(['work'])\n"
    )
    return mpiexec(2, [script])


def test_only_rank_0_prints(tmp_path):
    done = job(tmp_path, "pass")
    assert (done.returncode, done.stdout, done.stderr) == (0, "rank 0 is through\n", "")


def test_mistake_that_all_ranks_see_is_told_once(tmp_path):
    done = job(tmp_path, "raise UserError('expected a moon,\\ngot none; make one')")
    assert done.returncode == 2
    assert done.stderr == "halograd: error: expected a moon, got none; make one\n"


def test_mistake_on_one_rank_ends_the_job(tmp_path):
    done = job(tmp_path, "if rank == 1: raise UserError('expected a file, got none')", patience=0.5)
    assert done.returncode == 2
    assert f"halograd: error: expected a file, got none (rank 1 of 2 on {platform.node()})\n" in done.stderr
    assert "Traceback" not in done.stderr


def test_fault_on_one_rank_ends_the_job_with_its_traceback(tmp_path):
    done = job(tmp_path, "if rank == 1: raise ZeroDivisionError('one over nothing')", patience=0.5)
    assert done.returncode == 1
    assert "[rank 1 of 2] ZeroDivisionError: one over nothing" in done.stderr and "[rank 0 of 2]" not in done.stderr


def test_the_bar_shows_what_was_reported():
    out = io.StringIO()
    with progress_bar("blocks", console=Console(file=out, force_terminal=True, width=100)) as progress:
        progress(3, 7)
    assert "blocks" in out.getvalue() and "3/7" in out.getvalue()


TINY = ("profile", "mesh", "--option", "resolution=16", "--option", "widths=[4, 4]", "--kernels", "numpy")
BENCH = ("bench", "allreduce")

WRONG = [
    (("plan", "mesh_3k", *LASSEN), "got 'mesh_3k'; did you mean mesh_2k"),
    (("plan", *SMALL, "--machine", "lasen", "--ranks", 2, "--batch", 1), "got 'lasen'; did you mean lassen?"),
    (
        ("plan", *SMALL, "--machine", "no.toml", "--ranks", 2, "--batch", 1),
        "machine no.toml: expected a TOML file to read",
    ),
    (("plan", *SMALL, *LASSEN, "--memory", "16"), '--memory: expected a size with its unit, such as "16 GiB", got'),
    (("plan", *SMALL, *LASSEN, "--memory", "1kB"), "too much; use more ranks, a smaller batch than 2"),
    (("plan", *SMALL, *LASSEN, "--planner", "eliminate"), "got 'eliminate'; did you mean elimination?"),
    (("plan", *SMALL, *LASSEN, "--optimizer", "adamv"), "--optimizer: expected one of sgd, adam, adamw, lion, "),
    (("plan", *SMALL, *LASSEN, "--optimizer", "adamv"), "got 'adamv'; did you mean adam?"),
    (("predict", *SMALL, *LASSEN, "--optimizer", "x"), "--optimizer: expected one of sgd, adam, adamw, lion, "),
    (("plan", *SMALL, *LASSEN, "--dtype", "float8"), "--dtype: expected one of float16, float32"),
    (("plan", *SMALL, *LASSEN, "--option", "colour=1"), "model.colour: unknown key; expected one of"),
    (("plan", *SMALL, *LASSEN, "--option", "colour"), "--option: expected KEY=VALUE"),
    (("plan", *SMALL, *LASSEN[:4], "--batch", 0), "--batch: expected a whole number >= 1, got 0"),
    (("plan", *SMALL, "--machine", "lassen", "--ranks", "many", "--batch", 1), "Invalid value for '--ranks'"),
    (
        ("plan", *SMALL, *LASSEN, "-o", "no/such/plan.json"),
        "--out no/such/plan.json: expected a path that can be written",
    ),
    (("predict", *SMALL, "--machine", "lassen", "--ranks", "x", "--batch", 1), "--ranks: expected whole numbers"),
    (("predict", *SMALL, *LASSEN, "--grid", "height=3"), "3 ranks, which does not divide --ranks 8"),
    (("predict", *SMALL, *LASSEN, "--grid", "sample=2,height=2"), "choose parts whose product is 8"),
    (("predict", *SMALL, *LASSEN, "--grid", "depth=8"), "'depth' is cut, but the samples of 'mesh' have only the axes"),
    (("predict", *SMALL, *LASSEN, "--grid", "sample=8"), "8 parts along 'sample', but the batch has 2; use at most 2"),
    (("predict", *SMALL, *LASSEN, "--grid", "sample=2", "--planner", "data"), "--grid: expected no --planner with it"),
    (("predict", *SMALL, *LASSEN, "--plot", "x.png"), "--plot: expected several numbers of ranks"),
    (("predict", *SMALL, "--machine", "lassen", "--ranks", "2,3", "--batch", 3), "use a multiple of 2"),
    (("plan", *SMALL, *LASSEN, "--memory", "0 B"), "--memory: expected a number >= 1, got 0"),
    (("plan", *SMALL, *LASSEN, "--memory", "1e400 GB"), "--memory: expected a size with its unit"),
    (("plan", *SMALL, *LASSEN, "--planner", "x" * 3000), "--planner: expected shortest_path"),
    (("plan", *SMALL, *LASSEN, "--option", "convs=-1"), "model.convs: expected a whole number >= 1, got -1"),
    (("plan", *SMALL, *LASSEN, "--option", "convs=" + "9" * 5000), "--option convs: expected a TOML value, got '99999"),
    (("plan", *SMALL, *LASSEN, "--option", "widths=" + "[" * 3000), "--option widths: expected a TOML value, got '[[["),
    (("plan", *SMALL, "--machine", "lassen", "--ranks", 8193, "--batch", 1), "--ranks: expected a whole number <= 819"),
    (("plan", *SMALL, "--machine", "lassen", "--ranks", 2, "--batch", 2**31), "--batch: expected a whole number <= 2"),
    (("plan", *SMALL, "--machine", "x" * 300 + ".toml", "--ranks", 2, "--batch", 1), "(File name too long); check"),
    (("predict", *SMALL, "--machine", "lassen", "--ranks", "9" * 5000, "--batch", 1), "--ranks: expected whole num"),
    (
        ("predict", *SMALL, "--machine", "lassen", "--ranks", "1,2,...,\u00b2", "--batch", 1),
        "expected two numbers before",
    ),
    (("predict", *SMALL, *LASSEN, "--grid", "sample=\u00b2"), "--grid: expected AXIS=PARTS,..."),
    (("evaluate", "x" * 300), "got xxx"),
    (("generate", "mesh-tangling", "o.h5", "--seed", 10**40), "seed: expected 0 to 9223372036854775807, got 1"),
    (("data", "join", "no.h5"), "no.h5: no such file"),
    (("data", "join", __file__), "expected an HDF5 file, got something else"),
    (("data", "repack", "no.h5", "b.h5", "--chunk", "a=1"), "no.h5: no such file"),
    (("explain", "no.json"), "plan no.json: expected a JSON file to read"),
    ((*TINY, "--option", "depth"), "--option: expected KEY=VALUE, such as resolution=512, got 'depth'"),
    ((*TINY, "--option", "colour=3"), "model.colour: unknown key; expected one of"),
    (("profile", "mash"), "model.name: expected one of"),
    ((*TINY, "--batch", "0"), "--batch: expected a whole number >= 1, got 0"),
    ((*TINY, "--budget", "-1"), "--budget: expected a number >= 0, got -1"),
    ((*TINY, "--transport", "pigeon"), "transport: expected auto, mpi, shared"),
    ((*TINY, "--kernels", "abacus"), "--kernels: expected auto, numpy"),
    ((*TINY, "--dtype", "float16"), 'got "float16": NumPy has only arithmetic of 32 and 64 bits'),
    ((*TINY, "--out", "no/such/folder/machine.toml"), "expected a path that can be written"),
    ((*BENCH, "--size", "large"), "--size: expected a size of at least 4 bytes, such as 256KiB or 4MiB, got 'large'"),
    ((*BENCH, "--size", "2B"), "--size: expected a size of at least 4 bytes"),
    ((*BENCH, "--method", "luck"), "--method: expected one of allreduce, ordered, reduce_scatter"),
    ((*BENCH, "--codec", "luck"), '--codec: expected float32, bfloat16, or "FILE.py:CLASS", got '),
    ((*BENCH, "--transport", "pigeon"), "--transport: expected auto, mpi, shared"),
    (("--bogus",), "No such option: --bogus; see `halograd --help`"),
    (("moon",), "No such command 'moon'; see `halograd --help`"),
    (("generate",), "Missing command; see `halograd generate --help`"),
    (("generate", "mesh-tangling", "x.h5", "--resolution", "big"), "Invalid value for '--resolution'"),
    (("generate", "mesh-tangling", "no/x.h5", "--resolution", "64"), "no does not exist; make it first"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(map(str, a))[-40:] for a, _ in WRONG])
def test_mistakes_are_one_line(typed, tmp_path, monkeypatch, arguments, message):
    monkeypatch.setenv("HALOGRAD_CACHE", str(tmp_path))
    code, out, err = typed(*arguments)
    assert (code, out) == (2, ""), err
    assert len(err.splitlines()) == 1 and err.startswith("halograd: error: ") and message in err, err


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16", [16]), ("4,8,...,64", [4, 8, 16, 32, 64]), ("1, 3, ..., 27", [1, 3, 9, 27]), ("2,4,...,8", [2, 4, 8])],
)
def test_ranks(text, expected):
    assert parse_ranks(text) == expected


test_ranks_that_are_refused = refusals(
    ("four", "expected whole numbers >= 1 such as 4,8,...,2048, got 'four'"),
    ("4,0", "got '0' in '4,0'"),
    ("", "got '' in ''"),
    ("8,4", "expected rising numbers"),
    ("...,8", "expected two numbers before ... and one after"),
    ("4,...,8", "expected two numbers before ... and one after"),
    ("4,8,...", "expected two numbers before ... and one after"),
    ("4,6,...,32", "expected two numbers before ... and one after"),
    ("4,8,...,100", "expected 100 to be reached by times 2 from 8, got '4,8,...,100'; end with 128 or 64"),
    call=parse_ranks,
    error=UserError,
    literal=True,
)


test_grids_that_are_refused = refusals(
    ("sample", "expected AXIS=PARTS"),
    ("sample=two", "expected AXIS=PARTS"),
    ("sample=0", "expected AXIS=PARTS"),
    ("column=2", "expected axes out of sample, depth"),
    ("height=2,height=2", "expected every axis once"),
    call=parse_grid,
    error=UserError,
    literal=True,
)


def test_alone_it_measures_resumes_and_writes(typed, tmp_path, monkeypatch):
    """A second run resumes from the cache on disk that a separate process has filled, and writes the machine file."""
    monkeypatch.setenv("HALOGRAD_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "machine.toml"
    first = command_line(*TINY, "--out", out, "--ranks", 2, "--budget", 0)
    assert first.returncode == 0, first.stderr
    assert "0 layer shapes measured" in first.stdout and "left: the budget is spent" in first.stdout
    code, text, err = typed(*TINY, "--out", out, "--ranks", 2, "--json")
    assert code == 0, err
    layers = json.loads(text)["layers"]
    assert layers["measured"] > 0 == layers["known"] == layers["left"]
    assert (tmp_path / "cache" / "kernel_times.jsonl").exists()
    third = json.loads(typed(*TINY, "--out", out, "--ranks", 2, "--json")[1])
    assert third["layers"]["known"] == layers["measured"] and third["layers"]["measured"] == 0
    assert Machine.load(out).devices_per_node == 1
    found = Profile.load(out)
    assert 1e-12 < found.update < 1e-7, "[s/B]"
    assert found.layer_overhead < 1e-3 and not found.reduction


def test_two_ranks_measure_their_messages(tmp_path):
    out = tmp_path / "machine.toml"
    arguments = ["-m", "halograd", *TINY, "--out", out, "--cache", tmp_path, "--batch", 2, "--json"]
    done = mpiexec(2, arguments)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["ranks"] == 2 and record["layers"]["measured"] > 0
    assert record["face"]["node"]["alpha"] > 0 and record["reduction"]["2"]["alpha"] > 0
    assert Machine.load(out).devices_per_node == 2
    assert Profile.load(out).channel["node"].error >= 0


@pytest.mark.parametrize("transport", ["auto", "emulated:alpha=1e-4,beta=1e-9", "emulated:alpha=1e-4,beta=1e-9,node=1"])
def test_plans_for_more_ranks_use_what_these_have_measured(typed, tmp_path, transport):
    out, common = tmp_path / "machine.toml", ["--batch", 4, "--ranks", 4, "--cache", tmp_path]
    done = mpiexec(2, ["-m", "halograd", "profile", "lenet5", "--out", out, "--transport", transport, *common])
    assert done.returncode == 0, done.stderr
    code, planned, err = typed("plan", "lenet5", "--machine", out, "--out", tmp_path / "plan.json", *common)
    assert code == 0, err
    found = re.search(r"kernel times: measured here(?:, (\d+) shapes)?", planned)
    # Measured times may lead to a shape that rooflines did not; under other conditions almost all are unknown.
    assert found and int(found[1] or 0) < 10, planned


def test_plans_use_what_was_measured_with_autotune(typed, tmp_path):
    out, common = tmp_path / "machine.toml", ["--batch", 1, "--ranks", 1, "--cache", tmp_path]
    code, _, err = typed(*TINY, "--out", out, "--autotune", *common)
    assert code == 0, err
    assert Profile.load(out).autotune
    code, planned, err = typed("plan", *TINY[1:6], "--machine", out, "--json", *common)
    assert code == 0, err
    assert json.loads(planned)["request"]["kernel_times"] == "measured here"


def test_a_record_that_is_damaged_is_named(typed, tmp_path):
    out = tmp_path / "m.toml"
    assert typed(*TINY, "--out", out, "--cache", tmp_path, "--budget", 0)[0] == 0
    (tmp_path / "m.profile.json").write_text("{}")
    with pytest.raises(
        UserError, match=r"m.profile.json: version: expected a value, got nothing; .*; run `halograd pro"
    ):
        Profile.load(out)


QUICK = ["-m", "halograd", "bench", "allreduce", "--rounds", 1, "--size", "1KiB", "--size", "256KiB"]


def test_every_method_is_timed_as_json():
    done = mpiexec(2, [*QUICK, "--transport", "auto", "--transport", "emulated:alpha=1e-3,beta=0", "--json"])
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["ranks"] == "2 ranks on 2 nodes"  # of the emulated network
    timed = [*((name, "float32") for name in METHODS), ("ordered", "bfloat16")]
    assert [(row["method"], row["codec"]) for row in record["sums"]] == 2 * timed and len(CODECS.names) == 2
    for row in record["sums"]:
        waited, left = row["waited"], row["left"]
        assert waited["bytes"] == [1024, 262144] and min(waited["seconds"] + left["seconds"]) > 0
    slow = {row["method"]: min(row["waited"]["seconds"]) for row in record["sums"] if "alpha" in row["transport"]}
    assert slow["allreduce"] >= 1e-3, "recursive doubling on two ranks takes alpha"
    assert slow["all_gather"] >= 1e-3, "and half of one takes alpha"


def test_the_table_says_what_a_transport_cannot():
    done = mpiexec(2, [*QUICK, "--transport", "mpi", "--method", "allreduce", "--method", "accumulate"])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 ranks on 1 node: ") and "256 KiB" in lines[2]
    (accumulate,) = [line for line in lines if line.startswith("mpi        accumulate")]
    assert accumulate.split()[2:] == ["float32", *["-"] * 7]
    assert lines[-1].startswith("mpi: ") and "share memory" in lines[-1]


def test_one_rank_is_told_that_it_is_alone(typed):
    code, out, _ = typed("bench", "allreduce", "--size", "1KiB", "--size", "2KiB", "--transport", "auto")
    assert code == 0 and "a single rank has no sums" in out
