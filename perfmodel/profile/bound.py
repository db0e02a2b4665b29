"""One layer bound to arrays of one rank, without a network around it: what the executor would run, alone."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from halograd.comm import Communicator
from halograd.device import device_of
from halograd.dtensor import Layout
from halograd.layers import Layer, SoftmaxCrossEntropy
from halograd.layers.binding import Binding
from halograd.layers.loss import Loss
from halograd.layers.memory import Memory
from halograd.layers.operator import Mode
from halograd.layers.value import Value

__all__ = ["BoundLayer"]


class BoundLayer:
    """A layer on arrays of its own, bound as the executor binds it; `operator.forward` and `.backward` run it. Local.

    Parameters
    ----------
    layer
        The layer; it is not modified.
    inputs
        Shapes ``(n, *spatial, C)`` of the inputs.
    dtype
        Of the computation.
    kernels
        Backend.
    comm
        A communicator of one rank.
    trainable
        Whether there is a backward pass.
    input_gradient
        Whether anybody wants the gradients of the inputs.
    spread
        Bind the kernels of a layer whose statistics are summed over several ranks; nothing is sent.

    Attributes
    ----------
    inputs, dy : list of array, array or None
        What the layer before has written, and (not for a loss) what the layer behind has.
    trainable, input_gradient : bool
        Whether there is a backward pass, and whether it computes gradients of the inputs.
    """

    def __init__(
        self,
        layer: Layer,
        inputs: Sequence[tuple[int, ...]],
        dtype: str,
        kernels: Any,
        comm: Communicator,
        *,
        trainable: bool = True,
        input_gradient: bool = True,
        spread: bool = False,
    ) -> None:
        self.kernels, self.memory = kernels, Memory(kernels)
        self._comm = cast(Communicator, _Twins()) if spread else comm
        self._dtype = np.dtype(dtype)
        self._count, self._channels = len(inputs), inputs[0][-1]
        batch, shapes = inputs[0][0], [shape[1:] for shape in inputs]
        values = [self._input(layer, i, shape, input_gradient) for i, shape in enumerate(inputs)]
        output = self._value("y", (batch, *layer.output_shape(*shapes)), self._dtype)
        output.allocate(self.memory, "activation")
        params = {k: self._parameter(k, spec) for k, spec in layer.parameters(*shapes).items()}
        grads = {k: self._zeros(spec.shape) for k, spec in layer.parameters(*shapes).items()}
        state = {k: self._parameter(k, spec) for k, spec in layer.state(*shapes).items()}
        self.binding = Binding(
            layer,
            layer.name or "layer",
            self._comm,
            kernels,
            self.memory,
            Mode(training=True, valid=batch * self._comm.size),
            values,
            output,
            params,
            grads,
            state,
            {},
            {"sample": self._comm.size},
        )
        self.operator = layer.bind(self.binding)
        self.binding.end_scratch()
        self.inputs = [value.array for value in values]
        self.dy: Any = None
        self._before = [self._copy(array) for array in self.inputs]
        self._behind: Any = None
        self.input_gradient = input_gradient
        self.trainable = trainable and (input_gradient or bool(params))
        if self.trainable:
            self._bind_backward(output, isinstance(layer, Loss))

    def _value(self, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Value:
        size = self._comm.size
        layout = Layout.blocks((size * shape[0], *shape[1:]), {"sample": size}, size)
        return Value(name, layout, dtype, layout.boxes, 0)

    def _input(self, layer: Layer, i: int, shape: tuple[int, ...], input_gradient: bool) -> Value:
        is_target = isinstance(layer, Loss) and i == self._count - 1
        labels = is_target and (isinstance(layer, SoftmaxCrossEntropy) or shape[-1] != self._channels)
        value = self._value(f"x{i}", shape, np.dtype("int64") if labels else self._dtype)
        value.trainable = input_gradient and not is_target
        value.allocate(self.memory, "input")
        if not labels:
            _fill(value.array, value.name)
        if is_target and not labels:
            np.greater(value.array, 0, out=value.array, casting="unsafe")
        return value

    def _zeros(self, shape: tuple[int, ...]) -> Any:
        return self.memory.keep(shape, self._dtype, "parameter")

    def _parameter(self, name: str, spec: Any) -> Any:
        array = self._zeros(spec.shape)
        self.kernels.device.assign(array, spec.initial(name, 0))
        return array

    def _bind_backward(self, output: Value, is_loss: bool) -> None:
        if not is_loss:
            _fill(output.new_contribution(self.memory), "dy")
            output.close_gradient(self.memory, self.kernels)
            self.dy = output.dy
            self._behind = self._copy(self.dy)
        self.operator.bind_backward()
        self.binding.end_scratch()

    @property
    def memory_bytes(self) -> int:
        """What its arrays take [B]."""
        return sum(self.memory.bytes.values())

    def _copy(self, array: Any) -> Any:
        copy = self.kernels.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def write_inputs(self) -> None:
        """What the layer before does: it reads as much as it writes, and leaves some of it in the cache."""
        for target, source in zip(self.inputs, self._before):
            self.kernels.xp.add(source, 0, out=target)
        self.kernels.synchronize()

    def write_dy(self) -> None:
        """What the layer behind does in backward; a forward pass may have used this memory for something else."""
        if self.dy is not None:
            self.kernels.xp.add(self._behind, 0, out=self.dy)
            self.kernels.synchronize()

    def run(self) -> None:
        """One forward and, where there is one, one backward pass."""
        self.operator.forward()
        if self.trainable:
            self.write_dy()
            self.operator.backward()

    def close(self) -> None:
        """Free the kernels."""
        self.operator.close()

    def __enter__(self) -> BoundLayer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _fill(array: Any, name: str) -> None:
    """Normal numbers, drawn for a part of the array and repeated: kernels do not care, and large arrays are quick."""
    flat = array.reshape(-1)
    count = min(flat.size, 1 << 16)
    device = device_of(array)
    some = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(count).astype(array.dtype)
    for first in range(0, flat.size, max(count, 1)):
        part = flat[first : first + count]
        device.assign(part, some[: part.size])


class _Twins:
    """Stands for a communicator of two ranks with the same numbers: their sum is there at once."""

    rank, size = 0, 2
    waits_for_network = False
    recorder = None

    def reduction(self, buffer: Any, group: Any = None, *, kind: str = "", name: str | None = None) -> _Double:
        return _Double(buffer)


class _Double:
    """A sum to which the other rank contributes as much as this one."""

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer

    def start(self) -> None:
        self._buffer *= 2

    def finish(self) -> None:
        pass

    def run(self) -> None:
        self.start()

    def close(self) -> None:
        pass
