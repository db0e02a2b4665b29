"""A layer bound to arrays of one rank, without a network: the same operations as in the executor."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from ...device import device_of, wide
from ...dtensor import Layout
from ...layers import Layer
from ...layers.strategy import AXES
from ...lowering.operations import Run
from ...lowering.views import Value
from ...program.compiler import Alone
from ...program.program import Program, Segment, Step, Target
from ...program.runner import Mode, Runner

if TYPE_CHECKING:
    from ...comm import Communicator
    from ...comm.reduction import ReductionSpec

__all__ = ["BoundLayer"]


class BoundLayer:
    """A layer with its own arrays, lowered and bound as in the executor; `forward` and `backward` run it. Local.

    Parameters
    ----------
    layer
        The layer; it is not modified.
    inputs
        Shapes ``(n, *spatial, C)`` of the inputs.
    dtype
        Dtype of the computation.
    kernels
        Backend.
    comm
        A communicator of one rank.
    trainable
        Whether there is a backward pass.
    input_gradient
        Whether to compute the gradients of the inputs.
    spread
        Whether to bind the kernels of a layer whose statistics are summed over several ranks; no messages are sent.

    Attributes
    ----------
    inputs, dy : list of array, array or None
        Inputs of the layer, and gradient of its output (None for a loss, and without a backward pass).
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
        # With two ranks, layers bind the kernels that sum statistics; equal data need no messages.
        comm = cast("Communicator", _EqualRanks()) if spread else comm
        self.kernels, size, self._dtype = kernels, comm.size, np.dtype(dtype)
        batch, shapes = inputs[0][0], [shape[1:] for shape in inputs]
        classes = {i: layer.counted_classes(i, *shapes) for i in range(len(inputs))}
        # Times do not depend on how often classes occur, but layers with balanced weights need the counts.
        layer = layer.with_counts({i: [1] * n for i, n in classes.items() if n})

        def value(name: str, shape: tuple[int, ...], dtype: np.dtype = self._dtype) -> Value:
            # Each of the ranks (1, or 2 of `_EqualRanks`) has `batch` samples.
            layout = Layout.blocks((size * batch, *shape), {"sample": size}, size)
            return Value(name, layout, dtype, 0, kept=True)

        # Targets have no gradient, and may be class indices.
        values = []
        for i, shape in enumerate(shapes):
            is_target = layer.compares(i)
            labels = is_target and layer.reads_classes(i, *shapes)
            values.append(value(f"x{i}", shape, np.dtype("int64") if labels else self._dtype))
            values[i].trainable = input_gradient and not is_target
        output = value("y", layer.output_shape(*shapes))
        step = Step(layer.name or "layer", layer, values, output, {}, {**dict.fromkeys(AXES, 1), "sample": size})
        self.trainable = trainable and (input_gradient or bool(layer.parameters(*shapes)))
        self.input_gradient = input_gradient
        self.program = _program(step, size, self.trainable)
        mode = Mode(training=True, valid=batch * size)
        self.arrays = self._parameters(layer, shapes)
        arrays = {kind: {f"{step.name}/{k}": a for k, a in own.items()} for kind, own in self.arrays.items()}
        # In 16 bits, operations refer to copies of the parameters and to rounded gradients.
        arrays |= {"copies": arrays["params"], "rounded": arrays["grads"]}
        self.runner = Runner(self.program, comm, kernels, arrays, mode)
        self.inputs = [self.runner.view(x.view) for x in values]
        self.output = self.runner.view(output.view)
        for i, (array, x) in enumerate(zip(self.inputs, values)):
            if x.dtype.kind != "i":
                _fill(array, x.name)
                if layer.compares(i):  # targets that every loss accepts: 0 and 1
                    np.greater(array, 0, out=array, casting="unsafe")
        self._saved_inputs = [self._copy(array) for array in self.inputs]
        self.dy: Any = None
        self._saved_dy: Any = None
        if output.gradient is not None:
            self.dy = self.runner.view(output.dy)
            _fill(self.dy, "dy")
            self._saved_dy = self._copy(self.dy)

    def _parameters(self, layer: Layer, shapes: Sequence[tuple[int, ...]]) -> dict[str, dict[str, Any]]:
        params, state = layer.parameters(*shapes), layer.state(*shapes)
        zeros, low, full = self.kernels.zeros, self._dtype, wide(self._dtype)
        # Norms read exact parameters even if the computation has 16 bits; backends may round gradients to 16 bits.
        read, rounds = full if layer.exact_parameters else low, self.kernels.rounds_gradients
        arrays = {
            "params": {key: zeros(spec.shape, read) for key, spec in params.items()},
            "state": {key: zeros(spec.shape, full) for key, spec in state.items()},
            "grads": {key: zeros(spec.shape, low if rounds and spec.rounded else full) for key, spec in params.items()},
        }
        for kind, specs in (("params", params), ("state", state)):
            for key, spec in specs.items():
                self.kernels.device.assign(arrays[kind][key], spec.initial(key, 0))
        return arrays

    @property
    def memory_bytes(self) -> int:
        """Memory of the arrays of the layer [B]."""
        return len(self.runner.arena) + sum(a.nbytes for own in self.arrays.values() for a in own.values())

    def _copy(self, array: Any) -> Any:
        copy = self.kernels.empty(array.shape, array.dtype)
        copy[...] = array
        return copy

    def write_inputs(self) -> None:
        """Emulate the previous layer: write the inputs from other arrays, so that a part of the inputs is in the cache.
        """
        for target, source in zip(self.inputs, self._saved_inputs):
            self.kernels.xp.add(source, 0, out=target)
        self.kernels.synchronize()

    def write_dy(self) -> None:
        """Emulate the backward pass of the next layer: write `dy`, if any, so that a part of it is in the cache."""
        if self.dy is not None:
            self.kernels.xp.add(self._saved_dy, 0, out=self.dy)
            self.kernels.synchronize()

    def forward(self) -> None:
        """Run the forward pass."""
        for segment, calls in zip(self.program.forward, self.runner.forward):
            for operation, call in zip(segment.operations, calls, strict=True):
                # Times are those of training.
                if operation.when != "evaluation":
                    call()

    def backward(self, filters: Callable[[Callable[[], object]], object]) -> None:
        """Run the backward pass; `filters` gets each kernel of a weight's gradient, and has to call it."""
        for segment, calls in zip(self.program.backward, self.runner.backward):
            for operation, call in zip(segment.operations, calls, strict=True):
                timing = operation.timing if isinstance(operation, Run) else None
                if timing is not None and timing.phase == "backward_filter":
                    filters(call)
                else:
                    call()

    def run(self) -> None:
        """Run one forward pass, and one backward pass if the layer is trained."""
        self.forward()
        if self.trainable:
            self.write_dy()
            self.backward(lambda call: call())

    def close(self) -> None:
        """Free the kernels."""
        self.runner.close()

    def __enter__(self) -> BoundLayer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _program(step: Step, size: int, trained: bool) -> Program:
    """Return a program of one layer; its inputs, its output and the gradient of its output keep their memory."""
    lowered = Alone(step, trained)
    backward = lowered.backward() if trained else []
    probed = frozenset([step.output.name])  # other layers write the gradient of the output
    target = Target(step.output.layout.shape[0], size, dtype=step.output.dtype, trainable=trained, probed=probed)
    program = Program("layer", target)
    program.steps, program.loss = [step], lowered.lowered.loss
    program.values = {value.name: value for value in (*step.inputs, step.output)}
    program.forward, program.backward = [Segment(step.name, lowered.forward)], [Segment(step.name, backward)]
    if step.output.gradient is not None:
        step.output.gradient.view.buffer.kept = True
    return program


def _fill(array: Any, name: str) -> None:
    """Fill an array with normally distributed values.

    Values are drawn for a part of the array and repeated: this is fast, and kernel times do not depend on values.
    """
    flat = array.reshape(-1)
    count = min(flat.size, 1 << 16)
    device = device_of(array)
    # crc32 is the same in every process, unlike hash().
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(count).astype(array.dtype)
    for first in range(0, flat.size, max(count, 1)):
        part = flat[first : first + count]
        device.assign(part, values[: part.size])


class _EqualRanks:
    """Emulated communicator of two ranks with equal data, whose sums are immediate."""

    rank, size = 0, 2
    waits_for_network = False
    recorder = None

    def reductions(self, specs: Sequence[ReductionSpec]) -> list[_DoubledSum]:
        return [_DoubledSum(spec.buffer) for spec in specs]


class _DoubledSum:
    """Sum over two ranks with the same summand."""

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
