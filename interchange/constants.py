"""Import of operators with a constant array: sums and products become `Embedding` and `Scale`, trained or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from ..dtensor import axis_names
from ..layers import Affine, Embedding, Layer, Scale, Token
from .graph import Activation, Builder, OnnxConstant, OnnxNode
from .patterns import permuted

__all__ = ["along", "joined", "numbers_along", "with_tokens"]


def joined(build: Builder, op: OnnxNode) -> Activation:
    """Import Add, Sub, Mul or Div of a value and a constant array."""
    first = op.inputs[0] in build.graph.constants
    name, i = op.inputs[first], int(not first)
    constant = build.constant(op, i)
    assert constant is not None
    if op.kind == "Div" and first:
        raise build.refused(op, "a constant divisor", "one that depends on the data")
    if constant.origin == "unknown":
        raise build.refused_array(op)
    # x - c and x / c become x + (-c) and x * (1 / c), whose parameters would be trained differently.
    inverted = op.kind == "Div" or (op.kind == "Sub" and not first)
    if inverted and not constant.is_fixed:
        raise build.refused(
            op,
            "a learned array that is added or multiplied",
            f"the parameter {constant.name!r}",
            "write x + p in place of x - p, and x * p in place of x / p",
        )
    value = build.value(op, int(first))
    if op.kind == "Sub" and first:
        # c - x = -x + c
        value = value.of(build.add(op.part("negative"), Affine(-1.0), value.node))
    change: Callable[[np.ndarray], np.ndarray] = np.asarray
    if inverted:
        change = np.negative if op.kind == "Sub" else np.reciprocal
    return along(build, op, value, name, constant, change)


def numbers_along(build: Builder, op: OnnxNode, value: Activation, key: str, axis: int) -> Activation:
    """Import the numbers `key` ("factor" or "shift") of an `Affine` along an `axis` other than the channels."""
    numbers = np.asarray(op.attributes[key], np.float64)
    extents = build.shape(op.inputs[0])
    shape = (*(1 for _ in extents[:axis]), numbers.size, *(1 for _ in extents[axis + 1 :]))
    if numbers.size == 1:
        number = float(numbers.reshape(()))
        layer = Affine(number) if key == "factor" else Affine(1.0, number)
        return value.of(build.add(op.part(key), layer, value.node))
    kind = "Mul" if key == "factor" else "Add"
    constant = OnnxConstant.of(numbers.reshape(shape), origin="buffer")
    return along(build, op.part(key).changed(kind=kind), value, op.inputs[0], constant)


def along(
    build: Builder,
    op: OnnxNode,
    value: Activation,
    name: str,
    constant: OnnxConstant,
    change: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> Activation:
    """Import the sum or product of a value, named `name` in the graph, with ``change(constant)``."""
    extents, shape = build.shape(name), value.node.shape
    # Constants are broadcast from the last axis, so leading axes may be missing; one per sample (axis 0) is no layer.
    full = (1,) * (len(extents) - len(constant.shape)) + constant.shape
    if len(full) > len(extents) or full[0] != 1 or any(n not in (1, m) for n, m in zip(full, extents)):
        raise build.refused(op, f"an array that is broadcast over samples of {extents[1:]}", f"{constant.shape}")
    if value.pooled:  # (N, C, 1, 1) in ONNX
        ours: tuple[int, ...] = full[1:2]
    elif value.last or len(shape) == 1:
        ours = full[1:]
    else:
        ours = (*full[2:], full[1])

    def order(array: np.ndarray) -> np.ndarray:
        array = array.reshape(full)[0]
        # One number per flattened feature, in torch's order.
        if value.spatial and array.size > 1:
            return change(permuted(array.reshape(-1), value.spatial)).reshape(ours)
        if value.pooled or value.last or len(shape) == 1:
            return change(array).reshape(ours)
        return change(np.moveaxis(array, 0, -1))

    names = axis_names(len(shape) + 1)[1:]
    axes = tuple(axis for axis, n in zip(names, ours) if n > 1)
    layer: Layer
    # A difference is a sum, too: `change`, or the negated value, has its sign.
    if op.kind in ("Mul", "Div"):
        key, layer = "gamma", Scale(axes=axes, trained=not constant.is_fixed)
        ours = ours[-1:] if axes == ("channel",) else ours
    else:
        key, layer = "w", Embedding(axes, trained=not constant.is_fixed)
    if constant.is_fixed:
        constant = replace(constant, name="")  # its numbers may be changed, so it is not the array of that name
    initial = build.initial(constant, lambda array: order(array).reshape(ours), ours)
    return value.of(build.array(op, layer.initialized(**{key: initial}), value.node, constant))


def with_tokens(build: Builder, op: OnnxNode) -> Activation:
    """Import Concat of learned tokens, such as a class token, and a sequence."""
    expected = "learned positions (1, count, C) before those of one value (N, L, C)"
    constant = build.graph.constants.get(op.inputs[0])
    if constant is None or len(op.inputs) != 2 or op.inputs[1] in build.graph.constants:
        raise build.refused(op, expected, "another array")
    value, extents = build.value(op, 1), build.shape(op.inputs[1])
    # The axis of positions in (N, L, C), or (N, C, L).
    position = 1 if value.last else 2
    axis = op.attributes["axis"] % len(extents)
    if len(extents) != 3 or value.spatial or axis != position or len(constant.shape) != 3 or constant.shape[0] != 1:
        raise build.refused(op, expected, f"an array {constant.shape} along axis {axis} of {extents}")
    build.check_trained(op, constant)
    shape = constant.shape[position], constant.shape[3 - position]

    def order(array: np.ndarray) -> np.ndarray:
        return array[0] if value.last else array[0].T

    layer = Token(shape[0]).initialized(w=build.initial(constant, order, shape))
    return value.of(build.array(op, layer, value.node, constant))
