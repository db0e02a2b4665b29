"""The CUDA device on a double of CuPy: what it asks for, and what it says when that fails."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from halograd.device import DeviceError
from halograd.device.cupy import CupyDevice


class StreamDouble:
    """A stream whose capture is invalidated by a call that CUDA does not permit in one; then ending it fails too."""

    def __init__(self, non_blocking=False):
        self.capturing = self.invalidated = False
        self.launched = 0

    def use(self):
        return self

    def begin_capture(self):
        assert not self.capturing
        self.capturing, self.invalidated = True, False

    def end_capture(self):
        self.capturing = False
        if self.invalidated:
            raise RuntimeError("cudaErrorStreamCaptureInvalidated: operation failed due to a previous error")
        return SimpleNamespace(launch=self.launch)

    def launch(self, stream):
        self.launched += 1


class Pinned:
    """``cupy.cuda.PinnedMemory``, of which the double counts the bytes."""

    taken = 0

    def __init__(self, size, flags):
        assert flags == 1, "memory that every device may use"
        self.memory = bytearray(size)
        Pinned.taken += size


@pytest.fixture
def cupy(monkeypatch):
    """The part of CuPy that the device opens with. Its pool of pinned memory rounds up, as CuPy's does."""
    Pinned.taken = 0
    runtime = SimpleNamespace(getDeviceCount=lambda: 1, hostAllocPortable=1)
    cuda = SimpleNamespace(
        runtime=runtime,
        Device=lambda ordinal: SimpleNamespace(use=lambda: None),
        Stream=StreamDouble,
        PinnedMemory=Pinned,
        PinnedMemoryPointer=lambda memory, offset: memory.memory,
        alloc_pinned_memory=lambda size: Pinned(1 << (size - 1).bit_length(), 1).memory,
        MemoryPool=lambda: SimpleNamespace(malloc=None),
        using_allocator=Allocator,
    )
    made = SimpleNamespace(cuda=cuda, ndarray=np.ndarray)
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


class Allocator:
    """A context that changes nothing."""

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


def test_a_graph_is_launched(device):
    done = []
    launch = device.capture(lambda: done.append(device.compute.capturing))
    assert done == [True] and not device.compute.capturing
    launch()
    assert device.compute.launched == 1


def test_a_capture_that_fails_says_why(device):
    """The first error, not that the capture cannot be ended behind it; and the stream captures no more."""

    def refused():
        device.compute.invalidated = True
        raise NotImplementedError("calling cuBLAS API during stream capture is currently unsupported")

    with pytest.raises(NotImplementedError, match="calling cuBLAS API during stream capture"):
        device.capture(refused)
    assert not device.compute.capturing


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
