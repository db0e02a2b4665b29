"""The steps of a network under a strategy, as the executor will compile them: layers and redistributions.

Mirrors `training/compiler.py` without any boxes per rank: which value is read under which cut, where it has to be
redistributed, what is trained and which layers run backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from halograd.dtensor import Blocks, Layout
from halograd.layers import Input, Layer, Loss, Network, Node, Redistribute
from halograd.layers.strategy import Strategy
from halograd.perfmodel.cost.blocks import Parts, cut, parts_key

__all__ = ["Array", "Stage", "itemsize_of", "stages"]


@dataclass(eq=False)
class Array:
    """A value: what one node computes, cut in one way.

    Attributes
    ----------
    shape
        Global, ``(N, *spatial, C)``.
    blocks
        What the ranks own.
    itemsize
        Of one element [B].
    trainable
        Whether anything before it has a gradient.
    read
        An input of the network: every rank has read all it needs, halos included, from disk.
    wanted
        Whether a gradient reaches it, so that its maker runs backward.
    """

    name: str
    shape: tuple[int, ...]
    blocks: Blocks
    itemsize: int
    trainable: bool = True
    read: bool = False
    wanted: bool = False

    @cached_property
    def layout(self) -> Layout:
        """Shape and blocks together."""
        return Layout(self.shape, self.blocks)


@dataclass(eq=False)
class Stage:
    """One step: a layer, or a redistribution before it.

    Attributes
    ----------
    parts
        Its cut, parts per axis in the order of `PARTS`.
    backward
        Whether it runs in the backward pass.
    memo
        What was found out about it already.
    """

    name: str
    layer: Layer
    inputs: list[Array]
    output: Array
    parts: Parts
    options: Mapping[str, Any] = field(default_factory=dict)
    backward: bool = False
    memo: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Sample shapes of the inputs."""
        return [value.shape[1:] for value in self.inputs]

    @property
    def is_layer(self) -> bool:
        """Not a redistribution."""
        return not isinstance(self.layer, Redistribute)


def itemsize_of(dtype: str) -> int:
    """Bytes of one element.

    >>> itemsize_of("float32"), itemsize_of("bfloat16")
    (4, 2)
    """
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def stages(network: Network, strategy: Strategy, batch: int, dtype: str = "float32", train: bool = True) -> list[Stage]:
    """All steps in order of computation.

    Parameters
    ----------
    batch
        Global number of samples.
    dtype
        Of the computation.
    train
        Whether there is a backward pass.
    """
    compiler = _Compiler(network, strategy, batch, dtype)
    for node in network.nodes:
        compiler.add(node)
    if train:
        _mark_backward(network, compiler.stages)
    return compiler.stages


class _Compiler:
    def __init__(self, network: Network, strategy: Strategy, batch: int, dtype: str) -> None:
        self.network, self.strategy, self.batch, self.dtype = network, strategy, batch, dtype
        self.stages: list[Stage] = []
        self._values: dict[tuple[Node, Parts], Array] = {}
        self._made: dict[Node, Parts] = {}

    def add(self, node: Node) -> None:
        if isinstance(node, Input):
            return  # placed when its first reader is known
        name = self.network.names[node]
        parts = parts_key(self.strategy.parts_of(name))
        inputs = [self._read(n, parts) for n in node.inputs]
        output = self._array(name, node, parts, itemsize_of(self.dtype))
        has_parameters = bool(node.layer.parameters(*(n.shape for n in node.inputs)))
        output.trainable = has_parameters or any(v.trainable for v in inputs)
        self._made[node] = parts
        self._values[node, parts] = output
        self.stages.append(Stage(name, node.layer, inputs, output, parts, self.strategy.options_of(name)))

    def _array(self, name: str, node: Node, parts: Parts, itemsize: int) -> Array:
        shape = (self.batch, *node.shape)
        return Array(name, shape, cut(shape, parts), itemsize)

    def _read(self, node: Node, parts: Parts) -> Array:
        if (node, parts) in self._values:
            return self._values[node, parts]
        name = self.network.names[node]
        if isinstance(node, Input) and node not in self._made:
            self._made[node] = parts
            value = self._array(name, node, parts, node.array_dtype(np.dtype(_host(self.dtype))).itemsize)
            value.trainable, value.read = False, True
            self._values[node, parts] = value
            return value
        source = self._values[node, self._made[node]]
        if cut(source.shape, parts) == source.blocks:
            return source
        label = f"{name}->{'x'.join(map(str, parts))}"
        value = self._array(label, node, parts, source.itemsize)
        value.trainable = source.trainable
        self._values[node, parts] = value
        self.stages.append(Stage(label, Redistribute(label), [source], value, parts))
        return value


def _host(dtype: str) -> str:
    return "float16" if dtype == "bfloat16" else dtype


def _mark_backward(network: Network, steps: list[Stage]) -> None:
    """Which steps a gradient reaches, from the loss down."""
    loss = network.outputs.get("loss")
    for stage in reversed(steps):
        is_loss = loss is not None and stage.layer is loss.layer and isinstance(stage.layer, Loss)
        stage.backward = stage.output.trainable and (stage.output.wanted or is_loss)
        if not stage.backward:
            continue
        for value in stage.inputs:
            value.wanted = value.wanted or value.trainable
