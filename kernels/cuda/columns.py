"""Grids of the kernels that loop over the rows of ``(batch, rows, channels)``; sums per channel; bias."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..convolution import Convolutions
from ..kernel import FusedActivation, Kernel, KernelError, ScratchKernel, run_all
from ..memory import Scratch
from .launch import (
    MOST_BLOCKS,
    THREADS,
    Launch,
    Launcher,
    alpha_of,
    is_float,
    items_grid,
    power_of_two,
    scalar_program,
    sequence,
    suffix,
    vector_lanes,
)
from .sources import dtype_name

__all__ = ["ColumnsGrid", "CudaBias", "row_sums", "with_partial"]

# Rows that a thread reads before it adds them up; TILE of columns.cuh.
TILE = 8


@dataclass(frozen=True)
class ColumnsGrid:
    """Blocks over (channels, chunks of rows, batch).

    Attributes
    ----------
    lanes
        Channels per thread: 16 bytes' worth, or 1.
    suffix
        Suffix of the kernel's name, for one or several elements per access.
    """

    batch: int
    rows: int
    channels: int
    lanes: int
    block: tuple[int, int]
    grid: tuple[int, int, int]

    @classmethod
    def of(
        cls, launcher: Launcher, batch: int, rows: int, channels: int, *arrays: Any, sums: bool = True
    ) -> ColumnsGrid:
        """Return a grid for a kernel that reads `arrays`, with sums over rows or without."""
        lanes = vector_lanes(channels, *arrays)
        # With sums 128 bytes of a row, the unit of memory traffic: with more, fewer blocks would add up more partial
        # sums at the end, each alone.
        threads = power_of_two(channels // lanes, 8 if sums else 32)
        block = (threads, THREADS // threads)
        tiles = math.ceil(channels / (lanes * threads))
        # With sums not more blocks than run at the same time, and not more chunks than give every thread a tile of
        # rows: each chunk leaves partial sums to write and read.
        parts = launcher.blocks(2 if sums else 8) // (tiles * batch)
        chunks = max(1, min(parts, math.ceil(rows / (block[1] * TILE)), MOST_BLOCKS))
        return cls(batch, rows, channels, lanes, block, (tiles, chunks, batch))

    @classmethod
    def whole(cls, batch: int, rows: int, channels: int, *arrays: Any) -> ColumnsGrid:
        """Return a grid whose blocks have all rows of their channels, which are at most 32 bytes of each row."""
        lanes = vector_lanes(channels, *arrays)
        # Two threads of 16 bytes read one sector, the least that memory delivers.
        threads = power_of_two(channels // lanes, 2)
        return cls(
            batch, rows, channels, lanes, (threads, THREADS // threads), (-(-channels // (lanes * threads)), 1, batch)
        )

    @property
    def suffix(self) -> str:
        return suffix(self.lanes)

    @property
    def chunks(self) -> int:
        """Number of partial sums per channel."""
        return self.grid[1]

    @property
    def partial_shape(self) -> tuple[int, ...]:
        """Shape of the partial sums, float64."""
        return (self.batch, self.chunks, 2, self.channels)

    @property
    def partial_bytes(self) -> int:
        """Size of the partial sums [B]."""
        return 8 * math.prod(self.partial_shape)


def with_partial(
    launcher: Launcher, scratch: Scratch, grid: ColumnsGrid, impl: str, sums: Launch, *then: Launch
) -> Kernel:
    """Return a kernel of the launch `sums`, whose blocks add up in scratch memory, and of the launches `then`."""
    run = run_all([sums, *then])
    if grid.chunks == 1:
        return sequence(impl, sums, *then)
    # Counters of the blocks that have arrived. The last block sets its counter back to 0, so it must keep its value
    # between launches, and cannot be in scratch memory, which other kernels overwrite.
    arrived = launcher.upload(np.zeros((grid.batch, grid.grid[0]), np.uint64))
    sums.set(arrived=arrived)

    def bind() -> Callable[[], Any]:
        sums.set(partial=scratch.view(grid.partial_shape, np.float64))
        return run

    return ScratchKernel(bind, scratch, grid.partial_bytes, f"cuda:{impl}", 8 * grid.batch * grid.grid[0])


def row_sums(
    launcher: Launcher,
    scratch: Scratch,
    impl: str,
    dy: Any,
    first: Any,
    second: Any = None,
    activation: FusedActivation | None = None,
    **members: Any,
) -> Kernel:
    """Return a kernel for the column sums of dy' (`first`) and of ``dy' * xhat`` (`second`); see channel_sums.cu."""
    channels = dy.shape[-1]
    rows = dy.size // channels
    arrays = [a for a in (dy, members.get("x")) if a is not None]
    grid = ColumnsGrid.of(launcher, 1, rows, channels, *arrays)
    program = scalar_program("channel_sums", *arrays, activation=activation)
    # A sum may have another dtype than the data: gradients of parameters are float32 where images have 16 bits.
    codes = {"first_code": _code(dy, first), "second_code": _code(dy, second)}
    arguments = {"dy": dy, "first": first, "second": second, **codes, **members}
    arguments.update(rows=rows, channels=channels, alpha=alpha_of(activation))
    sums = Launch(launcher, program, f"row_sums_{grid.suffix}", grid.grid, grid.block, **arguments)
    return with_partial(launcher, scratch, grid, impl, sums)


def _code(dy: Any, out: Any) -> int:
    """Return the code of the output's dtype: 1 for float32, 2 for float64, else 0, the dtype of the data."""
    if out is None:
        return 0
    name = dtype_name(out)
    if name not in (dtype_name(dy), "float32", "float64"):
        raise KernelError(f"sums: expected dtype {dtype_name(dy)}, float32 or float64, got {name}; convert it after")
    return {"float32": 1, "float64": 2}.get(name, 0)


class CudaBias(Convolutions):
    """Bias kernels in CUDA."""

    launcher: Launcher
    scratch: Scratch

    def _bias(self, y: Any, b: Any) -> Kernel:
        channels, lanes = y.shape[-1], vector_lanes(y.shape[-1], y)
        items = y.size // lanes
        members = {"y": y, "b": b, "b_float": is_float(b), "items": items, "channels": channels}
        name, grid = f"bias_{suffix(lanes)}", items_grid(self.launcher, items)
        return sequence("bias", Launch(self.launcher, scalar_program("elementwise", y), name, grid, **members))

    def _bias_gradient(self, dy: Any, db: Any) -> Kernel:
        return row_sums(self.launcher, self.scratch, "bias_gradient", dy, db)
