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
from tests.harness import jobs, limits, mpi
from tests.harness.limits import GRACE_VARIABLE, LIMIT, SLOWNESS_VARIABLE, scaled
from tests.harness.record import VARIABLE
from tests.harness.sizes import daily
from tests.launch import find_mpiexec
from tests.support.clock import DrivenClock

pytest_plugins = ("pytester",)
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


def test_markers_choose_the_runs(tmp_path, monkeypatch):
    """Marks choose numbers of ranks; a fault, a fault in set-up or a skip of one rank is a failure on all of them.

    All processes share compiled modules, also if bytecode next to the sources is forbidden.
    """
    body = """
    def test_serial():
        assert not sys.dont_write_bytecode
        code = "import os, tests.launch; print(os.path.exists(tests.launch.__cached__), tests.launch.__cached__)"
        seen, path = subprocess.check_output([sys.executable, "-c", code], text=True).split()
        assert seen == "True" and path.startswith(sys.pycache_prefix)
    @pytest.mark.mpi
    def test_few(): assert world.size in (1, 2, 3, 4)
    @pytest.mark.many_ranks
    def test_many(): assert world.allreduce(1) == world.size
    @pytest.mark.nightly
    @pytest.mark.ranks(2, 6)
    def test_exact(): assert world.size in (2, 6)
    @pytest.mark.mpi(min_size=2)
    def test_several(): assert world.size > 1
    @pytest.mark.mpi
    def test_skipped(): pytest.skip("needs a moon")
    @pytest.mark.ranks(2)
    def test_fault(): assert world.rank != 1, "rank one is broken"
    @pytest.fixture
    def broken(): assert world.rank != 0, "no fixture on rank zero"
    @pytest.mark.ranks(2)
    def test_fault_of_a_fixture(broken): world.Barrier()
    @pytest.mark.ranks(2)
    def test_skipped_by_one():
        if world.rank == 1: pytest.skip("I am special")
    @pytest.mark.ranks(2)
    def test_last(): world.Barrier()
    """
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    code, output, counts = run_suite(tmp_path, body, "serial,1,2,6")
    assert (code, counts) == (1, (1 + 2 + 5 + 2, 3, 2)), output
    assert "skipped 2: Skipped: needs a moon" in output and "MPI Information" not in output
    ranks = re.findall(r"\[rank (\d) of 2\].*\n(?:.*\n)*?.*AssertionError: (rank one|no fixture)", output)
    assert set(ranks) == {("1", "rank one"), ("0", "no fixture")}, output
    assert not list(tmp_path.rglob("__pycache__"))
    assert "expected a test to be skipped on all ranks or none, got ranks [1] of 2: Skipped: I am special" in output


def test_without_nightly_tests_each_case_runs_once(pytester):
    """Cases take the numbers of ranks in turn, so that each case and each number is run; one rank is an addition."""
    items = pytester.getitems(
        """
        import pytest
        @pytest.mark.mpi
        @pytest.mark.parametrize("case", range(7))
        def test_few(case): pass
        @pytest.mark.many_ranks
        def test_single(): pass
        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("case", range(3))
        def test_two(case): pass
        @pytest.mark.ranks(6)
        def test_six(): pass
        def test_serial(): pass
        """
    )
    runs = {item.name: sizes for item, sizes in daily(items)}
    few = [runs[f"test_few[{case}]"] for case in range(7)]
    assert all(len(sizes - {1}) == 1 for sizes in few) and set().union(*few) == {1, 2, 3, 4}
    assert runs["test_single"] == {1, 4} and runs["test_six"] == runs["test_serial"] == set()
    assert [runs[f"test_two[{case}]"] for case in range(3)] == 3 * [{2}]
    assert "not mpi and not nightly" in runner.command("serial", 1.0, [], daily=True)


@pytest.mark.parametrize("name", runner.QUICK)
def test_what_is_quick_is_there_and_selects_tests(name):
    """Every name in the list of quick tests exists and selects tests."""
    command = runner.command(name, LIMIT, ["--collect-only", *runner.QUICK[name]])
    environment = jobs.job_environment(jobs.new_mark())
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr
    for test in runner.QUICK[name]:
        assert any(line.startswith(test) and "::" in line for line in done.stdout.splitlines()), test


def test_halves_and_pairs_of_runs(monkeypatch, tmp_path):
    """Every serial test is in one of two halves; two runs go on at any time unless tests are chosen."""
    halves = [runner.files_of_half(half, ROOT / "tests") for half in ("programs", "rest")]
    assert {Path(path).name for path in halves[0]} == set(runner.PROGRAMS), "each of these exists"
    for file in (ROOT / "tests").rglob("test_*.py"):
        assert sum(Path(path) in (file, *file.parents) for half in halves for path in half) == 1, file
    lock = threading.Lock()
    for words, together in (
        ([], 2),
        (["--runs", "2,serial,5"], 2),
        (["--quick"], 2),
        (["--runs", "serial,1,2", "tests/comm"], 1),
    ):
        running, most, full = [], [], threading.Barrier(together, timeout=LIMIT)

        def execute(name, options, folder, half="", running=running, most=most, full=full):
            with lock:
                running.append((name, half))
                most.append(len(running))
            full.wait()
            with lock:
                running.remove((name, half))
            return runner.Run(name, passed=1, failures=[(name, half)])

        monkeypatch.setattr(runner, "execute", execute)
        options = runner.parse(words)
        runs = runner.execute_all(options, tmp_path)
        assert max(most) == together and [run.name for run in runs] == options.runs
        found = {run.name: sorted(half for _, half in run.failures) for run in runs}
        assert found == {name: ["programs", "rest"] if options.whole and name == "serial" else [""] for name in found}


@pytest.mark.parametrize("words", [["--quick"], []], ids=["quick", "daily"])
def test_a_part_of_the_suite_says_what_it_leaves_out(words, capsys):
    options = runner.parse(words)
    assert runner.summarize([], 0, runner.left_out(options, [])) is False
    *_, note, _, total = capsys.readouterr().out.splitlines()
    assert total == "0 passed, 1 failed, 0 skipped", "no test at all is a failure"
    left, runs = re.fullmatch(r"left out: (\d+) .*, and the runs ([\d, ]+); `make \w+` .*", note).groups()
    assert runs.split(", ") == [name for name in runner.RUNS if name not in options.runs]
    assert (int(left) > 0) == options.quick
    nightly = runner.parse(["--nightly"])
    assert nightly.runs == [*runner.RUNS] and not nightly.daily and not runner.left_out(nightly, [])
    assert not runner.parse(["tests/comm"]).daily, "what is named is run"
    if options.quick:
        assert int(re.search(r" of (\d+) files", note)[1]) == len(list((ROOT / "tests").rglob("test_*.py")))
        assert all(runner.arguments_for(name, "", options) == [*tests] for name, tests in runner.QUICK.items())
        for more in (["tests/comm"], ["--runs", "3"]):
            with pytest.raises(SystemExit):
                runner.parse([*words, *more])
            assert "--quick: expected no tests and no other runs than serial,2" in capsys.readouterr().err


def test_coverage_is_that_of_all_processes(tmp_path):
    """Branches of all ranks, and of a process that ends by `os._exit`, count together."""
    pytest.importorskip("coverage", reason="needs coverage (`make lint-tools`)")
    (tmp_path / "library").mkdir()
    text = "def f(x):\n    if x == '0':\n        return 0\n    if x == '1':\n        return 1\n    return 2\n"
    (tmp_path / "library" / "__init__.py").touch()
    (tmp_path / "library" / "used.py").write_text(text)
    (tmp_path / "library" / "unused.py").write_text(text)
    body = """
    @pytest.mark.ranks(2)
    def test_ranks():
        code = "import os, sys; sys.path.insert(0, 'library'); import used; used.f(sys.argv[1])"
        sys.argv[1:] = [str(world.rank)]
        exec(code)
        exec(compile("pass", "page.md", "exec"))
        subprocess.check_call([sys.executable, "-c", code + "; os._exit(0)", "2"])
    """
    code, output, _ = run_suite(tmp_path, body, "2", more=("--coverage",))
    assert code == 0 and re.search(r"^ +library +12 +50.0% +50.0%$", output, re.M), output
    assert re.findall("coverage of (.*)", output) == ["library/unused.py: 0.0%"]


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


@pytest.mark.parametrize("end", ["os._exit(7)", "os.kill(os.getpid(), signal.SIGKILL)", "os.abort()"])
def test_death_of_one_rank_is_a_failure(tmp_path, end):
    body = f"""
    @pytest.mark.mpi
    def test_one():
        if world.rank == 1: {end}
        world.Barrier()
    """
    code, output, counts = run_suite(tmp_path, body, "2")
    assert code == 1 and counts == (0, 1, 0), output


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


def test_what_is_left_behind_is_a_failure_and_removed(tmp_path):
    name = f"halograd-left-{os.getpid()}"
    body = f"""
    import mmap
    kept = []
    @pytest.mark.ranks(1)
    def test_leaves():
        nothing = subprocess.DEVNULL
        subprocess.Popen(["sleep", "99999"], start_new_session=True, stdin=nothing, stdout=nothing, stderr=nothing)
        file = open("/dev/shm/{name}", "w+b")
        file.truncate(4096)
        kept.append(mmap.mmap(file.fileno(), 4096))
    """
    code, output, counts = run_suite(tmp_path, body, "1", grace=0.5)
    assert code == 1 and counts == (1, 2, 0), output
    left = re.search(r"expected no process to outlive the run, got \[(\d+)\]", output)
    assert left and not jobs.alive(int(left[1])), output
    assert f"expected no shared memory to outlive the run, got ['{name}']" in output
    assert not (jobs.SHARED_MEMORY / name).exists()


def test_no_tests_at_all_is_a_failure(tmp_path):
    code, output, counts = run_suite(tmp_path, "", "serial")
    assert code == 1 and counts == (0, 1, 0)
    assert "expected at least one test, got none" in output


def test_launchers(tmp_path, monkeypatch):
    """The launcher of another MPI is found by its printed version, whatever its name and its position on PATH.

    The launcher beside this Python precedes PATH; a launcher named by the suite's run precedes both.
    """

    def launcher(folder: str, name: str, version: str) -> str:
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho '{version}'\n")
        path.chmod(0o755)
        return str(path)

    openmpi, path = mpi.INSTALLATIONS["openmpi"], os.pathsep.join(str(tmp_path / name) for name in ("first", "second"))
    launcher("first", "mpirun", "HYDRA build details:")
    with pytest.raises(mpi.NotInstalled, match=r"one of mpirun.openmpi, .* got none"):
        openmpi.variables(path)
    module = launcher("second", "mpiexec", "mpiexec (Open MPI) 5.0.7")
    assert openmpi.variables(path)[mpi.LAUNCHER] == module
    debian = launcher("first", "mpirun.openmpi", "mpirun.openmpi (OpenRTE) 4.1.4")
    assert openmpi.variables(path)[mpi.LAUNCHER] == debian
    monkeypatch.setattr(sys, "executable", str(tmp_path / "environment" / "python"))
    monkeypatch.setenv("PATH", str(tmp_path / "second"))
    monkeypatch.delenv(mpi.LAUNCHER, raising=False)
    assert find_mpiexec() == module
    own = launcher("environment", "mpiexec", "HYDRA")
    assert find_mpiexec() == own
    monkeypatch.setenv(mpi.LAUNCHER, module)
    assert find_mpiexec() == module


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


def test_what_is_waited_for_is_returned_or_named(monkeypatch):
    """A condition is evaluated until it is true or its limit is over."""
    clock = DrivenClock(tick=0.0).drive(monkeypatch, limits)
    assert limits.wait_until(lambda: clock.seconds > 1.0 and "there", "a moon") == "there"
    assert 1.0 < clock.seconds < 1.1
    with pytest.raises(AssertionError, match=rf"^expected a moon within {limits.LIMIT:g} s$"):
        limits.wait_until(lambda: None, lambda: "a moon")
    assert clock.seconds == pytest.approx(limits.LIMIT + 1, abs=0.1)
    with pytest.raises(AssertionError, match="within 3 s"):
        limits.wait_until(lambda: 0, "nothing", 3.0)
