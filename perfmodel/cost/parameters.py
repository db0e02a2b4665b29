"""What every rank holds of a layer's parameters, and the buckets in which their gradients are summed.

The rules are those of `layers/parameter_blocks.py` (a rank holds its block of filters and of input channels; biases
lie with the first part of the sum over the input channels), without a loop over ranks. Buckets are those of
`layers/reduction_chunks.py`, as in the runtime.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from halograd.dtensor import intervals
from halograd.layers import Layer, Parameter
from halograd.layers.reduction_chunks import Gradient, GradientLayer, chunks_of, decayed_first, kind_of
from halograd.layers.reduction_scheme import Scheme
from halograd.perfmodel.cost.blocks import Parts
from halograd.perfmodel.cost.stages import Stage
from halograd.perfmodel.cost.sums import Sum

__all__ = ["ALIGN", "Bucket", "Held", "Sharing", "buckets_of", "held", "untrained_bytes"]

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
    replicated
        Every rank computes the gradients of the whole batch: there is nothing to sum.
    """

    layers: tuple[str, ...]
    sharing: Sharing
    nbytes: tuple[int, ...]
    replicated: bool = False

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


def buckets_of(stages: Sequence[Stage], itemsize: int, bucket_bytes: int, scheme: Scheme | None = None) -> list[Bucket]:
    """All buckets of a network, in the order in which the store makes them; `scheme` is ``bucketed`` if None."""
    trained = any(stage.backward for stage in stages)
    own = {
        stage.name: _own(stage) if stage.backward or not trained else [] for stage in reversed(stages) if stage.is_layer
    }
    layers = [
        GradientLayer(
            stage.name,
            kind_of(stage.layer, bool(stage.layer.parameters(*stage.shapes))),
            tuple(Gradient(p.name, p.sharing, max(p.sizes)) for p in own[stage.name]),
        )
        for stage in reversed(stages)
        if stage.is_layer
    ]
    buckets = []
    for chunk in chunks_of(layers, scheme or Scheme(), bucket_bytes, itemsize):
        assert isinstance(chunk.sharing, Sharing)
        members = [p for name in chunk.layers for p in own[name] if p.sharing == chunk.sharing]
        nbytes = tuple(sum(column) for column in zip(*(_bytes(p, itemsize) for p in members)))
        buckets.append(Bucket(chunk.layers, chunk.sharing, nbytes, chunk.replicated))
    return buckets


def untrained_bytes(stages: Sequence[Stage], itemsize: int, rank: int) -> int:
    """Parameters that the loss does not depend on, on a rank: no bucket holds them [B]."""
    left = [s for s in stages if s.is_layer and not s.backward] if any(s.backward for s in stages) else []
    total = 0
    for parameter in (p for stage in left for p in _own(stage)):
        block = parameter.sharing.block(rank)
        total += 0 if block is None else _bytes(parameter, itemsize)[block]
    return total


def _own(stage: Stage) -> list[Held]:
    specs = stage.layer.parameters(*stage.shapes)
    return held({name: specs[name] for name in decayed_first(specs)}, stage.parts)


def parameter_elements(layer: Layer, shapes: Sequence[tuple[int, ...]], parts: Parts) -> int:
    """Elements of a layer's parameters on the rank that holds most."""
    return sum(max(p.sizes) for p in held(layer.parameters(*shapes), parts))
