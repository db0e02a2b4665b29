"""Tests of runs in which memory is missing on one of several ranks: one line with numbers and remedies, exit code 2."""

import re

import pytest

from tests.launch import mpiexec

SCRIPT = """
import sys
import numpy as np
import halograd as hg
from halograd.comm import boot, ending
from halograd.kernels.numpy import NumpyBackend
from halograd.models import build
from halograd.training import samples, session
from halograd.training.optimizers import Optimizer
from halograd.training.trainer import Trainer

class OutOfMemoryError(MemoryError):  # as CuPy's
    def __init__(self, size, total):
        super().__init__(f"Out of memory allocating {{size:,}} bytes (allocated so far: {{total:,}} bytes).")

def numpy(*_, **__):
    return np.empty(1 << 60, np.uint8)

def cupy(*_, **__):
    raise OutOfMemoryError(1 << 60, 1 << 30)

world = boot()
if world.rank == 1:
    {fault}
network = build("mesh", resolution=32, widths=[4, 4])
data = {{name: np.zeros((4, *node.shape), np.float32) for name, node in network.inputs.items()}}
hg.fit(network, hg.data.ArrayDataset(data), {folder!r}, epochs=1, batch=2, backend={{"kernels": "numpy"}})
"""
ASKED = {"numpy": r"Unable to allocate 1\.00 EiB for an array", "cupy": r"Out of memory allocating 1,152,921,504,606"}


@pytest.mark.parametrize(
    "fault, kind",
    [
        ("NumpyBackend.zeros = numpy", "numpy"),  # parameters
        ("NumpyBackend.zeros = cupy", "cupy"),
        ("session.Loader = numpy", "numpy"),  # batches read ahead
        ("Optimizer.__init__ = cupy", "cupy"),
        ("Trainer.step = numpy", "numpy"),  # on rank 1 alone: rank 0 waits for its messages
    ],
)
def test_one_line_with_numbers_and_exit_code_2(tmp_path, fault, kind):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(fault=fault, folder=str(tmp_path / "run")))
    done = mpiexec(2, [script], 120)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("halograd: error: "))
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert "rank 1" in line
    predicted, held = re.search(
        r"memory: expected ([\d.]+ \w+) for the arrays of this rank, got an error with ([\d.]+ \w+) held: "
        + ASKED[kind],
        line,
    ).groups()
    assert predicted.endswith("KiB")
    assert held.endswith("KiB") != ("zeros" in fault), "only messages are held before the arrays of the network"
    assert re.search(r"; set strategy\.recompute = .*training\.accumulate, or use more ranks", line)


def test_data_before_the_network_is_built(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(fault="samples.Samples.open = numpy", folder=str(tmp_path / "run")))
    done = mpiexec(2, [script], 120)
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("halograd: error: "))
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert re.search("rank 1: memory: expected enough for the arrays of this rank, got an error: Unable to", line)
