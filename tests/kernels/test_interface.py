"""Tests of properties of all kernels: errors, empty arrays, declared reads and writes, lifetime, padded channels."""

from __future__ import annotations

import gc
import logging
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import halograd as hg
import halograd.kernels.backends as choice
from halograd.errors import UserError
from halograd.kernels import ACTIVATIONS, Backend, BatchNormKernels, ClassTargets, DropoutMask, Geometry, get_backend
from halograd.kernels.access import ANY, Access, access_of, makes, reads, writes
from halograd.kernels.geometry import channels_in_memory
from halograd.kernels.kernel import BatchNormArrays
from halograd.kernels.memory import Scratch
from halograd.kernels.onednn import DELEGATED
from halograd.layers.strategy import Strategy
from halograd.lowering.operations import Run
from halograd.program.compiler import compile_program
from halograd.program.program import Target
from tests.harness.limits import LIMIT
from tests.kernels.every import G2, G, every_kernel, norm, text_of
from tests.layers.graphs import Graphs
from tests.support.lean import traced

from .conftest import Arrays, assert_close
from .reference import RELU


@pytest.mark.parametrize(
    "change, words",
    [
        ({"w": (16, 3, 3, 5)}, "expected weights of shape (16, 3, 3, 4), got (16, 3, 3, 5)"),
        ({"b": (4,)}, "expected bias of shape (16,), got (4,)"),
        ({"y": (2, 5, 6, 16)}, "expected an output of shape (2, 6, 6, 16) from an input of shape (2, 6, 6, 4)"),
        ({"x": (2, 6, 4)}, "expected input with 4 axes, got shape (2, 6, 4)"),
        ({"geometry": Geometry.of((3, 3), 1, 1, groups=3)}, "channels that 3 groups divide, got 4 in and 16 out"),
    ],
    ids=["weights", "bias", "output", "axes", "groups"],
)
def test_wrong_shapes_of_a_convolution(arrays, change, words):
    shapes = {"x": (2, 6, 6, 4), "w": (16, 3, 3, 4), "b": (16,), "y": (2, 6, 6, 16)}
    shapes |= {k: v for k, v in change.items() if k != "geometry"}
    made = {k: arrays.draw(*s) for k, s in shapes.items()}
    g = change.get("geometry", G)
    b = arrays.backend
    for what, call in (
        ("conv_forward", lambda: b.conv_forward(made["x"], made["w"], made["b"], made["y"], g)),
        ("conv_backward_data", lambda: b.conv_backward_data(made["y"], made["w"], made["x"], g)),
        ("conv_backward_filter", lambda: b.conv_backward_filter(made["x"], made["y"], made["w"], made["b"], g)),
    ):
        if "b" in change and what == "conv_backward_data":
            continue
        text = text_of(call)
        assert text.startswith(f"{what}: ") and words in text


def test_strided_arrays_are_refused(arrays):
    x, w, y = arrays.draw(2, 6, 6, 8), arrays.draw(8, 3, 3, 4), arrays.draw(2, 6, 6, 8)
    text = text_of(lambda: arrays.backend.conv_forward(x[..., :4], w, None, y, G))
    assert "expected input packed (C-contiguous), got shape (2, 6, 6, 4) with strides (1152, 192, 32, 4)" in text
    assert "copy it into a buffer of Backend.empty() first" in text
    rows = arrays.draw(2, 8, 6, 8)[:, 1:-1]
    for name in ("x", "y", "dy", "dx"):
        assert f"expected {name} packed" in text_of(
            lambda n=name: arrays.backend.batch_norm(BatchNormArrays(**norm(arrays, (2, 6, 6, 8), **{n: rows})))
        )
    pool = {"x": x, "y": arrays.draw(2, 3, 3, 8), "dy": arrays.draw(2, 3, 3, 8), "dx": rows}
    assert "expected dx packed" in text_of(lambda: arrays.backend.max_pool(**pool, geometry=G2))
    m = arrays.draw(4, 8)
    assert "expected input packed" in text_of(
        lambda: arrays.backend.dense_forward(m[:, ::2], arrays.draw(3, 4), None, arrays.draw(4, 3))
    )


def test_mixed_dtypes_are_refused(arrays):
    x, y = arrays.draw(2, 6, 6, 4), arrays.draw(2, 6, 6, 4, dtype=np.float64)
    w = arrays.draw(4, 3, 3, 4)
    text = text_of(lambda: arrays.backend.conv_forward(x, w, None, y, G))
    assert "conv_forward: expected arrays of one dtype, got" in text and "output float64" in text
    assert "expected arrays of one dtype" in text_of(lambda: arrays.backend.add([x], y))


def test_unknown_dtype_is_refused_with_the_remedy(arrays):
    x, w = arrays.draw(2, 6, 6, 4, dtype=np.int32), arrays.draw(4, 3, 3, 4, dtype=np.int32)
    text = text_of(lambda: arrays.backend.conv_forward(x, w, None, x, G))
    assert "got int32; use float32" in text


def test_float64_is_refused_by_onednn(backends):
    backend = backends("onednn")
    a = Arrays(backend, np.float64)
    x, w = a.draw(2, 6, 6, 4), a.draw(4, 3, 3, 4)
    text = text_of(lambda: backend.conv_forward(x, w, None, x, G))
    assert "got float64; use float32, or the backend numpy for float64" in text
    text = text_of(lambda: backend.add([x], x))
    assert "expected dtype float32 or float16 or bfloat16, got float64" in text


def test_wrong_arguments_of_a_pooling(arrays):
    b, x, y = arrays.backend, arrays.draw(2, 6, 6, 4), arrays.draw(2, 3, 3, 4)
    assert "max_pool: expected both dy and dx or neither" in text_of(lambda: b.max_pool(x, y, y, None, G2))
    assert "expected an output of shape (2, 3, 3, 4)" in text_of(lambda: b.max_pool(x, x, None, None, G2))
    other = arrays.draw(2, 3, 3, 5)
    assert "as many channels in x as in y, got 4 and 5" in text_of(
        lambda: b.average_pool(x, other, None, None, G2, True)
    )
    text = text_of(lambda: b.average_pool(x, y, other, x, G2, True))
    assert "expected arrays of one shape, got y (2, 3, 3, 4), dy (2, 3, 3, 5)" in text


def test_wrong_arguments_of_a_batch_norm(arrays):
    b = arrays.backend
    assert "expected eps > 0, got 0" in text_of(lambda: b.batch_norm(BatchNormArrays(**norm(arrays, eps=0))))
    assert "expected gamma of shape (16,), got (8,)" in text_of(
        lambda: b.batch_norm(BatchNormArrays(**norm(arrays, gamma=arrays.draw(8))))
    )
    sums = arrays.draw(2, 16)
    assert "expected sums of dtype float64, got float32" in text_of(
        lambda: b.batch_norm(BatchNormArrays(**norm(arrays, sums=sums)))
    )
    mean = arrays.draw(16, dtype=np.float64)
    assert "expected mean of dtype float32 or float32, got float64" in text_of(
        lambda: b.batch_norm(BatchNormArrays(**norm(arrays, mean=mean)))
    )
    assert "batch_norm: expected both dy and dx or neither" in text_of(
        lambda: b.batch_norm(BatchNormArrays(**norm(arrays, dx=None)))
    )
    flat = {k: arrays.draw(16) for k in ("x", "y", "dy", "dx")}
    assert "expected x of shape (N, *spatial, C), got (16,)" in text_of(
        lambda: b.batch_norm(BatchNormArrays(**norm(arrays, **flat)))
    )


def test_wrong_arguments_of_elementwise_and_dense(arrays):
    b, x, y = arrays.backend, arrays.draw(4, 6), arrays.draw(4, 6)
    assert f"expected one of {', '.join(ACTIVATIONS)}, got 'swish'" in text_of(
        lambda: b.activation("swish", x, y, None, None)
    )
    assert "expected separate x and y for the gradient of gelu" in text_of(lambda: b.activation("gelu", x, x, y, y))
    assert "expected separate x and y for the gradient of leaky_relu" in text_of(
        lambda: b.activation("leaky_relu", x, x, y, y, -0.5)
    )
    assert "expected alpha >= 0 of elu, got -1" in text_of(lambda: b.activation("elu", x, y, None, None, -1))
    assert "activation: expected both dy and dx or neither" in text_of(lambda: b.activation("relu", x, y, y, None))
    assert "expected arrays of one shape" in text_of(lambda: b.activation("relu", x, arrays.draw(4, 5), None, None))
    assert "expected at least one array to add, got none" in text_of(lambda: b.add([], y))
    assert "expected arrays of one shape, got xs[0] (4, 6), y (4, 5)" in text_of(lambda: b.add([x], arrays.draw(4, 5)))
    w = arrays.draw(3, 6)
    assert "expected weights of shape (6, 6), got (3, 6)" in text_of(lambda: b.dense_forward(x, w, None, y))
    assert "expected output of shape (4, 3), got (5, 3)" in text_of(
        lambda: b.dense_forward(x, w, None, arrays.draw(5, 3))
    )
    assert "expected bias of shape (3,), got (6,)" in text_of(
        lambda: b.dense_forward(x, w, arrays.draw(6), arrays.draw(4, 3))
    )
    assert "expected input with 2 axes, got shape (4, 6, 1)" in text_of(
        lambda: b.dense_forward(arrays.draw(4, 6, 1), w, None, arrays.draw(4, 3))
    )


def test_wrong_geometry():
    assert "for the same 1, 2 or 3 spatial axes, got (3, 3), (1,)" in text_of(
        lambda: Geometry((3, 3), (1,), (1, 1), ((0, 0),) * 2)
    )
    assert "for the same 1, 2 or 3 spatial axes" in text_of(lambda: Geometry.of((1, 1, 1, 1)))
    assert "of at least 1, got (3, 3), (0, 1), (1, 1), 1" in text_of(lambda: Geometry.of((3, 3), (0, 1)))
    assert "expected a padding of at least 0 before the first row, got ((-1, 0),)" in text_of(
        lambda: Geometry.of((3,), 1, ((-1, 0),))
    )
    assert "expected 2 spatial extents for the kernel (3, 3), got (5,)" in text_of(lambda: G.output_shape((5,)))


# ---------------------------------------------------------------------- geometry
def test_output_shape_by_counting():
    for n in range(8):
        for k in range(1, 4):
            for s in range(1, 4):
                for lo, hi in ((0, 0), (1, 2), (2, -1), (0, -3)):
                    for d in (1, 2):
                        fits = sum(1 for o in range(20) if o * s + d * (k - 1) < n + lo + hi)
                        assert Geometry.of((k,), s, ((lo, hi),), d).output_shape((n,)) == (fits,)


# ---------------------------------------------------------------------- ranks with nothing
@pytest.mark.parametrize("shape", [(0, 6, 6, 4), (2, 0, 6, 4), (0, 0, 0, 0)], ids=str)
def test_ranks_with_nothing(arrays, shape):
    """On a rank with an empty block, outputs are empty and sums zero, for any channel count of the block."""
    b, nothing = arrays.backend, arrays.draw(*shape)
    w, bias = arrays.draw(8, 3, 3, 4), arrays.draw(8)
    dw, db = arrays.poisoned(8, 3, 3, 4), arrays.poisoned(8)
    for kernel in (
        b.conv_forward(nothing, w, bias, nothing, G),
        b.conv_backward_data(nothing, w, nothing, G),
        b.conv_backward_filter(nothing, nothing, dw, db, G),
        *b.max_pool(nothing, nothing, nothing, nothing, G2),
        *b.average_pool(nothing, nothing, nothing, nothing, G2, True),
        *b.activation("gelu", nothing, nothing, nothing, nothing),
        b.add([nothing, nothing], nothing),
    ):
        kernel()
        kernel.close()
    assert not dw.any() and not db.any()


@pytest.mark.parametrize("local", [False, True], ids=["sums", "local"])
def test_batch_norm_of_a_rank_with_nothing(arrays, local):
    nothing = arrays.draw(0, 4, 4, 16)
    empty = dict.fromkeys(("x", "y", "dy", "dx"), nothing)
    args = norm(arrays, local=local, **empty)
    kernels = arrays.backend.batch_norm(BatchNormArrays(**args))
    kernels.statistics()
    kernels.forward()
    if not local:
        assert not args["sums"].any()
        args["sums"].fill(np.nan)
    kernels.backward_sums()
    kernels.backward_data()
    assert not args["sums"].any()
    assert isinstance(kernels, BatchNormKernels)
    kernels.close()


def test_outputs_without_inputs(arrays):
    """Outputs without inputs are right: a window with padding only, and a gradient that no output reaches."""
    b, nothing = arrays.backend, arrays.draw(1, 0, 5, 4)
    w, bias, y = arrays.draw(8, 3, 3, 4), arrays.draw(8), arrays.poisoned(1, 2, 5, 8)
    b.conv_forward(nothing, w, bias, y, G, RELU)()
    assert_close(y, np.broadcast_to(np.maximum(bias, 0), y.shape).astype(np.float64), 1)
    b.conv_forward(nothing, w, None, y, G)()
    assert not y.any()
    dw, db, dy = arrays.poisoned(8, 3, 3, 4), arrays.poisoned(8), arrays.draw(1, 2, 5, 8)
    b.conv_backward_filter(nothing, dy, dw, db, G)()
    assert not dw.any()
    assert_close(db, dy.astype(np.float64).sum(axis=(0, 1, 2)), 10)
    dx = arrays.poisoned(1, 4, 5, 4)
    b.conv_backward_data(arrays.draw(1, 0, 5, 8), w, dx, G)()
    assert not dx.any()
    b.max_pool(nothing, y, None, None, G2)[0]()
    assert np.isneginf(y).all()
    b.average_pool(nothing, y, None, None, G2, True)[0]()
    assert not y.any()


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_the_bias_gradient_without_inputs_keeps_its_digits(backend, dtype):
    """The bias gradient of many outputs of padding is as accurate as with inputs."""
    a = Arrays(backend, dtype)
    dw, db, dy = a.poisoned(8, 3, 3, 4), a.poisoned(8), backend.empty((1, 2, 100_000, 8), dtype)
    dy.fill(0.3)
    backend.conv_backward_filter(a.draw(1, 0, 100_000, 4), dy, dw, db, G)()
    assert not dw.any()
    assert_close(db, np.full(8, float(dy[0, 0, 0, 0]) * 200_000), 4, scale=float(dy[0, 0, 0, 0]) * 200_000)


def test_dense_of_a_rank_with_nothing(arrays):
    b, w = arrays.backend, arrays.draw(3, 5)
    dw, db = arrays.poisoned(3, 5), arrays.poisoned(3)
    b.dense_forward(arrays.draw(0, 5), w, arrays.draw(3), arrays.draw(0, 3))()
    b.dense_backward_data(arrays.draw(0, 3), w, arrays.draw(0, 5))()
    b.dense_backward_filter(arrays.draw(0, 5), arrays.draw(0, 3), dw, db)()
    assert not dw.any() and not db.any()


# ---------------------------------------------------------------------- memory and life time
def test_arrays_are_aligned_and_packed(backend):
    for shape in ((3,), (2, 5, 7), (0, 4), ()):
        for dtype in (np.float32, np.float64, np.uint8):
            a = backend.zeros(shape, dtype)
            assert a.shape == shape and a.dtype == dtype and a.flags.c_contiguous and not a.any()
            assert a.__array_interface__["data"][0] % 64 == 0 or a.size == 0
    assert backend.xp.asarray([1]).shape == (1,)
    assert backend.synchronize() is None
    assert backend.name in backend.describe() and backend.version in backend.describe()


def test_calls_allocate_no_arrays(arrays):
    """A call of a kernel allocates no arrays (512 KiB here); NumPy's fixed buffers for casts are below the limit."""
    kernels = every_kernel(arrays, 64)
    for _ in range(2):
        for kernel in kernels:
            kernel()
    grew = {}
    for kernel in kernels:
        peak, _ = traced(kernel)
        grew[kernel.impl] = max(grew.get(kernel.impl, 0), peak)
    assert max(grew.values()) < 200_000, grew
    for kernel in kernels:
        kernel.close()


def rss() -> int:
    """Return the resident memory of this process [B]."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc/self/statm")
def test_building_and_closing_does_not_leak(arrays):
    def cycle(times: int) -> None:
        for _ in range(times):
            for kernel in every_kernel(arrays):
                kernel()
                kernel.close()
        gc.collect()

    cycle(20)
    before = rss()
    cycle(200)
    # 200 rounds of some 40 kernels: one leaked handle of 200 bytes each would be 1.6 MB, one array 65 MB.
    assert rss() - before < 2 << 20


def test_dropped_kernels_free_their_memory_too(arrays):
    def cycle(times: int) -> None:
        for _ in range(times):
            arrays.backend.conv_forward(x, w, None, y, G)()
        gc.collect()

    x, w, y = arrays.draw(1, 8, 8, 16), arrays.draw(16, 3, 3, 16), arrays.draw(1, 8, 8, 16)
    cycle(100)
    before = rss()
    cycle(1500)
    assert rss() - before < 2 << 20


def test_a_closed_kernel_raises_an_error(arrays):
    for kernel in every_kernel(arrays):
        kernel()
        kernel.close()
        kernel.close()
        assert "expected an open kernel, got one after close(); build it again" in text_of(kernel)


def test_kernels_describe_themselves(arrays):
    for kernel in every_kernel(arrays):
        assert (
            kernel.impl in repr(kernel) and (":" in kernel.impl or kernel.impl == "idle") and "ref" not in kernel.impl
        )
        assert kernel.workspace_bytes >= 0 and kernel.scratch_bytes >= 0
    forward, _ = arrays.backend.max_pool(
        arrays.draw(2, 8, 8, 16), arrays.draw(2, 4, 4, 16), arrays.draw(2, 4, 4, 16), arrays.draw(2, 8, 8, 16), G2
    )
    assert forward.workspace_bytes == 2 * 4 * 4 * 16


def test_what_single_kernels_keep_is_counted_until_they_are_dropped(arrays):
    """The memory of a backend includes positions of maxima, dropout counters, and copies of strided targets."""
    backend, total = arrays.backend, np.zeros(1)

    def own_bytes():
        stage = getattr(backend, "stage", None)
        return backend.held_bytes - backend.scratch.nbytes - (0 if stage is None else stage.nbytes)

    def pool(kind, *more):
        x, y = ((arrays.draw(2, n, n, 16), arrays.draw(2, n, n, 16)) for n in (9, 5))
        return getattr(backend, kind)(x[0], y[0], y[1], x[1], Geometry.of((3, 3), 2, 1), *more)

    def dropout():
        mask = DropoutMask(0.5, 1, (4, 6, 5), (0, 0, 0), np.zeros(3, np.uint64))
        return backend.dropout(*(arrays.draw(4, 6, 5) for _ in range(4)), mask)

    makes = {
        "positions": lambda: pool("max_pool"),
        "counts": lambda: pool("average_pool", False),
        "counters": dropout,
        "copies": lambda: (backend.target_weight(np.zeros((4, 6, 1), np.uint8)[:, ::2], total, ClassTargets(2)),),
    }
    gc.collect()  # kernels of other tests
    for what, make in makes.items():
        before = own_bytes()
        kernels = make()
        assert own_bytes() - before == sum(kernel.workspace_bytes for kernel in kernels), what
        assert what == "counts" or own_bytes() > before, what
        for kernel in kernels:
            kernel.close()
        del kernel, kernels
        gc.collect()
        assert own_bytes() == before, what


def test_kernels_may_outlive_their_backend(backend):
    with get_backend(backend.name) as other:
        kernels = every_kernel(Arrays(other, np.float32))
    other.close()
    for kernel in kernels:
        kernel.close()


def test_scratch_grows():
    scratch = Scratch(lambda shape, dtype: np.zeros(shape, dtype))
    scratch.reserve(100)
    first = scratch.generation
    scratch.reserve(50)
    assert scratch.generation == first and scratch.nbytes == 128
    assert scratch.view((4, 2), np.float32, 64).shape == (4, 2)
    assert scratch.view((0, 2), np.float32, 128).shape == (0, 2)
    with pytest.raises(AssertionError, match=r"got 120 \+ 16 B"):
        scratch.view((4,), np.float32, 120)
    scratch.reserve(1000)
    assert scratch.generation > first


# ---------------------------------------------------------------------- the choice of a backend
def test_unknown_backend():
    with pytest.raises(UserError) as caught:
        get_backend("cudnn7")
    names = 'auto, numpy, onednn, cudnn, or "FILE.py:CLASS"'
    assert str(caught.value) == f"backend: expected {names}, got 'cudnn7'; did you mean cudnn?"


@pytest.mark.parametrize(("threads", "bound"), [(0, ">= 1"), (10**6, "<= 4096"), (2**70, "<= 4096")])
def test_numbers_of_threads_that_are_refused(threads, bound):
    text = text_of(lambda: get_backend("numpy", threads=threads))
    assert text == f"threads: expected a whole number {bound}, got {threads}; pass threads=1 for one per rank"


def test_auto_is_onednn_where_it_is(backends):
    backends("onednn")
    with get_backend() as found:
        assert found.name == "onednn" and isinstance(found, Backend)


def test_missing_onednn_warns_once(monkeypatch, caplog):
    monkeypatch.setenv("DNNL_LIB", "/nowhere/libdnnl.so.3")
    monkeypatch.setattr(choice, "_warned", False)
    with caplog.at_level(logging.WARNING, "halograd.kernels"):
        for _ in range(3):
            with get_backend("auto") as found:
                assert found.name == "numpy"
    assert len(caplog.messages) == 1
    assert "NumPy instead of oneDNN" in caplog.messages[0] and "/nowhere/libdnnl.so.3" in caplog.messages[0]
    assert "\n" not in caplog.messages[0]


def test_the_warning_is_one_line_on_stderr(monkeypatch):
    monkeypatch.setenv("DNNL_LIB", "/nowhere/libdnnl.so.3")
    code = "from halograd.kernels import get_backend; get_backend(); print(get_backend().name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT, check=True)
    assert done.stdout == "numpy\n" and len(done.stderr.splitlines()) == 1


def test_missing_onednn_by_name_is_an_error(monkeypatch):
    monkeypatch.setenv("DNNL_LIB", "/nowhere/libdnnl.so.3")
    text = text_of(lambda: get_backend("onednn"))
    assert "expected oneDNN's library, got none (/nowhere/libdnnl.so.3:" in text and "pip install" in text


def test_another_library_is_an_error(monkeypatch):
    monkeypatch.setenv("DNNL_LIB", "libc.so.6")
    assert "got a library without dnnl_version" in text_of(lambda: get_backend("onednn"))


@reads("x", "w")
@writes("y")
def function(environment, x, w, y):
    return lambda: None


class Kernel:
    @writes("sums")
    @reads("x*")
    def statistics(self):
        pass

    def nothing_declared(self):
        pass


class Overridden(Kernel):
    def statistics(self):
        pass


@makes(forward=Access(("x",), ("y",)))
def pair(environment, x, y):
    return None


@makes(Kernel)
def kernel(environment, **arrays):
    return Kernel()


@pytest.mark.parametrize(
    ("make", "method", "expected"),
    [
        (function, None, Access(("x", "w"), ("y",))),
        (partial(partial(function, 1), 2), None, Access(("x", "w"), ("y",))),
        (Kernel, "statistics", Access(("x*",), ("sums",))),
        (partial(Kernel), "statistics", Access(("x*",), ("sums",))),
        (kernel, "statistics", Access(("x*",), ("sums",))),
        (pair, "forward", Access(("x",), ("y",))),
        (Kernel, "nothing_declared", ANY),
        (Overridden, "statistics", ANY),
        (pair, "backward", ANY),
        (lambda environment: None, None, ANY),
        (function, "forward", ANY),
    ],
)
def test_declarations(make, method, expected):
    assert access_of(make, method) == expected


def test_names_with_a_common_prefix():
    access = Access(("x*", "param *"), ("dx*",))
    names = ["y", "x0", "x1", "dx0", "dx1", "param w", "w"]
    assert access.read(names) == ["x0", "x1", "param w"]
    assert access.written(names) == ["dx0", "dx1"]
    assert access.used(names) == ["x0", "x1", "dx0", "dx1", "param w"]
    assert ANY.used(names) == names


def operations_of(program):
    for operation in program:
        if isinstance(operation, Run):
            yield from (operation, *operation.guarded)


@pytest.mark.parametrize("group", range(4))
def test_all_kernels_of_layers_declare_what_they_use(group):
    for seed in range(16 * group, 16 * group + 16):
        graphs = Graphs(seed)
        network = graphs.network()
        program = compile_program(network, graphs.strategy(network, 4), Target(graphs.batch, 4))
        for operation in operations_of(program):
            if isinstance(operation, Run):
                names = operation.kernel.views
                assert operation.access is not ANY, operation
                assert operation.method == "begin" or operation.access.used(names), operation


def access_norm(activation):
    x = hg.Input((8, 8, 4), "x")
    y = hg.Conv(4, 3, padding=1, name="conv")(x)
    z = hg.Conv(4, 3, padding=1, name="other")(hg.BatchNorm(activation=activation, name="norm")(y, x))
    network = hg.Network({"loss": hg.MeanSquaredError()(z, hg.Input((8, 8, 4), "target"))})
    program = compile_program(network, Strategy({}), Target(2))
    (segment,) = (segment for segment in program.backward if segment.name == "norm")
    return {name for operation in segment.operations for name in operation.arrays}


def test_what_backward_reads_depends_on_what_is_added():
    """Backward of a norm with a second input reads its output only if it has an activation, never the second input."""
    assert "y" in access_norm("relu") and "y" not in access_norm(None)
    assert not {"residual"} & (access_norm("relu") | access_norm(None))


TEXT = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()


def test_the_example_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.S)
    exec(compile(code, "docs/kernels.md", "exec"), {})
    assert capsys.readouterr().out.startswith("numpy:im2col + numpy:relu 0 ")


def test_the_table_is_complete():
    table = re.findall(r"^\| (`.*?`) \|", TEXT, re.M)
    assert set(re.findall(r"`(\w+)`", " ".join(table))) == set(DELEGATED)


@pytest.mark.parametrize("spatial", [(5,), (5, 4), (1, 4), (4, 1), (1, 1), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("samples", [1, 3])
def test_channels_of_any_extents(samples, spatial):
    """Padded channels are detected for any extents; strides of axes with extent 1 are ignored."""
    whole = np.zeros((samples, *spatial, 24), np.float32)
    alone = samples == np.prod(spatial) == 1
    assert channels_in_memory(whole) == 24
    assert channels_in_memory(whole[..., :18]) == (18 if alone else 24)
    assert channels_in_memory(whole[..., :1]) == (1 if alone else 24)
    if spatial[0] > 1:
        assert channels_in_memory(whole[:, 1:, ..., :18]) == (
            None if samples > 1 else 24 if whole[0, 1:].size > 24 else 18
        )


def test_arrays_that_are_neither():
    a = np.zeros((2, 6, 5, 24), np.float32)
    for view in (a[..., ::2], a[:, ::2], a[:, :, ::2, :18], a.transpose(0, 2, 1, 3), a[::-1]):
        assert channels_in_memory(view) is None
