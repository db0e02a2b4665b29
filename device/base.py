"""What the rest of halograd asks of the place where arrays live.

Work on a device is *enqueued*: a call returns before it is done, and what is enqueued runs in order. The host
learns that something is done from a :class:`Ticket` only. ::

    host      pack  download  mark ->t    launch kernels ...   t.wait()  send     ...   upload(pinned)   unpack
    device         [pack][download]       [kernels ...........................]        [upload][unpack]

Everything above the kernels is written against this class and NumPy's functions, which an array of a device answers
itself (CuPy does); so the same code runs on the host, on a GPU, and on a double of one in the tests.

:data:`HOST` is the host: NumPy arrays, and calls that return when they are done. :func:`device_of` finds the device of
an array. Types of 16 bits have names here, and the type that stands behind them where digits count.
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
    "Device",
    "DeviceError",
    "DeviceMemory",
    "HostDevice",
    "Stamp",
    "Ticket",
    "as_dtype",
    "device_of",
    "is_low",
    "on_device",
    "packed_as",
    "register",
    "resolution",
    "unregister",
    "wide",
]


#: Types of 16 bits: for activations and their gradients; parameters, sums and statistics are float32 beside them.
LOW = ("float16", "bfloat16")
_LOW = frozenset([np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)])  # a dtype makes its name anew for every question


def as_dtype(name: Any) -> np.dtype:
    """Return the dtype of this name; ``bfloat16`` is that of ml_dtypes."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def is_low(dtype: Any) -> bool:
    """Return whether a dtype, or the name of one, has 16 bits."""
    return dtype in LOW if isinstance(dtype, str) else np.dtype(dtype) in _LOW


def wide(dtype: Any) -> np.dtype:
    """Return the dtype of parameters, statistics and sums beside activations of this one.

    >>> wide("float16"), wide("float64")
    (dtype('float32'), dtype('float64'))
    """
    return np.dtype(np.float32) if is_low(dtype) else np.dtype(dtype)


def resolution(dtype: Any) -> float:
    """Return the distance from 1 to the next number, as `numpy.finfo` says of the types that it knows."""
    return 2.0**-7 if np.dtype(dtype).name == "bfloat16" else float(np.finfo(dtype).eps)


class DeviceGraph:
    """Work of a device that was recorded, and that a call enqueues again, at once. Local.

    It is freed by :meth:`drop`, and not when the last who knows of it is gone: NCCL ends no communicator while there is
    a graph with calls of it, and tracebacks and cycles of objects would keep it.

    Parameters
    ----------
    recorded
        Has a method ``launch(stream)``. Only this object may hold it.
    free
        Frees its memory when it is gone; may wait for the device.
    """

    def __init__(self, recorded: Any, stream: Any = None, free: Callable[[], None] = lambda: None) -> None:
        self._held: tuple[Any, Any, Callable[[], None]] | None = (recorded, stream, free)

    def __call__(self) -> None:
        held = self._held  # which another thread may take away
        if held is None:
            raise DeviceError("graph: expected one that is there, got one that was dropped; build the executor anew")
        held[0].launch(held[1])

    def drop(self, waits: bool = True) -> None:
        """Free it; idempotent. Not `waits`: without its memory, which is for ever where the device stands still."""
        held, self._held = self._held, None
        if held is not None:
            free = held[2]
            del held
            if waits:
                free()


class DeviceError(UserError):
    """A device cannot be had or cannot do what is asked; the message says what to do instead."""


class Ticket(Protocol):
    """A place in the queue of a device."""

    def done(self) -> bool:
        """Return whether everything before it is done. Does not wait."""
        ...

    def wait(self) -> None:
        """Return when everything before it is done: a synchronization of the host."""
        ...


class Stamp(Protocol):
    """A place in the queue whose time can be asked for."""

    def done(self) -> bool:
        """Return whether the device has come there. Does not wait."""
        ...


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device [B]: in use by this process's arrays, free, and in all."""

    used: int
    free: int
    total: int


class Device(ABC):
    """Memory, copies and events of one device, for one rank. All methods are local.

    Attributes
    ----------
    name
        For messages and reports.
    is_host
        Whether arrays are NumPy's and every call returns when it is done.
    chunk
        Elements that elementwise work in NumPy's functions takes at a time: as many as make launches cheap.
    """

    name: str
    is_host = False
    chunk = 1 << 24

    # -- arrays ---------------------------------------------------------------------------------
    @abstractmethod
    def owns(self, array: Any) -> bool:
        """Return whether this array lives here."""

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
        """Return the packed zeros in host memory that `download` and `upload` reach without a detour."""

    # -- copies that wait -----------------------------------------------------------------------
    @abstractmethod
    def to_host(self, array: Any) -> np.ndarray:
        """Return the values of an array as a NumPy array, packed. Waits; not for use within a step."""

    @abstractmethod
    def assign(self, target: Any, values: np.ndarray) -> None:
        """``target[...] = values``, of a host array; `values` may be changed once it returns. May wait."""

    # -- copies that do not wait ----------------------------------------------------------------
    @abstractmethod
    def download(self, array: Any, pinned: np.ndarray) -> None:
        """Enqueue the copy of a packed array to pinned memory, to be read behind a `mark` that was waited for."""

    @abstractmethod
    def upload(self, pinned: np.ndarray, array: Any) -> None:
        """Enqueue the copy of pinned memory to a packed array; leave `pinned` alone until a later `mark` is done."""

    @abstractmethod
    def mark(self) -> Ticket:
        """Return a ticket for everything enqueued so far."""

    def upload_ahead(self, pairs: Sequence[tuple[np.ndarray, Any]], after: Ticket | None = None) -> Ticket:
        """Enqueue uploads beside the queue, behind `after`; the queue waits for them by `join` only.

        May be called from another thread than that of the kernels.
        """
        for pinned, array in pairs:
            self.upload(pinned, array)
        return self.mark()

    def join(self, ticket: Ticket) -> None:
        """Let what is enqueued from here on run behind this ticket; the host does not wait."""
        return None

    @abstractmethod
    def synchronize(self) -> None:
        """Return when everything enqueued is done."""

    # -- copies within the device ---------------------------------------------------------------
    def copies(self, pairs: Sequence[tuple[Any, Any]]) -> Callable[[], None]:
        """Return what enqueues ``target[...] = source`` for pairs of (target, source) views of one shape each, of any
        two floating-point dtypes, or of one dtype.
        """
        fixed = tuple(pairs)

        def run() -> None:
            for target, source in fixed:
                np.copyto(target, source)

        return run

    def sums(self, pairs: Sequence[tuple[Any, Any]]) -> Callable[[], None]:
        """Return what enqueues ``target += source`` for pairs of (target, source) views of one shape each, in order."""
        fixed = tuple(pairs)

        def run() -> None:
            for target, source in fixed:
                np.add(target, source, out=target)

        return run

    # -- time -----------------------------------------------------------------------------------
    @abstractmethod
    def stamp(self) -> Stamp:
        """Return a stamp behind everything enqueued so far."""

    @abstractmethod
    def seconds(self, first: Stamp, second: Stamp) -> float:
        """Return the time from one stamp to another, both done [s]."""

    # -- the rest -------------------------------------------------------------------------------
    def capture(self, run: Callable[[], None]) -> DeviceGraph:
        """Return what enqueues, at once, everything that `run` enqueues. `run` is called once and must not wait.

        Raises
        ------
        DeviceError
            If the device has no graphs.
        """
        raise DeviceError(f"graph: expected a device that captures graphs, got {self.name}; set backend.graph = false")

    def drop_graphs(self) -> None:
        """Free all graphs that were captured, although they are still referenced. Does not wait."""
        return None

    def use(self) -> None:
        """Make this the device of the calling thread."""
        return None

    def close(self) -> None:
        """Finish what is enqueued, and let no array be found to live here any more. May be called twice."""
        return None

    def computing(self) -> AbstractContextManager[Any]:
        """Return a context in which the calling thread enqueues kernels."""
        return nullcontext()

    def memory(self) -> DeviceMemory | None:
        """Return what is used and free, None where that means nothing (the host)."""
        return None

    def describe(self) -> str:
        """Return one line for the log."""
        return self.name


def packed_as(values: Any, target: Any) -> np.ndarray:
    """Return the host values as a packed array of the shape and dtype of `target`; `ascontiguousarray` adds a missing
    axis.
    """
    return np.array(np.broadcast_to(values, target.shape), target.dtype, order="C", copy=True)


class _Now:
    """What was enqueued on the host is done."""

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
    # Some buffers of this size fit into the second-level cache.
    chunk = 1 << 15

    def owns(self, array: Any) -> bool:
        return not hasattr(array, "__cuda_array_interface__")  # numbers and lists are the host's too

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

    def mark(self) -> Ticket:
        return _Now()

    def synchronize(self) -> None:
        return None

    def stamp(self) -> _Now:
        return _Now()

    def seconds(self, first: Any, second: Any) -> float:
        return second.at - first.at


HOST = HostDevice()


_devices: list[Device] = []


def register(device: Device) -> None:
    """Let `device_of` find a device; the one registered last is asked first."""
    _devices.insert(0, device)


def unregister(device: Device) -> None:
    """Forget a device; one that is not registered is ignored."""
    _devices[:] = [other for other in _devices if other is not device]


def device_of(*arrays: Any) -> Device:
    """Return the device of some arrays; None among them is ignored.

    Raises
    ------
    DeviceError
        If they live on different devices, or on none that a kernel backend has opened.
    """
    found: list[Device] = []
    for array in arrays:
        if array is None:
            continue
        device = HOST if isinstance(array, np.ndarray) else _of(array)
        if device not in found:
            found.append(device)
    if len(found) > 1:
        names = " and ".join(device.name for device in found)
        raise DeviceError(f"expected arrays on one device, got some on {names}; copy them to one")
    return found[0] if found else HOST


def on_device(array: Any) -> Device | None:
    """Return the device of an array; None for anything of the host."""
    if isinstance(array, np.ndarray):
        return None
    return next((device for device in _devices if device.owns(array)), None)


def _of(array: Any) -> Device:
    device = on_device(array)
    if device is not None:
        return device
    raise DeviceError(
        f"expected a NumPy array or one of an open device, got {type(array).__module__}.{type(array).__name__}; "
        "make a kernel backend of its device first"
    )
