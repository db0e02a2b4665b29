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

__all__ = ["clip", "find_nonfinite", "sum_of_squares", "update_loss_scale"]


def _suffix(x: Any) -> str:
    """The kernels have a tail of their own: only the address must be aligned."""
    return "1" if vector_lanes(0, x) == 1 else "v"


def sum_of_squares(device: Device, scratch: Scratch, terms: Sequence[tuple[Any, float]], out: Any) -> Kernel:
    """A launch per array, which leaves partial sums, and one that adds them up."""
    full = [(x, weight) for x, weight in terms if x.size]
    if not full:
        return Kernel(lambda: out.fill(0), "empty")
    launches, places, count = [], [], 0
    for x, weight in full:
        grid = items_grid(device, x.size // 4, per_unit=4)
        members = {"x": x, "count": x.size, "weight": weight}
        launches.append(Launch(device, scalar_program("reduce", x), f"squares_{_suffix(x)}", grid, **members))
        places.append(count)
        count += grid[0]
    program = scalar_program("reduce", full[0][0])
    launches.append(Launch(device, program, "finish_squares", (1,), partials=count, total=out))
    places.append(0)
    run = run_all(launches)

    def bind() -> Callable[[], Any]:
        partial = scratch.view((count,), np.float64)
        for launch, first in zip(launches, places):
            launch.set(partial=partial[first:])
        return run

    return ScratchKernel(bind, scratch, 8 * count, "cuda:squares")


def find_nonfinite(device: Device, arrays: Sequence[Any], flag: Any) -> Kernel:
    """Set ``flag`` int32 (1,) to 1 if any element of the packed arrays is infinite or NaN; else leave it."""
    launches = []
    for x in (a for a in arrays if a.size):
        check_packed("find_nonfinite", x=x)
        name, grid = f"find_nonfinite_{_suffix(x)}", items_grid(device, x.size // 4, per_unit=8)
        launches.append(Launch(device, scalar_program("reduce", x), name, grid, x=x, count=x.size, flag=flag))
    return sequence("find_nonfinite", *launches) if launches else idle()


def clip(device: Device, squares: Any, inverse: Any, max_norm: float, norm: Any, factor: Any) -> Kernel:
    """See :meth:`Backend.clip`."""
    members = {"squares": squares, "inverse": inverse, "max_norm": max_norm, "norm": norm, "factor": factor}
    return sequence("clip", Launch(device, Program("reduce"), "clip", (1,), **members))


def update_loss_scale(device: Device, state: Any, flag: Any, growth: float, backoff: float, interval: int) -> Kernel:
    """Dynamic loss scaling: ``state`` float64 (3,) = [scale, good steps, 1 / scale]; clears `flag`.

    After a step with ``flag`` set the scale is multiplied by `backoff` (at least 1), after `interval` good ones by
    `growth` (at most 2^24), as in Micikevicius et al., "Mixed precision training", ICLR 2018, Section 3.2.
    """
    members = {"state": state, "flag": flag, "growth": growth, "backoff": backoff, "interval": interval}
    return sequence("loss_scale", Launch(device, Program("reduce"), "update_loss_scale", (1,), **members))
