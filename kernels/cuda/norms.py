"""CUDA norms: batch norm, per-sample norms (the same kernels with a leading sample axis), and norms over channels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...device import Device
from ..kernel import BatchNormArrays, BatchNormKernels, Kernel, chain, idle
from ..memory import Scratch
from ..norm_parts import GroupNormArrays, GroupNormKernels
from ..norms import ChannelNormArrays, Norms
from ..summed import is_one_launch
from .columns import ColumnsGrid, row_sums, with_partial
from .launch import (
    THREADS,
    Launch,
    Launcher,
    accumulator,
    alpha_of,
    is_float,
    items_grid,
    power_of_two,
    scalar_program,
    sequence,
)
from .sources import CudaProgram, dtype_name

__all__ = ["CudaNorms"]


@dataclass(frozen=True)
class Norm:
    """Launches of one norm.

    Attributes
    ----------
    a
        Arguments. x, y, dy, dx are (batch, rows, channels) in memory; gamma and beta ``(channels,)``, mean and var
        ``(batch, channels)``, sums and means ``(batch, 2, channels)``.
    premultiplied
        Whether the means are of ``gamma * dy'``, as in group norm.
    """

    launcher: Launcher
    scratch: Scratch
    a: BatchNormArrays
    batch: int = 1
    premultiplied: bool = False

    @property
    def channels(self) -> int:
        return int(self.a.x.shape[-1])

    @property
    def rows(self) -> int:
        """Number of elements of a channel that share statistics."""
        return self.a.rows // self.batch

    def _grid(self, *arrays: Any, sums: bool) -> ColumnsGrid:
        return ColumnsGrid.of(self.launcher, self.batch, self.rows, self.channels, *arrays, sums=sums)

    def _launch(self, name: str, grid: ColumnsGrid, fused: bool = False, **members: Any) -> Launch:
        """Return a launch of the kernel `name`; `fused` applies the activation in it."""
        a = self.a
        vectors = {"gamma": a.gamma, "beta": a.beta, "mean": a.mean, "var": a.var}
        arguments = {
            **{name: getattr(a, name) for name in ("x", "y", "dy", "dx", "residual", "sums", "means", "eps")},
            **vectors,
            **{f"{name}_float": is_float(v) for name, v in {**vectors, "sums": a.sums}.items()},
            **{"batch": self.batch, "rows": self.rows, "channels": self.channels},
            **{"premultiplied": self.premultiplied, "factor": 1.0, "alpha": alpha_of(a.activation)},
            **members,
        }
        program = scalar_program("norm", a.x, a.y, a.dy, a.dx, activation=a.activation if fused else None)
        return Launch(self.launcher, program, f"{name}_{grid.suffix}", grid.grid, grid.block, **arguments)

    def _statistics(self, *then: Launch) -> Kernel:
        grid = self._grid(self.a.x, sums=True)
        statistics = self._launch("statistics", grid)
        return with_partial(self.launcher, self.scratch, grid, "norm statistics", statistics, *then)

    def _forward(self) -> Launch:
        """Return the forward launch. It derives mean and variance from `sums` if these are complete, which saves a
        launch.
        """
        a = self.a
        name = "forward" if a.residual is None else "residual_forward"
        return self._launch(name, self._grid(a.x, a.y, a.residual, sums=False), fused=True, **self._moments())

    def _moments(self) -> dict[str, Any]:
        """Return the arguments from which the forward launch takes mean and variance."""
        a, t = self.a, self.a.training
        if t is None:
            return {"share": 1 / self.rows if a.local else 0}  # 0: mean and variance are given
        count = self.rows if a.local else t.count if t.from_sums else 0
        running = {"running_mean": t.running_mean, "running_var": t.running_var, "momentum": t.momentum}
        running |= {"running_float": is_float(t.running_mean), "unbiased": t.unbiased}
        # With a share forward finds mean and variance in the sums, which are complete by then; with 0 they are given.
        return {**running, "share": 1 / count if count else 0}

    def _gradient_sums(self, *then: Launch) -> Kernel:
        a = self.a
        # With a residual the slope of the activation comes from y, and dy' is stored as the residual's gradient.
        read = () if a.dresidual is None else (a.y, a.dresidual)
        grid = self._grid(a.x, a.dy, *read, sums=True)
        sums = self._launch("gradient_sums", grid, fused=True, **self._gradients())
        return with_partial(self.launcher, self.scratch, grid, "norm gradient sums", sums, *then)

    def _gradients(self) -> dict[str, Any]:
        """Return the arguments for the gradients of the parameters and of the residual."""
        t = self.a.training
        if t is None:
            return {"dresidual": self.a.dresidual}
        parameters = {"dgamma": t.dgamma, "dbeta": t.dbeta, "gradients_float": is_float(t.dgamma)}
        return {"dresidual": self.a.dresidual, **parameters}

    def _gradient_data(self) -> Launch:
        """Return the launch that writes `dx`, from the given means or from the sums, and from dy' if that was stored.
        """
        a = self.a
        # The stored dy' includes the slope of the activation, so this launch is compiled without the activation.
        dy = a.dy if a.dresidual is None else a.dresidual
        grid = self._grid(a.x, dy, a.dx, sums=False)
        return self._launch("gradient_data", grid, fused=a.dresidual is None, dy=dy, **self._means())

    def _means(self) -> dict[str, Any]:
        """Return the arguments for the means of the gradients: those given, or the sums and a factor."""
        a = self.a
        if not a.local and a.training is None:
            return {}
        # The sums with a factor in place of means: no launch divides them.
        return {"means": a.sums, "factor": 1.0 / (self.rows if a.training is None else a.training.count)}

    def kernels(self) -> BatchNormKernels:
        """Return the kernels; without `dx` there are none of the backward pass.

        Unless statistics are local, the caller reduces the sums over processes between the kernels.
        """
        if self.a.local:
            return self._local_kernels()
        statistics = self._statistics()
        forward = sequence("norm", self._forward())
        if self.a.dx is None:
            return BatchNormKernels(statistics, forward, None, None)
        data = sequence("norm gradient", self._gradient_data())
        return BatchNormKernels(statistics, forward, self._gradient_sums(), data)

    def _local_kernels(self) -> BatchNormKernels:
        """Return the kernels for statistics of `x` alone, one or two launches per direction."""
        a = self.a
        grid = ColumnsGrid.whole(self.batch, self.rows, self.channels, a.x, a.y, a.dy, a.dx, a.residual, a.dresidual)
        sizes = self.rows, a.x.nbytes, math.prod(grid.grid)
        # Forward reads x twice, backward x and dy: one launch may be faster in one direction only.
        if is_one_launch(*sizes, 1, self.launcher.units):
            forward = sequence("norm", self._launch("whole_forward", grid, fused=True, **self._moments()))
        else:
            forward = self._statistics(self._forward())
        if a.dx is None:
            return BatchNormKernels(idle(), forward, None, None)
        if is_one_launch(*sizes, 2, self.launcher.units):
            both = self._launch("whole_backward", grid, fused=True, **self._gradients(), **self._means())
            backward = sequence("norm gradient", both)
        else:
            backward = self._gradient_sums(self._gradient_data())
        # The caller has nothing to reduce between the parts, so one part of each direction does it all.
        return BatchNormKernels(idle(), forward, backward, idle())


def _launch(launcher: Launcher, name: str, items: int, data: Any, **members: Any) -> Kernel:
    """Return a kernel of one launch over `items`. Per-channel vectors that are not float32 have the dtype of `data`."""
    program = CudaProgram("group_norm", (dtype_name(data) if data is not None else "float32",))
    return sequence(name, Launch(launcher, program, name, items_grid(launcher, items), **members))


def group_totals(launcher: Launcher, sums: Any, totals: Any, gamma: Any, scale: float) -> Kernel:
    """Return a kernel for ``totals[n, q, g] = scale * sum over channels c of group g of sums[n, q, c] * gamma[c]``, in
    float64.
    """
    batch, _, channels = sums.shape
    arguments = {"sums": sums, "totals": totals, "gamma": gamma, "gamma_float": is_float(gamma), "scale": scale}
    arguments.update(batch=batch, channels=channels, groups=totals.shape[-1])
    return _launch(launcher, "group_totals", totals.size, gamma, **arguments)


def group_moments(launcher: Launcher, totals: Any, mean: Any, var: Any) -> Kernel:
    """Return a kernel for mean and biased variance ``(N, C)`` from ``totals = [E x, E x^2]``, float64 ``(N, 2, G)``."""
    batch, channels = mean.shape
    arguments = {"totals": totals, "mean": mean, "var": var, "mean_float": is_float(mean), "var_float": is_float(var)}
    arguments.update(batch=batch, channels=channels, groups=totals.shape[-1])
    return _launch(launcher, "group_moments", mean.size, mean, **arguments)


def group_spread(launcher: Launcher, totals: Any, means: Any) -> Kernel:
    """Return a kernel for ``means[n, q, c] = totals[n, q, group of c]``, in float64."""
    batch, _, channels = means.shape
    arguments = {"totals": totals, "means": means, "batch": batch, "channels": channels, "groups": totals.shape[-1]}
    return _launch(launcher, "group_spread", means.size, None, **arguments)


def sum_samples(launcher: Launcher, sums: Any, first: Any, second: Any) -> Kernel:
    """Return a kernel for ``first = sum over samples of sums[:, 0]`` and ``second`` of ``sums[:, 1]``; ``(C,)``."""
    batch, _, channels = sums.shape
    arguments = {"sums": sums, "first": first, "second": second, "batch": batch, "channels": channels}
    arguments.update(first_float=is_float(first), second_float=is_float(second))
    return _launch(launcher, "sum_samples", channels, first, **arguments)


class CudaGroupNorm(GroupNormKernels):
    """Group norm of all samples at once, without a host wait. In float32 and 16 bits, each part is at most three
    launches for any number of samples.

    Variances in float32 and 16 bits come from float64 sums of squares; this is inaccurate if ``mean^2 / var`` exceeds
    5e8. In float64, which serves as the reference, variances are always taken about the means.
    """

    def __init__(self, launcher: Launcher, scratch: Scratch, device: Device, arrays: GroupNormArrays) -> None:
        super().__init__(arrays, device, [])
        a, self._exact = arrays, np.dtype(arrays.x.dtype) == np.float64
        vectors = (a.gamma, a.beta, a.mean, a.var, a.sums, a.means, a.eps, a.activation)
        self._norm = Norm(launcher, scratch, BatchNormArrays(a.x, a.y, a.dy, a.dx, *vectors), self._samples, True)
        kernels, scale = self._norm.kernels(), 1 / a.count
        # In float64 the totals stay sums: `_moments` divides them by the count.
        totals = group_totals(launcher, a.sums, a.totals, None, 1.0 if self._exact else scale)
        self._statistics = chain(kernels.statistics, totals)
        self._to_moments, self._forward = group_moments(launcher, a.totals, a.mean, a.var), kernels.forward
        self._sums = self._data = idle()
        if kernels.backward_sums is not None and kernels.backward_data is not None:
            # Gradients of the parameters are sums of dy' without gamma; the totals of groups, with gamma.
            own = [sum_samples(launcher, a.sums, a.dbeta, a.dgamma)] if self._grads else []
            weighted = group_totals(launcher, a.sums, a.totals, a.gamma, scale)
            self._sums = chain(kernels.backward_sums, *own, weighted)
            self._data = chain(group_spread(launcher, a.totals, a.means), kernels.backward_data)

    def statistics(self) -> None:
        self._has_moments = False
        self._statistics()

    def normalize(self) -> None:
        if not self._exact:
            self._to_moments()
        else:
            if not self._has_moments:
                self._moments()
            self._spread_moments()
        self.normalize_again()

    def normalize_again(self) -> None:
        self._forward()

    def backward_sums(self) -> None:
        self._sums()

    def backward_data(self) -> None:
        self._data()

    def close(self) -> None:
        for kernel in (self._statistics, self._to_moments, self._forward, self._sums, self._data):
            kernel.close()
        super().close()


class CudaNorms(Norms):
    """Norm kernels in CUDA."""

    launcher: Launcher
    scratch: Scratch
    fuses_norms = True

    def _batch_norm(self, arrays: BatchNormArrays) -> BatchNormKernels:
        return Norm(self.launcher, self.scratch, arrays).kernels()

    def _group_norm(self, arrays: GroupNormArrays) -> GroupNormKernels:
        return CudaGroupNorm(self.launcher, self.scratch, self.device, arrays)

    def _channel_norm(self, arrays: ChannelNormArrays) -> tuple[Kernel, Kernel | None]:
        a, launcher = arrays, self.launcher
        x, y, dy, dx, gamma, beta = a.x, a.y, a.dy, a.dx, a.gamma, a.beta
        channels = x.shape[-1]
        rows = x.size // channels
        dtype = accumulator(dtype_name(x))
        # Backward reads them. Without it, in a network that only predicts, they are not stored.
        moments = None if dy is None else launcher.empty((rows, 2), dtype)
        affine = {"gamma": gamma, "beta": beta, "gamma_float": is_float(gamma), "beta_float": is_float(beta)}
        members = {"x": x, "y": y, "moments": moments, "eps": a.eps, "rows": rows, "channels": channels, **affine}
        members.update(alpha=alpha_of(a.activation), centered=a.centered)
        # A power of two, because the lanes of a row are added up by halves; a block has two rows or more.
        lanes = power_of_two(channels // 2, 128)
        block = (lanes, THREADS // lanes)
        grid = (max(1, min(-(-rows // block[1]), launcher.blocks(16))),)
        program = scalar_program("channel_norm", x, y, dy, dx, activation=a.activation)
        kept = 0 if moments is None else launcher.own.add(moments)
        launch = Launch(launcher, program, "channel_forward", grid, block, **members)
        forward = sequence("channel_norm", launch, workspace_bytes=kept)
        if dy is None:
            return forward, None
        parts: list[Kernel] = []
        if a.dgamma is not None:
            sums = {"x": x, "moments": moments, "activation": a.activation, **affine}
            parts.append(row_sums(launcher, self.scratch, "channel_norm sums", dy, a.dbeta, a.dgamma, **sums))
        if dx is not None:
            launch = Launch(launcher, program, "channel_backward", grid, block, dy=dy, dx=dx, **members)
            parts.append(sequence("channel_norm gradient", launch))
        return forward, chain(*parts) if parts else idle()
