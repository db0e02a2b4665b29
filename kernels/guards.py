"""Guard bytes: memory in front of and after arrays that no kernel may change, to find writes outside of arrays.

While ``with GUARDS:`` is open, :func:`halograd.kernels.memory.aligned_empty` surrounds every array with guard bytes.
:meth:`Guards.check` looks at them all; with `each_kernel` every kernel made in the meantime does so after each call.
Scratch memory is shared by all kernels, so its guards hold during one call: a kernel writes them before and checks them
after. ::

    | guard | array | guard |          | guard | scratchpad | guard | temporary | guard |

A finding is kept until :meth:`Guards.check` raises it: guard bytes belong to no array, so nothing is lost before.
The pattern is a quiet NaN in every type of floating-point number: a kernel that reads it makes NaN.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["GUARDS", "GuardError", "Guards", "room"]


class GuardError(RuntimeError):
    """A kernel wrote outside of its memory."""


#: Guard bytes on either side of an array [B].
SIDE = 1 << 12
#: Those after a temporary: as many times its size, as vectors with a wrong stride leave gaps, up to a limit [B].
TIMES, MOST = 8, 1 << 17


def room(nbytes: int) -> int:
    """Return the size of the guard after a temporary of `nbytes` [B]; a multiple of the alignment of arrays."""
    return SIDE + -(-min(TIMES * nbytes, MOST) // SIDE) * SIDE


class Guards:
    """Arrays with guard bytes, and what was found. Local; one for a process, since memory is the process's.

    A context manager: arrays and kernels that are made in the meantime are guarded. Contexts may be nested and may end
    in any order.

    Attributes
    ----------
    place
        What runs, for messages: set by the code that runs kernels.
    each_kernel
        Whether the guards of all arrays are looked at after each kernel, which names it in messages and takes time.
    """

    def __init__(self) -> None:
        self.place = ""
        self.each_kernel = False
        self._open = 0
        self._arrays: dict[int, tuple[Any, int, int]] = {}
        self._found: list[str] = []

    @property
    def active(self) -> bool:
        """Whether arrays and kernels that are made now are guarded."""
        return self._open > 0

    def __enter__(self) -> Guards:
        self._open += 1
        return self

    def __exit__(self, *exception: object) -> None:
        self._open -= 1
        if not self._open:
            self.place, self.each_kernel = "", False
            self._arrays.clear()
            self._found.clear()

    # ------------------------------------------------------------------ arrays
    def surround(self, nbytes: int, alignment: int) -> np.ndarray:
        """Return uint8 ``(nbytes,)`` at an address that `alignment` divides, contents undefined, with guard bytes."""
        raw = np.empty(nbytes + 2 * SIDE + alignment, np.uint8)
        start = SIDE + -(_address(raw) + SIDE) % alignment
        stop = start + nbytes
        for part in (raw[:start], raw[stop:]):
            mark(part)
        key = id(raw)
        self._arrays[key] = (weakref.ref(raw, lambda _: self._arrays.pop(key, None)), start, stop)
        return raw[start:stop]

    def look(self, who: str) -> None:
        """Note which arrays have other guard bytes than they should, as found after `who`; write them again."""
        for reference, start, stop in list(self._arrays.values()):
            raw = reference()
            if raw is not None:
                self.compare(raw[:start], who, f"in front of an array of {stop - start} B")
                self.compare(raw[stop:], who, f"after an array of {stop - start} B")

    def compare(self, guard: np.ndarray, who: str, where: str) -> None:
        """Note if guard bytes have changed, as found after `who`; write them again."""
        # A comparison by NumPy would clear the flags of the processor, which a kernel may be followed by a look at.
        if _same(_address(guard), _address(_pattern(guard.size)), guard.size) == 0:
            return
        changed = np.flatnonzero(guard != _pattern(guard.size))
        first, last = int(changed[0]), int(changed[-1])
        text = f"{changed.size} bytes {where}, the first {first} B, the last {last} B into the guard"
        place = f"{self.place}: " if self.place else ""
        self._found.append(f"{place}{who} wrote outside of its memory: {text}")
        mark(guard)

    def check(self) -> None:
        """Raise what was found since the last call.

        Raises
        ------
        GuardError
            If guard bytes were changed. It names the kernel and its implementation.
        """
        self.look("a kernel or a copy")
        found, self._found = self._found, []
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise GuardError(f"{found[0]}{more}; report it with the version of the library, and use another backend")

    # ------------------------------------------------------------------ kernels
    def watched(
        self, run: Callable[[], Any], who: str, scratch: Callable[[], Sequence[tuple[np.ndarray, str]]] | None = None
    ) -> Callable[[], Any]:
        """Return `run` with a look at guard bytes after it.

        `scratch` returns guard bytes that hold for this call only, with words for their position.
        """

        def call() -> None:
            own = scratch() if scratch is not None else ()
            for guard, _ in own:
                mark(guard)
            run()
            for guard, where in own:
                self.compare(guard, who, where)
            if self.each_kernel:
                self.look(who)

        return call


_same = ctypes.PyDLL(None).memcmp
_same.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def _address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def mark(guard: np.ndarray) -> None:
    """Write guard bytes."""
    guard[...] = _pattern(guard.size)


def _pattern(size: int) -> np.ndarray:
    global _longest
    if _longest.size < size:
        _longest = np.resize(_longest, 2 * size)
    return _longest[:size]


_longest = np.resize(np.array([0xFD, 0xFF], np.uint8), 2 * SIDE)

#: Guards of this process.
GUARDS = Guards()
