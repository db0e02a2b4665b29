"""Dense layers, for samples without spatial axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..dtensor import Box
from ..kernels.access import reads, writes
from ..kernels.fused import FusedActivation
from ..lowering.context import Context, Lowered
from .activation import activated
from .layer import Layer, Passes, Shape
from .lowering import cuts_channels, lower_contraction
from .parameter import Parameter, lower_weight_norm, with_lengths
from .replicated_dense import lower_replicated

__all__ = ["Dense"]


class Dense(Layer):
    """Dense layer ``y = x w^T + b`` on samples without spatial axes: ``(N, F)`` -> ``(N, units)``.

    Parameters
    ----------
    units
        Number of outputs.
    bias
        Whether to add a bias.
    activation
        None; a name (``"relu"``, ``"silu"``, ...) or a layer, which is put after it.
    weight_norm
        As in :class:`Conv`, with one length per unit. Such a layer cannot have replicated gradients.

    Notes
    -----
    Weights ``(units, F)``, whole on every rank; the samples are spread over all ranks.
    Communication per process: only the sum of the weights' gradients over all ranks, or the all-gathers that replace
    it (:mod:`halograd.layers.replicated_dense`). If units or features are cut (:mod:`halograd.layers.lowering`), a
    rank holds a block of the weights, and the samples are spread over the other axes of the process grid.
    """

    recomputation = "block"

    passes = Passes()
    cuts_channels = "contracts"
    weight_norm = False
    inputs_taken = 1

    def __init__(
        self,
        units: int,
        bias: bool = True,
        activation: str | Layer | None = None,
        weight_norm: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if units < 1:
            raise ValueError(f"Dense: units must be at least 1, got {units}")
        self.units, self.bias = units, bias
        activated(self, activation, by_input=None)
        if weight_norm:
            self.weight_norm, self.cuts_channels = True, "no"

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
        found = {"w": w, "b": Parameter((self.units,), decay=False, channel_axis=0)} if self.bias else {"w": w}
        return with_lengths(found) if self.weight_norm else found

    def flops(self, *shapes: Shape) -> int:
        return 2 * self.units * shapes[0][0]

    def of_filters(self, filters: int) -> Layer:
        return self.changed(units=filters)

    def lower(self, context: Context) -> Lowered:
        return lower_weight_norm(context, self._lower) if self.weight_norm else self._lower(context)

    def _lower(self, context: Context) -> Lowered:
        if cuts_channels(context.parts):
            return lower_contraction(context, _DenseKernels())
        if context.options.get("weight_gradient") == "replicated":
            return lower_replicated(context)
        # No communication: input and output have their samples on the same ranks. Inputs are copied if not packed.
        x = context.gather(0, context.needed(0))
        x.start()
        x.finish()
        w = context.params["w"]
        kernel = context.kernel(_forward, x=x.view, w=w, b=context.params.get("b"), y=context.y)
        context.run(kernel, timing=context.timing("forward"))

        def backward() -> None:
            dy, grads = context.dy, {"dw": context.grads["w"], "db": context.grads.get("b")}
            context.run(context.kernel(_filter, x=x.view, dy=dy, **grads), timing=context.timing("backward_filter"))
            if context.needs_gradient(0):
                data = context.kernel(_data, dy=dy, w=w, dx=context.gradient(0))
                context.run(data, timing=context.timing("backward_data"))

        return Lowered(backward)


class _DenseKernels:
    """Kernels on blocks of units and of input features (model parallelism)."""

    def forward(self, x: Box, y: Box, f: FusedActivation | None) -> Callable[..., Any]:
        return _forward

    def filter(self, x: Box, y: Box) -> Callable[..., Any]:
        return _filter

    def data(self, x: Box, y: Box) -> Callable[..., Any]:
        return _data


@reads("x", "w", "b")
@writes("y")
def _forward(environment: Any, x: Any, w: Any, b: Any, y: Any) -> Any:
    return environment.kernels.dense_forward(x, w, b, y)


@reads("x", "dy")
@writes("dw", "db")
def _filter(environment: Any, x: Any, dy: Any, dw: Any, db: Any) -> Any:
    return environment.kernels.dense_backward_filter(x, dy, dw, db)


@reads("dy", "w")
@writes("dx")
def _data(environment: Any, dy: Any, w: Any, dx: Any) -> Any:
    return environment.kernels.dense_backward_data(dy, w, dx)
