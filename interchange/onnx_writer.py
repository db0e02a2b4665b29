"""Writer of ONNX graphs: values, weights and nodes by the names of our layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from halograd.errors import UserError

from ..layers import Input, Layer, Network, Node
from .files import library

__all__ = ["PRODUCER", "OnnxWriter"]

#: Producer name in every file.
PRODUCER = "halograd"
#: Version of the written operators: the first with Gelu and wrap padding.
OPSET = 20


class OnnxWriter:
    """Writer of an ONNX graph. Values have the names of our layers, parameters those of torch: ``conv1.weight``.

    Other constants have two colons in their names, as in files of torch's exporters, so that they are not read as
    parameters.

    Parameters
    ----------
    network
        Network to write.
    parameters
        Whole arrays of parameters and states by ``layer/name``.
    dtype
        Dtype of all arrays.
    """

    def __init__(self, network: Network, parameters: Mapping[str, Any], dtype: np.dtype) -> None:
        self.network, self.parameters, self.dtype = network, parameters, dtype
        self.onnx = library("onnx")
        self.nodes: list[Any] = []
        self.weights: dict[str, np.ndarray] = {}
        self.values: dict[Node, str] = {}

    # -- reading ---------------------------------------------------------------------------------

    def name(self, node: Node) -> str:
        return self.network.names[node]

    def parameter(self, node: Node, key: str) -> np.ndarray | None:
        """Return a parameter or state of a layer; None if the layer has none of this name."""
        return self.parameters.get(f"{self.network.owners[self.name(node)]}/{key}")

    def inputs(self, node: Node) -> list[str]:
        """Return the names of the inputs of a layer."""
        return [self.values[source] for source in node.inputs]

    def type_of(self, node: Node) -> int:
        """Return the element type of a value, as a number of ONNX's `TensorProto.DataType`."""
        dtype = self.dtype
        if isinstance(node, Input):
            dtype = node.array_dtype(self.dtype)
        return int(self.onnx.helper.np_dtype_to_tensor_dtype(np.dtype(dtype)))

    # -- writing ---------------------------------------------------------------------------------

    def add(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        """Add a node; return the name of its output."""
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), [output], f"{output} {kind}", **attributes))
        return output

    def numbers(self, name: str, values: Any, dtype: Any = None) -> str:
        """Add a constant of `dtype`, by default that of the graph; return its name."""
        self.weights[name] = np.ascontiguousarray(values, dtype or self.dtype)
        return name

    def weight(self, node: Node, label: str, values: Any) -> str:
        """Add a parameter of a layer under the name ``layer.label``, or ``layer`` if `label` is empty; return the name.

        Calls of one layer share the array if they need it in the same shape.
        """
        owner, array = self.network.owners[self.name(node)], np.ascontiguousarray(values, self.dtype)
        if not label and owner in {*self.network.inputs, *self.network.outputs}:
            label = "weight"  # the name of a value
        name, own = (f"{layer}.{label}".rstrip(".") for layer in (owner, self.name(node)))
        return self.numbers(name if self.weights.get(name, array).shape == array.shape else own, array)

    def model(self, name: str) -> Any:
        """Return the complete model, an ONNX message with the graph `name`."""
        helper, numpy_helper = self.onnx.helper, self.onnx.numpy_helper
        outputs = {key: node for key, node in self.network.outputs.items() if node in self.values}
        for key, node in outputs.items():
            # One value may be several outputs, or an input.
            self.add("Identity", [self.values[node]], key)
        inputs = [self._described(key, node) for key, node in self.network.inputs.items() if node in self.values]
        weights = [numpy_helper.from_array(array, key) for key, array in self.weights.items()]
        described = [self._described(key, node) for key, node in outputs.items()]
        graph = helper.make_graph(self.nodes, name, inputs, described, weights)
        version = helper.make_opsetid("", OPSET)
        # By default it would be the newest IR version, which older programs refuse.
        return helper.make_model(graph, opset_imports=[version], producer_name=PRODUCER, ir_version=10)

    def _described(self, name: str, node: Node) -> Any:
        *spatial, channels = node.shape
        return self.onnx.helper.make_tensor_value_info(name, self.type_of(node), ["batch", channels, *spatial])

    def refused(self, node: Node, expected: str, got: str) -> UserError:
        """Return the one-line error for an unsupported layer."""
        layer: Layer = node.layer
        return UserError(
            f"layer {self.name(node)!r} ({layer.kind}): expected {expected}, got {got}; write the network without it"
        )
