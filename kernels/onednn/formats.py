"""How our packed arrays look to oneDNN, whose logical axes are (N, C, *spatial) and (K, C, *kernel)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from halograd.kernels.geometry import Geometry
from halograd.kernels.onednn.abi import dims
from halograd.kernels.onednn.program import Memory, Program, packed_strides

__all__ = [
    "flat_shape", "geometry_dims", "image", "image_desc", "read_part", "vector", "weight_shape", "weights", "zero_rest",
]  # fmt: skip


def read_part(spatial: Sequence[int], geometry: Geometry) -> tuple[tuple[int, ...], Geometry]:
    """The leading part of an array of extents `spatial` that is read, and the geometry on it.

    oneDNN rejects a padding of ``-stride`` or less behind; rows dropped by it are left out instead.
    """
    part, padding = [], []
    for n, (lo, hi), stride in zip(spatial, geometry.padding, geometry.stride):
        drop = hi <= -stride
        part.append(n + hi if drop else n)
        padding.append((lo, 0 if drop else hi))
    return tuple(part), dataclasses.replace(geometry, padding=tuple(padding))


def _channels_first(strides: Sequence[int]) -> tuple[int, ...]:
    outer, *inner, last = strides
    return (outer, last, *inner)


def _logical(array: Any, spatial: Sequence[int] | None) -> tuple[int, ...]:
    n, *inner, channels = array.shape
    return (n, channels, *(inner if spatial is None else spatial))


def image_desc(program: Program, array: Any, spatial: Sequence[int] | None = None, free: bool = False) -> int:
    """Descriptor of a packed array of the samples, channels and dtype of `array`; `free` leaves the format open."""
    n, channels, *inner = shape = _logical(array, spatial)
    strides = None if free else _channels_first(packed_strides((n, *inner, channels)))
    return program.desc(shape, array.dtype, strides)


def image(program: Program, array: Any, spatial: Sequence[int] | None = None) -> Memory:
    """Memory over a packed array ``(N, *spatial, C)``, or over its leading part of extents `spatial`."""
    n, channels, *inner = shape = _logical(array, spatial)
    strides = list(_channels_first(packed_strides(array.shape)))
    if n == 1:
        # Of one sample the leading rows are packed too; its own stride must say so, or oneDNN takes them for strided.
        strides[0] = packed_strides((n, *inner, channels))[0]
    return program.array(array, program.desc(shape, array.dtype, strides))


def zero_rest(program: Program, array: Any, spatial: Sequence[int]) -> None:
    """Add a step that zeroes what lies outside the leading part, corners included."""
    rest = []
    at: list[slice] = [slice(None)]
    for n, part in zip(array.shape[1:-1], spatial):
        if part < n:
            rest.append(array[(*at, slice(part, None))])
        at.append(slice(0, part))

    def run() -> None:
        for block in rest:
            block.fill(0)

    if rest:
        program.call(run)


def flat_shape(array: Any) -> tuple[int, int, int, int]:
    """Shape (N, 1, rows, C) with all spatial axes made one, for what does not look at neighbours.

    Samples of one row each become the rows of one sample: oneDNN has no fast implementation for them.
    """
    n, *spatial, channels = array.shape
    rows = math.prod(spatial)
    return (1, 1, n, channels) if rows == 1 else (n, 1, rows, channels)


def weight_shape(w: Any, groups: int) -> tuple[int, ...]:
    """Logical shape of weights ``(K, *kernel, C / groups)``: with a leading axis of groups if there are several."""
    filters, *kernel, channels = w.shape
    if groups == 1:
        return (filters, channels, *kernel)
    return (groups, filters // groups, channels, *kernel)


def weights(program: Program, w: Any, groups: int) -> Memory:
    """Memory over packed weights."""
    strides = _channels_first(packed_strides(w.shape))
    if groups > 1:
        strides = (strides[0] * (w.shape[0] // groups), *strides)
    return program.array(w, program.desc(weight_shape(w, groups), w.dtype, strides))


def vector(program: Program, array: Any, shape: tuple[int, ...] | None = None) -> Memory:
    """Memory over a packed vector ``(C,)``, as such or broadcast as (1, C, 1, 1) or the like."""
    dimensions = shape or array.shape
    return program.array(array, program.desc(dimensions, array.dtype, packed_strides(dimensions)))


def geometry_dims(geometry: Geometry) -> tuple[Any, Any, Any, Any]:
    """Strides, dilations (oneDNN counts the gaps), paddings before and behind."""
    return (
        dims(geometry.stride),
        dims(d - 1 for d in geometry.dilation),
        dims(lo for lo, _ in geometry.padding),
        dims(hi for _, hi in geometry.padding),
    )
