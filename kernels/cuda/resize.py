"""Interpolation by tables per axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from halograd.kernels.checks import check_packed
from halograd.kernels.cuda.device import Device
from halograd.kernels.cuda.launch import Launch, items_grid, scalar_program, sequence, vector_lanes
from halograd.kernels.cuda.pooling import three
from halograd.kernels.errors import KernelError
from halograd.kernels.kernel import Kernel, idle

__all__ = ["readers", "resize"]

Table = tuple[Any, Any]


def readers(first: Any, weights: Any, inputs: int) -> Any:
    """Per input the outputs ``[start, stop)`` among which all its readers are, int32 ``(inputs, 2)``.

    >>> readers(np.array([0, 0, 1]), np.array([[1, 0], [0.5, 0.5], [1, 0]]), 3).tolist()
    [[0, 2], [1, 3], [0, 0]]
    """
    found = np.zeros((inputs, 2), np.int32)
    for output, (input_, pair) in enumerate(zip(first, weights)):
        for tap in (0, 1):
            if pair[tap]:
                start, stop = found[input_ + tap]
                found[input_ + tap] = (output if stop == 0 else start, output + 1)
    return found


def resize(device: Device, x: Any, y: Any, dy: Any, dx: Any, tables: Sequence[Table]) -> tuple[Kernel, Kernel | None]:
    """``y`` from ``x`` and ``dx`` from ``dy``, packed ``(N, *spatial, C)``.

    Parameters
    ----------
    tables
        Per spatial axis ``(first, weights)``, host arrays: output o reads input ``first[o]`` times ``weights[o, 0]``
        and ``first[o] + 1`` times ``weights[o, 1]``. Outputs are in rising order of what they read.
    """
    check_packed("resize", x=x, y=y, dy=dy, dx=dx)
    axes = len(x.shape) - 2
    if len(tables) != axes or axes > 3:
        raise KernelError(f"resize: expected one table for each of at most 3 spatial axes, got {len(tables)}")
    if not x.size or not y.size:
        return idle(), None if dx is None else Kernel(lambda: dx.fill(0), "empty")
    trivial = (np.zeros(1), np.array([[1.0, 0.0]]))
    whole = [*(trivial,) * (3 - axes), *tables]
    inputs, outputs = three(x.shape[1:-1], 1), three(y.shape[1:-1], 1)
    firsts, weights, read = zip(*(_table(*t, n, m) for t, n, m in zip(whole, inputs, outputs)))
    members = {"x": x, "y": y, "dy": dy, "dx": dx, "samples": x.shape[0], "channels": x.shape[-1]}
    members.update({"in": inputs, "out": outputs})
    members["first"] = [device.upload(a) for a in firsts]
    members["weights"] = [device.upload(a) for a in weights]
    members["readers"] = [device.upload(a) for a in read]
    kept = sum(a.nbytes for part in (firsts, weights, read) for a in part)
    lanes = vector_lanes(x.shape[-1], x, y, dy, dx)
    suffix = "1" if lanes == 1 else "v"
    program = scalar_program("resize", x, y, dy, dx)
    grid = items_grid(device, y.size // lanes)
    launch = Launch(device, program, f"resize_forward_{suffix}", grid, **members)
    forward = sequence("resize", launch, workspace_bytes=kept)
    if dx is None:
        return forward, None
    grid = items_grid(device, x.size // lanes)
    return forward, sequence("resize gradient", Launch(device, program, f"resize_backward_{suffix}", grid, **members))


def _table(first: Any, weights: Any, inputs: int, outputs: int) -> tuple[Any, Any, Any]:
    first, weights = np.asarray(first, np.int32), np.ascontiguousarray(weights, np.float64)
    if first.shape != (outputs,) or weights.shape != (outputs, 2):
        raise KernelError(
            f"resize: expected a table of {outputs} outputs, got {first.shape} and {weights.shape}; make it for y"
        )
    if first.min() < 0 or (first + (weights[:, 1] != 0)).max() >= inputs:
        raise KernelError(f"resize: expected a table that reads inputs in [0, {inputs}), got others; make it for x")
    return first, weights, readers(first, weights, inputs)
