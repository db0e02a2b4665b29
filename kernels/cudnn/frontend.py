"""The only adapter for `nvidia-cudnn-frontend`, whose interface changes several times a year.

No other file depends on its versions, its handles or the way its graphs are run. The adapter passes integer addresses
only: with a CuPy array, the frontend would make the default stream wait for the current stream at every call.

Plans on one stream share one growing workspace (:class:`Workspaces`).
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from halograd.documents import one_line

from ..kernel import KernelError

__all__ = [
    "ALIGNMENT",
    "CUDNN",
    "FRONTEND",
    "INSTALL",
    "AddressTable",
    "Frontend",
    "Handles",
    "Launch",
    "Workspaces",
    "load",
]


class _Arena(NamedTuple):
    array: Any
    address: int
    nbytes: int


class Workspaces:
    """Workspaces of the streams of one device.

    Kernels on one stream run one after the other and share its arena. Kernels on two streams may run at the same time
    and have one arena each. An arena is made when its stream first needs it, as large as the largest kernel built so
    far needs; so it does not grow if all kernels are built before the first one runs.

    Parameters
    ----------
    allocate
        Function that returns an array of a number of bytes in device memory, aligned to 256 B, on the current stream.
        Memory that is freed may be reused by later work of the same stream only (as in CuPy's pool).

    Attributes
    ----------
    reserved
        Workspace that the largest kernel needs [B].
    """

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self._arenas: dict[int, _Arena] = {}
        self._kept: list[_Arena] = []
        self._keep = False
        self.reserved = 0

    @property
    def nbytes(self) -> int:
        """Memory held for all streams [B]."""
        return sum(arena.nbytes for arena in (*self._arenas.values(), *self._kept))

    def reserve(self, nbytes: int) -> None:
        """Make every arena created from now on at least `nbytes` [B] large."""
        self.reserved = max(self.reserved, nbytes)

    def address(self, stream: int, nbytes: int) -> int:
        """Return the address of `nbytes` [B] of workspace for `stream`, which is the current one; 0 for 0 bytes."""
        if nbytes == 0:
            return 0
        arena = self._arenas.get(stream)
        if arena is None or arena.nbytes < nbytes:
            arena = self._grow(stream, nbytes)
        return arena.address

    def before_capture(self, stream: int) -> None:
        """Prepare for the capture of `stream`, the current one, into a graph.

        The arena is allocated now, not during capture. From now on no arena is freed before :meth:`close`, because the
        graph keeps its address.
        """
        self._keep = True
        self.address(stream, self.reserved)

    def _grow(self, stream: int, nbytes: int) -> _Arena:
        old = self._arenas.pop(stream, None)
        if old is not None and self._keep:
            self._kept.append(old)
        del old  # before the larger one is allocated, so that the pool may use its memory
        self.reserve(nbytes)
        array = self._allocate(self.reserved)
        arena = self._arenas[stream] = _Arena(array, int(array.data.ptr), self.reserved)
        return arena

    def close(self) -> None:
        """Free all arenas. `close` may be called twice."""
        self._arenas.clear()
        self._kept.clear()
        self._keep, self.reserved = False, 0


#: Tested versions: from the first up to, not including, the second. 1.27 replaced the compiled graph by an interpreted
#: one; 1.28 changed the handles.
FRONTEND = ((1, 23), (1, 27))
CUDNN = (91900, 100000)
#: Alignment that cuDNN's engines assume for every address [B]; the frontend's fixed default.
ALIGNMENT = 16
INSTALL = "pip install 'halograd[gpu]'"

Launch = Callable[["AddressTable", int, Any], None]


def _version(number: int) -> str:
    return f"{number // 10000}.{number % 10000 // 100}.{number % 100}"


def load(name: str = "cudnn") -> ModuleType:
    """Return the module of nvidia-cudnn-frontend.

    Raises
    ------
    KernelError
        If it is not installed, or its compiled part cannot be loaded.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise KernelError(
            f"cudnn: expected the package nvidia-cudnn-frontend, got none ({one_line(error)}); {INSTALL}, or choose "
            "the backend onednn or numpy"
        ) from error


class AddressTable:
    """Addresses of the arrays of one kernel, in the order that the frontend expects. Host memory.

    Parameters
    ----------
    addresses
        Device address of each tensor, by its uid.
    """

    def __init__(self, addresses: Mapping[int, int]) -> None:
        # In rising order of the numbers, as the frontend's table requires.
        self.addresses = {uid: int(addresses[uid]) for uid in sorted(addresses)}
        self._slots = (ctypes.c_uint64 * len(addresses))(*self.addresses.values())
        self.location = ctypes.addressof(self._slots)

    def __len__(self) -> int:
        return len(self.addresses)


class Frontend:
    """The frontend module: versions, graphs and their launch.

    Parameters
    ----------
    module
        ``cudnn``, as returned by :func:`load`.

    Attributes
    ----------
    version, cudnn_version : str
        Versions of the frontend and of cuDNN.

    Raises
    ------
    KernelError
        If a version is untested, or libcudnn cannot be found.
    """

    def __init__(self, module: Any) -> None:
        self.module = module
        self.version = str(module.__version__)
        self._check_frontend()
        self._cudnn = self._backend_version()
        self.cudnn_version = _version(self._cudnn)

    def _check_frontend(self) -> None:
        low, high = FRONTEND
        try:
            release = tuple(int(part) for part in self.version.split(".")[:2])
        except ValueError:
            # A version that is no number, e.g. of a source tree, is refused below.
            release = (0, 0)
        if not low <= release < high:
            raise KernelError(
                f"cudnn: expected nvidia-cudnn-frontend >= {low[0]}.{low[1]} and < {high[0]}.{high[1]}, got "
                f"{self.version}; {INSTALL}"
            )

    def _backend_version(self) -> int:
        try:
            number = int(self.module.backend_version())
        except Exception as error:  # RuntimeError without a library; a broken library may raise anything
            raise KernelError(
                f"cudnn: expected libcudnn 9, got none ({one_line(error)}); {INSTALL}, or put a site's libcudnn.so.9 "
                "on LD_LIBRARY_PATH"
            ) from error
        low, high = CUDNN
        if not low <= number < high:
            raise KernelError(
                f"cudnn: expected cuDNN >= {_version(low)} and < {_version(high)}, got {_version(number)}; {INSTALL}, "
                "and see that no other libcudnn comes first on LD_LIBRARY_PATH"
            )
        return number

    @property
    def attention_fault(self) -> str:
        """Reason why this pair of versions has no backward pass of attention; empty if it has one.

        From 1.24 on, the compiled frontend sets an attribute of the graph that older libraries reject.
        """
        major, minor = self.version.split(".")[:2]
        if (int(major), int(minor)) < (1, 24) or self._cudnn >= 92200:
            return ""
        return (
            f"nvidia-cudnn-frontend {self.version} needs cuDNN 9.22 for it, and this is {self.cudnn_version}; install "
            "nvidia-cudnn-frontend 1.23"
        )

    # ------------------------------------------------------------------ names in the frontend
    def data_type(self, dtype: str) -> Any:
        """Return the frontend's constant for an element type."""
        names = {"float32": "FLOAT", "float64": "DOUBLE", "float16": "HALF", "bfloat16": "BFLOAT16"}
        return getattr(self.module.data_type, names[dtype])

    def notes(self, names: tuple[str, ...]) -> list[Any]:
        """Return the numerical notes of these names. One that this version lacks is left out: no engine can have it."""
        known = self.module.numerical_note
        return [getattr(known, name) for name in names if hasattr(known, name)]

    # ------------------------------------------------------------------ graphs
    def plan(self, graph: Any, refused: tuple[str, ...], workspace_limit: int | None) -> None:
        """Create the execution plans of a finished graph, in cuDNN's order of preference, and drop the `refused` ones.
        """
        modes = self.module.heur_mode
        graph.validate()
        graph.build_operation_graph()
        # A: cuDNN's decision tree. FALLBACK: engines that take nearly everything, should A have none that is permitted.
        graph.create_execution_plans([modes.A, modes.FALLBACK])
        # The filters refer to plans, so they come after `create_execution_plans`.
        notes = self.notes(refused)
        if notes:
            graph.deselect_numeric_notes(notes)
        if workspace_limit is not None:
            graph.deselect_workspace_greater_than(workspace_limit)

    def compiled_at_run_time(self, graph: Any, index: int) -> bool:
        """Return whether building the plan ran a compiler. That takes a few tenths of a second, so such plans are
        stored.
        """
        note = self.module.behavior_note.RUNTIME_COMPILATION
        return note in graph.get_behavior_notes_for_plan_at_index(index)

    def launcher(self, graph: Any, uids: tuple[int, ...]) -> Launch:
        """Return a function that runs the last built plan of `graph` on an :class:`AddressTable`, a workspace and a
        handle.

        The call with a table of addresses is private in the frontend, though its own Python code uses it. Without it,
        the function uses the public call, which takes some microseconds more.
        """
        raw = getattr(graph, "_execute_with_raw_ptrs", None)
        # The addresses of the table must be in the order in which the frontend reads them.
        if raw is not None and self._takes_table(graph, uids):
            return lambda table, workspace, handle: raw(table.location, len(table), workspace, handle)
        return lambda table, workspace, handle: graph.execute(table.addresses, workspace, handle=handle)

    @staticmethod
    def _takes_table(graph: Any, uids: tuple[int, ...]) -> bool:
        prepare = getattr(graph, "_prepare_variant_pack_template", None)
        order = getattr(graph, "_get_variant_pack_uids_sorted", None)
        if prepare is None or order is None:
            return False
        try:
            prepare()
            return tuple(order()) == tuple(sorted(uids))
        except Exception:  # may fail for a restored graph: then use the public call
            return False

    def saved(self, graph: Any) -> bytes:
        """Return the plan of a graph as bytes, for :meth:`restored`."""
        return bytes(graph.serialize())

    def restored(self, blob: bytes, handle: Any) -> Any:
        """Return the graph of a saved plan, ready to launch. With another library version, this raises various
        exceptions.
        """
        graph = self.module.pygraph(handle=handle)
        graph.deserialize(list(blob))
        return graph


class _Handle:
    __slots__ = ("raw", "stream")

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.stream: int | None = None


class Handles:
    """cuDNN or cuBLAS handles on one device, one per thread. A handle's stream is set only when it changes.

    Parameters
    ----------
    module
        ``cudnn``, or a :class:`~halograd.kernels.cudnn.dense.Cublas`, which has the same functions for handles.
    current_stream
        Function that returns the address of the current stream.
    check_device
        Function that raises an error unless the device of this backend is current in this thread, because a handle
        belongs to the current device.
    """

    def __init__(self, module: Any, current_stream: Callable[[], int], check_device: Callable[[], None]) -> None:
        self._module, self._stream, self._check = module, current_stream, check_device
        self._local = threading.local()
        self._lock = threading.Lock()
        self._open: list[Any] = []

    def current(self) -> tuple[Any, int]:
        """Return the handle of this thread, set to the current stream, and the address of that stream. Local."""
        handle: _Handle | None = getattr(self._local, "handle", None)
        if handle is None:
            handle = self._create()
        stream = self._stream()
        # cudnnSetStream takes some 2.5 us per call.
        if stream != handle.stream:
            self._module.set_stream(handle=handle.raw, stream=stream)
            handle.stream = stream
        return handle.raw, stream

    def _create(self) -> _Handle:
        # A handle belongs to the device that is current when it is created.
        self._check()
        try:
            raw = self._module.create_handle()
        except Exception as error:
            raise KernelError(
                f"cudnn: expected a handle on this device, got an error ({one_line(error)}); see what `halograd "
                "doctor` prints about driver, device and cuDNN"
            ) from error
        with self._lock:
            self._open.append(raw)
        handle = self._local.handle = _Handle(raw)
        return handle

    def close(self) -> None:
        """Destroy the handles of all threads. `close` may be called twice."""
        with self._lock:
            handles, self._open = self._open, []
        # The other threads, too, must not find a handle that is destroyed below.
        self._local = threading.local()
        for raw in handles:
            self._module.destroy_handle(raw)
