"""Sums of whole arrays, the search for what is not finite, clipping and scaling of the loss: all on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halograd.kernels.checks import check_packed
from halograd.kernels.cuda.device import Device
from halograd.kernels.cuda.launch import Launch, items_grid, run_all, scalar_program, sequence, vector_lanes
from halograd.kernels.cuda.sources import Program
from halograd.kernels.kernel import Kernel, ScratchKernel, idle
from halograd.kernels.scratch import Scratch

__all__ = ["clip", "find_nonfinite", "total", "update_loss_scale"]


def _suffix(x: Any) -> str:
    """The kernels have a tail of their own: only the address must be aligned."""
    return "1" if vector_lanes(0, x) == 1 else "v"


def total(device: Device, scratch: Scratch, x: Any, out: Any, squares: bool) -> Kernel:
    """``out`` float64 (1,) = the sum of all elements of a packed array, or of their squares."""
    check_packed("total", x=x, out=out)
    if not x.size:
        return Kernel(lambda: out.fill(0), "empty")
    grid = items_grid(device, x.size // 4, per_unit=4)
    members = {"x": x, "total": out, "count": x.size, "squares": squares, "partials": grid[0]}
    program = scalar_program("reduce", x)
    launches = [
        Launch(device, program, f"total_{_suffix(x)}", grid, **members),
        Launch(device, program, "finish_total", (1,), **members),
    ]
    run = run_all(launches)

    def bind() -> Callable[[], Any]:
        partial = scratch.view(grid, np.float64)
        for launch in launches:
            launch.set(partial=partial)
        return run

    return ScratchKernel(bind, scratch, 8 * grid[0], "cuda:total")


def find_nonfinite(device: Device, arrays: Sequence[Any], flag: Any) -> Kernel:
    """Set ``flag`` int32 (1,) to 1 if any element of the packed arrays is infinite or NaN; else leave it."""
    launches = []
    for x in (a for a in arrays if a.size):
        check_packed("find_nonfinite", x=x)
        name, grid = f"find_nonfinite_{_suffix(x)}", items_grid(device, x.size // 4, per_unit=8)
        launches.append(Launch(device, scalar_program("reduce", x), name, grid, x=x, count=x.size, flag=flag))
    return sequence("find_nonfinite", *launches) if launches else idle()


def clip(device: Device, norm_squares: Any, max_norm: float, scalars: Any) -> Kernel:
    """``scalars[1] *= min(1, max_norm / (norm + 1e-6))``, norm = ``sqrt(norm_squares) * |scalars[1]|``."""
    members = {"squares": norm_squares, "scalars": scalars, "max_norm": max_norm}
    return sequence("clip", Launch(device, Program("reduce"), "clip", (1,), **members))


def update_loss_scale(device: Device, state: Any, flag: Any, growth: float, backoff: float, interval: int) -> Kernel:
    """Dynamic loss scaling: ``state`` float64 (3,) = [scale, good steps, 1 / scale]; clears `flag`.

    After a step with ``flag`` set the scale is multiplied by `backoff` (at least 1), after `interval` good ones by
    `growth` (at most 2^24), as in Micikevicius et al., "Mixed precision training", ICLR 2018, Section 3.2.
    """
    members = {"state": state, "flag": flag, "growth": growth, "backoff": backoff, "interval": interval}
    return sequence("loss_scale", Launch(device, Program("reduce"), "update_loss_scale", (1,), **members))
