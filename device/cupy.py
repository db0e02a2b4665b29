"""CUDA devices by CuPy, and the choice of a device for a rank.

On its device a rank has a compute stream, a stream for uploads ahead of their use, one for branches, and events.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any
from weakref import WeakSet

import numpy as np

from .base import Branch, Device, DeviceError, DeviceGraph, DeviceMemory, Event, packed_as, register

__all__ = ["CupyDevice", "StreamBranch", "choose_ordinal", "count_devices", "cupy_device", "import_cupy"]


def choose_ordinal(requested: str | int | Sequence[int], local_rank: int, count: int) -> int:
    """Return the number of the device for a rank.

    Parameters
    ----------
    requested
        ``"auto"``: the ranks of a node take its devices in turn. A number: that device for all ranks. Several numbers:
        the ranks of a node take these devices in turn.
    local_rank
        Number of the rank among those of its node.
    count
        Number of devices that are visible to this process.

    Raises
    ------
    DeviceError
        If there is no device, or not the requested one.

    Examples
    --------
    >>> [choose_ordinal("auto", rank, 4) for rank in range(6)]
    [0, 1, 2, 3, 0, 1]
    >>> [choose_ordinal([2, 3], rank, 4) for rank in range(3)]
    [2, 3, 2]
    """
    if count < 1:
        raise DeviceError("backend.device: expected a CUDA device, got none (no driver, or none visible)")
    if requested == "auto":
        # If the launcher makes only one device visible to each rank, count is 1.
        return local_rank % count
    chosen = [requested] if isinstance(requested, int) else requested
    if isinstance(chosen, str) or not chosen:
        raise DeviceError(f"backend.device: expected 'auto', a number or numbers, got {requested!r}")
    ordinal = chosen[local_rank % len(chosen)]
    if not 0 <= ordinal < count:
        raise DeviceError(f"backend.device: expected devices from 0 to {count - 1}, got {ordinal}")
    return ordinal


#: Function of pairs (target, source) of views; it returns the function that enqueues their copies or sums.
Copies = Callable[[Sequence[tuple[Any, Any]]], Callable[[], None]]


def import_cupy() -> Any:
    """Return the cupy module.

    Raises
    ------
    DeviceError
        If CuPy cannot be imported; the message has one line.
    """
    try:
        return importlib.import_module("cupy")
    except Exception as error:  # a CuPy for another CUDA version raises various exceptions
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DeviceError(
            f"device: expected CuPy for a GPU, it cannot be imported ({reason}); pip install 'halograd[gpu]'"
        ) from error


def count_devices(cupy: Any) -> int:
    """Return the number of CUDA devices; 0 without a driver."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except Exception:  # no driver, or the driver is too old
        return 0


def cupy_device(ordinal: int = 0) -> CupyDevice:
    """Return the device of this number and make it current. A device is opened once per process, so that all its arrays
    share a stream.
    """
    device = _opened.get(ordinal)
    if device is None:
        device = _opened[ordinal] = CupyDevice(ordinal)
    device.use()
    device.stay_current()
    return device


_opened: dict[int, CupyDevice] = {}

NOT_READY = 600  # cudaErrorNotReady


def arrived(cupy: Any, event: Any) -> bool:
    """Return whether the device has reached an event. Does not wait.

    After a failure of the device, CuPy's ``Event.done`` stays false; this function raises instead.

    Raises
    ------
    Exception
        The device's error, as reported by CUDA.
    """
    status = cupy.cuda.runtime.eventQuery(event.ptr)
    if status not in (0, NOT_READY):
        cupy.cuda.runtime.check_status(status)
    return status == 0


class _StreamEvent:
    """An event on a stream; with a timestamp if `timed`."""

    def __init__(self, cupy: Any, stream: Any, timed: bool) -> None:
        self._cupy = cupy
        self.recorded = cupy.cuda.Event(disable_timing=not timed)
        self.recorded.record(stream)

    def done(self) -> bool:
        return arrived(self._cupy, self.recorded)

    def wait(self) -> None:
        self.recorded.synchronize()


class StreamBranch(Branch):
    """Work on a second stream, which events order with the compute stream. Local."""

    def __init__(self, cupy: Any, compute: Any, second: Any) -> None:
        self._compute, self._second = compute, second
        # CUDA records and awaits events without a timestamp at the least cost.
        self._before, self._after = (cupy.cuda.Event(disable_timing=True) for _ in range(2))

    def __call__(self, run: Callable[[], object]) -> None:
        # In a capture of the compute stream, this wait makes the second stream part of the graph, until it is joined.
        self._before.record(self._compute)
        self._second.wait_event(self._before)
        with self._second:
            run()
        self._after.record(self._second)

    def join(self) -> None:
        self._compute.wait_event(self._after)


class CupyDevice(Device):
    """One CUDA device. Its compute stream becomes the current stream of the thread that opens it. Local.

    Parameters
    ----------
    ordinal
        CUDA's number of the device.

    Attributes
    ----------
    compute
        Stream of the kernels, of uploads and downloads.
    pinned_bytes
        Pinned memory allocated so far [B].
    fused_copies, fused_sums
        Functions that combine many copies, or sums, of boxes in one launch, with words as wide as alignment permits;
        None: one CuPy operation each.

    Raises
    ------
    DeviceError
        If there is no CuPy, no driver or no such device.
    """

    captures = True

    def __init__(self, ordinal: int = 0) -> None:
        cupy = self._cupy = import_cupy()
        count = count_devices(cupy)
        if not count:
            raise DeviceError("device: expected a CUDA device, got none (no driver, or none visible); see nvidia-smi")
        if not 0 <= ordinal < count:
            raise DeviceError(f"backend.device: expected a device from 0 to {count - 1}, got {ordinal}")
        self.ordinal, self.pinned_bytes = ordinal, 0
        self.name = f"cuda:{ordinal}"
        self.use()  # before streams are created: they belong to the current device
        # Other streams would wait for work of other libraries on CUDA's null stream, and it for them.
        self.compute = cupy.cuda.Stream(non_blocking=True)
        # For uploads ahead of their use, and for branches.
        self._ahead, self._second = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
        self.stay_current()
        self.fused_copies: Copies | None = None
        self.fused_sums: Copies | None = None
        self._graphs: WeakSet[DeviceGraph] = WeakSet()
        register(self)

    # -- arrays ---------------------------------------------------------------------------------
    @property
    def cupy(self) -> Any:
        """The module ``cupy``, for CUDA features that :class:`Device` lacks."""
        return self._cupy

    def owns(self, array: Any) -> bool:
        return isinstance(array, self._cupy.ndarray) and array.device.id == self.ordinal

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._cupy.empty(tuple(shape), np.dtype(dtype))

    def zeros(self, shape: Sequence[int], dtype: Any) -> Any:
        return self._cupy.zeros(tuple(shape), np.dtype(dtype))

    def pinned(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        count = int(np.prod(tuple(shape), dtype=np.int64))
        nbytes = count * np.dtype(dtype).itemsize
        # Without CuPy's pool, which rounds up to a power of two: 512 MiB of pinned memory for 300.
        cuda = self._cupy.cuda
        memory = cuda.PinnedMemoryPointer(cuda.PinnedMemory(max(1, nbytes), cuda.runtime.hostAllocPortable), 0)
        array = np.frombuffer(memory, np.uint8, nbytes)
        array.fill(0)
        self.pinned_bytes += nbytes
        return array.view(dtype).reshape(tuple(shape))

    # -- copies ---------------------------------------------------------------------------------
    def to_host(self, array: Any) -> np.ndarray:
        array = self._cupy.ascontiguousarray(array)
        return np.asarray(array.get(stream=self.compute))

    def assign(self, target: Any, values: np.ndarray) -> None:
        values = packed_as(values, target)
        if target.flags.c_contiguous:
            target.set(values, stream=self.compute)
        else:
            packed = self.empty(target.shape, target.dtype)
            packed.set(values, stream=self.compute)
            np.copyto(target, packed)
        # The copy `values` ends with this call, so the device must have read it.
        self.compute.synchronize()

    def download(self, array: Any, pinned: np.ndarray) -> None:
        if array.nbytes:
            array.data.copy_to_host_async(pinned.ctypes.data, array.nbytes, self.compute)

    def upload(self, pinned: np.ndarray, array: Any) -> None:
        if array.nbytes:
            array.data.copy_from_host_async(pinned.ctypes.data, array.nbytes, self.compute)

    def mark(self) -> Event:
        return _StreamEvent(self._cupy, self.compute, timed=False)

    def upload_ahead(self, pairs: Sequence[tuple[np.ndarray, Any]], after: Event | None = None) -> Event:
        # Kernels enqueued before `after` may still read the arrays.
        if isinstance(after, _StreamEvent):
            self._ahead.wait_event(after.recorded)
        for pinned, array in pairs:
            if array.nbytes:
                array.data.copy_from_host_async(pinned.ctypes.data, array.nbytes, self._ahead)
        return _StreamEvent(self._cupy, self._ahead, timed=False)

    def join(self, event: Event) -> None:
        assert isinstance(event, _StreamEvent)
        self.compute.wait_event(event.recorded)

    def synchronize(self) -> None:
        self._ahead.synchronize()
        self.compute.synchronize()

    def copies(self, pairs: Sequence[tuple[Any, Any]]) -> Callable[[], None]:
        return self.fused_copies(pairs) if self.fused_copies else super().copies(pairs)

    def sums(self, pairs: Sequence[tuple[Any, Any]]) -> Callable[[], None]:
        return self.fused_sums(pairs) if self.fused_sums else super().sums(pairs)

    def fork(self) -> Branch:
        return StreamBranch(self._cupy, self.compute, self._second)

    # -- time, graphs, memory -------------------------------------------------------------------
    def timestamp(self) -> Any:
        return _StreamEvent(self._cupy, self.compute, timed=True)

    def seconds(self, first: Any, second: Any) -> float:
        # CUDA returns milliseconds.
        return float(self._cupy.cuda.get_elapsed_time(first.recorded, second.recorded)) * 1e-3

    def capture(self, run: Callable[[], None]) -> DeviceGraph:
        # Arrays that are allocated during capture must belong to the graph alone: they come from a separate pool that
        # lives as long as the graph. (Streams are captured in relaxed mode, in which the pool may allocate.)
        pool = self._cupy.cuda.MemoryPool()
        try:
            with self._cupy.cuda.using_allocator(pool.malloc):
                recorded = self._captured(run)
        except BaseException:
            pool.free_all_blocks()  # CuPy leaks the blocks of a deleted pool
            raise

        def free() -> None:
            self.compute.synchronize()
            pool.free_all_blocks()

        graph = DeviceGraph(recorded, self.compute, free)
        self._graphs.add(graph)
        return graph

    def drop_graphs(self) -> None:
        for graph in tuple(self._graphs):
            graph.drop(waits=False)

    def _captured(self, run: Callable[[], None]) -> Any:
        if not self._is_current():
            raise DeviceError(
                "graph: expected the device's compute stream as the current one, got another, whose work "
                "a graph would not contain; leave the stream context around the call"
            )
        self.compute.begin_capture()
        try:
            run()
        except BaseException:
            # The error has ended the capture, so ending it fails too. The first error names the cause.
            with suppress(Exception):
                self.compute.end_capture()
            raise
        try:
            return self.compute.end_capture()
        except Exception as error:
            reason = " ".join(str(error).split())
            raise DeviceError(
                f"graph: expected work that can be captured, got {reason}; set backend.graph = false"
            ) from error

    def use(self) -> None:
        self._cupy.cuda.Device(self.ordinal).use()

    def stay_current(self) -> None:
        """Make `compute` the current stream of this thread, permanently.

        ``Stream.use()`` does not last: at the end of any ``with stream:`` (even inside CuPy), the current stream
        becomes that of the enclosing ``with``, or else the null stream. So this enters a ``with`` that never ends.
        """
        if not self._is_current():
            self.compute.__enter__()

    def _is_current(self) -> bool:
        return bool(self._cupy.cuda.get_current_stream().ptr == self.compute.ptr)

    def computing(self) -> AbstractContextManager[Any]:
        self.use()
        return self.compute

    def memory(self) -> DeviceMemory:
        # Free and total are those of the whole device, which ranks may share; used is this process's alone.
        free, total = self._cupy.cuda.runtime.memGetInfo()
        return DeviceMemory(int(self._cupy.get_default_memory_pool().used_bytes()), int(free), int(total))

    def describe(self) -> str:
        properties = self._cupy.cuda.runtime.getDeviceProperties(self.ordinal)
        name = properties["name"]
        text = name.decode() if isinstance(name, bytes) else str(name)
        return f"{self.name} {text}, {properties['totalGlobalMem'] / 2**30:.0f} GiB"
