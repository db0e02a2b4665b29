"""The check of a GPU, checked on the double of one: what is right passes, what is wrong is found; else it skips."""

import json
import math

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.device import as_dtype
from halograd.gpucheck import __main__ as command
from halograd.gpucheck import facts as facts_module
from halograd.gpucheck.kernel_checks import check_kernels
from halograd.gpucheck.rank_checks import check_layers, check_races, check_training
from halograd.gpucheck.report import Report
from halograd.kernels.kernel import Kernel
from tests.support.fake_device import FakeBackend


def quiet(budget=math.inf):
    return Report(budget, say=lambda line: None)


@pytest.fixture
def kernels():
    made = FakeBackend()
    yield made
    made.close()


def test_kernels_that_are_right_pass(kernels):
    report = quiet()
    check_kernels(kernels, report, "strict", "float32")
    assert not report.failed, [r for r in report.results if r.status == "failed"]
    assert len(report.results) > 50


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_kernels_of_16_bits_pass(kernels, precision):
    report = quiet()
    check_kernels(kernels, report, precision, as_dtype(precision))
    assert not report.failed, [r for r in report.results if r.status == "failed"]
    assert {"convolution 3x3, dw float32", "dense, dw float32"} <= {r.name for r in report.results}


def test_kernels_that_are_wrong_are_found(kernels):
    right = kernels._conv_backward_data

    def wrong(dy, w, dx, geometry):
        kernel = right(dy, w, dx, geometry)
        return Kernel(lambda: (kernel(), dx.__imul__(1 + 1e-4)), "wrong", close=kernel.close)

    kernels._conv_backward_data = wrong
    report = quiet()
    check_kernels(kernels, report, "strict", "float32")
    failed = [r for r in report.results if r.status == "failed"]
    assert failed and all("convolution" in r.name and "dx errs by" in r.detail for r in failed)


@pytest.mark.ranks(1, 2)
def test_layers_training_and_races_pass_on_the_double(kernels):
    report = quiet()
    with Communicator(MPI.COMM_WORLD) as comm:
        check_races(kernels, comm, report)
        check_layers(kernels, comm, report, "float32")
        check_training(kernels, comm, report, "float32")
        check_training(kernels, comm, report, "bfloat16", "bfloat16")
    assert not report.failed, [r for r in report.results if r.status == "failed"]


@pytest.mark.ranks(1, 2)
def test_races_are_found(kernels):
    """A device whose uploads ahead are never waited for, and one whose downloads are not."""
    report = quiet()
    kernels.device.join = lambda ticket: None
    kernels.device.arrive = lambda ticket: None
    with Communicator(MPI.COMM_WORLD) as comm:
        check_races(kernels, comm, report)
    wrong = {r.name for r in report.results if r.status == "failed"}
    assert {"upload ahead", "download"} <= wrong
    assert ("reused message" in wrong) is (MPI.COMM_WORLD.size > 1)


def test_what_comes_too_late_is_skipped():
    report = quiet(budget=0.0)
    report.check("a", "b", lambda: ("", {}))
    assert report.results[0].status == "skipped" and not report.failed
    assert "skipped" in report.table()


def test_without_a_gpu_it_says_what_is_missing_and_succeeds(tmp_path, monkeypatch, capsys):
    nothing = dict.fromkeys(facts_module.facts(), None) | {"devices": []}
    monkeypatch.setattr(command, "facts", lambda: nothing)
    assert command.main(["--json", str(tmp_path / "r.json")]) == 0
    printed = capsys.readouterr().out
    assert "needs CuPy (pip install 'halograd[gpu]')" in printed and "a CUDA device with its driver" in printed
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["results"][0]["status"] == "skipped" and found["facts"]["cupy"] is None


def test_a_failed_check_ends_with_code_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "missing", lambda found: [])
    monkeypatch.setattr(command, "_kernels", lambda report: report.check("kernels", "one", lambda: 1 / 0))
    for name in ("_all_ranks", "_transports", "_benchmarks"):
        monkeypatch.setattr(command, name, lambda *args: None)
    assert command.main(["--json", str(tmp_path / "r.json")]) == 1
    assert "ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_facts_name_versions():
    found = facts_module.facts()
    assert found["numpy"] == np.__version__
    assert isinstance(found["devices"], list)
