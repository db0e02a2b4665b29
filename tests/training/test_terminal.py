"""The progress bar of a run, on the terminal of the launcher and nowhere else."""

import sys

import pytest

from tests.launch import find_mpiexec
from tests.support.terminal import on_terminal
from tests.training.launching import sets
from tests.training.runs import write_config

BAR = "\u2501"
PROGRAM = "from halograd.comm.terminal import terminal_columns as columns; print('columns', columns(), flush=True)"


def through(*launcher: str) -> str:
    """What this process says of its terminal behind a launcher."""
    code, shown = on_terminal([*launcher, sys.executable, "-c", PROGRAM])
    assert code == 0, shown
    return shown.strip()


def test_columns_behind_launchers():
    mpiexec = find_mpiexec()
    assert "columns 133" in through(mpiexec, "-n", "1")
    assert through("/bin/sh", "-c", '"$0" "$@"') == "columns 133"


@pytest.mark.parametrize("redirected", ["2>/dev/null", "2>&1 | cat"])
def test_no_columns_where_the_user_reads_a_file_or_another_program(redirected):
    assert "columns None" in through("/bin/sh", "-c", f'{find_mpiexec()} -n 1 "$0" "$@" {redirected}')
    assert "columns None" in through("/bin/sh", "-c", f'"$0" "$@" {redirected}')


def test_no_columns_where_a_program_catches_what_is_said():
    """Its own stderr is a terminal, and what it reads from its child does not go there."""
    catching = "import subprocess, sys; print(subprocess.run(sys.argv[1:], capture_output=True, text=True).stdout)"
    assert "columns None" in through(sys.executable, "-c", catching)


def test_a_run_of_two_ranks_shows_its_bar(tmp_path):
    """On the terminal, and not in the log of the rank."""
    command = [find_mpiexec(), "-n", "2", sys.executable, "-m", "halograd", "train", str(write_config(tmp_path))]
    code, shown = on_terminal([*command, *sets("output.progress=true", "output.rank_logs=true")])
    assert code == 0, shown
    assert BAR in shown and "\x1b[" in shown
    logs = [path.read_text() for path in tmp_path.glob("out/logs/*.log")]
    assert logs and not any(BAR in text for text in logs)
