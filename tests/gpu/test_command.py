"""Tests of the command of the GPU check: with a stub of ``nvidia-smi``, without a GPU, and the choice of parts."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

from halograd import gpucheck
from halograd.errors import UserError
from tests.gpu import command
from tests.gpu.kept import Kept
from tests.gpu.parts import HALF_HOUR, PARTS
from tests.gpu.results import Results
from tests.gpu.runner import ROOT, UNPLUGGED, Job, Part
from tests.harness import jobs
from tests.training.device_steps import NETWORKS

FOUND = {"cupy": "14.2.0", "cudnn frontend": "1.26.0", "cudnn": 91900, "devices": [{"name": "H100"}]}


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Return a function that installs a stub of ``nvidia-smi`` with an output and exit code, or hides the program."""

    def put(text="GPU 0: NVIDIA H100 (UUID: GPU-5)", code=0):
        path = tmp_path / "bin" / "nvidia-smi"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")

    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # the command adds to it
    monkeypatch.setattr(command, "slowness", lambda: 1.0)
    return put


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    """Return a function that calls the command with some facts and parts, and returns code, output and results."""

    def go(*arguments, found=None, parts=()):
        if found is not None:
            monkeypatch.setattr(command, "_facts", lambda results: results.write(facts=found) or found)
        path = tmp_path / "r.jsonl"
        code = command.main([*arguments, "--results", str(path)], parts)
        return code, capsys.readouterr().out, Results(path)

    return go


def part(tmp_path, text):
    path = tmp_path / "test_it.py"
    path.write_text(f"import pytest\npytestmark = pytest.mark.gpu\n{text}")
    return Part("own", "right?", (Job("job", (str(path), "-p", "no:cacheprovider")),))


def test_without_a_gpu_it_says_what_is_missing_and_succeeds(smi, call):
    smi("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver", 9)
    code, said, results = call(found={}, parts=PARTS)
    assert code == 0 and "needs CuPy (pip install 'halograd[gpu]')" in said and "a CUDA device with its driver" in said
    assert not list(results.all())


@pytest.mark.parametrize("lacks", ["cupy", "cudnn frontend", "cudnn", "devices"])
def test_a_gpu_that_answers_where_something_is_missing_is_a_failure(smi, call, lacks):
    """If a GPU is present, a missing requirement is a failure; otherwise all checks would be skipped silently."""
    smi()
    code, said, results = call(found={**FOUND, lacks: None}, parts=PARTS)
    (result,) = results.all()
    assert code == 1 and result.status == "failed" and "GPU 0: NVIDIA H100" in result.detail and "is missing: " in said


def test_what_this_machine_has_is_found_by_a_process_of_its_own(smi, call):
    smi()
    code, said, results = call(parts=PARTS)
    assert results.facts["python"] and "numpy: " in said
    assert code == (0 if results.facts["devices"] else 1)


def test_it_runs_goes_on_and_prints_the_table(smi, call, tmp_path):
    smi()
    parts = (part(tmp_path, "def test_a(record_property): record_property('detail', '5 ms')\ndef test_b(): assert 0"),)
    code, said, results = call("own", found=FOUND, parts=parts)
    assert code == 1 and "== own: 1 ok, 1 failed" in said and "| own | right? | 1 | 1 | 0 |" in said
    begun = results.path.read_text().count('"begin"')
    assert call("own", found=FOUND, parts=parts)[0] == 1 and results.path.read_text().count('"begin"') == begun == 2
    (tmp_path / "test_it.py").write_text((tmp_path / "test_it.py").read_text().replace("assert 0", "assert 1"))
    code, said, results = call("own", "--again", "failed", found=FOUND, parts=parts)
    assert code == 0 and "| own | right? | 2 | 0 | 0 |" in said
    assert results.path.read_text().count('"begin"') == 3, "what was right is not run again"
    code, said, _ = call("table", parts=parts)
    assert code == 0 and "| own | right? | 2 | 0 | 0 |" in said and said.startswith("On H100; ")


def test_what_the_time_does_not_allow_for_is_told(smi, call, tmp_path):
    smi()
    code, said, _ = call("--seconds", "0", found=FOUND, parts=(part(tmp_path, "def test_a(): pass"),))
    assert code == 3 and "nothing; not all, run it again to go on" in said


def test_where_packages_are_missing_the_folder_of_wheels_is_named(smi, call, monkeypatch):
    """On a machine without an index nothing is installed: the folder of wheels was left behind."""
    smi()
    monkeypatch.setattr(command, "lacking", lambda: ["pydantic", "mpich"])
    code, said, _ = call(found=FOUND, parts=PARTS)
    assert code == 1 and "the packages pydantic, mpich (make gpu-tools" in said and "carry .gpu-wheels" in said
    done = subprocess.run(["make", "-n", "gpu-check"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-m halograd.gpucheck" in done.stdout and "pip" not in done.stdout


def test_a_call_continues_in_the_folder_of_the_one_before(smi, tmp_path, monkeypatch):
    """Results and caches travel from machine to machine in one folder, which starts with a copy of the last one."""
    smi()
    monkeypatch.setattr(command, "_facts", lambda results: results.write(facts=FOUND) or FOUND)
    monkeypatch.setattr("tests.gpu.kept.tempfile.gettempdir", lambda: str(tmp_path))
    text = """
import os, pathlib
def test_a():
    for name, file in (("HALOGRAD_CACHE", "plans"), ("CUPY_CACHE_DIR", "kernel")):
        path = pathlib.Path(os.environ[name], file)
        path.parent.mkdir(exist_ok=True)
        path.write_text(path.read_text() + "again" if path.exists() else "first")
"""
    parts = (part(tmp_path, text),)
    first, second = tmp_path / "first", tmp_path / "second"
    assert command.main(["--out", str(first)], parts) == 0
    assert {path.name for path in first.iterdir()} == {"gpu-check.jsonl", "gpu-check.log", "caches.zip"}
    shutil.rmtree(Kept(first)._caches)  # another machine
    more = (*parts, Part("next", "?", (Job("next", parts[0].jobs[0].arguments),)))
    assert command.main(["--out", str(second), "--resume", str(first)], more) == 0
    results = Results(second / "gpu-check.jsonl")
    assert [(r.part, r.status) for r in results.all()] == [("gpu", "ok"), ("own", "ok"), ("next", "ok")]
    assert {path.read_text() for path in Kept(second)._caches.rglob("*") if path.is_file()} == {"firstagain"}
    assert command.main(["--resume", str(tmp_path / "nowhere")], more) == 2


def test_the_caches_that_are_kept_have_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("tests.gpu.kept.tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("tests.gpu.kept.MOST_BYTES", 3000)
    kept = Kept(tmp_path / "out")
    files = {"halograd/plans": 10**9, "cupy/old": 10**9 + 1, "cupy/new": 10**9 + 2}
    for name, age in files.items():
        path = kept._caches / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(os.urandom(1200))
        os.utime(path, (age, age))
    kept.save()
    for name in files:
        (kept._caches / name).unlink()
    Kept(tmp_path / "out")
    assert {p.name for p in kept._caches.rglob("*") if p.is_file()} == {"plans", "new"}


def test_unknown_parts_are_refused(capsys):
    with pytest.raises(SystemExit):
        command.main(["nothing"])
    assert "expected parts out of environment, " in capsys.readouterr().err


def test_the_package_hands_over_in_the_repository_only(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "argv", ["gpucheck", "table", "--results", str(tmp_path / "r.jsonl")])
    assert gpucheck.main() == 0 and "| environment |" in capsys.readouterr().out
    monkeypatch.setattr(gpucheck, "ROOT", tmp_path)
    with pytest.raises(UserError, match=r"gpucheck: expected tests/gpu of the repository in .*, got none; run it in a"):
        gpucheck.main()


# -- the parts ------------------------------------------------------------------------------------------------------
DRIVER = "int cuInit(unsigned f) { return 0; }\nint cuDeviceGetCount(int* n) { *n = 1; return 0; }\n"


@pytest.fixture(scope="module")
def collected(tmp_path_factory) -> dict[int, list[str]]:
    """Return all checks marked `gpu` by number of ranks, as collected with a stub of a driver that shows one GPU."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc for the stub of a driver")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "cuda.c").write_text(DRIVER)
    subprocess.run(["gcc", "-shared", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    places = {"LD_LIBRARY_PATH": folder, "PYTHONPATH": ROOT}
    environment = {name: os.pathsep.join([str(p), os.environ.get(name, "")]) for name, p in places.items()}
    environment |= UNPLUGGED
    found = {}
    for ranks in sorted({job.ranks for p in PARTS for job in p.jobs}):
        some = [job for p in PARTS for job in p.jobs if job.ranks == ranks and not job.module]
        paths = tuple({a: "" for job in some for a in job.arguments if a.endswith(".py")})
        program = [*Job("", paths, ranks).command(), "--collect-only"]
        mark = jobs.new_mark()
        done = subprocess.run(
            program, capture_output=True, text=True, cwd=ROOT, env=jobs.job_environment(mark, environment), check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        found[ranks] = [line for line in done.stdout.splitlines() if "::" in line]
    return found


def selected(job: Job, names: list[str]) -> list[str]:
    """Return those of the named checks that pytest would run for a job."""
    arguments = list(job.arguments)
    chosen = Expression.compile(arguments[arguments.index("-k") + 1]) if "-k" in arguments else None
    files = tuple(a for a in arguments if a.endswith(".py"))
    found = [name for name in names if name.startswith(files)]
    return [n for n in found if chosen is None or chosen.evaluate(lambda word, n=n: word.lower() in n.lower())]


def test_the_documentation_names_every_part():
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert all(f"`{p.name}`" in text for p in PARTS)
    (call,) = set(re.findall(r"^python3 -m halograd.gpucheck --wheels .*$", text, re.M))
    given = command.parse(call.split()[3:], PARTS)
    assert not given.parts and given.out and given.resume, "one command, for each of three machines"


def test_the_first_parts_fit_into_half_an_hour():
    assert len({p.name for p in PARTS}) == len(PARTS) and "table" not in {p.name for p in PARTS}
    for p in PARTS:
        assert len({job.name for job in p.jobs}) == len(p.jobs) > 0
        assert sum(job.seconds for job in p.jobs) <= command.SECONDS, p.name
    starts, half_hour = 3 * 60, 30 * 60
    assert sum(job.seconds for p in HALF_HOUR for job in p.jobs) <= half_hour - starts
    assert 3 * command.SECONDS + starts <= half_hour
    assert {job.arguments[1] for job in PARTS[-1].jobs} == set(NETWORKS), "networks of the sanitizer"


def test_every_job_selects_checks_and_every_check_has_a_job(collected):
    reached = set()
    for p in PARTS:
        for job in p.jobs:
            if job.module:
                __import__(f"{job.module}.__main__" if job.module == "benchmarks.gpu" else job.module)
            else:
                found = selected(job, collected[job.ranks])
                assert found, f"{p.name}, {job.name} selects nothing"
                reached |= {(job.ranks, name) for name in found}
    everything = {(ranks, name) for ranks, names in collected.items() for name in names}
    assert everything == reached, f"without a job: {sorted(everything - reached)[:10]}"


def test_paths_of_the_jobs_exist():
    for p in PARTS:
        for job in p.jobs:
            for argument in job.arguments:
                assert not argument.endswith(".py") or (ROOT / argument).exists()
                assert not Path(argument).is_absolute()
