"""Tests of whether MPI can send device memory: the MPI library's report, and a trial in a separate process."""

from types import SimpleNamespace

import pytest
from mpi4py import MPI

from halograd.comm.gpu import mpi_aware
from halograd.comm.gpu.mpi_aware import claim_fault, clean_environment, proof_fault, prove
from halograd.device import DeviceError
from halograd.device.cupy import count_devices, import_cupy


def fake_mpi(kinds="mpi,system"):
    info = SimpleNamespace(get=lambda key: kinds if key == "mpi_memory_alloc_kinds" else None)
    return SimpleNamespace(
        __file__=MPI.__file__,
        COMM_WORLD=SimpleNamespace(Get_info=lambda: info),
        Exception=MPI.Exception,
        get_vendor=lambda: ("MPICH", (5, 0, 2)),
    )


def test_what_mpi_says_of_itself(monkeypatch):
    monkeypatch.setattr(mpi_aware, "_reports_support", lambda mpi: False)
    assert claim_fault(fake_mpi(), {}).startswith(
        "MPICH 5.0.2 does not report that it is CUDA-aware (if it is, set"
    )
    assert claim_fault(fake_mpi("mpi,system,cuda:device"), {}) == ""
    assert claim_fault(fake_mpi(None), {}) != ""
    for switch in mpi_aware.SWITCHES:
        assert claim_fault(fake_mpi(), {switch: "1"}) == "" and claim_fault(fake_mpi(), {switch: "0"}) != ""
    monkeypatch.setattr(mpi_aware, "_reports_support", lambda mpi: True)
    assert claim_fault(fake_mpi(), {}) == ""


def test_a_library_that_cannot_be_asked():
    assert mpi_aware._reports_support(SimpleNamespace(__file__="/nowhere/MPI.so")) is False
    assert mpi_aware._reports_support(MPI) in (True, False)


@pytest.mark.parametrize(
    ("code", "out", "err", "fault"),
    [
        (0, "proven\n", "", ""),
        (0, "", "", "MPI could not send device memory to itself (exit code 0)"),
        (-11, "", "", "MPI ended by SIGSEGV when it sent device memory to itself"),
        (
            2,
            "",
            "8 bytes came back changed\n",
            "MPI could not send device memory to itself (8 bytes came back changed)",
        ),
        (3, "noise", "first\nlast\n\n", "MPI could not send device memory to itself (last)"),
    ],
)
def test_what_the_proof_has_shown(code, out, err, fault):
    assert proof_fault(code, out, err) == fault


def test_the_proof_is_no_rank_of_the_job():
    job = {
        "PMI_RANK": "1",
        "PMIX_ID": "2",
        "OMPI_COMM_WORLD_SIZE": "4",
        "SLURM_PROCID": "0",
        "HYDRA_X": "",
        "PATH": "p",
    }
    assert clean_environment(job) == {"PATH": "p"}


def test_the_proof_without_a_gpu_says_so():
    """On a machine without a GPU the trial process reports the missing device or CuPy; it uses the real MPI."""
    try:
        if count_devices(import_cupy()):
            pytest.skip("needs a machine without a GPU")
    except DeviceError:
        pass
    fault = prove(0, seconds=100)
    assert "expected a CUDA device, got none" in fault or "expected CuPy for a GPU" in fault


def test_a_proof_that_does_not_end(monkeypatch):
    monkeypatch.setattr(mpi_aware.sys, "executable", "/bin/sleep")
    assert "MPI could not send device memory to itself" in prove(0)
    monkeypatch.setattr(mpi_aware.sys, "executable", "/nowhere/python")
    assert "could not be run" in prove(0)
    monkeypatch.setattr(mpi_aware.subprocess, "run", expired)
    assert prove(0, 2) == "MPI did not send device memory to itself within 2 s"


def expired(command, timeout, **options):
    raise mpi_aware.subprocess.TimeoutExpired(command, timeout)
