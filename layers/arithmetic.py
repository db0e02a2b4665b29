"""Layers that the operators of nodes and of losses create."""

from __future__ import annotations

from typing import Any

from .activation import Affine
from .layer import Node, NodeOperators
from .loss import LossArithmetic, LossNode
from .merge import Add, BroadcastAdd, Multiply
from .total_loss import total_of, weighted

__all__: list[str] = []


class _OfNodes(NodeOperators):
    def add(self, first: Node, second: Node) -> Node:
        # Add refuses what is no node.
        if not isinstance(second, Node) or first.shape == second.shape:
            return Add()(first, second)
        return BroadcastAdd()(first, second)

    def multiply(self, first: Node, second: Node) -> Node:
        return Multiply()(first, second)

    def affine(self, node: Node, factor: float, shift: float) -> Node:
        return Affine(factor, shift)(node)


class _OfLosses(LossArithmetic):
    def total(self, first: LossNode, second: Any) -> LossNode:
        return total_of(first, second)

    def weighted(self, loss: LossNode, factor: Any) -> LossNode:
        return weighted(loss, factor)


# Set here, because the layers of this file import `layer` and `loss`, which cannot import them.
Node.arithmetic = _OfNodes()
LossNode.of_losses = _OfLosses()
