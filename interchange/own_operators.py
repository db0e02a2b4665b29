"""Custom ONNX operators for operators of torch that ONNX lacks: adaptive pooling and dropout of channels.

`hg.from_torch` registers them with torch's exporters.

If the number of outputs of an adaptive pooling does not divide the extents, the old exporter refuses it, and the new
one writes means in one and two dimensions as a selection of rows and a sum, which a rule of :mod:`.shaping` recognizes.
Both write dropout of channels as random numbers; so a custom operator of torch replaces it during an export.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..layers import (
    AdaptiveAveragePool,
    AdaptiveMaxPool,
    AveragePool,
    ChannelDropout,
    GlobalAveragePool,
    GlobalMaxPool,
    Layer,
    MaxPool,
)
from .files import library
from .graph import Activation, Builder, OnnxNode, Shape
from .sliding import global_pool

__all__ = ["DOMAIN", "OWN_OPERATORS", "marked", "output_shape", "symbolics", "translations"]

#: Domain of the operators.
DOMAIN = "halograd"


@dataclass(frozen=True)
class _Operator:
    """An operator of our own that stands for one of torch.

    Attributes
    ----------
    kind, attribute
        Name of the operator, and of its attribute.
    argument
        Type of torch's argument after the input, as the old exporter reads it: ``"is"`` (integers) or ``"f"``.
    outputs
        Number of outputs.
    """

    kind: str
    attribute: str
    argument: str
    outputs: int = 1


_MEAN = _Operator("AdaptiveAveragePool", "size", "is")
_MAX = _Operator("AdaptiveMaxPool", "size", "is", outputs=2)
_BY_TORCH = {
    **{f"aten::adaptive_avg_pool{axes}d": _MEAN for axes in (1, 2, 3)},
    **{f"aten::adaptive_max_pool{axes}d": _MAX for axes in (1, 2, 3)},
    "halograd::channel_dropout": _Operator("ChannelDropout", "rate", "f"),
}


def output_shape(shape: Shape, size: Sequence[int]) -> Shape:
    """Return the extents ``(N, C, *size)`` that an operator makes of ``(N, C, *spatial)``; without a size, the same."""
    return (*shape[: len(shape) - len(size)], *size)


# -- exporters of torch --------------------------------------------------------------------------------------


@functools.cache
def _channel_dropout_of_torch() -> Callable[[Any, float], Any]:
    """Register the operator ``halograd::channel_dropout`` with torch, which does not decompose it; return it."""
    torch = library("torch")
    operator = torch.library.custom_op(
        "halograd::channel_dropout",
        lambda x, rate: x.clone(),
        mutates_args=(),
        schema="(Tensor x, float rate) -> Tensor",
    )
    operator.register_fake(lambda x, rate: torch.empty_like(x))
    return operator


@contextmanager
def marked() -> Iterator[None]:
    """Let torch's ``dropout1d`` to ``dropout3d`` call ``halograd::channel_dropout`` within the ``with`` block.

    Calls with ``inplace=True`` stay as they are.
    """
    functional, operator = library("torch").nn.functional, _channel_dropout_of_torch()
    originals = {name: getattr(functional, name) for name in ("dropout1d", "dropout2d", "dropout3d")}

    def marking(original: Callable[..., Any]) -> Callable[..., Any]:
        def dropout(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
            if inplace:  # a caller may go on with the input
                return original(input, p, training, inplace)
            return operator(input, float(p)) if training and p else input

        return dropout

    try:
        for name, original in originals.items():
            setattr(functional, name, marking(original))
        yield
    finally:
        for name, original in originals.items():
            setattr(functional, name, original)


def translations() -> dict[Any, Callable[..., Any]]:
    """Return functions that write the operators for the new exporter, by torch's operator; register their schemas."""
    onnx, torch, values = library("onnx"), library("torch"), library("onnxscript.values")
    schema = onnx.defs.OpSchema
    for operator in _BY_TORCH.values():
        # Schemas are global to the process: each is registered once.
        if onnx.defs.has(operator.kind, DOMAIN):
            continue
        results = [schema.FormalParameter("y", "T"), schema.FormalParameter("positions", "tensor(int64)")]
        kind = schema.AttrType.INTS if operator.argument == "is" else schema.AttrType.FLOAT
        onnx.defs.register_schema(
            schema(
                operator.kind,
                DOMAIN,
                1,
                inputs=[schema.FormalParameter("x", "T")],
                outputs=results[: operator.outputs],
                type_constraints=[("T", [f"tensor({t})" for t in ("float16", "bfloat16", "float", "double")], "")],
                attributes=[schema.Attribute(operator.attribute, kind, "")],
            )
        )
    own = values.Opset(DOMAIN, 1)

    def writer(operator: _Operator) -> Callable[..., Any]:
        def write(self: Any, argument: Any) -> Any:
            value = [int(n) for n in argument] if operator.argument == "is" else float(argument)
            return getattr(own, operator.kind)(self, **{operator.attribute: value})

        return write

    names = {name: name.split("::") for name in _BY_TORCH}
    return {
        getattr(getattr(torch.ops, space), name).default: writer(_BY_TORCH[whole])
        for whole, (space, name) in names.items()
    }


def symbolics() -> dict[str, Callable[..., Any]]:
    """Return functions that write the operators for the old exporter, by name of torch's operator."""
    torch = library("torch")

    def writer(operator: _Operator) -> Callable[..., Any]:
        def write(graph: Any, x: Any, argument: Any) -> Any:
            value = torch.onnx.symbolic_helper._maybe_get_const(argument, operator.argument)
            if not isinstance(value, list | tuple | float):
                raise ValueError(f"{operator.kind}: expected a constant {operator.attribute}, got one of the input's")
            size = () if isinstance(value, float) else [int(n) for n in value]
            # The suffix of a name is torch's notation for the type of an attribute: integers, or a float.
            attribute = {"size_i": size} if size else {f"{operator.attribute}_f": value}
            op = graph.op(f"{DOMAIN}::{operator.kind}", x, **attribute, outputs=operator.outputs)
            shape = torch.onnx.symbolic_helper._get_tensor_sizes(x)
            for output in [op] if operator.outputs == 1 else op:  # without types, torch warns on the standard error
                output.setType(x.type().with_sizes([*output_shape(shape, size)]))
            return op

        return write

    return {name: writer(operator) for name, operator in _BY_TORCH.items()}


# -- importers ---------------------------------------------------------------------------------------


def _adaptive(
    whole: type[Layer], windows: Callable[..., Layer], kind: type[AdaptiveAveragePool | AdaptiveMaxPool]
) -> Callable[[Builder, OnnxNode], Activation]:
    """Return the importer of an adaptive pooling; if all windows have one size, it becomes a pooling with a stride."""

    def operator(build: Builder, op: OnnxNode) -> Activation:
        size = tuple(int(n) for n in op.attributes["size"])
        if set(size) == {1}:
            return global_pool(build, op, whole, windows)
        value = build.with_positions(op)
        extents = value.node.shape[:-1]
        if any(n % m for n, m in zip(extents, size)):
            return value.of(build.add(op, kind(size), value.node))
        kernel = tuple(n // m for n, m in zip(extents, size))
        return value if math.prod(kernel) == 1 else value.of(build.add(op, windows(kernel), value.node))

    return operator


def _channel_dropout(build: Builder, op: OnnxNode) -> Activation:
    value = build.value(op)
    if not value.spatial:  # of a flattened value, every feature is a channel
        value = build.samples(op)
    # The file has the rate in float32; use the shortest decimal number with that value.
    rate = float(str(np.float32(op.attributes["rate"])))
    return value.of(build.add(op, ChannelDropout(rate), value.node))


#: Importers by operator.
OWN_OPERATORS: dict[str, Callable[[Builder, OnnxNode], Activation]] = {
    "AdaptiveAveragePool": _adaptive(GlobalAveragePool, AveragePool, AdaptiveAveragePool),
    "AdaptiveMaxPool": _adaptive(GlobalMaxPool, MaxPool, AdaptiveMaxPool),
    "ChannelDropout": _channel_dropout,
}
