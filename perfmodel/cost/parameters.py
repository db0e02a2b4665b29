"""What every rank holds of a layer's parameters, and the buckets in which their gradients are summed.

The rules are those of `layers/parameter_blocks.py` (a rank holds its block of filters and of input channels; biases
lie with the first part of the sum over the input channels) and of `training/store.py` (buckets are filled last layer
first, one row of them per way of sharing, and closed when they hold `bucket_bytes`), without a loop over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halograd.layers import Layer, Parameter
from halograd.perfmodel.cost.blocks import Parts, intervals
from halograd.perfmodel.cost.stages import Stage
from halograd.perfmodel.cost.sums import Sum

__all__ = ["ALIGN", "Bucket", "Held", "Sharing", "buckets_of", "held"]

#: Parameters begin at multiples of this [B].
ALIGN = 64


@dataclass(frozen=True)
class Sharing:
    """Who holds the same block of a parameter.

    Attributes
    ----------
    ranks
        Ranks that take part in the layer.
    stride
        Every so-manieth of them holds the same channels.
    step
        Of the first `stride` ranks, every so-manieth holds a block at all.
    """

    ranks: int
    stride: int = 1
    step: int = 1

    @property
    def groups(self) -> tuple[range, ...]:
        """The ranks that hold each of the blocks."""
        return tuple(range(first, self.ranks, self.stride) for first in range(0, self.stride, self.step))

    def block(self, rank: int) -> int | None:
        """Number of the block that a rank holds."""
        first = rank % self.stride
        return None if rank >= self.ranks or first % self.step else first // self.step


@dataclass(frozen=True)
class Held:
    """One parameter over the ranks: who shares it, and the elements of each block."""

    name: str
    sharing: Sharing
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are summed together.

    Attributes
    ----------
    layers
        Names, last layer first.
    sharing
        Who sums them.
    nbytes
        Per block of the sharing, alignment included [B].
    """

    layers: tuple[str, ...]
    sharing: Sharing
    nbytes: tuple[int, ...]

    @property
    def sum(self) -> Sum:
        """The reduction of its gradients."""
        return Sum("allreduce", tuple(zip(self.sharing.groups, self.nbytes)))

    def bytes_of(self, rank: int) -> int:
        """What a rank holds of it [B]."""
        block = self.sharing.block(rank)
        return 0 if block is None else self.nbytes[block]


def held(specs: Mapping[str, Parameter], parts: Parts) -> list[Held]:
    """What the ranks hold of a layer's parameters (or states) under a cut."""
    return [_held(name, spec, parts) for name, spec in specs.items()]


def _held(name: str, spec: Parameter, parts: Parts) -> Held:
    channels, inner = parts[4], parts[5]
    ranks, blocks = math.prod(parts), channels * inner
    if spec.channel_axis is None and (spec.input_axis is None or inner == 1):
        return Held(name, Sharing(ranks), (math.prod(spec.shape),))
    filters = [math.prod(spec.shape)] * channels
    if spec.channel_axis is not None:
        whole = spec.shape[spec.channel_axis]
        cuts = intervals(whole, blocks)
        spans = [cuts[(k + 1) * inner - 1][1] - cuts[k * inner][0] for k in range(channels)]
        filters = [math.prod(spec.shape) // whole * span for span in spans]
    if spec.input_axis is None:
        return Held(name, Sharing(ranks, blocks, inner), tuple(filters))
    inputs = spec.shape[spec.input_axis]
    shares = [b - a for a, b in intervals(inputs, inner)]
    return Held(name, Sharing(ranks, blocks), tuple(f // inputs * s for f in filters for s in shares))


def _bytes(parameter: Held, itemsize: int) -> tuple[int, ...]:
    return tuple(-(-size * itemsize // ALIGN) * ALIGN for size in parameter.sizes)


def buckets_of(stages: Sequence[Stage], itemsize: int, bucket_bytes: int) -> list[Bucket]:
    """All buckets of a network, in the order in which the store makes them."""
    done: list[Bucket] = []
    growing: dict[Sharing, list[tuple[str, Held]]] = {}

    def close(sharing: Sharing) -> None:
        members = growing.pop(sharing)
        nbytes = tuple(sum(column) for column in zip(*(_bytes(p, itemsize) for _, p in members)))
        done.append(Bucket(tuple(dict.fromkeys(name for name, _ in members)), sharing, nbytes))

    for stage in reversed(stages):
        own = held(stage.layer.parameters(*stage.shapes), stage.parts) if stage.is_layer else []
        for parameter in own:
            growing.setdefault(parameter.sharing, []).append((stage.name, parameter))
        for sharing in {parameter.sharing: None for parameter in own}:
            if sum(max(p.sizes) for _, p in growing[sharing]) * itemsize >= bucket_bytes:
                close(sharing)
    for sharing in list(growing):
        close(sharing)
    return done


def parameter_elements(layer: Layer, shapes: Sequence[tuple[int, ...]], parts: Parts) -> int:
    """Elements of a layer's parameters on the rank that holds most."""
    return sum(max(p.sizes) for p in held(layer.parameters(*shapes), parts))
