"""`halograd doctor` about GPUs: where there is none, where something is missing, and where one computes nonsense."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import halograd.kernels
from halograd.cli import doctor
from halograd.cli.doctor import Finding
from tests.kernels.cudnn.fake_runtime import Machine


def findings(monkeypatch, devices: int, modules: dict[str, object], backend=None) -> dict[str, Finding]:
    """By name, on a machine with so many devices, these modules, and this backend."""

    def load(name: str):
        return modules.get(name, f"{name.split('.')[0]} is not installed")

    known = halograd.kernels.get_backend

    def get_backend(name: str):
        if name != "cudnn":
            return known(name)
        if backend is None:
            raise halograd.kernels.KernelError("cudnn: expected CuPy,\ngot none; pip install 'halograd[gpu]'")
        return backend()

    monkeypatch.setattr(doctor, "_driver", lambda: (f"CUDA 13.0, {devices} devices", devices))
    monkeypatch.setattr(doctor, "_load", load)
    monkeypatch.setattr(halograd.kernels, "get_backend", get_backend)
    return {finding.name: finding for finding in doctor.probe_gpu()}


@pytest.fixture
def modules() -> dict[str, object]:
    """What is loaded where everything is installed."""
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
    monkeypatch.setattr(doctor.np, "__version__", version)
    found = findings(monkeypatch, 1, modules)
    assert ("NumPy for CuPy" in found) is warns
    if warns:
        assert found["NumPy for CuPy"].value == f"{version}: CuPy is tested with NumPy up to 2.4"
    assert "NumPy for CuPy" not in findings(monkeypatch, 0, modules), "not needed on a CPU"


def test_what_is_installed_for_a_gpu_is_a_numpy_that_cupy_was_tested_with():
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert f'"numpy>=2.1.2,<{doctor.NUMPY[0]}.{doctor.NUMPY[1] + 1}"' in text


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
