"""Bindings: what an operator gets to work with, so that a layer never sees ranks or messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from halograd.comm import Communicator
from halograd.device import wide
from halograd.dtensor import Box, Exchange
from halograd.layers.axes import AXES
from halograd.layers.layer import Layer, Shape
from halograd.layers.memory import Memory
from halograd.layers.operator import Mode
from halograd.layers.value import Gathered, Region, Value, gather

__all__ = ["Binding", "Returned"]


class Binding:
    """One layer's arrays, kernels and exchanges on this rank.

    Attributes
    ----------
    layer, name
        The layer and its name in the network.
    comm, kernels, memory, mode
        Communicator of the executor, kernel backend, memory, and what changes per step.
    inputs, output
        Values; `output.array` is this rank's block of the result, packed.
    params, grads, state
        This layer's arrays by name. `grads` receive this rank's contribution only: the executor sums. Where activations
        have 16 bits, `grads` and `state` are float32 (but not gradients that are rounded, `Parameter.rounded`), and
        `params` too if the layer says so (`exact_parameters`).
    options
        This layer's entry in the strategy (`halo`: "pad" or "overlap", ...).
    parts
        Parts of every axis of the layer's process grid.
    """

    def __init__(
        self,
        layer: Layer,
        name: str,
        comm: Communicator,
        kernels: Any,
        memory: Memory,
        mode: Mode,
        inputs: Sequence[Value],
        output: Value,
        params: Mapping[str, Any],
        grads: Mapping[str, Any],
        state: Mapping[str, Any],
        options: Mapping[str, Any],
        parts: Mapping[str, int] | None = None,
    ) -> None:
        self.layer, self.name = layer, name
        self.comm, self.kernels, self.memory, self.mode = comm, kernels, memory, mode
        self.inputs, self.output = tuple(inputs), output
        self.params, self.grads, self.state, self.options = params, grads, state, options
        self.parts = {**dict.fromkeys(AXES, 1), **(parts or {})}
        self._scratch: list[Any] = []

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def shapes(self) -> list[Shape]:
        """Sample shapes of the inputs."""
        return [v.layout.shape[1:] for v in self.inputs]

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the output."""
        return self.output.dtype

    @property
    def wide(self) -> np.dtype:
        """Dtype of statistics, of gradients of parameters and of those that the layer reads exactly."""
        return wide(self.dtype)

    @property
    def box(self) -> Box:
        """Global output box of this rank."""
        return self.output.box

    @property
    def overlaps_halo(self) -> bool:
        """Whether to compute while the halo travels; "auto": where it crosses a network. Collective at first use."""
        halo = self.options.get("halo", "auto")
        return halo == "overlap" or (halo == "auto" and self.comm.waits_for_network)

    def needed_boxes(self, i: int) -> tuple[Box, ...]:
        """Per rank, the box of input `i` that its output box needs; may reach outside the array."""
        return self.layer.needed_boxes(i, [v.layout for v in self.inputs], self.output.layout)

    def clipped_boxes(self, i: int, slack: Sequence[int] | None = None) -> tuple[Box, ...]:
        """`needed_boxes` without what lies outside the array.

        `slack`: per axis, how many owned elements more may stay behind the end (a stride skips them):
        where the owned box ends that little later, the whole owned box can be used without a copy.
        """
        whole = Box.of_shape(self.inputs[i].layout.shape)
        boxes = [box & whole for box in self.needed_boxes(i)]
        if slack is None:
            return tuple(boxes)
        return tuple(_extend(b, owned, slack) for b, owned in zip(boxes, self.inputs[i].layout.boxes))

    def gather(self, i: int, boxes: Sequence[Box], fill: float | None = None, padded: bool = False) -> Gathered:
        """Bring boxes of input `i` together; a value that was gathered so before is not sent again.

        `padded`: its channels may lie padded with zeros, where its storage is the value's own.
        """
        value = self.inputs[i]
        key = (tuple(boxes), fill, padded and value.room > value.layout.shape[-1])
        if key in value.gathered:
            return value.gathered[key].borrowed()
        assert value.region is not None
        keeper = self._keeper(value.dtype)
        found = gather(self.comm, value.region, value.stored, boxes, keeper, fill, self.name, padded=key[-1])
        value.gathered[key] = found
        return found

    def _keeper(self, dtype: np.dtype) -> Callable[[Sequence[int]], Any]:
        return lambda shape: self.memory.keep(shape, dtype, "halo copy")

    def scratch(self, shape: Sequence[int], dtype: np.dtype | None = None) -> Any:
        """A transient array for this operator alone; undefined outside its own forward or backward."""
        array = self.memory.acquire(shape, self.dtype if dtype is None else dtype)
        self._scratch.append(array)
        return array

    def end_scratch(self) -> None:
        """Let the operators bound next use the scratch arrays too."""
        for array in self._scratch:
            self.memory.release(array)
        self._scratch.clear()

    def needs_gradient(self, i: int) -> bool:
        """Whether anybody wants the gradient of input `i`."""
        return self.inputs[i].trainable

    def gradient(self, i: int) -> Any:
        """A packed array into which this operator writes the gradient of the owned box of input `i`."""
        return self.inputs[i].new_contribution(self.memory)

    def pass_gradient(self, i: int) -> None:
        """The gradient of input `i` is that of the output, unchanged: share the array."""
        self.memory.share(self.output.dy)
        self.inputs[i].contributions.append(self.output.dy)

    def share_gradient(self, inputs: Sequence[int]) -> Any:
        """One packed array of the output's shape that is the gradient of all these inputs: write it once.

        It is nobody's own storage, so that no input adds its other gradients into it.
        """
        array = self.memory.acquire(self.box.shape, self.dtype)
        for count, i in enumerate(inputs):
            if count:
                self.memory.share(array)
            self.inputs[i].contributions.append(array)
        return array

    def gather_gradient(self, boxes: Sequence[Box], region: Region | None = None, kind: str = "halo") -> Gathered:
        """Bring boxes of the output's gradient together (the halo of `dy`).

        `region` holds the owned box if it is not the gradient itself (a masked copy of it).
        """
        source = region or self.output.gradient
        assert source is not None
        return gather(self.comm, source, self.output.layout.boxes, boxes, self.scratch, name=self.name, kind=kind)

    def return_gradient(self, i: int, boxes: Sequence[Box]) -> Returned:
        """Where to write the gradient of boxes that were gathered; `run` adds it up at the owners.

        Adjoint of `gather`.
        """
        value = self.inputs[i]
        target = self.gradient(i)
        if all(a == b or not (a.size or b.size) for a, b in zip(boxes, value.layout.boxes)):
            return Returned(target, None)
        array = self.scratch(boxes[self.rank].shape, value.dtype)
        exchange = Exchange(
            self.comm,
            boxes,
            value.layout.boxes,
            array,
            target,
            combine="sum",
            kind="halo",
            name=self.name,
        )
        return Returned(array, exchange)

    def exchange_into_output(self, i: int) -> Exchange:
        """The exchange that fills the owned output box from input `i`, cut differently."""
        value = self.inputs[i]
        return Exchange(
            self.comm,
            value.layout.boxes,
            self.output.layout.boxes,
            value.array,
            self.output.array,
            kind="redistribute",
            name=self.name,
        )

    def return_output_gradient(self, i: int) -> Exchange:
        """Adjoint of `exchange_into_output`."""
        value = self.inputs[i]
        return Exchange(
            self.comm,
            self.output.layout.boxes,
            value.layout.boxes,
            self.output.dy,
            self.gradient(i),
            combine="sum",
            kind="redistribute",
            name=self.name,
        )


class Returned:
    """Gradient of a gathered box: written into `array`, then summed into the owners by `start`, `finish`."""

    def __init__(self, array: Any, exchange: Exchange | None) -> None:
        self.array = array
        self._exchange = exchange

    def start(self) -> None:
        if self._exchange is not None:
            self._exchange.start()

    def finish(self) -> None:
        if self._exchange is not None:
            self._exchange.finish()

    def run(self) -> None:
        self.start()
        self.finish()

    def close(self) -> None:
        if self._exchange is not None:
            self._exchange.close()


def _extend(box: Box, owned: Box, slack: Sequence[int]) -> Box:
    stop = tuple(o if b <= o <= b + s else b for b, o, s in zip(box.stop, owned.stop, slack))
    return Box(box.start, stop) if box.size else box
