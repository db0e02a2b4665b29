"""The CUDA device on a double of CuPy: its calls, and its errors when CuPy's calls fail."""

import sys
import weakref
from types import SimpleNamespace

import numpy as np
import pytest

from halograd.device import DeviceError
from halograd.device.cupy import CupyDevice, arrived

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
def device(cupy):
    made = CupyDevice()
    yield made
    made.close()


def test_its_stream_is_the_current_one_behind_those_of_others(device):
    """The compute stream is current again after a context with another stream, not the unordered null stream."""
    assert StreamDouble.current is device.compute
    with StreamDouble():
        assert StreamDouble.current is not device.compute
    assert StreamDouble.current is device.compute
    StreamDouble().use()
    device.stay_current()
    assert StreamDouble.current is device.compute


def test_a_capture_of_what_goes_elsewhere_is_refused(device):
    """A capture while another stream is current is an error: its graph would be empty and compute nothing."""
    with (
        StreamDouble(),
        pytest.raises(DeviceError, match=r"^graph: expected the device's compute stream as the current one"),
    ):
        device.capture(lambda: None)


def test_a_graph_is_launched(device):
    done = []
    launch = device.capture(lambda: done.append(device.compute.capturing))
    assert done == [True] and not device.compute.capturing
    launch()
    assert device.compute.launched == 1


def test_a_graph_that_is_dropped_is_gone_whoever_knows_of_it(device):
    one, other = (device.capture(lambda: None) for _ in range(2))
    held = [weakref.ref(graph._held[0]) for graph in (one, other)]
    one.drop()
    one.drop()
    assert held[0]() is None and held[1]() is not None
    with pytest.raises(DeviceError, match="got a dropped one"):
        one()
    device.drop_graphs()
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


def test_a_capture_that_fails_says_why(device):
    """A failed capture raises the first error, not the failure to end the capture; the stream leaves capture mode, and
    memory that was allocated for the graph is freed.
    """

    def refused():
        device.compute.invalidated = True
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")

    with pytest.raises(NotImplementedError, match="calling cuBLAS API during stream capture"):
        device.capture(refused)
    assert not device.compute.capturing and [pool.freed for pool in pools] == [True]


def test_what_makes_a_capture_invalid_in_silence_is_refused(device):
    def silent():
        device.compute.invalidated = True

    with pytest.raises(DeviceError, match=r"^graph: expected work .* got cudaErrorStreamCaptureInvalidated: .*; set b"):
        device.capture(silent)
    assert not device.compute.capturing


def test_pinned_memory_is_as_large_as_it_says(device):
    first = device.pinned((3, 100, 7), "float32")
    assert first.shape == (3, 100, 7) and not first.any() and first.flags.writeable
    assert device.pinned((0,), "float32").size == 0
    assert Pinned.taken == first.nbytes + 1 and device.pinned_bytes == first.nbytes
