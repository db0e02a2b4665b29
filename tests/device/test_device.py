"""Devices: the device of an array, the device of a rank, errors, and comparison of the double with CuPy."""

import inspect

import numpy as np
import pytest

from halograd.device import HOST, DeviceError, as_dtype, device_of, on_device
from halograd.device.cupy import CupyDevice, choose_ordinal, count_devices, import_cupy
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
