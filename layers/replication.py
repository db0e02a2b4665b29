"""Which dense layers may compute the gradient of the whole batch on every rank. Pure arithmetic."""

from __future__ import annotations

import math

from halograd.errors import UserError

from .dense import Dense
from .layer import Node
from .network import Network
from .strategy import Strategy

__all__ = ["check_replicated", "replicable_layers", "saves_traffic"]


def dense_layers(network: Network) -> dict[str, Node]:
    """All dense layers that are trained, of weights as they are, and called once, by name, in order of computation."""
    found = {name: n for name, n in network.layers.items() if isinstance(n.layer, Dense) and not n.layer.weight_norm}
    return {name: node for name, node in found.items() if name in network.trained and not network.is_shared(name)}


def check_replicated(strategy: Strategy, network: Network) -> None:
    """Refuse to replicate the gradient of a layer of which a rank has a part only. Local, the same on every rank.

    Raises
    ------
    UserError
        Naming the layer, and what there is instead.
    """
    asked = strategy.reduction.replicated_dense
    for i, name in enumerate(list(dense_layers(network))[:asked]):
        blocks = _blocks(strategy, name)
        if blocks > 1:
            instead = f"replicated_dense = {i}" if i else "no replicated_dense"
            raise UserError(
                f"reduction.replicated_dense: expected the first {asked} dense layers whole on every rank, got "
                f"{name!r} in {blocks} blocks of channels; use {instead} (blocks sum little), or cut its samples"
            )


def replicable_layers(strategy: Strategy, network: Network, batch: int) -> list[str]:
    """The first dense layers of which each may be replicated and saves traffic by it, in order of computation."""
    found: list[str] = []
    for name, node in dense_layers(network).items():
        several = math.prod(strategy.parts_of(name).values()) > 1
        if not several or _blocks(strategy, name) > 1 or not saves_traffic(node, batch):
            break
        found.append(name)
    return found


def saves_traffic(node: Node, batch: int) -> bool:
    """Whether activations and errors of a batch are fewer than the weights of a dense layer.

    References
    ----------
    Lee et al. 2017, Section III-C2: ``(K_b + K_c) N < K_b K_c``.
    """
    (features,), (units,) = node.inputs[0].shape, node.shape
    return (features + units) * batch < features * units


def _blocks(strategy: Strategy, name: str) -> int:
    parts = strategy.parts_of(name)
    return parts["channel"] * parts["input_channel"]
