"""Patterns of several operators that are one layer (norms, GELU, SiLU, dense layers), and fusion of activations.

A rule examines one operation and its readers, and replaces all operations that it recognizes by one.
Exporters also decompose one function of torch into several operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..layers import ELU, GELU, HardSigmoid, HardSwish, Layer, LeakyReLU, Mish, ReLU, Sigmoid, SiLU, Softplus, Tanh
from .attention import attention, number_of
from .graph import Graph, OnnxConstant, OnnxNode, following
from .shaping import SPATIAL

__all__ = [
    "ACTIVATIONS",
    "DECOMPOSED",
    "RULES",
    "activation_of",
    "has_numbers_of_torch",
    "per_channel",
    "permuted",
    "recognize",
]

#: Activations that other layers can fuse, by operator; built from the operator's attributes.
ACTIVATIONS: dict[str, Callable[[dict[str, Any]], Layer]] = {
    "Relu": lambda attributes: ReLU(),
    "LeakyRelu": lambda attributes: LeakyReLU(attributes.get("alpha", 0.01)),
    "Sigmoid": lambda attributes: Sigmoid(),
    "Tanh": lambda attributes: Tanh(),
    "Elu": lambda attributes: ELU(attributes.get("alpha", 1.0)),
    "Silu": lambda attributes: SiLU(),
    "Swish": lambda attributes: SiLU(),
    "HardSwish": lambda attributes: HardSwish(),
    "HardSigmoid": lambda attributes: HardSigmoid(),
    "Gelu": lambda attributes: GELU(attributes.get("approximate", "none")),
    "Softplus": lambda attributes: Softplus(),
    "Mish": lambda attributes: Mish(),
}
#: Operators whose layers can fuse an activation.
_FUSE = {"Conv", "BatchNormalization", "InstanceNormalization", "GroupNorm", "LayerNormalization", "Add"}


def activation_of(op: OnnxNode) -> Layer | None:
    """Return a new layer of the activation that is fused into an operation, or None."""
    kind, attributes = op.attributes.get("activation", (None, {}))
    return None if kind is None else ACTIVATIONS[kind](attributes)


def recognize(graph: Graph, path: Path) -> None:
    """Apply all rules in order, each until it changes nothing. Modifies the graph of `path`."""
    for rule in RULES:
        before: list[OnnxNode] = []
        while before != graph.operations:
            before = list(graph.operations)
            for op in before:
                # A rule creates new objects for changed operations; the next round visits these.
                if any(op is other for other in graph.operations):
                    with following(path, op):
                        rule(graph, op)


def _nothing(graph: Graph, op: OnnxNode) -> None:
    """Remove a product with 1, a quotient by 1, and a sum or difference with 0."""
    neutral = {"Mul": 1.0, "Div": 1.0, "Add": 0.0, "Sub": 0.0}.get(op.kind)
    # 1 / x and 0 - x are not x.
    if neutral is None or (op.kind in ("Div", "Sub") and op.inputs[0] in graph.constants):
        return
    # A learned factor begins at 1, too: `_operands` returns numbers that are not trained.
    value, number = _operands(graph, op)
    if number == neutral and graph.shapes[op.outputs[0]] == graph.shapes[value]:
        graph.leave_out(op, value)


def _same_by_strides(graph: Graph, op: OnnxNode) -> None:
    """Remove an as_strided that keeps the shape: a flattening, then a gather of all elements in order into the same
    shape.
    """
    picked = graph.only_reader(op.outputs[0]) if op.kind == "Reshape" else None
    if picked is None or picked.kind != "Gather" or picked.inputs[1] not in graph.constants:
        return
    if len(graph.shapes[op.outputs[0]]) != 1 or graph.shapes[picked.outputs[0]] != graph.shapes[op.inputs[0]]:
        return
    indices = graph.constants[picked.inputs[1]].read().reshape(-1)
    if np.array_equal(indices, np.arange(len(indices))):
        graph.replace([op, picked], picked.changed(kind="Identity", inputs=op.inputs[:1], attributes={}))


def _pixels(graph: Graph, op: OnnxNode) -> None:
    """Recognize a pixel shuffle: the positions in a cell are axes that move to the channels, or from them."""
    moved = graph.only_reader(op.outputs[0]) if op.kind == "Reshape" else None
    whole = None if moved is None or moved.kind != "Transpose" else graph.only_reader(moved.outputs[0])
    if moved is None or whole is None or whole.kind != "Reshape":
        return
    x, split, y = (graph.shapes[name] for name in (op.inputs[0], op.outputs[0], whole.outputs[0]))
    axes, order = len(x) - 2, tuple(moved.attributes.get("perm", ()))
    if axes < 1 or len(y) != len(x) or x[0] != y[0]:
        return
    kind, coarse, fine = ("PixelUnshuffle", y, x) if y[2] < x[2] else ("PixelShuffle", x, y)
    factor = fine[2] // coarse[2]
    cells = tuple(n for extent in coarse[2:] for n in (extent, factor))
    if kind == "PixelUnshuffle":
        # (N, C, H, r, W, r) -> (N, C, r, r, H, W)
        expected = (*fine[:2], *cells), (0, 1, *range(3, 2 + 2 * axes, 2), *range(2, 2 + 2 * axes, 2))
    else:
        # (N, C, r, r, H, W) -> (N, C, H, r, W, r)
        order_of_pairs = (i for a in range(2, 2 + axes) for i in (axes + a, a))
        expected = (*fine[:2], *(factor,) * axes, *coarse[2:]), (0, 1, *order_of_pairs)
    fits = coarse[1] == fine[1] * factor**axes and fine[2:] == tuple(n * factor for n in coarse[2:])
    if fits and (split, order) == expected:
        graph.replace([op, moved, whole], whole.changed(kind=kind, inputs=op.inputs[:1], attributes={"factor": factor}))


def _channel_shuffle(graph: Graph, op: OnnxNode) -> None:
    """Recognize a channel shuffle: the groups are an axis that moves after the channels of a group."""
    moved = graph.only_reader(op.outputs[0]) if op.kind == "Reshape" else None
    whole = None if moved is None or moved.kind != "Transpose" else graph.only_reader(moved.outputs[0])
    if moved is None or whole is None or whole.kind != "Reshape":
        return
    x, split, y = (graph.shapes[name] for name in (op.inputs[0], op.outputs[0], whole.outputs[0]))
    if x != y or len(x) < 3 or len(split) != len(x) + 1 or (split[0], *split[3:]) != (x[0], *x[2:]):
        return
    if tuple(moved.attributes.get("perm", ())) == (0, 2, 1, *range(3, len(split))):
        attributes = {"groups": split[1]}
        new = whole.changed(kind="ChannelShuffle", inputs=op.inputs[:1], attributes=attributes)
        graph.replace([op, moved, whole], new)


def _group_norm(graph: Graph, op: OnnxNode) -> None:
    """Recognize a group norm: reshape to (N, G, -1), instance norm without scale, reshape back, factor, summand."""
    if op.kind != "Reshape" or len(graph.shapes[op.outputs[0]]) != 3:
        return
    norm = graph.only_reader(op.outputs[0])
    if norm is None or norm.kind != "InstanceNormalization" or not _is_plain(graph, norm):
        return
    back = graph.only_reader(norm.outputs[0])
    x = op.inputs[0]
    if back is None or back.kind != "Reshape" or graph.shapes[back.outputs[0]] != graph.shapes[x]:
        return
    groups, channels = graph.shapes[op.outputs[0]][1], graph.shapes[x][1]
    if channels % groups:
        return
    chain, affine = [op, norm, back], ["", ""]
    for i, kind in enumerate(("Mul", "Add")):
        reader = graph.only_reader(chain[-1].outputs[0])
        if reader is None or reader.kind != kind:
            break
        (other,) = [name for name in reader.inputs if name != chain[-1].outputs[0]] or [""]
        # A buffer is not trained, so it stays a separate layer.
        if not per_channel(graph, other, len(graph.shapes[x]), channels) or graph.constants[other].origin == "buffer":
            break
        chain.append(reader)
        affine[i] = other
    attributes = {"num_groups": groups, "epsilon": norm.attributes.get("epsilon", 1e-5)}
    last = chain[-1]
    graph.replace(chain, last.changed(kind="GroupNorm", inputs=(x, *affine), attributes=attributes))


def _is_plain(graph: Graph, norm: OnnxNode) -> bool:
    """Return whether a norm has no parameters: the exporter wrote ones and zeros, without names, for them."""
    scale, shift = (graph.constants.get(name) for name in norm.inputs[1:3])
    return scale is not None and shift is not None and scale.is_all(1) and shift.is_all(0)


def _gated_by_itself(graph: Graph, op: OnnxNode) -> None:
    """Recognize x * sigmoid(x) and x * hard_sigmoid(x)."""
    kinds = {"Sigmoid": "Silu", "HardSigmoid": "HardSwish"}
    product = graph.only_reader(op.outputs[0]) if op.kind in kinds else None
    if product is None or product.kind != "Mul" or op.inputs[0] not in product.inputs:
        return
    if not has_numbers_of_torch(op):
        return
    graph.replace([op, product], product.changed(kind=kinds[op.kind], inputs=op.inputs[:1], attributes={}))


def has_numbers_of_torch(op: OnnxNode) -> bool:
    """Return whether an activation has torch's constants: HardSigmoid 1 / 6 and 1 / 2, Swish 1; True for all others."""
    if op.kind == "Swish":
        return bool(op.attributes.get("alpha", 1.0) == 1)
    # ONNX's default slope differs from torch's.
    slope, offset = op.attributes.get("alpha", 0.2), op.attributes.get("beta", 0.5)
    return op.kind != "HardSigmoid" or (math.isclose(slope, 1 / 6, rel_tol=1e-6) and offset == 0.5)


def _gelu(graph: Graph, op: OnnxNode) -> None:
    """Recognize x * (1 + erf(x / sqrt(2))) / 2, in any order of factors."""
    before = graph.maker(op.inputs[0]) if op.kind == "Erf" else None
    if before is None or before.kind not in ("Div", "Mul") or graph.only_reader(before.outputs[0]) is not op:
        return
    number = _number(graph, before.inputs[1])
    root = math.sqrt(2) if before.kind == "Div" else math.sqrt(0.5)
    one_more = graph.only_reader(op.outputs[0])
    if number is None or not math.isclose(number, root, rel_tol=1e-6) or one_more is None or one_more.kind != "Add":
        return
    if not _has_number(graph, one_more, 1.0):
        return
    _end_gelu(graph, before.inputs[0], [before, op, one_more])


def _end_gelu(graph: Graph, x: str, chain: list[OnnxNode]) -> None:
    """Recognize the products with x and one half that end a GELU, and replace the whole chain."""
    left = {"x", "half"}
    while left:
        product = graph.only_reader(chain[-1].outputs[0])
        if product is None or product.kind != "Mul":
            return
        (other,) = [name for name in product.inputs if name != chain[-1].outputs[0]] or [""]
        inner = graph.maker(other)
        if other == x and "x" in left:
            left.remove("x")
        elif _has_number(graph, product, 0.5) and "half" in left:
            left.remove("half")
        elif inner is not None and inner.kind == "Mul" and x in inner.inputs and _has_number(graph, inner, 0.5):
            left -= {"x", "half"}
            if graph.only_reader(other) is product:  # else another operation needs the half of x, too
                chain.insert(0, inner)
        else:
            return
        chain.append(product)
    graph.replace(chain, chain[-1].changed(kind="Gelu", inputs=(x,), attributes={}))


def _has_number(graph: Graph, op: OnnxNode, number: float) -> bool:
    """Return whether one input of an operation is the constant `number`, which is not trained."""
    return any(_number(graph, name) == number for name in op.inputs)


def _linear(graph: Graph, op: OnnxNode) -> None:
    """Recognize a product with a matrix, with or without an added vector, as a dense layer at every position."""
    if op.kind != "MatMul" or op.inputs[1] not in graph.constants or op.inputs[0] in graph.constants:
        return
    summed = graph.only_reader(op.outputs[0])
    others = [] if summed is None or summed.kind != "Add" else [n for n in summed.inputs if n != op.outputs[0]]
    units = graph.constants[op.inputs[1]].shape[-1]
    fits = bool(others) and others[0] in graph.constants and graph.constants[others[0]].shape in ((units,), (1, units))
    fits = fits and graph.constants[others[0]].origin != "buffer"
    if summed is None or not fits:
        graph.replace([op], op.changed(kind="Linear", inputs=(*op.inputs, "")))
        return
    graph.replace([op, summed], summed.changed(kind="Linear", inputs=(*op.inputs, others[0]), attributes={}))


def _affine(graph: Graph, op: OnnxNode) -> None:
    """Merge products and sums with constants that are not trained, several in sequence, into one.

    A constant is one number, or has one element per element of one axis.
    """
    if op.kind == "Neg":
        graph.replace([op], op.changed(kind="Affine", attributes=_AFFINE | {"factor": -1.0}))
        return
    value, name = _with_constant(graph, op)
    if op.kind not in ("Add", "Sub", "Mul", "Div") or not name or not graph.constants[name].is_fixed:
        return
    axis = _axis_of(graph, name, value)
    # The constant varies along samples or several axes, or the value is broadcast: not this layer.
    if axis == 0 or graph.shapes[op.outputs[0]] != graph.shapes[value]:
        return
    number: Any = graph.constants[name].scalar()
    if axis is not None:
        number = graph.constants[name].read().astype(np.float64).reshape(-1)
    number, first = np.asarray(number), op.inputs[0] == name
    if op.kind == "Div" and (first or not number.all()):
        return
    factor, shift = {
        "Add": lambda: (1.0, number),
        "Sub": lambda: (-1.0, number) if first else (1.0, -number),
        "Mul": lambda: (number, 0.0),
        "Div": lambda: (1 / number, 0.0),
    }[op.kind]()
    before, chain = graph.maker(value), [op]
    if before is not None and before.kind == "Affine" and graph.only_reader(value) is op:
        earlier = before.attributes["axis"]
        if earlier is None or axis is None or earlier == axis:
            value, chain, axis = before.inputs[0], [before, op], earlier if axis is None else axis
            # factor * (f * x + s) + shift = (factor * f) * x + (factor * s + shift)
            inner = (np.asarray(before.attributes[key]) for key in ("factor", "shift"))
            factor, shift = (factor * n + more for n, more in zip(inner, (0.0, shift)))
    attributes = {"factor": _numbers(factor), "shift": _numbers(shift), "axis": axis, "kind": op.kind}
    graph.replace(chain, op.changed(kind="Affine", inputs=(value,), attributes=attributes))


#: Attributes of products and sums: numbers, the axis along which they vary, and the operator's name for messages.
_AFFINE: dict[str, Any] = {"factor": 1.0, "shift": 0.0, "axis": None, "kind": "Mul"}


def _random_factors(graph: Graph, op: OnnxNode) -> None:
    """Join a dropout that does not scale what it keeps with the factor before it."""
    before = graph.maker(op.inputs[0]) if op.kind == "RandomFactors" and op.attributes["scale"] == 1 else None
    factor = None if before is None else number_of(before)
    if before is not None and factor is not None and graph.only_reader(op.inputs[0]) is op:
        graph.replace([before, op], op.changed(inputs=before.inputs, attributes=op.attributes | {"scale": factor}))


def _with_constant(graph: Graph, op: OnnxNode) -> tuple[str, str]:
    """Return the names of the value and of the constant of an operation with one of each; else empty names."""
    constants = [name for name in op.inputs if name in graph.constants]
    values = [name for name in op.inputs if name not in graph.constants]
    return (values[0], constants[0]) if len(constants) == len(values) == 1 else ("", "")


def _axis_of(graph: Graph, name: str, value: str) -> int | None:
    """Return the axis of a value along which a constant varies; None for a single number, 0 without such an axis."""
    constant, extents = graph.constants[name], graph.shapes[value]
    if math.prod(constant.shape) == 1:
        return None
    shape = (1,) * (len(extents) - len(constant.shape)) + constant.shape
    axes = [axis for axis, n in enumerate(shape) if n > 1]
    return axes[0] if len(axes) == 1 and len(shape) == len(extents) and shape[axes[0]] == extents[axes[0]] else 0


def _numbers(value: float | np.ndarray) -> float | tuple[float, ...]:
    """Return an array as a number if it has one element, else as a tuple."""
    array = np.ravel(value)
    return float(array[0]) if array.size == 1 else tuple(array.tolist())


def _channel_scale(graph: Graph, op: OnnxNode) -> None:
    """Recognize a learned factor per element of an axis, with or without a learned summand after it."""
    value, name = _with_constant(graph, op)
    if op.kind != "Mul" or not name or graph.constants[name].is_fixed:
        return
    axis = _learned_axis(graph, name, value)
    if not axis:
        return
    attributes = {"axis": axis, "kind": op.kind}
    summed = graph.only_reader(op.outputs[0])
    _, other = ("", "") if summed is None or summed.kind != "Add" else _with_constant(graph, summed)
    learned = summed is not None and bool(other) and not graph.constants[other].is_fixed
    if summed is not None and learned and _learned_axis(graph, other, value) == axis:
        new = summed.changed(kind="ChannelScale", inputs=(value, name, other), attributes=attributes)
        graph.replace([op, summed], new)
    else:
        graph.replace([op], op.changed(kind="ChannelScale", inputs=(value, name, ""), attributes=attributes))


def _learned_axis(graph: Graph, name: str, value: str) -> int:
    """Return the axis of a value along which the learned constant `name` has one number per element; 0 without one."""
    axis, extents = _axis_of(graph, name, value), graph.shapes[value]
    # A single number belongs to an axis of extent 1, preferably that of the channels.
    if axis is None:
        return next((axis for axis in (1, len(extents) - 1) if extents[axis] == 1), 0)
    return axis


def _residual(graph: Graph, op: OnnxNode) -> None:
    """Fuse a shortcut that is added to the output of a batch norm and followed by a ReLU: one kernel computes all of
    it.
    """
    if op.kind != "Add" or any(name in graph.constants for name in op.inputs):
        return
    after = graph.only_reader(op.outputs[0])
    if after is None or after.kind != "Relu" or len({graph.shapes[name] for name in op.inputs}) > 1:
        return
    for i, name in enumerate(op.inputs):
        norm = graph.maker(name)
        if norm is None or norm.kind != "BatchNormalization" or graph.only_reader(name) is not op:
            continue
        if "activation" in norm.attributes:  # the norm already has a shortcut
            continue
        attributes = {**norm.attributes, "activation": ("Relu", {})}
        joined = norm.changed(inputs=(*norm.inputs, op.inputs[1 - i]), outputs=after.outputs, attributes=attributes)
        graph.replace([norm, op, after], joined)
        return


def _activation(graph: Graph, op: OnnxNode) -> None:
    """Fuse an activation into the layer before it."""
    if op.kind not in _FUSE or "activation" in op.attributes:
        return
    # Sums with an array, or of values of two shapes, become layers that fuse no activation.
    if op.kind == "Add" and (graph.constants.keys() & set(op.inputs) or len({graph.shapes[n] for n in op.inputs}) > 1):
        return
    activation = _activation_after(graph, op)
    # All calls of a layer have its activation.
    if activation is None or any(_activation_after(graph, call) != activation for call in _calls(graph, op)):
        return
    after = graph.only_reader(op.outputs[0])
    assert after is not None
    outputs = (after.outputs[0], *op.outputs[1:])
    graph.replace([op, after], op.changed(outputs=outputs, attributes={**op.attributes, "activation": activation}))


def _calls(graph: Graph, op: OnnxNode) -> list[OnnxNode]:
    """Return the other nodes of the same module (with weights of the same names), which become calls of one layer."""

    def weights(other: OnnxNode) -> set[str]:
        return {graph.constants[name].name for name in other.inputs if name in graph.constants} - {""}

    own = weights(op)
    same_module = (
        other for other in graph.operations if other is not op and (other.kind, other.module) == (op.kind, op.module)
    )
    return [other for other in same_module if own & weights(other)]


def _activation_after(graph: Graph, op: OnnxNode) -> tuple[str, dict[str, Any]] | None:
    """Return kind and attributes of the activation that is fused into an operation or, as its only reader, can be; or
    None.
    """
    if "activation" in op.attributes:
        fused: tuple[str, dict[str, Any]] = op.attributes["activation"]
        return fused
    after = graph.only_reader(op.outputs[0])
    if after is None or after.kind not in ACTIVATIONS or not has_numbers_of_torch(after):
        return None
    # An activation of a network output stays a separate layer, because losses take its input.
    return None if after.outputs[0] in graph.outputs else (after.kind, after.attributes)


def permuted(array: np.ndarray, spatial: Sequence[int]) -> np.ndarray:
    """Return `array` with its last axis, which is in torch's flattened order, in our order.

    torch flattens ``(C, *spatial)``, halograd ``(*spatial, C)``.

    >>> permuted(np.arange(6), (3,)).tolist()  # 2 channels, 3 positions
    [0, 3, 1, 4, 2, 5]
    """
    *before, size = array.shape
    channels = size // math.prod(spatial)
    separate = array.reshape(*before, channels, *spatial)
    return np.moveaxis(separate, len(before), -1).reshape(*before, size)


#: Operators that keep the order of the elements.
_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Identity")


def _number(graph: Graph, name: str) -> float | None:
    """Return the value of a scalar constant that is not trained, else None."""
    constant = graph.constants.get(name)
    return None if constant is None or not constant.is_fixed else constant.scalar()


def _operands(graph: Graph, op: OnnxNode) -> tuple[str, float | None]:
    """Return the data input and the number of an operation with one data input and one constant; else ("", None).

    The number is None if the constant is trained, or not a scalar.
    """
    values = [name for name in op.inputs if name not in graph.constants]
    numbers = [_number(graph, name) for name in op.inputs if name in graph.constants]
    return (values[0], numbers[0]) if len(values) == len(numbers) == 1 else ("", None)


def _axes(graph: Graph, op: OnnxNode) -> list[int]:
    """Return the axes that an operation reduces or inserts, counted from the front."""
    axes = op.attributes.get("axes", ())
    if len(op.inputs) > 1 and op.inputs[1] in graph.constants:
        axes = graph.constants[op.inputs[1]].read().reshape(-1).tolist()
    rank = len(graph.shapes[op.inputs[0]]) + (len(axes) if op.kind == "Unsqueeze" else 0)
    return [int(axis) % rank for axis in axes]


def _local_response_norm(graph: Graph, op: OnnxNode) -> None:
    """Recognize x / (k + alpha * mean of x * x over channels) ** beta; the mean is a pooling with one more axis."""
    power = graph.maker(op.inputs[1]) if op.kind == "Div" else None
    chain, numbers = [op], []
    # Backwards from the quotient: power, sum, product.
    for kind in ("Pow", "Add", "Mul"):
        if power is None or power.kind != kind or graph.only_reader(power.outputs[0]) is not chain[-1]:
            return
        value, number = _operands(graph, power)
        if not value or number is None:
            return
        chain.append(power)
        numbers.append(number)
        power = graph.maker(value)
    below = _pooled_squares(graph, power, chain)
    if below is None or below[0] != op.inputs[0]:
        return
    beta, k, alpha = numbers
    attributes = {"size": below[1], "alpha": alpha, "beta": beta, "k": k}
    graph.replace(chain[::-1], op.changed(kind="LocalResponseNorm", inputs=(op.inputs[0],), attributes=attributes))


def _pooled_squares(graph: Graph, op: OnnxNode | None, chain: list[OnnxNode]) -> tuple[str, int] | None:
    """Follow the mean over channels back to the squares, and append the operations to `chain`.

    Returns the name of the squared value and the number of channels of a window; None if `op` is no such mean.
    """
    kinds = iter(("AveragePool", "Pad", "Mul"))
    kind, size, pads = next(kinds), 0, []
    while op is not None:
        if op.kind != kind and op.kind not in _VIEWS:
            return None
        if graph.only_reader(op.outputs[0]) is not chain[-1]:
            return None
        chain.append(op)
        if op.kind == kind == "AveragePool":
            size, *others = op.attributes["kernel_shape"]
            if {*others, *op.attributes.get("strides", ())} != {1} or any(op.attributes.get("pads") or ()):
                return None
        elif op.kind == kind == "Pad":
            pads = graph.constants[op.inputs[1]].read().reshape(-1).tolist() if op.inputs[1] in graph.constants else []
            rank = len(graph.shapes[op.inputs[0]])
            no_padding = [0] * (2 * rank)
            # The expected padding of torch: the channels are at axis 2, after the added axis.
            no_padding[2], no_padding[2 + rank] = size // 2, (size - 1) // 2
            if pads != no_padding or op.attributes.get("mode", "constant") != "constant":
                return None
        elif op.kind == kind == "Mul":
            return (op.inputs[0], size) if op.inputs[0] == op.inputs[1] else None
        if op.kind == kind:
            kind = next(kinds)
        op = graph.maker(op.inputs[0])
    return None


def _softplus(graph: Graph, op: OnnxNode) -> None:
    """Recognize a softplus with its input in place of the result where the input is large; remove this case."""
    compared = graph.maker(op.inputs[0]) if op.kind == "Where" else None
    if compared is None or compared.kind != "Greater" or graph.only_reader(compared.outputs[0]) is not op:
        return
    limit = _number(graph, compared.inputs[1])
    soft = graph.maker(op.inputs[2])
    divided = soft if soft is not None and soft.kind == "Div" else None
    soft = graph.maker(divided.inputs[0]) if divided is not None else soft
    # Above torch's default of 20, softplus(x) is x to rounding in float32.
    if limit is None or limit < 20 or soft is None or soft.kind != "Softplus" or soft.inputs[0] != compared.inputs[0]:
        return
    # With torch's beta: softplus(beta * x) / beta.
    scaled = graph.maker(soft.inputs[0]) if divided is not None else None
    fits = op.inputs[1] == soft.inputs[0]
    if divided is not None:
        factor = op.inputs[1], _number(graph, divided.inputs[1])
        fits = scaled is not None and scaled.kind == "Mul" and _operands(graph, scaled) == factor
    if fits:
        # Softplus is computed without overflow here, so the branch is left out.
        graph.operations = [other for other in graph.operations if other is not compared]
        graph.leave_out(op, op.inputs[2])


def _limits(graph: Graph, op: OnnxNode) -> None:
    """Recognize Max or Min of a value and a number, or both in sequence, as Clip."""
    if op.kind not in ("Max", "Min"):
        return
    value, number = _operands(graph, op)
    if not value or number is None or graph.shapes[op.outputs[0]] != graph.shapes[value]:
        return
    key, other = ("min", "max") if op.kind == "Max" else ("max", "min")
    before, attributes, chain = graph.maker(value), {key: number}, [op]
    if before is not None and before.kind == "Clip" and len(before.inputs) == 1 and graph.only_reader(value) is op:
        both = attributes | before.attributes
        # If the limits cross, Max and Min in sequence depend on their order, which a Clip does not have.
        if set(before.attributes) == {other} and both["min"] < both["max"]:
            value, chain, attributes = before.inputs[0], [before, op], both
    graph.replace(chain, op.changed(kind="Clip", inputs=(value,), attributes=attributes))


def _stacked(graph: Graph, op: OnnxNode) -> None:
    """Recognize the sum or mean of values stacked along a new axis: an addition, and for the mean a division."""
    joined = graph.maker(op.inputs[0]) if op.kind in ("ReduceSum", "ReduceMean") else None
    if joined is None or joined.kind != "Concat" or graph.only_reader(joined.outputs[0]) is not op:
        return
    axis = joined.attributes["axis"] % len(graph.shapes[joined.outputs[0]])
    parts = [graph.maker(name) for name in joined.inputs]
    single = [part for part in parts if part is not None and part.kind == "Unsqueeze" and _axes(graph, part) == [axis]]
    if _axes(graph, op) != [axis] or op.attributes.get("keepdims", 1) or len(single) != len(parts) or len(parts) < 2:
        return
    if any(graph.only_reader(part.outputs[0]) is not joined for part in single):
        return
    values = tuple(part.inputs[0] for part in single)
    total = op.changed(kind="Add", inputs=values, attributes={})
    if op.kind == "ReduceMean":
        name = f"{op.outputs[0]}::sum"
        graph.shapes[name] = graph.shapes[op.outputs[0]]
        graph.constants[f"{name}::count"] = OnnxConstant.of(np.array(float(len(values))))
        mean = op.changed(kind="Div", inputs=(name, f"{name}::count"), attributes={})
        # After `op`, at whose position `replace` puts the sum.
        position = next(i for i, other in enumerate(graph.operations) if other is op)
        graph.operations.insert(position + 1, mean)
        total = total.part("sum").changed(outputs=(name,))
    graph.replace([*single, joined, op], total)


def _kept_axis(graph: Graph, op: OnnxNode) -> None:
    """Recognize a reduction along one axis that becomes an axis of extent 1 again, ``x.mean(1).unsqueeze(1)``."""
    if not op.kind.startswith("Reduce") or op.attributes.get("keepdims", 1) or len(_axes(graph, op)) != 1:
        return
    after, shape = graph.only_reader(op.outputs[0]), list(graph.shapes[op.inputs[0]])
    shape[_axes(graph, op)[0]] = 1
    if after is None or after.kind not in ("Unsqueeze", "Reshape") or graph.shapes[after.outputs[0]] != tuple(shape):
        return
    kept = op.changed(outputs=after.outputs, attributes={**op.attributes, "keepdims": 1})
    graph.replace([op, after], kept)


def _expanded(graph: Graph, op: OnnxNode) -> None:
    """Remove an Expand if its readers, products and sums with values of the full extents, broadcast its input too."""
    if op.kind != "Expand" or op.outputs[0] in graph.outputs:
        return
    output, value = op.outputs[0], op.inputs[0]
    if len(graph.shapes[value]) != len(graph.shapes[output]):
        return
    readers = graph.readers(output)
    others = [[name for name in reader.inputs if name != output] for reader in readers]
    fits = all(
        reader.kind in ("Mul", "Add", "Sub", "Div") and len(rest) == 1 and graph.shapes[rest[0]] == graph.shapes[output]
        for reader, rest in zip(readers, others)
    )
    if fits and readers:
        graph.leave_out(op, value)


def per_channel(graph: Graph, name: str, axes: int, channels: int) -> bool:
    """Return whether a constant has one number per channel of a value (N, C, *spatial), which has `axes` axes."""
    constant = graph.constants.get(name)
    if constant is None:
        return False
    shape = (1,) * (axes - len(constant.shape)) + constant.shape
    return len(shape) == axes and shape[1] == channels and math.prod(shape) == channels


def _softplus_by_parts(graph: Graph, op: OnnxNode) -> None:
    """Recognize log(1 + exp(x))."""
    added = graph.maker(op.inputs[0]) if op.kind == "Log" else None
    if added is None or added.kind != "Add":
        return
    value, number = _operands(graph, added)
    power = graph.maker(value) if number == 1 else None
    if power is not None and power.kind == "Exp" and _only_read_within(graph, [power, added, op]):
        graph.replace([power, added, op], op.changed(kind="Softplus", inputs=power.inputs, attributes={}))


def _only_read_within(graph: Graph, chain: Sequence[OnnxNode]) -> bool:
    """Return whether no other operation, and no output, reads the values before the last of these operations."""
    outputs = {name for op in chain[:-1] for name in op.outputs}
    readers = [op for op in graph.operations if outputs & set(op.inputs)]
    return not outputs & set(graph.outputs) and all(any(op is member for member in chain) for op in readers)


class _NormByParts:
    """Search for the operators of a norm, backwards from its last one.

    Attributes
    ----------
    chain
        Operators found so far.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.chain: list[OnnxNode] = []

    def maker(self, name: str, *kinds: str) -> OnnxNode | None:
        """Return the operation of one of these kinds that computes a value, and append it to the chain; else None."""
        op = self.graph.maker(name)
        if op is None or op.kind not in kinds:
            return None
        if not any(op is member for member in self.chain):
            self.chain.append(op)
        return op

    def divided(self, op: OnnxNode) -> tuple[str, str] | None:
        """Return numerator and denominator of a quotient, or of a product with a reciprocal; None for others."""
        if op.kind == "Div":
            return op.inputs[0], op.inputs[1]
        for value, factor in (op.inputs, op.inputs[::-1]) if op.kind == "Mul" else ():
            inverse = self.graph.maker(factor)
            if inverse is not None and inverse.kind == "Reciprocal":
                self.chain.append(inverse)
                return value, inverse.inputs[0]
            if inverse is not None and inverse.kind == "Div" and _number(self.graph, inverse.inputs[0]) == 1:
                self.chain.append(inverse)
                return value, inverse.inputs[1]
        return None

    def viewed(self, name: str) -> str:
        """Follow views and broadcasts without effect back from a value; append them to `chain`, return their source."""
        op, count = self.graph.maker(name), math.prod(self.graph.shapes[name])
        while op is not None and op.kind in (*_VIEWS, "Expand") and math.prod(self.graph.shapes[op.inputs[0]]) == count:
            self.chain.append(op)
            name, op = op.inputs[0], self.graph.maker(op.inputs[0])
        return name

    def deviation(self, name: str) -> tuple[str, float, list[int]] | None:
        """Return x, eps and axes for the value ``sqrt(mean(x ** 2, axes) + eps)``; None for other values."""
        root = self.maker(name, "Sqrt")
        added = root and self.maker(root.inputs[0], "Add")
        value, eps = _operands(self.graph, added) if added else ("", None)
        mean = None if eps is None else self.maker(self.viewed(value), "ReduceMean")
        square = mean and self.maker(mean.inputs[0], "Mul", "Pow")
        if eps is None or not mean or not square:
            return None
        x, other = square.inputs
        # The mean must have the reduced axes with extent 1, by itself or by a view of it.
        kept = [1 if axis in _axes(self.graph, mean) else n for axis, n in enumerate(self.graph.shapes[x])]
        if self.graph.shapes[value] != tuple(kept):
            return None
        squares = _number(self.graph, other) == 2 if square.kind == "Pow" else other == x
        return (x, eps, _axes(self.graph, mean)) if squares else None

    def centered(self, name: str, axes: list[int]) -> str:
        """Return x for the value ``x - mean(x, axes)``, else an empty name."""
        difference = self.maker(name, "Sub")
        mean = difference and self.maker(difference.inputs[1], "ReduceMean")
        if not difference or not mean or not mean.attributes.get("keepdims", 1):
            return ""
        return mean.inputs[0] if mean.inputs[0] == difference.inputs[0] and _axes(self.graph, mean) == axes else ""


def _norm_by_parts(graph: Graph, op: OnnxNode) -> None:
    """Recognize (x - mean) / sqrt(mean((x - mean) ** 2) + eps), and x / sqrt(mean(x ** 2) + eps), over channels or
    over space, with the factor and the summand per channel after it.
    """
    search = _NormByParts(graph)
    sides = search.divided(op)
    below = sides and search.deviation(sides[1])
    if not sides or not below:
        return
    value, (inner, eps, axes) = sides[0], below
    outer = search.centered(inner, axes)
    x, rank = outer or inner, len(graph.shapes[inner])
    fits = value == inner or (outer and search.centered(value, axes) == x)
    chain = [*search.chain, op]
    # A norm without mean (RMS) is over channels only.
    if not fits or not _only_read_within(graph, chain) or axes not in ([1], list(range(2, rank)) if outer else [1]):
        return
    affine = ["", ""]
    # The factor after an RMS norm stays a layer of its own.
    for i, kind in enumerate(("Mul", "Add") if outer else ()):
        after = graph.only_reader(chain[-1].outputs[0])
        other = next((n for n in after.inputs if n != chain[-1].outputs[0]), "") if after is not None else ""
        if after is None or after.kind != kind or not per_channel(graph, other, rank, graph.shapes[x][1]):
            break
        if graph.constants[other].origin != "parameter":
            break
        chain.append(after)
        affine[i] = other
    attributes = {"epsilon": eps, "axis": 1, "centered": bool(outer)}
    kind = "NormOverChannels" if axes == [1] else "InstanceNormalization"
    new = chain[-1].changed(kind=kind, inputs=(x, *affine) if outer else (x,), attributes=attributes)
    graph.replace(chain, new)


#: These rules run before scalars are joined and factors of 1 are removed.
DECOMPOSED = (
    _local_response_norm,
    _limits,
    _stacked,
    _kept_axis,
    _expanded,
    _softplus,
    _softplus_by_parts,
    _norm_by_parts,
)


#: The order matters: a factor after a norm belongs to the norm.
RULES: Sequence[Callable[[Graph, OnnxNode], None]] = (
    *SPATIAL,
    *DECOMPOSED,
    _nothing,
    _same_by_strides,
    _pixels,
    _channel_shuffle,
    _group_norm,
    _gated_by_itself,
    _gelu,
    _linear,
    _affine,
    _random_factors,
    _channel_scale,
    attention,
    _residual,
    _activation,
)
