"""The command line: help with examples, one-line errors, and how several ranks end together."""

from __future__ import annotations

import io
import platform
import re
import subprocess
import sys

import h5py
import pytest
from rich.console import Console

from halograd import __version__
from halograd.cli.commands import app
from halograd.cli.output import progress_bar
from tests.harness.jobs import job_environment, new_mark
from tests.harness.limits import LIMIT
from tests.launch import PATIENT, mpiexec


def halograd(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, alone."""
    command = [sys.executable, "-m", "halograd", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=job_environment(new_mark()))


def commands() -> list[list[str]]:
    """Every command, as the words one types."""
    found = [[info.name or info.callback.__name__] for info in app.registered_commands if not info.hidden]
    for group in app.registered_groups:
        found += [
            [group.name, info.name or info.callback.__name__] for info in group.typer_instance.registered_commands
        ]
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_help_of_every_command_shows_an_example(words):
    done = halograd(*words, "--help")
    assert done.returncode == 0, done.stderr
    example = done.stdout.partition("Example")[2]
    assert f"halograd {' '.join(words)}" in example, done.stdout


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_lists_the_commands(arguments):
    done = halograd(*arguments)
    assert done.returncode == 0
    assert all(re.search(rf"^  {words[0]} ", done.stdout, re.M) for words in commands()), done.stdout


def test_version():
    assert halograd("--version").stdout == f"halograd {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bogus"], "No such option: --bogus; see `halograd --help`"),
        (["moon"], "No such command 'moon'; see `halograd --help`"),
        (["generate"], "Missing command; see `halograd generate --help`"),
        (["generate", "mesh-tangling", "x.h5", "--resolution", "big"], "Invalid value for '--resolution'"),
        (["generate", "mesh-tangling", "no/such/x.h5", "--resolution", "64"], "no/such does not exist; make it first"),
    ],
)
def test_mistake_of_the_user_is_one_line(arguments, message):
    done = halograd(*arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("halograd: error: "), done.stderr
    assert message in done.stderr


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    from halograd.cli import run
    from halograd.data import mesh_tangling

    monkeypatch.setattr(mesh_tangling, "generate", lambda *arguments, **more: exec("raise KeyboardInterrupt"))
    assert run.run(["generate", "mesh-tangling", "x.h5"]) == 130
    assert capsys.readouterr().err == "halograd: interrupted\n"


def test_the_traceback_of_a_mistake_is_there_on_demand():
    command = [sys.executable, "-m", "halograd", "status", "no/such/run"]
    environment = job_environment(new_mark(), {"HALOGRAD_TRACEBACK": "1"})
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("Traceback") and done.stderr.splitlines()[-1].startswith("halograd: error: ")


def test_generate_writes_what_was_asked_for(tmp_path):
    out = tmp_path / "mesh.h5"
    done = halograd("generate", "mesh-tangling", out, "--resolution", 64, "--samples", 2, "--seed", 5)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"{out}: 2 samples of 64 x 64 cells, seed 5, [\d.]+ MiB\n", done.stdout)
    with h5py.File(out) as file:
        assert file["inputs"].shape == (2, 64, 64, 18) and file.attrs["seed"] == 5


def test_only_rank_0_tells_of_a_mistake():
    done = mpiexec(3, [*PATIENT, "--bogus"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "halograd: error: No such option: --bogus; see `halograd --help`\n"


def job(tmp_path, body: str, patience: float = 1e6):
    """Run a command with this body on 2 ranks, one of which waits so long [s] for the other to fail alike."""
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
