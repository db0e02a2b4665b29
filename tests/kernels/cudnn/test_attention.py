"""Tests of attention by cuDNN: numbers on the double with our own CUDA kernels on the CPU, and every refusal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from halograd.kernels import DropoutMask, Everywhere, Neighborhood, Windows
from halograd.kernels.cuda import Boxes
from halograd.kernels.cudnn import CudnnBackend
from halograd.kernels.cudnn import attention as by_cudnn
from tests.kernels.conftest import Arrays
from tests.kernels.cuda.host import HostLauncher
from tests.kernels.test_attention import Case, kernels, outputs, run_blocks, run_whole

from .fake_cudnn import EngineDouble
from .fake_runtime import device_empty

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
Open = Callable[..., CudnnBackend]

CASES = {
    "global": Case((Everywhere(3, 5), Everywhere(4, 2)), d=8, e=16),
    "grouped": Case((Everywhere(7, 5),), heads=4, groups=2, d=8, e=8),
    "bias": Case((Everywhere(2, 3), Everywhere(3, 2), Everywhere(2, 2)), bias=True, d=8, e=8),
    "windows along one axis": Case((Windows(8, 4),), d=8, e=8),
    "shifted windows": Case((Windows(7, 3, 1), Windows(9, 4, -2)), heads=2, bias=True, d=8, e=8),
    "windows in 3-D": Case((Windows(4, 2, 1), Windows(4, 3), Windows(5, 2, 1)), d=8, e=8),
    "mixed": Case((Windows(7, 3, 2), Everywhere(3, 5)), bias=True, d=8, e=8, heads=4, groups=2),
    "not aligned": Case((Windows(9, 3),), heads=1, d=8, e=8, samples=1),
}


@pytest.fixture
def opened(host, machine) -> Iterator[Open]:
    """Return a function that opens the backend on the double with our own kernels."""
    made: list[CudnnBackend] = []
    host.empty, machine.boxes = device_empty, Boxes(host)

    def make(**options) -> CudnnBackend:
        made.append(machine.open(**options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def names(backend: CudnnBackend, case: Case, dtype=BFLOAT16, **changed) -> tuple[str, str, list[str]]:
    """Return the implementations of both kernels, and the reasons of substitutes."""
    a = Arrays(backend, dtype)
    x = case.draw(a)
    made = kernels(a, x, outputs(a, x, case.heads), case.geometry(**changed))
    found = made[0].impl, made[1].impl, [s.reason for s in backend.take_substitutes()]
    for kernel in made:
        kernel.close()
    return found


# ---------------------------------------------------------------------- numbers
@pytest.mark.parametrize("name", CASES)
def test_whole(opened, machine, name):
    """Outputs and gradients in 16 bits against float64; the table of biases as float32, as parameters are."""
    backend, case = opened(), CASES[name]
    dtype = np.dtype(np.float16) if name in ("global", "shifted windows") else BFLOAT16
    run_whole(Arrays(backend, dtype), case)
    assert not backend.take_substitutes() and machine.cudnn.launches
    backend.close()
    assert backend.held_bytes == 0


RINGS = [CASES["grouped"], replace(CASES["bias"], reaches=(Everywhere(5, 6), Everywhere(4, 3)))]


@pytest.mark.parametrize("case", RINGS, ids=["grouped", "bias"])
def test_blocks(opened, machine, case):
    """Blocks of queries, heads and keys as in a ring: results for further keys are merged by cuDNN's statistics."""
    backend = opened()
    run_blocks(Arrays(backend, np.float16), case)
    refused = [s.reason for s in backend.take_substitutes()]
    if case.groups == 1:
        assert not refused
    assert machine.cudnn.launches


def test_a_bias_of_float32(opened):
    case = CASES["shifted windows"]

    class Wide(Arrays):
        def draw(self, *shape):
            return super().draw(*shape, dtype=np.float32 if len(shape) == 3 else self.dtype)

        def poisoned(self, *shape, dtype=None):
            return super().poisoned(*shape, dtype=np.float32 if len(shape) == 3 else dtype or self.dtype)

    run_whole(Wide(opened(), BFLOAT16), case)


def test_a_pass_allocates_nothing_and_kernels_share_their_memory(opened, machine):
    backend, case = opened(), CASES["shifted windows"]
    a = Arrays(backend, BFLOAT16)
    pairs = []
    for _ in range(2):
        x = case.draw(a)
        pairs += kernels(a, x, outputs(a, x, case.heads), case.geometry())
    assert pairs[0].scratch_bytes > 0
    shared = backend._attention.memory.held_bytes
    assert 0 < shared <= pairs[0].scratch_bytes + pairs[1].scratch_bytes, "one buffer for both kernels of a direction"
    backend.before_capture()
    tables = backend.launcher.own.nbytes
    assert backend.held_bytes == shared + backend.workspaces.nbytes + backend._engine.kernel_bytes + tables
    with machine.cupy.capture():
        for kernel in pairs:
            kernel()
    for kernel in pairs:
        kernel.close()
    assert backend._attention.memory.held_bytes == 0


# ---------------------------------------------------------------------- refusals
def test_what_our_own_kernels_compute(opened, machine):
    backend, case = opened(), CASES["global"]
    ours = "cuda:attention", "cuda:attention gradient"

    def reason(case=case, dtype=BFLOAT16, **changed):
        *found, reasons = names(backend, case, dtype, **changed)
        assert tuple(found) == ours and len(reasons) == 2
        return reasons[0]

    assert "takes float16 and bfloat16, not float32" in reason(dtype=np.float32)
    assert "hidden_dim should be multiple of 8" in reason(replace(case, d=4))
    assert "no neighborhoods" in reason(replace(case, reaches=(Neighborhood(6, 3),)))
    shape = (2, 2, 3, 4, 5, 2)
    mask = DropoutMask(0.1, 0, shape, (0,) * 6, np.zeros(3, np.uint64))
    assert "mask of dropout" in reason(dropout=mask)
    windows = replace(case, reaches=(Windows(8, 2),))
    a = Arrays(backend, BFLOAT16)
    x = windows.draw(a)
    x["k"], x["v"] = a.draw(2, 2, 16), a.draw(2, 2, 32)
    for kernel in kernels(a, x, outputs(a, x, 2), windows.geometry(keys=((4, 6),))):
        assert kernel.impl in ours
    assert "some queries read no keys" in backend.take_substitutes()[0].reason
    assert names(backend, CASES["windows along one axis"], merge=True)[0] == ours[0]
    assert not machine.cudnn.launches


def test_heads_that_read_parts_of_groups(opened):
    """Three of four heads in groups of two: their keys cannot be divided evenly."""
    backend = opened()
    a, case = Arrays(backend, BFLOAT16), CASES["grouped"]
    x = case.draw(a)
    x = {n: None if array is None else array[..., : (24 if n in ("q", "dy") else 16)].copy() for n, array in x.items()}
    x = {n: None if array is None else a.draw(*array.shape) for n, array in x.items()}
    made = kernels(a, x, outputs(a, x, 3), case.geometry(heads=(0, 3)))
    assert [k.impl for k in made] == ["cuda:attention", "cuda:attention gradient"]
    assert "heads of this rank read parts of 2 groups" in backend.take_substitutes()[0].reason


def test_matrices_of_all_pairs_are_small(opened, machine, monkeypatch):
    """Neither the matrix of biases nor a workspace may be larger than some multiple of the arrays."""
    monkeypatch.setattr(by_cudnn, "_SMALL", 0)
    monkeypatch.setattr(by_cudnn, "_LARGEST", 1)
    backend = opened()
    far = replace(CASES["bias"], reaches=(Everywhere(90, 90),))
    assert "the biases of all pairs take 32400 B" in names(backend, far)[2][0]
    machine.cudnn.engines = lambda: [EngineDouble("eng6", (), 10 << 20)]
    assert "has been deselected" in names(backend, CASES["global"])[2][0]


def test_frontends_that_do_not_fit_the_library(opened, machine):
    machine.cudnn.version = 91900
    forward, backward, reasons = names(opened(), CASES["global"])
    assert forward.startswith("cudnn:") and backward == "cuda:attention gradient"
    (reason,) = reasons
    assert reason == (
        "nvidia-cudnn-frontend 1.26.0 needs cuDNN 9.22 for it, and this is 9.19.0; install nvidia-cudnn-frontend 1.23"
    )
    machine.cudnn.__version__ = "1.23.0"
    assert names(opened(), CASES["global"])[2] == []


def test_a_device_that_refuses_every_launch(opened, machine, caplog):
    """A plan that cannot be launched is replaced by the next one, and the last one by our own kernel."""
    machine.cudnn.engines = lambda: [EngineDouble("eng9", launches=False), EngineDouble("eng8", launches=False)]
    with caplog.at_level(logging.WARNING):
        run_whole(Arrays(opened(), BFLOAT16), CASES["global"])
    assert "refused plan eng9 of attention forward" in caplog.text
    assert "attention_forward by our own kernel, which is slower: attention forward: expected an att" in caplog.text
    assert "attention_backward by our own kernel" in caplog.text and not machine.cudnn.launches


def test_a_plan_that_cannot_be_timed(opened, machine):
    """A stored plan that the device refuses when it is compared with our own kernel is replaced by that."""
    machine.cudnn.engines = lambda: [EngineDouble("eng9")]
    assert names(opened(autotune=True), CASES["windows along one axis"])[2] == []
    store = machine.store.read_text().splitlines()
    machine.store.write_text("\n".join(line for line in store if "fastest of" not in line) + "\n")
    machine.cudnn.engines = lambda: [EngineDouble("eng9", launches=False)]
    forward, backward, reasons = names(opened(autotune=True), CASES["windows along one axis"])
    assert forward == "cuda:attention" and "cuda:" in backward and len(reasons) == 2


# ---------------------------------------------------------------------- choice by measurement
@pytest.mark.parametrize("seconds", [1e-3, 1.0], ids=["cudnn", "ours"])
def test_the_faster_one_is_taken(opened, machine, monkeypatch, seconds):
    """With autotune our own kernel is a candidate too; a stored choice needs no measurement."""
    machine.cudnn.engines = lambda: [EngineDouble("eng9", seconds=seconds)]
    launched = HostLauncher.bind

    def slow(self, function, *arguments):
        run = launched(self, function, *arguments)

        return lambda: (run(), machine.cudnn.wait(0.1 * function[1].startswith("attention")))

    monkeypatch.setattr(HostLauncher, "bind", slow)
    found, launches = [], []
    for _ in range(2):
        backend = opened(autotune=True)
        found.append(names(backend, CASES["windows along one axis"]))
        launches.append(len(machine.cudnn.launches))
        times = backend.autotuned()
    assert found[0] == found[1] and launches[0] == launches[1]
    cudnn = seconds < 0.1
    assert found[0][0] == ("cudnn:eng9" if cudnn else "cuda:attention") and found[0][2] == []
    assert len(times) == 2 and all(next(iter(t)).startswith("eng9" if cudnn else "cuda:") for t in times.values())
    assert all(len(t) == 2 for t in times.values())
