"""The sums over ranks within a step of a layer: statistics of norms, losses that need sums in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halograd.layers import BatchNorm, Dice, GroupNorm, LayerNorm, SoftmaxCrossEntropy
from halograd.perfmodel.cost.blocks import Blocks
from halograd.perfmodel.cost.stages import Stage
from halograd.perfmodel.cost.traffic import Traffic

__all__ = ["LOSS_BYTES", "Sum", "Sums", "sums_of"]


#: What is summed with every loss [B]: it, and two numbers by which the ranks agree on checkpoints
#: (`halograd.training.executor.VOTES`).
LOSS_BYTES = 24


@dataclass(frozen=True)
class Sum:
    """All-reduces that run at the same time, one in each of some disjoint groups of ranks.

    Attributes
    ----------
    kind
        Under which `comm.counters` books it.
    groups
        The ranks of every group, and what they sum [B].
    """

    kind: str
    groups: tuple[tuple[range, int], ...]

    def sent(self, ranks: int) -> Traffic:
        """What every rank sends: a reduction is booked as one message of its buffer."""
        messages, nbytes = np.zeros(ranks, np.int64), np.zeros(ranks, np.int64)
        for members, size in self.groups:
            if len(members) > 1:
                messages[members.start : members.stop : members.step] = 1
                nbytes[members.start : members.stop : members.step] = size
        return Traffic(messages, nbytes)

    @property
    def largest(self) -> tuple[int, range]:
        """The group that takes longest: most bytes, of those the farthest apart."""
        members, size = max(self.groups, key=lambda g: (g[1] * (len(g[0]) > 1), len(g[0]), g[0][-1] - g[0][0]))
        return size, members


@dataclass(frozen=True)
class Sums:
    """Sums of one layer in one step.

    Attributes
    ----------
    forward, backward
        Those that are waited for at once.
    aside
        Those that nobody waits for (running statistics).
    """

    forward: tuple[Sum, ...] = ()
    backward: tuple[Sum, ...] = ()
    aside: tuple[Sum, ...] = ()


def sums_of(stage: Stage, ranks: int) -> Sums:
    """The sums of a stage on `ranks` ranks in all."""
    layer = stage.layer
    if isinstance(layer, BatchNorm):
        return _batch_norm(stage, stage.options.get("statistics", layer.statistics))
    if isinstance(layer, LayerNorm) and layer.axes == "channels":
        return Sums()
    if isinstance(layer, GroupNorm):
        found = _sample_groups(stage.output.blocks, [16 * layer.group_count(stage.output.shape[-1])], per_sample=True)
        return _twice(stage, Sum("statistics", found))
    if isinstance(layer, Dice):
        batch = stage.inputs[0].shape[0] if layer.reduction == "sample" else 1
        return Sums((Sum("loss", ((range(ranks), 24 * stage.inputs[0].shape[-1] * batch),)),))
    if isinstance(layer, SoftmaxCrossEntropy) and layer.normalization == "weights":
        terms = len(stage.inputs) - 1
        return Sums((Sum("loss", ((range(ranks), 8),)),) * terms)
    return Sums()


def _twice(stage: Stage, total: Sum, aside: tuple[Sum, ...] = ()) -> Sums:
    several = any(len(members) > 1 for members, _ in total.groups)
    now = (total,) if several else ()
    return Sums(now, now if stage.backward else (), aside)


def _batch_norm(stage: Stage, statistics: str) -> Sums:
    """Two numbers of float64 per channel, over the ranks that share the statistics."""
    blocks = stage.output.blocks
    used, sizes = math.prod(stage.parts), [16 * int(n) for n in blocks.extents[-1]]
    everyone = tuple((range(first, used, len(sizes)), size) for first, size in enumerate(sizes))
    if statistics == "global":
        return _twice(stage, Sum("statistics", everyone))
    own = _sample_groups(blocks, sizes, per_sample=False) if statistics == "sample" else ()
    if own == everyone:
        return _twice(stage, Sum("statistics", own))
    running = (Sum("running statistics", everyone),) if used > len(sizes) else ()
    return _twice(stage, Sum("statistics", own), running)


def _sample_groups(blocks: Blocks, sizes: Sequence[int], per_sample: bool) -> tuple[tuple[range, int], ...]:
    """Ranks that share samples and channels, with the size of their channels [B] each, or per sample."""
    width = blocks.ranks // blocks.grid[0]
    return tuple(
        (range(i * width + first, (i + 1) * width, len(sizes)), size * (int(n) if per_sample else 1))
        for i, n in enumerate(blocks.extents[0])
        if n
        for first, size in enumerate(sizes)
    )
