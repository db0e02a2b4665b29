"""Activations and sums of packed arrays by oneDNN; one pass each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from halograd.kernels.checks import same_elements
from halograd.kernels.kernel import Kernel
from halograd.kernels.onednn import abi as c
from halograd.kernels.onednn.program import Engine, Memory, Program, ReferenceOnly

__all__ = ["activation", "add"]

# Name: algorithm, and the one whose gradient is formed from the output.
_KINDS = {
    "relu": (c.RELU, c.RELU_BY_OUTPUT),
    "leaky_relu": (c.RELU, c.RELU_BY_OUTPUT),
    "sigmoid": (c.LOGISTIC, c.LOGISTIC_BY_OUTPUT),
    "tanh": (c.TANH, c.TANH_BY_OUTPUT),
    "gelu": (c.GELU_ERF, None),
}


def _flat(p: Program, array: Any) -> Memory:
    return p.array(array, p.desc((array.size,), array.dtype, (1,)))


def _packed(*arrays: Any) -> bool:
    return all(a is None or a.flags.c_contiguous for a in arrays)


def activation(
    engine: Engine, kind: str, x: Any, y: Any, dy: Any, dx: Any, alpha: float
) -> tuple[Kernel, Kernel | None]:
    """Elementwise function and its gradient.

    Raises
    ------
    ReferenceOnly
        For strided arrays.
    """
    if not _packed(x, y, dy, dx):
        raise ReferenceOnly("oneDNN's activations are slow on strided arrays; use packed ones")
    slope = alpha if kind == "leaky_relu" else 0.0
    algorithm, by_output = _KINDS[kind]
    # From the output where that is possible: the layer may reuse the memory of its input.
    from_output = by_output is not None and slope >= 0
    p = Program(engine)
    source, target = _flat(p, x), _flat(p, y)
    forward = c.KEEPING_RELU if algorithm == c.RELU and slope == 0 else (algorithm, slope, 0.0)
    pd = p.descriptor("eltwise_forward", c.FORWARD_TRAINING, forward[0], source.desc, target.desc, *forward[1:])
    p.step(pd, {c.SRC: source, c.DST: target})
    if dx is None:
        return p.kernel(), None
    q = Program(engine)
    data, gradient, result = _flat(q, y if from_output else x), _flat(q, dy), _flat(q, dx)
    backward = by_output if from_output else algorithm
    hint = q.hint("eltwise_forward", c.FORWARD_TRAINING, backward, data.desc, data.desc, slope, 0.0)
    descs = (result.desc, gradient.desc, data.desc)
    pd = q.descriptor("eltwise_backward", backward, *descs, slope, 0.0, hint)
    index = c.DST if from_output else c.SRC
    q.step(pd, {index: data, c.DIFF_DST: gradient, c.DIFF_SRC: result})
    return p.kernel(), q.kernel()


def add(engine: Engine, xs: Sequence[Any], y: Any, relu: bool) -> Kernel:
    """Sum of two or more arrays; `y` may be one of them.

    Raises
    ------
    ReferenceOnly
        For strided arrays, a single term, or `y` as a term twice.
    """
    same = [x for x in xs if same_elements(x, y)]
    if len(xs) < 2 or len(same) > 1 or not _packed(*xs, y):
        raise ReferenceOnly("oneDNN's sums: expected two or more packed arrays, y at most once among them")
    # In place works on the first operand only.
    first, second, *rest = same + [x for x in xs if not any(x is s for s in same)]
    p = Program(engine)
    left, right, out = _flat(p, first), _flat(p, second), _flat(p, y)
    more = [_flat(p, x) for x in rest]
    operations: list[tuple[Any, ...]] = [("binary", c.BINARY_ADD, m.desc) for m in more]
    if relu:
        operations.append(("relu",))
    pd = p.descriptor("binary", c.BINARY_ADD, left.desc, right.desc, out.desc, attributes=p.attributes(*operations))
    arguments = {c.SRC: left, c.SRC_1: right, c.DST: out}
    for i, m in enumerate(more):
        arguments[c.POST_OPERATION * (i + 1) | c.SRC_1] = m
    p.step(pd, arguments)
    return p.kernel()
