"""The interface of devices.

Work on a device is *enqueued*: a call returns before the work is done, and enqueued work runs in order. The host
detects completed work only by an :class:`Event`. ::

    host      pack  download  mark ->t    launch kernels ...   t.wait()  send     ...   upload(pinned)   unpack
    device         [pack][download]       [kernels ...........................]        [upload][unpack]

All code above the kernels uses :class:`Device` and NumPy's functions, which dispatch to the library of a device array
(CuPy). So the same code runs on the host, on a GPU, and on the tests' double of a GPU.

:data:`HOST` is the host: NumPy arrays, and calls that return when they are done. :func:`device_of` finds the device of
an array. :data:`LOW` names the 16-bit types, and :func:`wide` returns the type of their sums and parameters.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from halograd.errors import UserError

__all__ = [
    "HOST",
    "LOW",
    "Branch",
    "Device",
    "DeviceError",
    "DeviceMemory",
    "Event",
    "HostDevice",
    "TimedEvent",
    "as_dtype",
    "device_of",
    "is_low",
    "on_device",
    "packed_as",
    "register",
    "unregister",
    "wide",
]


#: 16-bit types, for activations and their gradients. Parameters, sums and statistics are then float32.
LOW = ("float16", "bfloat16")
_LOW = frozenset([np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)])  # dtype.name is slow


def as_dtype(name: Any) -> np.dtype:
    """Return the dtype of this name; ``bfloat16`` is that of ml_dtypes."""
    # NumPy has no bfloat16 of its own.
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def is_low(dtype: Any) -> bool:
    """Return whether a dtype, or the dtype of this name, has 16 bits."""
    return dtype in LOW if isinstance(dtype, str) else np.dtype(dtype) in _LOW


def wide(dtype: Any) -> np.dtype:
    """Return the dtype of parameters, statistics and sums for activations of dtype `dtype`.

    >>> wide("float16"), wide("float64")
    (dtype('float32'), dtype('float64'))
    """
    return np.dtype(np.float32) if is_low(dtype) else np.dtype(dtype)


class DeviceGraph:
    """Recorded device work that one call enqueues again. Local.

    Free the graph by :meth:`drop`, not by deleting references: NCCL cannot end a communicator while a graph contains
    its calls, and tracebacks or reference cycles may keep a reference.

    Parameters
    ----------
    recorded
        Object with a method ``launch(stream)``. Only the `DeviceGraph` may refer to it.
    free
        Function that frees the graph's memory after `drop`; it may wait for the device.
    """

    def __init__(self, recorded: Any, stream: Any = None, free: Callable[[], None] = lambda: None) -> None:
        self._held: tuple[Any, Any, Callable[[], None]] | None = (recorded, stream, free)

    def __call__(self) -> None:
        held = self._held  # another thread may drop it meanwhile
        if held is None:
            raise DeviceError("graph: expected a live graph, got a dropped one; build the executor again")
        held[0].launch(held[1])

    def drop(self, waits: bool = True) -> None:
        """Free the graph; idempotent. With ``waits=False`` its memory is not freed, because the device may be stuck."""
        held, self._held = self._held, None
        if held is not None:
            free = held[2]
            # `free` returns the graph's memory, so the graph must end before: this tuple is its last reference.
            del held
            if waits:
                free()


class DeviceError(UserError):
    """Error: a device is missing or lacks a feature; the message contains the remedy."""


class Event(Protocol):
    """An event: a position in the queue of a device."""

    def done(self) -> bool:
        """Return whether all earlier work is done. Does not wait."""
        ...

    def wait(self) -> None:
        """Wait on the host until all earlier work is done."""
        ...


class TimedEvent(Protocol):
    """A position in the queue with a timestamp."""

    def done(self) -> bool:
        """Return whether the device has reached the position. Does not wait."""
        ...


class Branch:
    """Work that may run concurrently with work enqueued after it, until it is joined. Local.

    This base class enqueues the work in order, like all other work.
    """

    def __call__(self, run: Callable[[], object]) -> None:
        """Call `run`, which enqueues the work, after all work enqueued so far."""
        run()

    def join(self) -> None:
        """Make later work wait for the work of the last call."""


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device [B]: used by this process's arrays, free, and total."""

    used: int
    free: int
    total: int


class Device(ABC):
    """Memory, copies and events of one device, for one rank. All methods are local.

    Attributes
    ----------
    name
        Name for messages and reports.
    is_host
        Whether arrays are NumPy arrays and every call returns when its work is done.
    captures
        Whether :meth:`capture` records graphs.
    chunk
        Elements per call of elementwise NumPy functions: enough to make launch costs small.
    """

    name: str
    is_host = False
    captures = False
    chunk = 1 << 24

    # -- arrays ---------------------------------------------------------------------------------
    @abstractmethod
    def owns(self, array: Any) -> bool:
        """Return whether this device owns an array."""

    @abstractmethod
    def address(self, array: Any) -> int:
        """Return the address of the first element."""

    @abstractmethod
    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return a packed array on the device, contents undefined."""

    def zeros(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return a packed array of zeros on the device."""
        array = self.empty(shape, dtype)
        array.fill(0)
        return array

    def array(self, values: Any, dtype: Any = None) -> Any:
        """Return an array on the device with the values of a host array."""
        values = np.asarray(values, dtype)
        result = self.empty(values.shape, values.dtype)
        self.assign(result, values)
        return result

    @abstractmethod
    def pinned(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        """Return a packed array of zeros in host memory that `download` and `upload` access directly."""

    # -- blocking copies ------------------------------------------------------------------------
    @abstractmethod
    def to_host(self, array: Any) -> np.ndarray:
        """Return an array as a packed NumPy array; on the host, the array itself. Waits: do not call it in a step."""

    @abstractmethod
    def assign(self, target: Any, values: np.ndarray) -> None:
        """Copy a host array: ``target[...] = values``. `values` may be changed after the call. May wait."""

    # -- asynchronous copies --------------------------------------------------------------------
    @abstractmethod
    def download(self, array: Any, pinned: np.ndarray) -> None:
        """Enqueue the copy of a packed array to pinned memory. Read `pinned` only after waiting for a later `mark`."""

    @abstractmethod
    def upload(self, pinned: np.ndarray, array: Any) -> None:
        """Enqueue the copy of pinned memory to a packed array. Do not change `pinned` before a later `mark` is done."""

    @abstractmethod
    def mark(self) -> Event:
        """Return an event for everything enqueued so far."""

    def upload_ahead(self, pairs: Sequence[tuple[np.ndarray, Any]], after: Event | None = None) -> Event:
        """Enqueue uploads ``(pinned, array)`` on a separate stream, after event `after`; return an event after them.

        The compute stream waits for them in :meth:`join` only; this base class has no separate stream, and uploads in
        order. A thread other than that of the kernels may call this.
        """
        for pinned, array in pairs:
            self.upload(pinned, array)
        return self.mark()

    def join(self, event: Event) -> None:
        """Make later work wait for this event; the host does not wait."""
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all enqueued work is done."""

    # -- copies within the device ---------------------------------------------------------------
    def copies(self, pairs: Sequence[tuple[Any, Any]]) -> Callable[[], None]:
        """Return a function that enqueues ``target[...] = source`` for pairs (target, source) of equally shaped views.

        The dtypes are any two floating-point types, or equal.
        """
        fixed = tuple(pairs)

        def run() -> None:
            for target, source in fixed:
                np.copyto(target, source)

        return run

    def sums(self, pairs: Sequence[tuple[Any, Any]]) -> Callable[[], None]:
        """Return a function that enqueues ``target += source`` for pairs (target, source) of equally shaped views.

        The sums are computed in the order of `pairs`.
        """
        fixed = tuple(pairs)

        def run() -> None:
            for target, source in fixed:
                np.add(target, source, out=target)

        return run

    # -- time -----------------------------------------------------------------------------------
    @abstractmethod
    def timestamp(self) -> TimedEvent:
        """Return a timestamp after all work enqueued so far."""

    @abstractmethod
    def seconds(self, first: TimedEvent, second: TimedEvent) -> float:
        """Return the time from one timestamp to another, both done [s]."""

    def fork(self) -> Branch:
        """Return a branch of the compute stream, which may be used repeatedly, even while a graph is captured."""
        return Branch()

    # -- graphs, threads, memory ----------------------------------------------------------------
    def capture(self, run: Callable[[], None]) -> DeviceGraph:
        """Return a graph of the work that `run` enqueues. `run` is called once and must not wait.

        Raises
        ------
        DeviceError
            If the device has no graphs, or the work cannot be captured.
        """
        raise DeviceError(f"graph: expected a device that captures graphs, got {self.name}; set backend.graph = false")

    def drop_graphs(self) -> None:
        """Drop all captured graphs, even if they are referenced. Does not wait, and does not free their memory."""
        return None

    def use(self) -> None:
        """Make this the device of the calling thread."""
        return None

    def close(self) -> None:
        """Close the device and unregister it from `device_of`; idempotent. No-op for a device that is never closed."""
        return None

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context in which the calling thread enqueues kernels."""
        return nullcontext()

    def memory(self) -> DeviceMemory | None:
        """Return the used, free and total memory; None for the host."""
        return None

    def describe(self) -> str:
        """Return one line for the log."""
        return self.name


def packed_as(values: Any, target: Any) -> np.ndarray:
    """Return host values as a packed array of the shape and dtype of `target`.

    `ascontiguousarray` is not used because it adds an axis to 0-d arrays.
    """
    return np.array(np.broadcast_to(values, target.shape), target.dtype, order="C", copy=True)


class _Now:
    """An event of the host, whose work is always done."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class HostDevice(Device):
    """Host memory. Local."""

    name = "host"
    is_host = True
    # Several buffers of this size fit into the second-level cache.
    chunk = 1 << 15

    def owns(self, array: Any) -> bool:
        return not hasattr(array, "__cuda_array_interface__")  # numbers and lists belong to the host too

    def address(self, array: Any) -> int:
        return int(array.__array_interface__["data"][0])

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return np.empty(tuple(shape), dtype)

    def pinned(self, shape: Sequence[int], dtype: Any) -> np.ndarray:
        return np.zeros(tuple(shape), dtype)

    def to_host(self, array: Any) -> np.ndarray:
        return array

    def assign(self, target: Any, values: np.ndarray) -> None:
        target[...] = values

    def download(self, array: Any, pinned: np.ndarray) -> None:
        np.copyto(pinned, array)

    def upload(self, pinned: np.ndarray, array: Any) -> None:
        np.copyto(array, pinned)

    def mark(self) -> Event:
        return _Now()

    def synchronize(self) -> None:
        return None

    def timestamp(self) -> _Now:
        return _Now()

    def seconds(self, first: Any, second: Any) -> float:
        return second.at - first.at


HOST = HostDevice()


#: Open devices, without the host, whose arrays have the type of NumPy. The device opened last comes first.
_devices: list[Device] = []


def register(device: Device) -> None:
    """Let `device_of` find a device. The device registered last is tried first."""
    _devices.insert(0, device)


def unregister(device: Device) -> None:
    """Remove a device from `device_of`; no-op if it is not registered."""
    _devices[:] = [other for other in _devices if other is not device]


def device_of(*arrays: Any) -> Device:
    """Return the device of some arrays; None values are ignored.

    Raises
    ------
    DeviceError
        If the arrays belong to different devices, or to one that no kernel backend has opened.
    """
    devices: list[Device] = []
    for array in arrays:
        if array is None:
            continue
        # `_of` tries all open devices; most arrays of a run on a CPU need no search.
        device = HOST if isinstance(array, np.ndarray) else _of(array)
        if device not in devices:
            devices.append(device)
    if len(devices) > 1:
        names = " and ".join(device.name for device in devices)
        raise DeviceError(f"expected arrays on one device, got some on {names}; copy them to one")
    return devices[0] if devices else HOST


def on_device(array: Any) -> Device | None:
    """Return the device of an array; None for host objects."""
    if isinstance(array, np.ndarray):
        return None
    return next((device for device in _devices if device.owns(array)), None)


def _of(array: Any) -> Device:
    device = on_device(array)
    if device is not None:
        return device
    raise DeviceError(
        f"expected a NumPy array or one of an open device, got {type(array).__module__}.{type(array).__name__}; "
        "open a kernel backend of its device first"
    )
