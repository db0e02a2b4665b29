"""What operators of an ONNX graph are made into: values, and the network that grows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from halograd.errors import UserError

from ..layers import GivenValues, Layer, Node
from ..layers.settings import settings_of
from .graph import Graph, OnnxConstant, OnnxNode, Shape

__all__ = ["Activation", "Builder", "NeedsPositions"]


@dataclass(frozen=True)
class Activation:
    """A value of the graph, and the node that stands for it.

    Attributes
    ----------
    node
        Samples ``(*spatial, C)``, or vectors ``(F,)``.
    last
        Whether ONNX has the channels last, too: behind a Transpose.
    pooled
        Whether ONNX has the shape ``(N, C, 1, 1)``, where the node has ``(C,)``.
    pool
        Name of the value that the pooling has made, by which it is known.
    spatial
        Of a flattened value, the extents ``(*spatial)`` it had: ONNX has its channels first, and so in another order.
    """

    node: Node
    last: bool = False
    pooled: bool = False
    pool: str = ""
    spatial: Shape = ()

    def of(self, node: Node) -> Activation:
        """The same of another node."""
        return replace(self, node=node)


class NeedsPositions(Exception):
    """A pooled value is read as one with spatial axes: the pooling has to keep them.

    Attributes
    ----------
    pool
        Name of the value that the pooling makes.
    """

    def __init__(self, pool: str) -> None:
        super().__init__(pool)
        self.pool = pool


class Builder:
    """The network as far as it is built.

    Parameters
    ----------
    path
        The file, for messages.
    graph
        Its graph.
    keeping
        Names of values of global poolings that keep their spatial axes.
    """

    def __init__(self, path: Path, graph: Graph, keeping: frozenset[str]) -> None:
        self.path, self.graph, self.keeping = path, graph, keeping
        self.values: dict[str, Activation] = {}
        self._names: set[str] = set(graph.inputs)
        #: By names of weights the first node that has them, its layer and the names of all its weights.
        self._owners: dict[tuple[str, ...], tuple[OnnxNode, Layer, tuple[str, ...]]] = {}

    # -- reading -------------------------------------------------------------------------------

    def value(self, op: OnnxNode, i: int = 0) -> Activation:
        """Input `i`, which has to be an activation."""
        name = op.inputs[i]
        if name not in self.values:
            raise self.refused(op, f"input {i} to depend on the data", "a constant")
        return self.values[name]

    def samples(self, op: OnnxNode, i: int = 0) -> Activation:
        """Input `i`, channels first in ONNX, with spatial axes or none, and not flattened."""
        value = self.value(op, i)
        if value.spatial:
            raise self.refused(op, "samples with spatial axes, or a dense layer behind Flatten", "a flattened value")
        if value.last:
            raise self.refused(op, "channels at axis 1", "channels at the last axis")
        return value

    def with_positions(self, op: OnnxNode, i: int = 0) -> Activation:
        """Input `i`, with its spatial axes."""
        value = self.samples(op, i)
        if not value.pooled:
            return value
        if value.pool:
            raise NeedsPositions(value.pool)
        raise self.refused(op, "samples with spatial axes", "vectors")

    def constant(self, op: OnnxNode, i: int) -> OnnxConstant | None:
        """Input `i`, which has to be a constant; None if there is none."""
        if i >= len(op.inputs) or not op.inputs[i]:
            return None
        if op.inputs[i] not in self.graph.constants:
            raise self.refused(op, f"a constant as input {i}", "a value that depends on the data")
        return self.graph.constants[op.inputs[i]]

    def numbers(self, op: OnnxNode, i: int, attribute: str = "") -> list[Any] | None:
        """The numbers of input `i`, or of an attribute in its place; None if there are none."""
        constant = self.constant(op, i)
        if constant is not None:
            return constant.read().reshape(-1).tolist()
        return op.attributes.get(attribute)

    def shape(self, name: str) -> Shape:
        """Extents of a value in ONNX."""
        return self.graph.shapes[name]

    # -- making --------------------------------------------------------------------------------

    def add(self, op: OnnxNode, layer: Layer, *inputs: Node, weights: Sequence[OnnxConstant | None] = ()) -> Node:
        """A node of the network. Its name is that of the torch module, where the file says it.

        A module that is called again becomes another call of its layer.
        """
        layer = self._called_before(op, layer, inputs, weights) or layer
        layer.name = layer.name or self.name(op, weights)
        try:
            return layer(*inputs)
        except ValueError as error:
            raise UserError(f"{self.title(op)}: {error}") from error

    def _called_before(
        self, op: OnnxNode, layer: Layer, inputs: Sequence[Node], weights: Sequence[OnnxConstant | None]
    ) -> Layer | None:
        """The layer of a module that is used again; None of one that is new.

        Two norms may have one weight: an exporter joins those that are equal. Refuses a node that shares some weights
        but is another layer, and one with running statistics.
        """
        names = tuple(one.name for one in weights if one is not None and one.name)
        matrices = tuple(one.name for one in weights if one is not None and one.name and len(one.shape) > 1)
        if not names:
            return None
        owner, before, its = self._owners.setdefault(matrices or names, (op, layer, names))
        if owner is op or not (matrices or op.module == names[0].rpartition(".")[0]):
            return None
        shapes = [node.shape for node in inputs]
        alike = (owner.kind, owner.attributes, its) == (op.kind, op.attributes, names)
        alike = alike and settings_of(before, shapes[0]) == settings_of(layer, shapes[0])
        if not alike or layer.state(*shapes):
            raise self.refused(
                op, "weights of its own", f"those of node {owner.name!r} again", "use a second module in its place"
            )
        return before

    def name(self, op: OnnxNode, weights: Sequence[OnnxConstant | None] = ()) -> str:
        """A name that no other layer has: of the weights, else of the module, else of the node."""
        named = [one.name for one in weights if one is not None and "." in one.name]
        scope = op.scope or re.sub(r"[^\w.]+", ".", op.name).strip(".") or op.kind.lower()
        wanted = named[0].rpartition(".")[0] if named else scope
        candidates = itertools.chain([wanted], (f"{wanted}_{i}" for i in itertools.count(2)))
        name = next(name for name in candidates if name not in self._names)
        self._names.add(name)
        return name

    def given(self, constant: OnnxConstant, order: Callable[[np.ndarray], np.ndarray], shape: Shape) -> GivenValues:
        """Initial values of a weight, in the order of axes of a layer; read from the file when they are needed."""
        return GivenValues(shape, lambda: np.ascontiguousarray(order(constant.read())), self.graph.source)

    # -- refusing ------------------------------------------------------------------------------

    def title(self, op: OnnxNode) -> str:
        return f"{self.path}: node {op.name!r} ({op.kind})"

    def refused(self, op: OnnxNode, expected: str, got: str, remedy: str = "") -> UserError:
        """The one line by which a node is refused."""
        remedy = remedy or "change the model, or write this part of it with halograd's layers"
        return UserError(f"{self.title(op)}: expected {expected}, got {got}; {remedy}")
