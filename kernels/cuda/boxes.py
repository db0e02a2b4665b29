"""Copies, sums and fills of lists of strided boxes, a whole list in few launches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..kernel import Kernel, KernelError, chain, idle
from .launch import ACCESS, LARGE, Launch, Launcher, address, sequence
from .sources import CudaProgram, dtype_name

__all__ = ["AXES", "Boxes", "Joined", "join", "joined_bytes", "joined_elements"]

#: Largest number of axes in the kernels.
AXES = 5
# Four words per thread, all read before the first is written; WORDS_PER_BLOCK of pieces.cuh.
WORDS_PER_BLOCK = 1024
#: Members of the struct ``Piece`` in pieces.cuh.
COLUMNS = 4 + 3 * AXES


@dataclass(frozen=True)
class Boxes:
    """Factory of kernels that copy, add and fill strided device views, in few launches."""

    launcher: Launcher

    def copy(self, pairs: Sequence[tuple[Any, Any]]) -> Kernel:
        """Return a kernel that copies every source view to its target view.

        No target may overlap a source or another target. Elements are converted where the dtypes of a pair differ.
        Pairs of the same two dtypes share one launch.
        """
        groups: dict[tuple[str, ...], list[tuple[Any, Any]]] = {}
        for source, target in _checked("copy", pairs):
            same = source.dtype == target.dtype
            groups.setdefault(() if same else (dtype_name(source), dtype_name(target)), []).append((source, target))
        launches = [
            _convert(self.launcher, pairs_of_dtypes, dtypes) if dtypes else _move(self.launcher, pairs_of_dtypes)
            for dtypes, pairs_of_dtypes in groups.items()
        ]
        return launches[0] if len(launches) == 1 else chain(*launches) if launches else idle()

    def add_into(self, pairs: Sequence[tuple[Any, Any]]) -> Kernel:
        """Return a kernel that adds every source view to its target view; targets must not overlap one another."""
        pairs = _checked("add_into", pairs)
        if not pairs:
            return idle()
        if any(source.dtype != target.dtype for source, target in pairs):
            dtypes = next((s.dtype, t.dtype) for s, t in pairs if s.dtype != t.dtype)
            raise KernelError(
                f"add_into: expected pairs of one dtype, got {dtypes[0]} and {dtypes[1]}; copy them first"
            )
        size, dtype = np.dtype(pairs[0][1].dtype).itemsize, dtype_name(pairs[0][1])
        if any(dtype_name(target) != dtype for _, target in pairs):
            raise KernelError(f"add_into: expected arrays of one dtype, got {dtype} and others; convert them")
        # A word is 16 bytes of elements or one element: the kernel adds elements, which other widths may split.
        word = min(joined_bytes("add_into", *pair, lanes=(16, size)).lanes for pair in pairs)
        joined = [joined_bytes("add_into", *pair, lanes=(word,)) for pair in pairs]
        name = "add_into_v" if word == 16 else "add_into_1"
        return _kernel(
            self.launcher, name, CudaProgram("boxes_add", (dtype,), is_long(joined)), joined, _heads(pairs), pairs
        )

    def fill(self, value: float, *arrays: Any) -> Kernel:
        """Return a kernel that writes `value` into every array or view, of any dtype; None is skipped.

        It is used for margins and for sums that start at 0. Views that allow the same access width share one launch.
        """
        views = [a for a in arrays if a is not None and a.size]
        widths: dict[int, list[tuple[Any, Joined]]] = {}
        for view in views:
            size = np.dtype(view.dtype).itemsize
            # In a word narrower than an element only the low bytes of the value would be written.
            joined = joined_bytes("fill", view, lanes=[w for w in (16, 8, 4, 2, 1) if w >= size])
            # A row of the table has strides of a source and of a target; a fill has a target only.
            both = Joined(joined.shape, joined.strides * 2, joined.lanes)
            widths.setdefault(joined.lanes, []).append((view, both))
        launches = []
        for word, pieces in widths.items():
            heads = [(_pattern(value, view), address(view)) for view, _ in pieces]
            kept = [view for view, _ in pieces]
            all_joined = [joined for _, joined in pieces]
            program = CudaProgram("boxes", large=is_long(all_joined))
            launches.append(_kernel(self.launcher, f"fill_{word}", program, all_joined, heads, kept))
        return chain(*launches) if launches else idle()


def _move(launcher: Launcher, pairs: Sequence[tuple[Any, Any]]) -> Kernel:
    # One launch has one width of access: that of the pair that permits the least.
    word = min(joined_bytes("copy", *pair).lanes for pair in pairs)
    joined = [joined_bytes("copy", *pair, lanes=(word,)) for pair in pairs]
    return _kernel(launcher, f"copy_{word}", CudaProgram("boxes", large=is_long(joined)), joined, _heads(pairs), pairs)


def _convert(launcher: Launcher, pairs: Sequence[tuple[Any, Any]], dtypes: tuple[str, ...]) -> Kernel:
    # At most 4: 16 bytes of float32, with the 8 bytes of 16-bit elements that they become.
    word = min(joined_elements("copy", *pair, lanes=(4, 2, 1)).lanes for pair in pairs)
    joined = [joined_elements("copy", *pair, lanes=(word,)).in_words() for pair in pairs]
    program = CudaProgram("boxes_cast", dtypes, is_long(joined))
    return _kernel(launcher, f"convert_{word}", program, joined, _heads(pairs), pairs)


def _heads(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[int, int]]:
    return [(address(source), address(target)) for source, target in pairs]


def is_long(joined: Sequence[Joined]) -> bool:
    """Return whether the items of one of the boxes must be counted in 64 bits."""
    return max(j.items for j in joined) >= LARGE


def _pattern(value: float, array: Any) -> int:
    """Return the value in the array's dtype, repeated to eight bytes, as an integer."""
    one = np.full((1,), value, array.dtype).tobytes()
    if 8 % len(one):
        raise KernelError(f"fill: expected elements of 1, 2, 4 or 8 bytes, got {len(one)}; fill it as another dtype")
    return int.from_bytes(one * (8 // len(one)), "little")


def _checked(what: str, pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    for source, target in pairs:
        if tuple(source.shape) != tuple(target.shape):
            raise KernelError(f"{what}: expected pairs of one shape, got {source.shape} and {target.shape}")
    return [pair for pair in pairs if pair[0].size]


def _kernel(
    launcher: Launcher,
    name: str,
    program: CudaProgram,
    joined: Sequence[Joined],
    heads: Sequence[tuple[int, int]],
    kept: Any,
) -> Kernel:
    table = np.zeros((len(joined), COLUMNS), np.uint64)
    blocks = 0
    for row, piece, (source, target) in zip(table, joined, heads):
        strides = (piece.padded(s, 0) for s in piece.strides)
        signed = np.array([blocks, piece.items, *piece.padded(piece.shape, 1), *(n for s in strides for n in s)])
        # Addresses need 64 unsigned bits, strides may be negative: the kernel reads their bits as signed.
        row[:2], row[2:] = (source, target), signed.astype(np.int64).view(np.uint64)
        # A piece begins with a block of its own: all words of a block belong to one row of the table.
        blocks += math.ceil(piece.items / WORDS_PER_BLOCK)
    pieces = launcher.upload(table)
    launch = Launch(launcher, program, name, (blocks,), pieces=pieces, count=len(joined))
    # The table holds bare addresses: the arrays must live as long as the kernel.
    launch.keep(kept)
    return sequence(name.rsplit("_", 1)[0], launch, workspace_bytes=launcher.own.add(pieces))


@dataclass(frozen=True)
class Joined:
    """Arrays of one shape, with their axes joined where memory is contiguous.

    Attributes
    ----------
    shape
        Items per axis; an item is `lanes` elements (or bytes).
    strides
        Per array, the stride of each axis: in elements (`joined_elements`), or in items (`joined_bytes`, `in_words`).
    lanes
        Elements (or bytes) of an item.
    """

    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], ...]
    lanes: int

    @property
    def items(self) -> int:
        """Number of items."""
        return math.prod(self.shape)

    @property
    def axes(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def in_words(self) -> Joined:
        """Return the same arrays with strides in items. The last axis must be packed unless an item is one element."""
        strides = tuple((*(s // self.lanes for s in f[:-1]), f[-1]) for f in self.strides)
        return Joined(self.shape, strides, self.lanes)

    def padded(self, values: Sequence[int], fill: int) -> tuple[int, ...]:
        """Return `values`, one per axis, extended with `fill` to length :data:`AXES`."""
        return (*values, *(fill,) * (AXES - len(values)))


def join(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """Drop axes of extent 1 and join neighboring axes that are contiguous in every array.

    >>> join((2, 3, 4), [(12, 4, 1), (24, 4, 1)])
    ([2, 12], [[12, 1], [24, 1]])
    """
    axes = [i for i, n in enumerate(shape) if n != 1]
    joined: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for axis in axes:
        # The outer axis must step over exactly this one in every array: one index then serves all of them.
        if joined and all(f[-1] == shape[axis] * s[axis] for f, s in zip(merged, strides)):
            joined[-1] *= shape[axis]
            for f, s in zip(merged, strides):
                f[-1] = s[axis]
            continue
        joined.append(shape[axis])
        for f, s in zip(merged, strides):
            f.append(s[axis])
    # Arrays of one element: the kernels need an axis.
    if not joined:
        return [1], [[1] for _ in strides]
    return joined, merged


def joined_elements(what: str, *arrays: Any, lanes: Sequence[int] | None = None) -> Joined:
    """Describe arrays of one shape with joined axes. An item has the first number of elements in `lanes` that
    alignment, packing and extents permit, or the last.

    By default an item is 16 bytes of the first array or one element. Strides are in elements. `what` is for messages.
    """
    sizes = [np.dtype(a.dtype).itemsize for a in arrays]
    strides = [[s // size for s in a.strides] for a, size in zip(arrays, sizes)]
    if any(s % size for a, size in zip(arrays, sizes) for s in a.strides):
        raise KernelError(f"{what}: expected strides of whole elements, got {[a.strides for a in arrays]}; copy them")
    shape, strides_joined = join(arrays[0].shape, strides)
    _check_axes(what, shape)
    packed, gaps = all(f[-1] == 1 for f in strides_joined), [s for f in strides_joined for s in f[:-1]]
    # `lanes` ends with 1, or is the one width that all pairs of a launch permit: the last one is never refused.
    for wide in lanes or (ACCESS // sizes[0], 1):
        aligned = all(address(a) % (wide * size) == 0 for a, size in zip(arrays, sizes))
        if wide == 1 or (packed and aligned and not any(n % wide for n in (shape[-1], *gaps))):
            break
    shape[-1] //= wide
    return Joined(tuple(shape), tuple(map(tuple, strides_joined)), wide)


def joined_bytes(what: str, *arrays: Any, lanes: Sequence[int] = (16, 8, 4, 2, 1)) -> Joined:
    """Return arrays of one shape and element size as words of bytes, the widest of `lanes` that fits; strides in words.
    """
    # The bytes of an element are one more axis, the innermost.
    size = np.dtype(arrays[0].dtype).itemsize
    shape, strides_joined = join((*arrays[0].shape, size), [(*a.strides, 1) for a in arrays])
    if any(f[-1] != 1 for f in strides_joined):  # elements of one byte with gaps between them
        shape, strides_joined = [*shape, 1], [[*f, 1] for f in strides_joined]
    for word in lanes:
        # Addresses, distances between rows and their lengths must all be whole words.
        gaps = [s for f in strides_joined for s in f[:-1]]
        if not any(n % word for n in (shape[-1], *gaps, *map(address, arrays))):
            break
    else:
        raise KernelError(f"{what}: expected elements aligned to their size, got {[a.strides for a in arrays]}; copy")
    words = [[*(s // word for s in f[:-1]), 1] for f in strides_joined]
    shape = [*shape[:-1], shape[-1] // word]
    # Rows of one word need no axis, which would count against the limit.
    if shape[-1] == 1 and len(shape) > 1:
        shape, words = shape[:-1], [w[:-1] for w in words]
    _check_axes(what, shape)
    return Joined(tuple(shape), tuple(map(tuple, words)), word)


def _check_axes(what: str, shape: Sequence[int]) -> None:
    if len(shape) > AXES:
        raise KernelError(f"{what}: expected at most {AXES} axes that cannot be joined, got {len(shape)}; copy first")
