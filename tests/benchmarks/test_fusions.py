"""Tests of sums in the epilogue of a convolution on a double; test_planning.py has their plans by the real cuDNN."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.gpu import fusions, timings
from benchmarks.gpu.fusions import CASES, Case, time_fusions
from tests.kernels.cudnn.fake_cudnn import CudnnDouble, EngineDouble, GraphDouble
from tests.kernels.cudnn.fake_runtime import Machine

SMALL = (Case("plane", 2, (5, 4), 16, 8, 3), Case("points", 3, (2, 3), 8, 16, 1), Case("volume", 1, (3, 4, 2), 8, 8, 3))


class EpilogueDouble(GraphDouble):
    """Graph with elementwise operations, reductions and several outputs after the convolution."""

    def _both(self, compute, a, b):
        value = lambda t, memory: t.compute(memory) if t.compute else memory[t.uid].astype(np.float64)  # noqa: E731
        return self._result(lambda memory: compute(value(a, memory), value(b, memory)))

    def mul(self, *, a, b):
        return self._both(np.multiply, a, b)

    def sub(self, *, a, b):
        return self._both(np.subtract, a, b)

    def add(self, *, a, b):
        return self._both(np.add, a, b)

    def relu_backward(self, *, loss, input):
        return self._both(lambda gradient, x: gradient * (x > 0), loss, input)

    def reduction(self, *, input, mode):
        assert mode == "sum"
        axes = (0, *range(2, len(self.tensors[0].dim)))
        return self._result(lambda memory: input.compute(memory).sum(axes, keepdims=True))

    @property
    def outputs(self):
        return [t for t in self.results if t.output]

    def validate(self):
        assert all(t.dim and t.stride and t.data_type for t in self.outputs)
        assert self.results[0].dim, "a data gradient needs its extents"
        self._expect("described", "validated")

    def _get_variant_pack_uids_sorted(self):
        return sorted(t.uid for t in [*self.tensors, *self.outputs])

    def _launch(self, addresses, workspace, handle, way):
        self.module.clock += self.engines[self.candidate].seconds
        memory = {t.uid: t.view(addresses[t.uid]) for t in self.tensors}
        for t in self.outputs:
            target = t.view(addresses[t.uid])
            target[...] = t.compute(memory).astype(target.dtype)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.title)
def test_the_graphs_compute_what_our_kernels_do(tmp_path, monkeypatch, case, backward):
    monkeypatch.setattr(timings, "STEPS", 2)
    monkeypatch.setattr(CudnnDouble, "reduction_mode", type("Modes", (), {"ADD": "sum"}), raising=False)
    with Machine(tmp_path).open() as kernels:
        monkeypatch.setattr(CudnnDouble, "pygraph", lambda module, **settings: EpilogueDouble(module, **settings))
        engines = [EngineDouble("eng7_k24=21", compiled=True), EngineDouble("eng2", builds=False), EngineDouble("eng7")]
        plain = kernels.runtime.frontend.module.engines
        made, used = fusions.backward_graph if backward else fusions.forward_graph, []

        def fused_only(*arguments):
            monkeypatch.setattr(kernels.runtime.frontend.module, "engines", lambda: engines)
            used.append(made(*arguments))
            return used[-1]

        monkeypatch.setattr(fusions, made.__name__, fused_only)
        text, numbers = time_fusions(kernels, case, backward)
        monkeypatch.setattr(kernels.runtime.frontend.module, "engines", plain)
    assert len(used) == 1 and text.count(" x, sums ") == 2, "the engine that cannot be built is left out"
    for name in ("eng7_k24=21", "eng7"):
        assert numbers[f"apart {name}"] < 1e-2, "our kernel reads the output rounded to 16 bits"
    assert numbers["separate"] > 0


def test_the_shapes_are_those_that_decide():
    assert len(CASES) == 5 and {len(case.spatial) for case in CASES} == {2, 3}
    for case in CASES:
        x, w, y = case.extents
        assert case.geometry.output_shape(x[1:-1]) == y[1:-1] and w[-1] == x[-1]
