"""Tests of the list of claims: bounds, numbers in outputs, and a program that runs."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import claims
from benchmarks.claims import PROGRAMS, Claim, Program

RECOMPUTED = """
mesh_2k at 512, 8 steps, onednn 3.2.0, 1 thread(s) per rank, libdnnl.so.3
             arena MiB              best s  median s      more      best
none               515       0 %     3.192     3.285     0.0 %     0.0 %
pointwise          267     -48 %     3.203     3.306     0.6 %     0.3 %
block              178     -65 %     3.465     3.563    38.6 %     8.6 %

resnet50 at 1024, 8 steps, onednn 3.2.0, 1 thread(s) per rank, libdnnl.so.3
             arena MiB              best s  median s      more      best
none              1641       0 %     4.107     4.145     0.0 %     0.0 %
pointwise          993     -39 %     4.269     4.346    -4.9 %     3.9 %
"""


@pytest.fixture
def command(monkeypatch):
    """Return a function that calls the command with given programs."""
    app = typer.Typer()
    app.command()(claims.main)

    def call(programs, *arguments):
        monkeypatch.setattr(claims, "PROGRAMS", programs)
        return CliRunner().invoke(app, list(map(str, arguments)))

    return call


def test_the_number_on_the_wrong_side_counts():
    claim = Claim("ratio", r"ratio ([-\d.,]+)", most=1.08, least=0.95)
    assert claim.worst("ratio 1.0, ratio 1.07\nratio 0.90") == 0.90
    assert claim.worst("ratio 1.2\nratio 0.90") == 1.2
    assert not claim.holds(claim.worst("ratio 0.90")) and claim.holds(0.95) and claim.holds(1.08)
    assert claim.worst("nothing here") is None and not claim.holds(None)
    assert claim.numbers("ratio 1,234.5") == [1234.5]
    assert claim.bound == ">= 0.95 and <= 1.08"


def test_numbers_are_those_of_their_network():
    found = {c.text: c.worst(RECOMPUTED) for p in PROGRAMS if p.name == "recompute" for c in p.claims}
    assert found["mesh_2k, block: longer [%]"] == 38.6
    assert found["mesh_2k, pointwise: arena smaller [%]"] == 48
    assert found["resnet50, pointwise: longer [%]"] == -4.9
    # The table of this network ended early: the numbers of others do not count for it.
    assert found["resnet50, block: longer [%]"] is None and found["unet3d, block: longer [%]"] is None


def test_programs_exist_and_have_bounds():
    names = [program.name for program in PROGRAMS]
    assert len(set(names)) == len(names)
    for program in PROGRAMS:
        assert program.claims and all(claim.bound for claim in program.claims)
        first = program.command[0]
        assert first == "-m" or (Path(claims.__file__).parent / first).is_file()


def test_a_program_runs_and_its_numbers_are_kept(command, tmp_path):
    out = tmp_path / "own" / "claims.json"
    tables = tuple(program for program in PROGRAMS if program.name == "paper-tables")
    done = command(tables, "--out", out)
    assert done.exit_code == 0 and "2 of 2 claims hold" in done.output
    kept = json.loads(out.read_text())["programs"][0]
    assert kept["code"] == 0 and [row["holds"] for row in kept["claims"]] == [True, True]
    output = (out.parent / "paper-tables.txt").read_text()
    assert "Dryden Table III" in output and "processor seconds: " in output


def test_what_does_not_hold_or_was_not_run_is_an_error(command, tmp_path):
    out = tmp_path / "claims.json"
    failing = Program("failing", ("-m", "halograd", "plan", "no-such-network"), 0.1, (Claim("time", r"(\d+) ms", 1),))
    done = command((failing,), "--out", out)
    assert done.exit_code == 1 and "MISSED time: no number" in done.output and "0 of 1" in done.output
    assert json.loads(out.read_text())["programs"][0]["code"] == 2
    done = command((failing,), "--minutes", 0, "--out", out)
    assert done.exit_code == 1 and "not run" in done.output
    assert command((failing,), "--only", "other").exit_code == 2


def test_the_list_runs_nothing(command, monkeypatch):
    monkeypatch.setattr(claims, "run", None)
    done = command(PROGRAMS, "--list")
    assert done.exit_code == 0 and all(program.name in done.output for program in PROGRAMS)
