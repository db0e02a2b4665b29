"""Guard bytes: memory before and after arrays, which no kernel may change. They detect writes outside of arrays.

While ``with GUARDS:`` is open, :func:`halograd.kernels.memory.aligned_empty` surrounds every array with guard bytes.
:meth:`Guards.check` checks all guard bytes. With `each_kernel`, every kernel that is built while guards are open checks
them after each call. All kernels share scratch memory, so its guards hold during one call: a kernel writes them before
the call and checks them after it. ::

    | guard | array | guard |          | guard | scratchpad | guard | temporary | guard |

A violation is stored until :meth:`Guards.check` raises it. The pattern is a quiet NaN in every floating-point type, so
a kernel that reads it returns NaN.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["GUARDS", "GuardError", "Guards", "guarded_bytes"]


class GuardError(RuntimeError):
    """Error: a kernel wrote outside of its memory."""


#: Size of the guard on each side of an array [B].
SIDE = 1 << 12
#: Guard after a temporary, in addition to SIDE: this multiple of the temporary's size, because writes with a wrong
#: stride leave gaps, up to a limit [B].
TIMES, MOST = 8, 1 << 17


def guarded_bytes(nbytes: int) -> int:
    """Return the size of the guard after a temporary of `nbytes` [B]; a multiple of the alignment of arrays."""
    return SIDE + -(-min(TIMES * nbytes, MOST) // SIDE) * SIDE


class Guards:
    """Arrays with guard bytes, and the violations found. Local. One object per process, because memory belongs to the
    process.

    A context manager: arrays and kernels that are made while it is open are guarded. Contexts may be nested and may end
    in any order.

    Attributes
    ----------
    operation
        Name of the current operation, for messages; set by the code that runs kernels.
    each_kernel
        Whether to check the guards of all arrays after each kernel. Messages then name the kernel; this takes time.
    """

    def __init__(self) -> None:
        self.operation = ""
        self.each_kernel = False
        self._open = 0
        # By id of the memory: a reference to it, its address, and where its array starts and stops.
        self._arrays: dict[int, tuple[Any, int, int, int]] = {}
        self._violations: list[str] = []

    @property
    def active(self) -> bool:
        """Whether new arrays and kernels are guarded."""
        return self._open > 0

    def __enter__(self) -> Guards:
        self._open += 1
        return self

    def __exit__(self, *exception: object) -> None:
        self._open -= 1
        if not self._open:
            self.operation, self.each_kernel = "", False
            self._arrays.clear()
            self._violations.clear()

    # ------------------------------------------------------------------ arrays
    def surround(self, nbytes: int, alignment: int) -> np.ndarray:
        """Return a guarded uint8 array ``(nbytes,)``, contents undefined, at an address that `alignment` divides."""
        raw = np.empty(nbytes + 2 * SIDE + alignment, np.uint8)
        address = _address(raw)
        # The first aligned offset after a whole guard; bytes that remain belong to the guards too.
        start = SIDE + -(address + SIDE) % alignment
        stop = start + nbytes
        for part in (raw[:start], raw[stop:]):
            mark(part)
        # A weak reference, so that guards do not keep freed arrays alive. Its callback removes the entry before the id
        # can belong to another object.
        key = id(raw)
        self._arrays[key] = (weakref.ref(raw, lambda _: self._arrays.pop(key, None)), address, start, stop)
        return raw[start:stop]

    def check_arrays(self, kernel: str) -> None:
        """Check the guards of all arrays. Record changes, attributed to `kernel`, and restore the guard bytes."""
        for reference, address, start, stop in list(self._arrays.values()):
            raw = reference()
            # Slices and their addresses take ten times as long as the comparison.
            if raw is not None and not (_is_intact(address, start) and _is_intact(address + stop, raw.size - stop)):
                self.compare(raw[:start], kernel, f"in front of an array of {stop - start} B")
                self.compare(raw[stop:], kernel, f"after an array of {stop - start} B")

    def compare(self, guard: np.ndarray, kernel: str, where: str) -> None:
        """Check one guard. Record a change, attributed to `kernel`, and restore the guard bytes."""
        if _is_intact(_address(guard), guard.size):
            return
        changed = np.flatnonzero(guard != _pattern(guard.size))
        first, last = int(changed[0]), int(changed[-1])
        text = f"{changed.size} bytes {where}, the first {first} B, the last {last} B into the guard"
        operation = f"{self.operation}: " if self.operation else ""
        self._violations.append(f"{operation}{kernel} wrote outside of its memory: {text}")
        # Else the next check would attribute the same bytes to another kernel.
        mark(guard)

    def check(self) -> None:
        """Raise the violations found since the last call.

        Raises
        ------
        GuardError
            If guard bytes were changed. The message names the operation, if known, and the implementation of the kernel
            that wrote there; for guards of arrays it names the kernel only with `each_kernel`.
        """
        self.check_arrays("a kernel or a copy")
        faults, self._violations = self._violations, []
        if faults:
            more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
            raise GuardError(f"{faults[0]}{more}; report it with the version of the library, and use another backend")

    # ------------------------------------------------------------------ kernels
    def watched(
        self, run: Callable[[], Any], kernel: str, scratch: Callable[[], Sequence[tuple[np.ndarray, str]]] | None = None
    ) -> Callable[[], Any]:
        """Return `run` followed by a check of the guard bytes; messages attribute violations to `kernel`.

        `scratch` returns guard bytes that hold for this call only, each with a string for its position.
        """

        def call() -> None:
            own = scratch() if scratch is not None else ()
            for guard, _ in own:
                mark(guard)
            run()
            for guard, where in own:
                self.compare(guard, kernel, where)
            if self.each_kernel:
                self.check_arrays(kernel)

        return call


#: PyDLL, because a call of CDLL would release and take the global interpreter lock for each short comparison.
_same = ctypes.PyDLL(None).memcmp
_same.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def _is_intact(address: int, nbytes: int) -> bool:
    """Return whether the guard at an address has its pattern.

    A NumPy comparison would clear the processor's floating-point flags, which may be read after a kernel.
    """
    if nbytes > _longest.size:
        _pattern(nbytes)
    return _same(address, _longest_address, nbytes) == 0


def mark(guard: np.ndarray) -> None:
    """Write the guard pattern."""
    guard[...] = _pattern(guard.size)


def _pattern(size: int) -> np.ndarray:
    global _longest, _longest_address
    if _longest.size < size:
        # Longer than needed, so that guards of growing arrays seldom make it again.
        _longest = np.resize(_longest, 2 * size)
        _longest_address = _address(_longest)
    return _longest[:size]


_longest = np.resize(np.array([0xFD, 0xFF], np.uint8), 2 * SIDE)
_longest_address = _address(_longest)

#: The guards of this process.
GUARDS = Guards()
