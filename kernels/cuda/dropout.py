"""Dropout whose mask depends on global indices only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from halograd.kernels.checks import check_packed, check_same_shape
from halograd.kernels.cuda.device import Device
from halograd.kernels.cuda.launch import Launch, items_grid, scalar_program, sequence, vector_lanes
from halograd.kernels.cuda.strided import AXES
from halograd.kernels.errors import KernelError
from halograd.kernels.kernel import Kernel, idle

__all__ = ["dropout"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def dropout(
    device: Device, x: Any, y: Any, rate: float, salt: int, shape: Sequence[int], start: Sequence[int], state: Any
) -> Kernel:
    """``y = x / (1 - rate)`` where kept, else 0: the bits of :class:`halograd.layers.Dropout`.

    Parameters
    ----------
    x, y
        Packed, the box that begins at `start` of a global array of `shape`; may be one array. Backward is the same
        kernel from dy to dx.
    state
        uint64 ``(2,)`` on the device: seed and step, read when the kernel runs.
    salt
        Of the layer: the CRC of its name.
    """
    check_packed("dropout", x=x, y=y)
    check_same_shape("dropout", x=x, y=y)
    if not 0 <= rate < 1:
        raise KernelError(f"dropout: expected a rate in [0, 1), got {rate}; pass the share to drop")
    if not len(shape) == len(start) == len(x.shape) <= AXES:
        raise KernelError(f"dropout: expected shape and start for {len(x.shape)} axes, got {shape} and {start}")
    if not x.size:
        return idle()
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    lanes = vector_lanes(x.shape[-1], x, y)
    steps = [s * _GOLDEN & _MASK for s in strides]
    steps[-1] = steps[-1] * lanes & _MASK
    extents = [*x.shape[:-1], x.shape[-1] // lanes]
    rest = AXES - len(extents)
    members = {"x": x, "y": y, "state": state, "salt": salt, "threshold": int(rate * 2**64), "axes": len(extents)}
    members["base"] = sum(a * s for a, s in zip(start, strides)) * _GOLDEN & _MASK
    members["steps"] = (*steps, *(0,) * rest)
    members["shape"] = (*extents, *(1,) * rest)
    members.update(items=x.size // lanes, scale=1.0 / (1.0 - rate))
    name = "dropout_1" if lanes == 1 else "dropout_v"
    grid = items_grid(device, x.size // lanes)
    return sequence("dropout", Launch(device, scalar_program("dropout", x, y), name, grid, **members))
