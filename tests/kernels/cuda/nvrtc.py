"""NVRTC without CuPy and without a GPU: it compiles the sources, and reports resources of the compiled kernels."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
import site
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halograd.kernels.cuda.sources import ADDED, CudaProgram
from halograd.kernels.kernel import KernelError

__all__ = ["Nvrtc", "Usage"]

_WHEEL = "nvidia/cu*/lib/libnvrtc.so.*"
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Usage:
    """Resources of a compiled kernel per thread: registers, and bytes of local memory for stack and spills."""

    registers: int
    stack: int
    spilled: int


def _candidates() -> Iterator[str]:
    folders = {*sys.path, *site.getsitepackages()}
    for folder in sorted(folders):
        yield from sorted(str(path) for path in Path(folder or ".").glob(_WHEEL) if ".alt." not in path.name)
    found = ctypes.util.find_library("nvrtc")
    if found:
        yield found


class Nvrtc:
    """NVRTC library, from the wheel ``nvidia-cuda-nvrtc`` or the system.

    Raises
    ------
    KernelError
        If there is none.
    """

    def __init__(self) -> None:
        for name in _candidates():
            try:
                self._library = ctypes.CDLL(name)
                break
            except OSError:
                continue
        else:
            raise KernelError("expected NVRTC, found no libnvrtc; pip install 'halograd[nvrtc]'")
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise KernelError(f"{name}: {self._library.nvrtcGetErrorString(status).decode()}")

    def compile(self, program: CudaProgram, arch: str, options: Sequence[str] = ()) -> tuple[bytes, str]:
        """Return the machine code of a program for an architecture such as ``sm_80``, and the log.

        Raises
        ------
        KernelError
            If the program has errors; the message is the compiler's.
        """
        handle = ctypes.c_void_p()
        text, name = program.text.encode(), f"{program.source}.cu".encode()
        self._call("nvrtcCreateProgram", ctypes.byref(handle), text, name, 0, None, None)
        try:
            given = [o.encode() for o in (*program.options, *ADDED, f"-arch={arch}", *options)]
            status = self._library.nvrtcCompileProgram(handle, len(given), (ctypes.c_char_p * len(given))(*given))
            log = self._text(handle, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").decode().rstrip("\0")
            if status:
                raise KernelError(f"{program} for {arch}: {log}")
            return self._text(handle, "nvrtcGetCUBINSize", "nvrtcGetCUBIN"), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(handle))

    def _text(self, handle: ctypes.c_void_p, size_of: str, get: str) -> bytes:
        size = ctypes.c_size_t()
        self._call(size_of, handle, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(get, handle, buffer)
        return buffer.raw

    def usage(self, program: CudaProgram, arch: str) -> dict[str, Usage]:
        """Return the resources of each kernel of a program on `arch`, from the assembler's report."""
        _, log = self.compile(program, arch, ("-Xptxas=-v",))
        found = {}
        for part in re.split(r"(?=ptxas info\s+: Compiling entry)", log):
            entry, stack, registers = _ENTRY.search(part), _STACK.search(part), _REGISTERS.search(part)
            if entry and stack and registers:
                frame, stores, loads = map(int, stack.groups())
                found[entry.group(1)] = Usage(int(registers.group(1)), frame, stores + loads)
        return found
