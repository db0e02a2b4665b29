"""Adaptive pooling of torch, which ONNX does not have: operators of our own, which `hg.from_torch` lets torch write.

Where the number of outputs does not divide the extents, the old exporter refuses it, and the new one writes means in
one and two dimensions as a selection of rows and a sum, which a rule of :mod:`.shaping` recognizes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from ..layers import AdaptiveAveragePool, AdaptiveMaxPool, AveragePool, GlobalAveragePool, GlobalMaxPool, Layer, MaxPool
from .files import library
from .graph import Activation, Builder, OnnxNode, Shape
from .sliding import global_pool

__all__ = ["ADAPTIVE", "DOMAIN", "pooled_shape", "symbolics", "translations"]

#: Domain of the operators ``AdaptiveAveragePool`` and ``AdaptiveMaxPool``, with the attribute `size`.
DOMAIN = "halograd"
_OPERATORS = {"avg": ("AdaptiveAveragePool", 1), "max": ("AdaptiveMaxPool", 2)}


def pooled_shape(shape: Shape, size: Sequence[int]) -> Shape:
    """Return the extents ``(N, C, *size)`` that an adaptive pooling makes of ``(N, C, *spatial)``."""
    return (*shape[: len(shape) - len(size)], *size)


# -- exporters of torch --------------------------------------------------------------------------------------


def translations() -> dict[Any, Callable[..., Any]]:
    """Return functions that write adaptive poolings for the new exporter, by torch's operator."""
    onnx, torch, values = library("onnx"), library("torch"), library("onnxscript.values")
    schema = onnx.defs.OpSchema
    for kind, outputs in _OPERATORS.values():
        if onnx.defs.has(kind, DOMAIN):
            continue
        results = [schema.FormalParameter("y", "T"), schema.FormalParameter("positions", "tensor(int64)")]
        onnx.defs.register_schema(
            schema(
                kind,
                DOMAIN,
                1,
                inputs=[schema.FormalParameter("x", "T")],
                outputs=results[:outputs],
                type_constraints=[("T", [f"tensor({t})" for t in ("float16", "bfloat16", "float", "double")], "")],
                attributes=[schema.Attribute("size", schema.AttrType.INTS, "")],
            )
        )
    own = values.Opset(DOMAIN, 1)

    def writer(kind: str) -> Callable[..., Any]:
        return lambda self, output_size: getattr(own, kind)(self, size=[int(n) for n in output_size])

    return {
        getattr(torch.ops.aten, f"adaptive_{name}_pool{axes}d").default: writer(kind)
        for (name, (kind, _)), axes in itertools.product(_OPERATORS.items(), (1, 2, 3))
    }


def symbolics() -> dict[str, Callable[..., Any]]:
    """Return functions that write adaptive poolings for the old exporter, by torch's operator."""
    torch = library("torch")

    def writer(kind: str, outputs: int) -> Callable[..., Any]:
        def write(graph: Any, value: Any, size: Any) -> Any:
            sizes = torch.onnx.symbolic_helper._maybe_get_const(size, "is")
            if not isinstance(sizes, list | tuple):
                raise ValueError(f"{kind}: expected numbers of outputs, got one that follows the input")
            op = graph.op(f"{DOMAIN}::{kind}", value, size_i=[int(n) for n in sizes], outputs=outputs)
            before = torch.onnx.symbolic_helper._get_tensor_sizes(value)
            for output in [op] if outputs == 1 else op:  # without types, torch warns on the standard error
                output.setType(value.type().with_sizes([*before[: len(before) - len(sizes)], *sizes]))
            return op

        return write

    return {
        f"aten::adaptive_{name}_pool{axes}d": writer(*operator)
        for (name, operator), axes in itertools.product(_OPERATORS.items(), (1, 2, 3))
    }


# -- importers ---------------------------------------------------------------------------------------


def _adaptive(
    whole: type[Layer], windows: Callable[..., Layer], kind: type[AdaptiveAveragePool | AdaptiveMaxPool]
) -> Callable[[Builder, OnnxNode], Activation]:
    """Return the importer of an adaptive pooling; windows of one size are those of a pooling with a stride."""

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


#: Importers by operator.
ADAPTIVE: dict[str, Callable[[Builder, OnnxNode], Activation]] = {
    "AdaptiveAveragePool": _adaptive(GlobalAveragePool, AveragePool, AdaptiveAveragePool),
    "AdaptiveMaxPool": _adaptive(GlobalMaxPool, MaxPool, AdaptiveMaxPool),
}
