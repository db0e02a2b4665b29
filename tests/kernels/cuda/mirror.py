"""A mirror of the tests' NumPy arrays on a device, so that the tests of the CPU also run on a GPU.

Before a launch, every known array is copied to the device together with its base array, and addresses are translated;
afterwards everything is copied back. This is slow, but correct for any use of addresses by the launchers. ``python -m
pytest -m gpu tests/kernels/cuda`` runs all tests in this way on a machine with a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from halograd.kernels.cuda.launch import Extents, Function, Launch, Launcher
from halograd.kernels.cuda.sources import CudaProgram

from .host import HostLauncher

ALIGNMENT = 512


def start(array: np.ndarray) -> int:
    """Return the address of the first byte of an array."""
    return int(array.__array_interface__["data"][0])


def owner(array: np.ndarray) -> np.ndarray:
    """Return the array that owns the memory of a view."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def arrays_in(value: Any) -> Iterator[np.ndarray]:
    """Return all arrays among the arguments of a launch."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from arrays_in(part)
    elif isinstance(value, dict):
        yield from arrays_in(list(value.values()))


class Copy:
    """Copy of a block of host memory on the device; its address has the same alignment."""

    def __init__(self, array: np.ndarray, allocate: Callable[[int], Any]) -> None:
        assert array.flags.c_contiguous, "an owner of memory is packed"
        self.host = array.reshape(-1).view(np.uint8)
        self.first, self.last = start(array), start(array) + array.nbytes
        self.memory = allocate(array.nbytes + ALIGNMENT)
        self.base, pointer = self.memory
        self.offset = (self.first - pointer) % ALIGNMENT
        self.address = pointer + self.offset

    def translate(self, address: int) -> int | None:
        return self.address + address - self.first if self.first <= address < self.last else None


class MirrorLauncher(HostLauncher):
    """Launcher for arrays of a :class:`HostLauncher` and kernels on another device.

    Parameters
    ----------
    kernels
        Launcher of the other device, which compiles and launches.
    allocate
        Returns bytes on that device: an array that supports slices, and its address.
    put, get
        Copy a host array into a slice of such an array, and return a slice as host array; `get` waits for kernels.
    """

    def __init__(
        self, kernels: Launcher, allocate: Callable[[int], Any], put: Callable[..., Any], get: Callable
    ) -> None:
        super().__init__(kernels.units)
        self._kernels, self._allocate, self._put, self._get = kernels, allocate, put, get

    def set_order(self, backward: bool) -> None:
        """Do nothing: the device sets the order."""

    def function(self, program: CudaProgram, name: str) -> Function:
        self.programs.add(program)
        return self._kernels.function(program, name)

    def bind(self, function: Function, grid: Extents, block: Extents, record: np.ndarray) -> Callable[[], Any]:
        return self._kernels.bind(function, grid, block, record)

    def run(self, launch: Launch) -> None:
        """Run a launch on the other device."""
        self.launched.append(launch.name)
        owners = {start(o): o for o in map(owner, arrays_in(launch._kept)) if o.nbytes}
        copies = [Copy(o, self._allocate) for o in owners.values()]
        # The table of pieces contains addresses too: they are translated, and the table is not copied back.
        tables = [owner(launch._kept["pieces"])] if "pieces" in launch._kept else []
        for copy in copies:
            content = copy.host
            if any(start(t) == copy.first for t in tables):
                content = self._translated(content, launch._kept["pieces"], copies)
            self._put(copy.base, copy.offset, content)
        record = launch._record.copy()
        for name in record.dtype.names or ():
            if record.dtype[name].base == np.uint64 and any(True for _ in arrays_in(launch._kept.get(name))):
                flat = np.atleast_1d(record[name])
                record[name] = np.array([_moved(int(a), copies) for a in flat], np.uint64).reshape(record[name].shape)
        self._kernels.bind(launch._function, launch._grid, launch._block, record)()
        for copy in copies:
            if not any(start(t) == copy.first for t in tables):
                copy.host[...] = self._get(copy.base, copy.offset, len(copy.host))

    def _translated(self, content: np.ndarray, table: np.ndarray, copies: list[Copy]) -> np.ndarray:
        moved = content.copy()
        at = start(table) - start(owner(table))
        rows = moved[at : at + table.nbytes].view(np.uint64).reshape(table.shape)
        for row in rows:
            row[:2] = [_moved(int(a), copies) for a in row[:2]]
        return moved


def _moved(address: int, copies: list[Copy]) -> int:
    """Return the address on the device; values that are no addresses (a fill pattern, null) are unchanged."""
    for copy in copies:
        found = copy.translate(address)
        if found is not None:
            return found
    return address


def on_cupy(kernels: Launcher) -> MirrorLauncher:
    """Return a mirror with kernels on the current CUDA device."""
    import cupy

    def allocate(nbytes: int) -> tuple[Any, int]:
        memory = cupy.empty(nbytes, np.uint8)
        return memory, int(memory.data.ptr)

    def put(memory: Any, at: int, content: np.ndarray) -> None:
        memory[at : at + len(content)].set(content)

    def get(memory: Any, at: int, nbytes: int) -> np.ndarray:
        return cupy.asnumpy(memory[at : at + nbytes])

    return MirrorLauncher(kernels, allocate, put, get)


def on_host(kernels: HostLauncher) -> MirrorLauncher:
    """Return a mirror with kernels on the CPU, in separate memory, to check the mirror."""

    def allocate(nbytes: int) -> tuple[Any, int]:
        memory = np.full(nbytes, 0xFF, np.uint8)
        return memory, start(memory)

    def put(memory: Any, at: int, content: np.ndarray) -> None:
        memory[at : at + len(content)] = content

    def get(memory: Any, at: int, nbytes: int) -> np.ndarray:
        return memory[at : at + nbytes].copy()

    return MirrorLauncher(kernels, allocate, put, get)
