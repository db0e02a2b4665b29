"""Tests of the cuDNN backend: streams, handles, workspaces, dense layers, memory, and errors."""

from __future__ import annotations

import sys
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from halograd.device import as_dtype
from halograd.kernels import Geometry, KernelError, get_backend
from halograd.kernels.cudnn import CudnnBackend
from halograd.kernels.cudnn.dense import Cublas
from halograd.kernels.cudnn.frontend import AddressTable, Frontend, Handles, Workspaces, load
from halograd.kernels.cudnn.runtime import Runtime
from halograd.kernels.kernel import BatchNormArrays
from tests.kernels.conftest import Arrays, assert_close
from tests.kernels.reference import RELU

from .fake_cudnn import GraphDouble
from .fake_runtime import BoxesDouble, DeviceDouble, Machine, device_empty

G = Geometry.of((3, 3), 1, 1)


def forward(backend, channels: int = 8):
    a = Arrays(backend, np.float32)
    shape = (1, 4, 4, channels)
    return backend.conv_forward(a.draw(*shape), a.draw(channels, 3, 3, channels), None, a.poisoned(*shape), G)


# ---------------------------------------------------------------------- streams, handles, workspaces
def test_the_handle_is_told_of_a_stream_only_when_it_changes(machine, backend):
    kernel = forward(backend)
    for _ in range(3):
        kernel()
    assert machine.cudnn.set_streams == 1 and len(machine.cudnn.handles) == 1
    with machine.cupy.on(4096):
        kernel()
        kernel()
    kernel()
    assert machine.cudnn.set_streams == 3
    assert [stream for _, stream, _ in machine.cudnn.launches] == [0, 0, 0, 4096, 4096, 0]


def test_each_stream_has_a_workspace_and_each_thread_a_handle(machine, backend):
    kernel = forward(backend)  # eng10 needs 1000 B
    assert backend.held_bytes == 0
    kernel()
    assert backend.held_bytes == 1000
    with machine.cupy.on(4096):
        kernel()
    assert backend.held_bytes == 2000
    thread = threading.Thread(target=kernel)
    thread.start()
    thread.join()
    assert len(set(machine.cudnn.handles)) == 2 and backend.held_bytes == 2000
    backend.close()
    assert backend.held_bytes == 0 and machine.cudnn.handles == [] and machine.device.closed == 1
    backend.close()


def test_another_current_device_is_refused(machine, backend):
    machine.cupy.device = 1
    with pytest.raises(KernelError, match=r"expected device 0, .*, got 1; call cupy.cuda.Device\(0\).use\(\) first"):
        forward(backend)


def test_a_handle_that_cannot_be_made_is_refused(machine, backend):
    def fail() -> int:
        raise RuntimeError("cudaGetDeviceCount\nfailed")

    machine.cudnn.create_handle = fail
    with pytest.raises(KernelError, match=r"a handle on this device, got an error \(cudaGetDeviceCount failed\)"):
        forward(backend)


def test_a_workspace_grows_once_and_is_shared():
    made = []

    def allocate(nbytes):
        made.append(nbytes)
        return device_empty(nbytes, np.uint8)

    spaces = Workspaces(allocate)
    for nbytes in (100, 900, 300):
        spaces.reserve(nbytes)
    assert spaces.address(1, 0) == 0 and made == []
    first = spaces.address(1, 100)
    assert first and spaces.address(1, 900) == first and spaces.address(2, 10) not in (0, first)
    assert made == [900, 900] and spaces.nbytes == 1800
    spaces.address(1, 2000)
    assert made == [900, 900, 2000] and spaces.nbytes == 2900
    spaces.close()
    assert spaces.nbytes == 0


def test_a_captured_workspace_is_never_freed():
    spaces = Workspaces(lambda nbytes: device_empty(nbytes, np.uint8))
    spaces.reserve(64)
    spaces.before_capture(5)
    assert spaces.nbytes == 64
    captured = spaces.address(5, 64)
    assert spaces.address(5, 128) != captured and spaces.nbytes == 64 + 128
    spaces.close()
    assert spaces.nbytes == 0


def test_captured_scratch_is_never_freed(backend):
    """Scratch memory in a captured graph is kept, although kernels built later use larger memory."""
    scratch = backend.scratch
    scratch.reserve(64)
    captured = weakref.ref(scratch._buffer)
    backend.before_capture()
    scratch.reserve(256)
    assert captured() is not None and backend.held_bytes == scratch.held_bytes == 64 + 256
    scratch.release()
    assert captured() is None and scratch.held_bytes == 0


def test_before_a_capture_the_workspace_is_there(machine, backend):
    forward(backend)
    with machine.cupy.on(64):
        backend.before_capture()
    assert backend.held_bytes == 1000


def test_a_table_lists_addresses_by_number():
    table = AddressTable({4: 400, 1: 100, 2: 2**40})
    assert len(table) == 3 and table.addresses == {1: 100, 2: 2**40, 4: 400}
    assert list(table.addresses) == [1, 2, 4] and list(table._slots) == [100, 2**40, 400]
    assert table.location != 0


@pytest.mark.parametrize("private", ["_execute_with_raw_ptrs", "_prepare_variant_pack_template", "order"])
def test_without_the_private_way_or_its_order_the_public_one_is_taken(machine, monkeypatch, private):
    if private == "order":
        monkeypatch.setattr(GraphDouble, "_get_variant_pack_uids_sorted", lambda graph: [3, 2, 1])
    else:
        monkeypatch.delattr(GraphDouble, private)
    with machine.open() as backend:
        forward(backend)()
    assert [way for _, _, way in machine.cudnn.launches] == ["public"]


# ---------------------------------------------------------------------- the rest of the interface
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64], ids=["float32", "float64"])
def test_dense_layers(machine, backend, dtype, bias):
    a = Arrays(backend, dtype)
    x, w, dy = a.draw(5, 7), a.draw(3, 7), a.draw(5, 3)
    y, dx, dw = a.poisoned(5, 3), a.poisoned(5, 7), a.poisoned(3, 7)
    b, db = (a.draw(3), a.poisoned(3)) if bias else (None, None)
    backend.dense_forward(x, w, b, y)()
    backend.dense_backward_data(dy, w, dx)()
    backend.dense_backward_filter(x, dy, dw, db)()
    assert_close(y, x @ w.T + (b if bias else 0), 8)
    assert_close(dx, dy @ w, 3)
    assert_close(dw, dy.T @ x, 5)
    if bias:
        assert_close(db, dy.sum(axis=0), 5)
    assert set(machine.cupy.cublas.computed) == {70 if dtype == np.float64 else 68}


def test_a_dense_layer_can_be_captured(machine, backend):
    """A dense layer can be captured, because its calls allocate nothing and create no handle."""
    a = Arrays(backend, np.float32)
    x, w, dy = a.draw(5, 7), a.draw(3, 7), a.draw(5, 3)
    y, dx, dw = a.poisoned(5, 3), a.poisoned(5, 7), a.poisoned(3, 7)
    kernels = [
        backend.dense_forward(x, w, a.draw(3), y),
        backend.dense_backward_data(dy, w, dx),
        backend.dense_backward_filter(x, dy, dw, a.poisoned(3)),
    ]
    backend.before_capture()
    with machine.cupy.capture():
        for kernel in kernels:
            kernel()
    assert_close(dx, dy @ w, 3)
    assert_close(dw, dy.T @ x, 5)


def test_products_have_a_workspace_per_stream_that_is_counted(machine, backend):
    """Products have a workspace per stream, so results are reproducible; the reported memory includes them."""
    a = Arrays(backend, np.float32)
    kernel = backend.dense_forward(a.draw(5, 7), a.draw(3, 7), None, a.poisoned(5, 3))
    used = []
    for stream in (0, 4096, 0):
        with machine.cupy.on(stream):
            kernel()
        ((found, workspace, _),) = machine.cupy.cublas.handles.values()
        assert found == stream
        used.append(workspace)
    assert used[0] == used[2] != used[1] and backend.held_bytes == 2 * (32 << 20)
    backend.close()
    assert not machine.cupy.cublas.handles and backend.held_bytes == 0


def test_what_cublas_refuses_is_an_error(machine, backend, monkeypatch):
    a = Arrays(backend, np.float32)
    kernel = backend.dense_forward(a.draw(5, 7), a.draw(3, 7), None, a.poisoned(5, 3))
    refusal = r"^cudnn: expected cuBLAS to do cublasSetWorkspace_v2, got status 7; see"
    with monkeypatch.context() as patch, pytest.raises(KernelError, match=refusal):
        patch.setattr(machine.cupy.cublas, "handles", {})
        kernel()


def test_a_cublas_that_lacks_a_function_fails_at_every_call(machine):
    """A cuBLAS without one of the functions creates no handle, also at the second request."""
    functions = ("cublasCreate_v2", "cublasDestroy_v2", "cublasSetMathMode", "cublasSetStream_v2")
    old = SimpleNamespace(**{name: getattr(machine.cupy.cublas, name) for name in functions})
    cublas = Cublas(lambda: old)
    for _ in range(2):
        with pytest.raises(AttributeError, match="cublasSetWorkspace_v2"):
            cublas.create_handle()


def test_dense_layers_of_16_bits_are_summed_in_float32(machine):
    with machine.open(precision="tf32") as backend:
        for dtype, computed in ((np.float16, 68), (np.float32, 77)):
            a = Arrays(backend, dtype)
            x, w, y = a.draw(4, 8), a.draw(8, 8), a.poisoned(4, 8)
            kernel = backend.dense_forward(x, w, None, y)
            kernel()
            expected = x.astype(np.float64) @ w.astype(np.float64).T
            np.testing.assert_allclose(y.astype(np.float64), expected, rtol=2e-3, atol=2e-3)
            assert kernel.impl == "cublas:gemm" and machine.cupy.cublas.computed[-1] == computed


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradients_of_dense_layers_of_16_bits_come_in_float32(backend, dtype):
    """Dense layers in 16 bits give float32 gradients of weights, so cuBLAS's sums are not rounded again."""
    low, wide = Arrays(backend, as_dtype(dtype)), Arrays(backend, np.float32)
    x, dy, dw, db = low.draw(5, 7), low.draw(5, 3), wide.poisoned(3, 7), wide.poisoned(3)
    backend.dense_backward_filter(x, dy, dw, db)()
    exact = [a.astype(np.float64) for a in (x, dy)]
    np.testing.assert_allclose(dw, exact[1].T @ exact[0], rtol=0, atol=1e-5)
    np.testing.assert_allclose(db, exact[1].sum(axis=0), rtol=0, atol=1e-5)
    with pytest.raises(KernelError, match=f"expected dw of dtype {dtype} or float32 with arrays of {dtype}"):
        backend.dense_backward_filter(x, dy, Arrays(backend, np.float64).poisoned(3, 7), None)


def test_everything_else_goes_to_our_own_kernels(backend):
    a = Arrays(backend, np.float32)
    x, y = a.draw(2, 4, 4, 16), a.draw(2, 2, 2, 16)
    g = Geometry.of((2, 2), 2)
    vectors = [a.draw(16) for _ in range(4)]
    sums = [a.draw(2, 16, dtype=np.float64) for _ in range(2)]
    made = [
        backend.max_pool(x, y, None, None, g)[0],
        backend.average_pool(x, y, None, None, g, True)[0],
        backend.batch_norm(BatchNormArrays(x, x.copy(), None, None, *vectors, *sums, 1e-5, RELU, True)).forward,
        backend.activation("relu", x, x, None, None)[0],
        backend.add([x, x], x),
    ]
    for kernel in made:
        assert kernel.impl.startswith("numpy:"), "the double's own kernels are NumPy's"
        kernel()


def test_a_rank_with_nothing(backend):
    a = Arrays(backend, np.float32)
    y, dw = a.poisoned(1, 4, 4, 8), a.poisoned(8, 3, 3, 0)
    backend.conv_forward(a.draw(0, 4, 4, 8), a.draw(8, 3, 3, 8), None, a.draw(0, 4, 4, 8), G)()
    backend.conv_backward_filter(a.draw(0, 4, 4, 8), a.draw(0, 4, 4, 8), dw, None, G)()
    backend.conv_forward(a.draw(1, 4, 4, 0), a.draw(8, 3, 3, 0), a.draw(8), y, G)()
    assert not np.isnan(y).any()


def test_what_it_says_of_itself(machine):
    with machine.open(precision="tf32", deterministic=True) as backend:
        version = "9.28.0 (frontend 1.26.0), float32 tf32, deterministic"
        assert backend.version == version, "measured times are kept under it"
        assert backend.describe() == f"cudnn {version}, Double of a GPU" and backend.device_name == "Double of a GPU"
        backend.synchronize()
    assert machine.cupy.synchronized == 1


# ---------------------------------------------------------------------- refusals
def test_old_devices(tmp_path):
    machine = Machine(tmp_path, capability="75")
    with machine.open() as backend:
        assert backend.dtypes == ("float32", "float64", "float16")
    with pytest.raises(KernelError, match=r"of compute capability 8.0 for precision tf32, got 7.5 \(Double of a GPU\)"):
        machine.open(precision="tf32")


@pytest.mark.parametrize("version", ["1.22.1", "1.27.0", "2.0", "nightly"])
def test_frontends_that_were_not_examined_are_refused(machine, version):
    machine.cudnn.__version__ = version
    with pytest.raises(KernelError) as caught:
        Frontend(machine.cudnn)
    assert str(caught.value) == (
        f"cudnn: expected nvidia-cudnn-frontend >= 1.23 and < 1.27, got {version}; pip install 'halograd[gpu]'"
    )


@pytest.mark.parametrize(("number", "text"), [(91802, "9.18.2"), (100000, "10.0.0"), (8907, "0.89.7")])
def test_versions_of_cudnn_that_were_not_examined_are_refused(machine, number, text):
    machine.cudnn.version = number
    with pytest.raises(KernelError, match=rf"^cudnn: expected cuDNN >= 9.19.0 and < 10.0.0, got {text}; pip install"):
        Frontend(machine.cudnn)


def test_a_frontend_without_library_is_refused(machine):
    def fail() -> int:
        raise RuntimeError("Unable to find symbol cudnnGetVersion")

    machine.cudnn.backend_version = fail
    with pytest.raises(KernelError, match=r"^cudnn: expected libcudnn 9, got none \(Unable to find symbol cudnnGetV"):
        Frontend(machine.cudnn)


def test_a_missing_frontend_is_refused():
    with pytest.raises(KernelError) as caught:
        load("cudnn_that_nobody_has")
    assert str(caught.value) == (
        "cudnn: expected the package nvidia-cudnn-frontend, got none (No module named 'cudnn_that_nobody_has'); "
        "pip install 'halograd[gpu]', or choose the backend onednn or numpy"
    )


def test_a_missing_cupy_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(KernelError, match=r"^cudnn: expected CuPy, got none \(.*\); pip install 'halograd\[gpu\]', or"):
        get_backend("cudnn")


def found_with(monkeypatch, machine: Machine, ordinal: int = 0, boxes=BoxesDouble) -> Runtime:
    """Return the runtime that is found when these doubles of modules are installed."""
    monkeypatch.setitem(sys.modules, "cupy", machine.cupy)
    monkeypatch.setitem(sys.modules, "cudnn", machine.cudnn)

    def open_device(number: int) -> DeviceDouble:
        machine.device = DeviceDouble(number)
        return machine.device

    return Runtime.find(ordinal, open_device, boxes)


def test_what_is_installed_is_found(monkeypatch, machine):
    found = found_with(monkeypatch, machine, 3)
    assert (found.cupy, found.device, found.ordinal) == (machine.cupy, machine.device, 3)
    assert found.capability == (9, 0) and found.name == "Double of a GPU" and machine.device.ordinal == 3


def test_libraries_of_wheels_are_loaded_before_cudnn_opens_them_by_name(monkeypatch, machine):
    loaded = []

    def load(name: str) -> None:
        loaded.append(name)
        if name == "nvrtc":
            raise RuntimeError("not found")

    monkeypatch.setitem(sys.modules, "cuda.pathfinder", SimpleNamespace(load_nvidia_dynamic_lib=load))
    found_with(monkeypatch, machine)
    assert loaded == ["cublasLt", "nvrtc", "cudart"]
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    found_with(monkeypatch, machine)


def test_the_device_copies_and_adds_by_our_own_kernels(monkeypatch, machine):
    found_with(monkeypatch, machine)
    a, b, c = np.arange(3.0), np.full(3, 10.0), np.full(2, 100.0)
    target = np.zeros(5)
    machine.device.fused_copies([(target[:3], a), (target[3:], b[:2])])()
    assert target.tolist() == [0, 1, 2, 10, 10]
    machine.device.fused_sums([(target[:3], b), (target[2:4], c)])()
    assert target.tolist() == [10, 11, 112, 110, 10]
    for nothing in (machine.device.fused_copies([]), machine.device.fused_sums([])):  # a rank without neighbors
        nothing()
    assert target.tolist() == [10, 11, 112, 110, 10]


def test_the_device_is_given_back_if_its_kernels_fail(monkeypatch, machine):
    def fail() -> None:
        raise KernelError("NVRTC does not compile")

    with pytest.raises(KernelError, match="NVRTC does not compile"):
        found_with(monkeypatch, machine, boxes=fail)
    assert machine.device.closed == 1
    with pytest.raises(KernelError, match="tf32"):
        machine.cupy.cuda.Device = lambda number: SimpleNamespace(compute_capability="75")
        machine.open(precision="tf32")
    assert machine.device.closed == 1


def test_no_device_is_refused(monkeypatch, tmp_path):
    with pytest.raises(KernelError, match="expected a CUDA device, got none; see CUDA_VISIBLE_DEVICES, or choose"):
        found_with(monkeypatch, Machine(tmp_path, devices=0))

    def fail() -> int:
        raise RuntimeError("cudaErrorInsufficientDriver: CUDA driver version is insufficient")

    machine = Machine(tmp_path)
    machine.cupy.cuda.runtime.getDeviceCount = fail
    with pytest.raises(KernelError, match=r"error \(cudaErrorInsufficientDriver: .*\); run where there is a GPU"):
        found_with(monkeypatch, machine)


def test_options_reach_the_backend_by_name(monkeypatch, machine):
    seen = []
    monkeypatch.setattr(CudnnBackend, "__init__", lambda self, *args: seen.append(args))
    assert isinstance(get_backend("cudnn", 2, precision="tf32", deterministic=True, device=1), CudnnBackend)
    assert seen == [(2, False, "tf32", True, 1)]


def test_other_backends_have_one_precision():
    for name in ("numpy", "onednn", "auto"):
        with pytest.raises(KernelError, match=f"expected precision strict for the backend {name}, got 'tf32'; choose"):
            get_backend(name, precision="tf32")
    with get_backend("numpy", deterministic=True) as backend:
        assert backend.name == "numpy"


def test_handles_belong_to_their_threads(machine):
    handles = Handles(machine.cudnn, lambda: 7, lambda: None)
    assert handles.current() == handles.current() == (machine.cudnn.handles[0], 7)
    handles.close()
    assert machine.cudnn.handles == []
    assert handles.current()[0] not in (1001,)
