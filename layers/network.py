"""Networks: a graph of named layers, with shapes, parameters, flops and bytes as a table."""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from .graph_checks import (
    check_given,
    check_inputs,
    check_losses,
    check_outputs,
    check_shared,
    input_shapes,
    sorted_nodes,
)
from .layer import Input, Layer, Node, Shape
from .loss import Loss
from .parameter import Parameter, given

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
    owners
        Layer -> the layer whose parameters it uses: itself, or the first call of a layer that is called several times.
        Later calls are named after the first: ``head``, ``head#2``, ``head#3``.

    Raises
    ------
    ValueError
        If two layers have the same name, calls of one layer cannot share parameters (see `owners`), no layer reads an
        input, there is a loss other than the output ``"loss"``, its target has parameters, given initial values fit
        no parameter, or a pattern of frozen layers matches none.
    """

    def __init__(self, outputs: Mapping[str, Node] | Node, name: str = "network", frozen: Sequence[str] = ()) -> None:
        self.name = name
        self.outputs: dict[str, Node] = {"output": outputs} if isinstance(outputs, Node) else dict(outputs)
        # The loss comes last: between its forward and its backward nothing else may run.
        check_outputs(self)
        last = [n for k, n in self.outputs.items() if k == "loss"]
        self.nodes: list[Node] = sorted_nodes([n for k, n in self.outputs.items() if k != "loss"] + last)
        self.names: dict[Node, str] = self._name_nodes()
        self.owners = self._find_owners()
        check_inputs(self)
        check_losses(self)
        check_given(self)
        loss = self.outputs.get("loss")
        trained = self.nodes if loss is None or not isinstance(loss.layer, Loss) else sorted_nodes([loss])
        self.frozen = self._frozen(frozen)
        behind = frozenset(self.names[n] for n in trained if not isinstance(n, Input))
        check_shared(self, behind)
        self.trained = frozenset(name for name in behind if self.owners[name] not in self.frozen)

    def matching(self, pattern: str) -> list[str]:
        """Return the layers with parameters whose names match the pattern. Local. Raises ValueError if there are none.
        """
        having = [name for name in self.layers if self.own_parameters(name)]
        found = fnmatch.filter(having, pattern)
        if not found:
            raise ValueError(
                f"network {self.name!r}: expected names or patterns of layers with parameters "
                f"({', '.join(having[:_NAMED])}, ...), got {pattern!r}"
            )
        return found

    def _frozen(self, patterns: Sequence[str]) -> frozenset[str]:
        """Return the names of the frozen layers."""
        found = frozenset(name for pattern in patterns for name in self.matching(pattern))
        if found and found == set(self.matching("*")):
            raise ValueError(f"network {self.name!r}: expected some layers to be trained, got all of them frozen")
        return found

    def freeze(self, *patterns: str) -> Network:
        """Return a copy of the network in which these layers, by name or pattern, are frozen too."""
        return Network(self.outputs, self.name, [*self.frozen, *patterns])

    @property
    def inputs(self) -> dict[str, Input]:
        """Input nodes by name."""
        return {self.names[n]: n for n in self.nodes if isinstance(n, Input)}

    @property
    def targets(self) -> tuple[str, ...]:
        """Names of the target-only inputs: the loss compares predictions with them, and no prediction depends on them.
        """
        loss = self.outputs.get("loss")
        read = [node for node in self.outputs.values() if node is not loss]
        read += [] if loss is None else [n for i, n in enumerate(loss.inputs) if not loss.layer.compares(i)]
        behind = set(sorted_nodes(read))
        return tuple(name for name, node in self.inputs.items() if node not in behind)

    @property
    def counted(self) -> dict[str, int]:
        """Inputs whose classes are counted over the training samples for the loss, with the number of classes."""
        found: dict[str, int] = {}
        for i, classes in self._counted():
            name = self._labels(self.outputs["loss"].inputs[i])
            found[name] = max(found.get(name, 0), classes)
        return found

    def _counted(self) -> list[tuple[int, int]]:
        """Return the numbers of the loss's inputs whose classes are counted, with the number of classes."""
        loss = self.outputs.get("loss")
        if loss is None:
            return []
        found = [(i, loss.layer.counted_classes(i, *input_shapes(loss))) for i in range(len(loss.inputs))]
        return [(i, classes) for i, classes in found if classes]

    def _labels(self, target: Node) -> str:
        """Return the name of the input from which a target is computed."""
        made_of = [self.names[n] for n in sorted_nodes([target]) if isinstance(n, Input)]
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
        """Class weights that follow from counts, by the name of the input."""
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

    def own_parameters(self, name: str) -> Mapping[str, Parameter]:
        """Return the parameters of a layer by their short names; empty for a later call of a shared layer. Local."""
        return self._own_parameters[name]

    @cached_property
    def _own_parameters(self) -> dict[str, Mapping[str, Parameter]]:
        return {
            name: node.layer.parameters(*input_shapes(node)) if self.owners[name] == name else {}
            for name, node in self.layers.items()
        }

    def is_shared(self, name: str) -> bool:
        """Return whether the layer is called several times. Local."""
        return sum(owner == self.owners[name] for owner in self.owners.values()) > 1

    def parameters(self) -> dict[str, Parameter]:
        """Return all parameters as ``layer/parameter``."""
        return {
            f"{name}/{key}": _with_given(spec, key, node.layer)
            for name, node in self.layers.items()
            for key, spec in self.own_parameters(name).items()
        }

    def state(self) -> dict[str, Parameter]:
        """Return all untrained arrays as ``layer/array``."""
        return {
            f"{name}/{key}": _with_given(spec, key, node.layer)
            for name, node in self.layers.items()
            for key, spec in node.layer.state(*input_shapes(node)).items()
        }

    def begin_with(self, values: Mapping[str, Any]) -> None:
        """Set initial values of parameters and states: whole arrays by ``layer/name``; the others stay unchanged.

        Call it before an executor is created for the network. Raises ValueError for an array that fits no parameter.
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
            check_given(self)
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
        """Return, per layer: name, kind, sample shape, parameters, forward flops per sample, elements per sample."""
        result = []
        for name, node in {**self.inputs, **self.layers}.items():
            kind = "Input" if isinstance(node, Input) else node.layer.kind
            shapes = input_shapes(node)
            count = 0 if isinstance(node, Input) else sum(p.size for p in self.own_parameters(name).values())
            result.append((name, kind, node.shape, count, node.layer.flops(*shapes), math.prod(node.shape)))
        return result

    def summary(self, batch: int = 1, itemsize: int = 4) -> str:
        """Return the network as a table: shape, parameters, forward flops and activation bytes of `batch` samples."""
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
