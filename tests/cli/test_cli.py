"""The command line: help with examples, one-line errors, and the end of several ranks."""

from __future__ import annotations

import io
import platform
import re

import h5py
import pytest
from rich.console import Console

from halograd import __version__
from halograd.cli.commands import app
from halograd.data import mesh_tangling
from halograd.output import progress_bar
from tests.launch import PATIENT, command_line, mpiexec


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
