"""Tests of plans: choice by precision, shapes, storage in memory and on disk, replacement, and the real cuDNN's."""

from __future__ import annotations

import itertools
import json
import logging

import numpy as np
import pytest

from halograd.kernels import Geometry, KernelError, get_backend
from halograd.kernels.cudnn.graphs import Arithmetic, Shapes, Tensor
from halograd.kernels.cudnn.store import Entry, PlanStore, store_path
from halograd.kernels.geometry import read_part
from halograd.kernels.kernel import Kernel
from halograd.kernels.memory import packed_strides
from tests.kernels.conftest import Arrays
from tests.kernels.geometries import CASES
from tests.kernels.reference import RELU

from .fake_cudnn import EngineDouble
from .on_device import BOUNDS

G = Geometry.of((3, 3), 1, 1)
COMPILED = [EngineDouble("eng71", (), 256, compiled=True)]


def forward(backend, samples: int = 1, relu: bool = False, dtype=np.float32):
    """Build a forward convolution."""
    a = Arrays(backend, dtype)
    shape = (samples, 4, 4, 8)
    return backend.conv_forward(
        a.draw(*shape), a.draw(8, 3, 3, 8), a.draw(8), a.poisoned(*shape), G, RELU if relu else None
    )


def plan_of(kernel) -> str:
    return kernel.impl.removeprefix("cudnn:")


# ---------------------------------------------------------------------- choice
def test_the_first_plan_that_is_exact_enough_is_taken(machine):
    chosen = {}
    for name, options in (
        ("strict", {}),
        ("tf32", {"precision": "tf32"}),
        ("deterministic", {"deterministic": True}),
        ("small", {"workspace_limit": 600}),
        ("none", {"workspace_limit": 0}),
    ):
        with machine.open(**options) as backend:
            chosen[name] = plan_of(forward(backend))
    assert chosen == {
        "strict": "eng10_k1=3",
        "tf32": "eng62_k2=1",
        "deterministic": "eng0",
        "small": "eng0",
        "none": "eng71",
    }


def test_a_plan_that_cannot_be_built_is_passed_over(machine, backend):
    machine.cudnn.engines = lambda: [EngineDouble("eng1", builds=False), EngineDouble("eng2")]
    assert plan_of(forward(backend)) == "eng2"


def test_no_plan_is_refused_with_what_may_be_allowed(machine):
    with machine.open(deterministic=True, workspace_limit=64) as backend:
        machine.cudnn.engines = lambda: [EngineDouble("eng1", ("TENSOR_CORE",))]
        with pytest.raises(KernelError) as caught:
            forward(backend, relu=True)
    assert str(caught.value) == (
        "conv forward: expected a convolution with a plan in cuDNN 9.28.0, got float32 x (1, 8, 4, 4), "
        "w (8, 8, 3, 3), y (1, 8, 4, 4) + bias + relu, stride (1, 1), padding ((1, 1), (1, 1)), dilation (1, 1): "
        "Chosen plan index 0 has been deselected.; allow a workspace above 64 B or nondeterministic sums or precision "
        "tf32, or use another dtype"
    )


def test_a_graph_without_engines_is_refused_in_one_line(machine, backend):
    machine.cudnn.engines = list
    with pytest.raises(KernelError, match=r"No valid engine configs for this graph; use another dtype$") as caught:
        forward(backend, dtype=np.float16)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------- memory
def test_kernels_of_one_shape_share_a_plan(machine, backend):
    first, second = forward(backend), forward(backend)
    assert len(machine.cudnn.graphs) == 1
    first()
    second()
    other = [forward(backend, samples=2), forward(backend, relu=True), forward(backend, dtype=np.float16)]
    assert len(machine.cudnn.graphs) == 4
    for kernel in other:
        kernel()


def test_a_plan_refused_at_launch_is_replaced_once_for_all(machine, backend, caplog):
    machine.cudnn.engines = lambda: [
        EngineDouble("eng1", launches=False),
        EngineDouble("eng2", workspace=10_000, launches=False),
        EngineDouble("eng3", workspace=2048),
    ]
    first, second = forward(backend), forward(backend)
    with caplog.at_level(logging.WARNING, "halograd.kernels"):
        first()
        second()
        first()
    assert [name for name, _, _ in machine.cudnn.launches] == ["eng3"] * 3
    assert [record.getMessage() for record in caplog.records] == [
        "kernels: cuDNN refused plan eng1 of conv forward (CUDNN_STATUS_EXECUTION_FAILED at launch); taking eng2",
        "kernels: cuDNN refused plan eng2 of conv forward (CUDNN_STATUS_EXECUTION_FAILED at launch); taking eng3",
    ]


def test_if_all_are_refused_at_launch_it_says_so(machine, backend):
    machine.cudnn.engines = lambda: [EngineDouble("eng1", launches=False), EngineDouble("eng2", launches=False)]
    first, second = forward(backend), forward(backend)
    for kernel in (first, first, second):  # kernels of one shape share the plan: each call ends in the same way
        with pytest.raises(KernelError, match="all launches failed, the last one with: CUDNN_STATUS_EXEC"):
            kernel()
    assert machine.cudnn.launches == []


def test_a_restored_plan_is_replaced_by_none_if_all_are_refused(machine):
    engines = [EngineDouble("eng71", compiled=True), EngineDouble("eng0")]
    machine.cudnn.engines = lambda: engines
    with machine.open() as backend:
        forward(backend)
    for engine in engines:
        engine.launches = False
    with machine.open() as backend:
        kernel = forward(backend)
        for _ in range(2):
            with pytest.raises(KernelError, match="all launches failed, the last one with: CUDNN_STATUS_EXEC"):
                kernel()


def test_a_plan_that_ran_once_is_not_replaced(machine, backend):
    engine = EngineDouble("eng1")
    machine.cudnn.engines = lambda: [engine, EngineDouble("eng2")]
    kernel = forward(backend)
    kernel()
    engine.launches = False
    with pytest.raises(RuntimeError, match="at launch"):
        kernel()
    assert machine.cudnn.built == ["eng1"]


# ---------------------------------------------------------------------- disk
def test_quick_plans_are_not_kept(machine, backend):
    forward(backend)
    assert not machine.store.exists()


def test_compiled_plans_are_restored(machine):
    machine.cudnn.engines = lambda: COMPILED
    with machine.open() as backend:
        forward(backend)()
    with machine.open() as backend:
        kernel = forward(backend)
        kernel()
    assert machine.cudnn.built == ["eng71"] and machine.cudnn.restored == 1
    assert kernel.impl == "cudnn:eng71" and kernel.scratch_bytes == 256
    assert machine.cudnn.launches == [("eng71", 0, "table")] * 2


def test_a_kept_plan_that_does_not_fit_is_planned_again(machine):
    machine.cudnn.engines = lambda: COMPILED
    with machine.open() as backend:
        forward(backend)
    machine.cudnn.saved.clear()
    with machine.open() as backend:
        forward(backend)()
    assert machine.cudnn.built == ["eng71"] * 2 and machine.cudnn.restored == 0


def test_a_restored_plan_that_is_refused_is_replaced(machine):
    engine = EngineDouble("eng71", compiled=True)
    machine.cudnn.engines = lambda: [engine, EngineDouble("eng0")]
    with machine.open() as backend:
        forward(backend)
    engine.launches = False
    with machine.open() as backend:
        forward(backend)()
    assert machine.cudnn.launches == [("eng0", 0, "table")]


def test_plans_of_other_conditions_are_not_used(machine):
    machine.cudnn.engines = lambda: COMPILED
    with machine.open() as backend:
        forward(backend)
    machine.cudnn.version = 92801
    with machine.open() as backend:
        forward(backend)
    machine.cupy.cuda.runtime.driverGetVersion = lambda: 13030
    with machine.open() as backend:
        forward(backend)
    with machine.open(precision="tf32") as backend:
        forward(backend)
    assert machine.cudnn.restored == 0 and len(machine.store.read_text().splitlines()) == 4
    conditions = [json.loads(line)[0] for line in machine.store.read_text().splitlines()]
    assert conditions[0] == "cuDNN 9.28.0, frontend 1.26.0, driver 13020, Double of a GPU sm_90"
    assert len(set(conditions)) == 3


def test_damaged_lines_are_skipped(machine):
    machine.cudnn.engines = lambda: COMPILED
    with machine.open() as backend:
        forward(backend)
    whole = machine.store.read_text()
    machine.store.write_text("{\n[1, 2]\n" + "[" * 100_000 + "\n" + whole[: len(whole) // 2])
    with machine.open() as backend:
        forward(backend)
    assert machine.cudnn.restored == 0
    lines = machine.store.read_text().splitlines()
    assert len(lines) == 5 and lines[-1] + "\n" == whole, "a torn line gets an end"
    with machine.open() as backend:
        forward(backend)
    assert machine.cudnn.restored == 1


def test_a_folder_that_cannot_be_written_is_a_warning_once(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with caplog.at_level(logging.WARNING, "halograd.kernels"):
        store = PlanStore(blocked / "plans.jsonl", "here")
        store.put("a", Entry("eng0", 1))
        store.put("b", Entry("eng0", 1))
    assert store.get("a") == Entry("eng0", 1)
    assert len(caplog.records) == 1 and "HALOGRAD_CACHE" in caplog.records[0].getMessage()


def test_entries_survive_the_file(tmp_path):
    entry = Entry("eng71", 123, b"\x00\xff", {"eng71": 1e-3, "eng0": 2e-3})
    PlanStore(tmp_path / "deep" / "plans.jsonl", "here").put("key", entry)
    assert PlanStore(tmp_path / "deep" / "plans.jsonl", "here").get("key") == entry
    assert PlanStore(tmp_path / "deep" / "plans.jsonl", "elsewhere").get("key") is None
    assert len(PlanStore(None, "here")) == 0


def test_ranks_share_what_one_of_them_has_compiled(machine):
    """A rank also uses plans that another rank has compiled and stored after it opened its own backend."""
    machine.cudnn.engines = lambda: COMPILED
    with machine.open() as one, machine.open() as other:
        forward(one)
        forward(other)
        forward(other, samples=2)
        forward(one, samples=2)
    assert machine.cudnn.built == ["eng71"] * 2 and machine.cudnn.restored == 2


def test_a_line_that_another_process_is_writing_is_read_when_it_is_there(tmp_path):
    store = PlanStore(tmp_path / "plans.jsonl", "here")
    PlanStore(tmp_path / "other.jsonl", "here").put("key", Entry("eng71", 1))
    line = (tmp_path / "other.jsonl").read_bytes()
    (tmp_path / "plans.jsonl").write_bytes(line[:-9])
    assert store.get("key") is None
    (tmp_path / "plans.jsonl").write_bytes(line)
    assert store.get("key") == Entry("eng71", 1)


def test_where_plans_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("HALOGRAD_CACHE", str(tmp_path))
    assert store_path() == tmp_path / "cudnn_plans.jsonl"
    monkeypatch.delenv("HALOGRAD_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert store_path() == tmp_path / "halograd" / "cudnn_plans.jsonl"


# ---------------------------------------------------------------------- measurement
def test_autotune_takes_the_fastest_and_keeps_it(machine):
    with machine.open(autotune=True) as backend:
        kernel = forward(backend)
        found = backend.autotuned()
        assert kernel.impl == "cudnn:eng71", "2 ms; eng62 takes 1 ms, but rounds"
        ((direction, text), times) = next(iter(found.items()))
        assert direction == "forward" and "x (1, 8, 4, 4)" in text
        assert list(times) == ["eng71", "eng10_k1=3", "eng0"]
        assert times["eng71"] == pytest.approx(2e-3) and times["eng0"] == pytest.approx(4e-3)
        launched = len(machine.cudnn.launches)
        kernel()
        forward(backend)
        assert machine.cudnn.launches[launched:] == [("eng71", 0, "table")]
        assert machine.cudnn.launched.plans == ["eng71"], "what lost is not kept"
    with machine.open(autotune=True) as backend:
        assert forward(backend).impl == "cudnn:eng71" and backend.autotuned() == found
        assert len(machine.cudnn.launches) == launched + 1, "not measured again"


def test_what_is_measured(machine):
    """The first 16 plans in cuDNN's order, one of each other engine, and eight more of the fastest engine."""
    machine.cudnn.engines = lambda: [
        *(EngineDouble(f"eng62_k2={i}", seconds=1e-3 if i == 20 else 3e-3 - i * 1e-6) for i in range(40)),
        EngineDouble("eng10_k1=0", builds=False),
        *(EngineDouble(f"eng10_k1={i}", seconds=1.0) for i in (1, 2)),
        EngineDouble("eng0", seconds=5e-3),
    ]
    with machine.open(autotune=True) as backend:
        assert forward(backend).impl == "cudnn:eng62_k2=20"
        (times,) = backend.autotuned().values()
    assert set(times) == {*(f"eng62_k2={i}" for i in range(24)), "eng10_k1=1", "eng0"}
    launches = [name for name, *_ in machine.cudnn.launches]
    assert launches.count("eng10_k1=1") == 2 and launches.count("eng62_k2=1") > 5, "slow ones are not measured again"


def test_memory_of_a_measurement_is_given_back(machine):
    """Memory of measured candidates is freed, also if none can be launched; CuPy's pool would keep it."""
    with machine.open(autotune=True) as backend:
        forward(backend)
        assert machine.cupy.released == 1
        forward(backend)
        assert machine.cupy.released == 1, "nothing was measured"
        machine.cudnn.engines = lambda: [EngineDouble("eng1", launches=False)]
        with pytest.raises(KernelError, match="at launch"):
            forward(backend, samples=3)
        assert machine.cupy.released == 2


def test_a_measured_plan_without_compiler_is_found_again_by_name(machine):
    machine.cudnn.engines = lambda: [EngineDouble("eng1", seconds=2e-3), EngineDouble("eng2", seconds=1e-3)]
    with machine.open(autotune=True) as backend:
        forward(backend)
    machine.cudnn.engines = lambda: [EngineDouble("eng2"), EngineDouble("eng3"), EngineDouble("eng1")]
    with machine.open(autotune=True) as backend:
        assert forward(backend).impl == "cudnn:eng2"
        assert machine.cudnn.restored == 0
    machine.cudnn.engines = lambda: [EngineDouble("eng4")]
    with machine.open(autotune=True) as backend:
        assert forward(backend).impl == "cudnn:eng4", "the kept one is gone: measured again"


def test_a_kernel_with_a_new_name_is_measured_again(machine):
    """The file may have times of a kernel that had another name in an earlier version."""
    for name in ("two kernels", "two launches"):
        with machine.open(autotune=True) as backend:
            kernel, plans = forward(backend), backend._engine.plans
            assert plans.faster(list(plans.times), kernel, Kernel(lambda: None, name))
            assert name in next(iter(plans.times.values()))


def test_what_was_measured_is_not_used_without_autotune(machine):
    """A measured plan is not used without autotune: a run must not change its bits because another run measures."""
    with machine.open(autotune=True) as backend:
        forward(backend)
    with machine.open() as backend:
        assert forward(backend).impl == "cudnn:eng10_k1=3"


def test_candidates_that_fail_are_not_measured(machine):
    machine.cudnn.engines = lambda: [
        EngineDouble("eng1", seconds=1e-4, launches=False),
        EngineDouble("eng2", seconds=1e-4, builds=False),
        EngineDouble("eng3"),
    ]
    with machine.open(autotune=True) as backend:
        assert forward(backend).impl == "cudnn:eng3"
        machine.cudnn.engines = lambda: [EngineDouble("eng1", launches=False)]
        with pytest.raises(KernelError, match="CUDNN_STATUS_EXECUTION_FAILED at launch; allow precision tf32, or"):
            forward(backend, samples=3)


def test_the_workspace_of_a_measurement_is_not_held(machine):
    with machine.open(autotune=True) as backend:
        forward(backend)
        assert backend.held_bytes == 0


def test_autotune_excludes_deterministic_mode(machine):
    message = r"expected autotune or deterministic mode, got both; .* switch one of them off"
    with pytest.raises(KernelError, match=message):
        machine.open(autotune=True, deterministic=True)


def test_strict_float32_refuses_rounded_factors():
    notes = Arithmetic().refused("float32")
    assert {"TENSOR_CORE", "DOWN_CONVERT_INPUTS", "FFT", "WINOGRAD"} <= set(notes) and "NONDETERMINISTIC" not in notes
    assert Arithmetic("tf32").refused("float32") == ()


def test_sixteen_bits_are_summed_in_float32():
    for dtype in ("float16", "bfloat16"):
        assert Arithmetic().refused(dtype) == ("REDUCED_PRECISION_REDUCTION",)
        assert Arithmetic("tf32").compute_type(dtype) == 68
    assert Arithmetic().refused("float64") == ()


def test_deterministic_mode_refuses_atomic_sums_of_every_dtype():
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        assert Arithmetic("strict", True).refused(dtype)[-1] == "NONDETERMINISTIC"


def test_arithmetic_of_matrix_products():
    assert Arithmetic().compute_type("float32") == 68 and Arithmetic("tf32").compute_type("float32") == 77
    assert Arithmetic("tf32").compute_type("float64") == 70


def truncated(a):
    """Return values that are truncated from float32 to TF32, without rounding."""
    return (a.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def test_the_bound_of_tf32_is_that_of_an_engine_that_truncates():
    """The error of engines that truncate to TF32 is within the bound, but above 1e-3; rounding would halve it."""
    worst, (case,) = 0.0, (c for c in CASES if c.name == "depthwise x2")
    xs, ws, _, ys = case.shapes
    with get_backend("numpy") as numpy:
        for seed in range(10):
            random = np.random.default_rng(seed)
            x, w = (random.standard_normal(shape).astype(np.float32).astype(np.float64) for shape in (xs, ws))
            exact, found = np.empty(ys), np.empty(ys)
            numpy.conv_forward(x, w, None, exact, case.geometry)()
            numpy.conv_forward(truncated(x), truncated(w), None, found, case.geometry)()
            worst = np.maximum(worst, np.abs(found - exact).max() / np.abs(exact).max())  # NaN stays NaN
    assert 1e-3 < worst <= BOUNDS["tf32"]


def test_unknown_precision_is_refused():
    with pytest.raises(
        KernelError, match=r"^expected a precision out of strict, tf32, got 'bf16'; choose one \(float16"
    ):
        Arithmetic("bf16")


def test_what_the_log_says():
    strict, fast = Arithmetic().describe("float32"), Arithmetic("tf32").describe("float32")
    assert strict == 'float32 without tensor cores (backend.precision = "tf32" to use them: factors of 11 bits)'
    assert fast.startswith("float32 on tensor cores (TF32: ") and 'backend.precision = "strict"' in fast
    assert {Arithmetic(p).describe(d) for p in ("strict", "tf32") for d in ("float64", "bfloat16", "float16")} == {""}


def test_packed_arrays_have_numpys_strides():
    for shape in ((2, 3, 4, 5), (1, 1, 7), (3, 2, 2, 2, 6)):
        strides = np.empty(shape, np.int8).strides
        assert packed_strides(shape) == strides
        tensor = Tensor.packed(shape)
        assert tensor.dims == (shape[0], shape[-1], *shape[1:-1])
        assert tensor.strides == (strides[0], strides[-1], *strides[1:-1]) and tensor.is_packed


def test_leading_rows_of_one_sample_are_packed():
    one, two = (Tensor.leading((n, 8, 5, 3), (6, 5)) for n in (1, 2))
    assert one.is_packed and one.strides == (90, 1, 15, 3)
    assert not two.is_packed and two.strides == (120, 1, 15, 3)
    assert not Tensor.leading((1, 8, 5, 3), (8, 4)).is_packed


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_cudnn_is_told_gives_the_same_outputs(case):
    s = Shapes.of(*(shape for shape in (case.shapes[0], case.shapes[1], case.shapes[3])), case.geometry)
    assert min(*s.before, *s.after) >= 0 and len(s.x.dims) >= 4
    outputs = tuple(
        (n + lo + hi - d * (k - 1) - 1) // stride + 1
        for n, lo, hi, k, stride, d in zip(s.x.dims[2:], s.before, s.after, s.w.dims[2:], s.stride, s.dilation)
    )
    assert outputs == s.y.dims[2:]
    assert s.x.dims[1] == s.w.dims[1] * case.geometry.groups


def test_dropped_rows_are_left_out_only_where_they_matter():
    """For every small geometry of one axis, the selected part without negative padding gives the same outputs."""
    for n, k, s, d, lo, hi in itertools.product((5, 8), (1, 3, 4), (1, 2, 3), (1, 2), (0, 1), (-2, -1, 0, 1)):
        geometry = Geometry.of((k,), s, ((lo, hi),), d)
        (part,), read = read_part((n,), geometry)
        ((_, behind),) = read.padding
        outputs = geometry.output_shape((n,))
        if outputs == (0,):
            continue
        assert behind == max(0, hi)
        assert Geometry.of((k,), s, ((lo, behind),), d).output_shape((part,)) == outputs
        if hi >= 0:
            assert part == n
        elif Geometry.of((k,), s, ((lo, 0),), d).output_shape((n,)) == outputs:
            assert part == n, "the stride skips them anyway"
        else:
            assert part == n + hi


def test_one_axis_becomes_two():
    s = Shapes.of((2, 11, 5), (7, 4, 5), (2, 5, 7), Geometry.of((4,), 2, ((2, 1),), dilation=2))
    assert s.x.dims == (2, 5, 1, 11) and s.w.dims == (7, 5, 1, 4) and s.y.dims == (2, 7, 1, 5)
    assert (s.before, s.after, s.stride, s.dilation, s.part) == ((0, 2), (0, 1), (1, 2), (1, 2), (11,))
