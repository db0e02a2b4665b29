"""Batch norm, and norms of single samples by the same kernels with a leading sample axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from halograd.kernels.checks import check_packed
from halograd.kernels.cuda.columns import FINISH_BLOCK, ColumnsGrid, row_sums, with_partial
from halograd.kernels.cuda.device import THREADS, Device
from halograd.kernels.cuda.launch import Launch, accumulator, is_float, power_of_two, scalar_program, sequence
from halograd.kernels.cuda.sources import dtype_name
from halograd.kernels.errors import KernelError
from halograd.kernels.kernel import BatchNormArrays, BatchNormKernels, Kernel, chain, idle
from halograd.kernels.scratch import Scratch

__all__ = ["Norm", "channel_norm"]


@dataclass(frozen=True)
class Norm:
    """One norm.

    Attributes
    ----------
    a
        Its x, y, dy, dx are (batch, rows, channels) in memory; gamma and beta ``(channels,)``, mean and var
        ``(batch, channels)``, sums and means float64 ``(batch, 2, channels)``.
    premultiplied
        The means are of ``gamma * dy'``, as group norm has them.
    """

    device: Device
    scratch: Scratch
    a: BatchNormArrays
    batch: int = 1
    premultiplied: bool = False

    @property
    def channels(self) -> int:
        return int(self.a.x.shape[-1])

    @property
    def rows(self) -> int:
        """Elements of a channel that share statistics."""
        return self.a.rows // self.batch

    def _grid(self, *arrays: Any, per_unit: int) -> ColumnsGrid:
        return ColumnsGrid.of(self.device, self.batch, self.rows, self.channels, *arrays, per_unit=per_unit)

    def _launch(self, name: str, grid: ColumnsGrid, finish: bool = False, **members: Any) -> Launch:
        a = self.a
        vectors = {"gamma": a.gamma, "beta": a.beta, "mean": a.mean, "var": a.var}
        given = {
            **{name: getattr(a, name) for name in ("x", "y", "dy", "dx", "residual", "sums", "means", "eps", "relu")},
            **vectors,
            **{f"{name}_float": is_float(v) for name, v in vectors.items()},
            **{"batch": self.batch, "rows": self.rows, "channels": self.channels, "chunks": grid.chunks},
            **{"premultiplied": self.premultiplied, "factor": 1.0},
            **members,
        }
        program = scalar_program("norm", a.x, a.y, a.dy, a.dx)
        if finish:
            return Launch(self.device, program, name, grid.finish_grid, FINISH_BLOCK, **given)
        return Launch(self.device, program, f"{name}_{grid.suffix}", grid.grid, grid.block, **given)

    def _statistics(self, *then: Launch) -> Kernel:
        grid = self._grid(self.a.x, per_unit=4)
        launches = (self._launch("statistics", grid), self._launch("finish_sums", grid, finish=True))
        return with_partial(self.scratch, grid, "norm statistics", *launches, *then)

    def _forward(self) -> Launch:
        """With mean and variance from `sums` where these are known by then: one launch less."""
        a, t = self.a, self.a.training
        name = "forward" if a.residual is None else "residual_forward"
        grid = self._grid(a.x, a.y, a.residual, per_unit=8)
        if t is None:
            return self._launch(name, grid, count=self.rows if a.local else 0)
        count = self.rows if a.local else t.count if t.from_sums else 0
        running = {"running_mean": t.running_mean, "running_var": t.running_var}
        running.update(running_float=is_float(t.running_mean), momentum=t.momentum, unbiased=t.unbiased)
        return self._launch(name, grid, count=count, **running)

    def _gradient_sums(self, *then: Launch) -> Kernel:
        a, t, members = self.a, self.a.training, dict[str, Any]()
        grid = self._grid(a.x, a.y, a.dy, a.dresidual, per_unit=4)
        if t is not None:
            members.update(dgamma=t.dgamma, dbeta=t.dbeta, gradients_float=is_float(t.dgamma))
        finish = self._launch("finish_sums", grid, finish=True, **members)
        sums = self._launch("gradient_sums", grid, dresidual=a.dresidual)
        return with_partial(self.scratch, grid, "norm gradient sums", sums, finish, *then)

    def _gradient_data(self) -> Launch:
        """With the means that are given, or those that follow from the sums; of dy', where that was kept."""
        a, members = self.a, dict[str, Any]()
        if a.dresidual is not None:
            members.update(dy=a.dresidual, relu=False)
        if a.local or a.training is not None:
            count = self.rows if a.training is None else a.training.count
            members.update(means=a.sums, factor=1.0 / count)
        dy = members.get("dy", a.dy)
        return self._launch("gradient_data", self._grid(a.x, a.y, dy, a.dx, per_unit=8), **members)

    def kernels(self) -> BatchNormKernels:
        """All four; statistics and their corrections leave the process between them, unless they are local."""
        if self.a.local:
            return self._local_kernels()
        statistics = self._statistics()
        forward = sequence("norm", self._forward())
        if self.a.dx is None:
            return BatchNormKernels(statistics, forward, None, None)
        data = sequence("norm gradient", self._gradient_data())
        return BatchNormKernels(statistics, forward, self._gradient_sums(), data)

    def _local_kernels(self) -> BatchNormKernels:
        """The statistics are those of `x` alone; no sums in between."""
        forward = self._statistics(self._forward())
        if self.a.dx is None:
            return BatchNormKernels(idle(), forward, None, None)
        return BatchNormKernels(idle(), forward, self._gradient_sums(self._gradient_data()), idle())


def channel_norm(
    device: Device,
    scratch: Scratch,
    x: Any,
    y: Any,
    dy: Any,
    dx: Any,
    gamma: Any,
    beta: Any,
    dgamma: Any,
    dbeta: Any,
    eps: float,
    relu: bool,
) -> tuple[Kernel, Kernel | None]:
    """Normalization over the channels of each position, and its gradient where `dy` is given.

    Parameters
    ----------
    x, y, dy, dx
        Packed ``(..., C)``; `dx` may be None: only the gradients of the parameters are wanted.
    gamma, beta, dgamma, dbeta
        ``(C,)``, of the dtype of `x` or float32, or all None.
    """
    check_packed("channel_norm", x=x, y=y, dy=dy, dx=dx, gamma=gamma, beta=beta, dgamma=dgamma, dbeta=dbeta)
    if (gamma is None) != (beta is None) or (dgamma is None) != (dbeta is None):
        raise KernelError("channel_norm: expected gamma and beta (and their gradients) both or neither, got one")
    if not x.size:
        return idle(), None if dy is None else idle()
    channels = x.shape[-1]
    rows = x.size // channels
    dtype = accumulator(dtype_name(x))
    moments = None if dy is None else device.empty((rows, 2), dtype)
    members = {"x": x, "y": y, "gamma": gamma, "beta": beta, "moments": moments, "eps": eps, "relu": relu}
    members.update(gamma_float=is_float(gamma), beta_float=is_float(beta), rows=rows, channels=channels)
    lanes = power_of_two(channels // 2, 128)
    block = (lanes, THREADS // lanes)
    grid = (max(1, min(-(-rows // block[1]), device.blocks(16))),)
    program = scalar_program("channel_norm", x, y, dy, dx)
    kept = rows * 2 * np.dtype(dtype).itemsize if moments is not None else 0
    launch = Launch(device, program, "channel_forward", grid, block, **members)
    forward = sequence("channel_norm", launch, workspace_bytes=kept)
    if dy is None:
        return forward, None
    parts: list[Kernel] = []
    if dgamma is not None:
        sums = {"x": x, "y": y, "moments": moments, "relu": relu}
        parts.append(row_sums(device, scratch, "channel_norm sums", dy, dbeta, dgamma, **sums))
    if dx is not None:
        launch = Launch(device, program, "channel_backward", grid, block, dy=dy, dx=dx, **members)
        parts.append(sequence("channel_norm gradient", launch))
    return forward, chain(*parts) if parts else idle()
