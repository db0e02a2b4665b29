"""Copies between lists of strided boxes, and margins: one launch for a whole list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from halograd.kernels.cuda.device import Device, address
from halograd.kernels.cuda.launch import LARGE, Launch, sequence
from halograd.kernels.cuda.sources import Program, dtype_name
from halograd.kernels.cuda.strided import AXES, Joined, joined_bytes, joined_elements
from halograd.kernels.errors import KernelError
from halograd.kernels.kernel import Kernel, chain, idle

__all__ = ["add_into", "copy", "fill"]

WORDS_PER_BLOCK = 1024
#: Members of ``Piece`` in pieces.cuh.
COLUMNS = 4 + 3 * AXES


def copy(device: Device, pairs: Sequence[tuple[Any, Any]]) -> Kernel:
    """Copy every source view to its target view; source and target of all pairs must not overlap.

    By bytes, or converted where their dtypes differ: one launch for all of the same two dtypes.
    """
    groups: dict[tuple[str, ...], list[tuple[Any, Any]]] = {}
    for source, target in _checked("copy", pairs):
        same = source.dtype == target.dtype
        groups.setdefault(() if same else (dtype_name(source), dtype_name(target)), []).append((source, target))
    made = [_convert(device, some, dtypes) if dtypes else _move(device, some) for dtypes, some in groups.items()]
    return made[0] if len(made) == 1 else chain(*made) if made else idle()


def _move(device: Device, pairs: Sequence[tuple[Any, Any]]) -> Kernel:
    word = min(joined_bytes("copy", *pair).lanes for pair in pairs)
    joined = [joined_bytes("copy", *pair, lanes=(word,)) for pair in pairs]
    return _kernel(device, f"copy_{word}", Program("boxes", large=is_long(joined)), joined, _heads(pairs), pairs)


def _convert(device: Device, pairs: Sequence[tuple[Any, Any]], dtypes: tuple[str, ...]) -> Kernel:
    word = min(joined_elements("copy", *pair, lanes=(4, 2, 1)).lanes for pair in pairs)
    joined = [joined_elements("copy", *pair, lanes=(word,)).in_words() for pair in pairs]
    program = Program("boxes_cast", dtypes, is_long(joined))
    return _kernel(device, f"convert_{word}", program, joined, _heads(pairs), pairs)


def _heads(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[int, int]]:
    return [(address(source), address(target)) for source, target in pairs]


def is_long(joined: Sequence[Joined]) -> bool:
    """Whether the words of a piece have to be counted in 64 bits."""
    return max(j.items for j in joined) >= LARGE


def add_into(device: Device, pairs: Sequence[tuple[Any, Any]]) -> Kernel:
    """Add every source view to its target view; targets must not overlap one another."""
    pairs = _checked("add_into", pairs)
    if not pairs:
        return idle()
    if any(source.dtype != target.dtype for source, target in pairs):
        found = next((s.dtype, t.dtype) for s, t in pairs if s.dtype != t.dtype)
        raise KernelError(f"add_into: expected pairs of one dtype, got {found[0]} and {found[1]}; copy them first")
    size, dtype = np.dtype(pairs[0][1].dtype).itemsize, dtype_name(pairs[0][1])
    if any(dtype_name(target) != dtype for _, target in pairs):
        raise KernelError(f"add_into: expected arrays of one dtype, got {dtype} and others; convert them")
    word = min(joined_bytes("add_into", *pair, lanes=(16, size)).lanes for pair in pairs)
    joined = [joined_bytes("add_into", *pair, lanes=(word,)) for pair in pairs]
    name = "add_into_v" if word == 16 else "add_into_1"
    return _kernel(device, name, Program("boxes_add", (dtype,), is_long(joined)), joined, _heads(pairs), pairs)


def fill(device: Device, value: float, arrays: Sequence[Any]) -> Kernel:
    """Write `value` into every array or view, whatever its dtype; for margins and sums that begin.

    One launch for all that are as wide as each other: a word holds whole elements.
    """
    views = [a for a in arrays if a is not None and a.size]
    widths: dict[int, list[tuple[Any, Joined]]] = {}
    for view in views:
        size = np.dtype(view.dtype).itemsize
        joined = joined_bytes("fill", view, lanes=[w for w in (16, 8, 4, 2, 1) if w >= size])
        both = Joined(joined.shape, joined.strides * 2, joined.lanes)
        widths.setdefault(joined.lanes, []).append((view, both))
    made = []
    for word, pieces in widths.items():
        heads = [(_pattern(value, view), address(view)) for view, _ in pieces]
        kept = [view for view, _ in pieces]
        all_joined = [joined for _, joined in pieces]
        program = Program("boxes", large=is_long(all_joined))
        made.append(_kernel(device, f"fill_{word}", program, all_joined, heads, kept))
    return chain(*made) if made else idle()


def _pattern(value: float, array: Any) -> int:
    """Eight bytes of the value, repeated."""
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
    device: Device,
    name: str,
    program: Program,
    joined: Sequence[Joined],
    heads: Sequence[tuple[int, int]],
    kept: Any,
) -> Kernel:
    table = np.zeros((len(joined), COLUMNS), np.uint64)
    blocks = 0
    for row, piece, (source, target) in zip(table, joined, heads):
        strides = (piece.padded(s, 0) for s in piece.strides)
        signed = np.array([blocks, piece.items, *piece.padded(piece.shape, 1), *(n for s in strides for n in s)])
        row[:2], row[2:] = (source, target), signed.astype(np.int64).view(np.uint64)
        blocks += math.ceil(piece.items / WORDS_PER_BLOCK)
    pieces = device.upload(table)
    launch = Launch(device, program, name, (blocks,), pieces=pieces, count=len(joined))
    # The table holds bare addresses: the arrays must live as long as the kernel.
    launch.keep(kept)
    return sequence(name.rsplit("_", 1)[0], launch, workspace_bytes=table.nbytes)
