"""Networks: a graph of named layers, with shapes, parameters, flops and bytes as a table."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from .layer import Input, Layer, Node, Shape
from .loss import Loss
from .needs import is_broadcast
from .parameter import Parameter, as_given_values

__all__ = ["Network"]

_NAMED = 6  # maximum number of layers named in a message


class Network:
    """Graph of layers between inputs and outputs, in order of computation.

    Parameters
    ----------
    outputs
        Nodes by name. Training minimizes the output named ``"loss"``, which is the node of a loss layer.
    frozen
        Layers whose parameters do not change, by name or pattern (``"block1/*"``). Statistics of batch norms still
        change.

    Attributes
    ----------
    trained
        Names of the layers that the loss depends on, or of all layers if there is no loss, without the frozen ones.
        Other layers are computed but not trained: their gradients are zero, and are not summed.
    frozen
        Names of the frozen layers.
    origin
        The network of which this one is a copy for samples of another size (:func:`halograd.layers.resized.resized`);
        None if it is no copy.
    owners
        Layer -> the layer whose parameters it uses: itself, or the first call of a layer that is called several times.
        Later calls are named after the first: ``head``, ``head#2``, ``head#3``.

    Raises
    ------
    ValueError
        If two layers have the same name, calls of one layer cannot share parameters (see `owners`), no layer reads an
        input, there is a loss other than the output ``"loss"``, a target of the loss depends on parameters, a parameter
        has other spatial extents than the output of its layer, given initial values fit no parameter, a pattern of
        frozen layers matches none, or all layers are frozen.
    """

    def __init__(self, outputs: Mapping[str, Node] | Node, name: str = "network", frozen: Sequence[str] = ()) -> None:
        self.name = name
        self.origin: Network | None = None
        self.outputs: dict[str, Node] = {"output": outputs} if isinstance(outputs, Node) else dict(outputs)
        _check_outputs(self)
        # The loss comes last: between its forward and its backward nothing else may run.
        last = [n for k, n in self.outputs.items() if k == "loss"]
        self.nodes: list[Node] = _sorted_nodes([n for k, n in self.outputs.items() if k != "loss"] + last)
        self.names: dict[Node, str] = self._name_nodes()
        first: dict[Layer, str] = {}
        self.owners = {name: first.setdefault(node.layer, name) for name, node in self.layers.items()}
        _check_inputs(self)
        _check_losses(self)
        _check_extents(self)
        _check_given(self)
        loss = self.outputs.get("loss")
        trained = self.nodes if loss is None or not isinstance(loss.layer, Loss) else _sorted_nodes([loss])
        self.frozen = self._frozen(frozen)
        reached = frozenset(self.names[n] for n in trained if not isinstance(n, Input))
        _check_shared(self, reached)
        # Frozen names are those of owners: later calls have no parameters of their own.
        self.trained = frozenset(name for name in reached if self.owners[name] not in self.frozen)

    def matching(self, pattern: str) -> list[str]:
        """Return the names of the layers with parameters that match the pattern. Local. Raises ValueError if none does.
        """
        having = [name for name in self.layers if self.own_parameters(name)]
        # A name is no pattern: "stage[0]" would match "stage0".
        matches = [pattern] if pattern in having else fnmatch.filter(having, pattern)
        if not matches:
            raise ValueError(
                f"network {self.name!r}: expected names or patterns of layers with parameters "
                f"({', '.join(having[:_NAMED])}, ...), got {pattern!r}"
            )
        return matches

    def _frozen(self, patterns: Sequence[str]) -> frozenset[str]:
        """Return the names of the layers that are frozen by a pattern or by their attribute `frozen`."""
        frozen = frozenset(name for pattern in patterns for name in self.matching(pattern))
        frozen |= {name for name, node in self.layers.items() if node.layer.frozen and self.own_parameters(name)}
        # Without a loss, as for a frozen module of torch, there is nothing to train.
        if frozen and (patterns or "loss" in self.outputs) and frozen == set(self.matching("*")):
            raise ValueError(f"network {self.name!r}: expected some layers to be trained, got all of them frozen")
        return frozen

    def freeze(self, *patterns: str) -> Network:
        """Return a copy of the network in which these layers, by name or pattern, are frozen too."""
        frozen = Network(self.outputs, self.name, [*self.frozen, *patterns])
        # Checkpoints do not depend on what is frozen.
        frozen.origin = self.origin
        return frozen

    @property
    def inputs(self) -> dict[str, Input]:
        """Input nodes by name."""
        return {self.names[n]: n for n in self.nodes if isinstance(n, Input)}

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the inputs that only the loss reads, as targets or weights: no prediction depends on them."""
        # An input that a prediction reads too is not a target: it is normalized, and rounded to 16 bits.
        loss = self.outputs.get("loss")
        read = [node for node in self.outputs.values() if node is not loss]
        read += [] if loss is None else [n for i, n in enumerate(loss.inputs) if not loss.layer.compares(i)]
        reached = set(_sorted_nodes(read))
        return tuple(name for name, node in self.inputs.items() if node not in reached)

    @property
    def counted(self) -> dict[str, int]:
        """Number of classes of each input whose classes are counted over the training samples, for the loss."""
        counted: dict[str, int] = {}
        for i, classes in self._counted():
            name = self._labels(self.outputs["loss"].inputs[i])
            # Several terms of a loss may count one input.
            counted[name] = max(counted.get(name, 0), classes)
        return counted

    def _counted(self) -> list[tuple[int, int]]:
        """Return the indices of the loss's inputs whose classes are counted, each with its number of classes."""
        loss = self.outputs.get("loss")
        if loss is None:
            return []
        counts = [(i, loss.layer.counted_classes(i, *_input_shapes(loss))) for i in range(len(loss.inputs))]
        return [(i, classes) for i, classes in counts if classes]

    def _labels(self, target: Node) -> str:
        """Return the name of the input from which a target is computed."""
        made_of = [self.names[n] for n in _sorted_nodes([target]) if isinstance(n, Input)]
        if len(made_of) != 1:
            raise ValueError(
                f"network {self.name!r}: expected classes that are counted in one Input, got a target made of "
                f"{', '.join(made_of)}; give its class_weights as numbers"
            )
        return made_of[0]

    def balance(self, counts: Mapping[str, Sequence[int]] | None = None) -> None:
        """Set the class counts in the loss, which `class_weights="balanced"` needs. Local.

        Call it before an executor is created for the network.

        Parameters
        ----------
        counts
            Counts of the classes 0, 1, ..., by the name of the input (:attr:`counted`); None: equal counts, to measure
            times.

        Raises
        ------
        ValueError
            If a class does not occur, or counts are for other inputs or for fewer classes.
        """
        class_counts, counted = self.counted, {}
        occurrences = {name: [1] * n for name, n in class_counts.items()} if counts is None else dict(counts)
        for name, classes in class_counts.items():
            if name not in occurrences or len(occurrences[name]) < classes:
                raise ValueError(
                    f"network {self.name!r}: expected counts of {classes} classes of input {name!r}, got "
                    f"{len(occurrences.get(name, ()))}"
                )
        for i, classes in self._counted():
            name = self._labels(self.outputs["loss"].inputs[i])
            # The counts may include classes of another term that reads the same input.
            counted[i] = list(occurrences[name])[:classes]
        if counted:
            self.outputs["loss"].layer = self.outputs["loss"].layer.with_counts(counted)
        if self.origin is not None:
            # A copy has nodes of its own, so the loss of the original has no counts yet.
            self.origin.balance(counts)

    @property
    def class_factors(self) -> dict[str, Sequence[float]]:
        """Class weights that are computed from class counts, by the name of the input with the classes."""
        loss = self.outputs.get("loss")
        if loss is None:
            return {}
        return {self._labels(loss.inputs[i]): loss.layer.class_factors(i) for i, _ in self._counted()}

    @cached_property
    def layers(self) -> dict[str, Node]:
        """All nodes except the inputs, by name, in order of computation."""
        return {self.names[n]: n for n in self.nodes if not isinstance(n, Input)}

    def _name_nodes(self) -> dict[Node, str]:
        names: dict[Node, str] = {}
        seen: dict[str, int] = {}
        used: set[str] = set()
        calls: dict[Layer, list[Node]] = {}
        for node in self.nodes:
            before = calls.setdefault(node.layer, [])
            before.append(node)
            name = node.layer.name
            if len(before) > 1:  # so that parameters have the name of the first call
                name = f"{names[before[0]]}#{len(before)}"
            elif name is None:
                kind = node.layer.kind.lower()
                seen[kind] = seen.get(kind, 0) + 1
                name = f"{kind}{seen[kind]}"
            if name in used:
                raise ValueError(f"two layers are named {name!r}; names must differ")
            used.add(name)
            names[node] = name
        return names

    def own_parameters(self, name: str) -> Mapping[str, Parameter]:
        """Return the parameters of a layer by their short names; empty for a later call of a shared layer. Local."""
        return self._own_parameters[name]

    @cached_property
    def _own_parameters(self) -> dict[str, Mapping[str, Parameter]]:
        return {
            name: node.layer.parameters(*_input_shapes(node)) if self.owners[name] == name else {}
            for name, node in self.layers.items()
        }

    def own_states(self, name: str) -> Mapping[str, Parameter]:
        """Return the states of a layer by their short names, also of a later call of a shared layer. Local."""
        return self._own_states[name]

    @cached_property
    def _own_states(self) -> dict[str, Mapping[str, Parameter]]:
        return {name: node.layer.state(*_input_shapes(node)) for name, node in self.layers.items()}

    def is_shared(self, name: str) -> bool:
        """Return whether the layer is called several times. Local."""
        return sum(owner == self.owners[name] for owner in self.owners.values()) > 1

    def parameters(self) -> dict[str, Parameter]:
        """Return all parameters by name, ``layer/parameter``."""
        return {
            f"{name}/{key}": _with_given(spec, key, node.layer)
            for name, node in self.layers.items()
            for key, spec in self.own_parameters(name).items()
        }

    def state(self) -> dict[str, Parameter]:
        """Return all untrained arrays by name, ``layer/array``."""
        return {
            f"{name}/{key}": _with_given(spec, key, node.layer)
            for name, node in self.layers.items()
            for key, spec in node.layer.state(*_input_shapes(node)).items()
        }

    def begin_with(self, values: Mapping[str, Any]) -> None:
        """Set initial values of parameters and states: whole arrays by ``layer/name``; the others stay unchanged.

        Call it before an executor is created for the network. Raises ValueError for an array that fits no parameter or
        state.
        """
        layers = self.layers
        strange = [name for name in values if name.rpartition("/")[0] not in layers]
        if strange:
            raise ValueError(f"network {self.name!r}: expected initial values of layers, got those of {strange[0]!r}")
        # For the case that an array does not fit: then no layer is changed.
        before = {node: node.layer.given_values for node in layers.values()}
        for name, array in values.items():
            layer, _, key = name.rpartition("/")
            values_before = layers[layer].layer.given_values
            # A new mapping: copies of the layer (`Layer.changed`) share the old one.
            layers[layer].layer.given_values = {**values_before, key: as_given_values(array)}
        try:
            _check_given(self)
        except ValueError:
            for node, old in before.items():
                node.layer.given_values = old
            raise

    def initial_values(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Return the whole initial arrays of all parameters and states by name: drawn with `seed`, or given. Local."""
        return {name: spec.initial(name, seed) for name, spec in {**self.parameters(), **self.state()}.items()}

    @property
    def parameter_count(self) -> int:
        return sum(p.size for p in self.parameters().values())

    def rows(self) -> list[tuple[str, str, Shape, int, int, int]]:
        """Return, for each input and layer: name, kind, sample shape of the output, number of parameters, forward flops
        per sample, and elements per sample.
        """
        result = []
        for name, node in {**self.inputs, **self.layers}.items():
            kind = "Input" if isinstance(node, Input) else node.layer.kind
            shapes = _input_shapes(node)
            count = 0 if isinstance(node, Input) else sum(p.size for p in self.own_parameters(name).values())
            result.append((name, kind, node.shape, count, node.layer.flops(*shapes), math.prod(node.shape)))
        return result

    def summary(self, batch: int = 1, itemsize: int = 4) -> str:
        """Return the network as a table: shape, parameters, and the forward flops and activation memory of `batch`
        samples, with `itemsize` [B] per element.
        """
        head = ("layer", "kind", "shape", "parameters", "MFlop", "activation MiB")
        rows = [
            (
                n,
                k,
                "x".join(map(str, s)) or "-",
                f"{p:,}",
                f"{f * batch / 1e6:,.1f}",
                f"{e * batch * itemsize / 2**20:,.2f}",
            )
            for n, k, s, p, f, e in self.rows()
        ]
        raw = self.rows()
        total = (
            "total",
            "",
            "",
            f"{sum(r[3] for r in raw):,}",
            f"{sum(r[4] for r in raw) * batch / 1e6:,.1f}",
            f"{sum(r[5] for r in raw) * batch * itemsize / 2**20:,.2f}",
        )
        table = [head, *rows, total]
        widths = [max(len(r[c]) for r in table) for c in range(6)]
        lines = [
            "  ".join(v.ljust(w) if c < 3 else v.rjust(w) for c, (v, w) in enumerate(zip(r, widths))) for r in table
        ]
        rule = "-" * len(lines[0])
        return "\n".join([f"{self.name}, batch {batch}", lines[0], rule, *lines[1:-1], rule, lines[-1]])

    def __str__(self) -> str:
        return self.summary()


def _with_given(spec: Parameter, key: str, layer: Layer) -> Parameter:
    return replace(spec, init=layer.given_values[key]) if key in layer.given_values else spec


def _input_shapes(node: Node) -> list[Shape]:
    """Return the sample shapes of the inputs of a node."""
    return [n.shape for n in node.inputs]


def _sorted_nodes(outputs: list[Node]) -> list[Node]:
    """Return `outputs` and all nodes on which they depend, inputs before their readers; without recursion, because
    networks are deep.
    """
    # A node is pushed twice: it is done when it comes up after its inputs.
    order: list[Node] = []
    done: set[Node] = set()
    stack: list[tuple[Node, bool]] = [(n, False) for n in reversed(outputs)]
    while stack:
        node, expanded = stack.pop()
        # Each reader of a node pushes it, as long as it is not done.
        if node in done:
            continue
        if expanded:
            done.add(node)
            order.append(node)
            continue
        stack.append((node, True))
        # Reversed, because a stack returns last what was pushed first.
        stack.extend((n, False) for n in reversed(node.inputs) if n not in done)
    return order


def _check_outputs(network: Network) -> None:
    """Reject outputs that are not nodes, such as a layer that was not called."""
    for name, node in network.outputs.items():
        if not isinstance(node, Node):
            called = "; call it on nodes" if isinstance(node, Layer) else ""
            raise TypeError(
                f"network {network.name!r}: expected the output of a layer as {name!r}, got "
                f"{type(node).__name__}{called}"
            )


def _check_inputs(network: Network) -> None:
    """Check that every input is read by a layer, which determines its cut, and that only losses read integers."""
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
                f"{name!r} of dtype {node.dtype}; remove its dtype: integers in files are read as numbers"
            )


def _check_losses(network: Network) -> None:
    """Check that every loss is trained, has a term in evaluation, and has targets without parameters."""
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
        if not node.layer.comparisons(*_input_shapes(node)):
            raise ValueError(
                f"network {network.name!r}: expected in loss {name!r} at least one term that counts in evaluation, "
                "got terms for training only; leave training_only out of one"
            )
        for other in _sorted_nodes([n for i, n in enumerate(node.inputs) if node.layer.compares(i)]):
            if other.layer.parameters(*_input_shapes(other)):
                raise ValueError(
                    f"network {network.name!r}: expected a target of {name!r} without parameters, got one that "
                    f"depends on {network.names[other]!r}; a loss has no gradient with respect to its target: make it "
                    "an Input"
                )
        _check_weights(network, node)


def _check_weights(network: Network, loss: Node) -> None:
    """Check that no prediction depends on the weights of a loss: inputs of predictions are normalized."""
    compared = network.targets
    for own in (n for i, n in enumerate(loss.inputs) if loss.layer.weighs(i)):
        shared = [n for n in _sorted_nodes([own]) if isinstance(n, Input) and network.names[n] not in compared]
        if shared:
            name = network.names[shared[0]]
            raise ValueError(
                f"network {network.name!r}: expected weights of {network.names[loss]!r} that no prediction depends on, "
                f"got some of input {name!r}, which is normalized; make them an Input of their own, of the same "
                "dataset"
            )


def _check_shared(network: Network, reached: Collection[str]) -> None:
    """Check that calls of one layer can share one array per parameter, and one gradient."""
    for name, owner in network.owners.items():
        node, first = network.layers[name], network.layers[owner]
        if name == owner or not node.layer.parameters(*_input_shapes(node)):
            continue
        if node.layer.state(*_input_shapes(node)):
            raise ValueError(
                f"network {network.name!r}: expected layers with running statistics to be called once, got "
                f"{owner!r} ({node.layer.kind}) twice; make a layer for every call, or use GroupNorm"
            )
        own, expected = ({k: p.shape for k, p in n.layer.parameters(*_input_shapes(n)).items()} for n in (node, first))
        if own != expected:
            raise ValueError(
                f"network {network.name!r}: expected calls of {owner!r} that have the same parameters, got {own} "
                f"after {expected}; give it inputs with as many channels, or make another layer"
            )
        if (name in reached) != (owner in reached):
            reader, other = (name, owner) if name in reached else (owner, name)
            raise ValueError(
                f"network {network.name!r}: expected the loss to depend on all calls of a layer or on none, got "
                f"{reader!r}, on which it depends, and {other!r}, on which it does not; leave that output out"
            )


def _check_extents(network: Network) -> None:
    """Check that arrays with spatial extents have those of the output of their layer, or 1."""
    for name, node in network.layers.items():
        shapes, space = _input_shapes(node), node.shape[:-1]
        for key, spec in {**node.layer.parameters(*shapes), **node.layer.state(*shapes)}.items():
            own = tuple(spec.shape[axis] for axis in spec.spatial_axes)
            if own and not is_broadcast(own, space):
                raise ValueError(
                    f"network {network.name!r}: expected extents {space}, those of the output, or 1 in spatial_axes of "
                    f"{name}/{key}, got {own}; make it of the size of the output"
                )


def _check_given(network: Network) -> None:
    """Check that given initial values fit the parameters and states of their layer."""
    for name, node in network.layers.items():
        shapes = _input_shapes(node)
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
