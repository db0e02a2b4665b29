"""Order of features after Flatten and before Reshape, which differs between torch and halograd.

torch flattens ``(C, *spatial)``, halograd ``(*spatial, C)``. So the features of a value consist of pieces: one per
Flatten, in which the orders differ, and pieces of plain features, in which the order is the same.

::

    Concat(Flatten (2, 3, 4), vector (5,))    24 features that torch has as (4, 2, 3), then 5 plain ones
"""

from __future__ import annotations

import math

import numpy as np

from ..layers import (
    Concat,
    Dense,
    Flatten,
    Flip,
    GroupNorm,
    Input,
    LogSoftmax,
    Network,
    Node,
    Redistribute,
    Reshape,
    Slice,
    Softmax,
)

__all__ = ["Order", "feature_orders", "pieces", "torch_of_ours"]

#: Pieces ``(*spatial, C)`` of the features, or ``(n,)`` for plain ones.
Order = tuple[tuple[int, ...], ...]


def pieces(*shapes: tuple[int, ...]) -> Order:
    """Return the order of concatenated features that were flattened from these shapes. Pure arithmetic.

    >>> pieces((2, 3, 4), (5,), (1, 1, 6)), pieces((7, 1))
    (((2, 3, 4), (11,)), ((7,),))
    """
    runs: list[tuple[int, ...]] = []
    for shape in shapes:
        size = math.prod(shape)
        # With one channel, or one position, both orders are the same.
        if shape[-1] not in (1, size):
            runs.append(shape)
        # Adjacent plain features are one piece, so that equal orders compare equal.
        elif runs and len(runs[-1]) == 1:
            runs[-1] = (runs[-1][0] + size,)
        else:
            runs.append((size,))
    return tuple(runs)


def is_plain(order: Order) -> bool:
    """Return whether torch has the features in our order."""
    return len(order) < 2 and all(len(piece) == 1 for piece in order)


def torch_of_ours(order: Order) -> np.ndarray:
    """Return, for each of torch's features, its index in our order.

    >>> torch_of_ours(((2, 3), (2,))).tolist()  # two positions of three channels, then two plain features
    [0, 3, 1, 4, 2, 5, 6, 7]
    """
    indices, first = [], 0
    for piece in order:
        numbers = np.arange(first, first + math.prod(piece)).reshape(piece)
        indices.append(np.moveaxis(numbers, -1, 0).reshape(-1))
        first += numbers.size
    return np.concatenate(indices)


def feature_orders(network: Network) -> tuple[dict[Node, Order], dict[Node, Node]]:
    """Return the order of the features (last axis) of every node, and the nodes without one in torch. Local.

    Orders are known after Flatten, before Reshape, and at inputs and values with spatial axes. They propagate, forward
    and backward, through layers that keep the position of every feature. So the units of a dense layer whose output is
    added to flattened features, or reshaped, have the order of these features; other units are plain.

    Returns
    -------
    Orders by node; and, for each node whose features have no order in torch, the node of the layer that causes this.
    That layer combines features of different orders, as a sum does, or depends on positions within flattened features.
    """
    orders = {node: _plain(node) for node in network.nodes if len(node.shape) != 1 or isinstance(node, Input)}
    # Repeated, because an order that is found backward may determine others forward.
    while len(orders) < len(network.nodes):
        before = len(orders)
        for node in network.nodes:
            _forwards(node, orders)
        for node in reversed(network.nodes):
            _backwards(node, orders)
        if len(orders) == before:
            # Nothing determines the remaining orders (units of dense layers): choose one, and go on.
            free = next(node for node in network.nodes if node not in orders)
            orders[free] = _plain(free)
    mixed: dict[Node, Node] = {}
    for node in network.nodes:
        if not _agrees(node, orders):
            mixed[node] = node
        # A dense layer that reads mixed features is refused itself (`weights.arrangements`); its units have an order.
        elif not isinstance(node.layer, Dense):
            mixed.update((node, mixed[source]) for source in node.inputs if source in mixed)
    return orders, mixed


def _plain(node: Node) -> Order:
    return pieces((node.shape or (1,))[-1:])


def _flattens(node: Node) -> bool:
    return isinstance(node.layer, Flatten) and len(node.inputs[0].shape) > 1


def _keeps_positions(node: Node) -> bool:
    """Return whether every output feature depends on the same feature of the inputs, or equally on all of them."""
    layer = node.layer
    if isinstance(layer, (Slice, Concat)):
        return layer.axis != "channel"
    if isinstance(layer, Flip):
        return len(node.shape) - 1 not in layer.flipped_axes(node.shape)
    if isinstance(layer, GroupNorm):
        return layer.group_count(node.shape[-1]) in (1, node.shape[-1])
    if isinstance(layer, (Softmax, LogSoftmax, Redistribute, Flatten)):
        return not _flattens(node)
    # Layers that work on each channel separately.
    return layer.cuts_channels == "channelwise"


def _inputs_with_features(node: Node) -> list[Node]:
    """Return the inputs with as many features as the output; others have one element for all features."""
    return [source for source in node.inputs if source.shape[-1:] == node.shape[-1:]]


def _forwards(node: Node, orders: dict[Node, Order]) -> None:
    """Set the order of a node if the orders of its inputs determine it; it is plain if they give none."""
    if node in orders or isinstance(node.layer, Dense):
        return
    if _flattens(node):
        orders[node] = pieces(node.inputs[0].shape)
    elif _keeps_positions(node):
        # Reversed, so that the first input with an order determines it.
        orders.update((node, orders[source]) for source in _inputs_with_features(node)[::-1] if source in orders)
    elif all(source in orders for source in node.inputs):
        orders[node] = _order_of_output(node, orders) or _plain(node)


def _order_of_output(node: Node, orders: dict[Node, Order]) -> Order | None:
    """Return the order of a layer's output from those of its inputs; None if these give no order for torch.

    The layer is one that does not keep the positions of features.
    """
    orders_of_inputs = [orders[source] for source in node.inputs]
    if isinstance(node.layer, Concat):
        return pieces(*(piece for order in orders_of_inputs for piece in order))
    if isinstance(node.layer, Slice):
        return _part(orders_of_inputs[0], node.layer.first, node.layer.last)
    return _plain(node) if all(map(is_plain, orders_of_inputs)) else None


def _part(order: Order, low: int, high: int) -> Order | None:
    """Return the order of the features ``low .. high - 1``; None if they begin or end within a piece.

    >>> _part(((2, 3), (4,)), 0, 8), _part(((2, 3), (4,)), 6, 9), _part(((2, 3), (4,)), 1, 9)
    (((2, 3), (2,)), ((3,),), None)
    """
    parts, first = [], 0
    for piece in order:
        last = first + math.prod(piece)
        start, stop = max(low, first), min(high, last)
        if start < stop and len(piece) > 1 and (start, stop) != (first, last):
            return None
        if start < stop:
            parts.append(piece if len(piece) > 1 else (stop - start,))
        first = last
    return pieces(*parts)


def _backwards(node: Node, orders: dict[Node, Order]) -> None:
    """Set the orders of inputs that follow from the order of the node."""
    if isinstance(node.layer, Reshape):
        orders.setdefault(node.inputs[0], pieces(node.shape))
    elif _keeps_positions(node) and node in orders:
        for source in _inputs_with_features(node):
            orders.setdefault(source, orders[node])


def _agrees(node: Node, orders: dict[Node, Order]) -> bool:
    """Return whether the orders of the inputs give the order of the node."""
    if _flattens(node) or isinstance(node.layer, Dense):
        return True
    if isinstance(node.layer, Reshape):
        return orders[node.inputs[0]] == pieces(node.shape)
    if _keeps_positions(node):
        return all(orders[source] == orders[node] for source in _inputs_with_features(node))
    return _order_of_output(node, orders) == orders[node]
