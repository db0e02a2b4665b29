"""Checks of a graph of layers when a network is created: the graph must be trainable. Local; all raise ValueError."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from .layer import Input, Layer, Node, Shape
from .loss import Loss

if TYPE_CHECKING:
    from .network import Network

__all__ = [
    "check_given",
    "check_inputs",
    "check_losses",
    "check_outputs",
    "check_shared",
    "input_shapes",
    "sorted_nodes",
]


def input_shapes(node: Node) -> list[Shape]:
    """Return the sample shapes of the inputs of a node."""
    return [n.shape for n in node.inputs]


def sorted_nodes(outputs: list[Node]) -> list[Node]:
    """Return all nodes that `outputs` depend on in depth-first order, without recursion (networks are deep)."""
    order: list[Node] = []
    done: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(n, False) for n in reversed(outputs)]
    while stack:
        node, expanded = stack.pop()
        if node in done:
            continue
        if expanded:
            done.add(node)
            order.append(node)
            continue
        stack.append((node, True))
        stack.extend((n, False) for n in reversed(node.inputs) if n not in done)
    return order


def check_outputs(network: Network) -> None:
    """Reject outputs that are no nodes, such as a layer that was not called."""
    for name, node in network.outputs.items():
        if not isinstance(node, Node):
            called = "; call it on nodes" if isinstance(node, Layer) else ""
            raise TypeError(
                f"network {network.name!r}: expected the output of a layer as {name!r}, got "
                f"{type(node).__name__}{called}"
            )


def check_inputs(network: Network) -> None:
    """Check that a layer reads every input (inputs are cut as their readers), and that only losses read integers."""
    read = {node for other in network.nodes for node in other.inputs}
    alone = [network.names[n] for n in network.nodes if isinstance(n, Input) and n not in read]
    if alone:
        raise ValueError(
            f"network {network.name!r}: expected inputs that layers read, got {alone[0]!r}, which is only an output; "
            "leave it out"
        )
    for name, node in network.inputs.items():
        if node.dtype != "compute" and name not in network.targets:
            raise ValueError(
                f"network {network.name!r}: expected inputs of integers only where a loss compares with them, got "
                f"{name!r} of dtype {node.dtype}; leave its dtype away: integers in files are read as numbers"
            )


def check_losses(network: Network) -> None:
    """Check that every loss is trained, counts in evaluation, and has targets without parameters."""
    for node in network.nodes:
        if not isinstance(node.layer, Loss):
            continue
        name = network.names[node]
        if node is not network.outputs.get("loss"):
            raise ValueError(
                f"network {network.name!r}: expected no loss but the output named 'loss', got {name!r} "
                f"({node.layer.kind}) too; one loss is trained: leave this one out, make it the output 'loss', "
                "or add it to that one (ce + 0.5 * dice)"
            )
        if not node.layer.judgements(*input_shapes(node)):
            raise ValueError(
                f"network {network.name!r}: expected in loss {name!r} at least one term that counts in evaluation, "
                "got terms for training only; leave training_only out of one"
            )
        for other in sorted_nodes([n for i, n in enumerate(node.inputs) if node.layer.compares(i)]):
            if other.layer.parameters(*input_shapes(other)):
                raise ValueError(
                    f"network {network.name!r}: expected a target of {name!r} without parameters, got one that "
                    f"depends on {network.names[other]!r}; a loss has no gradient with respect to its target: make it "
                    "an Input"
                )
        _check_weights(network, node)


def _check_weights(network: Network, loss: Node) -> None:
    """Check that no prediction depends on the weights of a loss: inputs of predictions are normalized and augmented."""
    compared = network.targets
    for own in (n for i, n in enumerate(loss.inputs) if loss.layer.weighs(i)):
        shared = [n for n in sorted_nodes([own]) if isinstance(n, Input) and network.names[n] not in compared]
        if shared:
            name = network.names[shared[0]]
            raise ValueError(
                f"network {network.name!r}: expected weights of {network.names[loss]!r} that no prediction depends on, "
                f"got some of input {name!r}, which is normalized; make them an Input of their own, of the same "
                "dataset"
            )


def check_shared(network: Network, behind: Collection[str]) -> None:
    """Check that calls of one layer can share one array per parameter, and one gradient."""
    for name, owner in network.owners.items():
        node, first = network.layers[name], network.layers[owner]
        if name == owner or not node.layer.parameters(*input_shapes(node)):
            continue
        if node.layer.state(*input_shapes(node)):
            raise ValueError(
                f"network {network.name!r}: expected layers with running statistics to be called once, got "
                f"{owner!r} ({node.layer.kind}) twice; make a layer for every call, or use GroupNorm"
            )
        found, wanted = ({k: p.shape for k, p in n.layer.parameters(*input_shapes(n)).items()} for n in (node, first))
        if found != wanted:
            raise ValueError(
                f"network {network.name!r}: expected calls of {owner!r} that have the same parameters, got {found} "
                f"after {wanted}; give it inputs with as many channels, or make another layer"
            )
        if (name in behind) != (owner in behind):
            some, other = (name, owner) if name in behind else (owner, name)
            raise ValueError(
                f"network {network.name!r}: expected the loss to depend on all calls of a layer or on none, got "
                f"{some!r}, on which it depends, and {other!r}, on which it does not; leave that output out"
            )


def check_given(network: Network) -> None:
    """Check that given initial values fit the parameters and states of their layer."""
    for name, node in network.layers.items():
        shapes = input_shapes(node)
        specs = {**node.layer.parameters(*shapes), **node.layer.state(*shapes)} if node.layer.given_values else {}
        for key, values in node.layer.given_values.items():
            if key not in specs:
                raise ValueError(
                    f"network {network.name!r}: expected initial values of {', '.join(specs) or 'nothing'} in layer "
                    f"{name!r}, got some of {key!r}; leave them out"
                )
            if values.shape != specs[key].shape:
                raise ValueError(
                    f"network {network.name!r}: expected initial values of shape {specs[key].shape} for "
                    f"{name}/{key}, got {values.shape}; give values for samples and layers of these sizes"
                )
