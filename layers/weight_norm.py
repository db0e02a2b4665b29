"""Weight normalization: weights as directions and lengths, made into weights at every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from .parameter import Parameter

if TYPE_CHECKING:
    from ..program.context import Context

__all__ = ["lower_weight_norm", "with_lengths"]


def with_lengths(specs: Mapping[str, Parameter]) -> dict[str, Parameter]:
    """Parameters of a layer with `w` as directions only, and `g` ``(K,)``: the length of those of each filter.

    Lengths begin with sqrt(2), which He's weights have on average.
    """
    lengths = Parameter(specs["w"].shape[:1], math.sqrt(2.0))
    return {"w": specs["w"], "g": lengths, **{key: spec for key, spec in specs.items() if key != "w"}}


def lower_weight_norm(context: Context, lower: Callable[[Context], Callable[[], None]]) -> Callable[[], None]:
    """Lower a layer with the weights ``g[k] * w[k] / |w[k]|`` in place of its parameters (Salimans and Kingma 2016).

    Gradients of directions and lengths follow from that of the weights on every rank by itself, and are summed like
    those of other parameters, as they are linear in it. Communication: none beside.
    """
    given, grads = context.params, context.grads
    v, g, lengths = given["w"], given["g"], (given["w"].shape[0], *(1 for _ in given["w"].shape[1:]))
    made = context.scratch(v.shape, v.dtype)
    norms, sums = context.scratch(lengths, context.wide), context.scratch(lengths, "float64")
    unit = context.scratch(v.shape, context.wide)
    views = {"v": v, "g": g.reshape(*lengths), "norms": norms}
    context.run(context.kernel(_normalize, **views, w=made, unit=unit, sums=sums))
    context.params = {**given, "w": made}
    context.grads = {**grads, "w": context.scratch(v.shape, grads["w"].dtype)}
    backward = lower(context)

    def both() -> None:
        backward()
        if context.frozen:
            return
        work = {"unit": context.scratch(v.shape, context.wide), "product": context.scratch(v.shape, context.wide)}
        work |= {"sums": context.scratch(lengths, "float64"), "factor": context.scratch(lengths, context.wide)}
        found = {"dw": context.grads["w"], "dv": grads["w"], "dg": grads["g"].reshape(*lengths)}
        context.run(context.kernel(_gradients, **views, **found, **work))
        context.grads = grads  # those of several calls of the layer are added up

    return both


def _others(array: Any) -> tuple[int, ...]:
    """All axes but that of the filters."""
    return tuple(range(1, array.ndim))


def _normalize(environment: Any, v: Any, g: Any, norms: Any, w: Any, unit: Any, sums: Any) -> Callable[[], None]:
    """``w = g * v / |v|``, and the norms."""

    def run() -> None:
        if v.size:
            np.multiply(v, v, out=unit)
            np.add.reduce(unit, axis=_others(v), dtype=np.float64, out=sums, keepdims=True)
            np.sqrt(sums, out=norms, casting="same_kind")
            np.divide(v, norms, out=unit)
            np.multiply(unit, g, out=w)

    return run


def _gradients(
    environment: Any, v: Any, g: Any, norms: Any, dw: Any, dv: Any, dg: Any, **work: Any
) -> Callable[[], None]:
    """``dg = sum dw * u`` and ``dv = g / |v| * (dw - dg * u)`` with ``u = v / |v|``."""
    unit, product, sums, factor = (work[key] for key in ("unit", "product", "sums", "factor"))

    def run() -> None:
        if not v.size:
            return
        np.divide(v, norms, out=unit)
        np.multiply(dw, unit, out=product)
        np.add.reduce(product, axis=_others(v), dtype=np.float64, out=sums, keepdims=True)
        np.copyto(dg, sums, casting="same_kind")
        np.multiply(unit, dg, out=unit)
        np.subtract(dw, unit, out=product)
        np.divide(g, norms, out=factor)
        np.multiply(product, factor, out=dv)

    return run
