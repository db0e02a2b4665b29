"""Tests of the calls of CuPy by a recording double, and of the errors without CuPy."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from halograd.kernels import KernelError
from halograd.kernels.cuda.launch import CupyLauncher, Launch, address
from halograd.kernels.cuda.sources import FOLDER, CudaProgram, kernels_of, record_of, text_of

from .host import HostBackend


class Memory:
    """Double of a device array: an address that the host cannot read."""

    def __init__(self, shape, dtype, at=1 << 40) -> None:
        self.shape, self.dtype = tuple(shape), np.dtype(dtype)
        self.size = int(np.prod(shape))
        self.itemsize = self.dtype.itemsize
        self.strides = np.empty(shape, dtype).strides
        self.flags = SimpleNamespace(c_contiguous=True)
        self.data = SimpleNamespace(ptr=at)

    def __getitem__(self, key):
        return self

    def view(self, dtype):
        return self

    def reshape(self, *shape):
        return self


class Recorder:
    """Double of the module ``cupy``."""

    __version__ = "14.2.0"

    def __init__(self) -> None:
        self.compiled: list[tuple[str, ...]] = []
        self.launched: list[tuple] = []
        properties = {"multiProcessorCount": 132, "name": b"H200"}
        runtime = SimpleNamespace(getDevice=lambda: 0, getDeviceProperties=lambda i: properties)
        driver = SimpleNamespace(launchKernel=self._launch)
        self.stream, self._kernels = 0x77, []
        self.cuda = SimpleNamespace(runtime=runtime, driver=driver, get_current_stream=self._current_stream)

    def empty(self, shape, dtype):
        return Memory(shape, dtype)

    def asarray(self, array):
        return Memory(array.shape, array.dtype)

    def RawModule(self, code, options):
        self.compiled.append(options)
        assert 'extern "C" __global__' in code and "#include" not in code.replace("#include HOST_SHIM", "")
        source = next(path.stem for path in FOLDER.glob("*.cu") if text_of(path.stem) == code)
        return SimpleNamespace(get_function=lambda name: self._function(source, name))

    def _function(self, source, name):
        self._kernels.append((source, name))
        function = SimpleNamespace(ptr=len(self._kernels))
        return SimpleNamespace(compile=lambda: None, kernel=function)

    def _current_stream(self):
        return SimpleNamespace(ptr=self.stream)

    def _launch(self, function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        """Record ``cuLaunchKernel``: one parameter, whose bytes are copied."""
        source, name = self._kernels[function - 1]
        assert all(type(n) is int for n in (function, gx, gy, gz, bx, by, bz, stream, parameters))
        assert (shared, extra) == (0, 0) and stream == self.stream
        layout = record_of(source, kernels_of(source)[name])
        at = ctypes.c_uint64.from_address(parameters).value
        record = np.frombuffer(ctypes.string_at(at, layout.itemsize), layout)[0]
        self.launched.append((name, (gx, gy, gz), (bx, by, bz), record))


@pytest.fixture
def recorder(monkeypatch) -> Recorder:
    made = Recorder()
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


def test_a_launch(recorder):
    """A launch passes one record by value, and integers for grid and block; each source and dtype has one program."""
    cuda = HostBackend(CupyLauncher())
    assert cuda.launcher.describe() == "H200, 132 multiprocessors, CuPy 14.2.0"
    dy, db = Memory((8, 56, 56, 64), "float32"), Memory((64,), "float32", at=1 << 41)
    kernel = cuda._bias_gradient(dy, db)
    kernel()
    kernel()
    first, second = recorder.launched
    assert recorder.compiled == [("-std=c++17", "-DSCALAR=float", "-DINDEX=int")]
    assert first[:3] == ("row_sums_v", (2, 98, 1), (8, 32, 1)) and first == second
    record = first[3]
    assert record["dy"] == 1 << 40 and record["first"] == 1 << 41 and record["rows"] == 8 * 56 * 56
    assert record["partial"] and record["arrived"], "98 blocks for 32 channels each, of which the last one adds up"


def test_a_launch_prepares_nothing(recorder, monkeypatch):
    """A launch only requests the current stream; its arguments are at an address that was prepared before."""
    launch = Launch(CupyLauncher(), CudaProgram("reduce"), "clip", (1,), max_norm=1.0)
    asked = []
    monkeypatch.setattr(recorder.cuda, "get_current_stream", None)  # bound before
    module = "halograd.kernels.cuda.launch"
    monkeypatch.setattr(f"{module}.np", SimpleNamespace(array=asked.append, zeros=asked.append))
    monkeypatch.setattr(f"{module}.address", asked.append)
    launch()
    launch._record["max_norm"] = 2.0
    recorder.stream = 0x88
    launch()
    assert [record["max_norm"] for *_, record in recorder.launched] == [1.0, 2.0]
    assert not asked


def test_wide_arrays_take_all_multiprocessors(recorder):
    cuda = HostBackend(CupyLauncher())
    x, y = Memory((1, 1024, 1024, 128), "float16"), Memory((1, 1024, 1024, 128), "float16")
    cuda._activation("relu", x, y, None, None, 0.0)[0]()
    ((name, grid, block, _),) = recorder.launched
    assert (name, grid, block) == ("activation_forward_v", (132 * 16, 1, 1), (256, 1, 1))


def test_addresses():
    assert address(None) == 0 and address(Memory((2,), "float32")) == 1 << 40
    array = np.zeros(3)
    assert address(array) == array.ctypes.data


def test_without_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(KernelError, match=r"expected CuPy, got .*; pip install 'halograd\[gpu\]'"):
        CupyLauncher()


def test_without_a_device(recorder):
    def fail():
        raise RuntimeError("cudaErrorInsufficientDriver:\n  too old")

    recorder.cuda.runtime.getDevice = fail
    with pytest.raises(KernelError, match="expected a CUDA device, got cudaErrorInsufficientDriver: too old; check"):
        CupyLauncher()


def test_a_source_that_does_not_compile(recorder):
    def refuse(code, options):
        def get_function(name):  # as CuPy 14.2 does, it compiles
            raise RuntimeError("nvrtc: error")

        return SimpleNamespace(get_function=get_function)

    recorder.RawModule = refuse
    with pytest.raises(KernelError, match="reduce<float32>: NVRTC does not compile clip: nvrtc: error; report this"):
        HostBackend(CupyLauncher())._clip(*(Memory((1,), "float64"),) * 2, 1.0, *(Memory((1,), "float64"),) * 2)
