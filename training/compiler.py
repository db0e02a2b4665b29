"""Compilation: from network, strategy and batch to values with their storage. Mostly arithmetic.

Decides, before anything is allocated on a device: the layout of every value, where data have to be
redistributed between layers, and which values get margins so that halos are received in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from halograd.device import wide
from halograd.dtensor import Blocks, Box, hull
from halograd.layers import Input, Layer, Network, Node, Redistribute
from halograd.layers.loss import Loss
from halograd.layers.strategy import Strategy, layout_of
from halograd.layers.value import Value

__all__ = ["Step", "compile_steps", "is_packed"]


@dataclass
class Step:
    """One layer in the order of computation, with the values it reads and makes."""

    name: str
    layer: Layer
    inputs: list[Value]
    output: Value
    options: dict
    parts: dict[str, int]


def compile_steps(
    network: Network,
    strategy: Strategy,
    batch: int,
    size: int,
    rank: int,
    dtype: np.dtype,
    probed: frozenset[str] = frozenset(),
) -> tuple[list[Step], dict[str, Value]]:
    """Steps in order of computation, and the values of inputs and layers by name. Local.

    Returned values have layouts and the boxes that will be stored, but no arrays yet. `probed`: inputs
    whose gradient is wanted.
    """
    compiler = _Compiler(network, strategy, batch, size, rank, dtype, probed)
    for node in network.nodes:
        compiler.add(node)
    compiler.place()
    return compiler.steps, compiler.by_name


def is_packed(storage: Box, box: Box) -> bool:
    """Whether `box`, as a view of an array that holds `storage`, is contiguous."""
    if not box.size:
        return True
    if not storage.contains(box):
        return False
    inner_full = True
    for have, want in zip(reversed(storage.shape), reversed(box.shape)):
        if not inner_full and want > 1:
            return False
        inner_full = inner_full and have == want
    return True


class _Compiler:
    def __init__(self, network, strategy, batch, size, rank, dtype, probed) -> None:
        self.network, self.strategy, self.probed = network, strategy, probed
        self.batch, self.size, self.rank, self.dtype = batch, size, rank, dtype
        self.steps: list[Step] = []
        self.by_name: dict[str, Value] = {}
        self._values: dict[tuple[Node, tuple], Value] = {}
        self._parts: dict[Node, tuple] = {}
        self._inputs: list[Value] = []
        #: Inputs that losses compare with, and nobody else reads: they keep their digits.
        read = {i: [n for n in network.nodes if i in n.inputs] for i in network.nodes if isinstance(i, Input)}
        self._targets = {i for i, some in read.items() if some and all(_compares(n, i) for n in some)}

    def add(self, node: Node) -> None:
        if isinstance(node, Input):
            return  # placed when its first reader is known
        name = self.network.names[node]
        parts = self.strategy.parts_of(name)
        key = tuple(parts.values())
        inputs = [self._read(n, parts) for n in node.inputs]
        output = self._value(name, node.shape, parts, self.dtype)
        has_parameters = bool(node.layer.parameters(*(n.shape for n in node.inputs)))
        output.trainable = has_parameters or any(v.trainable for v in inputs)
        self._parts[node] = key
        self._values[node, key] = self.by_name[name] = output
        self.steps.append(Step(name, node.layer, inputs, output, self.strategy.options_of(name), parts))

    def _value(self, name, shape, parts, dtype) -> Value:
        layout = layout_of((self.batch, *shape), parts, self.size)
        return Value(name, layout, dtype, layout.boxes, self.rank)

    def _read(self, node: Node, parts: dict[str, int]) -> Value:
        """The value of `node` under `parts`; redistributed where it is made under others."""
        key = tuple(parts.values())
        if (node, key) in self._values:
            return self._values[node, key]
        name = self.network.names[node]
        if isinstance(node, Input) and node not in self._parts:
            self._parts[node] = key
            dtype = wide(self.dtype) if node in self._targets else self.dtype
            value = self._value(name, node.shape, parts, node.array_dtype(dtype))
            value.trainable = name in self.probed
            self._values[node, key] = self.by_name[name] = value
            self._inputs.append(value)
            return value
        source = self._values[node, self._parts[node]]
        if layout_of(source.layout.shape, parts, self.size) == source.layout:
            return source
        label = f"{name}->{','.join(f'{axis}={n}' for axis, n in parts.items() if n > 1) or 'one rank'}"
        value = self._value(label, node.shape, parts, source.dtype)
        value.trainable = source.trainable
        self._values[node, key] = value
        self.steps.append(Step(label, Redistribute(label), [source], value, {}, parts))
        return value

    def place(self) -> None:
        """Choose the stored boxes: margins for halos where the owned block stays packed."""
        readers: dict[int, list[tuple[Step, int]]] = {}
        for step in self.steps:
            for i, value in enumerate(step.inputs):
                readers.setdefault(id(value), []).append((step, i))
        inputs = {id(v) for v in self._inputs}
        for value in [*self._inputs, *(s.output for s in self.steps)]:
            needs = [self._needed(s, i) for s, i in readers.get(id(value), [])]
            if id(value) in inputs:
                needs = [blocks for blocks in needs if blocks.grid == value.layout.boxes.grid]
                value.stored = value.layout.boxes.joined(needs)
                value.region_box = value.stored[self.rank]
            else:
                value.region_box = _with_margins(value, [blocks[self.rank] for blocks in needs])
        for step in self.steps:
            self._place_gradient(step)

    def _needed(self, step: Step, i: int) -> Blocks:
        blocks = step.layer.needed_blocks(i, [v.layout for v in step.inputs], step.output.layout)
        return blocks.clipped(step.inputs[i].layout.shape)

    def _place_gradient(self, step: Step) -> None:
        out = step.output
        boxes = step.layer.gradient_blocks(step.inputs[0].layout, out.layout)
        if boxes is None:
            return
        grown = hull([out.box, boxes[self.rank]])
        if is_packed(grown, out.box) and is_packed(grown, boxes[self.rank]):
            out.gradient_box = grown


def _compares(node: Node, value: Node) -> bool:
    """Whether a node is a loss that takes the value as its target."""
    return isinstance(node.layer, Loss) and node.inputs[0] is not value


def _with_margins(value: Value, needed: Sequence[Box]) -> Box:
    grown = hull([value.box, *needed])
    if all(is_packed(grown, box) for box in [value.box, *needed]):
        return grown
    return value.box
