"""Memory that plans need while they run: one arena per stream, which only grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

__all__ = ["Workspaces"]


class _Arena(NamedTuple):
    array: Any
    address: int
    nbytes: int


class Workspaces:
    """Workspaces of the streams of one device.

    Kernels on one stream run one after the other and share its arena; kernels on two streams may run at the same
    time and have one each. An arena is made when its stream first needs it, as large as the most demanding kernel
    built so far, so that it grows at most once if all kernels are built before the first runs.

    Parameters
    ----------
    allocate
        Gives an array of so many bytes in device memory, aligned to 256 B, on the current stream. What was allocated
        there and is freed may be handed out again to later work of the same stream only (CuPy's pool does so).

    Attributes
    ----------
    reserved
        Bytes that the most demanding kernel needs [B].
    """

    def __init__(self, allocate: Callable[[int], Any]) -> None:
        self._allocate = allocate
        self._arenas: dict[int, _Arena] = {}
        self._kept: list[_Arena] = []
        self._keep = False
        self.reserved = 0

    @property
    def nbytes(self) -> int:
        """What is held on all streams [B]."""
        return sum(arena.nbytes for arena in (*self._arenas.values(), *self._kept))

    def reserve(self, nbytes: int) -> None:
        """Every arena made from now on has at least `nbytes` [B]."""
        self.reserved = max(self.reserved, nbytes)

    def address(self, stream: int, nbytes: int) -> int:
        """Where `nbytes` [B] may be used on `stream`, which is the current one; 0 for none."""
        if nbytes == 0:
            return 0
        arena = self._arenas.get(stream)
        if arena is None or arena.nbytes < nbytes:
            arena = self._grow(stream, nbytes)
        return arena.address

    def before_capture(self, stream: int) -> None:
        """Call before `stream`, the current one, is captured into a graph.

        The arena is made now, not while capturing, and from now on no arena is freed before :meth:`close`: the
        graph remembers its address.
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
        """Free all arenas. May be called twice."""
        self._arenas.clear()
        self._kept.clear()
        self._keep, self.reserved = False, 0
