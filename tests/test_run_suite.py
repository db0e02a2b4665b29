"""Tests of the suite's runner: a fault or a hang on any rank is a failure, in time, and leaves no process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import run_suite as runner
from tests.harness import jobs, mpi
from tests.harness.limits import GRACE_VARIABLE, LIMIT, SLOWNESS_VARIABLE, scaled
from tests.harness.record import VARIABLE
from tests.launch import find_mpiexec

ROOT = Path(__file__).resolve().parent.parent
HEAD = """
import os, signal, subprocess, sys, time
import pytest
from mpi4py import MPI
world = MPI.COMM_WORLD
"""


def run_suite(
    folder: Path, body: str, runs: str, grace: float = 100, more: tuple[str, ...] = ()
) -> tuple[int, str, tuple[int, int, int]]:
    """Execute run_suite.py on one test file; return exit code, output and (passed, failed, skipped)."""
    (folder / "test_fake.py").write_text(HEAD + textwrap.dedent(body))
    arguments = [*more, "--runs", runs, "--directory", str(folder), "-p", "tests.conftest", "test_fake.py"]
    inherited = {k: v for k, v in os.environ.items() if k != VARIABLE}
    done = subprocess.run(
        [sys.executable, ROOT / "tests" / "run_suite.py", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        env={**inherited, GRACE_VARIABLE: f"{grace}", SLOWNESS_VARIABLE: "2", "PYTHONPATH": str(ROOT)},
    )
    output = done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    match = re.fullmatch(r"(\d+) passed, (\d+) failed, (\d+) skipped", last)
    assert match, output
    passed, failed, skipped = map(int, match.groups())
    return done.returncode, output, (passed, failed, skipped)


def test_markers_choose_the_runs(tmp_path):
    body = """
    def test_serial(): pass
    @pytest.mark.mpi
    def test_few(): assert world.size in (1, 2, 3, 4)
    @pytest.mark.many_ranks
    def test_many(): assert world.allreduce(1) == world.size
    @pytest.mark.ranks(2, 6)
    def test_exact(): assert world.size in (2, 6)
    @pytest.mark.mpi(min_size=2)
    def test_several(): assert world.size > 1
    @pytest.mark.mpi
    def test_skipped(): pytest.skip("needs a moon")
    """
    code, output, counts = run_suite(tmp_path, body, "serial,1,2,6")
    assert (code, counts) == (0, (1 + 2 + 4 + 2, 0, 2)), output
    assert "skipped 2: Skipped: needs a moon" in output
    assert "MPI Information" not in output


def test_modules_are_compiled_once_for_all_processes(tmp_path, monkeypatch):
    """All processes of a run share compiled modules, also if bytecode next to the sources is forbidden."""
    body = """
    @pytest.mark.ranks(2)
    def test_place():
        assert not sys.dont_write_bytecode
        code = "import os, tests.launch; print(os.path.exists(tests.launch.__cached__))"
        assert subprocess.check_output([sys.executable, "-c", code], text=True) == "True\\n"
        raise ValueError(sys.pycache_prefix)
    """
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    _, output, counts = run_suite(tmp_path, body, "2")
    (place,) = set(re.findall(r"ValueError: (\S+)$", output, re.M))
    assert counts == (0, 1, 0) and not Path(place).exists() and not list(tmp_path.rglob("__pycache__"))
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE")
    assert jobs.bytecode(tmp_path) == {}, "beside the sources, as always"


@pytest.mark.parametrize("name", runner.QUICK)
def test_what_is_quick_is_there_and_selects_tests(name):
    """Every name in the list of quick tests exists and selects tests."""
    command = runner.command(name, LIMIT, ["--collect-only", *runner.QUICK[name]])
    environment = jobs.job_environment(jobs.new_mark())
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    for test in runner.QUICK[name]:
        assert any(line.startswith(test) and "::" in line for line in done.stdout.splitlines()), test


def test_a_part_of_the_suite_says_what_it_leaves_out(capsys):
    options = runner.parse(["--quick"])
    assert options.runs == list(runner.QUICK) and not options.whole
    for name, tests in runner.QUICK.items():
        assert runner.arguments_for(name, "", options) == [*tests]
    assert runner.summarize([runner.Run("2", passed=1)], 0, runner.left_out(options))
    *_, note, _, total = capsys.readouterr().out.splitlines()
    assert total == "1 passed, 0 failed, 0 skipped"
    files = list((ROOT / "tests").rglob("test_*.py"))
    left, of, runs = re.fullmatch(r"left out: (\d+) of (\d+) files of tests, and the runs ([\d, ]+); .*", note).groups()
    assert 0 < int(left) < int(of) == len(files)
    assert runs.split(", ") == [name for name in runner.RUNS if name not in runner.QUICK]


@pytest.mark.parametrize("more", [["tests/comm"], ["--runs", "3"]], ids=["tests", "runs"])
def test_a_part_of_the_suite_is_given(more, capsys):
    with pytest.raises(SystemExit):
        runner.parse(["--quick", *more])
    assert "--quick: expected no tests and no other runs than serial,2" in capsys.readouterr().err


def test_serial_tests_are_in_one_half():
    """Every serial test is in exactly one of the two halves, and the named folders exist."""
    halves = [runner.files_of_half(half, ROOT / "tests") for half in ("programs", "rest")]
    assert {Path(path).name for path in halves[0]} == set(runner.PROGRAMS)
    for file in (ROOT / "tests").rglob("test_*.py"):
        assert sum(Path(path) in (file, *file.parents) for half in halves for path in half) == 1, file


@pytest.mark.parametrize(
    ("arguments", "together"),
    [([], 2), (["--runs", "2,serial,5"], 2), (["--quick"], 2), (["--runs", "serial,1,2", "tests/comm"], 1)],
    ids=["all", "some", "quick", "chosen"],
)
def test_runs_go_on_in_pairs(monkeypatch, tmp_path, arguments, together):
    """Two runs go on at any time unless tests are chosen; results are in the order of the runs."""
    lock, running, most = threading.Lock(), [], []
    full = threading.Barrier(together, timeout=LIMIT)

    def execute(name, options, folder, half=""):
        with lock:
            running.append((name, half))
            most.append(len(running))
        full.wait()
        with lock:
            running.remove((name, half))
        return runner.Run(name, passed=1, failures=[(name, half)])

    monkeypatch.setattr(runner, "execute", execute)
    options = runner.parse(arguments)
    found = runner.execute_all(options, tmp_path)
    assert max(most) == together
    assert [run.name for run in found] == options.runs
    halves = {run.name: sorted(half for _, half in run.failures) for run in found}
    assert halves == {name: ["programs", "rest"] if options.whole and name == "serial" else [""] for name in halves}


def test_fault_on_one_rank_fails_the_test_and_the_next_one_runs(tmp_path):
    body = """
    @pytest.mark.mpi
    def test_fault():
        assert world.rank != 1, "rank one is broken"
    @pytest.mark.mpi
    def test_next(): world.Barrier()
    """
    code, output, counts = run_suite(tmp_path, body, "3")
    assert code == 1 and counts == (1, 1, 0), output
    assert "[rank 1 of 3]" in output and "rank one is broken" in output and "[rank 0 of 3]" not in output


def test_fault_in_set_up_of_one_rank_skips_the_body_on_all(tmp_path):
    body = """
    @pytest.fixture
    def broken():
        assert world.rank != 0, "no fixture on rank zero"
    @pytest.mark.mpi
    def test_fault(broken): world.Barrier()
    """
    code, output, counts = run_suite(tmp_path, body, "2")
    assert code == 1 and counts == (0, 1, 0), output
    assert "no fixture on rank zero" in output


def test_fault_while_the_others_wait_ends_the_run(tmp_path):
    body = f"""
    here = {str(tmp_path / "here")!r}
    @pytest.mark.mpi
    def test_fault():
        if world.rank == 0: open(here, "w").close()
        while not os.path.exists(here): time.sleep(0.01)
        if world.rank == 1: raise ValueError("rank one left")
        world.Barrier()
    @pytest.mark.mpi
    def test_never(): pass
    """
    code, output, counts = run_suite(tmp_path, body, "2", grace=0.1)
    assert code == 1 and counts == (0, 1, 0), output
    assert "rank one left" in output and "1 tests of run '2' were not reached" in output
    assert re.search(r"\[rank 0\] .*in test_fault", output), output  # position at which the other rank waited


def test_hang_on_one_rank_is_ended_by_the_limit_of_the_test(tmp_path):
    """A hang on one rank is ended by the time limit of the test, which expires when the rank hangs."""
    body = """
    import threading
    hangs = threading.Event()
    class Timer(threading.Timer):
        def run(self):
            hangs.wait()
            self.function(*self.args)
    threading.Timer = Timer
    @pytest.mark.timeout(1000)
    @pytest.mark.mpi
    def test_hang():
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # as a training run leaves it
        if world.rank == 1:
            hangs.set()
            world.Recv(bytearray(1), source=0)
    """
    code, output, counts = run_suite(tmp_path, body, "2")
    assert code == 1 and counts == (0, 1, 0), output
    assert "test exceeded its limit of 2000 s" in output
    assert re.search(r"\[rank 1\] .*in test_hang", output), output


def test_hang_outside_a_test_is_ended_by_the_limit_of_the_run(tmp_path, monkeypatch, capsys):
    """A hang outside of a test is ended by the time limit of the run, which expires when the rank hangs."""
    hangs, records = tmp_path / "hangs", tmp_path / "records"
    records.mkdir()
    body = f"@pytest.mark.mpi\ndef test_good(): pass\nif world.rank == 1: open({str(hangs)!r}, 'w'); time.sleep(10**6)"
    (tmp_path / "test_fake.py").write_text(HEAD + body)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: 1e6 * hangs.exists(), sleep=time.sleep))
    arguments = ["--directory", str(tmp_path), "-p", "tests.conftest", "test_fake.py"]
    run = runner.execute("2", runner.parse(arguments), records)
    assert not runner.summarize([run])
    output = capsys.readouterr().out
    limit = f"the run exceeded its limit of {scaled(3600):g} s, without a failed test"
    assert output.splitlines()[-1] == "0 passed, 1 failed, 0 skipped" and limit in output
    assert re.search(r"\[rank 1\] .*test_fake.py", output), output


ONE_RANK = {
    "os._exit(7)": "",
    "os.kill(os.getpid(), signal.SIGKILL)": "",
    "os.abort()": "",
    'pytest.skip("I am special")': "expected a test to be skipped on all ranks or none, got ranks [1] of 2",
}


@pytest.mark.parametrize("what", ONE_RANK)
def test_death_or_skip_of_one_rank_is_a_failure(tmp_path, what):
    body = f"""
    @pytest.mark.mpi
    def test_one():
        if world.rank == 1: {what}
        world.Barrier()
    """
    if "skip" in what:
        body = body.replace("world.Barrier()", "pass")
    code, output, counts = run_suite(tmp_path, body, "2")
    assert code == 1 and counts == (0, 1, 0) and ONE_RANK[what] in output, output


def test_ranks_that_collect_different_tests_are_a_failure(tmp_path):
    body = """
    if world.rank == 1: raise ImportError("not here")
    @pytest.mark.mpi
    def test_good(): pass
    """
    code, output, counts = run_suite(tmp_path, body, "2")
    assert code == 1 and counts == (0, 1, 0), output
    assert "ranks [1] collect other tests than rank 0" in output and "not here" in output


def test_serial_hangs_are_failures_too(tmp_path):
    """Serial tests that hang are failures, also one that ignores the interrupt; limits are scaled by machine speed."""
    body = """
    import faulthandler
    limits, end_later = {}, faulthandler.dump_traceback_later
    signal.setitimer = lambda which, seconds: limits.update(signal=seconds)
    faulthandler.dump_traceback_later = lambda seconds, **options: limits.update(options, end=seconds)
    @pytest.mark.timeout(1000)
    def test_interruptible():
        assert limits["signal"] == 2000
        os.kill(os.getpid(), signal.SIGALRM)
        time.sleep(10**6)
    def test_between(): assert limits["signal"] == 1200, "the default, on a machine of half the speed"
    @pytest.mark.timeout(1000)
    def test_deaf():
        assert limits["end"] == 2000 + 100
        end_later(0.1, exit=limits["exit"], file=limits["file"])
        time.sleep(10**6)
    """
    code, output, counts = run_suite(tmp_path, body, "serial")
    assert code == 1 and counts == (1, 2, 0), output
    assert "Timeout (>2000.0s) from pytest-timeout" in output
    assert re.search(r"\[rank 0\] .*in test_deaf", output), output


def test_process_left_behind_is_a_failure_and_killed(tmp_path):
    body = """
    @pytest.mark.mpi
    def test_leaves():
        if world.rank == 0:
            nothing = subprocess.DEVNULL
            subprocess.Popen(["sleep", "99999"], start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing)
    """
    code, output, counts = run_suite(tmp_path, body, "1", grace=0.5)
    assert code == 1 and counts == (1, 1, 0), output
    left = re.search(r"expected no process to outlive the run, got \[(\d+)\]", output)
    assert left and not jobs.alive(int(left[1])), output


def test_shared_memory_left_behind_is_a_failure_and_removed(tmp_path):
    name = f"halograd-left-{os.getpid()}"
    body = f"""
    import mmap
    kept = []
    @pytest.mark.mpi
    def test_leaves():
        file = open("/dev/shm/{name}", "w+b")
        file.truncate(4096)
        kept.append(mmap.mmap(file.fileno(), 4096))
    """
    code, output, counts = run_suite(tmp_path, body, "1", grace=0.5)
    assert code == 1 and counts == (1, 1, 0), output
    assert f"expected no shared memory to outlive the run, got ['{name}']" in output
    assert not (jobs.SHARED_MEMORY / name).exists()


def test_no_tests_at_all_is_a_failure(tmp_path):
    code, output, counts = run_suite(tmp_path, "", "serial")
    assert code == 1 and counts == (0, 1, 0)
    assert "expected at least one test, got none" in output


def launcher(folder: Path, name: str, version: str) -> Path:
    """Write a program that only prints a version."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(0o755)
    return path


def test_the_launcher_of_another_mpi_is_known_by_its_version(tmp_path):
    """The launcher of another MPI is found by its printed version, whatever its name and its position on PATH."""
    openmpi = mpi.INSTALLATIONS["openmpi"]
    first, second = tmp_path / "first", tmp_path / "second"
    launcher(first, "mpirun", "HYDRA build details:")
    with pytest.raises(mpi.NotInstalled, match=r"expected one of mpirun.openmpi, .* got none; apt-get install"):
        openmpi.variables(str(first))
    module = launcher(second, "mpiexec", "mpiexec (Open MPI) 5.0.7")
    path = os.pathsep.join(map(str, (first, second)))
    assert openmpi.variables(path)[mpi.LAUNCHER] == str(module)
    debian = launcher(first, "mpirun.openmpi", "mpirun.openmpi (OpenRTE) 4.1.4")
    assert openmpi.variables(path)[mpi.LAUNCHER] == str(debian)


def test_the_environment_comes_before_the_path(tmp_path, monkeypatch):
    """The launcher of the environment precedes PATH; a launcher named by the suite's run precedes both."""
    environment, site = tmp_path / "environment", launcher(tmp_path / "site", "mpiexec", "Open MPI")
    monkeypatch.setattr(sys, "executable", str(environment / "python"))
    monkeypatch.setenv("PATH", str(site.parent))
    monkeypatch.delenv(mpi.LAUNCHER, raising=False)
    assert find_mpiexec() == str(site)
    own = launcher(environment, "mpiexec", "HYDRA")
    assert find_mpiexec() == str(own)
    monkeypatch.setenv(mpi.LAUNCHER, str(site))
    assert find_mpiexec() == str(site)


def test_under_open_mpi(tmp_path):
    """Under Open MPI more ranks than cores run, also in jobs started by serial tests."""
    try:
        mpi.INSTALLATIONS["openmpi"].variables()
    except mpi.NotInstalled as missing:
        pytest.skip(f"needs Open MPI: {missing}")
    body = """
    from tests.launch import mpiexec
    @pytest.mark.ranks(4)
    def test_vendor(): assert (MPI.get_vendor()[0], world.size) == ("Open MPI", 4)
    def test_job():
        body = "from mpi4py import MPI; world = MPI.COMM_WORLD; vendors = world.gather(MPI.get_vendor()[0])"
        done = mpiexec(3, ["-c", body + "; print(vendors) if world.rank == 0 else None"])
        assert done.stdout.strip() == str(["Open MPI"] * 3)
    """
    code, output, counts = run_suite(tmp_path, body, "serial,4", more=("--mpi", "openmpi"))
    assert (code, counts) == (0, (2, 0, 0)), output


def test_an_mpi_that_is_missing_is_skipped(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["run_suite.py", "--mpi", "openmpi"])
    assert runner.main() == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first.startswith("skipped: expected one of mpirun.openmpi") and last == "0 passed, 0 failed, 1 skipped"
