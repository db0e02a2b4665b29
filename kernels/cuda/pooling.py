"""Maximum and mean over windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from halograd.kernels.cuda.device import Device
from halograd.kernels.cuda.launch import Launch, items_grid, scalar_program, sequence, vector_lanes
from halograd.kernels.geometry import Geometry
from halograd.kernels.kernel import Kernel

__all__ = ["average_pool", "max_pool"]


def three(values: Any, fill: int) -> tuple[int, ...]:
    """Numbers of up to three axes as of three, the missing ones in front."""
    return (*(fill,) * (3 - len(values)), *(int(v) for v in values))


def _members(x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry) -> dict[str, Any]:
    return {
        "x": x,
        "y": y,
        "dy": dy,
        "dx": dx,
        "samples": x.shape[0],
        "channels": x.shape[-1],
        "in": three(x.shape[1:-1], 1),
        "out": three(y.shape[1:-1], 1),
        "kernel": three(geometry.kernel, 1),
        "stride": three(geometry.stride, 1),
        "dilation": three(geometry.dilation, 1),
        "lo": three([lo for lo, _ in geometry.padding], 0),
    }


def _pair(
    device: Device, kind: str, arrays: tuple[Any, Any, Any, Any], members: dict[str, Any], kept: int
) -> tuple[Kernel, Kernel | None]:
    x, y, _, dx = arrays
    program = scalar_program("pool", *arrays)
    lanes = vector_lanes(x.shape[-1], *arrays)
    suffix = "1" if lanes == 1 else "v"
    grid = items_grid(device, y.size // lanes)
    launch = Launch(device, program, f"{kind}_forward_{suffix}", grid, **members)
    forward = sequence(f"{kind}_pool", launch, workspace_bytes=kept)
    if dx is None:
        return forward, None
    grid = items_grid(device, x.size // lanes)
    return forward, sequence(
        f"{kind}_pool gradient", Launch(device, program, f"{kind}_backward_{suffix}", grid, **members)
    )


def max_pool(device: Device, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry) -> tuple[Kernel, Kernel | None]:
    """See :meth:`Backend.max_pool`. Backward gathers by the remembered positions, one or four bytes per output."""
    members = _members(x, y, dy, dx, geometry)
    kept = 0
    if dx is not None:
        wide = geometry.taps > np.iinfo(np.uint8).max + 1
        position = device.empty(y.shape, np.int32 if wide else np.uint8)
        members.update(position=position, wide=wide)
        kept = y.size * (4 if wide else 1)
    return _pair(device, "max", (x, y, dy, dx), members, kept)


def average_pool(
    device: Device, x: Any, y: Any, dy: Any, dx: Any, geometry: Geometry, count_include_pad: bool
) -> tuple[Kernel, Kernel | None]:
    """See :meth:`Backend.average_pool`."""
    members = {**_members(x, y, dy, dx, geometry), "include": count_include_pad}
    return _pair(device, "average", (x, y, dy, dx), members, 0)
