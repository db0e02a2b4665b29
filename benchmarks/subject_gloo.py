"""torch on several ranks as a contestant: hand-written code that cuts an image along its height, over gloo.

The code has halos as an autograd function around torch's own convolutions, batch norm with summed statistics, and one
all-reduce of all gradients, which are views of one buffer. Communication does not overlap with computation, which would
need a library.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.problems import PROBLEMS, has_relu
from benchmarks.subject_torch import FUNCTIONS, TorchNetwork, library
from benchmarks.worker import launched_rank
from halograd import layers as hl
from halograd.dtensor.layout import intervals

__all__ = ["GlooSubject"]

Function = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Halo:
    """Rows that a window along the height needs on this rank.

    Attributes
    ----------
    above, below
        Rows from the neighbors; negative: number of own rows that are not needed.
    give_above, give_below
        Own rows that the neighbors need.
    pad_above, pad_below
        Rows beyond the image.
    """

    above: int
    below: int
    give_above: int
    give_below: int
    pad_above: int
    pad_below: int

    @classmethod
    def of(cls, window: Any, size: int, out: int, rank: int, ranks: int) -> Halo:
        """Return the rows for a window from `size` to `out` rows in even parts, with halos of direct neighbors only."""
        rows, outs = intervals(size, ranks), intervals(out, ranks)
        needs = [window.input_range(*part) for part in outs]
        if any(high - size > 0 < ranks - 1 - r or low < 0 < r for r, (low, high) in enumerate(needs)):
            raise ValueError(f"expected parts larger than the halo of {window}, got {rows}")
        (low, high), (first, last) = needs[rank], rows[rank]
        give_above = max(0, needs[rank - 1][1] - first) if rank else 0
        give_below = max(0, last - needs[rank + 1][0]) if rank + 1 < ranks else 0
        pads = (max(0, -low), max(0, high - size))
        return cls(first - max(low, 0), min(high, size) - last, give_above, give_below, *pads)

    @property
    def empty(self) -> bool:
        """Whether neither this rank nor its neighbors need rows of other ranks."""
        return self == Halo(0, 0, 0, 0, 0, 0)


def swap(above: torch.Tensor | None, below: torch.Tensor | None, into: list[torch.Tensor | None]) -> None:
    """Send rows to the neighbors and receive theirs; None for no rows."""
    rank, work = dist.get_rank(), []
    for rows, peer in zip(into, (rank - 1, rank + 1)):
        if rows is not None:
            work.append(dist.irecv(rows, peer))
    for own, peer in ((above, rank - 1), (below, rank + 1)):
        if own is not None:
            work.append(dist.isend(own.contiguous(), peer))
    for request in work:
        request.wait()


class WithHalo(torch.autograd.Function):
    """Join of a block's rows with rows of its neighbors and padding; ``(N, C, H, W)``, channels-last."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, halo: Halo, fill: float) -> torch.Tensor:
        ctx.halo, ctx.rows = halo, x.shape[2]
        rows = x.permute(0, 2, 3, 1)
        n, h, w, c = rows.shape
        into = [rows.new_empty((n, k, w, c)) if k > 0 else None for k in (halo.above, halo.below)]
        swap(_rows(rows, 0, halo.give_above), _rows(rows, h - halo.give_below, halo.give_below), into)
        own = rows[:, max(0, -halo.above) : h - max(0, -halo.below)]
        pads = [rows.new_full((n, k, w, c), fill) if k else None for k in (halo.pad_above, halo.pad_below)]
        parts = [part for part in (pads[0], into[0], own, into[1], pads[1]) if part is not None]
        return torch.cat(parts, 1).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        halo, h = ctx.halo, ctx.rows
        rows = gradient.permute(0, 2, 3, 1)
        n, _, w, c = rows.shape
        rows = rows[:, halo.pad_above : rows.shape[1] - halo.pad_below]
        above, below = max(0, halo.above), max(0, halo.below)
        into = [rows.new_empty((n, k, w, c)) if k else None for k in (halo.give_above, halo.give_below)]
        swap(_rows(rows, 0, above), _rows(rows, rows.shape[1] - below, below), into)
        dx = rows.new_zeros((n, h, w, c))
        dx[:, max(0, -halo.above) : h - max(0, -halo.below)] = rows[:, above : rows.shape[1] - below]
        if into[0] is not None:
            dx[:, : halo.give_above] += into[0]
        if into[1] is not None:
            dx[:, h - halo.give_below :] += into[1]
        return dx.permute(0, 3, 1, 2), None, None


def _rows(rows: torch.Tensor, first: int, count: int) -> torch.Tensor | None:
    return rows[:, first : first + count] if count else None


class SummedNorm(torch.autograd.Function):
    """Batch norm of the whole image: statistics, and their gradients, summed over the ranks."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor, eps: float, count: int
    ) -> torch.Tensor:
        mean, var = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
        sums = torch.stack((mean, var + mean * mean)) * (x.numel() // x.shape[1])
        dist.all_reduce(sums)
        mean = sums[0] / count
        var = sums[1] / count - mean * mean
        ctx.save_for_backward(x, mean, var, gamma)
        ctx.eps, ctx.count = eps, count
        return F.batch_norm(x, mean, var, gamma, beta, False, 0.0, eps)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, mean, var, gamma = ctx.saved_tensors
        inverse = torch.rsqrt(var + ctx.eps)
        arguments = (gradient, x, gamma, mean, var, mean, inverse, False, ctx.eps, [True, True, True])
        dx, dgamma, dbeta = torch.ops.aten.native_batch_norm_backward(*arguments)
        sums = torch.stack((dgamma, dbeta))
        dist.all_reduce(sums)
        scale = gamma * inverse / ctx.count
        slope, offset = -scale * sums[0] * inverse, scale * (sums[0] * inverse * mean - sums[1])
        dx.addcmul_(x, slope.view(1, -1, 1, 1)).add_(offset.view(1, -1, 1, 1))
        return dx, dgamma, dbeta, None, None


class Summed(torch.autograd.Function):
    """Sum over the ranks, whose gradient is summed too."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        dist.all_reduce(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        whole = gradient.clone()
        dist.all_reduce(whole)
        return whole


class _CutNetwork(TorchNetwork):
    """Part of the network on this rank: windows with halos; norms and losses over the whole image."""

    def __init__(self, network: hl.Network, weights: Mapping[str, Any], inputs: Mapping[str, Any], batch: int) -> None:
        self.batch, self.rank, self.ranks = batch, dist.get_rank(), dist.get_world_size()
        super().__init__(network, weights, {name: self._part(array) for name, array in inputs.items()})

    def _part(self, array: np.ndarray) -> np.ndarray:
        if array.ndim != 4:
            return array
        low, high = intervals(array.shape[1], self.ranks)[self.rank]
        return np.ascontiguousarray(array[:, low:high])

    def _bind(self, network: hl.Network, name: str, node: hl.Node) -> tuple[str, list[str], Function]:
        own = {k.rpartition("/")[2]: v for k, v in self.params.items() if k.rpartition("/")[0] == name}
        layer, shape = node.layer, node.inputs[0].shape
        makers = {
            hl.Conv: self._conv,
            hl.MaxPool: self._max_pool,
            hl.BatchNorm: self._batch_norm,
            hl.GlobalAveragePool: self._average,
            hl.BinaryCrossEntropyWithLogits: self._binary,
            hl.SoftmaxCrossEntropy: self._softmax,
        }
        if type(layer) in makers:
            function = makers[type(layer)](layer, own, shape, node.shape)
        else:
            function = FUNCTIONS[type(layer)](layer, own, shape)
        return name, [network.names[n] for n in node.inputs], function

    def _windowed(self, layer: Any, shape: Any, out: Any, fill: float) -> tuple[Function, dict[str, Any]]:
        """Return a function that fetches a block's halo, and options of its reader without padding along the height."""
        h, w = layer.windows(shape)
        halo = Halo.of(h, shape[0], out[0], self.rank, self.ranks)
        options = {"stride": (h.stride, w.stride), "padding": (0, w.pad_lo), "dilation": (h.dilation, w.dilation)}
        return (lambda x: x) if halo.empty else (lambda x: WithHalo.apply(x, halo, fill)), options

    def _conv(self, layer: hl.Conv, own: Any, shape: Any, out: Any) -> Function:
        haloed, options = self._windowed(layer, shape, out, 0.0)
        relu = has_relu(layer)

        def run(x: torch.Tensor) -> torch.Tensor:
            y = F.conv2d(haloed(x), own["w"], own.get("b"), groups=layer.groups, **options)
            return F.relu(y, inplace=True) if relu else y

        return run

    def _max_pool(self, layer: hl.MaxPool, own: Any, shape: Any, out: Any) -> Function:
        haloed, options = self._windowed(layer, shape, out, -math.inf)
        kernel = tuple(w.kernel for w in layer.windows(shape))
        return lambda x: F.max_pool2d(haloed(x), kernel, **options)

    def _batch_norm(self, layer: hl.BatchNorm, own: Any, shape: Any, out: Any) -> Function:
        count, relu = self.batch * shape[0] * shape[1], has_relu(layer)

        def run(x: torch.Tensor, *residual: torch.Tensor) -> torch.Tensor:
            y = SummedNorm.apply(x, own["gamma"], own["beta"], layer.eps, count)
            y = y + residual[0] if residual else y
            return F.relu(y, inplace=True) if relu else y

        return run

    def _average(self, layer: Any, own: Any, shape: Any, out: Any) -> Function:
        return lambda x: Summed.apply(x.sum((2, 3)) / (shape[0] * shape[1]))

    def _binary(self, layer: Any, own: Any, shape: Any, out: Any) -> Function:
        total = self.batch * math.prod(shape)
        return lambda x, t: F.binary_cross_entropy_with_logits(x, t, reduction="sum") / total

    def _softmax(self, layer: Any, own: Any, shape: Any, out: Any) -> Function:
        # After a global average, every rank has all samples and computes a part of the loss.
        total = self.batch * math.prod(shape[:-1]) * (self.ranks if len(shape) == 1 else 1)
        return lambda x, t: F.cross_entropy(x, t[:, 0].long(), reduction="sum") / total


class GlooSubject:
    """Network cut along the height, one part per rank, by torch and gloo. Collective over the launched ranks."""

    def __init__(self, spec: dict[str, Any]) -> None:
        torch.set_num_threads(spec["threads"])
        torch.set_num_interop_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = f"file://{spec['pipes']}/{spec['name']}.store"
        dist.init_process_group("gloo", init_method=store, rank=launched_rank(), world_size=spec["ranks"])
        problem = PROBLEMS[spec["problem"]]
        network = problem.make()
        self.network = _CutNetwork(network, problem.weights(network), problem.data(network), problem.batch)
        params = list(self.network.params.values())
        self.optimizer = torch.optim.SGD(params, lr=problem.rate, fused=True)
        self.flat = torch.zeros(sum(p.numel() for p in params) + 1)  # gradients, and the loss
        at = 0
        for p in params:
            p.grad = self.flat[at : at + p.numel()].as_strided(p.shape, p.stride())
            at += p.numel()
        ranks = f"{spec['ranks']} x {torch.get_num_threads()} threads"
        self.about = f"{library()}, channels-last, halos by hand over gloo, {ranks}"

    def step(self) -> float:
        self.flat.zero_()
        loss = self.network.loss()
        loss.backward()
        self.flat[-1] = loss.detach()
        dist.all_reduce(self.flat)
        self.optimizer.step()
        return float(self.flat[-1])

    def clock(self) -> float:
        return time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing, because every step is complete when it returns."""

    def close(self) -> None:
        dist.destroy_process_group()
