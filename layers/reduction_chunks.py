"""Which gradients are summed together, and in which order: pure arithmetic, shared by runtime and cost model."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from halograd.errors import UserError

from .adaptive_pooling import AdaptiveAveragePool, AdaptiveMaxPool
from .batch_norm import BatchNorm
from .global_pooling import GlobalAveragePool, GlobalMaxPool
from .group_norm import GroupNorm
from .layer import Node
from .network import Network
from .parameter import Parameter, ParameterBlocks
from .pooling import AveragePool, MaxPool
from .reduction_scheme import Scheme
from .replication import dense_layers
from .scale import PReLU, Scale

__all__ = [
    "Gradient",
    "GradientChunk",
    "GradientLayer",
    "check_scheme",
    "chunks_of",
    "decayed_first",
    "gradient_layers",
    "kinds_of",
    "replicated_layers",
]


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter.

    Attributes
    ----------
    name
        Of the parameter; ``layer/parameter`` in the store.
    sharing
        Which ranks hold the same block: equal for parameters that can be summed together.
    size
        Elements of the largest block.
    """

    name: str
    sharing: Hashable
    size: int


@dataclass(frozen=True)
class GradientLayer:
    """What one layer gives to sum.

    Attributes
    ----------
    name
        Of the layer.
    kind
        ``"dense"``, ``"weights"`` (other layers with weights), ``"pooling"``, or ``"other"`` (norms, activations, ...).
    gradients
        Of its parameters, those subject to weight decay first.
    """

    name: str
    kind: str
    gradients: tuple[Gradient, ...] = ()


@dataclass(frozen=True)
class GradientChunk:
    """Gradients that are summed with one message, in the order in which backward finishes them.

    Attributes
    ----------
    sharing
        Which ranks sum it.
    gradients
        What it holds.
    layers
        Whose, each once.
    replicated
        Every rank computes the gradient of the whole batch: there is nothing to sum.
    """

    sharing: Hashable
    gradients: tuple[Gradient, ...]
    layers: tuple[str, ...]
    replicated: bool = False


def kinds_of(network: Network) -> dict[str, str]:
    """Kinds of all layers by name, as in :class:`GradientLayer`, in order of computation.

    Norms and factors have parameters, but no weights in the sense of Lee et al. (Section II): they go with the layers
    around them. Dense are those alone whose gradients may be replicated.
    """
    dense = dense_layers(network)
    return {name: "dense" if name in dense else _kind(node) for name, node in network.layers.items()}


def _kind(node: Node) -> str:
    if isinstance(node.layer, _POOLS):
        return "pooling"
    has_parameters = bool(node.layer.parameters(*(n.shape for n in node.inputs)))
    return "weights" if has_parameters and not isinstance(node.layer, _FACTORS) else "other"


_POOLS = (MaxPool, AveragePool, GlobalAveragePool, GlobalMaxPool, AdaptiveAveragePool, AdaptiveMaxPool)
_FACTORS = (BatchNorm, GroupNorm, Scale, PReLU)


def decayed_first(specs: Mapping[str, Parameter]) -> list[str]:
    """Names of a layer's parameters in the order in which they lie in memory."""
    return sorted(specs, key=lambda name: not specs[name].decay)


def gradient_layers(network: Network, blocks: Mapping[str, ParameterBlocks]) -> list[GradientLayer]:
    """The layers of a network in the order in which backward finishes them; `blocks` by ``layer/parameter``.

    Layers that backward does not reach have no gradients.
    """
    result = []
    for layer, kind in reversed(kinds_of(network).items()):
        own = network.own_parameters(layer) if layer in network.trained else {}
        names = [f"{layer}/{key}" for key in decayed_first(own)]
        gradients = tuple(Gradient(n, blocks[n].holders, blocks[n].largest) for n in names)
        result.append(GradientLayer(layer, kind, gradients))
    return result


def check_scheme(scheme: Scheme, network: Network) -> None:
    """Refuse counts of layers that the network does not have. Local.

    Raises
    ------
    UserError
        In one line: what was expected, what came.
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
            f"reduction.replicated_dense: expected at most the {kinds.count('dense')} dense layers of "
            f"{network.name!r}, got {scheme.replicated_dense}"
        )


def replicated_layers(layers: Sequence[GradientLayer], scheme: Scheme) -> frozenset[str]:
    """Names of the first `replicated_dense` dense layers, first in the order of computation."""
    dense = [layer.name for layer in layers if layer.kind == "dense"]
    return frozenset(dense[len(dense) - scheme.replicated_dense :]) if scheme.replicated_dense else frozenset()


def chunks_of(
    layers: Sequence[GradientLayer],
    scheme: Scheme,
    bucket_bytes: int,
    itemsize: int,
    apart: frozenset[str] = frozenset(),
) -> list[GradientChunk]:
    """All chunks of a scheme, in the order in which their sums are issued.

    Every chunk is a run of the gradients that the same ranks share, in the order of `layers`: what the ranks share
    may lie in one array, of which chunks are ranges. Replicated layers have chunks of their own.

    Parameters
    ----------
    layers
        In the order in which backward finishes them.
    scheme
        ``"auto"`` begins with buckets.
    bucket_bytes
        A bucket is closed when it holds at least so much [B], on the rank that has most of it.
    itemsize
        Of one element [B].
    apart
        Layers whose gradients lie apart from all others, in chunks of their own: those that may be replicated at
        another time.

    References
    ----------
    Lee et al. 2017, Algorithm 2 (two chunks); Le et al. 2018, Section 4.1 (chunks of equal numbers of layers, except
    for the last ones of backward).
    """
    ends = _RULES[scheme.kind.chunks](scheme, layers, bucket_bytes, itemsize)
    replicated = replicated_layers(layers, scheme)
    return _Filling(ends, replicated, apart).run(layers)


#: Whether what the ranks share is closed, now that it holds these elements and this layer is done (its number).
_Ends = Callable[[int, int], bool]


def _never(scheme: Scheme, layers: Sequence[GradientLayer], bucket_bytes: int, itemsize: int) -> _Ends:
    return lambda elements, layer: False


def _always(scheme: Scheme, layers: Sequence[GradientLayer], bucket_bytes: int, itemsize: int) -> _Ends:
    return lambda elements, layer: True


def _by_bytes(scheme: Scheme, layers: Sequence[GradientLayer], bucket_bytes: int, itemsize: int) -> _Ends:
    return lambda elements, layer: elements * itemsize >= bucket_bytes


def _two(scheme: Scheme, layers: Sequence[GradientLayer], bucket_bytes: int, itemsize: int) -> _Ends:
    """The first chunk ends with the k-th layer that backward reaches."""
    counted = [i for i, layer in enumerate(layers) if layer.kind != "other"]
    last = counted[min(scheme.first_layers, len(counted)) - 1] if counted else -1
    return lambda elements, layer: layer == last


def _by_layers(scheme: Scheme, layers: Sequence[GradientLayer], bucket_bytes: int, itemsize: int) -> _Ends:
    """Chunks of equal numbers of layers; the last ones of backward, whose sums little hides, by themselves."""
    weighted = [i for i, layer in enumerate(layers) if layer.kind in ("weights", "dense")]
    chunked = (len(weighted) - 1) // scheme.chunk * scheme.chunk
    lasts = frozenset([*weighted[scheme.chunk - 1 : chunked : scheme.chunk], *weighted[chunked:]])
    return lambda elements, layer: layer in lasts


_RULES = {
    "never": _never,
    "layer": _always,
    "bytes": _by_bytes,
    "first": _two,
    "weights": _by_layers,
}


class _Filling:
    """Chunks under way, one per way of sharing (and one more for layers that lie apart)."""

    def __init__(self, ends: _Ends, replicated: frozenset[str], apart: frozenset[str]) -> None:
        self._ends, self._replicated, self._apart = ends, replicated, apart
        self._done: list[GradientChunk] = []
        self._growing: dict[tuple[Hashable, bool], list[tuple[str, Gradient]]] = {}
        self._elements: dict[tuple[Hashable, bool], int] = {}

    def run(self, layers: Sequence[GradientLayer]) -> list[GradientChunk]:
        for i, layer in enumerate(layers):
            if layer.name in self._replicated:
                self._add_replicated(layer)
            else:
                for gradient in layer.gradients:
                    key = gradient.sharing, layer.name in self._apart
                    self._growing.setdefault(key, []).append((layer.name, gradient))
                    self._elements[key] = self._elements.get(key, 0) + gradient.size
            # A layer without parameters may end a chunk as well (the k-th may be one of pooling).
            for key in list(self._growing):
                if self._ends(self._elements[key], i):
                    self._close(key)
        for key in list(self._growing):
            self._close(key)
        return self._done

    def _close(self, key: tuple[Hashable, bool]) -> None:
        members = self._growing.pop(key)
        self._elements.pop(key)
        layers = tuple(dict.fromkeys(name for name, _ in members))
        self._done.append(GradientChunk(key[0], tuple(g for _, g in members), layers))

    def _add_replicated(self, layer: GradientLayer) -> None:
        for sharing in dict.fromkeys(g.sharing for g in layer.gradients):
            own = tuple(g for g in layer.gradients if g.sharing == sharing)
            self._done.append(GradientChunk(sharing, own, (layer.name,), replicated=True))
