"""Test that the launch benchmark times real launches."""

import subprocess
import sys

import pytest

from benchmarks import launches
from tests.kernels.cuda.host import compiler


def test_the_table_has_every_kernel():
    pytest.importorskip("cupy", reason="needs CuPy, whose launches are timed")
    if compiler() is None:
        pytest.skip("needs g++ for what stands for the driver")
    command = [sys.executable, launches.__file__, "--calls", "10"]  # it loads a library in place of the driver
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    assert lines[1].split() == ["kernel", *launches.COLUMNS]
    assert [line.split()[0] for line in lines[2:]] == list(launches.KERNELS)
    for line in lines[2:]:
        assert min(float(text) for text in line.split()[1:4]) > 0
