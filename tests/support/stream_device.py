"""Double of a GPU with streams, which traces its operations and executes those of transports late."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from halograd.device import Branch
from halograd.device.cupy import StreamBranch
from halograd.kernels.kernel import BatchNormKernels
from tests.support.device_array import DeviceArray, unwrap
from tests.support.fake_cuda import FakeCuda, FakeCupy, FakeEvent, FakeStream
from tests.support.fake_device import Counted, FakeBackend, FakeDevice, FakeDeviceEvent, operands
from tests.support.trace import Trace, bounds

__all__ = ["StreamBackend", "StreamDevice", "TracedArray"]


class StreamDevice(FakeDevice):
    """A :class:`FakeDevice` whose operations go to the current stream, with CuPy's doubles as `cupy`.

    Attributes
    ----------
    trace
        The enqueued operations.
    """

    def __init__(self, rank: int, address: str = "0000:00:00.0") -> None:
        self.trace = Trace(rank)
        self._allocated: dict[int, tuple[int, Any]] = {}
        self.cuda = FakeCuda(self.trace, self._waited, self.seen)
        self.cupy: Any = FakeCupy(self.cuda, address)
        self._beside = self.cupy.cuda.Stream(non_blocking=True)
        self.ordinal, self.host_waits = 0, 0
        super().__init__()

    @property
    def compute(self) -> FakeStream:
        return self.cuda.compute

    def fork(self) -> Branch:
        return StreamBranch(self.cupy, self.compute, self._beside)

    def _waited(self, event: FakeEvent) -> None:
        self.host_waits += 1

    def synchronize(self) -> None:
        super().synchronize()
        self.compute.synchronize()

    def adopt(self, memory: np.ndarray) -> TracedArray:
        self.allocations += 1
        lo, hi = bounds(memory)
        self._allocated[lo] = (hi, weakref.ref(memory))
        return TracedArray(memory, self)

    def holder(self, address: int, nbytes: int) -> Any:
        """Return the array that owns these bytes, or None if it no longer exists."""
        found = [(hi, there()) for lo, (hi, there) in self._allocated.items() if lo <= address < hi]
        return next((there for hi, there in found if there is not None and address + nbytes <= hi), None)

    def run(self, name: str, reads: Sequence[Any], writes: Sequence[Any], work: Any) -> Any:
        """Record an operation and execute it when the current stream reaches it; return its result if immediate."""
        stream, result = self.cuda.current, []
        memory = [[unwrap(a) for a in some if isinstance(a, DeviceArray)] for some in (reads, writes)]
        self.trace.op(name, stream.ptr, *memory)
        stream.enqueue(lambda: result.append(work()))
        return result[0] if result else None

    def mark(self) -> StreamEvent:
        return StreamEvent(self)

    def download(self, array: Any, pinned: np.ndarray) -> None:
        self.run("download", [array], [], lambda: FakeDevice.download(self, array, pinned))

    def upload(self, pinned: np.ndarray, array: Any) -> None:
        self.run("upload", [], [array], lambda: FakeDevice.upload(self, pinned, array))


class StreamEvent(FakeDeviceEvent):
    """Event whose waits are recorded in the trace."""

    device: StreamDevice

    def __init__(self, device: StreamDevice) -> None:
        super().__init__(device)
        self.event = device.cupy.cuda.Event(disable_timing=True)
        self.event.record(device.compute)

    def done(self) -> bool:
        before = self._polls
        done = super().done()
        if done and before == 2:
            self.device.trace.add("host wait", "poll", event=(self.event.key, self.event.version))
        return done

    def wait(self) -> None:
        self.device.trace.add("host wait", "event", event=(self.event.key, self.event.version))
        super().wait()


class TracedArray(DeviceArray):
    """Array of a :class:`StreamDevice`, which records every operation with the arrays that it reads and writes."""

    device: StreamDevice

    def _view(self, memory: np.ndarray) -> TracedArray:
        return TracedArray(memory, self.device, self if self.base is None else self.base)

    def __setitem__(self, key: Any, value: Any) -> None:
        target = self[key]
        self.device.run("set", [value], [target], lambda: DeviceArray.__setitem__(self, key, value))

    def fill(self, value: Any) -> None:
        self.device.run("fill", [value], [self], lambda: DeviceArray.fill(self, value))

    def set(self, values: Any) -> None:
        self.device.run("upload", [], [self], lambda: DeviceArray.set(self, values))

    def copy(self) -> Any:
        return self.device.run("copy", [self], [], lambda: DeviceArray.copy(self))

    def astype(self, dtype: Any, copy: bool = True) -> Any:
        return self.device.run("astype", [self], [], lambda: DeviceArray.astype(self, dtype, copy))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out", ())
        call = super().__array_ufunc__
        if len(out) == 1 and self.device.cuda.current is not self.device.compute:
            self.device.run(ufunc.__name__, inputs, out, lambda: call(ufunc, method, *inputs, **kwargs))
            return out[0]
        return self.device.run(ufunc.__name__, inputs, out, lambda: call(ufunc, method, *inputs, **kwargs))

    def __array_function__(self, func: Any, types: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        call, name = super().__array_function__, func.__name__
        flat = [x for a in [*args, *kwargs.values()] for x in (a if isinstance(a, (tuple, list)) else (a,))]
        writes = [args[0]] if name == "copyto" else [kwargs["out"]] if kwargs.get("out") is not None else []
        if name in ("shape", "reshape", "moveaxis", "transpose", "expand_dims", "squeeze", "broadcast_to"):
            return call(func, types, args, kwargs)
        return self.device.run(
            name, flat[1:] if name == "copyto" else flat, writes, lambda: call(func, types, args, kwargs)
        )


class StreamBackend(FakeBackend):
    """Backend with NumPy's kernels on arrays of a :class:`StreamDevice`; each counts as a write of all its arrays."""

    def __init__(self, rank: int, address: str = "0000:00:00.0") -> None:
        super().__init__()
        self.device.close()
        self.device = StreamDevice(rank, address)
        self._operands: list[Any] = []

    def _on_host(self, factory: Any, *args: Any) -> Any:
        self._operands = [a for a in operands(args) if isinstance(a, DeviceArray)]
        self._name = factory.__name__
        return super()._on_host(factory, *args)

    def _counted(self, made: Any, *more: Any) -> Any:
        inner = super()._counted(made, *more)
        if inner is None or isinstance(inner, (tuple, BatchNormKernels)):
            return inner  # of kernels that came by here
        operands, name, device = self._operands, self._name, self.device
        return Counted(lambda: device.run(name, [], operands, inner), inner)
