"""Tests of small benchmarks: launches, fusions, smooth maps."""

import subprocess
import sys
from dataclasses import replace

import pytest

from benchmarks import launches, warp
from benchmarks.gpu import timings
from benchmarks.gpu.fusions import CASES, Case, time_fusions
from tests.kernels.cuda.host import compiler
from tests.kernels.cudnn.fake_cudnn import EngineDouble
from tests.kernels.cudnn.fake_runtime import Machine

SMALL = (Case("plane", 2, (5, 4), 16, 8, 3), Case("points", 3, (2, 3), 8, 16, 1), Case("volume", 1, (3, 4, 2), 8, 8, 3))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.title)
def test_both_are_timed_and_compared(tmp_path, monkeypatch, case, backward):
    monkeypatch.setattr(timings, "STEPS", 2)
    machine = Machine(tmp_path)
    plain = machine.cudnn.engines
    fused = [EngineDouble("eng7_k24=21", compiled=True), EngineDouble("eng2", builds=False), EngineDouble("eng7")]
    machine.cudnn.engines = lambda: fused if machine.cudnn.graphs[-1].sums else plain()
    with machine.open(autotune=True) as kernels:
        text, numbers = time_fusions(kernels, case, backward)
        assert {name for name in numbers if name.startswith("plan")} == {"plan eng7_k24=21", "plan eng7"}
        assert numbers["difference"] < 1e-2, "our kernel reads the output rounded to 16 bits"
        assert numbers["separate"] > 0 and "eng7_k24=21" in text
        fused.clear()
        case = replace(case, outputs=case.outputs + 8)
        assert "no plan" in time_fusions(kernels, case, backward)[0]


def test_the_shapes_are_those_that_decide():
    assert len(CASES) == 5 and {len(case.spatial) for case in CASES} == {2, 3}
    for case in CASES:
        x, w, y = case.extents
        assert case.geometry.output_shape(x[1:-1]) == y[1:-1] and w[-1] == x[-1]


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


def test_a_line_has_times_and_their_ratios():
    lines = list(warp.rows([(12, 10, 2)], times=1))
    assert [line[2] for line in lines] == [*warp.CHANGES]
    for line in lines:
        assert len(line) == len(warp.COLUMNS) == len(warp.WIDTHS) and line[0] == "12x10x2"
        read, augmented, ratio = map(float, line[3:6])
        assert augmented > 0 and (read == 0 or abs(ratio - augmented / read) <= 0.6 * ratio)
