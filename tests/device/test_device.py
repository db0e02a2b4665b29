"""Devices and the double of CuPy: calls, errors when they fail, the device of an array and of a rank."""

import inspect
import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from halograd.device import HOST, DeviceError, as_dtype, device_of, on_device
from halograd.device.cupy import CupyDevice, arrived, choose_ordinal, count_devices, import_cupy
from halograd.kernels import DropoutMask
from tests.support import device_array
from tests.support.fake_device import FakeBackend, FakeDevice


@pytest.fixture
def device():
    made = FakeDevice()
    yield made
    made.close()


def gpu_count():
    try:
        return count_devices(import_cupy())
    except DeviceError:
        return 0


def test_the_host_copies_at_once():
    array, pinned = HOST.array([1.0, 2.0]), HOST.pinned((2,), "float64")
    HOST.download(array, pinned)
    HOST.upload(np.array([3.0, 4.0]), array)
    assert pinned.tolist() == [1, 2] and array.tolist() == [3, 4] and HOST.mark().done()
    assert HOST.to_host(array) is array and HOST.memory() is None
    assert HOST.seconds(HOST.timestamp(), HOST.timestamp()) >= 0


def test_where_an_array_is(device):
    there = device.zeros((2,), "float32")
    assert device_of(there, None, there[1:]) is device and device_of(np.zeros(2)) is HOST is device_of()
    assert on_device(there) is device and on_device([1]) is None
    with pytest.raises(DeviceError, match="expected arrays on one device, got some on fake:0 and host"):
        device_of(there, np.zeros(2))
    device.close()
    with pytest.raises(DeviceError, match="open a kernel backend of its device first"):
        device_of(there)


@pytest.mark.parametrize(
    ("wanted", "count", "message"),
    [
        ("auto", 0, "expected a CUDA device, got none"),
        (3, 2, "expected devices from 0 to 1, got 3"),
        ([], 2, "expected 'auto', a number or numbers, got"),
        ("first", 2, "expected 'auto', a number or numbers, got 'first'"),
    ],
)
def test_a_device_that_cannot_be_had(wanted, count, message):
    with pytest.raises(DeviceError, match=message):
        choose_ordinal(wanted, 0, count)


def test_one_line_without_a_gpu():
    if gpu_count():
        pytest.skip("needs a machine without a GPU")
    with pytest.raises(DeviceError, match=r"^device: expected (CuPy for a GPU|a CUDA device), "):
        CupyDevice()


def test_a_single_copy_is_a_launch_of_our_own_too():
    """A single copy also uses our fused kernel, because CuPy's strided copies move single elements at any alignment."""
    device = CupyDevice.__new__(CupyDevice)
    device.fused_copies = device.fused_sums = lambda pairs: ("fused", pairs)
    assert device.copies([(1, 2)]) == device.sums([(1, 2)]) == ("fused", [(1, 2)])


def test_a_device_without_graphs_says_so():
    with pytest.raises(DeviceError, match=r"^graph: expected a device that captures graphs, got host; set backend"):
        HOST.capture(lambda: None)


# -- the double ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mix",
    [
        lambda a, h: np.add(a, h),
        lambda a, h: a + h,
        lambda a, h: h + a,
        lambda a, h: np.add(a, 1, out=h),
        lambda a, h: np.copyto(h, a),
        lambda a, h: a.__setitem__(slice(None), h),
        lambda a, h: np.asarray(a),
        lambda a, h: np.take(a, h.astype(int)),
        lambda a, h: a[h.astype(int)],
        lambda a, h: np.where(a > 0, a, h),
        lambda a, h: np.maximum.reduce(a),
        lambda a, h: np.add(a, 1, where=a > 0),
        lambda a, h: np.take(a, a.astype(np.int64), mode="clip"),
        lambda a, h: np.convolve(a, a),
    ],
)
def test_the_double_refuses_what_cupy_refuses(device, mix):
    with pytest.raises((TypeError, NotImplementedError)):
        mix(device.array([1.0, 0.0]), np.array([1.0, 0.0]))


def test_the_double_counts_what_makes_the_host_wait(device):
    a = device.array([1.0, 2.0])
    a += 1
    np.sum(a, out=device.zeros((), "float64"))
    assert device.synchronizations == []
    assert float(a[0]) == 2 and bool((a > 1).all()) and a.sum().item() == 5 and int(a[1]) == 3
    a.get()
    assert len(device.synchronizations) == 5


def test_copies_of_the_double_are_late(device):
    a, pinned = device.array([1.0, 2.0]), device.pinned((2,), "float64")
    device.download(a, pinned)
    a.fill(7)
    assert pinned.tolist() != [1, 2], "poisoned until somebody waits"
    ticket = device.mark()
    ticket.wait()
    assert pinned.tolist() == [1, 2] and device.waits == device.idled == 1
    device.upload(pinned, a)
    pinned[0] = 9
    with pytest.raises(AssertionError, match="pinned memory changed while it was copied"):
        device.mark().wait()


def test_uploads_ahead_are_there_once_joined(device):
    a = device.array([1.0, 2.0])
    ticket = device.upload_ahead([(np.array([3.0, 4.0]), a)])
    assert device.to_host(a).tolist() != [3, 4]
    device.join(ticket)
    assert device.to_host(a).tolist() == [3, 4]


def test_the_double_takes_no_keyword_that_cupy_does_not():
    cupy = pytest.importorskip("cupy", reason="needs CuPy (no GPU): pip install 'halograd[gpu]'")
    for name, keywords in device_array._FUNCTIONS.items():
        found = set(inspect.signature(getattr(cupy, name)).parameters)
        assert keywords <= found, f"{name} takes {found}"
    assert "mode" not in inspect.signature(cupy.take).parameters


def test_a_kernel_of_the_double_leaves_alone_what_it_does_not_write():
    """Kernels of the double do not change bytes that they do not write, although arrays may share memory in 16 bits."""
    kernels, low = FakeBackend(), as_dtype("bfloat16")
    memory, x, dy = (kernels.device.array(np.full(9, n, np.float32), low) for n in range(3))
    state = kernels.device.array([0, 0, 0], np.uint64)
    forward, _ = kernels.dropout(x[:8], memory[:8], dy[:8], memory[1:], DropoutMask(0.0, 0, (8,), (0,), state))
    forward()
    assert (kernels.device.to_host(memory)[:8] == 1).all()
    kernels.close()


NULL = SimpleNamespace(ptr=0)


class StreamDouble:
    """Double of a stream: a forbidden call invalidates its capture, and ending the capture then fails too."""

    around, current = [], None

    def __init__(self, non_blocking=False):
        self.capturing = self.invalidated = False
        self.launched, self.ptr = 0, id(self)

    def use(self):
        StreamDouble.current = self
        return self

    def __enter__(self):
        self.around.append(self)
        return self.use()

    def __exit__(self, *exception):
        """Restore the outer stream, as CuPy does: a stream that was set by `use()` is not restored."""
        self.around.pop()
        StreamDouble.current = self.around[-1] if self.around else NULL

    def synchronize(self):
        pass

    def begin_capture(self):
        assert not self.capturing
        self.capturing, self.invalidated = True, False

    def end_capture(self):
        self.capturing = False
        if self.invalidated:
            raise RuntimeError("cudaErrorStreamCaptureInvalidated: operation failed due to a previous error")
        return Recorded(self)


class Recorded:
    def __init__(self, stream):
        self.stream = stream

    def launch(self, stream):
        self.stream.launched += 1


class Pinned:
    """Double of ``cupy.cuda.PinnedMemory`` that counts bytes."""

    taken = 0

    def __init__(self, size, flags):
        assert flags == 1, "memory that every device may use"
        self.memory = bytearray(size)
        Pinned.taken += size


@pytest.fixture
def cupy(monkeypatch):
    """Return a double of the CuPy functions that the device uses; its pool of pinned memory rounds up as CuPy's."""
    Pinned.taken, StreamDouble.around, StreamDouble.current = 0, [], NULL
    pools.clear()
    runtime = SimpleNamespace(getDeviceCount=lambda: 1, hostAllocPortable=1)
    cuda = SimpleNamespace(
        runtime=runtime,
        Device=lambda ordinal: SimpleNamespace(use=lambda: None),
        Stream=StreamDouble,
        get_current_stream=lambda: StreamDouble.current,
        PinnedMemory=Pinned,
        PinnedMemoryPointer=lambda memory, offset: memory.memory,
        alloc_pinned_memory=lambda size: Pinned(1 << (size - 1).bit_length(), 1).memory,
        MemoryPool=PoolDouble,
        using_allocator=Allocator,
    )
    made = SimpleNamespace(cuda=cuda, ndarray=np.ndarray)
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


class PoolDouble:
    """Double of a memory pool that records whether its blocks were freed."""

    malloc = None

    def __init__(self):
        pools.append(self)
        self.freed = False

    def free_all_blocks(self):
        self.freed = True


#: Pools of all captures of a test.
pools: list[PoolDouble] = []


class Allocator:
    """Context without effect."""

    def __init__(self, allocate):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass


@pytest.fixture
def cupy_device(cupy):
    made = CupyDevice()
    yield made
    made.close()


def test_its_stream_is_the_current_one_behind_those_of_others(cupy_device):
    """The compute stream is current again after a context with another stream, not the unordered null stream."""
    assert StreamDouble.current is cupy_device.compute
    with StreamDouble():
        assert StreamDouble.current is not cupy_device.compute
    assert StreamDouble.current is cupy_device.compute
    StreamDouble().use()
    cupy_device.stay_current()
    assert StreamDouble.current is cupy_device.compute


def test_a_capture_of_what_goes_elsewhere_is_refused(cupy_device):
    """A capture while another stream is current is an error: its graph would be empty and compute nothing."""
    with (
        StreamDouble(),
        pytest.raises(DeviceError, match=r"^graph: expected the device's compute stream as the current one"),
    ):
        cupy_device.capture(lambda: None)


def test_a_graph_is_launched(cupy_device):
    done = []
    launch = cupy_device.capture(lambda: done.append(cupy_device.compute.capturing))
    assert done == [True] and not cupy_device.compute.capturing
    launch()
    assert cupy_device.compute.launched == 1


def test_a_graph_that_is_dropped_is_gone_whoever_knows_of_it(cupy_device):
    one, other = (cupy_device.capture(lambda: None) for _ in range(2))
    held = [weakref.ref(graph._held[0]) for graph in (one, other)]
    one.drop()
    one.drop()
    assert held[0]() is None and held[1]() is not None
    with pytest.raises(DeviceError, match="got a dropped one"):
        one()
    cupy_device.drop_graphs()
    assert held[1]() is None


def test_an_event_of_a_device_that_has_failed_is_not_merely_late(cupy):
    def check(status):
        raise RuntimeError(f"cudaErrorIllegalAddress ({status})")

    for status, found in ((0, True), (600, False)):
        cupy.cuda.runtime.eventQuery = lambda ptr, status=status: status
        assert arrived(cupy, SimpleNamespace(ptr=1)) is found
    cupy.cuda.runtime.eventQuery, cupy.cuda.runtime.check_status = lambda ptr: 700, check
    with pytest.raises(RuntimeError, match=r"IllegalAddress \(700\)"):
        arrived(cupy, SimpleNamespace(ptr=1))


def test_a_capture_that_fails_says_why(cupy_device):
    """A failed capture raises the first error, not the failure to end the capture; the stream leaves capture mode, and
    memory that was allocated for the graph is freed.
    """

    def refused():
        cupy_device.compute.invalidated = True
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")

    with pytest.raises(NotImplementedError, match="calling cuBLAS API during stream capture"):
        cupy_device.capture(refused)
    assert not cupy_device.compute.capturing and [pool.freed for pool in pools] == [True]


def test_what_makes_a_capture_invalid_in_silence_is_refused(cupy_device):
    def silent():
        cupy_device.compute.invalidated = True

    with pytest.raises(DeviceError, match=r"^graph: expected work .* got cudaErrorStreamCaptureInvalidated: .*; set b"):
        cupy_device.capture(silent)
    assert not cupy_device.compute.capturing


def test_pinned_memory_is_as_large_as_it_says(cupy_device):
    first = cupy_device.pinned((3, 100, 7), "float32")
    assert first.shape == (3, 100, 7) and not first.any() and first.flags.writeable
    assert cupy_device.pinned((0,), "float32").size == 0
    assert Pinned.taken == first.nbytes + 1 and cupy_device.pinned_bytes == first.nbytes
