"""An ONNX graph as it grows: nodes, weights, and the names of values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from halograd.errors import UserError

from ..layers import Input, Layer, Network, Node
from .library import library

__all__ = ["PRODUCER", "Writer"]

#: Stands in every file.
PRODUCER = "halograd"
#: Operators of this version are written: it has Gelu, and padding from the other end.
OPSET = 20


class Writer:
    """Nodes of an ONNX graph; values have the names of our layers, parameters those of torch: ``conv1.weight``.

    What is no parameter has two colons in its name, as torch's exporters do it, so that it is not read as one.

    Parameters
    ----------
    network
        What is written.
    parameters
        Whole arrays of parameters and states by ``layer/name``.
    dtype
        Of all numbers.
    """

    def __init__(self, network: Network, parameters: Mapping[str, Any], dtype: np.dtype) -> None:
        self.network, self.parameters, self.dtype = network, parameters, dtype
        self.onnx = library("onnx")
        self.nodes: list[Any] = []
        self.weights: dict[str, np.ndarray] = {}
        self.values: dict[Node, str] = {}

    # -- what is read ----------------------------------------------------------------------------

    def name(self, node: Node) -> str:
        return self.network.names[node]

    def parameter(self, node: Node, key: str) -> np.ndarray | None:
        """A parameter or state of a layer, None if it has none of this name."""
        return self.parameters.get(f"{self.network.owners[self.name(node)]}/{key}")

    def inputs(self, node: Node) -> list[str]:
        """Names of what a layer reads."""
        return [self.values[one] for one in node.inputs]

    def type_of(self, node: Node) -> int:
        """ONNX's number of the type of a value's elements."""
        dtype = self.dtype
        if isinstance(node, Input):
            dtype = node.array_dtype(self.dtype)
        return int(self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    # -- what is written -------------------------------------------------------------------------

    def add(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """A node; the name of its output."""
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), [output], f"{output} {kind}", **attributes))
        return output

    def numbers(self, name: str, values: Any, dtype: Any = None) -> str:
        """A constant: weights of the dtype of the graph, or of an integer `dtype`."""
        self.weights[name] = np.ascontiguousarray(values, dtype or self.dtype)
        return name

    def weight(self, node: Node, label: str, values: Any) -> str:
        """A parameter of a layer, ``layer.label``: once for all calls, but for those that need it in another shape."""
        owner, array = self.network.owners[self.name(node)], np.ascontiguousarray(values, self.dtype)
        name = f"{owner}.{label}"
        written = self.weights.get(name, array)
        return self.numbers(name if written.shape == array.shape else f"{self.name(node)}.{label}", array)

    def model(self, name: str) -> Any:
        """The whole file, checked."""
        helper, numpy_helper = self.onnx.helper, self.onnx.numpy_helper
        outputs = {key: node for key, node in self.network.outputs.items() if node in self.values}
        for key, node in outputs.items():
            self.add("Identity", [self.values[node]], key)
        given = [self._described(key, node) for key, node in self.network.inputs.items() if node in self.values]
        weights = [numpy_helper.from_array(array, key) for key, array in self.weights.items()]
        made = [self._described(key, node) for key, node in outputs.items()]
        graph = helper.make_graph(self.nodes, name, given, made, weights)
        version = helper.make_opsetid("", OPSET)
        return helper.make_model(graph, opset_imports=[version], producer_name=PRODUCER, ir_version=10)

    def _described(self, name: str, node: Node) -> Any:
        *spatial, channels = node.shape
        return self.onnx.helper.make_tensor_value_info(name, self.type_of(node), ["batch", channels, *spatial])

    def refused(self, node: Node, expected: str, got: str) -> UserError:
        """The one line by which a layer is refused."""
        layer: Layer = node.layer
        return UserError(
            f"layer {self.name(node)!r} ({layer.kind}): expected {expected}, got {got}; write the network without it"
        )
