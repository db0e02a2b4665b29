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
from .parameter import Parameter, given

__all__ = ["Network"]

_NAMED = 6  # layers named in a message


class Network:
    """The layers between some inputs and some outputs, in an order in which they can be computed.

    Parameters
    ----------
    outputs
        Nodes by name. A node of a loss layer named ``"loss"`` is what training minimises.
    frozen
        Layers that keep their parameters, by name or pattern (``"block1/*"``). Statistics of batch norms go on.

    Attributes
    ----------
    trained
        Layers that the loss depends on, all of them if there is none, but for those that are frozen. The others are
        computed, but have zero gradients, which are not summed, and keep their parameters.
    frozen
        Names of those layers.
    owners
        Layer -> the layer whose parameters it has: itself, or where one layer is called several times, the first call.
        Later calls are named after it: ``head``, ``head#2``, ``head#3``.

    Raises
    ------
    ValueError
        If two layers have one name, calls of one layer do not go together (see `owners`), no layer reads an input,
        there is a loss other than the output ``"loss"``, its target has parameters, initial values are given that fit
        no parameter, or a pattern of frozen layers fits none.
    """

    def __init__(self, outputs: Mapping[str, Node] | Node, name: str = "network", frozen: Sequence[str] = ()) -> None:
        self.name = name
        self.outputs: dict[str, Node] = {"output": outputs} if isinstance(outputs, Node) else dict(outputs)
        # The loss comes last: between its forward and its backward nothing else may run.
        last = [n for k, n in self.outputs.items() if k == "loss"]
        self.nodes: list[Node] = _sorted([n for k, n in self.outputs.items() if k != "loss"] + last)
        self.names: dict[Node, str] = self._name_nodes()
        self.owners = self._find_owners()
        self._check_inputs()
        self._check_losses()
        self._check_given()
        loss = self.outputs.get("loss")
        trained = self.nodes if loss is None or not isinstance(loss.layer, Loss) else _sorted([loss])
        self.frozen = self._frozen(frozen)
        behind = frozenset(self.names[n] for n in trained if not isinstance(n, Input))
        self._check_shared(behind)
        self.trained = frozenset(name for name in behind if self.owners[name] not in self.frozen)

    def matching(self, pattern: str) -> list[str]:
        """Layers with parameters whose names fit; refuses a pattern that fits none of them. Local."""
        having = [name for name in self.layers if self.own_parameters(name)]
        found = fnmatch.filter(having, pattern)
        if not found:
            raise ValueError(
                f"network {self.name!r}: expected names or patterns of layers with parameters "
                f"({', '.join(having[:_NAMED])}, ...), got {pattern!r}"
            )
        return found

    def _frozen(self, patterns: Sequence[str]) -> frozenset[str]:
        """Layers that are not trained."""
        found = frozenset(name for pattern in patterns for name in self.matching(pattern))
        if found and found == set(self.matching("*")):
            raise ValueError(f"network {self.name!r}: expected some layers to be trained, got all of them frozen")
        return found

    def freeze(self, *patterns: str) -> Network:
        """The same network, with these layers frozen too, by name or pattern."""
        return Network(self.outputs, self.name, [*self.frozen, *patterns])

    def _check_inputs(self) -> None:
        """Refuse an input of which no reader says how it is cut."""
        read = {node for other in self.nodes for node in other.inputs}
        alone = [self.names[n] for n in self.nodes if isinstance(n, Input) and n not in read]
        if alone:
            raise ValueError(
                f"network {self.name!r}: expected inputs that layers read, got {alone[0]!r}, which is an output alone; "
                "leave it out"
            )

    def _check_losses(self) -> None:
        """Refuse losses whose value or gradient nothing would have."""
        for node in self.nodes:
            if not isinstance(node.layer, Loss):
                continue
            name = self.names[node]
            if node is not self.outputs.get("loss"):
                raise ValueError(
                    f"network {self.name!r}: expected no loss but the output named 'loss', got {name!r} "
                    f"({node.layer.kind}) too; one loss is trained: leave this one out, make it the output 'loss', "
                    "or add it to that one (ce + 0.5 * dice)"
                )
            if not node.layer.judgements(*self._shapes(node)):
                raise ValueError(
                    f"network {self.name!r}: expected in loss {name!r} at least one term that counts in evaluation, "
                    "got terms for training only; leave training_only out of one"
                )
            for other in _sorted([n for i, n in enumerate(node.inputs) if node.layer.compares(i)]):
                if other.layer.parameters(*self._shapes(other)):
                    raise ValueError(
                        f"network {self.name!r}: expected a target of {name!r} without parameters, got one that "
                        f"depends on {self.names[other]!r}; a loss has no gradient with respect to its target: make it "
                        "an Input"
                    )
            self._check_weights(node)

    def _check_weights(self, loss: Node) -> None:
        """Refuse weights of a loss that are not as they are in the data: inputs are normalized and varied."""
        compared = self.targets
        for own in (n for i, n in enumerate(loss.inputs) if loss.layer.weighs(i)):
            shared = [n for n in _sorted([own]) if isinstance(n, Input) and self.names[n] not in compared]
            if shared:
                name = self.names[shared[0]]
                raise ValueError(
                    f"network {self.name!r}: expected weights of {self.names[loss]!r} that no prediction depends on, "
                    f"got some of input {name!r}, which is normalized; make them an Input of their own, of the same "
                    "dataset"
                )

    @property
    def inputs(self) -> dict[str, Input]:
        """Input nodes by name."""
        return {self.names[n]: n for n in self.nodes if isinstance(n, Input)}

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the inputs that the loss compares with, and that no prediction depends on."""
        loss = self.outputs.get("loss")
        read = [node for node in self.outputs.values() if node is not loss]
        read += [] if loss is None else [n for i, n in enumerate(loss.inputs) if not loss.layer.compares(i)]
        behind = set(_sorted(read))
        return tuple(name for name, node in self.inputs.items() if node not in behind)

    @property
    def counted(self) -> dict[str, int]:
        """Inputs whose classes a loss wants counted over the training samples, with their number of classes."""
        found: dict[str, int] = {}
        for i, classes in self._counted():
            name = self._labels(self.outputs["loss"].inputs[i])
            found[name] = max(found.get(name, 0), classes)
        return found

    def _counted(self) -> list[tuple[int, int]]:
        """Inputs of the loss by number, with their number of classes."""
        loss = self.outputs.get("loss")
        if loss is None:
            return []
        found = [(i, loss.layer.counted_classes(i, *self._shapes(loss))) for i in range(len(loss.inputs))]
        return [(i, classes) for i, classes in found if classes]

    def _labels(self, target: Node) -> str:
        """The input that a target is made of."""
        made_of = [self.names[n] for n in _sorted([target]) if isinstance(n, Input)]
        if len(made_of) != 1:
            raise ValueError(
                f"network {self.name!r}: expected classes that are counted in one Input, got a target made of "
                f"{', '.join(made_of)}; give its class_weights as numbers"
            )
        return made_of[0]

    def balance(self, counts: Mapping[str, Sequence[int]] | None = None) -> None:
        """Have the loss know how often classes occur: what `class_weights="balanced"` needs. Local.

        Before an executor is made of the network.

        Parameters
        ----------
        counts
            Of classes 0, 1, ..., by the name of the input (:attr:`counted`); None: all alike, to measure times.

        Raises
        ------
        ValueError
            A class that does not occur; counts of other inputs, or of fewer classes.
        """
        wanted, found = self.counted, {}
        given = {name: [1] * n for name, n in wanted.items()} if counts is None else dict(counts)
        for name, classes in wanted.items():
            if name not in given or len(given[name]) < classes:
                raise ValueError(
                    f"network {self.name!r}: expected counts of {classes} classes of input {name!r}, got "
                    f"{len(given.get(name, ()))}"
                )
        for i, classes in self._counted():
            name = self._labels(self.outputs["loss"].inputs[i])
            found[i] = list(given[name])[:classes]
        if found:
            self.outputs["loss"].layer = self.outputs["loss"].layer.with_counts(found)

    @property
    def class_factors(self) -> dict[str, Sequence[float]]:
        """Weights of classes that the loss has from counts, by the name of the input."""
        loss = self.outputs.get("loss")
        if loss is None:
            return {}
        return {self._labels(loss.inputs[i]): loss.layer.class_factors(i) for i, _ in self._counted()}

    @cached_property
    def layers(self) -> dict[str, Node]:
        """All nodes but the inputs, by name, in order of computation."""
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
            if len(before) > 1:
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

    def _find_owners(self) -> dict[str, str]:
        first: dict[Layer, str] = {}
        return {name: first.setdefault(node.layer, name) for name, node in self.layers.items()}

    def _check_shared(self, behind: Collection[str]) -> None:
        """Refuse calls of one layer that cannot have one array of parameters, or one gradient of it."""
        for name, owner in self.owners.items():
            node, first = self.layers[name], self.layers[owner]
            if name == owner or not node.layer.parameters(*self._shapes(node)):
                continue
            if node.layer.state(*self._shapes(node)):
                raise ValueError(
                    f"network {self.name!r}: expected layers with running statistics to be called once, got "
                    f"{owner!r} ({node.layer.kind}) twice; make a layer for every call, or use GroupNorm"
                )
            found, wanted = (
                {k: p.shape for k, p in n.layer.parameters(*self._shapes(n)).items()} for n in (node, first)
            )
            if found != wanted:
                raise ValueError(
                    f"network {self.name!r}: expected calls of {owner!r} that have the same parameters, got {found} "
                    f"after {wanted}; give it inputs with as many channels, or make another layer"
                )
            if (name in behind) != (owner in behind):
                some, other = (name, owner) if name in behind else (owner, name)
                raise ValueError(
                    f"network {self.name!r}: expected the loss to depend on all calls of a layer or on none, got "
                    f"{some!r}, on which it depends, and {other!r}, on which it does not; leave that output out"
                )

    def own_parameters(self, name: str) -> Mapping[str, Parameter]:
        """The parameters of a layer by their short names; none of one that has those of an earlier call. Local."""
        node = self.layers[name]
        return node.layer.parameters(*self._shapes(node)) if self.owners[name] == name else {}

    def is_shared(self, name: str) -> bool:
        """Whether the layer is called several times. Local."""
        return sum(owner == self.owners[name] for owner in self.owners.values()) > 1

    def _shapes(self, node: Node) -> list[Shape]:
        return [n.shape for n in node.inputs]

    def _check_given(self) -> None:
        """Refuse initial values that fit nothing of their layer."""
        for name, node in self.layers.items():
            shapes = self._shapes(node)
            specs = {**node.layer.parameters(*shapes), **node.layer.state(*shapes)} if node.layer.given_values else {}
            for key, values in node.layer.given_values.items():
                if key not in specs:
                    raise ValueError(
                        f"network {self.name!r}: expected initial values of {', '.join(specs) or 'nothing'} in layer "
                        f"{name!r}, got some of {key!r}; leave them out"
                    )
                if values.shape != specs[key].shape:
                    raise ValueError(
                        f"network {self.name!r}: expected initial values of shape {specs[key].shape} for "
                        f"{name}/{key}, got {values.shape}; give values for samples and layers of these sizes"
                    )

    def parameters(self) -> dict[str, Parameter]:
        """All parameters as ``layer/parameter``."""
        return {
            f"{name}/{key}": _with_given(spec, key, node.layer)
            for name, node in self.layers.items()
            for key, spec in self.own_parameters(name).items()
        }

    def state(self) -> dict[str, Parameter]:
        """All untrained arrays as ``layer/array``."""
        return {
            f"{name}/{key}": _with_given(spec, key, node.layer)
            for name, node in self.layers.items()
            for key, spec in node.layer.state(*self._shapes(node)).items()
        }

    def begin_with(self, values: Mapping[str, Any]) -> None:
        """Have parameters and states begin with these whole arrays, by ``layer/name``; the others as before.

        Before an executor is made of the network. Raises ValueError for what fits no parameter.
        """
        layers = self.layers
        strange = [name for name in values if name.rpartition("/")[0] not in layers]
        if strange:
            raise ValueError(f"network {self.name!r}: expected initial values of layers, got those of {strange[0]!r}")
        before = {node: node.layer.given_values for node in layers.values()}
        for name, array in values.items():
            layer, _, key = name.rpartition("/")
            layers[layer].layer.given_values = {**layers[layer].layer.given_values, key: given(array)}
        try:
            self._check_given()
        except ValueError:
            for node, old in before.items():
                node.layer.given_values = old
            raise

    def initial_values(self, seed: int = 0) -> dict[str, np.ndarray]:
        """Whole initial arrays of all parameters and states, by name: drawn by `seed`, or given. Local."""
        return {name: spec.initial(name, seed) for name, spec in {**self.parameters(), **self.state()}.items()}

    @property
    def parameter_count(self) -> int:
        return sum(p.size for p in self.parameters().values())

    def rows(self) -> list[tuple[str, str, Shape, int, int, int]]:
        """Per layer: name, kind, sample shape, parameters, forward flops per sample, elements per sample."""
        result = []
        for name, node in {**self.inputs, **self.layers}.items():
            kind = "Input" if isinstance(node, Input) else node.layer.kind
            shapes = self._shapes(node)
            count = 0 if isinstance(node, Input) else sum(p.size for p in self.own_parameters(name).values())
            result.append((name, kind, node.shape, count, node.layer.flops(*shapes), math.prod(node.shape)))
        return result

    def summary(self, batch: int = 1, itemsize: int = 4) -> str:
        """The network as a table: shape, parameters, forward flops and activation bytes of `batch` samples."""
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


def _sorted(outputs: list[Node]) -> list[Node]:
    """Depth-first order of all nodes that `outputs` depend on, without recursion (networks are deep)."""
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
