"""Double of a CUDA device: g++ compiles the kernels with host_shim.h, and they run on NumPy arrays."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from halograd.kernels.cuda import Boxes, CudaKernels
from halograd.kernels.cuda.launch import Extents, Function, Launcher, address
from halograd.kernels.cuda.sources import CudaProgram
from halograd.kernels.memory import Scratch, aligned_empty
from halograd.kernels.numpy import NumpyBackend
from tests.harness.jobs import COMPILED

SHIM = Path(__file__).parent / "host_shim.h"
# The kernels access elements as vectors, which CUDA permits and C++ does not.
OPTIONS = ("-std=c++17", "-O0", "-shared", "-fPIC", "-fno-strict-aliasing", "-fno-gnu-unique", "-fvisibility=hidden",
           "-Werror=switch")  # fmt: skip
FAULTS = {1: "some threads of a block ended while others waited at a barrier", 2: "a barrier in a KERNEL"}


def compiler() -> str | None:
    """Return the path of the C++ compiler, or None."""
    return shutil.which("g++")


@cache
def _own_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="cuda-on-the-host-")  # removed when the process ends


def folder() -> Path:
    """Return the folder of compiled programs: that of the suite, whose processes share it, or this process's own."""
    return Path(os.environ.get(COMPILED) or _own_folder().name)


class HostLauncher(Launcher):
    """Launcher that runs kernels on the CPU.

    Parameters
    ----------
    units
        Number of multiprocessors. Few of them make small grids, so that loops over a grid run several times.
    """

    def __init__(self, units: int = 2) -> None:
        self.units = units
        self.launched: list[str] = []
        self.programs: set[CudaProgram] = set()
        self._libraries: dict[CudaProgram, ctypes.CDLL] = {}
        self._backward = False

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        array = aligned_empty(shape, dtype)
        array.reshape(-1).view(np.uint8).fill(0xFF)  # NaN for floats: no kernel may read it
        return array

    def upload(self, array: np.ndarray) -> Any:
        copied = aligned_empty(array.shape, array.dtype)
        copied[...] = array
        return copied

    def describe(self) -> str:
        return "g++"

    def set_order(self, backward: bool) -> None:
        """Select whether threads and blocks run in reverse order."""
        self._backward = backward
        for library in self._libraries.values():
            library.set_order(int(backward))

    def function(self, program: CudaProgram, name: str) -> Function:
        if program not in self._libraries:
            self._libraries[program] = ctypes.CDLL(str(self._compile(program)))
            self._libraries[program].set_order(int(self._backward))
        self.programs.add(program)
        return program, name, getattr(self._libraries[program], name)

    def bind(self, function: Function, grid: Extents, block: Extents, record: np.ndarray) -> Callable[[], None]:
        program, name, kernel = function
        extents = ctypes.c_uint * 3
        arguments = ctypes.c_void_p(address(record)), extents(*grid), extents(*block)

        def run() -> None:
            self.launched.append(name)
            fault = kernel(*arguments)
            assert fault == 0, f"{program} {name}: {FAULTS[fault]}"

        return run

    def _compile(self, program: CudaProgram) -> Path:
        macros = [f"-D{name}={value}" for name, value in program.defines.items()]
        macros.append(f'-DHOST_SHIM="{SHIM.name}"')
        command = [str(compiler()), *OPTIONS, *macros, f"-I{SHIM.parent}"]
        text = program.text
        key = hashlib.sha256("\n".join([*command, text, SHIM.read_text()]).encode()).hexdigest()[:16]
        source = folder() / f"{program.source}-{key}.cpp"
        library, unfinished = source.with_suffix(".so"), source.with_suffix(".new")
        with source.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # another process may compile it
            if not library.exists():
                source.write_text(text)
                done = subprocess.run([*command, "-o", str(unfinished), str(source)], capture_output=True, text=True)
                assert done.returncode == 0, f"{program}: {done.stderr[:4000]}"
                unfinished.rename(library)  # a killed process leaves no part of it
        return library


class HostBackend(CudaKernels, NumpyBackend):
    """Backend with NumPy in place of cuDNN, and the CUDA kernels for everything else."""

    name: ClassVar[str] = "cuda on the host"

    def __init__(self, launcher: HostLauncher) -> None:
        super().__init__()
        self.launcher, self.boxes = launcher, Boxes(launcher)
        self.scratch = Scratch(launcher.empty)
        self.dtypes = (*self.dtypes, "float16", "bfloat16")

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        return self.launcher.empty(shape, dtype)
