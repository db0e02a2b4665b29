"""The buckets in which gradients are summed, as the store makes them: who sums what, and how much it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from halograd.dtensor import Groups
from halograd.layers import Network
from halograd.layers.parameter_blocks import ParameterBlocks
from halograd.layers.reduction_chunks import chunks_of, gradient_layers
from halograd.layers.reduction_scheme import Scheme
from halograd.program.traffic import GroupSum

__all__ = ["ALIGN", "Bucket", "aligned", "buckets_of"]

#: Parameters begin at multiples of this [B].
ALIGN = 64


@dataclass(frozen=True)
class Bucket:
    """Parameters whose gradients are summed together.

    Attributes
    ----------
    layers
        Names, last layer first.
    holders
        Who sums them: ranks of one group hold the same block.
    nbytes
        Per group, alignment included [B].
    replicated
        Every rank computes the gradients of the whole batch: there is nothing to sum.
    """

    layers: tuple[str, ...]
    holders: Groups
    nbytes: tuple[int, ...]
    replicated: bool = False

    @property
    def sum(self) -> GroupSum:
        """The reduction of its gradients."""
        return GroupSum.of("allreduce", self.holders, self.nbytes)


def buckets_of(
    network: Network,
    blocks: Mapping[str, ParameterBlocks],
    itemsize: int,
    bucket_bytes: int,
    scheme: Scheme | None = None,
) -> list[Bucket]:
    """All buckets of a network, in the order in which the store makes them; `scheme` is ``bucketed`` if None."""
    found = []
    for chunk in chunks_of(gradient_layers(network, blocks), scheme or Scheme(), bucket_bytes, itemsize):
        columns = [[aligned(n * itemsize) for n in blocks[g.name].sizes] for g in chunk.gradients]
        assert isinstance(chunk.sharing, Groups)
        found.append(Bucket(chunk.layers, chunk.sharing, tuple(map(sum, zip(*columns))), chunk.replicated))
    return found


def aligned(nbytes: int) -> int:
    """What so many bytes take [B]."""
    return -(-nbytes // ALIGN) * ALIGN
