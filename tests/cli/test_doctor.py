"""`halograd doctor`: its findings (also for GPUs), remedies, and exit code."""

from __future__ import annotations

import importlib.metadata
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import halograd.kernels
from halograd.cli import doctor as doctor_module
from halograd.cli.doctor import careful, merge, probe_threads, show
from halograd.findings import Finding
from halograd.limits import Cores
from tests.kernels.cudnn.fake_runtime import Machine
from tests.launch import command_line, mpiexec


def doctor(**variables: str) -> tuple[int, dict[str, str], str]:
    """Return exit code, lines by name, and last line of ``halograd doctor`` with these environment variables."""
    done = command_line("doctor", **variables)
    return done.returncode, lines_of(done.stdout), done.stdout.splitlines()[-1]


def lines_of(output: str) -> dict[str, str]:
    """Return ``status value`` of each line, by name."""
    parts = [line.split(maxsplit=1) for line in output.splitlines()[:-1]]
    pairs = [(status, *rest.split("  ", maxsplit=1)) for status, rest in parts]
    return {name: f"{status} {value.strip()}" for status, name, value in pairs}


def test_sound_machine():
    code, lines, last = doctor(OMP_NUM_THREADS="1")
    assert code == 0 and last == "training can run", lines
    for name in ("Python", "MPI library", "thread level", "mpi4py", "ranks", "communication", "NumPy", "h5py"):
        assert lines[name].startswith("ok "), lines
    assert lines["thread level"] == "ok multiple"
    assert "1 per rank (backend.threads), 1 ranks on this node" in lines["threads"]
    assert "ignored" not in lines["threads"]
    assert {"formats", "shared memory", "CUDA driver", "CuPy", "cuDNN", "NCCL"} <= lines.keys()
    assert any("oneDNN" in name or "onednn" in name for name in lines)


def test_onednn_is_checked_against_numpy():
    try:
        importlib.metadata.version("onednn-cpu-gomp")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs oneDNN: its wheel exists for x86-64 Linux only")
    _, lines, _ = doctor()
    assert lines["oneDNN"].startswith("ok ") and "libdnnl" in lines["oneDNN"]
    limited = doctor(ONEDNN_MAX_CPU_ISA="SSE41")[1]["oneDNN"]
    assert limited.endswith("instruction set SSE4.1, computes in float32") and "instruction set " in lines["oneDNN"]
    refused = [text for name, text in lines.items() if name.startswith("oneDNN refuse")]
    assert any("jit_1x1" in text and "outside of its scratchpad" in text for text in refused)
    assert lines["convolution"].startswith("ok ") and "ref" not in lines["convolution"].split(",")[0]


@pytest.mark.parametrize(
    ("variables", "name", "text"),
    [
        ({"MPI4PY_RC_THREAD_LEVEL": "serialized"}, "thread level", "fail serialized  -> expected multiple"),
        ({"MPI4PY_LIBMPI": os.path.join(os.sep, "nowhere", "libmpi.so.12")}, "MPI library", "'halograd[mpich]'"),
        (
            {"OMPI_COMM_WORLD_SIZE": "4"},
            "ranks",
            "fail the launcher started 4, MPI sees 1  -> start with the mpiexec of",
        ),
    ],
)
def test_failures_have_a_remedy(variables, name, text):
    code, lines, last = doctor(**variables)
    assert code == 1 and last == f"training cannot run: {name}" and text in lines[name]
    assert lines["h5py"].startswith("ok ") and (name != "MPI library" or "ranks" not in lines)


def test_several_ranks_give_one_report():
    done = mpiexec(3, ["-m", "halograd", "doctor"])
    assert done.returncode == 0, done.stdout + done.stderr
    lines = lines_of(done.stdout)
    assert done.stdout.count("MPI library") == 1
    assert lines["ranks"].startswith("ok 3 on ") and lines["communication"].startswith("ok sum over ranks 6 of 6")


def test_threads_of_ranks():
    """A run ignores OMP_NUM_THREADS; more ranks than cores are a warning."""
    code, lines, _ = doctor(OMP_NUM_THREADS="4096")
    assert code == 0
    assert re.fullmatch(r"ok 1 per rank .* cores; OMP_NUM_THREADS=4096 is ignored", lines["threads"])
    (found,) = probe_threads([Cores(frozenset({0, 1}))] * 3)
    assert found.status == "warn" and "ranks per node to be fast" in found.remedy


def test_worst_finding_of_all_ranks_is_shown():
    good, bad = Finding("MPI", "ok", "fine"), Finding("MPI", "fail", "broken", "mend it")
    worse_late = merge([[good, Finding("x", "note", "a")], [bad], [Finding("MPI", "warn", "slow")]])
    assert worse_late == [Finding("MPI", "fail", "rank 1: broken", "mend it"), Finding("x", "note", "a")]
    assert merge([[good], [good]]) == [good]


def test_probe_that_breaks_is_a_finding():
    def probe():
        yield Finding("first", "ok", "there")
        raise OSError("library is\n half there")

    found = careful("h5py", probe)
    remedy = "its installation is broken: pip install --force-reinstall h5py"
    assert found == [Finding("first", "ok", "there"), Finding("h5py", "fail", "OSError: library is half there", remedy)]
    assert careful("cupy", probe, "note")[1].status == "note"


def test_table_on_a_terminal_shows_brackets_as_they_are(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    show([Finding("MPI library", "fail", "none", "pip install 'halograd[mpich]'"), Finding("NumPy", "ok", "2")])
    output = capsys.readouterr().out
    assert "halograd[mpich]" in output and "training cannot run: MPI library" in output


def test_status_is_one_of_four():
    with pytest.raises(ValueError, match=r"expected a status out of \('ok', 'note', 'warn', 'fail'\), got 'good'"):
        Finding("x", "good", "y")


def findings(monkeypatch, devices: int, modules: dict[str, object], backend=None) -> dict[str, Finding]:
    """Return findings by name, on a machine with so many devices, these modules, and this backend."""

    def load(name: str):
        return modules.get(name, f"{name.split('.')[0]} is not installed")

    known = halograd.kernels.get_backend

    def get_backend(name: str):
        if name != "cudnn":
            return known(name)
        if backend is None:
            raise halograd.kernels.KernelError("cudnn: expected CuPy,\ngot none; pip install 'halograd[gpu]'")
        return backend()

    monkeypatch.setattr(doctor_module, "_driver", lambda: (f"CUDA 13.0, {devices} devices", devices))
    monkeypatch.setattr(doctor_module, "_load", load)
    monkeypatch.setattr(halograd.kernels, "get_backend", get_backend)
    return {finding.name: finding for finding in doctor_module.probe_gpu()}


@pytest.fixture
def modules() -> dict[str, object]:
    """Return doubles of the modules of a complete installation."""
    return {
        "cupy": SimpleNamespace(__version__="14.2.0"),
        "cudnn": SimpleNamespace(__version__="1.26.0", backend_version=lambda: 92800),
        "cupy.cuda.nccl": SimpleNamespace(get_version=lambda: 23203),
    }


def test_without_a_gpu_nothing_is_needed(monkeypatch):
    found = findings(monkeypatch, 0, {})
    assert [finding.status for finding in found.values()] == ["note"] * 5
    assert found["CuPy"].value == "cupy is not installed; not needed on a CPU"
    assert found["GPU kernels"].value.startswith("cudnn: expected CuPy, got none; pip install")
    assert not any(finding.remedy for finding in found.values())


def test_with_a_gpu_what_is_missing_is_a_warning(monkeypatch, modules):
    del modules["cudnn"]
    found = findings(monkeypatch, 2, modules)
    assert {name: finding.status for name, finding in found.items()} == {
        "CUDA driver": "ok",
        "CuPy": "ok",
        "cuDNN": "warn",
        "NCCL": "ok",
        "GPU kernels": "warn",
    }
    assert found["cuDNN"].remedy == "pip install 'halograd[gpu]'; training on the processor needs none of it"


@pytest.mark.parametrize(("version", "warns"), [("2.4.6", False), ("2.5.0", True), ("3.0.1rc1", True)])
def test_a_numpy_that_cupy_was_not_tested_with(monkeypatch, modules, version, warns):
    monkeypatch.setattr(doctor_module.np, "__version__", version)
    found = findings(monkeypatch, 1, modules)
    assert ("NumPy for CuPy" in found) is warns
    if warns:
        assert found["NumPy for CuPy"].value == f"{version}: CuPy is tested with NumPy up to 2.4"
    assert "NumPy for CuPy" not in findings(monkeypatch, 0, modules), "not needed on a CPU"


def test_what_is_installed_for_a_gpu_is_a_numpy_that_cupy_was_tested_with():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"numpy>=2.1.2,<{doctor_module.NUMPY[0]}.{doctor_module.NUMPY[1] + 1}"' in text


def test_a_library_that_breaks_is_a_finding(monkeypatch, modules):
    def fail() -> int:
        raise RuntimeError("Unable to find symbol\ncudnnGetVersion")

    modules["cudnn"] = SimpleNamespace(__version__="1.26.0", backend_version=fail)
    found = findings(monkeypatch, 1, modules)
    assert found["cuDNN"].status == "warn"
    assert found["cuDNN"].value == "RuntimeError: Unable to find symbol cudnnGetVersion"


def test_a_gpu_is_checked_against_numpy(monkeypatch, modules, tmp_path):
    found = findings(monkeypatch, 1, modules, Machine(tmp_path).open)
    assert {finding.status for finding in found.values()} == {"ok"}
    assert found["cuDNN"].value == "92800 (frontend 1.26.0)" and found["NCCL"].value == "23203"
    assert found["GPU kernels"].value == "cudnn 9.28.0 (frontend 1.26.0), float32 strict, Double of a GPU"
    assert found["GPU convolution"].value.startswith("cudnn:eng10_k1=3, differs from NumPy by ")


def test_a_wrong_gpu_is_found_out(monkeypatch, modules, tmp_path):
    machine = Machine(tmp_path)

    def wrong():
        backend = machine.open()
        right = backend._conv_forward

        def doubled(x, w, b, y, *args):
            kernel = right(x, w, b, y, *args)
            return halograd.kernels.Kernel(lambda: (kernel(), np.multiply(y, 2, out=y)), kernel.impl)

        backend._conv_forward = doubled
        return backend

    found = findings(monkeypatch, 1, modules, wrong)
    assert found["GPU convolution"].status == "warn" and "do not train on this GPU" in found["GPU convolution"].remedy
