"""Tests of jobs that crash, hang, lose their device or are killed: recorded results, and checks that still run."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from tests.gpu.results import Results
from tests.gpu.runner import ROOT, Job, Part, Runner
from tests.harness import jobs
from tests.harness.limits import LIMIT, wait_until

PREFACE = "import os, signal, sys, time, pytest\npytestmark = pytest.mark.gpu\n"


@pytest.fixture
def checks(tmp_path):
    """Return a function that writes a file of checks and returns a job that runs it."""

    def write(text, name="job", **options):
        path = tmp_path / f"test_{name.replace(' ', '_')}.py"
        path.write_text(PREFACE + textwrap.dedent(text))
        return Job(name, (str(path), "-p", "no:cacheprovider"), **{"seconds": LIMIT, **options})

    return write


@pytest.fixture
def run(tmp_path):
    """Return a function that runs jobs and returns completeness, the status of each check, and the results."""

    def go(*some, seconds=10 * LIMIT, path=tmp_path / "r.jsonl"):
        results = Results(path)
        complete = Runner(results, seconds, say=lambda line: None, commit="abc").run(Part("part", "?", some))
        found = {(r.job, r.check.rpartition("::")[2]): r.status for r in results.all()}
        return complete, found, results

    return go


def test_a_crash_costs_one_check(checks, run, tmp_path):
    """An abort, an illegal address and a failure each cost one check; checks with a result are not run again."""
    job = checks("""
        def test_a(record_property):
            open(os.environ["COUNT"], "a").write("a")
            record_property("detail", "fine")
            record_property("seconds", 2)
        def test_b(): os.abort()
        def test_c(): assert 1 == 2
        def test_d(): os.kill(os.getpid(), signal.SIGSEGV)
        def test_e(): pytest.skip("needs two GPUs")
        def test_f(): pass
    """, environment={"COUNT": str(tmp_path / "count")})  # fmt: skip
    complete, found, results = run(job)
    assert complete and {check: status for (_, check), status in found.items()} == {
        "test_a": "ok",
        "test_b": "crashed",
        "test_c": "failed",
        "test_d": "crashed",
        "test_e": "skipped",
        "test_f": "ok",
    }
    details = {r.check.rpartition("::")[2]: r for r in results.all()}
    assert "ended by SIGABRT" in details["test_b"].detail and "ended by SIGSEGV" in details["test_d"].detail
    assert details["test_a"].numbers == {"seconds": 2} and details["test_a"].detail == "fine"
    assert "assert 1 == 2" in details["test_c"].detail and details["test_e"].detail == "Skipped: needs two GPUs"
    assert {r.commit for r in results.all()} == {"abc"} and results.done(("part", "job"))
    assert run(job)[1] == found and (tmp_path / "count").read_text() == "a"


def test_a_job_that_hangs_is_killed_and_the_rest_is_run(checks, run, tmp_path, monkeypatch):
    """The runner kills a job that hangs and runs its other checks; the test advances the limit when the check hangs."""
    here = tmp_path / "here"
    job = checks(
        """
        def test_a(): pass
        def test_b():
            open(os.environ["HERE"], "w").close()
            signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
            time.sleep(1e6)
        def test_c(): pass
        """,
        environment={"HERE": str(here)},
    )
    wait = subprocess.Popen.wait

    def hurried(process, timeout=None):
        if timeout is None or "pytest" not in process.args:
            return wait(process, timeout)
        wait_until(lambda: here.exists() or process.poll() is not None, "the check to hang")
        if process.poll() is None:
            here.unlink()
            raise subprocess.TimeoutExpired(process.args, timeout)
        return process.returncode

    monkeypatch.setattr(subprocess.Popen, "wait", hurried)
    complete, found, results = run(job)
    assert complete and found == {("job", "test_a"): "ok", ("job", "test_b"): "hung", ("job", "test_c"): "ok"}
    assert "killed after" in results.of(("part", "job"))[1].detail


def test_a_device_that_answers_no_more_ends_its_process(checks, run):
    """A lost device ends the process: after an illegal address every CUDA call fails, also in correct checks."""
    job = checks("""
        class Runtime:
            lost = False
            def getDeviceCount(self): return 1
            def deviceSynchronize(self):
                if Runtime.lost: raise RuntimeError("cudaErrorIllegalAddress: an illegal memory access was encountered")
        sys.modules["cupy"] = type("cupy", (), {"cuda": type("cuda", (), {"runtime": Runtime()})})
        def test_a(): Runtime.lost = True; assert False
        def test_b(): assert not Runtime.lost
    """)
    complete, found, results = run(job)
    assert complete and found == {("job", "test_a"): "failed", ("job", "test_b"): "ok"}
    assert "[the device answers no more: cudaErrorIllegalAddress" in next(results.all()).detail


def test_a_job_that_cannot_begin_is_given_up(checks, run, monkeypatch):
    monkeypatch.setattr("tests.gpu.runner.MOST_CRASHES", 2)
    complete, found, _ = run(checks("os._exit(7)"), checks("def test_a(): pass", "next"))
    assert complete and found == {("job", "job"): "failed", ("next", "test_a"): "ok"}


def test_a_crash_at_the_end_is_one_too(checks, run):
    """A crash after the last check, while a library is unloaded, is recorded although every check passed."""
    job = checks("""
        def test_a():
            import atexit
            atexit.register(os.abort)
    """)
    complete, found, results = run(job)
    assert complete and found == {("job", "test_a"): "ok", ("job", "end of the process"): "crashed"}
    assert "ended by SIGABRT" in results.of(("part", "job"))[1].detail


def test_a_file_that_cannot_be_imported_is_recorded(checks, run):
    _, found, results = run(checks("import no_such_module"))
    assert set(found.values()) == {"failed"} and "no_such_module" in next(results.all()).detail
    assert len(found) == 1 and results.done(("part", "job"))


@pytest.mark.parametrize("fault", ["assert comm.rank == 0", "os.abort() if comm.rank else comm.Barrier()"])
def test_jobs_of_several_ranks(checks, run, fault):
    job = checks(f"""
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        def test_a(): assert comm.allreduce(1) == 2
        def test_b():
            {fault}
        def test_c(): assert comm.allreduce(1) == 2
    """, ranks=2, environment={"PYTEST_ADDOPTS": "-p tests.conftest"})  # fmt: skip
    path = Path(job.arguments[0])
    path.write_text(path.read_text().replace("= pytest.mark.gpu", "= [pytest.mark.gpu, pytest.mark.ranks(2)]"))
    complete, found, _ = run(job)
    assert complete and list(found.values()) == ["ok", "crashed" if "abort" in fault else "failed", "ok"]


STRANGER = """#!/bin/sh
# Starts processes that know nothing of each other, as a launcher of another MPI does.
shift; count=$1; shift
for i in $(seq "$count"); do env MPIR_CVAR_NEMESIS_SHM_EAGER_MAX_SZ=-1 "$@" & done
wait
"""


def test_a_launcher_of_another_mpi_fails_loudly(checks, run, tmp_path, monkeypatch):
    """Each process would be rank 0 of 1: tests of two ranks would not be chosen, others pass with one rank each."""
    launcher = tmp_path / "mpiexec"
    launcher.write_text(STRANGER)
    launcher.chmod(0o755)
    monkeypatch.setattr("tests.gpu.runner.find_mpiexec", lambda: str(launcher))
    job = checks("def test_a(): pass", ranks=2, environment={"PYTEST_ADDOPTS": "-p tests.conftest"})
    complete, found, results = run(job)
    assert complete and found == {("job", "ranks"): "failed"}
    assert "expected 2 ranks, got 1: mpiexec and mpi4py" in next(results.all()).detail


def test_a_job_in_which_no_check_runs_has_failed(checks, run):
    complete, found, _ = run(checks("x = 5"))
    assert complete and found == {("job", "job"): "failed"}


def test_modules_print_their_results(run, tmp_path):
    (tmp_path / "timing.py").write_text(
        "import json, os, sys\n"
        "known = json.load(open(os.environ['HALOGRAD_GPU_SKIP']))\n"
        "for name in sys.argv[1:]:\n"
        "    if name in known: continue\n"
        "    print(json.dumps({'begin': name}), flush=True)\n"
        "    print('other output', 5, flush=True)\n"
        "    if name == 'bad': os.abort()\n"
        "    print(json.dumps({'check': name, 'status': 'ok', 'numbers': {'seconds': 1.0}}), flush=True)\n"
    )
    job = Job("times", ("a", "bad", "c"), module="timing", environment={"PYTHONPATH": str(tmp_path)}, seconds=LIMIT)
    complete, found, results = run(job)
    assert complete and found == {("times", "a"): "ok", ("times", "bad"): "crashed", ("times", "c"): "ok"}
    assert next(results.all()).numbers == {"seconds": 1.0}
    assert "other output 5" in (tmp_path / "r.log").read_text()


def test_a_program_that_is_not_there_is_missing(checks, run, monkeypatch):
    def none():
        raise FileNotFoundError("expected mpiexec on PATH, got none; pip install mpich")

    monkeypatch.setattr("tests.gpu.runner.find_mpiexec", none)
    complete, found, results = run(checks("def test_a(): pass", ranks=2))
    assert complete and found == {("job", "job"): "missing"}
    assert "expected mpiexec" in next(results.all()).detail


def test_what_the_time_does_not_allow_for_is_left(checks, run):
    complete, found, _ = run(checks("def test_a(): pass"), seconds=0)
    assert not complete and found == {}
    assert run(checks("def test_a(): pass"))[0]


def test_a_check_in_which_every_run_was_ended_is_left_out(checks, run, tmp_path):
    job = checks("def test_a(): pass\ndef test_b(): pass")
    results = Results(tmp_path / "r.jsonl")
    for _ in range(3):
        results.write(part="part", job="job", begin=f"{job.arguments[0].lstrip('/')}::test_a")
    (check,) = results.unfinished(("part", "job"))
    complete, _, results = run(job)
    assert complete and results.of(("part", "job"))[0].check == check
    assert results.of(("part", "job"))[0].status == "hung" and "ended in it; run it alone" in next(results.all()).detail


DRIVER = """
import sys
from pathlib import Path
from tests.gpu.results import Results
from tests.gpu.runner import Job, Part, Runner
job = Job("job", (sys.argv[2], "-p", "no:cacheprovider"), seconds=1e6)
print("ready", flush=True)
sys.exit(not Runner(Results(Path(sys.argv[1])), 1e6).run(Part("part", "?", (job,))))
"""


def test_killed_at_random_times_it_goes_on(checks, tmp_path):
    """After `HALOGRAD_GPU_KILLS` kills at random times no result is lost or repeated, and no process is left."""
    kills = int(os.environ.get("HALOGRAD_GPU_KILLS", "4"))
    count = 3 * kills
    job = checks("\n".join(f"def test_{i}(): time.sleep(0.02)" for i in range(count)))
    path, mark, draw = tmp_path / "r.jsonl", jobs.new_mark(), random.Random(5)
    command = [sys.executable, "-c", DRIVER, str(path), job.arguments[0]]
    for turn in range(10 * kills):
        process = subprocess.Popen(command, cwd=ROOT, env=jobs.job_environment(mark), stdout=subprocess.PIPE)
        try:
            # At once, while it starts, or after so many more events, wherever that comes.
            wanted = _size(path) + draw.randrange(0 if turn % 2 else 1, 900)
            if turn < kills:
                wait_until(lambda p=process, n=wanted: p.poll() is not None or _size(path) >= n, "some results")
                process.kill()
            code = process.wait(LIMIT)
        finally:
            process.kill()
            process.stdout.close()
        assert not jobs.await_end(mark), "children outlive the runner that was killed"
        if code == 0:
            break
        assert code == -signal.SIGKILL
    events = [json.loads(line) for line in path.read_text().splitlines() if _whole(line)]
    ended = [event["check"] for event in events if "check" in event]
    assert Counter(ended) == dict.fromkeys(ended, 1) and len(ended) == count
    assert {r.status for r in Results(path).all()} == {"ok"}


def _size(path):
    return path.stat().st_size if path.exists() else 0


def _whole(line):
    try:
        json.loads(line)
    except json.JSONDecodeError:
        return False
    return True
