"""The tests' NumPy arrays, and kernels that run elsewhere: on a GPU, the same tests as on the CPU.

Before a launch every array that it knows is copied to the device, together with what it is a view of; addresses are
translated; afterwards everything is copied back. Slow, and right whatever the launchers do with addresses.
``python -m pytest -m gpu tests/kernels/cuda`` runs all tests so where there is a GPU.
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
    """Address of the first byte."""
    return int(array.__array_interface__["data"][0])


def owner(array: np.ndarray) -> np.ndarray:
    """The array whose memory this is a view of."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def arrays_in(value: Any) -> Iterator[np.ndarray]:
    """All arrays among the arguments of a launch."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from arrays_in(part)
    elif isinstance(value, dict):
        yield from arrays_in(list(value.values()))


class Copy:
    """One block of host memory on the device, at an address with the same remainder."""

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
    """Arrays of a :class:`HostLauncher`, kernels of another device.

    Parameters
    ----------
    kernels
        Compiles and launches.
    allocate
        Bytes on that device: an array that is indexed by slices, and its address.
    put, get
        Copy a host array into a slice of such an array, and return a slice as host array; `get` waits for kernels.
    """

    def __init__(
        self, folder: Any, kernels: Launcher, allocate: Callable[[int], Any], put: Callable[..., Any], get: Callable
    ) -> None:
        super().__init__(folder, kernels.units)
        self._kernels, self._allocate, self._put, self._get = kernels, allocate, put, get

    def set_order(self, backward: bool) -> None:
        """The device decides."""

    def function(self, program: CudaProgram, name: str) -> Function:
        self.programs.add(program)
        return self._kernels.function(program, name)

    def bind(self, function: Function, grid: Extents, block: Extents, record: np.ndarray) -> Callable[[], Any]:
        return self._kernels.bind(function, grid, block, record)

    def run(self, launch: Launch) -> None:
        """What a launch on this device does instead."""
        self.launched.append(launch.name)
        owners = {start(o): o for o in map(owner, arrays_in(launch._kept)) if o.nbytes}
        copies = [Copy(o, self._allocate) for o in owners.values()]
        # The table of pieces holds addresses too: it is translated, and not copied back.
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
    """The address on the device; what is no address (a pattern to fill with, null) stays."""
    for copy in copies:
        found = copy.translate(address)
        if found is not None:
            return found
    return address


def on_cupy(folder: Any, kernels: Launcher) -> MirrorLauncher:
    """Kernels on the current CUDA device."""
    import cupy

    def allocate(nbytes: int) -> tuple[Any, int]:
        memory = cupy.empty(nbytes, np.uint8)
        return memory, int(memory.data.ptr)

    def put(memory: Any, at: int, content: np.ndarray) -> None:
        memory[at : at + len(content)].set(content)

    def get(memory: Any, at: int, nbytes: int) -> np.ndarray:
        return cupy.asnumpy(memory[at : at + nbytes])

    return MirrorLauncher(folder, kernels, allocate, put, get)


def on_host(folder: Any, kernels: HostLauncher) -> MirrorLauncher:
    """Kernels on the CPU, in memory of their own: checks the mirror."""

    def allocate(nbytes: int) -> tuple[Any, int]:
        memory = np.full(nbytes, 0xFF, np.uint8)
        return memory, start(memory)

    def put(memory: Any, at: int, content: np.ndarray) -> None:
        memory[at : at + len(content)] = content

    def get(memory: Any, at: int, nbytes: int) -> np.ndarray:
        return memory[at : at + nbytes].copy()

    return MirrorLauncher(folder, kernels, allocate, put, get)
