"""Updates of flat buckets of parameters: one launch per bucket, with a copy in less precision where layers use one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from halograd.kernels.checks import check_packed
from halograd.kernels.cuda.device import THREADS, Device
from halograd.kernels.cuda.launch import Launch, is_large, items_grid, run_all, sequence, vector_lanes
from halograd.kernels.cuda.sources import Program, dtype_name
from halograd.kernels.errors import KernelError
from halograd.kernels.kernel import Kernel, ScratchKernel, idle
from halograd.kernels.scratch import Scratch

__all__ = ["decay_members", "lars", "update"]

#: Elements of a parameter per block of LARS.
_CHUNK = 16 * THREADS
_CHUNKS = 256


def _program(p: Any, g: Any, copy: Any) -> Program:
    if dtype_name(p) not in ("float32", "float64"):
        raise KernelError(f"optimizer: expected parameters of float32 or float64, got {dtype_name(p)}; keep masters")
    return Program("optimizer", (dtype_name(p), dtype_name(g), dtype_name(p if copy is None else copy)), is_large(p))


def _check(p: Any, g: Any, scalars: Any, *others: Any) -> None:
    check_packed("optimizer", p=p, g=g, **{f"state {i}": a for i, a in enumerate(others)})
    for a in (g, *others):
        if a is not None and a.size != p.size:
            raise KernelError(f"optimizer: expected arrays of {p.size} elements, got {a.size}; pass one bucket's")
    if tuple(scalars.shape) != (4,) or dtype_name(scalars) != "float64":
        raise KernelError(f"optimizer: expected scalars float64 (4,), got {dtype_name(scalars)} {tuple(scalars.shape)}")


def decay_members(device: Device, count: int, decays: int | Sequence[tuple[int, int, bool]]) -> dict[str, Any]:
    """Which of `count` elements have weight decay: the leading ones, or those of ``(start, stop, decayed)``."""
    if isinstance(decays, int):
        return {"decayed": decays}
    flags = np.zeros(-(-count // 4) * 4, np.uint8)
    for start, stop, decayed in decays:
        flags[start:stop] = bool(decayed)
    last = int(flags[:count].sum())
    if flags[:last].all():
        return {"decayed": last}
    return {"mask": device.upload(np.packbits(flags.reshape(-1, 4), axis=1, bitorder="little").reshape(-1))}


def update(
    device: Device, rule: str, p: Any, g: Any, v: Any, m: Any, scalars: Any, copy: Any, skip: Any, **members: Any
) -> Kernel:
    """One step of ``sgd`` or ``adam``; see optimizer.cu for the members."""
    _check(p, g, scalars, v, m, copy)
    if not p.size:
        return idle()
    lanes = min(vector_lanes(4, a, lanes=4) for a in (p, g, v, m, copy) if a is not None)
    given = {"p": p, "g": g, "v": v, "m": m, "scalars": scalars, "copy": copy, "skip": skip, "count": p.size, **members}
    grid = items_grid(device, p.size // lanes)
    return sequence(rule, Launch(device, _program(p, g, copy), f"{rule}_{lanes}", grid, **given))


def lars(
    device: Device,
    scratch: Scratch,
    p: Any,
    g: Any,
    v: Any,
    scalars: Any,
    segments: Sequence[tuple[int, int, bool]],
    copy: Any,
    skip: Any,
    **members: Any,
) -> Kernel:
    """One step of LARS over the parameters ``[start, stop)`` of a bucket, with the norms of each."""
    _check(p, g, scalars, v, copy)
    table = np.array([(a, b, bool(d)) for a, b, d in segments if b > a], np.int64).reshape(-1, 3)
    if not len(table):
        return idle()
    longest = int((table[:, 1] - table[:, 0]).max())
    chunks = max(1, min(-(-longest // _CHUNK), _CHUNKS))
    given = {"p": p, "g": g, "v": v, "scalars": scalars, "copy": copy, "skip": skip, "count": p.size, **members}
    given.update(segments=device.upload(table), chunks=chunks)
    program = _program(p, g, copy)
    launches = [Launch(device, program, name, (chunks, len(table)), **given) for name in ("lars_norms", "lars")]
    run = run_all(launches)

    def bind() -> Callable[[], Any]:
        partial = scratch.view((len(table), chunks, 2), np.float64)
        for launch in launches:
            launch.set(partial=partial)
        return run

    return ScratchKernel(bind, scratch, 16 * len(table) * chunks, "cuda:lars", table.nbytes)
