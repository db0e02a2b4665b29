"""The check of transports on a GPU, checked on doubles: what is right passes, what is wrong is found, else it skips."""

import math

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.comm.gpu.streams import Passage
from halograd.gpucheck import rank_checks, transport_checks
from halograd.gpucheck.report import Report
from tests.support.fake_device import FakeBackend
from tests.support.gpu_ranks import gpu_ranks


@pytest.fixture
def small(monkeypatch):
    """Less than on a GPU."""
    monkeypatch.setattr(rank_checks, "NETWORKS", {"mesh": rank_checks.NETWORKS["mesh"]})
    monkeypatch.setattr(transport_checks, "COUNTS", (5, 1 << 12, 3001))
    one_cut = {"sample": 1, "height": MPI.COMM_WORLD.size, "width": 1}
    monkeypatch.setattr(rank_checks, "grids", lambda size, axes: [one_cut])
    monkeypatch.setattr(rank_checks.Slow, "write", lambda self, array, value: array.fill(value))
    original = transport_checks.halo_seconds
    monkeypatch.setattr(transport_checks, "halo_seconds", lambda kernels, comm: original(kernels, comm, 8, 4, 2))


def check(monkeypatch, name):
    report = Report(math.inf, say=lambda line: None)
    with gpu_ranks(monkeypatch, "none") as r:
        transport_checks.check_transport(r.kernels, r.comm, report, name)
    return {result.name: result for result in report.results}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["nccl", "cuda-ipc", "mpi-cuda"])
def test_what_is_right_passes(name, small, monkeypatch):
    found = check(monkeypatch, name)
    assert {r.status for r in found.values()} == {"ok"}, [r for r in found.values() if r.status != "ok"]
    assert found.keys() == {"choice", "reused message", *transport_checks.METHODS, "halo", "mesh 1x2x1"}
    assert found["halo"].numbers["bytes"] == 8 * 4 * 4


@pytest.mark.ranks(2)
def test_what_is_wrong_is_found(small, monkeypatch):
    """Nobody waits for what a lane does: the double does it late, so the numbers are those of before."""
    monkeypatch.setattr(Passage, "join", lambda self: None)
    report = Report(math.inf, say=lambda line: None)
    monkeypatch.setattr(transport_checks, "check_training", lambda *args: None)
    with pytest.raises(AssertionError, match="rank [01]: "), gpu_ranks(monkeypatch, "none") as r:  # noqa: RUF043
        transport_checks.check_transport(r.kernels, r.comm, report, "nccl")
    wrong = {result.name for result in report.results if result.status == "failed"}
    assert {"reused message", "allreduce", "ordered", "all_gather"} <= wrong


@pytest.mark.ranks(2)
def test_what_cannot_be_had_is_skipped():
    report, kernels = Report(math.inf, say=lambda line: None), FakeBackend()
    with Communicator(MPI.COMM_WORLD) as comm:
        transport_checks.check_transport(kernels, comm, report, "nccl")
    kernels.close()
    assert [r.status for r in report.results] == ["skipped"] and "rank 0 has no CUDA device" in report.results[0].detail


def test_wrong_sums_are_told():
    for method in transport_checks.METHODS:
        with pytest.raises(AssertionError, match=f"{method} of 40: expected"):
            transport_checks._compare(np.zeros(40, np.float32), [1.0, 2.0], method, 0)
