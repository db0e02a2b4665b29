"""Tests of oneDNN alone: bfloat16, algorithms, delegated and rejected kernels, and guard bytes around all memory."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
import threadpoolctl

from halograd.kernels import Geometry, Kernel, KernelError, get_backend
from halograd.kernels import numpy as numpy_kernels
from halograd.kernels.guards import GUARDS, SIDE, GuardError, Guards, guarded_bytes
from halograd.kernels.kernel import BatchNormArrays, ScratchKernel
from halograd.kernels.memory import Scratch, aligned_empty
from halograd.kernels.onednn import DELEGATED, OnednnBackend, conv, faults, taps
from halograd.kernels.onednn import norm as onednn_norm
from halograd.kernels.onednn.abi import Abi, DnnlError
from halograd.kernels.onednn.program import PrimitiveList, ReferenceOnly
from tests.harness.limits import scaled

from . import reference
from .conftest import EPS, Arrays, assert_close
from .every import G2, G, norm, text_of
from .geometries import CASES, Case
from .random_geometries import examine
from .test_convolution import check


def refuse(monkeypatch, impl="ref:any"):
    monkeypatch.setattr(Abi, "implementation", lambda self, descriptor: impl)


# ---------------------------------------------------------------------- bfloat16
@pytest.mark.parametrize("master", ["bfloat16", "float32"], ids=["bf16 weights", "f32 weights"])
@pytest.mark.parametrize("case", [c for c in CASES if c.geometry.groups == 1][:11], ids=str)
def test_bfloat16(onednn, case, master):
    """In bfloat16, products are summed in float32 and rounded once at the end; float32 masters are rounded before."""
    a, g, (xs, ws, bs, ys) = Arrays(onednn, ml_dtypes.bfloat16), case.geometry, case.shapes
    dtype = ml_dtypes.bfloat16 if master == "bfloat16" else np.float32
    x, dy, w, b = a.draw(*xs), a.draw(*ys), a.draw(*ws, dtype=dtype), a.draw(*bs, dtype=dtype)
    y, dx, dw, db = a.poisoned(*ys), a.poisoned(*xs), a.poisoned(*ws, dtype=dtype), a.poisoned(*bs, dtype=dtype)
    kernels = [
        onednn.conv_forward(x, w, b, y, g),
        onednn.conv_backward_data(dy, w, dx, g),
        onednn.conv_backward_filter(x, dy, dw, db, g),
    ]
    for kernel in kernels:
        kernel()
    rounded = w.astype(ml_dtypes.bfloat16)
    expected = [
        (y, reference.conv(x, rounded, b, g, ys), math.prod(ws[1:])),
        (dx, reference.conv_data(dy, rounded, g, xs), math.prod(g.kernel) * ws[0]),
        (dw, reference.conv_filter(x, dy, g, ws), math.prod(ys[:-1])),
        (db, dy.astype(np.float64).sum(axis=tuple(range(dy.ndim - 1))), math.prod(ys[:-1])),
    ]
    for got, want, terms in expected:
        scale = max(1.0, float(np.abs(want).max()))
        bound = EPS[np.dtype(got.dtype)] * scale + 4 * EPS[np.dtype(np.float32)] * terms * scale
        found = got.astype(np.float64)
        assert not np.isnan(found).any()
        assert np.abs(found - want).max() <= bound


def test_other_dtypes_with_bfloat16(onednn):
    a = Arrays(onednn, ml_dtypes.bfloat16)
    x, w = a.draw(2, 4, 4, 16), a.draw(16, 3, 3, 16, dtype=np.float64)
    text = text_of(lambda: onednn.conv_forward(x, w, None, x, G))
    assert "expected weights of dtype bfloat16 or float32 with arrays of bfloat16, got float64" in text


# ---------------------------------------------------------------------- algorithms
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_algorithm_is_right(onednn, case, monkeypatch):
    """Each candidate algorithm of a convolution is right, not only the fastest, and products by taps also in blocks."""
    tried = []
    for name in ("packed", "blocked", "taps", "taps in blocks"):
        if name == "taps in blocks":
            monkeypatch.setattr(taps, "BLOCK_BYTES", 1)

        def only(candidates, name=name):
            build = candidates.get(name.split()[0], candidates["packed"])
            tried.append(name)
            try:
                return build().kernel()
            except ReferenceOnly:
                return candidates["packed"]().kernel()

        monkeypatch.setattr(onednn._choice, "_first", only)
        check(Arrays(onednn, np.float32), case)
    assert len(tried) == 12


def test_taps_are_used_where_they_can_be(onednn):
    a, usable = Arrays(onednn, np.float32), []
    for case in CASES:
        xs, ws, _, ys = case.shapes
        try:
            taps.backward_filter_by_taps(
                onednn._engine, a.draw(*xs), a.draw(*ys), a.draw(*ws), None, case.geometry
            ).close()
            usable.append(case)
        except ReferenceOnly as error:
            assert "expected one group" in str(error)
    assert usable == [c for c in CASES if c.geometry.groups == 1]


def test_filter_gradients_are_chosen_by_instruction_set(onednn, monkeypatch):
    """The algorithm of a filter gradient depends on shapes and instruction set alone, and not on a measurement."""

    def by_taps(x, y, kernel, stride, isa, groups=1):
        """Return the rule for images of zeros, which take no memory."""
        images = [np.broadcast_to(np.float32(0), shape) for shape in (x, y)]
        images = [SimpleNamespace(shape=a.shape, nbytes=a.size * 4) for a in images]
        geometry = Geometry.of(kernel, stride=stride, padding=kernel[0] // 2, groups=groups)
        return taps.preferred(*images, geometry, isa)

    narrow, wide = "AVX2", "AVX-512-BF16"
    middle, large = ((1, 128, 128, 48),) * 2, ((1, 256, 256, 64),) * 2
    assert by_taps(*middle, (3, 3), 1, narrow) and not by_taps(*middle, (3, 3), 1, wide)
    assert by_taps(*large, (3, 3), 1, wide)
    assert not by_taps(*large, (3, 3), 1, narrow, groups=2)
    for isa in (narrow, wide):
        assert by_taps((1, 128, 128, 48), (1, 64, 64, 64), (3, 3), 2, isa)
        assert not by_taps((1, 224, 224, 3), (1, 112, 112, 64), (7, 7), 2, isa), "first layers have few columns"
        assert not by_taps((1, 56, 56, 64), (1, 56, 56, 64), (1, 1), 1, isa)
        assert by_taps((1, 56, 56, 64), (1, 56, 56, 2), (1, 1), 1, isa), "few filters"
        assert by_taps((1, 14, 14, 1024), (1, 14, 14, 512), (1, 1), 1, isa), "many weights"
        assert not by_taps((1, 8, 8, 8, 256), (1, 8, 8, 8, 256), (3, 3, 3), 1, isa), "small blocks are extended too far"

    a, impls = Arrays(onednn, np.float32), []
    for isa in (narrow, wide):
        monkeypatch.setattr(onednn, "instruction_set", isa)
        x, dy, dw = a.draw(1, 12, 12, 16), a.draw(1, 12, 12, 16), a.draw(16, 3, 3, 16)
        impls.append(onednn.conv_backward_filter(x, dy, dw, None, G).impl)
    assert impls[0] == taps.backward_filter_by_taps(onednn._engine, x, dy, dw, None, G).kernel().impl != impls[1]


def test_autotune_measures_once_per_shape(onednn):
    with get_backend("onednn", autotune=True) as backend:
        a, case = Arrays(backend, np.float32), CASES[1]
        check(a, case)
        found = backend.autotuned()
        assert {key[0] for key in found} == {"forward", "backward data", "backward filter"}
        by_pass = {key[0]: times for key, times in found.items()}
        assert set(by_pass["forward"]) == {"packed", "blocked"}
        assert set(by_pass["backward filter"]) == {"packed", "blocked", "taps"}
        for times in found.values():
            assert list(times.values()) == sorted(times.values()) and min(times.values()) > 0
        before = {key: dict(times) for key, times in found.items()}
        check(a, case)
        assert backend.autotuned() == before
        check(a, CASES[2])
        assert len(backend.autotuned()) == 6


def test_autotune_gives_other_bits(onednn):
    with pytest.raises(KernelError, match=r"expected autotune or deterministic mode, got both; .* one of them off"):
        get_backend("onednn", autotune=True, deterministic=True)


def test_autotune_takes_the_fastest(onednn, monkeypatch):
    import halograd.kernels.onednn.conv as autotune

    order = []

    def slow_first(kernel, clock):
        order.append(kernel.impl)
        return 1.0 / len(order)

    monkeypatch.setattr(autotune, "measure", slow_first)
    with get_backend("onednn", autotune=True) as backend:
        a, (xs, ws, _, ys) = Arrays(backend, np.float32), CASES[1].shapes
        kernel = backend.conv_backward_filter(a.draw(*xs), a.draw(*ys), a.poisoned(*ws), None, CASES[1].geometry)
        times = {1.0 / (at + 1): impl for at, impl in enumerate(order)}
        assert len(order) == 3 and kernel.impl == times[min(times)]
        # Candidates may share an implementation, which depends on the processor: the name of the choice is certain.
        ((_, found),) = backend.autotuned().items()
        assert next(iter(found)) == "taps" and min(found.values()) == found["taps"]


# ---------------------------------------------------------------------- refused and delegated
def test_slow_kernels_are_numpys(onednn, monkeypatch):
    """Products that oneDNN would compute by its slow reference run in NumPy, and are recorded for a warning."""
    a, b = Arrays(onednn, np.float32), onednn
    x, w, y = a.draw(1, 4, 4, 8), a.draw(8, 3, 3, 8), a.draw(1, 4, 4, 8)
    m, k, n = a.draw(2, 3), a.draw(4, 3), a.draw(2, 4)
    refuse(monkeypatch)
    onednn.take_substitutes()
    kernels = {
        "conv_forward": b.conv_forward(x, w, None, y, G),
        "conv_backward_data": b.conv_backward_data(y, w, x, G),
        "conv_backward_filter": b.conv_backward_filter(x, y, w, None, G),
        "dense_forward": b.dense_forward(m, k, None, n),
        "dense_backward_data": b.dense_backward_data(n, k, m),
        "dense_backward_filter": b.dense_backward_filter(m, n, k, a.draw(4)),
    }
    assert [kernel.impl for kernel in kernels.values()] == ["numpy:im2col"] * 3 + ["numpy:gemm"] * 3
    found = onednn.take_substitutes()
    assert [s.what for s in found] == list(kernels)
    for substitute in found:
        kind = "convolution_" if substitute.what.startswith("conv") else "matmul"
        assert substitute.by == "numpy" and f"has only the slow ref:any of {kind}" in substitute.reason
    assert onednn.take_substitutes() == []


def test_batch_norms_of_large_blocks_are_numpys(onednn, monkeypatch):
    """oneDNN's primitive ends the process with arrays of 2 GiB; here the bound is that of a small array."""
    a = Arrays(onednn, np.float32)
    given = norm(a, (2, 8, 8, 16))
    assert onednn.batch_norm(BatchNormArrays(**given)).forward.impl.startswith("onednn:")
    monkeypatch.setattr(onednn_norm, "LARGEST", given["x"].nbytes)
    assert onednn.batch_norm(BatchNormArrays(**given)).forward.impl.startswith("numpy:")


def test_slow_convolutions_in_bfloat16_are_those_of_float32(onednn, monkeypatch):
    a = Arrays(onednn, ml_dtypes.bfloat16)
    x, w, y = a.draw(1, 4, 4, 8), a.draw(8, 3, 3, 8), a.poisoned(1, 4, 4, 8)
    monkeypatch.setattr(OnednnBackend, "_reason", lambda self, dtype: "")
    refuse(monkeypatch)
    with get_backend("onednn") as backend:
        kernel = backend.conv_forward(x, w, None, y, G)
        kernel()
        assert kernel.impl.startswith("float32(numpy:") and not np.isnan(y.astype(np.float32)).any()
        assert [(s.what, s.by) for s in backend.take_substitutes()] == [
            ("conv_forward", "float32"),
            ("conv_forward", "numpy"),
        ]


def test_delegation_is_named(onednn):
    """The delegated kernels run in NumPy, as `impl` shows; for convolutions oneDNN's own choice decides."""
    a, b = Arrays(onednn, np.float32), onednn
    x, y = a.draw(2, 8, 8, 16), a.draw(2, 6, 6, 16)
    dilated = Geometry.of((2, 2), 1, 0, dilation=2)
    delegated = {
        "max_pool": b.max_pool(x, y, None, None, dilated)[0],
        "average_pool": b.average_pool(x, y, None, None, dilated, True)[0],
        "batch_norm": b.batch_norm(BatchNormArrays(**norm(a, (1, 7)))).forward,
        "activation": b.activation("relu", x[:, 1:], x[:, 1:], None, None)[0],
        "add": b.add([x], a.draw(2, 8, 8, 16)),
    }
    assert set(delegated) | {"convolution", "dense"} == set(DELEGATED)
    for kernel in delegated.values():
        assert kernel.impl.startswith("numpy:")
    assert b.batch_norm(BatchNormArrays(**norm(a, (1, 3, 5, 18)))).forward.impl.startswith("numpy:")
    half = a.draw(2, 4, 4, 16)
    fast = [
        b.max_pool(x, half, None, None, G2)[0],
        b.average_pool(x, half, None, None, G2, True)[0],
        b.batch_norm(BatchNormArrays(**norm(a, (2, 8, 8, 16)))).forward,
        b.activation("relu", x, x, None, None)[0],
        b.add([x, x + 1], a.draw(2, 8, 8, 16)),
    ]
    for kernel in fast:
        assert kernel.impl.startswith("onednn:")


def test_statistics_of_odd_channels_are_fast_too(onednn):
    a = Arrays(onednn, np.float32)
    for channels in (18, 3, 24, 1):
        kernels = onednn.batch_norm(BatchNormArrays(**norm(a, (1, 32, 8, channels), local=False)))
        for kernel in (kernels.forward, kernels.backward_data):
            assert kernel.impl.startswith("onednn:") and "ref" not in kernel.impl and "numpy" not in kernel.impl


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("drop", [(-1, 0), (-2, 0), (0, -3), (-2, -1)], ids=str)
@pytest.mark.parametrize("stride", [1, 2])
def test_dropped_rows(onednn, samples, drop, stride):
    """Rows that a negative padding removes are left out with zero gradient; oneDNN itself rejects -stride or less."""
    geometry = Geometry.of((3, 3), stride, ((1, drop[0]), (0, drop[1])))
    check(Arrays(onednn, np.float32), Case("dropped", geometry, (9, 10), samples, 16, 16))


@pytest.mark.parametrize(
    "rows, plane",
    [
        # With a padding of -1, oneDNN's AVX2 gradient of weights read an output after the last one.
        *(((3, 2, 2, -1, 3), (6,)), ((3, 2, 3, -2, 4), (6,)), ((3, 1, 2, -1, 4), (6,)), ((2, 1, 3, -2, 4), (6,))),
        # With few rows and wide padding its AVX-512 gradient of 3-D weights is wrong: another implementation is used.
        *(((4, 3, 2, 2, 3), (5, 5)), ((5, 4, 1, 1, 2), (5, 5)), ((7, 3, 2, 2, 6), (5, 5)), ((5, 4, 3, 3, 6), (5, 5))),
    ],
    ids=str,
)
def test_gradients_of_weights_of_unusual_padding(onednn, rows, plane):
    """With unusual padding, the weight gradient does not read memory after the output gradient."""
    kernel, lo, stride, hi, extent = rows
    window = (kernel, *(3 for _ in plane))
    geometry = Geometry.of(window, (stride, *(1 for _ in plane)), ((lo, hi), *((1, 1) for _ in plane)))
    a, xs = Arrays(onednn, np.float32), (1, extent, *plane, 16)
    ys = (1, *geometry.output_shape(xs[1:-1]), 16)
    around = onednn.empty((2 * math.prod(ys),), np.float32)
    around.fill(np.nan)
    dy = around[: math.prod(ys)].reshape(ys)
    x, dw, dy[...] = a.draw(*xs), a.poisoned(16, *window, 16), a.draw(*ys)
    onednn.conv_backward_filter(x, dy, dw, None, geometry)()
    assert_close(dw, reference.conv_filter(x, dy, geometry, dw.shape), math.prod(ys[:-1]))


# ---------------------------------------------------------------------- the library
def fake(major, runtime):
    version = SimpleNamespace(major=major, minor=1, patch=0, cpu_runtime=runtime)

    def dnnl_version():
        return SimpleNamespace(contents=version)

    return SimpleNamespace(dnnl_version=dnnl_version)


@pytest.mark.parametrize(
    "major, runtime, words",
    [
        (2, 2, "expected oneDNN 3, got 2.1.0 in lib; set DNNL_LIB"),
        (3, 512, "expected a oneDNN built for OpenMP, TBB or one thread, got CPU runtime 512 in lib"),
    ],
    ids=["another version", "asynchronous"],
)
def test_libraries_that_are_refused(major, runtime, words):
    assert words in text_of(lambda: Abi(fake(major, runtime), "lib"))


def test_error_codes_are_words(onednn):
    with pytest.raises(DnnlError, match=r"oneDNN: dnnl_memory_desc_create_with_strides: invalid arguments") as caught:
        PrimitiveList(onednn._engine).desc((-1,), np.float32, (1,))
    assert caught.value.status == 2


def test_library_is_looked_for_in_order(monkeypatch):
    from halograd.kernels.onednn import abi as library

    monkeypatch.delenv("DNNL_LIB", raising=False)
    monkeypatch.setenv("CONDA_PREFIX", "/opt/conda")
    own, conda, plain = library.candidates()
    assert own.endswith("lib/libdnnl.so.3") and conda == "/opt/conda/lib/libdnnl.so.3" and plain == "libdnnl.so.3"
    monkeypatch.setenv("DNNL_LIB", "/site/libdnnl.so")
    assert library.candidates() == ["/site/libdnnl.so"]


def test_one_pool_of_threads(onednn):
    def blas() -> set[int]:
        # Without libraries that were loaded later, such as another BLAS of SciPy.
        return {p["num_threads"] for p in numpy_kernels._loaded().info() if p["user_api"] == "blas"}

    before = blas()
    with threadpoolctl.threadpool_limits(2, user_api="blas"):
        if blas() == {1}:
            pytest.skip("needs a BLAS with more than one thread")
        with get_backend("onednn", threads=2) as backend:
            assert blas() == {1} and backend.threads == 2
        assert blas() == {2}
        with get_backend("numpy", threads=1) as backend:
            assert blas() == {1}
        assert blas() == {2}
        first, second = get_backend("numpy", threads=1), get_backend("onednn", threads=1)
        first.close()
        assert blas() == {1}, "the second is open still"
        second.close()
        assert blas() == {2}
    assert blas() == before


def test_two_threads(onednn):
    with get_backend("onednn", threads=2) as backend:
        check(Arrays(backend, np.float32), CASES[2])


def outside(array: np.ndarray, offset: int) -> np.ndarray:
    """Return a view of the byte at an offset from the beginning of an array."""
    raw = array
    while isinstance(raw.base, np.ndarray):
        raw = raw.base
    at = array.__array_interface__["data"][0] - raw.__array_interface__["data"][0] + offset
    return raw[at : at + 1]


@pytest.mark.parametrize("offset, where", [(-1, "in front of an array of 36 B"), (36, "after an array of 36 B")])
def test_a_write_outside_of_an_array_is_found_after_the_kernel(offset, where):
    array = aligned_empty((3, 3), np.float32)
    assert array.__array_interface__["data"][0] % 64 == 0
    array.fill(1)
    GUARDS.check()
    byte = outside(array, offset)
    kernel = Kernel(lambda: byte.fill(7), "vendor:fast")
    GUARDS.each_kernel = True
    GUARDS.operation = "layer 'a'"
    kernel()
    with pytest.raises(GuardError, match=f"layer 'a': vendor:fast wrote .*: 1 bytes {where}"):
        GUARDS.check()
    GUARDS.check()  # the guard bytes are restored


def test_a_write_after_scratch_memory_is_found_although_it_is_shared():
    scratch = Scratch(aligned_empty)
    scratch.reserve(1 << 20)
    first = ScratchKernel(lambda: lambda: scratch.view((1,), np.uint8, 100).fill(7), scratch, 100, "vendor:first")
    other = ScratchKernel(lambda: lambda: scratch.view((200,), np.uint8).fill(7), scratch, 200, "vendor:other")
    other()
    GUARDS.check()
    first()
    with pytest.raises(GuardError, match=r"vendor:first .*: 1 bytes after its scratch memory of 100 B, the first 0 B"):
        GUARDS.check()


def test_nothing_is_guarded_outside_of_the_context():
    guards = Guards()
    assert not guards.active
    with guards, guards:
        assert guards.active
    assert not guards.active
    assert guarded_bytes(1) > SIDE


def thin(backend, channels: int, extents=(64, 64), stride=(2, 2)):
    """Build a kernel for the weight gradient of a strided 1 x 1 convolution."""
    outputs = tuple(n // s for n, s in zip(extents, stride))
    geometry = Geometry((1,) * len(extents), stride, (1,) * len(extents), ((0, 0),) * len(extents))
    x, dy, dw = ((1, *extents, channels), (1, *outputs, 8), (8, *(1,) * len(extents), channels))
    made = [backend.zeros(shape, np.float32) for shape in (x, dy, dw)]
    return backend.conv_backward_filter(*made, None, geometry)


@pytest.mark.parametrize("case", [((64, 64), (2, 2)), ((64, 64), (1, 2)), ((64, 64), (2, 1)), ((4096,), (2,))], ids=str)
def test_the_implementation_that_overruns_is_refused_exactly_where_it_does(onednn, case, monkeypatch):
    """An implementation that overruns is rejected for few channels; without this rule, the guards detect its writes."""
    kernel = thin(onednn, 3, *case)
    kernel()
    GUARDS.check()
    assert kernel.impl.startswith("onednn:") and "ref" not in kernel.impl and "jit_1x1" not in kernel.impl
    full = thin(onednn, 16, *case)
    full()
    GUARDS.check()
    monkeypatch.setattr(faults, "FAULTS", ())
    overrunning = thin(onednn, 3, *case)
    if "jit_1x1" not in overrunning.impl:
        pytest.skip(f"needs a processor on which oneDNN takes jit_1x1, got {overrunning.impl}")
    assert overrunning.impl == full.impl
    overrunning()
    with pytest.raises(GuardError, match=r"onednn:jit_1x1:\w+ wrote outside .*: \d+ bytes after a scratchpad"):
        GUARDS.check()


@pytest.mark.parametrize("impl, lanes", [("jit_1x1:avx2", 8), ("jit_1x1:avx512_core", 16)])
def test_the_refusal_is_for_channels_below_a_vector(impl, lanes):
    def gradient(channels: int, stride=(2, 2), channels_last=True, impl=impl) -> faults.Candidate:
        geometry = Geometry((1, 1), stride, (1, 1), ((0, 0), (0, 0)))
        return faults.Candidate(faults.GRADIENT, impl, channels, (8, 8), (4, 4), geometry, channels_last)

    assert [bool(faults.reason(gradient(c))) for c in (1, lanes - 1, lanes, lanes + 1)] == [True, True, False, False]
    assert not faults.reason(gradient(1, stride=(1, 1)))
    assert not faults.reason(gradient(1, channels_last=False))
    assert not faults.reason(gradient(1, impl="jit:avx2"))
    assert faults.margin_of(gradient(lanes)) == 4 * lanes * 16 and faults.margin_of(gradient(1, stride=(1, 1))) == 0


@pytest.mark.parametrize("filters", [1, 33])
@pytest.mark.parametrize("channels, dtype", [(1, "float32"), (1, "bfloat16"), (16, "bfloat16")])
def test_a_single_column_of_outputs_is_right(onednn, channels, dtype, filters):
    """Convolutions with one column of outputs are right; an implementation of oneDNN 3.7.1 is not."""
    a = Arrays(onednn, dtype)
    for stride in (1, 2, 3):
        geometry = Geometry((3, 4), (1, stride), (1, 1), ((1, 0), (0, 0)))
        x, w, y = a.draw(3, 12, 4, channels), a.draw(filters, 3, 4, channels), a.poisoned(3, 11, 1, filters)
        try:
            kernel = onednn.conv_forward(x, w, None, y, geometry)
        except KernelError as error:
            pytest.skip(f"needs a CPU with AVX-512 for bfloat16: {error}")
        kernel()
        assert_close(y, reference.conv(x, w, None, geometry, y.shape), 1 if dtype == "bfloat16" else 12 * channels)


def test_the_next_implementation_is_taken(onednn, monkeypatch):
    """Rejected implementations are skipped one by one; if all are rejected, the message has the reason."""
    x, dy, dw = (onednn.zeros(shape, np.float32) for shape in ((1, 8, 8, 24), (1, 4, 4, 8), (8, 1, 1, 24)))
    args = (onednn._engine, x, dy, dw, None, Geometry.of((1, 1), 2))
    names = []
    monkeypatch.setattr(conv, "reason", lambda candidate: names.append(candidate.impl) or "for a test")
    with pytest.raises(ReferenceOnly, match="is refused: for a test"):
        conv.backward_filter(*args)
    assert names
    for at, name in enumerate(names):
        refused = set(names[:at])
        if name not in refused:
            monkeypatch.setattr(conv, "reason", lambda c, refused=refused: "for a test" if c.impl in refused else "")
            assert conv.backward_filter(*args).impls == [name]
    monkeypatch.setattr(conv, "reason", lambda candidate: "for a test")
    onednn.take_substitutes()
    dw = onednn.zeros((8, 1, 1, 12), np.float32)  # of two groups, which products by taps do not compute
    kernel = onednn.conv_backward_filter(x, dy, dw, None, Geometry.of((1, 1), 2, groups=2))
    assert kernel.impl.startswith("numpy:")
    (substitute,) = onednn.take_substitutes()
    assert "is refused: for a test" in substitute.reason


def test_random_geometries_stay_within_their_memory():
    """Random geometries write only their own memory and are right; HALOGRAD_GEOMETRIES sets their number."""
    try:
        counts = examine(int(os.environ.get("HALOGRAD_GEOMETRIES", "210")))
    except KernelError as error:
        pytest.skip(f"needs oneDNN: {error}")
    assert not counts.overruns and not counts.wrong
    assert len(counts.kinds) == 5 and min(counts.kinds.values()) > 0


PROGRAM = """
import sys
import numpy as np
import halograd as hg
from mpi4py import MPI

channels, extents = int(sys.argv[1]), [int(n) for n in sys.argv[2:]]
with hg.Communicator(MPI.COMM_WORLD) as comm:
    for extent in extents:
        for name in ("numpy", "onednn"):
            x, t = hg.Input((extent, extent, channels), name="x"), hg.Input((extent // 2, extent // 2, 4), name="t")
            a = hg.Conv(4, 3, 2, 1, name="main", activation="relu")(x)
            a = hg.Conv(4, 3, 1, 1, name="main2")(a)
            y = a + hg.Conv(4, 1, stride=2, name="shortcut")(x)
            network = hg.Network({"prediction": y, "loss": hg.MeanSquaredError()(y, t)})
            with hg.get_backend(name) as kernels, hg.Executor(network, comm, kernels, batch=1) as executor:
                trainer = hg.Trainer(executor, hg.SGD(executor.store), hg.Constant(0.05))
                draw = np.random.default_rng(0)
                executor.set_input("x", draw.standard_normal((1, extent, extent, channels)))
                executor.set_input("t", draw.standard_normal((1, extent // 2, extent // 2, 4)))
                print(name, extent, *(trainer.step() for _ in range(5)), flush=True)
"""


@pytest.mark.parametrize("channels", [1, 3, 6])
def test_training_with_a_thin_strided_convolution(onednn, channels):
    """Training with a thin strided convolution works, in a separate process; an overrun once ended the process."""
    extents = ("64", "96", "128")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(channels), *extents], capture_output=True, text=True, timeout=scaled(120)
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = {tuple(line.split()[:2]): [float(v) for v in line.split()[2:]] for line in done.stdout.splitlines()}
    assert len(losses) == 2 * len(extents)
    for extent in extents:
        # Sums of up to 4,096 products in float32, in another order.
        np.testing.assert_allclose(losses["onednn", extent], losses["numpy", extent], rtol=1e-5)
