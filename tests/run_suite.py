"""Run the suite: serially, then under MPI ranks. Called by ``make test`` and, with all nightly tests, ``make nightly``.

Without ``--nightly`` each case of a test for several numbers of ranks runs under one of them (`tests.harness.sizes`),
and tests with the mark ``nightly`` and those for 6 and 8 ranks are left out. Tests that are named are always run.

In a run of the whole suite, two of its runs go on at any time: a rank that waits for another, and a test that waits
for a program, leave a core to the other run. The serial tests are two such runs: those that start programs, and the
rest.

Every run and every test has a wall-clock limit, which grows on a slow or busy machine. A run that hangs is killed with
all its ranks and counts as failed, with the tracebacks of every rank. The last line is ``N passed, N failed, N
skipped``.

    python tests/run_suite.py                         all but nightly tests
    python tests/run_suite.py --nightly               everything
    python tests/run_suite.py --runs 2,4 tests/comm   these tests, under 2 and 4 ranks only
    python tests/run_suite.py --runs serial -k box    other arguments go to pytest
    python tests/run_suite.py --slowest 20            the 20 files of each run that took longest
    python tests/run_suite.py --quick                 a part of everything in less than a minute (``make quick``)
    python tests/run_suite.py --mpi openmpi           tests of communication, and a run that is killed, under Open MPI
    python tests/run_suite.py --coverage              branch coverage per folder, of the other options' tests
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.harness import branches, jobs, mpi, record  # noqa: E402  (needs the line above)
from tests.harness.limits import LIMIT, TEST_LIMIT, scaled, slowness  # noqa: E402
from tests.harness.sizes import files_for  # noqa: E402
from tests.harness.watchdog import ask_for_stacks  # noqa: E402
from tests.launch import find_mpiexec  # noqa: E402

DAILY = ("serial", "1", "2", "3", "4")
RUNS = (*DAILY, "6", "8")
#: Order of the runs of the whole suite, with the halves of the serial one: the last ones are short, so that both cores
#: have work to the end.
LONGEST_FIRST = (("serial", "rest"), ("4", ""), ("serial", "programs"), ("3", ""), ("2", ""))
LONGEST_FIRST += (("8", ""), ("1", ""), ("6", ""))
#: Where only a part of the tests is run, under another MPI.
RUNS_OF_A_PART = ("serial", "2", "4")
#: What some tests need, by the target of the Makefile that installs it.
INSTALLED_BY = {"torch": "oracle", "vtk": "oracle", "tensorboard": "oracle", "tensorboardX": "oracle", "onnx": "oracle"}
INSTALLED_BY |= {"mkdocs": "docs-tools"}
#: Folders and files below ``tests`` whose serial tests start programs.
PROGRAMS = ("cli", "gpu", "jobs", "report", "test_demo.py", "test_docs.py", "test_examples.py")
PROGRAMS += ("test_launch.py", "test_run_suite.py", "training")
#: What is run of each kind where there is a minute only.
QUICK = {
    "serial": (
        "tests/dtensor/test_arithmetic.py",
        "tests/layers/test_network.py",
        "tests/layers/test_strategy.py",
        "tests/layers/test_convolution.py",
        "tests/kernels/test_pooling.py",
        "tests/program",
    ),
    "2": (
        "tests/dtensor/test_exchange.py",
        "tests/layers/test_convolution.py",
        "tests/training/test_executor.py",
        "tests/training/test_trainer.py::test_steps",
        "tests/training/test_trainer.py::test_as_one_process[0]",
    ),
}
ENDED_WELL = (0, 5)  # exit codes of pytest: all passed, nothing was selected


@dataclass
class Run:
    """Result of one run of pytest, serial or under MPI."""

    name: str
    passed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: list[tuple[str, str]] = field(default_factory=list)
    skips: list[tuple[str, str]] = field(default_factory=list)
    files: Counter[str] = field(default_factory=Counter)  # [s]
    nightly: int = 0


def command(name: str, limit: float, arguments: list[str], daily: bool = False) -> list[str]:
    """Return the command line of a run; a daily one leaves out nightly tests."""
    marks = " and not nightly" if daily else ""
    # Open MPI gives its ranks a terminal, in which pytest would write in colors.
    pytest = [sys.executable, "-m", "pytest", "-q", "--color=no", "--no-header", "--tb=short", "-r", "fE"]
    pytest += ["--continue-on-collection-errors", f"--timeout={limit:g}"]
    if name == "serial":
        return [*pytest, "--timeout-method=signal", "-m", f"not mpi{marks}", *arguments]
    return [find_mpiexec(), "-n", name, *pytest, "--with-mpi", "-m", f"mpi{marks}", *arguments]


def arguments_for(name: str, half: str, options: argparse.Namespace) -> list[str]:
    """Return the arguments for pytest; a run of the whole suite under MPI gets the files with tests for these ranks."""
    if options.quick:
        return [*options.arguments, *QUICK[name]]
    if not options.whole or (name == "serial" and not half):
        return options.arguments
    tests = options.directory / "tests"
    files = files_for(int(name), tests) if name != "serial" else files_of_half(half, tests)
    return [*options.arguments[:-1], *(files or ["tests"])]


def files_of_half(half: str, folder: Path) -> list[str]:
    """Return the files and folders of the serial tests that start programs, or those of the others."""
    paths = [path for path in sorted(folder.iterdir()) if path.match("test_*.py") or any(path.rglob("test_*.py"))]
    return [str(path) for path in paths if (path.name in PROGRAMS) == (half == "programs")]


def execute(name: str, options: argparse.Namespace, folder: Path, half: str = "") -> Run:
    """Execute one run, or one half of the serial one, and return its result."""
    records, temporary = folder / f"record-{name}{half}", folder / f"tmp-{name}{half}"
    records.mkdir()
    temporary.mkdir()
    mark = jobs.new_mark()
    extra = {record.VARIABLE: str(records), "PYTEST_DEBUG_TEMPROOT": str(temporary), "TMPDIR": str(temporary)}
    compiled = folder / "compiled"
    compiled.mkdir(exist_ok=True)
    extra |= {jobs.COMPILED: str(compiled), **jobs.bytecode(folder), **options.measured}
    begin = time.monotonic()
    process = subprocess.Popen(
        command(name, options.test_limit, arguments_for(name, half, options), options.daily),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        cwd=options.directory,
        env=jobs.job_environment(mark, extra),
        start_new_session=True,
    )
    tail: deque[str] = deque(maxlen=40)
    reader = threading.Thread(target=_pass_on, args=(process, tail), daemon=True)
    reader.start()
    late = _wait(process, mark, begin + scaled(options.limit), records)
    # What an aborted job leaves is being killed; MPICH leaves its segment too.
    left = jobs.await_end(mark) if process.returncode in ENDED_WELL else []
    immortal = jobs.end(mark)
    reader.join(LIMIT)
    ended = f"the run exceeded its limit of {scaled(options.limit):g} s" if late else f"exit code {process.returncode}"
    run = _judge(name, process.returncode, ended, record.read(records), tail)
    run.seconds = time.monotonic() - begin
    if left:
        run.failures.append((name, f"expected no process to outlive the run, got {left}"))
    if immortal:
        run.failures.append((name, f"expected killed processes to end, got {immortal}"))
    return run


def execute_all(options: argparse.Namespace, folder: Path) -> list[Run]:
    """Execute all runs and return their results. Two go on at any time, but runs of chosen tests follow each other."""
    works = [(name, "") for name in options.runs]
    if options.whole:
        works = [(name, half) for name, half in LONGEST_FIRST if name in options.runs]
        works += [(name, "") for name in options.runs if name not in RUNS]
    paired = options.whole or options.mpi or options.quick
    with ThreadPoolExecutor(2 if paired else 1) as pool:
        runs = list(pool.map(lambda work: _announced(*work, options, folder), works))
    found: dict[str, Run] = {}
    for run in runs:
        found[run.name] = together(found[run.name], run) if run.name in found else run
    return [found[name] for name in options.runs]


def _announced(name: str, half: str, options: argparse.Namespace, folder: Path) -> Run:
    title = "serial" if name == "serial" else f"{name} ranks"
    print(f"\n== {title}" + (f", {half}" if half else ""), flush=True)
    return execute(name, options, folder, half)


def together(run: Run, other: Run) -> Run:
    """Return the combined result of two halves of one run."""
    both = Run(run.name, run.passed + other.passed, run.skipped + other.skipped, max(run.seconds, other.seconds))
    both.failures, both.skips = run.failures + other.failures, run.skips + other.skips
    both.files, both.nightly = run.files + other.files, run.nightly + other.nightly
    return both


def _pass_on(process: subprocess.Popen[bytes], tail: deque[str]) -> None:
    assert process.stdout is not None
    while chunk := process.stdout.read1(1 << 16):
        text = chunk.decode(errors="replace")
        sys.stdout.write(text)
        sys.stdout.flush()
        tail.extend(text.splitlines())


def _wait(process: subprocess.Popen[bytes], mark: str, deadline: float, records: Path) -> bool:
    """Wait for the run, or kill it at its deadline (`time.monotonic` [s]); return whether it was killed."""
    while process.poll() is None:
        if time.monotonic() > deadline:
            ask_for_stacks(records, record.read(records).pids)
            jobs.end(mark)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # where there is no /proc to find members by
            process.wait()
            return True
        time.sleep(0.05)
    return False


def _judge(name: str, code: int, ended: str, outcomes: record.Outcomes, tail: deque[str]) -> Run:
    run = Run(name, outcomes.count("passed"), outcomes.count("skipped"), nightly=outcomes.nightly)
    run.skips = [(v.test, v.text) for v in outcomes.verdicts if v.outcome == "skipped"]
    run.failures = [(v.test, v.text) for v in outcomes.verdicts if v.outcome == "failed"]
    for verdict in outcomes.verdicts:
        run.files[verdict.test.partition("::")[0]] += verdict.seconds
    ended_well = code in ENDED_WELL
    if not ended_well and not run.failures:
        run.failures.append((name, "last output:\n" + "\n".join(tail) + f"\n{ended}, without a failed test"))
    elif code < 0:
        print(f"== run '{name}': {ended}")
    if outcomes.stacks and not ended_well:
        print(f"\n== where the ranks of run '{name}' were", flush=True)
        for rank, stack in outcomes.stacks.items():
            print("\n".join(f"[rank {rank}] {line}" for line in stack.splitlines()[-60:]), flush=True)
    kept = jobs.await_removal(outcomes.segments) if ended_well else []
    jobs.remove(outcomes.segments)
    if kept:
        run.failures.append((name, f"expected no shared memory to outlive the run, got {kept}"))
    missing = (outcomes.collected or 0) - len(outcomes.verdicts)
    if missing > 0 and not ended_well:
        print(f"== {missing} tests of run '{name}' were not reached", flush=True)
    return run


def left_out(options: argparse.Namespace, runs: list[Run]) -> str:
    """Return a note on the parts of the whole suite that a quick or a daily run leaves out."""
    ranks = ", ".join(name for name in RUNS if name not in options.runs)
    if options.daily:
        tests = sum(run.nightly for run in runs)
        return f"left out: {tests} nightly tests, and the runs {ranks}; `make nightly` does all (CONTRIBUTING.md)"
    if not options.quick:
        return ""
    files = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("test_*.py")}
    named = {Path(test.partition("::")[0]) for name in options.runs for test in QUICK[name]}
    others = [file for file in files if not named & {file, *file.parents}]
    return f"left out: {len(others)} of {len(files)} files of tests, and the runs {ranks}; `make test` does more"


def summarize(runs: list[Run], slowest: int = 0, note: str = "") -> bool:
    """Print failures, skip reasons, the table, a note and the line of totals; return whether all is well."""
    print("\n" + "=" * 30 + " summary " + "=" * 30)
    reasons = sorted({text for run in runs for _, text in run.skips})
    for reason in reasons:
        tests = sum(text == reason for run in runs for _, text in run.skips)
        print(f"skipped {tests}: {reason}")
    for module, target in INSTALLED_BY.items():
        present = importlib.util.find_spec(module) is not None
        print(f"{module}: " + ("present" if present else f"absent, its tests are skipped; `make {target}` installs it"))
    for run in runs:
        for file, seconds in run.files.most_common(slowest):
            print(f"slow [{run.name}] {file}: {seconds:.1f} s")
    for run in runs:
        for test, text in run.failures:
            last = text.strip().splitlines()[-1] if text.strip() else ""
            print(f"FAILED [{run.name}] {test}: {last}")
    print(f"\n{'ranks':>7} {'passed':>8} {'failed':>8} {'skipped':>8} {'seconds':>9}")
    for run in runs:
        print(f"{run.name:>7} {run.passed:>8} {len(run.failures):>8} {run.skipped:>8} {run.seconds:>9.1f}")
    passed, skipped = sum(run.passed for run in runs), sum(run.skipped for run in runs)
    failed = sum(len(run.failures) for run in runs)
    if passed + failed == 0:
        print("expected at least one test, got none")
        failed = 1
    if note:
        print(f"\n{note}")
    print(f"\n{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return failed == 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed options; unknown ones are passed to pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    runs = f"(default {','.join(DAILY)}; nightly {','.join(RUNS)})"
    parser.add_argument("--runs", help=f"comma-separated list of 'serial' and rank counts {runs}")
    parser.add_argument("--nightly", action="store_true", help="tests marked nightly and all numbers of ranks too")
    parser.add_argument("--quick", action="store_true", help="a part of everything in less than a minute")
    parser.add_argument("--mpi", choices=sorted(mpi.INSTALLATIONS), help="in place of the environment's own")
    limits = "on an idle machine [s] (default %(default)g)"
    parser.add_argument("--limit", type=float, default=3600, help=f"wall-clock limit of a run {limits}")
    parser.add_argument("--test-limit", type=float, default=TEST_LIMIT, help=f"limit of a test {limits}")
    parser.add_argument("--slowest", type=int, default=0, help="how many files of each run to name, the slowest first")
    parser.add_argument("--coverage", action="store_true", help="report the branch coverage of each folder")
    parser.add_argument("--directory", type=Path, default=ROOT, help="where to run pytest (default: the repository)")
    options, options.arguments = parser.parse_known_args(arguments)
    options.measured = dict[str, str]()
    installation = mpi.INSTALLATIONS.get(options.mpi)
    paths = [a for a in options.arguments if (options.directory / a.partition("::")[0]).exists()]
    options.whole = not paths and installation is None and not options.quick
    options.daily = options.whole and not options.nightly
    every = QUICK if options.quick else RUNS_OF_A_PART if installation else DAILY if options.daily else RUNS
    options.runs = options.runs.split(",") if options.runs else list(every)
    unknown = [name for name in options.runs if name != "serial" and not name.isdigit()]
    if unknown:
        parser.error(f"--runs: expected 'serial' or rank counts, got {unknown}")
    if options.coverage and importlib.util.find_spec("coverage") is None:
        parser.error("--coverage: expected the package coverage, got none; `make lint-tools` installs it")
    if options.quick and (paths or not QUICK.keys() >= set(options.runs)):
        parser.error(f"--quick: expected no tests and no other runs than {','.join(QUICK)}; leave --quick out")
    if not paths and not options.quick:
        options.arguments += ["tests"] if installation is None else installation.tests
    return options


def main() -> int:
    """Execute the command line and return the exit code."""
    options = parse()
    if options.mpi is not None:
        try:
            os.environ.update(mpi.INSTALLATIONS[options.mpi].variables())
        except mpi.NotInstalled as missing:
            print(f"skipped: {missing}\n\n0 passed, 0 failed, 1 skipped")
            return 0
        print(f"{options.mpi}: {find_mpiexec()}")
    print(f"limits are {slowness():g} times those of an idle machine", flush=True)
    with tempfile.TemporaryDirectory(prefix="halograd-suite-", ignore_cleanup_errors=True) as folder:
        data = Path(folder) / "coverage"
        if options.coverage:
            options.measured = branches.configure(options.directory, data)
        runs = execute_all(options, Path(folder))
        if options.coverage:
            print("\n", *branches.report(options.directory, data), sep="\n")
    return 0 if summarize(runs, options.slowest, left_out(options, runs)) else 1


if __name__ == "__main__":
    sys.exit(main())
