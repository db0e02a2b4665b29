"""Tests of the GPU benchmarks on a double of a GPU, with torch on the CPU: their results are consistent."""

import json
import math
import os
import signal
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from mpi4py import MPI

from benchmarks.gpu import __main__ as program
from benchmarks.gpu import contest as contests
from benchmarks.gpu import host
from benchmarks.gpu.attention import ATTENTION, time_attention
from benchmarks.gpu.contest import COMPILED, Ours, contest, contest_compiled, rounds
from benchmarks.gpu.lone import LoneCommunicator
from benchmarks.gpu.norms import Shape, time_norm
from benchmarks.gpu.subjects import SUBJECTS, Subject
from benchmarks.gpu.timings import time_copies, time_cutting, time_halo
from benchmarks.gpu.torch_process import TorchError, TorchProcess, find_torch
from halograd.comm import Communicator
from tests.harness.limits import LIMIT
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
    """Limit the number of steps, because each call advances the double's clock; torch gets the usual time limit."""
    monkeypatch.setattr(contests, "MOST_STEPS", 3)
    monkeypatch.setattr(host, "CALLS", 3)
    for name in ("EAGER_PATIENCE", "STEPS_PATIENCE", "COMPILE_PATIENCE"):
        monkeypatch.setattr(contests, name, LIMIT)


@pytest.fixture(scope="module")
def torch():
    with TorchProcess("cpu") as process:
        yield process


@pytest.mark.parametrize("residual", [False, True])
def test_norms(kernels, residual):
    """Every kernel is timed; too many rows for one launch are timed in two only."""
    text, numbers = time_norm(kernels, Shape("small", 2, (5, 4), 8, residual), repeats=2)
    steps = ("statistics", "forward", "backward_sums", "backward_data")
    assert set(numbers) == {*steps, "forward, 1", "backward_sums, 1", "forward, 2", "backward_sums, 2"}
    assert min(numbers.values()) > 0 and text.count("GB/s") == len(steps)


def test_copies_and_halos(kernels):
    assert time_copies(kernels, 1 << 10)[1]["bytes_per_second"] > 0
    text, numbers = time_halo(kernels, extent=6, channels=4, nbytes=1 << 10)
    assert numbers["bytes"] == (4 * 6 + 4) * 4 * 2, "the frame around the block in bfloat16"
    assert numbers["floor_seconds"] == pytest.approx(3e-6), "three launches"
    assert "of the copy bandwidth" in text


@pytest.mark.parametrize("parts", [{"height": 2}, {"height": 2, "width": 2}], ids=["two", "four"])
def test_a_lone_rank_computes_its_block_and_sends_to_itself(kernels, parts):
    size = math.prod(parts.values())
    for rank in range(size):
        block = Ours(kernels, LoneCommunicator(rank, size), MESH, "float32", parts=parts)
        assert math.isfinite(block.warm_up())
        own = block.executor.program.values["predict"].box
        assert own.size * size == block.executor.program.values["predict"].layout.shape[1] ** 2
        assert block.executor.comm.device_bytes > 0, "halos travel"
        block.close()


@pytest.mark.parametrize("graph", [False, True], ids=["one by one", "graphs"])
def test_the_cost_of_cutting_counts_the_update_once(kernels, graph, monkeypatch):
    recorded, capture = [], type(kernels.device).capture
    monkeypatch.setattr(type(kernels.device), "capture", lambda d, run: recorded.append(run) or capture(d, run))
    with Communicator(MPI.COMM_SELF) as comm:
        text, numbers = time_cutting(kernels, comm, MESH, "bf16", graph=graph)
    assert {"uncut", "update", "2 blocks", "4 blocks"} <= set(numbers)
    assert 0 < numbers["update"] < numbers["uncut"] and numbers["2 blocks"] < numbers["4 blocks"]
    assert "4 blocks +" in text or graph
    assert len(recorded) == (2 * 7 if graph else 0), "forward and backward, uncut and of six blocks"
    assert numbers["4 blocks host"] > 0


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
    """`contest` raises if first losses of our graph and torch differ; its report contains all modes and figures."""
    with Communicator(MPI.COMM_SELF) as comm:
        text, numbers = contest(kernels, comm, SMALL[name], "tf32", torch)
    assert {"ours", "ours, graph", "eager", "predicted_bytes", "host"} <= set(numbers), text


@needs_torch
def test_bfloat16_beside_autocast_and_another_network_is_found(kernels, torch, monkeypatch):
    with Communicator(MPI.COMM_SELF) as comm:
        _, numbers = contest(kernels, comm, MESH, "bf16", torch)
        assert numbers["eager"] > 0
        unet = SMALL["unet"]
        zero = {k: 0 * v for k, v in unet.data(unet.network()).items()}
        monkeypatch.setattr(Subject, "data", lambda self, network: zero)
        with pytest.raises(AssertionError, match=r"the first loss is .*, torch's"):
            contest(kernels, comm, unet, "tf32", torch)


@needs_torch
def test_torch_that_fails_or_takes_too_long_is_told():
    with TorchProcess("cpu") as process:
        with pytest.raises(TorchError, match="KeyError"):
            process.request(LIMIT, do="steps", name="none", count=1)
        os.kill(process._process.pid, signal.SIGSTOP)
        with pytest.raises(TorchError, match="torch did not reply within 0 s to 'steps'"):
            process.request(0.0, do="steps")
        with pytest.raises(TorchError, match="torch has ended"):
            process.request(LIMIT, do="steps")


class TorchDouble:
    """Double of torch that returns the loss of our network and a constant time."""

    requests: ClassVar[list[dict]] = []

    def __init__(self, device="cuda"):
        pass

    def request(self, patience, **command):
        self.requests.append(command)
        return {"loss": TorchDouble.loss, "bytes": 5, "seconds": 0.5}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


def batched(values):
    """Return pairs of values that follow each other."""
    return zip(values[::2], values[1::2])


def lines(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.fixture
def small_subjects(monkeypatch):
    monkeypatch.setattr(program, "SUBJECTS", {"mesh-2K": MESH})


def test_steps_beside_torch_are_three_timings(kernels, monkeypatch, capsys, small_subjects):
    monkeypatch.setattr(program, "find_torch", lambda: None)
    monkeypatch.setattr(program, "TorchProcess", TorchDouble)
    with Communicator(MPI.COMM_SELF) as comm:
        TorchDouble.loss = contest(kernels, comm, MESH, "bf16", None)[1]["loss"]
        TorchDouble.requests.clear()
        program.run(["steps", "mesh-2K", "bf16"], kernels, comm)
    begun, results = (list(part) for part in zip(*batched(lines(capsys))))
    names = ["small mesh, bf16", *(f"small mesh, bf16, {mode}" for mode in COMPILED)]
    assert begun == [{"begin": name} for name in names] and [r["status"] for r in results] == ["ok"] * 3
    eager, *compiled = results
    assert eager["detail"].startswith("ms/step: ours") and {"eager", "host"} <= set(eager["numbers"])
    for mode, result in zip(COMPILED, compiled):
        assert {mode, "ours, graph"} <= set(result["numbers"])
    built = [(c["name"], c["compiled"], c["graph"]) for c in TorchDouble.requests if c["do"] == "build"]
    assert built == [(name, "compiled" in name, "graph" in name) for name in ("eager", "eager, graph", *COMPILED)]


def test_without_torch_ours_is_measured(kernels, monkeypatch, capsys, small_subjects):
    monkeypatch.setattr(program, "find_torch", lambda: "needs torch (pip install torch)")
    with Communicator(MPI.COMM_SELF) as comm:
        program.run(["steps", "mesh-2K", "bf16"], kernels, comm)
    _, ours, torch = lines(capsys)
    assert ours["status"] == "ok" and ours["detail"].endswith("no torch")
    assert torch == {
        "check": "small mesh, bf16, torch",
        "status": "missing",
        "detail": "needs torch (pip install torch)",
    }


def test_a_timing_that_fails_costs_nothing_else_and_what_is_known_is_left_out(
    kernels, monkeypatch, capsys, small_subjects, tmp_path
):
    def fail(*args, graph):
        raise RuntimeError("out of\nmemory")

    monkeypatch.setattr(program, "time_cutting", fail)
    with Communicator(MPI.COMM_SELF) as comm:
        program.run(["cutting", "mesh-2K", "bf16"], kernels, comm)
        found = [line for line in lines(capsys) if "check" in line]
        assert [line["detail"] for line in found] == ["RuntimeError: out of memory"] * 2
        (tmp_path / "skip.json").write_text(json.dumps([found[0]["check"]]))
        monkeypatch.setenv(program.SKIP, str(tmp_path / "skip.json"))
        program.run(["cutting", "mesh-2K", "bf16"], kernels, comm)
    assert [line["check"] for line in lines(capsys) if "check" in line] == [found[1]["check"]]


@needs_torch
@pytest.mark.parametrize("subject", ATTENTION[1:], ids=["global", "windows"])
def test_attention_beside_torch(kernels, torch, subject):
    small = replace(subject, samples=1, extents=(8, 8), window=subject.window and 4)
    text, numbers = time_attention(kernels, small, torch)
    assert set(numbers) == {"ours", "torch"} and min(numbers.values()) > 0 and "ours / torch" in text


def test_attention_without_torch(kernels, monkeypatch, capsys):
    monkeypatch.setattr(program, "find_torch", lambda: "needs torch (pip install torch)")
    monkeypatch.setattr(program, "ATTENTION", [replace(ATTENTION[0], extents=(4, 4))])
    with Communicator(MPI.COMM_SELF) as comm:
        program.run(["attention"], kernels, comm)
    _, ours, torch = lines(capsys)
    assert ours["status"] == "ok" and set(ours["numbers"]) == {"ours"} and torch["status"] == "missing"


def test_what_the_host_takes(kernels, capsys):
    with Communicator(MPI.COMM_SELF) as comm:
        program.run(["host"], kernels, comm)
    _, found = lines(capsys)
    assert {"kernel of ours", "np.add", "cuDNN", "cuBLAS"} <= set(found["numbers"]), "raw kernels on a GPU only"
    assert all(seconds > 0 for seconds in found["numbers"].values())


@needs_torch
def test_torch_that_compiles_for_too_long_is_said(kernels, monkeypatch):
    monkeypatch.setattr(contests, "COMPILE_PATIENCE", 0.0)
    with Communicator(MPI.COMM_SELF) as comm, pytest.raises(AssertionError, match="torch, compiled: torch did not"):
        contest_compiled(kernels, comm, MESH, "tf32", TorchProcess("cpu"))


def test_subjects_are_networks_that_can_be_built():
    assert SUBJECTS["mesh-2K"].network().inputs["x"].shape == (2048, 2048, 18)
    assert SUBJECTS["unet-3d"].network().inputs["x"].shape == (128, 128, 128, 1)
    data = MESH.data(MESH.network())
    assert set(np.unique(data["target"])) == {0.0, 1.0}
