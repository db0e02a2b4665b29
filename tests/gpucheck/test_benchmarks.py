"""The benchmarks of a GPU on the double of one: what they run is what they say; torch on the CPU beside it."""

import math
import os
import signal

import numpy as np
import pytest
from mpi4py import MPI

from halograd.comm import Communicator
from halograd.gpucheck import benchmarks
from halograd.gpucheck import contest as contests
from halograd.gpucheck import report as reports
from halograd.gpucheck.benchmarks import run_benchmarks, time_copies, time_cutting, time_halo
from halograd.gpucheck.contest import Ours, contest, rounds
from halograd.gpucheck.lone import LoneCommunicator
from halograd.gpucheck.report import Report
from halograd.gpucheck.subjects import SUBJECTS, Subject
from halograd.gpucheck.torch_process import TorchError, TorchProcess, find_torch
from tests.harness.limits import LIMIT
from tests.support.clock import DrivenClock
from tests.support.fake_device import FakeBackend

MESH = Subject("small mesh", "mesh", 1, {"resolution": 64, "channels": 3, "widths": [4, 6], "convs": 1})
SMALL = {
    "mesh": MESH,
    "resnet": Subject("small ResNet", "resnet50", 2, {"width": 4, "resolution": 64, "classes": 5}),
    "unet": Subject("small U-Net", "unet2d", 1, {"resolution": 16, "width": 4, "levels": 2}),
    "unet 3-D": Subject("small U-Net in 3-D", "unet3d", 1, {"resolution": 8, "width": 4, "levels": 2}),
}
needs_torch = pytest.mark.skipif(find_torch() is not None, reason=str(find_torch()))


@pytest.fixture
def kernels():
    made = FakeBackend()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Few steps: the double's clock counts what is enqueued. torch has time, but none to compile a network."""
    monkeypatch.setattr(contests, "MOST_STEPS", 3)
    monkeypatch.setattr(contests, "EAGER_PATIENCE", LIMIT)
    monkeypatch.setattr(contests, "STEPS_PATIENCE", LIMIT)
    monkeypatch.setattr(contests, "COMPILE_NEEDS", math.inf)


@pytest.fixture(scope="module")
def torch():
    with TorchProcess("cpu") as process:
        yield process


def quiet(budget=math.inf):
    return Report(budget, say=lambda line: None)


def test_copies_and_halos(kernels):
    assert time_copies(kernels, 1 << 10)[1]["bytes_per_second"] > 0
    text, numbers = time_halo(kernels, 1e9, extent=6, channels=4)
    assert numbers["bytes"] == (4 * 6 + 4) * 4 * 2, "the frame around the block in bfloat16"
    assert numbers["floor_seconds"] == pytest.approx(3e-6), "three launches"
    assert "of the copy bandwidth" in text


@pytest.mark.parametrize("parts", [{"height": 2}, {"height": 2, "width": 2}], ids=["two", "four"])
def test_a_lone_rank_computes_its_block_and_sends_to_itself(kernels, parts):
    size = math.prod(parts.values())
    for rank in range(size):
        block = Ours(kernels, LoneCommunicator(rank, size), MESH, "float32", parts=parts)
        assert math.isfinite(block.warm_up())
        own = block.executor.values["predict"].box
        assert own.size * size == block.executor.values["predict"].layout.shape[1] ** 2
        assert block.executor.comm.device_bytes > 0, "halos travel"
        block.close()


def test_the_cost_of_cutting_counts_the_update_once(kernels):
    with Communicator(MPI.COMM_SELF) as comm:
        text, numbers = time_cutting(kernels, comm, MESH, "bf16")
    assert {"uncut", "update", "2 blocks", "4 blocks"} <= set(numbers)
    assert 0 < numbers["update"] < numbers["uncut"] < numbers["2 blocks"] < numbers["4 blocks"]
    assert "4 blocks +" in text


def test_groups_cannot_be_had_of_one_rank_alone():
    with pytest.raises(ValueError, match="expected a cut in which all ranks share all samples, got one of groups"):
        LoneCommunicator(0, 4).split(1)


def test_rounds_take_turns():
    said = []
    found = rounds({"a": lambda n: said.append("a") or 1.0, "b": lambda n: said.append("b") or 0.1}, 2)
    assert said == ["a", "b", "a", "b", "b", "a"], "measured once, then there and back"
    assert found == {"a": [1.0, 1.0], "b": [0.1, 0.1]}


@needs_torch
@pytest.mark.parametrize("name", SMALL)
def test_torch_trains_the_same_network(kernels, torch, name):
    """`contest` refuses to compare if the first losses differ; beside it our graphs and torch's eager mode."""
    with Communicator(MPI.COMM_SELF) as comm:
        text, numbers = contest(kernels, comm, SMALL[name], "tf32", quiet(budget=1e6), torch)
    torch.ask(LIMIT, do="free")
    assert {"ours", "ours, graph", "eager", "predicted_bytes"} <= set(numbers), text
    assert "compiled" not in numbers and "not compiled: " in text


@needs_torch
def test_bfloat16_beside_autocast_and_another_network_is_found(kernels, torch, monkeypatch):
    with Communicator(MPI.COMM_SELF) as comm:
        _, numbers = contest(kernels, comm, MESH, "bf16", quiet(budget=1e6), torch)
        assert numbers["eager"] > 0
        unet = SMALL["unet"]
        zero = {k: 0 * v for k, v in unet.data(unet.network()).items()}
        monkeypatch.setattr(Subject, "data", lambda self, network: zero)
        with pytest.raises(AssertionError, match=r"the first loss is .*, torch's"):
            contest(kernels, comm, unet, "tf32", quiet(budget=1e6), torch)


@needs_torch
def test_torch_that_fails_or_takes_too_long_is_told():
    with TorchProcess("cpu") as process:
        with pytest.raises(TorchError, match="KeyError"):
            process.ask(LIMIT, do="steps", name="none", count=1)
        os.kill(process._process.pid, signal.SIGSTOP)
        with pytest.raises(TorchError, match="torch did not answer within 0 s to 'free'"):
            process.ask(0.0, do="free")
        with pytest.raises(TorchError, match="torch has ended"):
            process.ask(LIMIT, do="free")


def test_what_is_missing_or_late_is_skipped_with_the_reason(kernels, monkeypatch):
    monkeypatch.setattr(benchmarks, "find_torch", lambda: "needs torch (pip install torch)")
    monkeypatch.setattr(benchmarks, "time_halo", lambda *args: ("", {}))
    monkeypatch.setattr(benchmarks, "time_copies", lambda *args: ("", {"bytes_per_second": 1.0}))
    report = quiet(budget=20.0)
    with Communicator(MPI.COMM_SELF) as comm:
        run_benchmarks(kernels, comm, report, {"mesh": MESH}, ("bf16",))
    skipped = {r.name: r.detail for r in report.results if r.status == "skipped"}
    assert skipped["torch"] == "needs torch (pip install torch)"
    assert "s are left, it takes 25 s" in skipped["small mesh, bf16"]
    assert "cutting small mesh, bf16" in skipped


def test_without_torch_ours_is_measured(kernels, monkeypatch):
    monkeypatch.setattr(benchmarks, "find_torch", lambda: "needs torch (pip install torch)")
    monkeypatch.setattr(benchmarks, "time_halo", lambda *args: ("", {}))
    report = quiet()
    with Communicator(MPI.COMM_SELF) as comm:
        run_benchmarks(kernels, comm, report, {"mesh": MESH}, ("bf16",))
    assert not report.failed, [r for r in report.results if r.status == "failed"]
    assert "small mesh, bf16: ms/step: ours" in report.table()


def test_parts_have_a_budget_of_their_own(monkeypatch):
    clock = DrivenClock().drive(monkeypatch, reports)
    report = quiet(100.0)
    with report.part(0.0):
        report.check("a", "late", lambda: ("", {}))
    clock.seconds += 90.0
    report.check("a", "in time", lambda: ("", {}))
    assert [r.status for r in report.results] == ["skipped", "ok"]
    with report.part(1000.0):
        assert report.seconds_left == pytest.approx(10.0, abs=1e-4)


def test_subjects_are_networks_that_can_be_built():
    assert SUBJECTS["mesh-2K"].network().inputs["x"].shape == (2048, 2048, 18)
    assert SUBJECTS["unet-3d"].network().inputs["x"].shape == (128, 128, 128, 1)
    data = MESH.data(MESH.network())
    assert set(np.unique(data["target"])) == {0.0, 1.0}
