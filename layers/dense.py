"""Dense layers, on samples without spatial axes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from halograd.layers.binding import Binding
from halograd.layers.contraction import ContractionOperator, cuts_channels
from halograd.layers.layer import Layer, Shape
from halograd.layers.operator import Operator
from halograd.layers.parameter import Parameter
from halograd.layers.replicated_dense import ReplicatedDenseOperator

__all__ = ["Dense"]


class Dense(Layer):
    """``y = x w^T + b`` on samples without spatial axes: ``(N, F)`` -> ``(N, units)``.

    Parameters
    ----------
    units
        Number of outputs.
    bias
        Whether to add a bias.

    Notes
    -----
    Weights ``(units, F)``, whole on every rank; the samples are spread over all ranks.
    Communication per process: none but the sum of the weights' gradients over all ranks, or the all-gathers in its
    place (:mod:`halograd.layers.replicated_dense`). With units or features cut (:mod:`halograd.layers.contraction`) a
    rank holds a block of the weights, and the samples are spread over the other parts only.
    """

    cuts_channels = "contracts"

    def __init__(self, units: int, bias: bool = True, name: str | None = None) -> None:
        super().__init__(name)
        if units < 1:
            raise ValueError(f"Dense: units must be at least 1, got {units}")
        self.units, self.bias = units, bias

    def output_shape(self, *shapes: Shape) -> Shape:
        (shape,) = shapes
        if len(shape) != 1:
            raise ValueError(
                f"Dense: expected samples of shape (F,), got {shape}; put Flatten or GlobalAveragePool before it, "
                "or use Conv(units, 1) to apply it at every position"
            )
        return (self.units,)

    def parameters(self, *shapes: Shape) -> Mapping[str, Parameter]:
        (features,) = shapes[0]
        w = Parameter((self.units, features), "he", features, channel_axis=0, input_axis=1)
        return {"w": w, "b": Parameter((self.units,), decay=False, channel_axis=0)} if self.bias else {"w": w}

    def flops(self, *shapes: Shape) -> int:
        return 2 * self.units * shapes[0][0]

    def bind(self, binding: Binding) -> Operator:
        if cuts_channels(binding.parts):
            return CutDenseOperator(binding)
        if binding.options.get("weight_gradient") == "replicated":
            return ReplicatedDenseOperator(binding)
        return _DenseOperator(binding)


class CutDenseOperator(ContractionOperator):
    """Dense layer on a block of its units, of its input features, or of both (model parallelism)."""

    def forward_kernel(self, x: Any, bias: Any, y: Any, relu: bool) -> Any:
        return self.b.kernels.dense_forward(x, self.b.params["w"], bias, y)

    def filter_kernel(self, x: Any, dy: Any, dw: Any, db: Any) -> Any:
        return self.b.kernels.dense_backward_filter(x, dy, dw, db)

    def data_kernel(self, dy: Any, dx: Any) -> Any:
        return self.b.kernels.dense_backward_data(dy, self.b.params["w"], dx)


class _DenseOperator(Operator):
    def __init__(self, b: Binding) -> None:
        self.b = b
        # No communication: input and output have their samples on the same ranks. Inputs are copied if not packed.
        self.x = b.gather(0, b.needed(0))
        self.kernel = b.kernels.dense_forward(self.x.array, b.params["w"], b.params.get("b"), b.output.array)

    def forward(self) -> None:
        self.x.start()
        self.x.finish()
        self.kernel()

    def bind_backward(self) -> None:
        b = self.b
        dy = b.output.dy
        self.filter = b.kernels.dense_backward_filter(self.x.array, dy, b.grads["w"], b.grads.get("b"))
        self.data = b.kernels.dense_backward_data(dy, b.params["w"], b.gradient(0)) if b.needs_gradient(0) else None

    def backward(self) -> None:
        self.filter()
        if self.data is not None:
            self.data()
