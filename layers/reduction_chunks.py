"""Chunks of gradients that are summed together, their order, and dense layers whose gradients need no sum.

Pure arithmetic that the runtime and the cost model share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from halograd.errors import UserError

from ..dtensor import Groups
from .batch_norm import BatchNorm
from .dense import Dense
from .embedding import Embedding, Token
from .group_norm import GroupNorm
from .layer import Node
from .network import Network
from .parameter import ParameterBlocks
from .pooling import AdaptiveAveragePool, AdaptiveMaxPool, AveragePool, GlobalAveragePool, GlobalMaxPool, MaxPool
from .reduction_scheme import Scheme
from .scale import PReLU, Scale

__all__ = [
    "Gradient",
    "GradientChunk",
    "GradientLayer",
    "aligned",
    "buckets_of",
    "check_replicated",
    "check_scheme",
    "chunks_of",
    "exposed_layers",
    "gradient_layers",
    "kinds_of",
    "replicable_layers",
    "replicated_layers",
    "saves_traffic",
]


class CutLayers(Protocol):
    """Protocol: the part of a strategy that buckets use; see :class:`halograd.layers.Strategy`."""

    @property
    def bucket_bytes(self) -> int: ...
    @property
    def reduction(self) -> Scheme: ...

    def parts_of(self, layer: str) -> Mapping[str, int]: ...


#: Parameters begin at multiples of this [B].
ALIGNMENT = 64


def aligned(nbytes: int) -> int:
    """Return a size rounded up to a multiple of `ALIGNMENT` [B]."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Gradient:
    """Gradient of one parameter.

    Attributes
    ----------
    name
        Name of the parameter, ``layer/parameter`` in the store.
    sharing
        Groups of ranks that hold the same block; gradients with equal `sharing` can be summed together.
    size
        Number of elements in the largest block.
    sizes
        Number of elements in the block of each group of `sharing`.
    """

    name: str
    sharing: Groups
    size: int
    sizes: tuple[int, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True)
class GradientLayer:
    """Gradients of one layer.

    Attributes
    ----------
    name
        Name of the layer.
    kind
        ``"dense"``, ``"weights"`` (other layers with weights), ``"pooling"``, or ``"other"`` (norms, activations, ...).
    gradients
        Gradients of its parameters, those subject to weight decay first.
    """

    name: str
    kind: str
    gradients: tuple[Gradient, ...] = ()


@dataclass(frozen=True)
class GradientChunk:
    """Gradients that are summed in one reduction, in the order in which backward computes them.

    Attributes
    ----------
    sharing
        Groups of ranks that sum the gradients.
    gradients
        Gradients of the chunk.
    layers
        Names of the layers, each once.
    replicated
        Whether every rank computes the gradient of the whole batch, so that there is no sum.
    nbytes
        Size by group of `sharing`, with the gaps of alignment [B].
    """

    sharing: Groups
    gradients: tuple[Gradient, ...]
    layers: tuple[str, ...]
    replicated: bool = False
    nbytes: tuple[int, ...] = field(default=(), compare=False, repr=False)


def kinds_of(network: Network) -> dict[str, str]:
    """Return the kinds of all layers by name, as in :class:`GradientLayer`, in order of computation.

    Norms and factors have parameters, but no weights in the sense of Lee et al. (Section II); their chunk is that of
    the layers around them. Only layers whose gradients may be replicated have the kind "dense".
    """
    dense = dense_layers(network)
    return {name: "dense" if name in dense else _kind(network, name) for name in network.layers}


def _kind(network: Network, name: str) -> str:
    layer = network.layers[name].layer
    if isinstance(layer, _POOLS):
        return "pooling"
    has_parameters = bool(network.own_parameters(network.owners[name]))
    return "weights" if has_parameters and not isinstance(layer, _FACTORS) else "other"


_POOLS = (MaxPool, AveragePool, GlobalAveragePool, GlobalMaxPool, AdaptiveAveragePool, AdaptiveMaxPool)
_FACTORS = (BatchNorm, GroupNorm, Scale, PReLU, Embedding, Token)


def gradient_layers(network: Network, blocks: Mapping[str, ParameterBlocks]) -> list[GradientLayer]:
    """Return the layers of a network in the order in which backward finishes them.

    Layers that are not trained have no gradients. `blocks` holds the blocks of the parameters, by ``layer/parameter``.
    """
    result = []
    for layer, kind in reversed(kinds_of(network).items()):
        own = network.own_parameters(layer) if layer in network.trained else {}
        # In their order in memory: those with weight decay first.
        names = [f"{layer}/{key}" for key in sorted(own, key=lambda key: not own[key].decay)]
        gradients = tuple(Gradient(n, blocks[n].holders, blocks[n].largest, blocks[n].sizes) for n in names)
        result.append(GradientLayer(layer, kind, gradients))
    return result


def check_scheme(scheme: Scheme, network: Network) -> None:
    """Check that the network has at least as many layers as the scheme counts. Local.

    Raises
    ------
    UserError
        With the expected and the given number.
    """
    kinds = list(kinds_of(network).values())
    counted = len(kinds) - kinds.count("other")
    if scheme.first_layers > counted:
        raise UserError(
            f"reduction.first_layers: expected at most the {counted} convolutions, dense layers and poolings of "
            f"{network.name!r}, got {scheme.first_layers}"
        )
    if scheme.replicated_dense > kinds.count("dense"):
        raise UserError(
            f"reduction.replicated_dense: expected at most the {kinds.count('dense')} dense layers of {network.name!r} "
            f"that are trained, called once and not weight-normalized, got {scheme.replicated_dense}"
        )


def replicated_layers(layers: Sequence[GradientLayer], scheme: Scheme) -> frozenset[str]:
    """Return the names of the first `replicated_dense` dense layers in the order of computation."""
    dense = [layer.name for layer in layers if layer.kind == "dense"]
    # `layers` are in the order of backward: the first layers of the network come last.
    return frozenset(dense[len(dense) - scheme.replicated_dense :]) if scheme.replicated_dense else frozenset()


def chunks_of(
    layers: Sequence[GradientLayer],
    scheme: Scheme,
    bucket_bytes: int,
    itemsize: int,
    separate: frozenset[str] = frozenset(),
) -> list[GradientChunk]:
    """Return all chunks of a scheme, in the order in which backward finishes them: that in which their sums start.

    Every chunk is a consecutive part of the gradients that the same ranks share, in the order of `layers`, those of the
    layers in `separate` taken separately. So the gradients may lie in one array per set of ranks, and another one for
    these layers, and chunks are ranges of the arrays. Replicated layers have chunks of their own.

    Parameters
    ----------
    layers
        Layers in the order in which backward finishes them.
    scheme
        Scheme of the reduction; ``"auto"`` starts with buckets.
    bucket_bytes
        Size at which a bucket is closed [B]; each gradient counts with its largest block.
    itemsize
        Size of one element [B].
    separate
        Names of layers that may be replicated later: their gradients have chunks of their own.

    References
    ----------
    Lee et al. 2017, Algorithm 2 (two chunks); Le et al. 2018, Section 4.1 (chunks of equal numbers of layers, except
    for the last ones of backward).
    """
    ends = _rule(scheme, layers, bucket_bytes, itemsize)
    replicated = replicated_layers(layers, scheme)
    return _Filling(ends, replicated, separate, itemsize).run(layers)


def buckets_of(
    network: Network,
    blocks: Mapping[str, ParameterBlocks],
    strategy: CutLayers,
    itemsize: int,
    separate: Collection[str] = (),
) -> list[GradientChunk]:
    """Return all buckets of a network under the strategy's scheme, in the order in which backward finishes them.

    `blocks` are those of the parameters, by ``layer/parameter``; `itemsize` is the size of a gradient's element [B];
    `separate` holds the names of layers that may be replicated later.
    """
    layers = gradient_layers(network, blocks)
    return chunks_of(layers, strategy.reduction, strategy.bucket_bytes, itemsize, frozenset(separate))


#: Function of a chunk's number of elements and a layer's index: whether that layer closes the chunk.
_Ends = Callable[[int, int], bool]


def _rule(scheme: Scheme, layers: Sequence[GradientLayer], bucket_bytes: int, itemsize: int) -> _Ends:
    """Return the rule by which a scheme closes chunks."""
    chunks = scheme.kind.chunks
    if chunks == "bytes":
        return lambda elements, layer: elements * itemsize >= bucket_bytes
    if chunks == "first":  # the first chunk ends with the k-th layer that backward reaches
        counted = [i for i, layer in enumerate(layers) if layer.kind != "other"]
        # No layer has the index -1: then all chunks are closed at the end of backward.
        last = counted[min(scheme.first_layers, len(counted)) - 1] if counted else -1
        return lambda elements, layer: layer == last
    if chunks == "weights":  # equal numbers of layers; the last layers, whose sums hardly overlap, have a chunk each
        weighted = [i for i, layer in enumerate(layers) if layer.kind in ("weights", "dense")]
        # `- 1`: the last layer of backward always has a chunk of its own.
        chunked = (len(weighted) - 1) // scheme.chunk * scheme.chunk
        lasts = frozenset([*weighted[scheme.chunk - 1 : chunked : scheme.chunk], *weighted[chunked:]])
        return lambda elements, layer: layer in lasts
    # After every layer, or never: all chunks are closed at the end of backward.
    return lambda elements, layer: chunks == "layer"


class _Filling:
    """Chunks that still grow: one per set of ranks that share gradients, and another one for layers in `separate`."""

    def __init__(self, ends: _Ends, replicated: frozenset[str], separate: frozenset[str], itemsize: int) -> None:
        self._ends, self._replicated, self._separate, self._itemsize = ends, replicated, separate, itemsize
        self._done: list[GradientChunk] = []
        self._growing: dict[tuple[Groups, bool], list[tuple[str, Gradient]]] = {}
        self._elements: dict[tuple[Groups, bool], int] = {}

    def run(self, layers: Sequence[GradientLayer]) -> list[GradientChunk]:
        positions = {layer.name: i for i, layer in enumerate(layers)}
        for i, layer in enumerate(layers):
            if layer.name in self._replicated:
                self._add_replicated(layer)
            else:
                for gradient in layer.gradients:
                    key = gradient.sharing, layer.name in self._separate
                    self._growing.setdefault(key, []).append((layer.name, gradient))
                    # The largest block of any rank, so that all ranks close a bucket at the same gradient.
                    self._elements[key] = self._elements.get(key, 0) + gradient.size
            # A layer without parameters may close a chunk too: the k-th layer may be a pooling.
            for key in list(self._growing):
                if self._ends(self._elements[key], i):
                    self._close(key)
        for key in list(self._growing):
            self._close(key)
        # A chunk may be closed long after its last gradient, when another set of ranks shares those that follow.
        return sorted(self._done, key=lambda chunk: positions[chunk.layers[-1]])

    def _close(self, key: tuple[Groups, bool]) -> None:
        members = self._growing.pop(key)
        self._elements.pop(key)
        layers = tuple(dict.fromkeys(name for name, _ in members))
        self._add(key[0], tuple(g for _, g in members), layers)

    def _add(
        self, sharing: Groups, gradients: tuple[Gradient, ...], layers: tuple[str, ...], replicated: bool = False
    ) -> None:
        # Per gradient, one size for each group of ranks: their blocks may differ by a row.
        sizes = [[aligned(n * self._itemsize) for n in gradient.sizes] for gradient in gradients]
        self._done.append(GradientChunk(sharing, gradients, layers, replicated, tuple(map(sum, zip(*sizes)))))

    def _add_replicated(self, layer: GradientLayer) -> None:
        for sharing in dict.fromkeys(g.sharing for g in layer.gradients):
            own = tuple(g for g in layer.gradients if g.sharing == sharing)
            self._add(sharing, own, (layer.name,), replicated=True)


def dense_layers(network: Network) -> dict[str, Node]:
    """Return the trained dense layers without weight normalization that are called once, in order of computation."""
    dense = {name: n for name, n in network.layers.items() if isinstance(n.layer, Dense) and not n.layer.weight_norm}
    return {name: node for name, node in dense.items() if name in network.trained and not network.is_shared(name)}


def check_replicated(strategy: CutLayers, network: Network) -> None:
    """Check that every layer with a replicated gradient is whole on every rank. Local, the same on every rank.

    Raises
    ------
    UserError
        Names the layer and the alternatives.
    """
    replicated = strategy.reduction.replicated_dense
    for i, name in enumerate(list(dense_layers(network))[:replicated]):
        blocks = _blocks(strategy, name)
        if blocks > 1:
            instead = f"replicated_dense = {i}" if i else "no replicated_dense"
            raise UserError(
                f"reduction.replicated_dense: expected the first {replicated} dense layers whole on every rank, got "
                f"{name!r} in {blocks} blocks of channels; use {instead} (sums of blocks are small), or cut its samples"
            )


def exposed_layers(strategy: CutLayers, network: Network, batch: int) -> list[str]:
    """Return the dense layers that a program prepares for replicated gradients, in order of computation.

    A scheme that is chosen during training may replicate all that save traffic, any other its first `replicated_dense`.
    """
    if strategy.reduction.kind.searches:
        return replicable_layers(strategy, network, batch)
    count = strategy.reduction.replicated_dense
    return list(dense_layers(network))[:count] if count else []


def replicable_layers(strategy: CutLayers, network: Network, batch: int) -> list[str]:
    """Return the first dense layers whose replication is possible and saves traffic, in order of computation."""
    replicable: list[str] = []
    for name, node in dense_layers(network).items():
        # On one rank there is no sum to save. A scheme replicates the first layers, so the first miss ends the search.
        several = math.prod(strategy.parts_of(name).values()) > 1
        if not several or _blocks(strategy, name) > 1 or not saves_traffic(node, batch):
            break
        replicable.append(name)
    return replicable


def saves_traffic(node: Node, batch: int) -> bool:
    """Return whether a batch has fewer activations and errors than the dense layer has weights.

    References
    ----------
    Lee et al. 2017, Section III-C2: ``(K_b + K_c) N < K_b K_c``.
    """
    (features,), (units,) = node.inputs[0].shape, node.shape
    return (features + units) * batch < features * units


def _blocks(strategy: CutLayers, name: str) -> int:
    parts = strategy.parts_of(name)
    return parts["channel"] * parts["input_channel"]
