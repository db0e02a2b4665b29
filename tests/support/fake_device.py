"""Double of a GPU: arrays that the host cannot read, copies that complete late, and a count of the host's waits."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, ClassVar
from weakref import WeakSet

import numpy as np
import pytest

from halograd.device import LOW, Device, DeviceGraph, as_dtype, is_low, register, unregister
from halograd.device.base import packed_as
from halograd.kernels import checks
from halograd.kernels.backend import Backend
from halograd.kernels.geometry import Geometry, tensor_core_channels
from halograd.kernels.kernel import BatchNormKernels, Kernel, chain
from halograd.kernels.losses import LossKernel
from halograd.kernels.memory import Scratch
from halograd.kernels.numpy import NumpyBackend
from halograd.kernels.summed import SummedConvolution, on_tensor_cores
from tests.support.device_array import DeviceArray, unwrap

__all__ = ["FakeBackend", "FakeDevice", "operands"]

POISON = 0xA5


class FakeDeviceEvent:
    """Position in the queue of a :class:`FakeDevice`, or copies on another stream that have not been joined yet.

    Attributes
    ----------
    copies
        Array, pinned memory and its values, of an upload ahead; None for a position in the queue. A loader's thread
        creates the event and the main thread joins it, so the event holds the copies, and not the device.
    """

    def __init__(self, device: FakeDevice, copies: list[tuple[DeviceArray, np.ndarray, np.ndarray]] | None = None):
        self.device, self.number, self.copies, self._polls = device, device.number, copies, 0

    def done(self) -> bool:
        """Return True from the third call on, because operations take time."""
        self.device.seen()
        self._polls += 1
        if self._polls > 2:
            self.device.arrive(self)
        return self._polls > 2

    def wait(self) -> None:
        device = self.device
        device.seen()
        device.waits += 1
        device.waited_here += 1
        if self.copies is None and self.number == device.number:
            device.idled += 1
        device.arrive(self)


class FakeDevice(Device):
    """Device that executes kernels at once, in the order of the queue; copies to the host complete when awaited.

    Until then pinned memory that a download goes to is poisoned, and memory that an upload comes from must not change.

    Attributes
    ----------
    number
        Number of the operation that was enqueued last.
    synchronizations
        Reason of every wait of the host for the whole queue.
    waits
        Number of the host's waits for an event.
    idled
        Number of these waits for the last operation of the queue, after which the device is idle.
    allocations
        Number of arrays created so far.
    strangers
        Threads that used the device without `use`: CUDA would open a context on the first device of the machine.
    operations
        Operations on arrays that CuPy executes itself: ufuncs, copies, casts, fills, reductions, each of which takes
        the host several times as long as a launch.
    library_calls
        Number of kernels that a backend takes from cuDNN or cuBLAS.
    """

    name = "fake:0"
    captures = True

    def __init__(self) -> None:
        self._here, self.strangers = threading.local(), set[str]()
        FakeDevice.use(self)
        self.number = self.waits = self.idled = self.allocations = self.operations = self.library_calls = 0
        self.synchronizations: list[str] = []
        self.fused_copies: Any = None
        self.fused_sums: Any = None
        self.graphs: WeakSet[DeviceGraph] = WeakSet()
        self.recording: Any = None
        self._downloads: list[tuple[int, np.ndarray, np.ndarray]] = []
        self._uploads: list[tuple[int, np.ndarray, np.ndarray]] = []
        register(self)

    def close(self) -> None:
        unregister(self)
        assert not self.strangers, f"threads without device: {sorted(self.strangers)}"

    def use(self) -> None:
        self._here.used = True

    @property
    def waited_here(self) -> int:
        """Number of waits of this thread: another one, such as a loader's, may wait while a graph is captured."""
        return getattr(self._here, "waits", 0)

    @waited_here.setter
    def waited_here(self, count: int) -> None:
        self._here.waits = count

    # -- bookkeeping ----------------------------------------------------------------------------
    def enqueued(self) -> None:
        self.number += 1

    def operated(self) -> None:
        self.operations += 1
        self.enqueued()

    def seen(self) -> None:
        """Record that this thread uses the device."""
        if not hasattr(self._here, "used"):
            self.strangers.add(threading.current_thread().name)

    def synchronized(self, why: str) -> None:
        self.synchronizations.append(why)
        self._deliver(self.number)

    def arrive(self, event: FakeDeviceEvent) -> None:
        """Complete everything that was enqueued before the event."""
        if event.copies is None:
            self._deliver(event.number)
            return
        for _, pinned, values in event.copies:
            assert np.array_equal(_bytes(pinned), _bytes(values)), "pinned memory changed while it was copied ahead"

    def _deliver(self, number: int) -> None:
        for item in [i for i in self._downloads if i[0] <= number]:
            _, pinned, values = item
            np.copyto(pinned, values)
        self._downloads = [i for i in self._downloads if i[0] > number]
        for _, pinned, values in [i for i in self._uploads if i[0] <= number]:
            assert np.array_equal(_bytes(pinned), _bytes(values)), "pinned memory changed while it was copied"
        self._uploads = [i for i in self._uploads if i[0] > number]

    def _settle_uploads(self, pinned: np.ndarray) -> None:
        """Check that the pinned memory of pending uploads has not changed, and remove these uploads from the list."""
        for _, other, values in self._uploads:
            if other is pinned:
                assert np.array_equal(_bytes(other), _bytes(values)), "pinned memory changed while it was copied"
        self._uploads = [i for i in self._uploads if i[1] is not pinned]

    def adopt(self, memory: np.ndarray) -> DeviceArray:
        self.allocations += 1
        return DeviceArray(memory, self)

    # -- arrays ---------------------------------------------------------------------------------
    def owns(self, array: Any) -> bool:
        return isinstance(array, DeviceArray) and array.device is self

    def address(self, array: Any) -> int:
        return int(array.__cuda_array_interface__["data"][0])

    def empty(self, shape: Sequence[int], dtype: Any) -> DeviceArray:
        array = np.empty(tuple(shape), dtype)
        _bytes(array).fill(POISON)
        return self.adopt(array)

    def pinned(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return np.zeros(tuple(shape), dtype)

    def to_host(self, array: Any) -> np.ndarray:
        return array.get()

    def assign(self, target: Any, values: np.ndarray) -> None:
        values = packed_as(values, target)
        if target.flags.c_contiguous:
            target.set(values)
        else:
            target[...] = self.array(values)

    def download(self, array: Any, pinned: np.ndarray) -> None:
        assert array.flags.c_contiguous and pinned.flags.c_contiguous and array.nbytes == pinned.nbytes
        self._settle_uploads(pinned)  # they are enqueued before, so they have read it when this writes
        self.enqueued()
        self._downloads.append((self.number, pinned, unwrap(array).copy()))
        _bytes(pinned).fill(POISON)

    def upload(self, pinned: np.ndarray, array: Any) -> None:
        assert array.flags.c_contiguous and pinned.flags.c_contiguous and array.nbytes == pinned.nbytes
        self._settle_uploads(pinned)
        self.enqueued()
        self._uploads.append((self.number, pinned, pinned.copy()))
        np.copyto(unwrap(array), pinned)

    def mark(self) -> FakeDeviceEvent:
        return FakeDeviceEvent(self)

    def upload_ahead(self, pairs: Sequence[tuple[np.ndarray, Any]], after: Any = None) -> FakeDeviceEvent:
        self.seen()
        for _, array in pairs:
            _bytes(unwrap(array)).fill(POISON)
        return FakeDeviceEvent(self, [(array, pinned, pinned.copy()) for pinned, array in pairs])

    def join(self, event: Any) -> None:
        self.arrive(event)
        for array, _, values in event.copies:
            np.copyto(unwrap(array), values)
        event.copies.clear()

    def synchronize(self) -> None:
        self.synchronized("synchronize()")

    def copies(self, pairs: Any) -> Any:
        return self.fused_copies(pairs) if self.fused_copies else super().copies(pairs)

    def sums(self, pairs: Any) -> Any:
        return self.fused_sums(pairs) if self.fused_sums else super().sums(pairs)

    def timestamp(self) -> Any:
        return _Stamp(self.number)

    def seconds(self, first: Any, second: Any) -> float:
        return 1e-6 * (second.number - first.number)

    def capture(self, run: Any) -> Any:
        """Execute the operations and return a graph of them, as a CUDA graph; its first launch does nothing."""
        before = len(self.synchronizations), self.waited_here
        self.recording = recorded = _Recorded(run)
        try:
            run()
        finally:
            self.recording = None
        # An AssertionError would be taken for a capture that failed, and the operations would run again.
        if (len(self.synchronizations), self.waited_here) != before:
            pytest.fail("the host waits within a graph")
        graph = DeviceGraph(recorded)
        self.graphs.add(graph)
        return graph

    def drop_graphs(self) -> None:
        for graph in tuple(self.graphs):
            graph.drop()


class _Recorded:
    """Double of a CUDA graph; its content lives as long as a reference to it."""

    def __init__(self, run: Any) -> None:
        self._run, self._done = run, True

    def launch(self, stream: Any) -> None:
        if not self._done:
            self._run()
        self._done = False


class _Stamp:
    def __init__(self, number: int) -> None:
        self.number = number

    def done(self) -> bool:
        return True


def mapped(value: Any, change: Any) -> Any:
    """Apply a function to a value, or to each value of a list, tuple or dataclass."""
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(v, change) for v in value)
    if isinstance(value, Geometry) or not is_dataclass(value):
        return change(value)
    return replace(value, **{f.name: mapped(getattr(value, f.name), change) for f in fields(value)})


def operands(args: Any) -> list[Any]:
    """Return the arguments of a kernel factory one by one, including the items of lists and dataclasses."""
    found: list[Any] = []
    mapped(list(args), lambda value: found.append(value) or value)
    return found


def _each(kernels: Any) -> Any:
    made = list(kernels)
    return lambda: [kernel() for kernel in made]


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


class Counted(LossKernel):
    """Loss kernel of another backend, which is executed by a given function."""

    def __init__(self, run: Any, made: Any) -> None:
        super().__init__(run, made.impl, made.workspace_bytes, made.close)
        self._made = made

    def set(self, samples: int, scale: float) -> None:
        self._made.set(samples, scale)


#: What cuDNN and cuBLAS do.
_PRODUCTS = {"_conv_forward", "_conv_backward_data", "_conv_backward_filter"}
_PRODUCTS |= {"_dense_forward", "_dense_backward_data", "_dense_backward_filter"}


def _delegated(name: str) -> Any:
    """Return a method of :class:`FakeBackend` that uses our own kernel if there is one, otherwise NumPy's."""

    def make(self: Any, *args: Any) -> Any:
        if self.cuda is None or name in _PRODUCTS:
            return self._on_host(getattr(self._numpy, name), *args)
        return getattr(self.cuda, name)(*args)

    return make


class _Delegated(Backend):
    """Backend whose methods are those of another backend."""

    locals().update(
        {f"_{name}": _delegated(f"_{name}") for name in dir(Backend) if callable(getattr(Backend, f"_{name}", None))}
    )


class FakeBackend(_Delegated):
    """NumPy's kernels on arrays of a fake device; with `cuda` our own kernels, which the CPU executes.

    Kernels compute arrays of 16 bits in float32 and round the results, as tensor cores do.
    """

    name: ClassVar[str] = "fake"
    rounds_gradients: ClassVar[bool] = True
    #: Whether plans of cuDNN compute convolutions and the sums of norms.
    epilogues = False

    def __init__(self, cuda: Any = None) -> None:
        self._numpy, self.cuda = NumpyBackend(), cuda
        self.fuses_norms = self.reads_rounded = cuda is not None
        self.device = FakeDevice()
        self.xp, self.version, self.threads = np, "0", 1
        self._low = [as_dtype(name) for name in LOW]
        self.dtypes = self.conv_dtypes = (*self._numpy.dtypes, *LOW)
        self.dtype_remedy = self._numpy.dtype_remedy
        if cuda is not None:
            cuda.device, boxes = self.device, cuda.boxes
            cuda.scratch = Scratch(self.device.empty)  # rules of the user mix it with other arrays of the device
            self.device.fused_copies = lambda pairs: boxes.copy([(source, target) for target, source in pairs])
            self.device.fused_sums = lambda pairs: _each(boxes.add_into([(s, t)]) for t, s in pairs)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self.device.empty(shape, dtype)

    def synchronize(self) -> None:
        self.device.synchronize()

    @property
    def held_bytes(self) -> int:
        return self._numpy.held_bytes

    def close(self) -> None:
        self._numpy.close()
        self.device.close()

    def _group_norm(self, arrays: Any) -> Any:
        return Backend._group_norm(self, arrays) if self.cuda is None else self.cuda._group_norm(arrays)

    def _on_host(self, factory: Any, *args: Any) -> Any:
        for array in operands(args):
            if isinstance(array, np.ndarray) and array.ndim:
                raise TypeError(f"a kernel of the device got an array of the host: {array.shape}")
        shadows: dict[Any, tuple[np.ndarray, np.ndarray]] = {}

        def plain(arg: Any) -> Any:
            array = unwrap(arg)
            if not isinstance(array, np.ndarray) or not is_low(array.dtype):
                return array
            key = (array.__array_interface__["data"][0], array.shape, array.strides)
            return shadows.setdefault(key, (array, np.zeros(array.shape, np.float32)))[1]

        made = factory(*mapped(list(args), plain))
        return self._counted(made, list(shadows.values()))

    def _counted(self, made: Any, shadows: list[tuple[np.ndarray, np.ndarray]]) -> Any:
        if isinstance(made, tuple):
            return tuple(self._counted(part, shadows) for part in made)
        if isinstance(made, BatchNormKernels):
            parts = (made.statistics, made.forward, made.backward_sums, made.backward_data)
            return BatchNormKernels(*(self._counted(part, shadows) for part in parts))
        if made is None:
            return None

        def run() -> None:
            self.device.enqueued()
            self.device.library_calls += 1
            for low, wide in shadows:
                np.copyto(wide, low)
            before = [wide.copy() for _, wide in shadows]
            made()
            # What was not written may lie in the same memory as what was: arrays of other operations, of a pair.
            for (low, wide), old in zip(shadows, before):
                np.copyto(low, wide, casting="unsafe", where=wide.view(np.uint32) != old.view(np.uint32))

        return Counted(run, made)

    def _check_conv_dtypes(self, what: str, x: Any, y: Any, w: Any, b: Any) -> None:
        checks.check_dtypes(what, self.dtypes, "", x=x, y=y)
        self._check_beside(what, x, w, b)

    def _check_dense_gradients(self, what: str, x: Any, dy: Any, dw: Any, db: Any) -> None:
        checks.check_dtypes(what, self.dtypes, "", x=x, dy=dy)
        self._check_beside(what, x, dw, db)

    def _check_beside(self, what: str, x: Any, *others: Any) -> None:
        legal = {x.dtype.name, "float32"} if is_low(x.dtype) else {x.dtype.name}
        assert {a.dtype.name for a in others if a is not None} <= legal, f"{what}: {x.dtype} beside others"

    def padded_channels(self, channels: int, dtype: Any) -> int:
        return tensor_core_channels(channels, dtype)

    def _suited(self, array: Any, x: Any) -> Any:
        """Return parameters in the dtype of the images, as cuDNN needs them; a copy if their own dtype differs."""
        same = array is None or array.dtype == x.dtype or self.cuda is None
        return array if same else self.empty(array.shape, x.dtype)

    def _conv_forward(self, x: Any, w: Any, b: Any, y: Any, geometry: Geometry, relu: bool) -> Kernel:
        weights, bias = self._suited(w, x), self._suited(b, x)
        kernel = self._on_host(self._numpy._conv_forward, x, weights, bias, y, geometry, relu)
        return self._around(kernel, [(a, c) for a, c in ((w, weights), (b, bias)) if a is not c], [])

    def _conv_backward_data(self, dy: Any, w: Any, dx: Any, geometry: Geometry) -> Kernel:
        weights = self._suited(w, dx)
        kernel = self._on_host(self._numpy._conv_backward_data, dy, weights, dx, geometry)
        return self._around(kernel, [(w, weights)] if weights is not w else [], [])

    def _conv_backward_filter(self, x: Any, dy: Any, dw: Any, db: Any, geometry: Geometry) -> Kernel:
        gradient = self._suited(dw, x)
        kernel = self._on_host(self._numpy._conv_backward_filter, x, dy, gradient, None, geometry)
        behind = [] if db is None else [self._bias_gradient(dy, db)]
        return self._around(kernel, [], [] if gradient is dw else [(gradient, dw)], *behind)

    def fuses_sums(self, conv: SummedConvolution) -> bool:
        return self.epilogues and on_tensor_cores(conv)

    def _with_statistics(self, separate: Kernel, x: Any, w: Any, b: Any, y: Any, sums: Any, geometry: Any) -> Kernel:
        return self._one_plan(separate, sums)

    def _with_gradient_sums(self, separate: Kernel, dy: Any, w: Any, geometry: Any, norm: Any) -> Kernel:
        return self._one_plan(separate, norm.sums, norm.training.dbeta, norm.training.dgamma)

    def _one_plan(self, separate: Kernel, sums: Any, *gradients: Any) -> Kernel:
        """Return the kernels of a plan whose sums are copied from float32; it computes them as `separate` does."""
        found = sums if sums.dtype == np.float32 else self.device.empty(sums.shape, np.float32)
        written = gradients if gradients and gradients[0] is not None else found
        copies = [] if written is sums else [self.cuda.boxes.copy(list(zip(written, sums)))]
        device, launched = self.device, self.cuda.launcher.launched

        def run() -> None:
            before = device.operations, device.library_calls, len(launched)
            separate()
            device.operations, device.library_calls = before[0], before[1] + 1
            del launched[before[2] :]
            for row, total in zip(written, sums):
                unwrap(row)[...] = unwrap(total)

        return chain(Kernel(run, "plan"), *copies)

    def _around(self, kernel: Kernel, before: Any, after: Any, *more: Kernel) -> Kernel:
        parts = [self.cuda.boxes.copy([pair]) for pair in before], [self.cuda.boxes.copy([pair]) for pair in after]
        return chain(*parts[0], kernel, *parts[1], *more)
