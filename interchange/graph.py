"""The graph of an ONNX file as the importer works on it: operations on activations; everything else is constants."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

__all__ = ["Graph", "OnnxConstant", "OnnxNode", "Shape"]

Shape = tuple[int, ...]


@dataclass(frozen=True)
class OnnxConstant:
    """Numbers that no activation changes: a weight of the file, or computed of such.

    Attributes
    ----------
    shape, dtype
        Of the array.
    read
        Makes the array; from the file, if it is large.
    name
        Of the weight that it is, in other axis order at most; empty for numbers that the exporter has made.
    """

    shape: Shape
    dtype: np.dtype
    read: Callable[[], np.ndarray]
    name: str = ""

    @classmethod
    def of(cls, array: np.ndarray, name: str = "") -> OnnxConstant:
        """An array that is there already."""
        return cls(array.shape, array.dtype, lambda: array, name)

    def is_all(self, number: float) -> bool:
        """Whether the exporter has made it, of this number alone: it stands for a parameter that is not there."""
        return not self.name and bool(np.all(self.read() == number))

    def scalar(self) -> float | None:
        """The number, if it is one."""
        return float(self.read().reshape(())) if int(np.prod(self.shape)) == 1 else None


@dataclass(frozen=True)
class OnnxNode:
    """A node of the graph.

    Attributes
    ----------
    name
        As the file has it, for messages.
    kind
        Name of the operator; of this package's own where a pattern was recognized.
    inputs, outputs
        Names of values; an input that is left out has an empty name.
    attributes
        By name, as Python has them.
    scope
        Name of the torch module whose node it is, where the file says it.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    scope: str = ""

    @property
    def module(self) -> str:
        """Name of the torch module; ``n_1`` is the second use of ``n``."""
        return re.sub(r"_\d+$", "", self.scope)

    def changed(self, **settings: Any) -> OnnxNode:
        """A copy with other settings."""
        return replace(self, **settings)


@dataclass
class Graph:
    """Operations in an order in which they can be computed.

    Attributes
    ----------
    operations
        On activations.
    constants, shapes
        By name of the value; shapes are those of ONNX, ``(N, C, *spatial)``, of constants too.
    inputs, outputs
        Names of values.
    batch
        What stands for the number of samples in `shapes`.
    source
        The file and its checksum.
    """

    operations: list[OnnxNode]
    constants: dict[str, OnnxConstant]
    shapes: dict[str, Shape]
    inputs: list[str]
    outputs: list[str]
    batch: int
    source: str = ""

    def readers(self, value: str) -> list[OnnxNode]:
        """Operations that read a value, once per input that is it."""
        return [op for op in self.operations for name in op.inputs if name == value]

    def only_reader(self, value: str) -> OnnxNode | None:
        """The operation that reads a value, if it is the only one and the value is no output."""
        found = self.readers(value)
        return found[0] if len(found) == 1 and value not in self.outputs else None

    def maker(self, value: str) -> OnnxNode | None:
        """The operation that makes a value; None for inputs and constants."""
        return next((op for op in self.operations if value in op.outputs), None)

    def rename(self, old: str, new: str) -> None:
        """Call a value otherwise."""

        def renamed(names: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(new if name == old else name for name in names)

        self.operations = [
            op.changed(inputs=renamed(op.inputs), outputs=renamed(op.outputs))
            if old in op.inputs or old in op.outputs
            else op
            for op in self.operations
        ]

    def leave_out(self, op: OnnxNode, value: str) -> None:
        """Take away an operation that does nothing: what it makes is its input `value`."""
        self.operations = [other for other in self.operations if other is not op]
        made = op.outputs[0]
        if made in self.outputs and value not in (*self.inputs, *self.outputs):
            self.rename(value, made)
        elif made not in self.outputs:
            self.rename(made, value)
        else:
            self.operations.append(op.changed(kind="Identity", inputs=(value,)))

    def replace(self, olds: list[OnnxNode], new: OnnxNode) -> None:
        """Put one operation in the place of the last of several."""
        places = [i for i, op in enumerate(self.operations) if any(op is old for old in olds)]
        self.operations[places[-1]] = new
        for i in reversed(places[:-1]):
            del self.operations[i]
